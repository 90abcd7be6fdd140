"""JSON files of a run, written so that a reader never sees half of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def as_json(value: Any) -> str:
    """Return `value` as indented JSON; ValueError for numbers that JSON does not have."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_atomically(path: Path, text: str) -> Path:
    """Write the whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path
