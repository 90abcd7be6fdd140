"""What TRL's trainers have in common: each overrides methods of `Trainer` on which the guarantee rests.

A private trainer has three bases, `class Private(Bridge, TheirTrainer, DCSGDTrainer)`: theirs prepares model and data
and hands both to `DCSGDTrainer`, and the bridge puts back what theirs has overridden.

| method               | here                                                                                         |
|----------------------|----------------------------------------------------------------------------------------------|
| `training_step`      | the private step; theirs is the loss of a batch, within a context for offloaded activations  |
| `compute_loss`       | as in `DCSGDTrainer`, for evaluation alone; there theirs is called                           |
| `log`                | theirs, for an evaluation; what theirs gathers in training is private, and is dropped        |
| `predict`            | theirs; what it gathers, of training rows perhaps, is dropped before the next evaluation     |
| `create_model_card`  | as in `DCSGDTrainer`: a card with the privacy statement                                      |
| `evaluate`, `prediction_step`, `_prepare_dataset`, columns | theirs                                                 |
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from hf_dcsgd.checks.trainer_inputs import require_arguments, validate_inputs
from hf_dcsgd.trainer import DCSGDTrainer
from hf_dcsgd.training_args import DCSGDTrainingArguments

# Where TRL prepares data and would quote a prompt that it tokenizes in two ways.
_QUOTED = "is left out of the training sequence"


class Bridge(DCSGDTrainer if TYPE_CHECKING else object):  # type: ignore[misc]
    """Comes first among the bases of a private trainer of TRL: see the module."""

    config_class: ClassVar[type[DCSGDTrainingArguments]]

    def __init__(self, model: Any, args: Any, **named: Any) -> None:
        require_arguments(args, self.config_class).check()  # a script may have set them one by one
        # Before TRL loads a model and prepares data.
        collate, data, loss = (named.get(name) for name in ("data_collator", "train_dataset", "compute_loss_func"))
        validate_inputs(None, 0.0, collate, data, loss, per_example_loss_func=None, rows_per_example=1)
        with prompts_unquoted():
            super().__init__(model=model, args=args, **named)

    training_step = DCSGDTrainer.training_step
    compute_loss = DCSGDTrainer.compute_loss

    def evaluation_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Compute the loss of an evaluation batch as TRL does, with its metrics."""
        return super().compute_loss(model, inputs, return_outputs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log TRL's metrics of an evaluation, and what the step released; its metrics of training are private."""
        self._metrics["train"].clear()
        self._metrics["eval"].pop("num_tokens", None)  # how many were trained on
        super().log(logs, start_time)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as TRL does, for any rows; nothing of it is logged, nor left for the log of the next evaluation."""
        try:
            return super().predict(*args, **kwargs)
        finally:
            self._metrics["eval"].clear()

    def create_model_card(self, *args: Any, dataset_name: str | None = None, **kwargs: Any) -> None:
        """Write `README.md` as `DCSGDTrainer` does; `dataset_name` is as for TRL."""
        kwargs.setdefault("tags", self._tag_names)
        DCSGDTrainer.create_model_card(self, *args, **_with_dataset(dataset_name, kwargs))

    def push_to_hub(self, *args: Any, dataset_name: str | None = None, **kwargs: Any) -> Any:
        """Upload as `DCSGDTrainer` does; `dataset_name` is for the card, as for TRL."""
        return super().push_to_hub(*args, **_with_dataset(dataset_name, kwargs))


def _with_dataset(name: str | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """Add a dataset of the Hub; a folder of that name is on this machine alone."""
    return arguments if name is None or Path(name).exists() else {"dataset_tags": name, **arguments}


@contextmanager
def prompts_unquoted() -> Iterator[None]:
    """Keep TRL's warnings from quoting the training data within the block."""
    loggers = [logging.getLogger(f"trl.trainer.{name}_trainer") for name in ("sft", "dpo")]
    for logger in loggers:
        logger.addFilter(_without_quotation)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_without_quotation)


def _without_quotation(record: logging.LogRecord) -> bool:
    if _QUOTED in record.getMessage():
        record.msg, record.args = record.getMessage().partition(_QUOTED)[0] + _QUOTED, ()
    return True
