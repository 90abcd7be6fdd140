"""What hangs on the training loop: privacy state into `trainer_state.json`, the budget stop, the trace of releases."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_dcsgd.privacy.mechanism import DPMechanism

logger = logging.getLogger(__name__)

TRACE_FILENAME = "privacy_trace.jsonl"


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
        self.trace_path: Path | None = None

    def attach(self, mechanism: DPMechanism, trace_path: Path | None) -> None:
        self.mechanism = mechanism
        self.trace_path = trace_path

    def state(self) -> dict[str, Any]:
        if self.mechanism is None:
            return {"args": {}, "attributes": {}}
        saved = {"plan": self.mechanism.plan.to_dict(), "mechanism": self.mechanism.state_dict()}
        return {"args": {}, "attributes": {"saved": saved}}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        assert self.mechanism is not None
        if self.trace_path is not None:
            line = {"step": state.global_step, **self.mechanism.threshold.released_values()}
            with self.trace_path.open("a", encoding="utf-8") as trace:
                trace.write(json.dumps(line) + "\n")
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
    """Plan and mechanism as `PrivacyCallback` saved them in this trainer state, if it did."""
    callbacks: Any = state.stateful_callbacks
    entry = (callbacks or {}).get(PrivacyCallback.__name__)
    if isinstance(entry, list):
        entry = entry[0] if entry else None
    return None if entry is None else entry.get("attributes", {}).get("saved")
