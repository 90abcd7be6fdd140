"""Compute the metrics of a task by an `evaluate` module that needs no network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_squared_error


def _correlation(kind: Callable[..., tuple[float, float]], references: np.ndarray, predictions: np.ndarray) -> float:
    """Return 0 where it is undefined: a model that says the same for all has learned nothing."""
    constant = any(np.all(values == values[0]) for values in (references, predictions))
    return 0.0 if constant else kind(references, predictions)[0]


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": accuracy_score,
    "f1": partial(f1_score, zero_division=0.0),
    "f1_macro": partial(f1_score, average="macro", zero_division=0.0),
    "matthews_correlation": matthews_corrcoef,
    "pearson": partial(_correlation, pearsonr),
    "spearmanr": partial(_correlation, spearmanr),
    "mean_squared_error": mean_squared_error,
}


class TextMetrics(evaluate.Metric):
    """The metrics that `config_name` lists, separated by commas. Predictions are label ids, or scores."""

    def _info(self) -> evaluate.MetricInfo:
        kind = datasets.Value("float32" if "pearson" in self.config_name else "int64")
        return evaluate.MetricInfo(
            description="The metrics of the GLUE benchmark.",
            citation="Wang et al. 2019: GLUE: A Multi-Task Benchmark and Analysis Platform for NLU",
            inputs_description="predictions and references, one value per example",
            features=datasets.Features({"predictions": kind, "references": kind}),
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        values = np.asarray(references), np.asarray(predictions)
        return {name.removesuffix("_macro"): float(METRICS[name](*values)) for name in self.config_name.split(",")}
