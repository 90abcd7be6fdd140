"""docs/benchmarks.md is what the script makes of the results that are committed."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import page  # noqa: E402


def test_the_page_is_made_of_the_results() -> None:
    results = page.load()
    assert results
    assert page.PAGE.read_text(encoding="utf-8") == page.render(results)
    assert page.PICTURE.read_bytes().startswith(b"\x89PNG")


def test_a_figure_that_changes_changes_the_page_and_failures_are_told() -> None:
    row = {**page.ROWS["step_mini_last_128"], "trained": 7}
    ours = {"seconds": 1.0, "ratio": 1.25, "peak_bytes": 10, "memory_ratio": 1.5}
    results = {"step_mini_last_128": {**row, "variants": {"dc_sgd_e": ours, "opacus_ghost": {"error": "Boom: no"}}}}
    shown = page.render(results)
    assert "| not run | not run | 1.25 | fails | not run |" in shown
    assert "| not run | not run | 1.50 | fails | not run |" in shown
    assert "`Boom: no`" in shown
    assert "`step_base_last_128`" in shown.split("## Not measured yet")[1]
    assert "1.30" in page.render({"step_mini_last_128": {**row, "variants": {"dc_sgd_e": {**ours, "ratio": 1.3}}}})
