"""`hf-dcsgd train`: train a model on files or a data set, with a privacy report at the end."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hf_dcsgd.cli.shared import Subparsers

JOBS = {
    "text-classification": "hf_dcsgd.jobs.text_classification",
    "token-classification": "hf_dcsgd.jobs.token_classification",
    "text-generation": "hf_dcsgd.jobs.language_modeling",
}
# Short names of options that have long ones in Python.
SHORT = {
    "model": "model_name_or_path",
    "dataset": "dataset_name",
    "epsilon": "target_epsilon",
    "delta": "target_delta",
    "epochs": "num_train_epochs",
}
_GROUPS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "what": (
        ("task", "TASK", f"{', '.join(JOBS)} (which also takes conversations)"),
        ("model", "MODEL", "a model on the Hub, or a folder written by save_pretrained"),
        ("output_dir", "DIR", "where model, ledger and privacy report go"),
    ),
    "data": (
        ("train_file", "FILE", "the private training data: csv, tsv, json, jsonl or parquet"),
        ("validation_file", "FILE", "data to evaluate on; they are not protected"),
        ("test_file", "FILE", "data to predict, or prompts to go on from"),
        ("dataset", "NAME", "instead of files: a data set of the Hub, or a folder of data files"),
        ("dataset_config_name", "NAME", "which configuration of it"),
        ("text_column", "COLUMN", "where the text is; columns are found by usual names otherwise"),
        ("label_column", "COLUMN", "text-classification: where the label is"),
        ("tags_column", "COLUMN", "token-classification: where the tags are (words_column: the words)"),
        ("max_seq_length", "N", "longer texts are cut to so many tokens"),
    ),
    "privacy": (
        ("epsilon", "EPS", "the privacy budget ε of the whole run (default: 8)"),
        ("delta", "DELTA", "δ of the guarantee (default: 1/N)"),
        ("privacy_unit", "COLUMN", "protect whole persons: the column that says whose a row is"),
        ("max_rows_per_unit", "N", "how many rows of a person enter a step at most (default: 4)"),
        ("clipping", "NAME", "how the clipping threshold is chosen (default: dc_sgd_e, nothing to tune)"),
    ),
    "training": (
        ("recipe", "NAME", "where unset values come from: auto (default), paper, none"),
        ("epochs", "X", "how often to go through the data (default: by the recipe)"),
        ("learning_rate", "X", "the learning rate (default: by the recipe)"),
        ("trainable_layers", "LAYERS", "which layers are trained (default: last block, pooler, classifier)"),
        ("lora", "", "train low-rank adapters instead (needs hf-dcsgd[demo]; the default of text-generation)"),
        ("trunk_cache", "on|off", "keep what frozen layers make of the rows on disk: later epochs are faster"),
        ("bf16", "", "compute in bf16, also on a CPU"),
        ("seed", "N", "of the head's first weights and of dropout; noise and sampling have no seed"),
        ("resume_from_checkpoint", "last", "go on with an interrupted run"),
    ),
}


class _OneSpelling(argparse.RawDescriptionHelpFormatter):
    def _format_action_invocation(self, action: argparse.Action) -> str:
        name = next(name for name in action.option_strings if name.startswith("--"))
        return f"{name} {action.metavar or ''}".rstrip()


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model on files or a data set, and write its privacy report",
        usage="hf-dcsgd train FILE.yaml [OPTIONS]\n"
        "       hf-dcsgd train --task TASK --model MODEL --train_file FILE --output_dir DIR [OPTIONS]",
        description="Trains a model with differential privacy, evaluates it, and writes its privacy report.\n"
        "Options may stand in a YAML or JSON file, without the dashes; those that follow it have\n"
        "the last word. Options are written with - or _ between words.",
        epilog="exit codes:\n"
        "  0    done\n"
        "  1    a fault, with its traceback\n"
        "  2    an option, a file or a budget must be put right; nothing was spent\n"
        "  3    model, loss or data cannot be trained privately\n"
        "  4    the budget is spent, or its ledger cannot be relied upon\n"
        "  130  interrupted\n\n"
        "examples:\n"
        "  hf-dcsgd train --task text-classification --model bert-base-uncased --train_file mails.csv \\\n"
        "      --validation_file more.csv --epsilon 8 --output_dir out --dry_run\n"
        "  hf-dcsgd train out.yaml",
        formatter_class=_OneSpelling,
        allow_abbrev=False,
    )
    _declare(parser)
    parser.set_defaults(run=run, prog=parser.prog, takes_others=True)


def _declare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the short help; their values are checked by the job."""
    dry_run = "show plan, recipe, time and memory; spend nothing, train nothing"
    parser.add_argument("--dry_run", "--dry-run", nargs="?", const="true", metavar="", help=dry_run)
    parser.add_argument("--help_all", "--help-all", action="store_true", help="show all options of a task")
    for title, options in _GROUPS.items():
        group = parser.add_argument_group(title)
        for name, metavar, text in options:
            spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
            flag: Any = {"nargs": "?", "const": "true", "metavar": ""} if not metavar else {"metavar": metavar}
            group.add_argument(*spellings, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **flag)


