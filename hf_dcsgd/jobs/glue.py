"""Describe text tasks, list GLUE's nine, and read their official TSV files."""

from __future__ import annotations

import csv
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from hf_dcsgd.jobs.errors import UserError


@dataclass(frozen=True)
class Task:
    """What is predicted from which columns. Labels are in the order of their ids; none make it a regression."""

    name: str
    folder: str  # of the official files; "" for data of the user's own
    texts: tuple[str, ...]
    labels: tuple[str, ...] = ()
    written: tuple[Any, ...] = ()  # the labels as files write them, if differently
    metrics: tuple[str, ...] = ("accuracy",)
    label: str | None = "label"
    # Where the official files differ from the Hub's copy: columns, label, sets to evaluate, files without a header.
    file_texts: tuple[str, ...] = ()
    file_label: str = "label"
    subsets: tuple[str, ...] = ("",)
    headerless: tuple[str, ...] = ()

    @property
    def is_regression(self) -> bool:
        return not self.labels

    def files(self) -> dict[str, str]:
        """Return the official file of each split; splits are named as on the Hub."""
        evaluated = {"validation": "dev", "test": "test"}
        names = {split + subset: stem + subset for split, stem in evaluated.items() for subset in self.subsets}
        return {split: f"{stem}.tsv" for split, stem in ({"train": "train"} | names).items()}

    def shown(self, prediction: float) -> str:
        """Return a prediction as GLUE's server, or the user's own data, would have it."""
        return f"{prediction:.3f}" if self.is_regression else str((self.written or self.labels)[int(prediction)])


_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
_BITS = ("0", "1")
_WITH_F1 = ("accuracy", "f1")

# fmt: off
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("cola", "CoLA", ("sentence",), ("unacceptable", "acceptable"), _BITS, ("matthews_correlation",),
             headerless=("source", "label", "mark", "sentence")),
        Task("sst2", "SST-2", ("sentence",), ("negative", "positive"), _BITS),
        Task("mrpc", "MRPC", _PAIR, ("not_equivalent", "equivalent"), _BITS, _WITH_F1,
             file_texts=("#1 String", "#2 String"), file_label="Quality"),
        Task("stsb", "STS-B", _PAIR, metrics=("pearson", "spearmanr"), file_label="score"),
        Task("qqp", "QQP", ("question1", "question2"), ("not_duplicate", "duplicate"), _BITS, _WITH_F1,
             file_label="is_duplicate"),
        Task("mnli", "MNLI", ("premise", "hypothesis"), ("entailment", "neutral", "contradiction"),
             file_texts=_PAIR, file_label="gold_label", subsets=("_matched", "_mismatched")),
        Task("qnli", "QNLI", ("question", "sentence"), _ENTAILMENT),
        Task("rte", "RTE", _PAIR, _ENTAILMENT),
        Task("wnli", "WNLI", _PAIR, _ENTAILMENT[::-1], _BITS),
    )
}
# fmt: on


def find_task(name: str) -> Task:
    """Return the task of that name; `SST-2`, `sst_2` and `sst2` are the same."""
    wanted = name.lower().replace("-", "").replace("_", "")
    if wanted in TASKS:
        return TASKS[wanted]
    near = difflib.get_close_matches(wanted, TASKS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"unknown --task_name {name!r}{hint} (tasks: {', '.join(TASKS)})")


def read_glue_folder(task: Task, root: Path) -> dict[str, Dataset]:
    """Read the splits that are there, from `root/QNLI`, `root/qnli` or `root` itself."""
    if not root.is_dir():
        raise UserError(f"--glue_dir {root} is not a folder")
    folders = (path for path in sorted(root.iterdir()) if path.name.lower() in (task.folder.lower(), task.name))
    folder = next(folders, root)
    found = {split: folder / name for split, name in task.files().items() if (folder / name).is_file()}
    if not found:
        raise UserError(
            f"--glue_dir {root} holds none of {', '.join(task.files().values())} for {task.name}; expected them in "
            f"{root / task.folder}"
        )
    return {split: read_official_tsv(task, path, test=split.startswith("test")) for split, path in found.items()}


def read_official_tsv(task: Task, path: Path, *, test: bool = False) -> Dataset:
    """Read the text columns, under their names on the Hub, and the label as it is written, if there is one.

    Corrupted lines (QQP has some) and lines without a gold label (MNLI: "-") are left out, as on the Hub.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        # The files do not quote: a lone quotation mark is part of the text.
        lines = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    if not lines:
        raise UserError(f"{path} is empty")
    if task.headerless and "sentence" not in lines[0]:
        lines.insert(0, list(task.headerless))
    header, *rows = lines
    columns = dict(zip(task.texts, task.file_texts or task.texts, strict=True))
    if task.file_label in header or not test:
        columns["label"] = task.file_label
    missing = [name for name in columns.values() if name not in header]
    if missing:
        raise UserError(f"{path}: no column {missing[0]!r} for task {task.name} (columns: {', '.join(header)})")
    places = {name: header.index(column) for name, column in columns.items()}
    rows = [row for row in rows if len(row) > max(places.values())]
    if "label" in places:
        rows = [row for row in rows if row[places["label"]] != "-"]
    return Dataset.from_dict({name: [row[place] for row in rows] for name, place in places.items()})
