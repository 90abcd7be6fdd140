"""What can be asked of run_glue.py: dataclasses for `HfArgumentParser`, and the parser itself."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from friendly_errors import UserError
from transformers import HfArgumentParser, TrainingArguments

from hf_dcsgd import DCSGDTrainingArguments

FILE_FORMATS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class ModelArguments:
    """Which model, and how it is adapted."""

    _argument_group_name = "model"

    model_name_or_path: str = field(metadata={"help": "A model id of the Hugging Face Hub, or a folder."})
    config_name: str | None = _option(None, "Configuration, if it is not the model's own.")
    tokenizer_name: str | None = _option(None, "Tokenizer, if it is not the model's own.")
    model_revision: str = _option("main", "Branch, tag or commit of the model on the Hub.")
    cache_dir: str | None = _option(None, "Where downloads and prepared data are kept.")
    ignore_mismatched_sizes: bool = _option(
        False, "Start with a fresh head when the model's own has another number of labels."
    )
    lora: bool = _option(
        False, "Train low-rank adapters (peft) and the classifier, instead of the model's last layers."
    )
    lora_rank: int = _option(8, "--lora: the rank r of the adapters.")
    lora_alpha: int = _option(16, "--lora: the adapters are scaled by alpha / rank.")
    lora_dropout: float = _option(0.0, "--lora: dropout in front of the adapters.")
    lora_targets: str | None = _option(
        None, "--lora: the modules that get adapters, separated by commas, or all-linear. Default: as peft chooses."
    )
    lora_modules_to_save: str | None = _option(
        None, "--lora: modules trained in full beside the classifier, separated by commas, such as pooler."
    )


@dataclass
class DataTrainingArguments:
    """Which data, and how they become batches."""

    _argument_group_name = "data"

    task_name: str | None = _option(None, "A GLUE task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli.")
    glue_dir: str | None = _option(
        None, "Folder with GLUE's official TSV files (QNLI/train.tsv and so on). Default: the Hub's copy of GLUE."
    )
    train_file: str | None = _option(
        None, "Training data of your own: csv, tsv (read without quoting, as GLUE's are), json, jsonl or parquet."
    )
    validation_file: str | None = _option(None, "Data to evaluate on, in one of the same formats.")
    test_file: str | None = _option(None, "Data to predict, in one of the same formats; labels are not needed.")
    text_column: str | None = _option(None, "Column of the text. Default: the task's, or found by its name.")
    text_pair_column: str | None = _option(None, "Column of the second text, where examples are pairs.")
    label_column: str | None = _option(None, "Column of the label. Default: the task's, or found by its name.")
    labels: str | None = _option(
        None,
        "The labels in the order of their ids, separated by commas. Default: those in the training file, which then "
        "takes it that the set of labels is public.",
    )
    regression: bool = _option(False, "Predict a number. Found by itself when the labels are not whole numbers.")
    max_seq_length: int = _option(128, "Longer texts are cut to so many tokens.")
    pad_to_max_length: bool = _option(
        False, "Pad every text to max_seq_length. Default: to the longest of its batch, which is faster."
    )
    max_train_samples: int | None = _option(None, "Use only so many training examples.")
    max_eval_samples: int | None = _option(None, "Use only so many examples of each evaluation set.")
    max_predict_samples: int | None = _option(None, "Predict only so many examples of each test set.")
    overwrite_cache: bool = _option(False, "Tokenize anew, even if a prepared copy is there.")
    new_run: bool = _option(
        False,
        "Start a new run although output_dir holds one. What the earlier run spent stays in ledger and report.",
    )
    non_private: bool = _option(
        False,
        "NOTHING IS PRIVATE: train the same layers with transformers' own Trainer, as a reference for comparison.",
    )

    def __post_init__(self) -> None:
        if all(source is None for source in (self.task_name, self.train_file, self.validation_file, self.test_file)):
            raise UserError("give --task_name (a GLUE task), or files of your own by --train_file and so on")
        for name in ("train_file", "validation_file", "test_file"):
            path = getattr(self, name)
            if path is None:
                continue
            if Path(path).suffix.lower() not in FILE_FORMATS:
                raise UserError(f"--{name} {path}: expected one of {', '.join(FILE_FORMATS)}")
            if not Path(path).is_file():
                raise UserError(f"--{name} {path}: there is no such file")


class ReadableHelp(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """One spelling of each option, the kind of its value, and defaults where there is one to tell."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        name = action.option_strings[0]
        if action.nargs in (0, "?"):
            return name
        if action.choices is not None and len(str(action.choices)) < 90:
            return f"{name} {{{','.join(map(str, action.choices))}}}"
        return f"{name} { {int: 'N', float: 'X'}.get(action.type, 'TEXT') }"

    def _get_help_string(self, action: argparse.Action) -> str | None:
        untold = action.default in (None, False, "") or "efault" in (action.help or "")
        return action.help if untold else super()._get_help_string(action)


class GlueArgumentParser(HfArgumentParser):
    """Says what is wrong in one line, and shows the privacy options in a group of their own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            (ModelArguments, DataTrainingArguments, DCSGDTrainingArguments),
            formatter_class=ReadableHelp,
            usage="run_glue.py --model_name_or_path MODEL --task_name TASK --do_train … | FILE.json | FILE.yaml",
            **kwargs,
        )
        inherited = TrainingArguments.__dataclass_fields__
        own = set(DCSGDTrainingArguments.__dataclass_fields__) - set(inherited)
        privacy = self.add_argument_group("privacy")
        training = self.add_argument_group("training (transformers' TrainingArguments)")
        grouped = {id(action) for group in self._action_groups[2:] for action in group._group_actions}
        for action in list(self._optionals._group_actions):
            if action.dest != "help" and id(action) not in grouped:
                self._optionals._group_actions.remove(action)
                (privacy if action.dest in own else training)._group_actions.append(action)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists all options)")

    def parse(self, argv: Sequence[str]) -> tuple[ModelArguments, DataTrainingArguments, DCSGDTrainingArguments]:
        """From the command line. A JSON or YAML file may come first on it; options that follow have the last word."""
        if argv and re.search(r"\.(json|ya?ml)$", argv[0]):
            argv = [*_as_command_line(Path(argv[0])), *argv[1:]]
        try:
            model, data, training, unknown = self.parse_args_into_dataclasses(
                args=list(argv), look_for_args_file=False, return_remaining_strings=True
            )
        except ValueError as error:
            raise UserError(str(error)) from error
        if unknown:
            near = difflib.get_close_matches(unknown[0], self._option_string_actions, n=1)
            hint = f"; did you mean {near[0]}?" if near else " (--help lists all options)"
            raise UserError(f"unknown argument {unknown[0]}{hint}")
        return model, data, training


def _as_command_line(path: Path) -> list[str]:
    """A file's keys as options, so that both ways are checked alike (YAML reads 1e-3 as a string, for one)."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    try:
        if path.suffix == ".json":
            values = json.loads(path.read_text(encoding="utf-8"))
        else:
            import yaml

            values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except Exception as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected option names with their values, got {type(values).__name__}")
    argv = []
    for name, value in values.items():
        if value is None:
            continue
        parts = value if isinstance(value, list) else [value]
        argv += [f"--{name}", *(json.dumps(part) if isinstance(part, dict) else str(part) for part in parts)]
    return argv


def arguments(argv: Sequence[str] | None = None, description: str | None = None) -> tuple[Any, Any, Any]:
    """Parsed from `argv`, or from the command line."""
    parser = GlueArgumentParser(description=description)
    return parser.parse(sys.argv[1:] if argv is None else argv)
