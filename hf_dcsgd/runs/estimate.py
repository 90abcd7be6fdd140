"""What a run will take: seconds and bytes, from a few steps on made-up examples, before anything is spent.

Nothing of the training data enters: examples are made up at a length that the caller names, and their number is that
of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_dcsgd.checks.preflight import check_before_training
from hf_dcsgd.checks.step_cost import measure_step
from hf_dcsgd.data.synthetic import synthetic_batch
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.step import PrivateStep
from hf_dcsgd.tasks.loss_kind import loss_kind

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

    @property
    def seconds(self) -> float:
        """All steps together, without evaluations."""
        return self.steps * self.step_seconds

    def __str__(self) -> str:
        memory = self.bytes_by_use
        return "\n".join(
            [
                f"Estimate ({self.device}, made-up examples of {self.sequence_length} tokens)",
                f"  time    {duration(self.seconds)} for {self.steps} steps of {self.examples_per_step} examples, "
                f"{duration(self.step_seconds)} each; evaluation comes on top",
                f"  memory  {gigabytes(memory['total'])}: weights {gigabytes(memory['weights'])}, gradient, Adam and "
                f"noise {gigabytes(memory['gradient_optimizer_noise'])}, activations "
                f"{gigabytes(memory['activations'])} for {self.examples_at_a_time} examples at a time",
            ]
        )


def estimate_run(step: PrivateStep, plan: PrivacyPlan, *, at_a_time: int, sequence_length: int) -> RunEstimate:
    """Run the checks before training and time a few steps, all on made-up examples; nothing is charged.

    Where whole units are drawn, each is taken to have as many rows as it may enter a step with.

    Args:
        step: The private step as training will run it; its model must be in train mode.
        plan: How many steps of how many examples.
        at_a_time: How many examples go through the model at a time, per device.
        sequence_length: How many tokens a made-up example has, as far as the model takes so many.
    """
    model: Any = step.model
    kind = loss_kind(model)
    with step.forward_context():
        check_before_training(step, synthetic_batch(model, kind, 1, sequence_length))
        measured = min(_MEASURED_EXAMPLES, at_a_time)
        batch = step.on_device(synthetic_batch(model, kind, measured, sequence_length))
        with step.randomness():
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
    )


def duration(seconds: float) -> str:
    """Say in two digits how long something takes."""
    if seconds < 90:
        return f"{seconds:.2g} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def gigabytes(size: int) -> str:
    """Say in two digits how much memory something takes."""
    return f"{size / 1e9:.2g} GB" if size >= 1e8 else f"{size / 1e6:.2g} MB"
