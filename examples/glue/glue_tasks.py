"""The nine GLUE tasks: columns, labels, metrics, and the layout of the official TSV files."""

from __future__ import annotations

import csv
import difflib
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, DatasetDict
from friendly_errors import UserError


@dataclass(frozen=True)
class Task:
    """`labels` are the names by id (none: regression); `written` is how the official files write them, by id."""

    name: str
    folder: str
    text_columns: tuple[str, ...]
    labels: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    # Columns of the official files where they go by another name than on the Hub.
    file_columns: tuple[str, ...] = ()
    file_label: str = "label"
    validation_files: tuple[str, ...] = ("dev",)
    test_files: tuple[str, ...] = ("test",)
    # CoLA's train and dev files start with data: source, label, mark, sentence.
    headerless: tuple[str, ...] = ()

    @property
    def is_regression(self) -> bool:
        return not self.labels

    @property
    def label_texts(self) -> tuple[str, ...]:
        return self.written or self.labels


_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
_BITS = ("0", "1")

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "cola",
            "CoLA",
            ("sentence",),
            ("unacceptable", "acceptable"),
            _BITS,
            headerless=("source", "label", "mark", "sentence"),
        ),
        Task("sst2", "SST-2", ("sentence",), ("negative", "positive"), _BITS),
        Task(
            "mrpc",
            "MRPC",
            _PAIR,
            ("not_equivalent", "equivalent"),
            _BITS,
            file_columns=("#1 String", "#2 String"),
            file_label="Quality",
        ),
        Task("stsb", "STS-B", _PAIR, file_label="score"),
        Task(
            "qqp",
            "QQP",
            ("question1", "question2"),
            ("not_duplicate", "duplicate"),
            _BITS,
            file_label="is_duplicate",
        ),
        Task(
            "mnli",
            "MNLI",
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            file_columns=_PAIR,
            file_label="gold_label",
            validation_files=("dev_matched", "dev_mismatched"),
            test_files=("test_matched", "test_mismatched"),
        ),
        Task("qnli", "QNLI", ("question", "sentence"), _ENTAILMENT),
        Task("rte", "RTE", _PAIR, _ENTAILMENT),
        Task("wnli", "WNLI", _PAIR, ("not_entailment", "entailment"), _BITS),
    )
}


def find_task(name: str) -> Task:
    """The task of that name; `SST-2`, `sst_2` and `sst2` are the same."""
    wanted = name.lower().replace("-", "").replace("_", "")
    if wanted in TASKS:
        return TASKS[wanted]
    near = difflib.get_close_matches(wanted, TASKS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"unknown --task_name {name!r}{hint} (tasks: {', '.join(TASKS)})")


def split_names(task: Task | None) -> dict[str, tuple[str, ...]]:
    """Which splits are evaluated and predicted, as the Hub calls them: MNLI has two of each."""
    if task is not None and task.name == "mnli":
        return {
            "validation": ("validation_matched", "validation_mismatched"),
            "test": ("test_matched", "test_mismatched"),
        }
    return {"validation": ("validation",), "test": ("test",)}


def read_glue_folder(task: Task, root: Path) -> DatasetDict:
    """The splits that are there, from `root/QNLI`, `root/qnli` or `root` itself."""
    if not root.is_dir():
        raise UserError(f"--glue_dir {root} is not a folder")
    folder = _task_folder(task, root)
    names = split_names(task)
    files = {"train": "train", **dict(zip(names["validation"], task.validation_files, strict=True))}
    files |= dict(zip(names["test"], task.test_files, strict=True))
    splits = {
        split: read_official_tsv(task, folder / f"{stem}.tsv", test=split.startswith("test"))
        for split, stem in files.items()
        if (folder / f"{stem}.tsv").is_file()
    }
    if not splits:
        wanted = ", ".join(f"{stem}.tsv" for stem in files.values())
        raise UserError(
            f"--glue_dir {root} holds none of {wanted} for {task.name}; expected them in {root / task.folder}"
        )
    return DatasetDict(splits)


def _task_folder(task: Task, root: Path) -> Path:
    same = {task.folder.lower(), task.name}
    return next((path for path in sorted(root.iterdir()) if path.is_dir() and path.name.lower() in same), root)


def read_official_tsv(task: Task, path: Path, *, test: bool = False) -> Dataset:
    """Text columns by their Hub names and `label` (ids or scores; -1 in test files, which have none).

    Corrupted lines (QQP has some) and lines without a gold label (MNLI: "-") are left out, as on the Hub.
    """
    header, lines = _read_tsv(path, task.headerless)
    columns = task.file_columns or task.text_columns
    missing = [name for name in (*columns, *(() if test else (task.file_label,))) if name not in header]
    if missing:
        raise UserError(f"{path}: no column {missing[0]!r} for task {task.name} (columns: {', '.join(header)})")
    places = [header.index(name) for name in columns]
    label_place = header.index(task.file_label) if task.file_label in header else None
    texts: list[list[str]] = [[] for _ in columns]
    labels: list[float] = []
    for number, fields in lines:
        label = "-1" if label_place is None else fields[label_place] if label_place < len(fields) else "-"
        if label == "-" or max(places) >= len(fields):
            continue
        labels.append(-1 if label_place is None else _label_id(task, label, path, number))
        for values, place in zip(texts, places, strict=True):
            values.append(fields[place])
    names = dict(zip(task.text_columns, texts, strict=True))
    return Dataset.from_dict({**names, "label": labels if task.is_regression else [int(label) for label in labels]})


def _read_tsv(path: Path, headerless: tuple[str, ...]) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Header and numbered lines. GLUE's files do not quote: a lone quotation mark is part of the text."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = list(enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), start=1))
    if not lines:
        raise UserError(f"{path} is empty")
    starts_with_data = bool(headerless) and "sentence" not in lines[0][1]
    return (list(headerless), lines) if starts_with_data else (lines[0][1], lines[1:])


def _label_id(task: Task, label: str, path: Path, number: int) -> float:
    if task.is_regression:
        try:
            return float(label)
        except ValueError:
            raise UserError(f"{path}, line {number}: expected a score, got {label!r}") from None
    if label in task.label_texts:
        return task.label_texts.index(label)
    if label in task.labels:
        return task.labels.index(label)
    raise UserError(f"{path}, line {number}: expected one of {', '.join(task.label_texts)} as label, got {label!r}")
