"""L0, deterministic: the same step on neighboring batches with the noise taken out, compared number by number."""

from __future__ import annotations

import contextlib
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_dcsgd.audit.findings import Finding
from hf_dcsgd.data.rows import Batch, Collator, RowCollator
from hf_dcsgd.data.units import UnitCollator, stack_units
from hf_dcsgd.privacy.accounting import combined_noise_multiplier, composed_epsilon
from hf_dcsgd.privacy.ledger import PrivacyLedger
from hf_dcsgd.privacy.mechanism import DPMechanism, NoisyRelease
from hf_dcsgd.privacy.noise import NoiseSource, SensitiveSum
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.step import PrivateStep
from hf_dcsgd.trainer import DCSGDTrainer

_RELATIVE_SLACK = 1e-5


class Draw(NamedTuple):
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
    """What one step would have released before noise, with the sensitivities, and the noise that it asked for."""

    released: dict[str, Tensor]
    sensitivities: dict[str, float]
    draws: list[Draw]


@dataclass(frozen=True)
class Subject:
    """What an audit works on: the private step of a trainer, its plan, its collator and its place among the ranks."""

    step: PrivateStep
    plan: PrivacyPlan
    collate: Callable[[list[Any]], list[Batch]]
    rank: int
    world_size: int

    def new_mechanism(self, noise: NoiseSource | None = None) -> DPMechanism:
        """Make a mechanism at its first step, which charges nothing: the audit releases nothing."""
        return DPMechanism(
            self.plan,
            noise=noise,
            all_reduce=torch.distributed.all_reduce if self.world_size > 1 else None,
            is_main_process=self.rank == 0,
        )

    def stacks(self, micro_batches: Sequence[Sequence[Any]]) -> list[Batch]:
        """Collate and stack rows as training does, in the precision of the model."""
        dtype = next(self.step.model.parameters()).dtype
        return [
            {
                name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
                for name, value in stack.items()
            }
            for rows in micro_batches
            for stack in self.collate(list(rows))
        ]

    def logical_step(self, stacks: Sequence[Batch], mechanism: DPMechanism) -> NoisyRelease:
        """Run one logical batch through the private step."""
        self.step.mechanism = mechanism
        self.step.discard()
        for stack in stacks:
            self.step.accumulate(stack)
        return self.step.release()

    def noiseless_step(self, micro_batches: Sequence[Sequence[Any]]) -> tuple[NoisyRelease, list[Draw]]:
        """Run one step on these rows with the noise taken out; return also the noise that it asked for."""
        noise = SilentNoise()
        return self.logical_step(self.stacks(micro_batches), self.new_mechanism(noise)), noise.draws

    def released_sum(self, release: NoisyRelease) -> Tensor:
        """Undo the division by the public batch size: the noised sum."""
        return release.noisy_gradient.double() * self.plan.expected_batch_size


@contextlib.contextmanager
def prepared(trainer: DCSGDTrainer, double: bool = False) -> Iterator[Subject]:
    """Make a trainer's step ready outside of its loop, with dropout off; the trainer is left as it was."""
    model = trainer.model
    # An audit's steps are few and odd on purpose: advice on how to set the histogram would drown the findings.
    advice = logging.getLogger("hf_dcsgd.clipping")
    level = advice.level
    advice.setLevel(logging.ERROR)
    try:
        if double:
            model.double()
        model.eval()
        plan, collate = trainer.plan or trainer.make_plan(), trainer.rows_and_collator()[1]
        yield Subject(
            trainer.make_step(spot_checks=False),
            plan,
            _collate_units(collate) if plan.draws_units else RowCollator(collate),
            trainer.args.process_index,
            trainer.args.world_size,
        )
    finally:
        if double:
            model.float()
        model.zero_grad()
        advice.setLevel(level)


def _collate_units(collate: Collator) -> Callable[[list[Any]], list[Batch]]:
    """Collate units as training does; a unit is a list of rows, or one."""
    by_unit = UnitCollator(collate)
    return lambda units: stack_units(by_unit([u if isinstance(u, list) else [u] for u in units]), largest=64)


def record_step(subject: Subject, micro_batches: Sequence[Sequence[Any]]) -> Recording:
    """Run one step on these rows without noise, from the plan's first threshold."""
    threshold = subject.new_mechanism().threshold
    sensitivities = {"clipped sum": threshold.sensitivity}
    if threshold.side_query is not None:
        sensitivities["side value"] = threshold.side_query.sensitivity
    release, draws = subject.noiseless_step(micro_batches)
    released = {"clipped sum": subject.released_sum(release)}
    if release.noisy_side is not None:
        released["side value"] = torch.from_numpy(release.noisy_side)
    return Recording(released, sensitivities, draws)


def replay_findings(
    trainer: DCSGDTrainer, background: Sequence[Any], canaries: Sequence[tuple[str, Any]]
) -> list[Finding]:
    """Run L0 for each canary: the step with it against the step without it.

    `background` and canaries are rows as the trainer's collator takes them; several processes share the background
    out. In double precision, so that the order of additions does not blur the comparison.
    """
    micro_batches = trainer.args.gradient_accumulation_steps
    findings = []
    with prepared(trainer, double=True) as subject:
        mine = background[subject.rank :: subject.world_size]
        shards = [list(mine[k::micro_batches]) for k in range(micro_batches)]
        without = record_step(subject, shards)
        findings += _noise_findings(subject, without)
        for name, extra in canaries:
            # The canary goes to the last micro-batch of the last rank, which is not the one that draws the noise.
            added = [extra] if subject.rank == subject.world_size - 1 else []
            with_canary = record_step(subject, [*shards[:-1], [*shards[-1], *added]])
            findings += _difference_findings(name, without, with_canary)
        empty = record_step(subject, [[] for _ in range(micro_batches)])
        findings.append(_same_draws("an empty batch", without, empty))
    return findings


