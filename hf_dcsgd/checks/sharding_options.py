"""What may be asked of FSDP: that the frozen part of a model is sharded, by the arguments that people know.

`fsdp=True` with `fsdp_config`, or `accelerate launch` with `distributed_type: FSDP` and `fsdp_version: 2`, ask for it.
Neither transformers nor accelerate acts on them: both would shard what is trained, too, and sum its gradients in hooks
of their own. `sharding/` does what is asked for, and options that it cannot honor are refused here by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import TrainingArguments

_USE_FSDP = "ACCELERATE_USE_FSDP"
_TRUE = ("true", "1", "yes", "on")
# What `accelerate launch` sets for the entries of `fsdp_config` that are looked at.
_FROM_ACCELERATE = {
    "version": "FSDP_VERSION",
    "cpu_offload": "FSDP_OFFLOAD_PARAMS",
    "auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "reshard_after_forward": "FSDP_RESHARD_AFTER_FORWARD",
    "cpu_ram_efficient_loading": "FSDP_CPU_RAM_EFFICIENT_LOADING",
    "activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
}
BY_CLASS = "TRANSFORMER_BASED_WRAP"


def is_fsdp_asked_of_accelerate() -> bool:
    """Tell whether `accelerate launch` was asked for FSDP."""
    return os.environ.get(_USE_FSDP, "false").lower() in _TRUE


def fsdp_config_of_accelerate() -> dict[str, Any]:
    """Read what `accelerate launch` was told about FSDP, as entries of `fsdp_config`."""
    given = {name: os.environ.get(variable) for name, variable in _FROM_ACCELERATE.items()}
    config: dict[str, Any] = {name: value for name, value in given.items() if value not in (None, "None", "none")}
    config["version"] = int(config.get("version", 1))
    if isinstance(config.get("transformer_layer_cls_to_wrap"), str):
        config["transformer_layer_cls_to_wrap"] = config["transformer_layer_cls_to_wrap"].split(",")
    return config


def reads_weights(args: TrainingArguments) -> bool:
    """Tell whether this process needs the weights of a model: where they are sharded, the main process alone does."""
    return not args.fsdp or args.process_index == 0


@contextmanager
def accelerate_without_fsdp() -> Iterator[None]:
    """Hide from accelerate within a block that it was asked for FSDP: it prepares plain data parallelism."""
    asked = os.environ.pop(_USE_FSDP, None)
    try:
        yield
    finally:
        if asked is not None:
            os.environ[_USE_FSDP] = asked


def refuse_dishonored_sharding(args: TrainingArguments) -> None:
    """Raise `ValueError` for what was asked of FSDP and would not be done; nothing where FSDP was not asked for."""
    if not args.fsdp:
        return
    config: Mapping[str, Any] = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
    config = {**_named_options(args.fsdp), **config}
    version = int(config.get("version", 2))
    asked = {
        "version": (version != 2, "FSDP1 keeps every parameter in flat pieces; use version 2 (fsdp_version: 2)"),
        "cpu_offload": (_is_on(config.get("cpu_offload")), "weights stay on the device; use more processes"),
        "auto_wrap_policy": (
            config.get("auto_wrap_policy", BY_CLASS) != BY_CLASS,
            f"blocks are sharded one by one; leave it at {BY_CLASS}",
        ),
        "reshard_after_forward": (
            str(config.get("reshard_after_forward", True)).lower() not in (*_TRUE, "full_shard"),
            "gathered weights are freed after each block; leave it at true",
        ),
        "activation_checkpointing": (
            _is_on(config.get("activation_checkpointing")),
            "use gradient_checkpointing=True, which does the same",
        ),
        "xla": (_is_on(config.get("xla")), "XLA has an FSDP of its own; it is not supported"),
    }
    for name, (refused, reason) in asked.items():
        if refused:
            raise ValueError(f"fsdp_config: {name}={config.get(name)!r} cannot be honored: {reason}")
    together = {
        "trunk_cache": (
            getattr(args, "trunk_cache", "off") != "off",
            "ranks would run the frozen blocks a different number of times",
        ),
        "bf16_full_eval": (args.bf16_full_eval, "weights in pieces are not converted; load the frozen part in bf16"),
        "fp16_full_eval": (args.fp16_full_eval, "weights in pieces are not converted; load the frozen part in bf16"),
        "predict_with_generate": (
            getattr(args, "predict_with_generate", False),
            "ranks would generate texts of different lengths; generate after training, with the saved model",
        ),
        "torch_compile": (args.torch_compile, "the order in which weights are gathered would not be seen"),
    }
    if not getattr(args.accelerator_config, "even_batches", True):
        raise ValueError("accelerator_config: even_batches=False cannot be used with fsdp: ranks must evaluate alike")
    for name, (refused, reason) in together.items():
        if refused:
            raise ValueError(f"{name}={getattr(args, name)} cannot be used with fsdp: {reason}")


def _named_options(fsdp: Any) -> dict[str, Any]:
    """Return what `fsdp` itself names as entries of `fsdp_config`, which newer releases of transformers do."""
    names = {str(getattr(option, "value", option)) for option in fsdp} if isinstance(fsdp, list | tuple) else set()
    others = sorted(names - {"full_shard", "shard_grad_op", "offload", "auto_wrap"})
    if others:
        raise ValueError(f"fsdp={' '.join(others)} cannot be honored: all processes share each block; use full_shard")
    asked: dict[str, Any] = {"reshard_after_forward": False} if "shard_grad_op" in names else {}
    return asked | ({"cpu_offload": True} if "offload" in names else {})


def _is_on(value: Any) -> bool:
    return str(value).lower() in _TRUE
