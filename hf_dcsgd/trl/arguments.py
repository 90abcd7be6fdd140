"""The arguments of TRL's trainers with the options of private training; what cannot be private is refused by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl import SFTConfig

from hf_dcsgd.training_args import DCSGDTrainingArguments

_TOGETHER = "one row would hold texts of several examples, which cannot be clipped one by one"
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
}


def _refuse(args: DCSGDTrainingArguments) -> None:
    for name, (accepted, reason) in _ACCEPTED.items():
        value = getattr(args, name, accepted[0])
        if value not in accepted:
            raise ValueError(f"{name}={value} cannot be used for private training: {reason}")


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
