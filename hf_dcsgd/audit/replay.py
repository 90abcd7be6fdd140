"""L0, deterministic: the same step on neighbouring batches with the noise taken out, compared number by number."""

from __future__ import annotations

import contextlib
import logging
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_dcsgd.audit.findings import Finding
from hf_dcsgd.ghost import GhostClipper
from hf_dcsgd.privacy.accounting import combined_noise_multiplier, epsilon_spent
from hf_dcsgd.privacy.ledger import PrivacyLedger
from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.privacy.noise import NoiseSource, SensitiveSum
from hf_dcsgd.trainer import DCSGDTrainer

_RELATIVE_SLACK = 1e-5


@dataclass(frozen=True)
class Draw:
    """One call for noise: how many numbers, and their standard deviation."""

    shape: tuple[int, ...]
    std: float


class SilentNoise(NoiseSource):
    """Notes what noise is asked for, and adds none: differences between two runs are then those of the sums."""

    def __init__(self) -> None:
        super().__init__(unsafe_seed=0)
        self.draws: list[Draw] = []

    def add_noise(self, total: SensitiveSum, noise_multiplier: float) -> Tensor:
        self.draws.append(Draw(tuple(total.value.shape), noise_multiplier * total.sensitivity))
        return total.value.clone()


@dataclass(frozen=True)
class Recording:
    """What one step would have released before noise, and the noise that it asked for."""

    gradient: Tensor
    side: Tensor
    draws: list[Draw]
    sensitivity: float
    side_sensitivity: float | None

    @property
    def finite(self) -> bool:
        return bool(self.gradient.isfinite().all() and self.side.isfinite().all())


@contextlib.contextmanager
def prepared(trainer: DCSGDTrainer, double: bool = False) -> Iterator[None]:
    """The trainer ready to step outside of its loop: clipper made, dropout off, its own state put back afterwards."""
    saved = (trainer.clipper, trainer.mechanism, trainer.plan)
    model = trainer.model
    # An audit's steps are few and odd on purpose: advice on how to set the histogram would drown the findings.
    advice = logging.getLogger("hf_dcsgd.clipping.dc_sgd")
    level = advice.level
    advice.setLevel(logging.ERROR)
    try:
        if double:
            model.double()
        trainer.plan = trainer.plan or trainer._make_plan()
        trainer.__dict__["_train_mode"] = model.eval
        model.eval()
        trainer.clipper = GhostClipper(model)
        yield
    finally:
        trainer.__dict__.pop("_train_mode", None)
        trainer.clipper, trainer.mechanism, trainer.plan = saved
        if double:
            model.float()
        model.zero_grad()
        advice.setLevel(level)


def logical_step(trainer: DCSGDTrainer, micro_batches: Sequence[Any], mechanism: DPMechanism) -> None:
    """One logical batch through `training_step`, as the training loop would do it."""
    trainer.mechanism = mechanism
    trainer.model.zero_grad()
    for k, micro_batch in enumerate(micro_batches):
        trainer.accelerator.gradient_state._set_sync_gradients(k == len(micro_batches) - 1)
        trainer.training_step(trainer.model, micro_batch)


def released_gradient(trainer: DCSGDTrainer) -> Tensor:
    """What the optimizer would see, times the public batch size: the noised sum."""
    assert trainer.plan is not None
    grads = [p.grad for p in trainer.model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in grads if g is not None]).double() * trainer.plan.expected_batch_size


def fresh_mechanism(trainer: DCSGDTrainer, noise: NoiseSource | None = None) -> DPMechanism:
    """A mechanism of the trainer's plan at its first step, which charges nothing: the audit releases nothing."""
    assert trainer.plan is not None
    several = trainer.args.world_size > 1
    return DPMechanism(
        trainer.plan,
        noise=noise,
        all_reduce=torch.distributed.all_reduce if several else None,
        is_main_process=trainer.is_world_process_zero(),
    )


def record_step(trainer: DCSGDTrainer, micro_batches: Sequence[Any]) -> Recording:
    """One step on these rows without noise, from the plan's first threshold."""
    noise = SilentNoise()
    mechanism = fresh_mechanism(trainer, noise)
    sensitivity, query = mechanism.threshold.sensitivity, mechanism.threshold.side_query
    side = watched_side(mechanism)
    logical_step(trainer, [collated(trainer, rows) for rows in micro_batches], mechanism)
    side_sensitivity = None if query is None else query.sensitivity
    return Recording(
        released_gradient(trainer), torch.from_numpy(side[-1]), noise.draws, sensitivity, side_sensitivity
    )


def watched_side(mechanism: DPMechanism) -> list[np.ndarray]:
    """A list to which every side value is added as it is released."""
    seen: list[np.ndarray] = []
    update = mechanism.threshold.update

    def keep(noisy_side: np.ndarray | None) -> None:
        seen.append(np.zeros(0) if noisy_side is None else np.array(noisy_side, dtype=np.float64))
        update(noisy_side)

    mechanism.threshold.update = keep  # type: ignore[method-assign]
    return seen


def collated(trainer: DCSGDTrainer, rows: Sequence[Any]) -> dict[str, Any]:
    """Rows as a batch in the precision of the model."""
    if not rows:
        return {}
    batch = trainer.data_collator(list(rows))
    dtype = next(trainer.model.parameters()).dtype
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}


