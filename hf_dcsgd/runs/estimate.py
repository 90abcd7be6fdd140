"""What a run will take: seconds and bytes, from a few steps on made-up examples, before anything is spent.

Nothing of the training data enters: examples are made up at a length that the caller names, and their number is that
of the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_dcsgd.checks.preflight import check_before_training
from hf_dcsgd.checks.step_cost import measure_step, seconds_of
from hf_dcsgd.data.rows import Batch, batch_length
from hf_dcsgd.data.synthetic import synthetic_batch
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.step import PrivateStep
from hf_dcsgd.tasks.loss_kind import loss_kind
from hf_dcsgd.tasks.losses import split_labels
from hf_dcsgd.trunk.check import require_same_results
from hf_dcsgd.trunk.cut import TRUNK_ENTRY, FrozenTrunk, TrunkCacheError

_MEASURED_EXAMPLES = 4


@dataclass(frozen=True)
class RunEstimate:
    """What a run will take on one device of each process; `str()` shows it as a table."""

    steps: int
    examples_per_step: int
    examples_at_a_time: int
    sequence_length: int
    step_seconds: float
    bytes_by_use: dict[str, int]
    device: str
    fill_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """All steps together, and what fills the trunk cache before them; without evaluations."""
        return self.steps * self.step_seconds + (self.fill_seconds or 0.0)

    def __str__(self) -> str:
        memory, filling = self.bytes_by_use, ""
        if self.fill_seconds is not None:
            filling = f", with {duration(self.fill_seconds)} to fill the trunk cache (nothing where it is filled)"
        return "\n".join(
            [
                f"Estimate ({self.device}, made-up examples of {self.sequence_length} tokens)",
                f"  time    {duration(self.seconds)} for {self.steps} steps of {self.examples_per_step} examples, "
                f"{duration(self.step_seconds)} each{filling}; evaluation comes on top",
                f"  memory  {gigabytes(memory['total'])}: weights {gigabytes(memory['weights'])}, gradient, Adam and "
                f"noise {gigabytes(memory['gradient_optimizer_noise'])}, activations "
                f"{gigabytes(memory['activations'])} for {self.examples_at_a_time} examples at a time",
            ]
        )


def estimate_run(
    model: Any,
    make_step: Callable[[FrozenTrunk | None], PrivateStep],
    plan: PrivacyPlan,
    *,
    at_a_time: int,
    sequence_length: int,
    cached_rows: int | None = None,
) -> RunEstimate:
    """Run the checks before training and time a few steps, all on made-up examples; nothing is charged.

    Where whole units are drawn, each is taken to have as many rows as it may enter a step with.

    Args:
        model: The model, in train mode.
        make_step: Makes the private step as training will run it, with the frozen part of the model if that is cached.
        plan: How many steps of how many examples.
        at_a_time: How many examples go through the model at a time, per device.
        sequence_length: How many tokens a made-up example has, as far as the model takes so many.
        cached_rows: How many rows a trunk cache will hold, where one is wanted; a model that has none runs as it is.
    """
    kind, trunk = loss_kind(model), None if cached_rows is None else _frozen_trunk(model)
    step, fill_seconds = make_step(trunk), None
    with step.forward_context():
        check_before_training(step, synthetic_batch(model, kind, 1, sequence_length))
        measured = min(_MEASURED_EXAMPLES, at_a_time)
        batch = step.on_device(synthetic_batch(model, kind, measured, sequence_length))
        with step.randomness():
            if trunk is not None and cached_rows is not None:
                batch, row_seconds = _with_hidden_states(step, trunk, batch)
                if row_seconds is not None:
                    fill_seconds = row_seconds * cached_rows / plan.world_size
            cost = measure_step(
                step.clipper,
                lambda: step.losses(batch),
                step.units(batch),
                measured_size=measured,
                batch_size=at_a_time,
                compare=False,
            )
    rows = plan.expected_batch_size * (plan.unit.max_rows if plan.draws_units and plan.unit else 1)
    return RunEstimate(
        steps=plan.steps,
        examples_per_step=rows,
        examples_at_a_time=at_a_time,
        sequence_length=batch["input_ids"].shape[-1] if "input_ids" in batch else 0,
        step_seconds=cost["seconds"] * rows / plan.world_size / at_a_time,
        bytes_by_use=cost["bytes"],
        device=cost["device"],
        fill_seconds=fill_seconds,
    )


def _frozen_trunk(model: Any) -> FrozenTrunk | None:
    try:
        return FrozenTrunk(model)
    except TrunkCacheError:
        return None


def _with_hidden_states(step: PrivateStep, trunk: FrozenTrunk, batch: Batch) -> tuple[Batch, float | None]:
    """Return rows as a cache would hold them, and the seconds to compute one; as they are where that cannot be."""
    inputs = split_labels(trunk.model, batch)[0]
    try:
        hidden = trunk.capture(inputs)
        if len(hidden) != batch_length(batch):
            return batch, None
        cached = {**batch, TRUNK_ENTRY: hidden}
        require_same_results(step, [cached])
        return cached, seconds_of(lambda: trunk.capture(inputs)) / len(hidden)
    except TrunkCacheError:
        return batch, None
    finally:
        step.train()


def duration(seconds: float) -> str:
    """Say in two digits how long something takes."""
    if seconds < 90:
        return f"{seconds:.2g} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def gigabytes(size: int) -> str:
    """Say in two digits how much memory something takes."""
    return f"{size / 1e9:.2g} GB" if size >= 1e8 else f"{size / 1e6:.2g} MB"
