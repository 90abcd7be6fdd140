"""The trace of a run: what each step released, a line of JSON per step, beside the ledger."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TRACE_FILENAME = "privacy_trace.jsonl"


def append_to_trace(run_dir: Path, step: int, values: Mapping[str, Any]) -> None:
    """Write down what a step has released."""
    with (run_dir / TRACE_FILENAME).open("a", encoding="utf-8") as trace:
        trace.write(json.dumps({"step": step, **values}) + "\n")


def read_trace(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the released values by step, of the steps that led to the last one.

    After a crash a resumed run goes back to its checkpoint: lines of steps that were then taken again are left out. So
    is a line torn by the crash.
    """
    path = Path(run_dir) / TRACE_FILENAME
    lines: list[dict[str, Any]] = []
    for raw in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line = json.loads(raw)
            step = int(line["step"])
        except (ValueError, KeyError, TypeError):
            continue
        while lines and lines[-1]["step"] >= step:
            lines.pop()
        lines.append(line)
    return lines
