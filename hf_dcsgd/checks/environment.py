"""What the machine, the launcher, trackers and the way a model is loaded must be like."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainingArguments

INSTEAD = (
    "use plain data parallelism (`accelerate launch --multi_gpu` or `torchrun`) or, for memory, fsdp with version 2, "
    "which shards what is frozen, with few trainable_layers or LoRA"
)
PIECES = "keeps every parameter in pieces and sums gradients in hooks of its own, behind the clipping and the noise"
OWNED = "owns gradients and optimizer, so that noise cannot enter exactly once"
_ON = ("1", "on", "yes", "true")
# What `accelerate launch` sets from its options or its configuration file.
_SHARDING_FLAGS = {
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", OWNED),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", PIECES),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (
        "parallelism_config",
        "makes several ranks share one example, so that no rank knows its gradient's norm",
    ),
}
_PAST_CHECKS = (
    "saves the model past the checks of DCSGDTrainer, without its card and without what was spent; log the folder of "
    "trainer.save_model, or checkpoints"
)
# What trackers of experiments would take beside the logs: by variable the callback, the values, the reason.
_TRACKER_SETTINGS = {
    "WANDB_WATCH": (
        "WandbCallback",
        ("gradients", "parameters", "all"),
        "hangs hooks on private backward passes, and counts private forwards; leave it out",
    ),
    "WANDB_LOG_MODEL": ("WandbCallback", ("end",), f"{_PAST_CHECKS} (WANDB_LOG_MODEL=checkpoint)"),
    "HF_DVCLIVE_LOG_MODEL": ("DVCLiveCallback", _ON, f"{_PAST_CHECKS} (HF_DVCLIVE_LOG_MODEL=all)"),
    "HF_DAGSHUB_LOG_ARTIFACTS": ("DagsHubCallback", _ON, "uploads training data; leave it out"),
}


def refuse_sharding_environment() -> None:
    """Refuse what `accelerate launch` was told about sharding, before accelerate acts on it."""
    for flag, (name, reason) in _SHARDING_FLAGS.items():
        if os.environ.get(flag, "false").lower() in _ON:
            raise ValueError(
                f"{name} ({flag}={os.environ[flag]}) cannot be used for private training: it {reason}; {INSTEAD}"
            )


def refuse_tracker_settings(callbacks: Sequence[TrainerCallback]) -> None:
    """Refuse what would have a tracker take more than the values that are logged, which were released."""
    names = {kind.__name__ for callback in callbacks for kind in type(callback).__mro__}
    for variable, (callback, refused, reason) in _TRACKER_SETTINGS.items():
        value = os.environ.get(variable, "")
        if callback in names and value.lower() in refused:
            raise ValueError(f"{variable}={value} cannot be used for private training: it {reason}")


def refuse_parallelism(args: TrainingArguments, model: nn.Module, *, is_model_parallel: bool) -> None:
    """Refuse all but one whole model on one device in each of the processes that were started."""
    refuse_several_devices(args.n_gpu)
    refuse_lone_processes(args.world_size)
    refuse_split_model(model, is_model_parallel=is_model_parallel)


def refuse_several_devices(n_gpu: int) -> None:
    """Refuse `nn.DataParallel`, which transformers turns on by itself."""
    if n_gpu > 1:
        raise ValueError(
            f"{n_gpu} GPUs in one process (nn.DataParallel) split batches behind the clipping; start one process per "
            "GPU with `accelerate launch` or `torchrun`, or set CUDA_VISIBLE_DEVICES to one GPU"
        )


def refuse_lone_processes(world_size: int) -> None:
    """Refuse processes that a launcher started together and that do not know of each other.

    Each would train a model of its own, charged to a budget that knows nothing of the others.
    """
    started = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1
    if started != world_size:
        raise ValueError(
            f"the launcher started {started} processes (WORLD_SIZE), but this one works with {world_size}: each would "
            "train alone. On the CPU pass --use_cpu (use_cpu=True)"
        )


def refuse_split_model(model: nn.Module, *, is_model_parallel: bool) -> None:
    """Refuse a model in pieces (tensor parallelism, FSDP2, a device map over several devices) or already wrapped."""
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
            f"per-example gradient; load it without distributed_config and tp_plan, {INSTEAD}"
        )
    if is_model_parallel:
        raise ValueError(
            "expected the model on one device per process, got one spread over several "
            f"(hf_device_map {getattr(model, 'hf_device_map', None)}); load it without device_map, {INSTEAD}"
        )
