"""What a run keeps beside its ledger: what is trained, by what; and what its weights have spent."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from hf_dcsgd.privacy.ledger import PrivacyLedger
from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.runs.files import as_json, write_atomically
from hf_dcsgd.runs.spending import SpendingRecorder
from hf_dcsgd.step import PrivateStep
from hf_dcsgd.tasks.loss_kind import unwrapped_model

RUN_FILENAME = "privacy_run.json"
_PACKAGES = ("hf-dcsgd", "torch", "transformers", "accelerate", "datasets", "peft", "dp-accounting", "numpy", "scipy")


@dataclass(frozen=True)
class RecordedRun:
    """The run under way, or the last one. Only the main process leaves word of it, and of what was spent."""

    directory: Path
    step: PrivateStep
    mechanism: DPMechanism
    spending: SpendingRecorder | None

    @classmethod
    def start(cls, run_dir: Path, step: PrivateStep, trainable_layers: str, *, is_main_process: bool) -> RecordedRun:
        """Write down what is trained, at the start: which parameters turn out slow later follows from data."""
        assert step.mechanism is not None
        spending = None
        if is_main_process:
            write_run_record(
                run_dir,
                plan=step.mechanism.plan,
                model=step.model,
                trainable_layers=trainable_layers,
                rules=step.clipper.rules(),
                slow_parameters=step.clipper.slow_parameters,
            )
            run = PrivacyLedger.read(run_dir).runs[-1]
            spending = SpendingRecorder(step.model, step.mechanism.plan, run.run_id, run.earlier)
        return cls(run_dir, step, step.mechanism, spending)

    def record_spending(self, folder: str | None = None) -> None:
        """Leave word of what was spent with the weights; with `folder`, also beside those that are saved there."""
        if self.spending is not None:
            self.spending.record(self.mechanism.charged, folder)

    def end(self) -> None:
        """Close the ledger, and leave word of what was spent."""
        self.mechanism.close()
        self.record_spending()


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
        "sharded_parameters": sum(p.numel() for p in model.parameters() if isinstance(p, DTensor)),
        "rules": dict(rules),
        "slow_parameters": sorted(slow_parameters),
        "software": software_versions(),
    }
    return write_atomically(Path(run_dir) / RUN_FILENAME, as_json(record))


@functools.cache
def software_versions() -> dict[str, str]:
    """Return the versions of what computed the guarantee and the gradients, as far as it is installed."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def read_run_record(run_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read what `write_run_record` wrote, if it did."""
    path = Path(run_dir) / RUN_FILENAME
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
