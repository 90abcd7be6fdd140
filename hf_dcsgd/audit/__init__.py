"""Attempts to refute the guarantee: five levels, on the audit's own trainer or on yours.

| level | what it does                                                                                    |
|-------|-------------------------------------------------------------------------------------------------|
| L0    | replays a step on neighboring batches without noise: sensitivities, number and scale of draws   |
| L1    | measures the noise itself: scale, distribution, repetition                                       |
| L2    | plays the adversary: tells batches with and without a canary apart, and bounds μ from below      |
| L3    | L0 and L1 over two processes                                                                     |
| L4    | lets an adversary write the dataset, its transform, the collator and one record                 |

`audit_trainer(trainer)` runs L0 and L1 on a trainer of yours; `audit_strategy(clipping)` L0, L1, L2 and L4 on the
audit's own linear model, where gradients are exactly what the rows say. Nothing is charged, nothing is released.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hf_dcsgd.audit.adversary import adversary_findings
from hf_dcsgd.audit.distinguishing import TRIALS, distinguishing_findings
from hf_dcsgd.audit.findings import AuditReport, Finding
from hf_dcsgd.audit.noise_scale import DRAWS, noise_findings
from hf_dcsgd.audit.probe import as_units, canary, direction, opposed_background, probe_trainer
from hf_dcsgd.audit.replay import ledger_findings, replay_findings, sampler_findings
from hf_dcsgd.data.rows import fetch_row
from hf_dcsgd.trainer import DCSGDTrainer

__all__ = ["AuditReport", "Finding", "audit_strategy", "audit_trainer", "probe_canaries"]

PROBE_DIMENSIONS_L1 = 50_000


def probe_canaries(rows_per_unit: int | None = None) -> list[tuple[str, Any]]:
    """Return rows for the audit's own model: huge, tiny, sideways, not a number, infinite; or units of such rows."""
    canaries: list[tuple[str, Any]] = [
        ("a canary of huge norm", canary(1e4)),
        ("a canary beyond half precision", canary(1e6)),
        ("a canary just above the threshold", canary(4.001)),
        ("a canary of tiny norm", canary(1e-6)),
        ("a canary along the background", direction(-1e4)),
        ("a canary sideways", direction(1e4, axis=4)),
        ("a NaN canary", direction(math.nan)),
        ("an infinite canary", direction(math.inf)),
    ]
    if rows_per_unit is None:
        return canaries
    broken = [canary(1e4), direction(math.nan)][:rows_per_unit]
    return [*((name, [row] * rows_per_unit) for name, row in canaries), ("a NaN canary in one row", broken)]


def audit_trainer(trainer: DCSGDTrainer, rows: Sequence[Any] | None = None, draws: int = DRAWS) -> list[AuditReport]:
    """Run L0 and L1 on your trainer: each of a few rows in turn plays the canary against the others.

    `rows` are examples as the data collator takes them; by default the first ones of the training set.
    """
    dataset, _ = trainer.rows_and_collator()
    taken = [fetch_row(dataset, k) for k in range(min(9, len(dataset)))] if rows is None else list(rows)
    subject = f"{type(trainer.model).__name__}, {trainer.args.clipping}"
    replayed = AuditReport("L0", subject)
    for k in range(min(4, len(taken))):
        others = [*taken[:k], *taken[k + 1 :]]
        replayed.extend(replay_findings(trainer, others, [(f"row {k}", taken[k])]))
    replayed.extend([*sampler_findings(trainer), *ledger_findings(trainer)])
    return [replayed, AuditReport("L1", subject, noise_findings(trainer, draws))]


def audit_strategy(
    clipping: str, levels: Sequence[int] = (0, 1, 2), trials: int = TRIALS, rows_per_unit: int | None = None
) -> list[AuditReport]:
    """Run the audit's own linear model through `DCSGDTrainer`, with the given strategy.

    With `rows_per_unit`, whole units of that many rows are the canaries of L0, L1 and L2.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = partial(probe_trainer, folder, clipping, rows_per_unit=rows_per_unit)
        audits: dict[int, Callable[[], list[Finding]]] = {
            0: lambda: probe_findings(trainer(), rows_per_unit) + ledger_findings(trainer()),
            1: lambda: noise_findings(trainer(dimensions=PROBE_DIMENSIONS_L1)),
            4: lambda: adversary_findings(clipping),
            2: lambda: distinguishing_findings(trainer(), trials, rows_per_unit),
        }
        return [AuditReport(f"L{level}", clipping, find()) for level, find in audits.items() if level in levels]


def probe_findings(trainer: DCSGDTrainer, rows_per_unit: int | None = None) -> list[Finding]:
    """Run L0 on the audit's own trainer: its canaries against a background that opposes them, and the sampler."""
    background = as_units(opposed_background(), rows_per_unit)
    return replay_findings(trainer, background, probe_canaries(rows_per_unit)) + sampler_findings(trainer)
