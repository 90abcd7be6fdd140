"""Parse what can be asked of a job, from a command line or a file, with one-line errors."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser, TrainingArguments

from hf_dcsgd.jobs.errors import UserError, explained
from hf_dcsgd.training_args import DCSGDTrainingArguments

FILE_FORMATS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def option(default: Any, text: str) -> Any:
    """Make a field of a dataclass of arguments, with its help."""
    return field(default=default, metadata={"help": text})


@dataclass
class ModelArguments:
    """Which model, and how it is adapted."""

    _argument_group_name = "model"

    model_name_or_path: str = field(metadata={"help": "A model id of the Hugging Face Hub, or a folder."})
    config_name: str | None = option(None, "Configuration, if it is not the model's own.")
    tokenizer_name: str | None = option(None, "Tokenizer, if it is not the model's own.")
    model_revision: str = option("main", "Branch, tag or commit of the model on the Hub.")
    cache_dir: str | None = option(None, "Where downloads and prepared data are kept.")
    ignore_mismatched_sizes: bool = option(False, "Start with a fresh head if the labels are others than the model's.")
    lora: bool = option(False, "Train low-rank adapters (peft) and the classifier, not the model's last layers.")
    lora_rank: int = option(8, "--lora: the rank r of the adapters.")
    lora_alpha: int = option(16, "--lora: the adapters are scaled by alpha / rank.")
    lora_dropout: float = option(0.0, "--lora: dropout in front of the adapters.")
    lora_targets: str | None = option(
        None, "--lora: modules that get adapters, or all-linear. Default: peft's choice."
    )
    lora_modules_to_save: str | None = option(None, "--lora: modules trained in full, too, such as pooler.")


@dataclass
class FileArguments:
    """Which files, how much of them, and what is done in a folder that holds a run."""

    dataset_name: str | None = option(
        None, "A data set of the Hub, or a folder with data files: its splits train, validation and test."
    )
    dataset_config_name: str | None = option(None, "Which configuration of dataset_name.")
    train_file: str | None = option(
        None, "Training data: csv, tsv (without quoting, as GLUE's), json, jsonl or parquet."
    )
    validation_file: str | None = option(None, "Data to evaluate on, in one of the same formats.")
    test_file: str | None = option(None, "Data to predict, in one of the same formats; labels are not needed.")
    max_seq_length: int = option(128, "Longer texts are cut to so many tokens.")
    max_train_samples: int | None = option(None, "Use only so many training examples.")
    max_eval_samples: int | None = option(None, "Use only so many examples of each evaluation set.")
    max_predict_samples: int | None = option(None, "Predict only so many examples of each test set.")
    overwrite_cache: bool = option(False, "Tokenize anew, even if a prepared copy is there.")
    new_run: bool = option(
        False, "Start a new run although output_dir holds one; what that one spent stays in the ledger."
    )
    non_private: bool = option(
        False, "NOTHING IS PRIVATE: train the same layers by transformers' Trainer, to compare."
    )
    dry_run: bool = option(
        False, "Show plan, recipe and what the run will take in time and memory; spend and train nothing."
    )
    estimate: bool = option(True, "Say before training what it will take in time and memory.")

    def __post_init__(self) -> None:
        for name in ("train_file", "validation_file", "test_file"):
            path = getattr(self, name)
            if path is not None and Path(path).suffix.lower() not in FILE_FORMATS:
                raise UserError(f"--{name} {path}: expected one of {', '.join(FILE_FORMATS)}")
            if path is not None and not Path(path).is_file():
                raise UserError(f"--{name} {path}: there is no such file")

    def limited(self, rows: Any, split: str) -> Any:
        """Return as many rows of a split as are asked for."""
        limits = {
            "train": self.max_train_samples,
            "validation": self.max_eval_samples,
            "test": self.max_predict_samples,
        }
        limit = limits[split.split("_")[0]]
        return rows if limit is None else rows.select(range(min(limit, len(rows))))

    @property
    def has_files(self) -> bool:
        """Whether any data of the user's own are given, by a file or by the name of a data set."""
        sources = (self.dataset_name, self.train_file, self.validation_file, self.test_file)
        return any(source is not None for source in sources)


