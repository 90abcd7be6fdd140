"""Writes and reads what a run keeps beside its ledger: what is trained, and what was released step by step."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.runs.callbacks import TRACE_FILENAME
from hf_dcsgd.runs.files import as_json, write_atomically
from hf_dcsgd.tasks.losses import unwrapped_model

RUN_FILENAME = "privacy_run.json"
_PACKAGES = ("hf-dcsgd", "torch", "transformers", "accelerate", "datasets", "peft", "dp-accounting", "numpy", "scipy")


def write_run_record(
    run_dir: str | os.PathLike[str],
    *,
    plan: PrivacyPlan,
    model: nn.Module,
    trainable_layers: str | None,
    rules: Mapping[str, str],
    slow_parameters: Iterable[str],
) -> Path:
    """Write `privacy_run.json`: what a report needs beyond ledger and trace. Names and sizes only, and no seed."""
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", None) or None
    base = unwrapped_model(model)
    record = {
        "plan": {**plan.to_dict(), "unsafe_noise_seed": None},
        "model_class": type(base).__name__,
        "base_model": name if name is not None and not (Path(name).is_absolute() or Path(name).is_dir()) else None,
        "peft": hasattr(model, "peft_config"),
        "trainable_layers": trainable_layers,
        "parameters": {name: p.numel() for name, p in model.named_parameters() if p.requires_grad},
        "total_parameters": sum(p.numel() for p in model.parameters()),
        "rules": dict(rules),
        "slow_parameters": sorted(slow_parameters),
        "software": software_versions(),
    }
    return write_atomically(Path(run_dir) / RUN_FILENAME, as_json(record))


def software_versions() -> dict[str, str]:
    """Return the versions of what computed the guarantee and the gradients, as far as it is installed."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


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


def read_run_record(run_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read what `write_run_record` wrote, if it did."""
    path = Path(run_dir) / RUN_FILENAME
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
