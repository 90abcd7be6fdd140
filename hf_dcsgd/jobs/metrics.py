"""Compute the metrics of a task, with numpy and scipy alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr


def _ratio(part: float, whole: float) -> float:
    """Return 0 where it is undefined."""
    return float(part / whole) if whole else 0.0


def _f1(references: np.ndarray, predictions: np.ndarray, label: int = 1) -> float:
    both = np.sum((references == label) & (predictions == label))
    return _ratio(2 * both, np.sum(references == label) + np.sum(predictions == label))


def _f1_macro(references: np.ndarray, predictions: np.ndarray) -> float:
    labels = np.union1d(references, predictions)
    return float(np.mean([_f1(references, predictions, label) for label in labels]))


def _correlation(kind: Callable[..., tuple[float, float]], references: np.ndarray, predictions: np.ndarray) -> float:
    """Return 0 where it is undefined: a model that says the same for all has learned nothing."""
    constant = any(np.all(values == values[0]) for values in (references, predictions))
    return 0.0 if constant else float(kind(references, predictions)[0])


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": lambda references, predictions: float(np.mean(references == predictions)),
    "f1": _f1,
    "f1_macro": _f1_macro,
    # Of two labels, Matthews' coefficient is Pearson's.
    "matthews_correlation": partial(_correlation, pearsonr),
    "pearson": partial(_correlation, pearsonr),
    "spearmanr": partial(_correlation, spearmanr),
    "mean_squared_error": lambda references, predictions: float(np.mean((references - predictions) ** 2)),
}


def text_metrics(names: Sequence[str], predictions: Any, references: Any) -> dict[str, float]:
    """Return the named metrics of label ids, or of scores."""
    values = np.asarray(references, dtype=float), np.asarray(predictions, dtype=float)
    return {name.removesuffix("_macro"): METRICS[name](*values) for name in names}


def spans_of(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """Return the spans that tags mark, as (start, end, kind).

    Tags with B- and I- prefixes mark spans: one begins at B-, at a change of kind, and after O. Among tags without
    prefixes, other than O, each marks a span of its own.
    """
    spans, start, kind = set(), 0, ""
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        goes_on = prefix == "I" and name == kind
        if kind and not goes_on:
            spans.add((start, place, kind))
        if not goes_on:
            start, kind = place, "" if tag == "O" else name if prefix in ("B", "I") and name else tag
    return spans


def span_metrics(predicted: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return precision, recall and F1 of whole spans, and the accuracy of single tags."""
    pairs = [(spans_of(made), spans_of(right)) for made, right in zip(predicted, wanted, strict=True)]
    found = sum(len(made & right) for made, right in pairs)
    made, right = (sum(len(pair[side]) for pair in pairs) for side in (0, 1))
    same = [one == other for row in zip(predicted, wanted, strict=True) for one, other in zip(*row, strict=True)]
    return {
        "precision": _ratio(found, made),
        "recall": _ratio(found, right),
        "f1": _ratio(2 * found, made + right),
        "accuracy": _ratio(sum(same), len(same)),
    }