def replay_findings(
    trainer: DCSGDTrainer, background: Sequence[Any], canaries: Sequence[tuple[str, Any]]
) -> list[Finding]:
    """L0 for each canary: the step with it against the step without it.

    `background` and canaries are rows as the trainer's collator takes them; several processes share the background
    out. In double precision, so that the order of additions does not blur the comparison.
    """
    micro_batches = trainer.args.gradient_accumulation_steps
    findings = []
    with prepared(trainer, double=True):
        assert trainer.plan is not None
        rank, world_size = trainer.args.process_index, trainer.args.world_size
        mine = background[rank::world_size]
        shards = [list(mine[k::micro_batches]) for k in range(micro_batches)]
        without = record_step(trainer, shards)
        findings += _noise_findings(trainer, without)
        for name, extra in canaries:
            # The canary goes to the last micro-batch of the last rank, which is not the one that draws the noise.
            added = [extra] if rank == world_size - 1 else []
            with_canary = record_step(trainer, [*shards[:-1], [*shards[-1], *added]])
            findings += _difference_findings(name, without, with_canary)
        empty = record_step(trainer, [[] for _ in range(micro_batches)])
        findings.append(_same_draws("an empty batch", without, empty))
    return findings


def _difference_findings(name: str, without: Recording, with_canary: Recording) -> list[Finding]:
    allowed = without.sensitivity * (1 + _RELATIVE_SLACK)
    change = (with_canary.gradient - without.gradient).norm().item()
    findings = [
        Finding(f"clipped sum, {name}", change if math.isfinite(change) else math.inf, allowed),
        Finding(f"released values are finite, {name}", 0.0 if with_canary.finite else math.inf, 0.0),
        _same_draws(name, without, with_canary),
    ]
    if without.side_sensitivity is not None:
        change = (with_canary.side - without.side).norm().item()
        allowed = without.side_sensitivity * (1 + _RELATIVE_SLACK)
        findings.append(Finding(f"side value, {name}", change if math.isfinite(change) else math.inf, allowed))
    return findings


def _same_draws(name: str, without: Recording, with_canary: Recording) -> Finding:
    same = without.draws == with_canary.draws
    return Finding(f"noise draws do not depend on {name}", 0.0 if same else math.inf, 0.0)


def _noise_findings(trainer: DCSGDTrainer, recording: Recording) -> list[Finding]:
    """The noise asked for must be the plan's: as many draws as releases, and together worth the accounted σ."""
    plan = trainer.plan
    assert plan is not None
    if not trainer.is_world_process_zero():
        return [Finding("noise is drawn on the main process only", float(len(recording.draws)), 0.0)]
    releases = 1 + len(plan.side_noise_multipliers)
    findings = [
        Finding("difference in the number of noise draws per step", float(abs(len(recording.draws) - releases)), 0.0)
    ]
    if len(recording.draws) != releases:
        return findings
    sensitivities = [recording.sensitivity, recording.side_sensitivity, plan.loss_clip]
    multipliers = [
        draw.std / s for draw, s in zip(recording.draws, [s for s in sensitivities if s is not None], strict=True)
    ]
    actual = combined_noise_multiplier(multipliers)
    findings.append(Finding("accounted σ against the noise drawn", plan.noise_multiplier, actual * (1 + 1e-9)))
    steps = min(plan.steps, 1000)
    spent = epsilon_spent(
        noise_multiplier=actual, sampling_rate=plan.sampling_rate, steps=steps, delta=plan.delta, accountant="rdp"
    )
    claimed = plan.epsilon(steps, "rdp")
    findings.append(Finding("ε of the noise drawn against the claimed ε", spent, claimed * (1 + 1e-6)))
    return findings


def sampler_findings(trainer: DCSGDTrainer, logical_batches: int = 200) -> list[Finding]:
    """Records are distinct within a logical batch, and each is drawn at the accounted rate."""
    loader = trainer.get_train_dataloader()
    plan = trainer.plan
    assert plan is not None
    repeats = total = 0
    micro_batches: list[list[int]] = []
    while len(micro_batches) < logical_batches * plan.gradient_accumulation_steps:
        micro_batches.extend(loader.batch_sampler)  # type: ignore[arg-type]
    micro_batches = micro_batches[: logical_batches * plan.gradient_accumulation_steps]
    for start in range(0, len(micro_batches), plan.gradient_accumulation_steps):
        drawn = [i for micro in micro_batches[start : start + plan.gradient_accumulation_steps] for i in micro]
        repeats += len(drawn) - len(set(drawn))
        total += len(drawn)
    shard = len(range(trainer.args.process_index, plan.dataset_size, plan.world_size))
    trials, rate = shard * logical_batches, plan.sampling_rate
    deviation = abs(total - trials * rate) / math.sqrt(max(trials * rate * (1 - rate), 1e-12))
    return [
        Finding("records drawn twice in a logical batch", float(repeats), 0.0),
        Finding("draws against the accounted rate, in standard deviations", deviation if rate < 1 else 0.0, 5.0),
    ]


def ledger_findings(trainer: DCSGDTrainer) -> list[Finding]:
    """Steps charged after a checkpoint was written stay charged when the run goes on from it."""
    plan = trainer.plan or trainer._make_plan()
    with tempfile.TemporaryDirectory() as folder:
        ledger = PrivacyLedger.open(folder, plan.privacy_dict(), resume=False)
        mechanism = DPMechanism(plan, noise=SilentNoise(), ledger=ledger)
        nothing = torch.zeros(plan.num_parameters)
        mechanism.release(nothing)
        checkpoint = mechanism.state_dict()
        mechanism.release(nothing)
        mechanism.release(nothing)
        ledger.close()
        resumed = DPMechanism(plan, ledger=PrivacyLedger.open(folder, plan.privacy_dict(), resume=True))
        resumed.load_state_dict(checkpoint)
        return [Finding("steps released but not charged after a resume", 3.0 - resumed.charged, 0.0)]
