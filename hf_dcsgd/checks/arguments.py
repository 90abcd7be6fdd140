"""Training arguments that cannot be private, contradict each other or would waste a budget: refused by name."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments

from hf_dcsgd.checks.environment import INSTEAD, OWNED
from hf_dcsgd.checks.sharding_options import refuse_dishonored_sharding
from hf_dcsgd.clipping import BUILTIN_OPTIONS, strategy
from hf_dcsgd.privacy.accounting import MAX_NOISE_MULTIPLIER
from hf_dcsgd.validation import (
    require,
    require_count,
    require_fraction,
    require_kind,
    require_one_of,
    require_positive,
)

if TYPE_CHECKING:
    from hf_dcsgd.training_args import DCSGDTrainingArguments

logger = logging.getLogger(__name__)

SAMPLING_STRATEGIES = ("random", "group_by_length")
# What to do about earlier runs on the same weights: count what they spent, or leave it out by name.
COUNTED, OTHER_DATA = "count", "other_data"


def refuse_incompatible_arguments(args: TrainingArguments) -> None:
    """Raise `ValueError` for an argument under which training would not be private.

    Takes the values as given, before transformers parses them: it would ask for packages that cannot be used anyway.
    """
    checkpointing = as_mapping("gradient_checkpointing_kwargs", args.gradient_checkpointing_kwargs) or {}
    refusals = {
        "fp16": (
            args.fp16,
            "its gradient scaler skips steps depending on private data; use bf16=True, which works on a CPU, too",
        ),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "the batch size sets the sampling rate and so ε; choose it with per_device_train_batch_size",
        ),
        "deepspeed": (args.deepspeed is not None, f"it {OWNED}; {INSTEAD}"),
        "include_num_input_tokens_seen": (
            args.include_num_input_tokens_seen not in ("no", False),
            "the number of tokens drawn is private; leave it at 'no'",
        ),
        "train_sampling_strategy": (
            args.train_sampling_strategy not in SAMPLING_STRATEGIES,
            f"the guarantee needs Poisson sampling; expected one of {', '.join(SAMPLING_STRATEGIES)}",
        ),
        "optim": (
            any(word in str(getattr(args.optim, "value", args.optim)) for word in ("lomo", "layerwise")),
            "it steps inside the backward pass, before the noise; use another optimizer",
        ),
        "neftune_noise_alpha": (
            args.neftune_noise_alpha is not None,
            "its noise on an example is scaled by the padded length of the batch, so examples affect each other",
        ),
        "use_liger_kernel": (
            args.use_liger_kernel,
            "its kernels replace the layers, of which none then shows what each example adds; leave it at False",
        ),
        "gradient_checkpointing_kwargs": (
            args.gradient_checkpointing and bool(checkpointing.get("use_reentrant")),
            "reentrant checkpointing hides the gradients of single layers; use {'use_reentrant': False}",
        ),
        "debug": (
            "underflow_overflow" in str(args.debug),
            "it prints activations of private examples; look for overflows on public data instead",
        ),
        "skip_memory_metrics": (
            not args.skip_memory_metrics,
            "memory in use follows the sizes of the private batches; leave it at True",
        ),
    }
    for name, (refused, reason) in refusals.items():
        if refused:
            raise ValueError(f"{name}={getattr(args, name)} cannot be used for private training: {reason}")


def require_sound_arguments(args: DCSGDTrainingArguments) -> None:
    """Refuse values that are wrong by themselves or together, once transformers has parsed them."""
    _require_sound_budget(args)
    _require_sound_optimization(args)
    refuse_dishonored_sharding(args)
    _require_sound_clipping(args)
    if args.torch_compile:
        logger.warning(
            "torch_compile=True compiles evaluation alone: clipping watches modules, which merge in a graph"
        )


def _require_sound_optimization(args: TrainingArguments) -> None:
    """Refuse what would turn the weights into NaN after the budget is spent, or fail inside the optimizer."""
    for name in ("learning_rate", "weight_decay", "max_grad_norm", "label_smoothing_factor"):
        value: Any = getattr(args, name)
        if value is None and name == "learning_rate":  # derived later, when the data are known
            continue
        require_kind(name, value, float)
        if not (float(value) >= 0 and math.isfinite(value)):
            raise ValueError(f"expected {name} >= 0 and finite, got {value:g}")
    if args.label_smoothing_factor > 1:
        raise ValueError(f"expected label_smoothing_factor in [0, 1], got {args.label_smoothing_factor:g}")


def _require_noise_multiplier(name: str, value: float) -> None:
    most = MAX_NOISE_MULTIPLIER
    require_positive(name, value)
    require(value <= most, f"expected {name} <= {most:g}, got {value}: nothing but noise would be left")


# Options of this package whose values are no choices: what they must be. Those of clipping strategies are not here.
_CHECKS: dict[str, tuple[type, Callable[[str, Any], Any]]] = {
    "target_epsilon": (float, require_positive),
    "target_delta": (float, require_fraction),
    "noise_multiplier": (float, _require_noise_multiplier),
    "trainable_layers": (str, lambda name, value: None),
    "trunk_cache_dir": (str, lambda name, value: None),
    "privacy_unit": (str, lambda name, value: require(bool(value), f"expected a column for {name}, got {value!r}")),
    "max_rows_per_unit": (int, require_count),
    "loss_clip": (float, require_positive),
    "loss_noise_multiplier": (float, require_positive),
    "unsafe_noise_seed": (int, functools.partial(require_count, minimum=0)),
}


def _require_sound_budget(args: DCSGDTrainingArguments) -> None:
    """Refuse privacy options of a wrong kind or value. Those of clipping strategies are checked by the strategies."""
    fields = {field.name: field for field in dataclasses.fields(args)}
    for name, value in args.privacy_options().items():
        if value is None and fields[name].default is None:
            continue
        if "choices" in fields[name].metadata:
            require_kind(name, value, str)
            require_one_of(name, value, fields[name].metadata["choices"])
        elif name in _CHECKS:
            kind, check = _CHECKS[name]
            require_kind(name, value, kind)
            check(name, value)
    require(
        args.target_epsilon is None or args.noise_multiplier is None,
        f"expected one of target_epsilon and noise_multiplier, got both: {args.target_epsilon} and "
        f"{args.noise_multiplier}",
    )


def _require_sound_clipping(args: DCSGDTrainingArguments) -> None:
    """Check the options of the chosen strategy; those of other strategies that are given are only named."""
    args.clipping_options = as_mapping("clipping_options", args.clipping_options)
    declared = {option.name: option for option in strategy(args.clipping).options}
    for name, value in (args.clipping_options or {}).items():
        require(name not in BUILTIN_OPTIONS, f"expected {name} as an argument of its own, not in clipping_options")
        require(name in declared, f"expected clipping_options of clipping={args.clipping}, got {name}={value!r}")
        declared[name].checked(value)
    unused = []
    for name, option in BUILTIN_OPTIONS.items():
        value = getattr(args, name)
        if value is not None or option.default is not None:
            option.checked(value)
        if name not in declared and name != "clip_threshold" and value != option.default:
            unused.append(f"{name}={value}")
    if unused:  # no error, so that one argument changes the strategy
        logger.warning("clipping=%s does not use %s", args.clipping, ", ".join(sorted(unused)))


def as_mapping(name: str, value: Any) -> dict[str, Any] | None:
    """Return a mapping that may still be JSON text, as it comes from the command line."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"expected {name} as JSON text, got {value!r}: {error}") from error
    if value is not None and not isinstance(value, dict):
        raise TypeError(f"expected {name} to be a mapping, got {value!r}")
    return value
