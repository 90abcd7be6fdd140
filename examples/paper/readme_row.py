"""Put the accuracies of the results page into the README's table of numbers, as its first row.

`results_page.py` writes and checks it together with its page. Only what was run is told: tasks without a run of the
recipe, DP-SGD or a ceiling that are missing are left out.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from reading import Result, by_options, chosen

README = Path(__file__).parents[2] / "README.md"
PLACE = re.compile(r"(?<=<!-- numbers -->\n\| \| \|\n\|---\|---\|\n)(?:\| \*\*accuracy[^|]*\| .*\n)?")
TASKS = {"sst2": "SST-2", "pairs": "QNLI's dev set from SQuAD's pairs"}  # with all of their training rows
EPSILON = 2.0


def with_row(text: str, results: list[Result]) -> str:
    """Return the README with its row."""
    return PLACE.sub(lambda _: row(results), text, count=1)


def row(results: list[Result]) -> str:
    """Return the row, or nothing where the recipe was not run."""
    told = [text for task, title in TASKS.items() if (text := _on(chosen(results, task=task, rows=None), title))]
    if not told:
        return ""
    return f"| **accuracy at ε = {EPSILON:g}** | {'; '.join(told)} (a small BERT; [accuracy](docs/results.md)) |\n"


def _on(results: list[Result], title: str) -> str:
    """Say what ε buys on a task, beside DP-SGD with the best of its thresholds and no privacy."""
    here = chosen(results, epsilon=EPSILON)
    ours = [r for r in chosen(here, method="recipe") if not r["setting"]["options"]]
    if not ours:
        return ""
    runs = f" (mean of {len(ours)} runs)" if len(ours) > 1 else ""
    told = [f"**{_mean(ours):.1f}%** with nothing tuned{runs}"]
    grid = _means([r for r in chosen(here, method="fixed") if set(r["setting"]["options"]) == {"clip_threshold"}])
    if len(grid) > 1:
        told.append(f"{max(grid):.1f}% for DP-SGD with the best of {len(grid)} thresholds")
    ceiling = _means(chosen(results, method="non_private"))
    if ceiling:
        told.append(f"{max(ceiling):.1f}% without privacy")
    return f"{title}, {ours[0]['plan']['dataset_size']:,} rows: {', '.join(told)}"


def _means(results: list[Result]) -> list[float]:
    return [_mean(runs) for runs in by_options(results).values()]


def _mean(runs: list[Result]) -> float:
    return 100 * statistics.mean(r["accuracy"] for r in runs)
