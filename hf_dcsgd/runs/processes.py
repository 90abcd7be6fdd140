"""What several processes must agree on before a run, and how one of them acts for all."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from transformers import TrainingArguments

from hf_dcsgd.privacy.plan import PrivacyPlan

Result = TypeVar("Result")

# Arguments that may differ between ranks: they steer no step, no collective call and no random number of ours.
_LOCAL_ARGUMENTS = {
    *("output_dir", "trunk_cache_dir", "local_rank", "resume_from_checkpoint", "seed", "data_seed", "log_level"),
    *("log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "hub_token", "ddp_timeout"),
    *(f"dataloader_{name}" for name in ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")),
}


def public_settings(plan: PrivacyPlan, args: TrainingArguments, model: nn.Module) -> dict[str, Any]:
    """Collect what every rank must have in common: the plan, the arguments, and which parameters are trained."""
    trained = [f"{name}{tuple(p.shape)}" for name, p in model.named_parameters() if p.requires_grad]
    digest = hashlib.sha256("\n".join(trained).encode()).hexdigest()
    numbers = {name: value for name, value in args.to_dict().items() if name not in _LOCAL_ARGUMENTS}
    # The plan last: where both know a name, its value is the resolved one.
    numbers |= plan.privacy_dict()
    numbers |= {"world_size": plan.world_size, "gradient_accumulation_steps": plan.gradient_accumulation_steps}
    numbers["trainable parameters"] = f"{len(trained)} tensors, {digest[:8]}"
    return numbers


def require_agreement(numbers: Mapping[str, Any]) -> None:
    """Raise on all ranks alike unless every rank has the same public settings; a collective call.

    Rates, noise, thresholds and stops would otherwise differ between them.
    """
    ranks = gather_object([dict(numbers)]) if PartialState().num_processes > 1 else [dict(numbers)]
    names = dict.fromkeys(name for rank in ranks for name in rank)
    differing = {
        name: values for name in names if (values := [rank.get(name) for rank in ranks]) != values[:1] * len(ranks)
    }
    if differing:
        shown = "; ".join(f"{name}: {' | '.join(map(str, values))}" for name, values in differing.items())
        raise RuntimeError(f"the processes disagree on public settings; by rank, {shown}")


def quiet_replica() -> None:
    """Log only errors outside the main process: warnings say the same on every rank."""
    logging.getLogger("hf_dcsgd").setLevel(logging.ERROR)


def on_main_process(action: Callable[[], Result]) -> Result | None:
    """Run an action on the main process alone; when it fails there, every process stops with the same message."""
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


def from_main_process(action: Callable[[], Result]) -> Result:
    """Run an action on the main process alone and return its result on all, pickled on the way; fails as that does."""
    result: Any = on_main_process(action)
    if PartialState().num_processes > 1:
        (result,) = broadcast_object_list([result])
    return result
