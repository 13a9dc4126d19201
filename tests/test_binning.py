"""Histogram binning, isotonic regression and BBQ: hand cases, direct formulas, and two libraries beside them.

What all calibrators of the confidence have in common is in test_calibrator_base.py.
"""

import itertools
import tracemalloc
from math import ceil, exp, floor, lgamma

import numpy as np
import pytest
from netcal.binning import BBQ as NetcalBBQ
from netcal.binning import HistogramBinning as NetcalHistogramBinning
from netcal.binning import IsotonicRegression as NetcalIsotonicRegression
from sklearn.isotonic import IsotonicRegression

from smartlib.calibrators import CalibrationWarning
from smartlib.calibrators.binning import BBQ, HistogramBinning, IsotonicCalibration
from smartlib.data.synthetic import Population
from smartlib.metrics import bin_edges, reliability_bins
from smartlib.toplabel import confidence_of

POPULATION = Population(slope=0.6)


def two_classes(confidence, correct):
    """Logits with these confidences, (N, 2), and labels of class 0 where correct."""
    f = np.asarray(confidence, dtype=float)
    with np.errstate(divide="ignore"):
        return np.log(np.stack([f, 1 - f], axis=1)), 1 - np.asarray(correct, dtype=int)


def four_classes(confidence):
    f = np.asarray(confidence, dtype=float)[:, None]
    return np.log(np.concatenate([f, np.repeat((1 - f) / 3, 3, axis=1)], axis=1))


@pytest.fixture(scope="module")
def data():
    """Logits, labels, confidences and correctness of 5,000 over-confident predictions."""
    split = POPULATION.sample(5000, seed=0)
    correct = split.logits.argmax(axis=1) == split.labels
    return split.logits, split.labels, confidence_of(split.logits, 1.0), correct.astype(int)


@pytest.fixture(scope="module")
def fresh():
    logits = POPULATION.sample(20_000, seed=1).logits
    return logits, confidence_of(logits, 1.0)


# --- histogram binning --------------------------------------------------------------------------------------------


def test_hand_case_of_five_bins():
    """.55 and .6 lie in (.4, .6], one of them right; .61 alone in (.6, .8], right; .9 and 1 in (.8, 1], one right.

    The logarithm and the softmax move .6 by a rounding, which must not move it over the edge.
    """
    logits, labels = two_classes([0.55, 0.6, 0.61, 0.9, 1.0], [1, 0, 1, 1, 0])
    labels[4] = 0  # a certain prediction cannot be wrong here: -inf is the other logit
    hb = HistogramBinning(n_bins=5).fit(logits, labels)
    assert hb.edges_.tolist() == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert hb.count_.tolist() == [0, 0, 2, 1, 2]
    assert hb.accuracy_.tolist() == [0, 0, 0.5, 1, 1]
    np.testing.assert_allclose(
        hb.predict_proba(logits), [[0.5, 0.5], [0.5, 0.5], [1, 0], [1, 0], [1, 0]], rtol=0, atol=1e-15
    )
    assert hb.n_parameters == 3


def test_in_an_empty_bin_a_confidence_stays_as_it_is():
    """Bins (0, 1/3], (1/3, 2/3], (2/3, 1]: nothing in the first; one of two right in the second."""
    logits = four_classes([0.5, 0.6, 0.7, 0.9, 0.8])
    hb = HistogramBinning(n_bins=3).fit(logits, [0, 1, 0, 0, 1])
    with pytest.warns(
        CalibrationWarning, match=r"50\.0% of the confidences lie outside the fitted range 0\.5 \.\. 0\.9"
    ):
        probs = hb.predict_proba(four_classes([0.3, 0.6]))
    np.testing.assert_allclose(probs.max(axis=1), [0.3, 0.5], rtol=1e-12)


def test_hand_case_of_equal_mass():
    """Two bins of six samples: the edge is the fourth confidence, as in AdaECE, which belongs to the lower bin."""
    logits, labels = two_classes([0.95, 0.55, 0.7, 0.8, 0.6, 0.9], [1, 1, 0, 0, 0, 1])
    hb = HistogramBinning(n_bins=2, binning="mass").fit(logits, labels)
    np.testing.assert_allclose(hb.edges_, [0, 0.8, 1], atol=1e-12)
    assert hb.count_.tolist() == [4, 2]
    assert hb.accuracy_.tolist() == [0.25, 1]
    assert hb.n_parameters == 3  # two accuracies and the edge


