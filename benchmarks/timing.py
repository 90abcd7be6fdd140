"""Timing as ratios: variants take turns within one run, and medians over rounds are compared with the first one."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def alternate(variants: dict[str, Callable[[], Any]], rounds: int, warm_up: int = 1) -> dict[str, dict[str, float]]:
    """Median seconds of each variant, and its ratio to the first; machine noise hits all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(warm_up + rounds):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            if round_number >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    first = next(iter(variants))
    return {
        name: {
            "seconds": statistics.median(taken),
            # Ratios within a round cancel what the machine did meanwhile; then the median over rounds.
            "ratio": statistics.median(a / b for a, b in zip(taken, seconds[first], strict=True)),
        }
        for name, taken in seconds.items()
    }


def show(title: str, table: dict[str, dict[str, float]], setting: dict[str, Any], file_name: str) -> None:
    """Prints the table and keeps it under `benchmarks/results/`."""
    first = next(iter(table))
    print(f"{title} ({', '.join(f'{k} {v}' for k, v in setting.items())})")
    for name, row in table.items():
        print(f"  {name:<28} {1000 * row['seconds']:9.1f} ms   {row['ratio']:6.3f} × {first}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / file_name).write_text(json.dumps({"setting": setting, "table": table}, indent=2) + "\n")
