"""Logits to calibrate: the shipped models' and the public ones, as bundles of validation and test split."""

from __future__ import annotations

from smartlib.data.bundles import Bundle, Head, Split, load, names

__all__ = ["Bundle", "Head", "Split", "load", "names"]
