"""What several processes must be, and agree on, before a run: plain data parallelism, and the same public numbers."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from hf_dcsgd.privacy.plan import PrivacyPlan

Result = TypeVar("Result")

_INSTEAD = (
    "use plain data parallelism (`accelerate launch --multi_gpu` or `torchrun`, without sharding) and, for memory, "
    "trainable_layers or LoRA"
)
_PIECES = "keeps every parameter in pieces and sums gradients in hooks of its own, behind the clipping and the noise"
# What `accelerate launch` sets from its options or its configuration file.
_SHARDING_FLAGS = {
    "ACCELERATE_USE_FSDP": ("FSDP", _PIECES),
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", "owns gradients and optimizer, so that noise cannot enter exactly once"),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", _PIECES),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (
        "parallelism_config",
        "makes several ranks share one example, so that no rank knows its gradient's norm",
    ),
}
# Arguments that may differ between ranks: they steer no step, no collective call and no random number of ours.
_LOCAL_ARGUMENTS = {
    *("output_dir", "local_rank", "resume_from_checkpoint", "seed", "data_seed", "log_level", "log_level_replica"),
    *("disable_tqdm", "report_to", "run_name", "project", "hub_token", "ddp_timeout", "dataloader_num_workers"),
    *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
}


def refuse_sharding_environment() -> None:
    """Refuses what `accelerate launch` was told about sharding, before accelerate acts on it."""
    for flag, (name, reason) in _SHARDING_FLAGS.items():
        if os.environ.get(flag, "false").lower() in ("true", "1", "yes", "on"):
            raise ValueError(
                f"{name} ({flag}={os.environ[flag]}) cannot be used for private training: it {reason}; {_INSTEAD}"
            )


def refuse_lone_processes(world_size: int) -> None:
    """Processes that a launcher started together must know of each other: alone, each would train a model of its own.

    Their releases would be charged to as many budgets, none of which knows of the others.
    """
    started = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1
    if started != world_size:
        raise ValueError(
            f"the launcher started {started} processes (WORLD_SIZE), but this one works with {world_size}: each would "
            "train alone. On the CPU pass --use_cpu (use_cpu=True)"
        )


def refuse_split_model(model: nn.Module, *, is_model_parallel: bool) -> None:
    """Refuses a model in pieces (tensor parallelism, FSDP2, a device map over several devices) or wrapped already."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"expected the model itself, got it wrapped in {type(model).__name__}, which works on batches behind the "
            "clipping; pass model.module: the trainer does what several processes need"
        )
    pieces = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if pieces or getattr(model, "is_distributed_loading_by_transformers", False):
        shown = f" ({pieces[0]} and {len(pieces) - 1} more)" if pieces else ""
        raise ValueError(
            f"expected a whole model on every rank, got one that was loaded in pieces{shown}: no rank has a whole "
            f"per-example gradient; load it without distributed_config and tp_plan, {_INSTEAD}"
        )
    if is_model_parallel:
        raise ValueError(
            "expected the model on one device per process, got one spread over several "
            f"(hf_device_map {getattr(model, 'hf_device_map', None)}); load it without device_map, {_INSTEAD}"
        )


def public_numbers(plan: PrivacyPlan, args: TrainingArguments, model: nn.Module) -> dict[str, Any]:
    """What every rank must have in common: the plan, the arguments, and which parameters are trained."""
    trained = [f"{name}{tuple(p.shape)}" for name, p in model.named_parameters() if p.requires_grad]
    digest = hashlib.sha256("\n".join(trained).encode()).hexdigest()
    numbers = {name: value for name, value in args.to_dict().items() if name not in _LOCAL_ARGUMENTS}
    # The plan last: where both know a name, its value is the resolved one.
    numbers |= plan.privacy_dict()
    numbers |= {"world_size": plan.world_size, "gradient_accumulation_steps": plan.gradient_accumulation_steps}
    numbers["trainable parameters"] = f"{len(trained)} tensors, {digest[:8]}"
    return numbers


def require_agreement(numbers: Mapping[str, Any]) -> None:
    """Every rank must have the same public numbers, or rates, noise, thresholds and stops would differ between them.

    All ranks raise the same error, which names the numbers by rank. A collective call.
    """
    ranks = gather_object([dict(numbers)]) if PartialState().num_processes > 1 else [dict(numbers)]
    names = dict.fromkeys(name for rank in ranks for name in rank)
    differing = {
        name: values for name in names if (values := [rank.get(name) for rank in ranks]) != values[:1] * len(ranks)
    }
    if differing:
        shown = "; ".join(f"{name}: {' | '.join(map(str, values))}" for name, values in differing.items())
        raise RuntimeError(f"the processes disagree on public numbers; by rank, {shown}")


def quiet_replica() -> None:
    """Warnings say the same on every rank: outside the main process, only errors are logged."""
    logging.getLogger("hf_dcsgd").setLevel(logging.ERROR)


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