@pytest.mark.parametrize("binning", ["width", "mass"])
@pytest.mark.parametrize("n_bins", [1, 7, 15])
def test_bins_are_those_of_the_reliability_diagram(binning, n_bins, data):
    logits, labels, f, correct = data
    hb = HistogramBinning(n_bins=n_bins, binning=binning).fit(logits, labels)
    bins = reliability_bins(f, correct, n_bins, binning)
    np.testing.assert_array_equal(hb.count_, bins.count)
    np.testing.assert_allclose(hb.accuracy_[hb.count_ > 0], bins.accuracy[bins.count > 0], rtol=1e-12)
    np.testing.assert_allclose(hb.edges_, bins.edges, atol=1e-12)


def test_agrees_with_netcal_except_in_empty_bins(data, fresh):
    """netcal returns the middle of an empty bin, ours the confidence itself."""
    logits, labels, f, correct = data
    other = NetcalHistogramBinning(bins=15)
    other.fit(f, correct)
    hb = HistogramBinning().fit(logits, labels)
    ours, theirs = hb._confidence(fresh[1]), other.transform(fresh[1])
    bin_of = np.ceil(fresh[1] * 15).astype(int) - 1
    empty = hb.count_[bin_of] == 0
    np.testing.assert_allclose(ours[~empty], theirs[~empty], atol=1e-6)
    assert 0 < empty.mean() < 0.01
    np.testing.assert_allclose(theirs[empty], (bin_of[empty] + 0.5) / 15, rtol=1e-12)
    np.testing.assert_array_equal(ours[empty], fresh[1][empty])


def test_equal_mass_bins_of_netcal_end_within_one_sample_of_ours(data):
    """Its quantiles are those of numpy, at (N - 1) q in the sorted sample; ours, at N q, are those of AdaECE."""
    logits, labels, f, correct = data
    other = NetcalHistogramBinning(bins=15, equal_intervals=False)
    other.fit(f, correct)
    edges = HistogramBinning(binning="mass").fit(logits, labels).edges_
    rank = [np.searchsorted(np.sort(f), e) for e in (edges[1:-1], other._bin_bounds[0][1:-1])]
    assert np.abs(rank[0] - rank[1]).max() <= 1


@pytest.mark.parametrize("n_bins", [0, -1, 2.5, "15", True, None])
def test_a_number_of_bins_that_is_none_is_refused_at_the_fit(n_bins, data):
    hb = HistogramBinning(n_bins=n_bins)
    assert hb.get_params() == {"n_bins": n_bins, "binning": "width"}
    with pytest.raises(ValueError, match="n_bins must be a whole number of at least 1, got " + repr(n_bins)):
        hb.fit(*data[:2])


def test_an_unknown_binning_is_refused_at_the_fit(data):
    with pytest.raises(ValueError, match="""binning must be "width" or "mass", got 'quantile'"""):
        HistogramBinning(binning="quantile").fit(*data[:2])
    with pytest.raises(TypeError):
        HistogramBinning(15)


@pytest.mark.parametrize("binning", ["width", "mass"])
def test_fewer_distinct_confidences_than_bins_are_reported(binning, recwarn):
    logits, labels = two_classes(np.repeat(np.linspace(0.6, 0.9, 4), 5), np.tile([1, 1, 1, 0, 1], 4))
    HistogramBinning(n_bins=4, binning=binning).fit(logits, labels)
    assert not recwarn
    with pytest.warns(CalibrationWarning, match=r"20 samples with 4 distinct confidence\(s\), fewer than the 5 bins"):
        HistogramBinning(n_bins=5, binning=binning).fit(logits, labels)


# --- isotonic regression ------------------------------------------------------------------------------------------


def test_hand_case_of_isotonic_regression():
    """Wrong, right, wrong, right: the two in the middle violate the order and share 1/2."""
    ir = IsotonicCalibration().fit(four_classes([0.6, 0.7, 0.8, 0.9]), [1, 0, 2, 0])
    np.testing.assert_allclose(ir.confidence_, [0.6, 0.7, 0.8, 0.9], atol=1e-12)
    assert ir.accuracy_.tolist() == [0, 0.5, 0.5, 1]
    assert ir.n_parameters == 8
    f = np.array([0.3, 0.6, 0.65, 0.75, 0.85, 0.88, 0.95])
    with pytest.warns(CalibrationWarning, match="outside the fitted range"):
        probs = ir.predict_proba(four_classes(f))
    # 0 and .25 are raised to a quarter, the least of four classes (.65: half way from 0 to .5).
    np.testing.assert_allclose(probs.max(axis=1), [0.25, 0.25, 0.25, 0.5, 0.75, 0.9, 1], atol=1e-11)


