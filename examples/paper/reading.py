"""The results under `results`: read, chosen and averaged, for the page and the README."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
EPSILONS = (2.0, 4.0, 8.0)
EMPTY = "–"
# What the recipe gave for 20,000 rows of SST-2 at ε = 2 when it aimed at a travel of 300 in 5 epochs: runs with other
# options, which are compared with each other, share it.
CONTROL = {"learning_rate": 0.0079, "num_train_epochs": 5}
TASK_TITLES = {
    "sst2": "SST-2, evaluated on its dev set and labeled test set (2,693 rows)",
    "pairs": "Question–sentence pairs from SQuAD, evaluated on QNLI's dev set (5,463 rows)",
}
METHOD_TITLES = {
    "recipe": '**`DCSGDTrainingArguments("out", target_epsilon=ε)`**: nothing else given',
    "dc_sgd_e": "DC-SGD-E, the paper's setting",
    "fixed": "DP-SGD, the paper's setting, best C of those run",
    "dc_sgd_p": "DC-SGD-P, the paper's setting, best p of those run",
    "andrew": "Andrew et al., defaults",
    "du": "Du et al., defaults",
    "auto_clip": "AUTO-S",
}

Result = dict[str, Any]


def read_results(model: str | None = None) -> list[Result]:
    """Read all runs with a model, in the order of their names; None for those with the model that is not named."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    return [r for r in found if isinstance(r, dict) and "setting" in r and r["setting"].get("model") == model]


def mean_and_error(values: Sequence[float]) -> str:
    """Say a mean in percent, with its standard error and the number of runs."""
    if not values:
        return EMPTY
    mean = 100 * statistics.mean(values)
    if len(values) == 1:
        return f"{mean:.1f}"
    error = 100 * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.1f} ± {error:.1f} ({len(values)})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    lines = [list(header), ["---"] * len(header), *map(list, rows)]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def by_options(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Group runs that differ in their seed alone."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[json.dumps(result["setting"]["options"], sort_keys=True)].append(result)
    return groups


def winner(groups: dict[str, list[Result]]) -> str:
    """Return the options with the best mean; of `by_options`."""
    return max(groups, key=lambda options: statistics.mean(result["accuracy"] for result in groups[options]))


def best(results: Iterable[Result]) -> str:
    """Say the best mean over the options that were tried, and which they are."""
    groups = by_options(results)
    if not groups:
        return EMPTY
    options = winner(groups)
    shown = _shown(options)
    tried = f", of {len(groups)}" if len(groups) > 1 else ""
    text = mean_and_error([result["accuracy"] for result in groups[options]])
    return f"{text} [{shown}{tried}]" if shown else text


def spread(results: Iterable[Result]) -> str:
    """Say the lowest and the highest mean over the options that were tried, and which they are."""
    means = {options: statistics.mean(r["accuracy"] for r in runs) for options, runs in by_options(results).items()}
    if len(means) < 2:
        return EMPTY
    low, high = (f"{100 * means[o]:.1f} [{_shown(o)}]" for o in (min(means, key=means.get), max(means, key=means.get)))
    return f"{low} to {high}, of {len(means)}"


def _shown(options: str) -> str:
    """Say the options that a grid is over, of a name in `by_options`."""
    return ", ".join(f"{_SHORT[name]} = {value:g}" for name, value in json.loads(options).items() if name in _SHORT)


# What a grid is over, as tables call it; other options are the same in all runs of a method.
_SHORT = {"clip_threshold": "C", "percentile": "p", "learning_rate": "rate"}


def chosen(results: Iterable[Result], **wanted: Any) -> list[Result]:
    """Return the runs whose settings have these values."""
    return [r for r in results if all(r["setting"][name] == value for name, value in wanted.items())]