def _difference_findings(name: str, without: Recording, with_canary: Recording) -> list[Finding]:
    finite = all(value.isfinite().all() for value in with_canary.released.values())
    findings = [
        Finding(f"released values are finite, {name}", 0.0 if finite else math.inf, 0.0),
        _same_draws(name, without, with_canary),
    ]
    for what, sensitivity in without.sensitivities.items():
        change = (with_canary.released[what] - without.released[what]).norm().item()
        allowed = sensitivity * (1 + _RELATIVE_SLACK)
        findings.append(Finding(f"{what}, {name}", change if math.isfinite(change) else math.inf, allowed))
    return findings


def _same_draws(name: str, without: Recording, with_canary: Recording) -> Finding:
    same = without.draws == with_canary.draws
    return Finding(f"noise draws do not depend on {name}", 0.0 if same else math.inf, 0.0)


def _noise_findings(subject: Subject, recording: Recording) -> list[Finding]:
    """Compare the noise asked for with the plan's: as many draws as releases, and together worth the accounted σ."""
    plan = subject.plan
    if subject.rank > 0:
        return [Finding("noise is drawn on the main process only", float(len(recording.draws)), 0.0)]
    releases = 1 + len(plan.side_noise_multipliers)
    missing = float(abs(len(recording.draws) - releases))
    findings = [Finding("difference in the number of noise draws per step", missing, 0.0)]
    if missing:
        return findings
    sensitivities = [*recording.sensitivities.values(), *([] if plan.loss_clip is None else [plan.loss_clip])]
    actual = combined_noise_multiplier([d.std / s for d, s in zip(recording.draws, sensitivities, strict=True)])
    findings.append(Finding("accounted σ against the noise drawn", plan.noise_multiplier, actual * (1 + 1e-9)))
    steps = min(plan.steps, 1000)
    # Of a group of rows, only PLD knows the cost.
    accountant = "rdp" if plan.group_size == 1 else "pld"
    drawn = plan.accounted(steps)._replace(noise_multiplier=actual)
    spent, claimed = composed_epsilon([drawn], plan.delta, accountant), plan.epsilon(steps, accountant)
    findings.append(Finding("ε of the noise drawn against the claimed ε", spent, claimed * (1 + 1e-6)))
    return findings


def sampler_findings(trainer: DCSGDTrainer, logical_batches: int = 200) -> list[Finding]:
    """Check that records, or units, are distinct within a logical batch, and each is drawn at the accounted rate."""
    loader = trainer.get_train_dataloader()
    plan = trainer.plan
    assert plan is not None
    repeats = total = 0
    micro_batches: list[list[Any]] = []
    while len(micro_batches) < logical_batches * plan.gradient_accumulation_steps:
        micro_batches.extend(loader.batch_sampler)  # type: ignore[arg-type]
    micro_batches = micro_batches[: logical_batches * plan.gradient_accumulation_steps]
    owners = owners_of_rows(trainer)
    for start in range(0, len(micro_batches), plan.gradient_accumulation_steps):
        items = [i for micro in micro_batches[start : start + plan.gradient_accumulation_steps] for i in micro]
        drawn = items if owners is None else [owners[as_unit(item)[0]] for item in items]
        repeats += len(drawn) - len(set(drawn))
        total += len(drawn)
    shard = len(range(trainer.args.process_index, plan.dataset_size, plan.world_size))
    trials, rate = shard * logical_batches, plan.sampling_rate
    deviation = abs(total - trials * rate) / math.sqrt(max(trials * rate * (1 - rate), 1e-12))
    findings = [
        Finding("records drawn twice in a logical batch", float(repeats), 0.0),
        Finding("draws against the accounted rate, in standard deviations", deviation if rate < 1 else 0.0, 5.0),
    ]
    if owners is not None:
        findings += _unit_findings(plan, owners, [as_unit(item) for micro in micro_batches for item in micro])
    return findings


def owners_of_rows(trainer: DCSGDTrainer) -> np.ndarray | None:
    """Return the unit of every row, where units are drawn."""
    units = trainer.training_rows().units
    if units is None or trainer.plan is None or not trainer.plan.draws_units:
        return None
    owners = np.empty(len(units.rows), dtype=np.int64)
    owners[units.rows] = np.repeat(np.arange(len(units)), units.sizes)
    return owners


def as_unit(item: int | list[int]) -> list[int]:
    """Return the rows of what a sampler drew."""
    return item if isinstance(item, list) else [item]


def _unit_findings(plan: PrivacyPlan, owners: np.ndarray, drawn: list[list[int]]) -> list[Finding]:
    assert plan.unit is not None
    most = max((len(rows) for rows in drawn), default=0)
    strangers = sum(len(set(owners[rows])) > 1 or len(set(rows)) < len(rows) for rows in drawn)
    return [
        Finding("rows that a unit enters a step with, against the cap", float(most), float(plan.unit.max_rows)),
        Finding("units drawn with rows of others, or with a row twice", float(strangers), 0.0),
        Finding("units claimed, against units in the data", float(plan.num_units), float(owners.max() + 1)),
    ]


def ledger_findings(trainer: DCSGDTrainer) -> list[Finding]:
    """Check that steps charged after a checkpoint was written stay charged when the run goes on from it."""
    plan = trainer.plan or trainer.make_plan()
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
