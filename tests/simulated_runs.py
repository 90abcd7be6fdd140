"""Runs that never trained a model: the real mechanism and ledger, fed with made-up norms. For tests of reports."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tiny_tasks import BATCH, SIGMA, N, feature_classifier

from hf_dcsgd.privacy.ledger import PrivacyLedger
from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.reporting.run_record import write_run_record
from hf_dcsgd.runs.trace import TRACE_FILENAME

STEPS = 6


def plan_of(**changes: Any) -> PrivacyPlan:
    """N = 64, B = 16, σ = 1, six steps, unless changed."""
    if "target_epsilon" not in changes:
        changes.setdefault("noise_multiplier", SIGMA)
    sizes = {"dataset_size": N, "expected_batch_size": BATCH, "steps": STEPS, "num_parameters": 83}
    return PrivacyPlan.create(**{**sizes, "accountant": "rdp", **changes})


def simulate(
    run_dir: Path,
    *,
    take: int | None = None,
    model: torch.nn.Module | None = None,
    trainable_layers: str = "as_is",
    scale: float = 1.0,
    earlier: dict[str, Any] | None = None,
    **changes: Any,
) -> PrivacyPlan:
    """Charges and releases `take` steps of a new run in this directory (all of them by default)."""
    plan = plan_of(**changes)
    ledger = PrivacyLedger.open(run_dir, plan.privacy_dict(), resume=False, earlier=earlier)
    mechanism = DPMechanism(plan, ledger=ledger)
    write_run_record(
        run_dir,
        plan=plan,
        model=feature_classifier() if model is None else model,
        trainable_layers=trainable_layers,
        rules={"hidden": "linear_rule", "classifier": "fallback"},
        slow_parameters=["classifier.bias"],
    )
    generator = torch.Generator().manual_seed(0)
    lines = []
    for step in range(plan.steps if take is None else take):
        norms = scale * torch.empty(plan.expected_batch_size).log_normal_(1.0, 0.5, generator=generator)
        mechanism.clip_factors(norms, torch.rand(plan.expected_batch_size, generator=generator))
        release = mechanism.release(torch.zeros(plan.num_parameters))
        lines.append({"step": step + 1, **release.values})
    write_trace(run_dir, lines)
    mechanism.close()
    return plan


def write_trace(run_dir: Path, lines: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (Path(run_dir) / TRACE_FILENAME).write_text(text, encoding="utf-8")


def without_fsync(monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