def test_equal_confidences_share_their_accuracy():
    logits, labels = two_classes([0.6, 0.6, 0.6, 0.9, 0.9], [1, 0, 0, 1, 1])
    ir = IsotonicCalibration().fit(logits, labels)
    np.testing.assert_allclose(ir.predict_proba(logits)[:, 0], [0.5, 0.5, 0.5, 1, 1], atol=1e-12)  # 1/3 is raised
    np.testing.assert_allclose(ir.accuracy_, [1 / 3, 1], rtol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_fit_is_the_maximum_of_minima_of_means(seed):
    """Isotonic least squares at i is max over s <= i of min over t >= i of the mean of y[s..t]."""
    rng = np.random.default_rng(seed)
    f = np.sort(rng.uniform(0.5, 1, 25))
    correct = (rng.random(25) < f - 0.1).astype(int)
    expected = [
        max(min(correct[s : t + 1].mean() for t in range(i, 25)) for s in range(i + 1)) for i in range(25)
    ]  # fmt: skip
    ir = IsotonicCalibration().fit(*two_classes(f, correct))
    np.testing.assert_allclose(ir._confidence(f), expected, atol=1e-12)


def test_agrees_with_netcal_and_scikit_learn(data, fresh):
    logits, labels, f, correct = data
    ours = IsotonicCalibration().fit(logits, labels)._confidence(fresh[1])
    other = NetcalIsotonicRegression()
    other.fit(f, correct)
    np.testing.assert_allclose(ours, other.transform(fresh[1]), atol=1e-6)
    np.testing.assert_allclose(
        ours, IsotonicRegression(out_of_bounds="clip").fit(f, correct).predict(fresh[1]), atol=1e-6
    )
    assert (np.diff(ours[np.argsort(fresh[1])]) >= 0).all()


# --- BBQ ----------------------------------------------------------------------------------------------------------


def test_hand_case_of_two_models():
    """.6 wrong, .8 right; one or two bins.

    One bin [0, 1], a = 2, p = 1/2: G(2)/G(4) G(2)/G(1) G(2)/G(1) = 1/6; accuracy (1 + 1) / (2 + 2) = 1/2.
    Two bins [0, .8] with both samples (the edge is the second one, as in AdaECE) and (.8, 1] with none, a = 1:
    p = .4: G(1)/G(3) G(1.4)/G(.4) G(1.6)/G(.6) = .4 * .6 / 2 = .12; accuracies (1 + .4) / (2 + 1) and the prior's .9.
    """
    logits, labels = two_classes([0.6, 0.8], [0, 1])
    with pytest.warns(
        CalibrationWarning, match=r"2 samples with 2 distinct confidence\(s\), fewer than the 12 bins of"
    ):
        bbq = BBQ().fit(logits, labels)
    assert bbq.n_bins_.tolist() == [1, 2]
    w = np.array([1 / 6, 0.12]) / (1 / 6 + 0.12)
    np.testing.assert_allclose(bbq.weight_, w, rtol=1e-12)
    np.testing.assert_allclose(bbq.edges_, [0, 0.8, 1], atol=1e-12)
    np.testing.assert_allclose(bbq.accuracy_, [w @ [0.5, 1.4 / 3], w @ [0.5, 0.9]], rtol=1e-12)
    assert bbq.n_parameters == 3


def direct_bbq(f, correct, at):
    """The formulas of the docstring one by one, for all models, sample by sample; also the models' probabilities.

    Edges have twelve decimals as ours: many would be a sample but for the last digit.
    """
    n = len(f)
    models = range(max(ceil(n ** (1 / 3) / 10), 1), min(floor(10 * n ** (1 / 3)), len(set(f.tolist()))) + 1)
    logs, values = [], []
    for n_bins in models:
        edges = sorted(set(bin_edges(f, n_bins, "mass").round(12).tolist()))
        log_p, value = 0.0, np.full(len(at), np.nan)
        for lo, hi in itertools.pairwise(edges):
            inside = [c for x, c in zip(f, correct, strict=True) if lo < x <= hi]
            a = 2 / (len(edges) - 1)
            p = a * (lo + hi) / 2
            m, k = sum(inside), len(inside)
            log_p += lgamma(a) - lgamma(k + a) + lgamma(m + p) - lgamma(p) + lgamma(k - m + a - p) - lgamma(a - p)
            value[(lo < at) & (at <= hi)] = (m + p) / (k + a)
        logs.append(log_p)
        values.append(value)
    weight = np.array([exp(v - max(logs)) for v in logs])
    return weight / weight.sum() @ np.array(values), weight / weight.sum()


@pytest.mark.parametrize("n, decimals", [(40, 9), (40, 1), (300, 9), (300, 2)])
def test_agrees_with_the_formulas_sample_by_sample_with_and_without_ties(n, decimals):
    rng = np.random.default_rng(n)
    f = rng.uniform(0.51, 0.94, n).round(decimals)
    correct = (rng.random(n) < f - 0.15).astype(int)
    at = rng.uniform(0.5, 1, 200)
    logits, labels = two_classes(f, correct)
    if len(np.unique(f)) < 10 * n ** (1 / 3) - 1:
        with pytest.warns(CalibrationWarning, match="bins of its finest model"):
            bbq = BBQ().fit(logits, labels)
    else:
        bbq = BBQ().fit(logits, labels)
    value, weight = direct_bbq(f, correct, at)
    np.testing.assert_allclose(bbq.weight_, weight, rtol=1e-8)
    with pytest.warns(CalibrationWarning, match="outside the fitted range"):
        ours = bbq._confidence(at)
    np.testing.assert_allclose(ours, value, atol=1e-9)


@pytest.mark.parametrize(
    "n, least, most", [(999, 1, 99), (1000, 1, 100), (1001, 2, 100), (8000, 2, 200), (50_000, 4, 368)]
)
def test_the_numbers_of_bins_lie_between_a_tenth_and_ten_times_the_cube_root(n, least, most):
    rng = np.random.default_rng(0)
    f = rng.uniform(0.55, 0.95, n)
    logits, labels = two_classes(f, rng.random(n) < f)
    tracemalloc.start()
    try:
        bbq = BBQ().fit(logits, labels)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert bbq.n_bins_.tolist() == list(range(least, most + 1))
    assert bbq.weight_.sum() == pytest.approx(1, abs=1e-12)
    assert peak < 200 * n + 4e6  # far from N x models or N x N


def test_no_average_reaches_zero_or_one_even_where_all_are_right():
    """Three hundred sure ones, all right; the prior keeps away from certainty (in float64), unlike the other two."""
    f = np.concatenate([np.linspace(0.55, 0.8, 100), np.linspace(0.9, 0.999, 300)])
    logits, labels = two_classes(f, np.concatenate([np.arange(100) % 2, np.ones(300, dtype=int)]))
    top = BBQ().fit(logits, labels).predict_proba(logits[-1:])[0, 0]
    assert 0.99 < top < 1
    assert HistogramBinning().fit(logits, labels).predict_proba(logits[-1:])[0, 0] == 1
    assert IsotonicCalibration().fit(logits, labels).predict_proba(logits[-1:])[0, 0] == 1


def test_netcal_averages_other_binnings_and_agrees_with_ours_on_the_average(data, fresh):
    """netcal's BBQ takes bins of equal width, the BIC for P(data | B), no prior, and drops models by an elbow rule.

    Here its best model has 17 bins of equal width, of which the highest holds half of all samples; ours has four bins
    of equal mass, of which the lowest reaches up to .856. So each is finer where the other is coarse, and single
    confidences differ by .04 in the mean. Averaged over the samples of a coarse bin the two must agree.
    """
    logits, labels, f, correct = data
    other = NetcalBBQ()
    other.fit(f, correct)
    bbq = BBQ().fit(logits, labels)
    assert bbq.n_bins_[bbq.weight_.argmax()] == 4
    ours, theirs = bbq._confidence(fresh[1]), other.transform(fresh[1])
    assert 0.02 < np.abs(ours - theirs).mean() < 0.06
    for coarse in (fresh[1] <= 0.855, fresh[1] > 16 / 17, fresh[1] > 0):
        assert ours[coarse].mean() == pytest.approx(theirs[coarse].mean(), abs=0.015)
    truth = POPULATION.accuracy(np.minimum(fresh[1], 1 - 1e-15))
    before = np.abs(fresh[1] - truth).mean()
    assert max(np.abs(ours - truth).mean(), np.abs(theirs - truth).mean()) < 0.6 * before
