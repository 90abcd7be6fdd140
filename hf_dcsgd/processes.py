"""What several processes must agree on before a run: the public numbers, and whether the main process succeeded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from hf_dcsgd.plan import PrivacyPlan

Result = TypeVar("Result")


def require_agreement(plan: PrivacyPlan) -> None:
    """Every rank must have the same public numbers, or rates, noise and stops would differ between them.

    All ranks raise the same error, which names the numbers by rank.
    """
    plans = gather_object([plan.to_dict()]) if PartialState().num_processes > 1 else [plan.to_dict()]
    differing = {
        key: [other.get(key) for other in plans]
        for key in plans[0]
        if any(other.get(key) != plans[0].get(key) for other in plans)
    }
    if differing:
        shown = "; ".join(f"{key}: {values}" for key, values in differing.items())
        raise RuntimeError(f"the processes disagree on public numbers (by rank): {shown}")


def on_main_process(action: Callable[[], Result]) -> Result | None:
    """Runs it on the main process alone; when it fails there, every process stops with the same message."""
    state = PartialState()
    result, failure = None, None
    if state.is_main_process:
        try:
            result = action()
        except (OSError, RuntimeError, ValueError) as error:
            failure = error
    if state.num_processes > 1:
        (message,) = broadcast_object_list([None if failure is None else str(failure)])
        if message is not None and failure is None:
            raise RuntimeError(f"the main process stopped: {message}")
    if failure is not None:
        raise failure
    return result
