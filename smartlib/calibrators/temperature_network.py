"""A small network from the inputs of a sample to its temperature, and its gradient.

    T = softplus( h @ v + c ) + 0.1,    h = relu( ... relu( x @ W1 + b1 ) ... )

The parameters are one vector: weights and biases of each hidden layer in turn, then v and c.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.special import expit

from smartlib.arrays import row_chunks

MIN_TEMPERATURE = 0.1
_LAYERS = ("hidden", "second_hidden")


def check_hidden(hidden: Any) -> tuple[int, ...]:
    """The widths of the hidden layers; raises ValueError where they are not one or two whole numbers >= 1."""
    if not (
        isinstance(hidden, tuple | list)
        and 1 <= len(hidden) <= len(_LAYERS)
        and all(isinstance(width, int | np.integer) and not isinstance(width, bool) and width >= 1 for width in hidden)
    ):
        raise ValueError(f"hidden must hold the widths of one or two hidden layers, for instance (16,), got {hidden!r}")
    return tuple(int(width) for width in hidden)


def count_parameters(n_inputs: int, hidden: tuple[int, ...]) -> int:
    """How many numbers the network has.

    >>> count_parameters(1, (16,)), count_parameters(1, (16, 16)), count_parameters(10, (5, 5))
    (49, 321, 91)
    """
    widths = (n_inputs, *hidden, 1)
    return sum((before + 1) * after for before, after in pairwise(widths))


def split(theta: np.ndarray, n_inputs: int, hidden: tuple[int, ...]) -> list[tuple]:
    """Weights and biases of the layers as views: (D, H1), (H1,), ..., and (H,) and a number for the output."""
    layers, at = [], 0
    for before, after in zip((n_inputs, *hidden[:-1]), hidden, strict=True):
        end = at + before * after
        layers.append((theta[at:end].reshape(before, after), theta[end : end + after]))
        at = end + after
    return [*layers, (theta[at:-1], theta[-1])]


def temperature(theta: np.ndarray, x: np.ndarray, hidden: tuple[int, ...]) -> np.ndarray:
    """T (N,) at inputs x (N, D)."""
    result = np.empty(len(x))
    for rows in row_chunks(len(x), max(hidden)):
        result[rows] = _softplus(_forward(theta, x[rows], hidden)[1]) + MIN_TEMPERATURE
    return result


def temperature_and_backward(
    theta: np.ndarray, x: np.ndarray, hidden: tuple[int, ...]
) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """T (N,) at inputs x (N, D), and the function from dH/dT (N,) to dH/dtheta (P,)."""
    *layers, (v, _) = split(theta, x.shape[1], hidden)
    activations, u = _forward(theta, x, hidden)

    def backward(grad_t: np.ndarray) -> np.ndarray:
        grad_u = grad_t * expit(u)
        parts = [grad_u @ activations[-1], [grad_u.sum()]]
        # The gradient at the input of a layer's relu is (active * scale), where scale belongs to the layer's units.
        active, scale = (activations[-1] > 0) * grad_u[:, None], v
        for depth in reversed(range(len(layers))):
            below = activations[depth]
            parts = [((below.T @ active) * scale).ravel(), active.sum(axis=0) * scale, *parts]
            if depth:
                active, scale = (below > 0) * ((active * scale) @ layers[depth][0].T), 1.0
        return np.concatenate(parts)

    return _softplus(u) + MIN_TEMPERATURE, backward


def _forward(theta: np.ndarray, x: np.ndarray, hidden: tuple[int, ...]) -> tuple[list[np.ndarray], np.ndarray]:
    """The inputs of each layer, and u (N,), of which the softplus is taken."""
    *layers, (v, c) = split(theta, x.shape[1], hidden)
    activations = [x]
    for weight, bias in layers:
        activations.append(np.maximum(activations[-1] @ weight + bias, 0.0))
    return activations, activations[-1] @ v + c


def constant(t: float) -> float:
    """The output's bias c at which a network with v = 0 gives the temperature ``t`` > 0.1 everywhere."""
    u = t - MIN_TEMPERATURE
    return u + np.log(-np.expm1(-u))


def _softplus(u: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, u)


# --- as attributes of a fitted calibrator ---------------------------------------------------------------------------


def attribute_names(n_layers: int) -> tuple[str, ...]:
    """Under which names a calibrator keeps the parameters of a network with so many hidden layers.

    >>> attribute_names(1)
    ('hidden_weight_', 'hidden_bias_', 'output_weight_', 'output_bias_')
    """
    return tuple(f"{layer}_{kind}_" for layer in (*_LAYERS[:n_layers], "output") for kind in ("weight", "bias"))


def store_parameters(calibrator: Any, theta: np.ndarray, n_inputs: int, hidden: tuple[int, ...]) -> None:
    """Keep the parameters as attributes; those of an earlier fit are forgotten. With one input, W1 becomes (H1,)."""
    for name in attribute_names(len(_LAYERS)):
        vars(calibrator).pop(name, None)
    (weight, bias), *others, (v, c) = split(theta.copy(), n_inputs, hidden)
    values = [
        weight[0] if n_inputs == 1 else weight,
        bias,
        *(value for layer in others for value in layer),
        v,
        float(c),
    ]
    for name, value in zip(attribute_names(len(hidden)), values, strict=True):
        setattr(calibrator, name, value)


def stored_parameters(calibrator: Any) -> tuple[np.ndarray, tuple[int, ...]]:
    """The parameters of a fitted calibrator as one vector (P,), and the widths of its hidden layers."""
    hidden = tuple(
        len(getattr(calibrator, f"{name}_bias_")) for name in _LAYERS if hasattr(calibrator, f"{name}_bias_")
    )
    return np.concatenate([np.ravel(getattr(calibrator, name)) for name in attribute_names(len(hidden))]), hidden
