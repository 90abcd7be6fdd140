"""What transformers' example scripts have in common, in our own words: arguments, mapped data, one call of a trainer.

A script is a function of the two names that are changed, a trainer class and an arguments class, and of a command
line; so the same text runs with transformers' own names and with those of hf_dcsgd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
import transformers as hf

Rows = datasets.Dataset
Names = tuple[type[hf.Trainer], type[hf.TrainingArguments]]
TRAIN_ROWS, EVAL_ROWS = 32, 8
COMMON = "--do_train --do_eval --use_cpu --report_to none --disable_tqdm true --save_strategy no --max_steps 2"


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "Where the model is."})


@dataclass
class DataArguments:
    max_seq_length: int = field(default=24, metadata={"help": "Longer texts are cut."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only so many rows."})
    num_beams: int | None = field(default=None, metadata={"help": "Beams of the evaluation."})


@dataclass
class Parsed:
    """The three dataclasses of a script, and the folder of its model."""

    model: ModelArguments
    data: DataArguments
    training: Any

    @property
    def path(self) -> str:
        return self.model.model_name_or_path


def parse(arguments_class: type[hf.TrainingArguments], argv: Sequence[str]) -> Parsed:
    parser: Any = hf.HfArgumentParser((ModelArguments, DataArguments, arguments_class))
    parsed = Parsed(*parser.parse_args_into_dataclasses(list(argv)))
    hf.set_seed(parsed.training.seed)
    return parsed


def made_up(
    row: Callable[[int], dict[str, Any]], training: Any, prepare: Any = None, **options: Any
) -> tuple[Any, Any]:
    """Return training and evaluation rows, mapped as scripts map theirs."""
    first = {"train": range(TRAIN_ROWS), "validation": range(1000, 1000 + EVAL_ROWS)}
    raw = datasets.DatasetDict({split: Rows.from_list([row(k) for k in numbers]) for split, numbers in first.items()})
    if prepare is not None:
        with training.main_process_first(desc="mapping"):
            raw = raw.map(prepare, batched=True, **options)
    return raw["train"], raw["validation"]


def train_and_evaluate(trainer: hf.Trainer, parsed: Parsed, **facts: Any) -> dict[str, float]:
    """End as all scripts do: train, save, log, evaluate, write the card."""
    args = parsed.training
    metrics: dict[str, float] = {}
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        metrics |= {**result.metrics, "train_samples": len(trainer.train_dataset)}  # type: ignore[arg-type]
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if args.do_eval:
        found = trainer.evaluate()
        trainer.log_metrics("eval", found)
        trainer.save_metrics("eval", found)
        metrics |= found
    trainer.create_model_card(finetuned_from=parsed.path, **facts)
    return metrics