def run(arguments: argparse.Namespace) -> int:
    from hf_dcsgd.jobs.errors import exit_code_of

    return exit_code_of(lambda: _train(arguments, arguments.others))


def _train(given: argparse.Namespace, others: Sequence[str]) -> None:
    from hf_dcsgd.jobs.arguments import as_command_line
    from hf_dcsgd.jobs.errors import UserError

    if others and re.search(r"\.(json|ya?ml)$", others[0]):
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        _declare(parser)
        in_file, more = parser.parse_known_args(as_command_line(Path(others[0])))
        asked = {name: value for name, value in vars(given).items() if value not in (None, False)}
        given, others = argparse.Namespace(**(vars(in_file) | asked)), [*more, *others[1:]]
    if others and not others[0].startswith("-"):
        raise UserError(f"unknown argument {others[0]}: expected a .yaml or .json file, or options")
    task = getattr(given, "task", None)
    if task not in JOBS:
        raise UserError(f"--task: expected one of {', '.join(JOBS)}, got {task}")
    job = import_module(JOBS[task])
    about = {"prog": f"hf-dcsgd train --task {task}", "description": job.__doc__}
    if given.help_all:
        job.run(["--help"], **about)
    argv = [*_as_options(given), *others]
    if not any(re.match(r"--do[_-]", entry) for entry in others):
        argv += _actions(given)
    if str(given.dry_run).lower() in ("true", "1", "yes"):
        with tempfile.TemporaryDirectory() as folder:
            job.run([*argv, "--dry_run", "--output_dir", folder], **about)
        return
    if not hasattr(given, "output_dir"):
        raise UserError("give --output_dir, where model and privacy report go; --dry_run needs none")
    job.run(argv, **about)


def _as_options(given: argparse.Namespace) -> list[str]:
    """Return what the short help lists as options of the job."""
    argv = []
    names = [name for options in _GROUPS.values() for name, _, _ in options if name != "task"]
    for name in names:
        value = getattr(given, name, None)
        if value is not None:
            argv += [f"--{SHORT.get(name, name)}", value]
    return argv


def _actions(given: argparse.Namespace) -> list[str]:
    """Train, and evaluate and predict where there are data for it."""
    files = {"validation": "validation_file", "test": "test_file"}
    splits = {name for name, option in files.items() if hasattr(given, option)}
    if hasattr(given, "dataset"):
        from datasets import get_dataset_split_names

        from hf_dcsgd.jobs.errors import explained
        from hf_dcsgd.jobs.text_data import no_dataset

        with explained(lambda error: no_dataset(given.dataset, error), Exception):
            found = get_dataset_split_names(given.dataset, getattr(given, "dataset_config_name", None))
        splits |= {"validation"} & set(found)
    actions = {"validation": "--do_eval", "test": "--do_predict"}
    return ["--do_train", *(action for name, action in actions.items() if name in splits)]
