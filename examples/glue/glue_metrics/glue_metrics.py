"""GLUE's metrics as an `evaluate` module that is kept here, so that it loads without a network.

`evaluate.load("…/glue_metrics", "mrpc")`: the config is a GLUE task, or `classification` / `regression` for data of
your own.
"""

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_squared_error

REGRESSION = ("stsb", "regression")
F1_AVERAGE = {"mrpc": "binary", "qqp": "binary", "classification": "macro"}
CONFIGS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "classification", "regression")


class GlueMetrics(evaluate.Metric):
    """predictions: label ids, or scores for regression. Returns plain floats in [-1, 1] (and the squared error)."""

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in CONFIGS:
            raise ValueError(f"expected the config to be one of {', '.join(CONFIGS)}, got {self.config_name!r}")
        kind = datasets.Value("float32" if self.config_name in REGRESSION else "int64")
        return evaluate.MetricInfo(
            description="The metrics of the GLUE benchmark.",
            citation="Wang et al. 2019: GLUE: A Multi-Task Benchmark and Analysis Platform for NLU",
            inputs_description="predictions and references, one value per example",
            features=datasets.Features({"predictions": kind, "references": kind}),
        )

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        predictions, references = np.asarray(predictions), np.asarray(references)
        if self.config_name in REGRESSION:
            return _regression(predictions, references, with_error=self.config_name == "regression")
        if self.config_name == "cola":
            return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}
        values = {"accuracy": float(accuracy_score(references, predictions))}
        if self.config_name in F1_AVERAGE:
            average = F1_AVERAGE[self.config_name]
            values["f1"] = float(f1_score(references, predictions, average=average, zero_division=0.0))
        return values


def _regression(predictions: np.ndarray, references: np.ndarray, *, with_error: bool) -> dict[str, float]:
    # The correlation with a constant is not defined; a model that says the same for all has learnt nothing: 0.
    constant = any(len(values) < 2 or np.all(values == values[0]) for values in (predictions, references))
    values = {
        "pearson": 0.0 if constant else float(pearsonr(predictions, references)[0]),
        "spearmanr": 0.0 if constant else float(spearmanr(predictions, references)[0]),
    }
    if with_error:
        values["mean_squared_error"] = float(mean_squared_error(references, predictions))
    return values
