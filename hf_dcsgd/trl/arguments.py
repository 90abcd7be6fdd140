"""The arguments of TRL's trainers with the options of private training; what cannot be private is refused by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl import DPOConfig, RewardConfig, SFTConfig

from hf_dcsgd.training_args import DCSGDTrainingArguments

_TOGETHER = "one row would hold texts of several examples, which cannot be clipped one by one"
_ONE_LOSS = "only the usual loss of a pair is known here as a loss of that pair alone"
_DPO_LOSSES = ("sigmoid", "hinge", "ipo")
# Where an option of TRL has another value than these, a run is refused with the reason.
_ACCEPTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "packing": ((False,), f"{_TOGETHER}; leave it at False: rows of like lengths share a stack anyway"),
    "padding_free": ((False,), f"the texts of a batch are run as one row: {_TOGETHER}; leave it at False"),
    "activation_offloading": (
        (False,),
        "it surrounds TRL's training step, which the private one replaces; save memory by gradient_checkpointing",
    ),
    "router_aux_loss_coef": (
        (0.0,),
        "how evenly experts are used is a property of the whole batch, so examples would affect each other; leave it "
        "at 0.0",
    ),
    "precompute_ref_log_probs": (
        (True,),
        "a private step runs the trained model alone; leave it at True, and the reference is run before training",
    ),
    "precompute_ref_batch_size": (
        (1,),
        "what the reference says of a pair must not depend on the pairs beside it; leave it at 1",
    ),
    "sync_ref_model": ((False,), "the reference is run once, before training; leave it at False"),
    "f_divergence_type": (("reverse_kl",), f"{_ONE_LOSS}; leave it at reverse_kl"),
    "loss_weights": ((None, [1.0]), f"{_ONE_LOSS}; leave it at None"),
    "use_weighting": ((False,), f"{_ONE_LOSS}; leave it at False"),
    "ld_alpha": ((None,), f"{_ONE_LOSS}; leave it at None"),
}


def _refuse(args: DCSGDTrainingArguments) -> None:
    for name, (accepted, reason) in _ACCEPTED.items():
        value = getattr(args, name, accepted[0])
        if value not in accepted:
            raise ValueError(f"{name}={value} cannot be used for private training: {reason}")
    if isinstance(args, DPOConfig):
        kinds = [args.loss_type] if isinstance(args.loss_type, str) else list(args.loss_type)
        if len(kinds) != 1 or kinds[0] not in _DPO_LOSSES:
            raise ValueError(
                f"loss_type={args.loss_type} cannot be used for private training: expected one of "
                f"{', '.join(_DPO_LOSSES)}; some others compare pairs with each other"
            )
        args.loss_type = kinds  # as TRL keeps it, also where it was set as a single name since


class _Checked(DCSGDTrainingArguments):
    """Refuses options of TRL, when they are made and when they are checked again."""

    def __post_init__(self) -> None:
        _refuse(self)
        super().__post_init__()

    def check(self) -> None:
        """Check again, for arguments changed one by one; `ValueError` or `TypeError` names what is wrong."""
        _refuse(self)
        super().check()


def _logging_steps() -> Any:
    return field(
        default=10, metadata={"help": "Log every so many steps, or after this share of all steps if below 1."}
    )


def _no_router_loss() -> Any:
    return field(
        default=0.0, metadata={"help": "Must be 0: how evenly experts are used is a property of the whole batch."}
    )


@dataclass
class DCSGDSFTConfig(_Checked, SFTConfig):
    """Arguments of `DCSGDSFTTrainer`: everything `SFTConfig` has, and the options of `DCSGDTrainingArguments`.

    Defaults that differ from `SFTConfig` are those of `DCSGDTrainingArguments`, and

    | argument                 | here  | `SFTConfig` | why                                                        |
    |--------------------------|-------|-------------|------------------------------------------------------------|
    | `bf16`                   | False | True        | norms are as exact as the precision they are computed in   |
    | `gradient_checkpointing` | False | True        | what is recomputed is not spot-checked by its norm         |
    | `router_aux_loss_coef`   | 0.0   | None        | the balance of experts couples examples                    |
    """

    logging_steps: float = _logging_steps()
    router_aux_loss_coef: float | None = _no_router_loss()


@dataclass
class DCSGDRewardConfig(_Checked, RewardConfig):
    """Arguments of `DCSGDRewardTrainer`: everything `RewardConfig` has, and those of `DCSGDTrainingArguments`.

    Defaults that differ are those of `DCSGDSFTConfig`.
    """

    logging_steps: float = _logging_steps()


@dataclass
class DCSGDDPOConfig(_Checked, DPOConfig):
    """Arguments of `DCSGDDPOTrainer`: everything `DPOConfig` has, and the options of `DCSGDTrainingArguments`.

    Defaults that differ are those of `DCSGDSFTConfig`, and `precompute_ref_log_probs`, which is True: the reference
    is run before training, on one pair at a time.
    """

    logging_steps: float = _logging_steps()
    router_aux_loss_coef: float | None = _no_router_loss()
    precompute_ref_log_probs: bool = field(
        default=True, metadata={"help": "Must be True: what the reference says of each pair is computed first."}
    )
    precompute_ref_batch_size: int | None = field(
        default=1,
        metadata={"help": "Must be 1: what the reference says of a pair must not depend on those beside it."},
    )
