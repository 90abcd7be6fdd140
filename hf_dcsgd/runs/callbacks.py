"""What hangs on the training loop: privacy state into `trainer_state.json`, the budget stop, the trace of releases."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.runs.trace import append_to_trace

logger = logging.getLogger(__name__)


class RunStart(TrainerCallback):
    """Starts the private run when the loop begins: after the callbacks before it, whose hooks on gradients are seen.

    It is not part of `PrivacyCallback`, which transformers makes anew without arguments when it restores callbacks.

    Args:
        start_run: Called with the number of steps of the loop.
    """

    def __init__(self, start_run: Callable[[int], None]) -> None:
        self._start_run = start_run

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._start_run(state.max_steps)


class PrivacyCallback(TrainerCallback, ExportableState):
    """Saves plan and mechanism with each checkpoint, and stops the loop before the step that the budget forbids.

    The trainer calls `attach` when a run starts. Only released values pass through here.
    """

    def __init__(self) -> None:
        self.mechanism: DPMechanism | None = None
        self.traced_dir: Path | None = None

    def attach(self, mechanism: DPMechanism, traced_dir: Path | None) -> None:
        """Watch a run; where `traced_dir` is given, its trace is written there."""
        self.mechanism = mechanism
        self.traced_dir = traced_dir

    def state(self) -> dict[str, Any]:
        if self.mechanism is None:
            return {"args": {}, "attributes": {}}
        saved = {"plan": self.mechanism.plan.to_dict(), "mechanism": self.mechanism.state_dict()}
        return {"args": {}, "attributes": {"saved": saved}}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        assert self.mechanism is not None
        if self.traced_dir is not None:
            append_to_trace(self.traced_dir, state.global_step, self.mechanism.threshold.released_values())
        if self.mechanism.exhausted and state.global_step < state.max_steps:
            logger.warning(
                "the privacy budget is spent after %d charged steps, at step %d of %d (steps lost in a crash stay "
                "charged): training stops here",
                self.mechanism.charged,
                state.global_step,
                state.max_steps,
            )
            control.should_training_stop = True
        return control


def saved_privacy_state(state: TrainerState) -> dict[str, Any] | None:
    """Return plan and mechanism as `PrivacyCallback` saved them in this trainer state, if it did."""
    callbacks: Any = state.stateful_callbacks
    entry = (callbacks or {}).get(PrivacyCallback.__name__) or {}
    return (entry[0] if isinstance(entry, list) else entry).get("attributes", {}).get("saved")


def released_logs(logs: dict[str, float], mechanism: DPMechanism | None, log_train_loss: str) -> dict[str, float]:
    """Add what the step released; take out the private training loss, unless it was paid or opted for."""
    if mechanism is not None and "loss" in logs:
        values = mechanism.threshold.released_values()
        logs |= {name: value for name, value in values.items() if isinstance(value, float)}
        logs["epsilon"] = _epsilon_so_far(mechanism.plan, mechanism.charged)
    for name in ("loss", "train_loss"):
        if name in logs and log_train_loss != "raw":
            value = logs.pop(name)
            if log_train_loss == "private":
                logs[f"noisy_{name}"] = value
    logs.pop("total_flos", None)
    return logs


def _epsilon_so_far(plan: PrivacyPlan, charged: int) -> float:
    """Bound ε without holding up the loop: PLD's fine grid takes seconds, but is known for the whole plan."""
    bound = plan.epsilon(charged, grid_scale=10)
    return min(bound, plan.epsilon()) if charged <= plan.steps else bound
