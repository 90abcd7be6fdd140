"""Put the accuracies of the results page into the README's table of numbers, as its first row.

`results_page.py` writes and checks it together with its page. Only what was run is told: ε without a run of the
recipe, DP-SGD or a ceiling that are missing are left out.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from reading import Result, by_options, chosen

README = Path(__file__).parents[2] / "README.md"
PLACE = re.compile(r"(?<=<!-- numbers -->\n\| \| \|\n\|---\|---\|\n)(?:\| \*\*accuracy\*\* .*\n)?")
TASK, SIZES = "sst2", (None, 20_000)  # all training rows, and some


def with_row(text: str, results: list[Result]) -> str:
    """Return the README with its row."""
    return PLACE.sub(lambda _: row(results), text, count=1)


def row(results: list[Result]) -> str:
    """Return the row, or nothing where the recipe was not run."""
    told = [text for rows in SIZES if (text := _on(chosen(results, task=TASK, rows=rows)))]
    return f"| **accuracy** | {'; '.join(told)} (a small BERT; [accuracy](docs/results.md)) |\n" if told else ""


def _on(here: list[Result]) -> str:
    """Say what some number of rows gives."""
    told = [text for epsilon in (2.0, 8.0) if (text := _at(here, epsilon))]
    if not told:
        return ""
    ceiling = _means(chosen(here, method="non_private"))
    if ceiling:
        told.append(f"without privacy {max(ceiling):.1f}%")
    size = next(r["plan"]["dataset_size"] for r in here if "plan" in r)
    return f"SST-2, {size:,} rows: {', '.join(told)}"


def _at(results: list[Result], epsilon: float) -> str:
    """Say what one ε buys, beside DP-SGD with the best of its thresholds."""
    ours = [r for r in chosen(results, method="recipe", epsilon=epsilon) if not r["setting"]["options"]]
    if not ours:
        return ""
    runs = f"mean of {len(ours)} runs" if len(ours) > 1 else "one run"
    text = f"{_mean(ours):.1f}% at ε = {epsilon:g} with nothing tuned ({runs})"
    grid = chosen(results, method="fixed", epsilon=epsilon)
    tried = _means([r for r in grid if set(r["setting"]["options"]) == {"clip_threshold"}])
    if len(tried) < 2:
        return text
    return f"{text} beside {max(tried):.1f}% of DP-SGD with the best of {len(tried)} thresholds"


def _means(results: list[Result]) -> list[float]:
    return [_mean(runs) for runs in by_options(results).values()]


def _mean(runs: list[Result]) -> float:
    return 100 * statistics.mean(r["accuracy"] for r in runs)