@dataclass
class DataTrainingArguments(FileArguments):
    """Which data, and how they become batches. Several columns, labels or modules are separated by commas."""

    _argument_group_name = "data"

    task_name: str | None = option(None, "A GLUE task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli.")
    glue_dir: str | None = option(None, "Folder with GLUE's official TSV files. Default: the Hub's copy of GLUE.")
    text_column: str | None = option(None, "Column of the text. Default: the task's, or found by its name.")
    text_pair_column: str | None = option(None, "Column of the second text, where examples are pairs.")
    label_column: str | None = option(None, "Column of the label. Default: the task's, or found by its name.")
    labels: str | None = option(
        None, "The labels by id, such as no,yes. Default: those in the training file, which are then taken as public."
    )
    regression: bool = option(False, "Predict a number. Found by itself when the labels are not whole numbers.")
    pad_to_max_length: bool = option(False, "Pad every text to max_seq_length, not just to the longest of its batch.")

    def __post_init__(self) -> None:
        if self.task_name is None and not self.has_files:
            raise UserError(
                "give --task_name (a GLUE task), files of your own by --train_file and so on, or --dataset_name"
            )
        if self.text_pair_column is not None and self.text_column is None:
            raise UserError(f"--text_pair_column {self.text_pair_column!r} needs --text_column, too")
        super().__post_init__()


class ReadableHelp(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows one spelling of each option, the kind of its value, and defaults where there is one to tell."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        name = action.option_strings[0]
        if action.nargs in (0, "?"):
            return name
        if action.choices is not None and len(str(action.choices)) < 90:
            return f"{name} {{{','.join(map(str, action.choices))}}}"
        return f"{name} {'N' if action.type is int else 'X' if action.type is float else 'TEXT'}"

    def _get_help_string(self, action: argparse.Action) -> str | None:
        untold = action.default in (None, False, "") or "efault" in (action.help or "")
        return action.help if untold else super()._get_help_string(action)


class JobParser(HfArgumentParser):
    """Says what is wrong in one line, and shows the privacy options in a group of their own."""

    def __init__(self, model: Any = ModelArguments, data: Any = DataTrainingArguments, **kwargs: Any) -> None:
        self.groups: dict[bool, Any] = {}  # by whether an option is one of private training
        dataclasses: Any = (model, data, DCSGDTrainingArguments)
        super().__init__(dataclasses, formatter_class=ReadableHelp, **kwargs)

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """Group the options of DCSGDTrainingArguments; the other dataclasses are groups by themselves."""
        if names[0] == "-h":
            return super().add_argument(*names, **settings)
        if not self.groups:
            self.groups[True] = self.add_argument_group("privacy")
            self.groups[False] = self.add_argument_group("training (transformers' TrainingArguments)")
        action = names[0].removeprefix("--").removeprefix("no_")
        is_private = action in _field_names(DCSGDTrainingArguments) - _field_names(TrainingArguments)
        return self.groups[is_private].add_argument(*names, **settings)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists all options)")

    def parse(self, argv: Sequence[str]) -> tuple[Any, Any, DCSGDTrainingArguments]:
        """Parse a command line. A JSON or YAML file may come first on it; options that follow have the last word."""
        if argv and re.search(r"\.(json|ya?ml)$", argv[0]):
            argv = [*as_command_line(Path(argv[0])), *argv[1:]]
        with explained(str, ValueError):
            parsed: Any = self.parse_args_into_dataclasses(list(argv), True, look_for_args_file=False)
            model, data, training, unknown = parsed
        if unknown:
            known = [f"--{name}" for dataclass in self.dataclass_types for name in _field_names(dataclass)]
            near = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"; did you mean {near[0]}?" if near else " (--help lists all options)"
            raise UserError(f"unknown argument {unknown[0]}{hint}")
        return model, data, training


def _field_names(dataclass: Any) -> set[str]:
    return {field.name for field in fields(dataclass)}


def as_command_line(path: Path) -> list[str]:
    """Return a file's keys as options, so that both are checked alike (YAML reads 1e-3 as a string, for one)."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    with explained(lambda error: f"{path} cannot be read: {' '.join(str(error).split())}", Exception):
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected option names with their values, got {type(values).__name__}")
    argv = []
    for name, value in values.items():
        if value is not None:
            parts = value if isinstance(value, list) else [value]
            argv += [f"--{name}", *(json.dumps(part) if isinstance(part, dict) else str(part) for part in parts)]
    return argv
