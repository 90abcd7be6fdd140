"""Timing as ratios: variants take turns within one run, and medians over rounds are compared with the first one.

On the CPU one thread is timed, in CPU seconds of the process, which others on the machine hardly change; on a GPU,
wall clock until it is idle.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hf_dcsgd.checks.step_cost import PeakMemory

RESULTS = Path(__file__).parent / "results"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def now() -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def peak_bytes(action: Callable[[], Any]) -> int:
    """Most bytes of tensors at one time beyond those that were there before: weights and the optimizer's state."""
    if DEVICE.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        action()
        return int(torch.cuda.max_memory_allocated()) - before
    with PeakMemory() as memory:
        action()
    return memory.peak


def alternate(variants: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, Any]]:
    """Median seconds and peak memory of each variant, and their ratios to the first; an error where one cannot run."""
    failed: dict[str, str] = {}
    peaks: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for name, run in variants.items():
        try:
            peaks[name] = peak_bytes(run)
        except Exception as error:  # a peer's: it is shown in the table
            failed[name] = in_one_line(error)
    for _ in range(rounds):
        for name, run in variants.items():
            if name not in failed:
                start = now()
                run()
                seconds[name].append(now() - start)
    first = next(iter(variants))
    return {
        name: {"error": failed[name]}
        if name in failed
        else {
            "seconds": statistics.median(seconds[name]),
            # Ratios within a round cancel what the machine did meanwhile; then the median over rounds.
            "ratio": statistics.median(a / b for a, b in zip(seconds[name], seconds[first], strict=True)),
            "peak_bytes": peaks[name],
            "memory_ratio": peaks[name] / peaks[first],
        }
        for name in variants
    }


def in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
