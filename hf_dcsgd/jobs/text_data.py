"""Load a GLUE task or files of the user's own, find out what is to be predicted, and tokenize the splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, Value, load_dataset

from hf_dcsgd.jobs.arguments import FILE_FORMATS, DataTrainingArguments, FileArguments
from hf_dcsgd.jobs.errors import UserError, explained
from hf_dcsgd.jobs.glue import TASKS, Task, find_task, read_glue_folder, read_official_tsv

TEXT_PAIRS = (
    *(task.texts for task in TASKS.values() if len(task.texts) == 2),
    *(("text", "text_pair"), ("text1", "text2"), ("text_a", "text_b")),
)
TEXTS = ("text", "sentence", "content", "review", "document", "message", "body")
LABELS = ("label", "labels", "target", "class", "category", "gold_label", "score", "is_duplicate", "rating")
UNLABELED = (None, "", -1, "-1")


@dataclass(frozen=True)
class TextData:
    """Untokenized splits, named as on the Hub (MNLI has two to validate and two to test), and what they are for."""

    splits: dict[str, Dataset]
    task: Task

    def splits_of(self, kind: str) -> list[str]:
        """Return the names of the `train`, `validation` or `test` splits that are there."""
        return [name for name in self.splits if name.split("_")[0] == kind]


def load_text_data(
    args: DataTrainingArguments, cache_dir: str | None = None, privacy_unit: str | None = None
) -> TextData:
    """Load a GLUE task from a folder or the Hub, data of the user's own, or a task whose splits files replace.

    `privacy_unit` is a column of the training data that says whose a row is; it is no text.
    """
    glue = None if args.task_name is None else find_task(args.task_name)
    subset = glue.subsets[0] if glue else ""
    files = {"train": args.train_file, f"validation{subset}": args.validation_file, f"test{subset}": args.test_file}
    as_official = glue if args.text_column is None else None
    if glue is None:
        splits = load_splits(args, cache_dir)
    else:
        given = {name: path for name, path in files.items() if path is not None}
        splits = {name: _read_split(name, path, as_official, cache_dir) for name, path in given.items()}
    if glue is not None and args.glue_dir is not None:
        splits = read_glue_folder(glue, Path(args.glue_dir)) | splits
    elif glue is not None and not splits:
        splits = _from_hub(glue, cache_dir)
    task = _own_task(args, splits, privacy_unit) if glue is None else replace(glue, label=args.label_column or "label")
    if args.text_column is not None:
        pair = () if args.text_pair_column is None else (args.text_pair_column,)
        task = replace(task, texts=(args.text_column, *pair))
    _require_columns(splits, task)
    if privacy_unit is not None and "train" in splits:
        require_owners(splits["train"], privacy_unit)
    return TextData(splits, task if glue is not None else _with_labels(task, args, splits))


def _read_split(split: str, path: str, task: Task | None, cache_dir: str | None) -> Dataset:
    if task is not None and Path(path).suffix.lower() == ".tsv":
        return read_official_tsv(task, Path(path), test=split.startswith("test"))
    return read_file(path, cache_dir)


def load_splits(args: FileArguments, cache_dir: str | None = None) -> dict[str, Dataset]:
    """Load the splits train, validation and test of a data set of the Hub, or of files, which come before it."""
    files = {"train": args.train_file, "validation": args.validation_file, "test": args.test_file}
    splits: dict[str, Dataset] = {}
    if args.dataset_name is not None:
        with explained(lambda error: no_dataset(args.dataset_name, error), Exception):
            found = load_dataset(args.dataset_name, args.dataset_config_name, cache_dir=cache_dir)
        splits = {name: found[name] for name in files if name in found}
        if not splits:
            raise UserError(
                f"--dataset_name {args.dataset_name}: expected a split train, validation or test, found "
                f"{', '.join(found)}"
            )
    return splits | {name: read_file(path, cache_dir) for name, path in files.items() if path is not None}


def no_dataset(name: str | None, error: Exception) -> str:
    """Say why a data set cannot be loaded."""
    return (
        f"cannot load --dataset_name {name}: there is no such folder, and the Hub cannot be reached or has no such "
        f"data set (HF_HUB_OFFLINE must not be set). {type(error).__name__}: {_innermost(error)}"
    )


def read_file(path: str, cache_dir: str | None = None) -> Dataset:
    """Read the rows of a file of the user's own, by its ending."""
    suffix = Path(path).suffix.lower()
    # Without keep_default_na=False, a text such as "None" or "NA" would be read as missing.
    options: dict[str, Any] = {"keep_default_na": False} if suffix in (".csv", ".tsv") else {}
    if suffix == ".tsv":
        options |= {"sep": "\t", "quoting": 3}
    with explained(lambda error: f"{path} cannot be read as {suffix[1:]}: {_innermost(error)}", Exception):
        return load_dataset(
            FILE_FORMATS[suffix], data_files={"rows": path}, split="rows", cache_dir=cache_dir, **options
        )


def _from_hub(task: Task, cache_dir: str | None) -> dict[str, Dataset]:
    message = (
        f"cannot load GLUE's {task.name} from the Hub (no network, or HF_HUB_OFFLINE is set, and no copy in the "
        "cache); give --glue_dir with the official TSV files, or --train_file and --validation_file"
    )
    with explained(lambda error: f"{message}. {type(error).__name__}: {_innermost(error)}", Exception):
        return dict(load_dataset("nyu-mll/glue", task.name, cache_dir=cache_dir))


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:300]


# --- columns and labels ----------------------------------------------------------------------------------------------


def _own_task(args: DataTrainingArguments, splits: dict[str, Dataset], privacy_unit: str | None) -> Task:
    """Find the columns of the user's own files by their names."""
    rows = next(iter(splits.values()))
    label = args.label_column or first_present(LABELS, rows.column_names)
    if label is None and any(not split.startswith("test") for split in splits):
        raise UserError(f"no label column found (columns: {', '.join(rows.column_names)}); give --label_column")
    return Task("own", "", () if args.text_column else _find_texts(rows, (label, privacy_unit)), label=label)


def _find_texts(rows: Dataset, others: tuple[str | None, ...]) -> tuple[str, ...]:
    for pair in TEXT_PAIRS:
        if set(pair) <= set(rows.column_names):
            return pair
    known = first_present(TEXTS, rows.column_names)
    if known is not None:
        return (known,)
    kinds = {name: getattr(kind, "dtype", None) for name, kind in rows.features.items() if name not in others}
    strings = tuple(name for name, kind in kinds.items() if kind in ("string", "large_string"))
    if len(strings) in (1, 2):
        return strings
    raise UserError(
        f"cannot tell which columns hold the text (columns: {', '.join(rows.column_names)}); give --text_column, and "
        "--text_pair_column for pairs"
    )


def first_present(names: Sequence[str], available: Sequence[str]) -> str | None:
    """Return the first of these names that is there."""
    return next((name for name in names if name in available), None)


def _require_columns(splits: dict[str, Dataset], task: Task) -> None:
    for split, rows in splits.items():
        wanted = task.texts if split.startswith("test") else (*task.texts, task.label)
        missing = [name for name in wanted if name not in rows.column_names]
        if missing:
            raise UserError(
                f"no column {missing[0]!r} in the {split} data (columns: {', '.join(rows.column_names)}); name the "
                "right one by --text_column, --text_pair_column or --label_column"
            )


def require_owners(rows: Dataset, privacy_unit: str) -> None:
    """Refuse training rows that do not all say whose they are."""
    if privacy_unit not in rows.column_names:
        raise UserError(
            f"--privacy_unit {privacy_unit}: no such column in the training data (columns: "
            f"{', '.join(rows.column_names)})"
        )
    if "" in rows.unique(privacy_unit):  # what an empty field of a file is read as
        raise UserError(f"column {privacy_unit!r} is empty in some rows of the training data; take them out")


def _with_labels(task: Task, args: DataTrainingArguments, splits: dict[str, Dataset]) -> Task:
    """Find the labels of the user's own data: as stated, or else as they occur."""
    if args.labels is not None:
        return _classification(task, [name.strip() for name in args.labels.split(",")])
    rows = splits.get("train", next(iter(splits.values())))
    if task.label is None or task.label not in rows.column_names:
        raise UserError("the data have no labels to learn their names from; give --labels, such as --labels no,yes")
    kind = rows.features[task.label]
    if isinstance(kind, ClassLabel):
        return replace(_classification(task, range(kind.num_classes)), labels=tuple(kind.names))
    if args.regression or (isinstance(kind, Value) and kind.dtype.startswith("float")):
        return replace(task, metrics=("pearson", "spearmanr", "mean_squared_error"))
    found = rows.unique(task.label)
    if None in found or "" in found:
        raise UserError(f"column {task.label!r} is empty in some rows of the training data; take them out")
    if len(found) < 2:
        raise UserError(f"column {task.label!r} holds only the label {found[0]!r}: there is nothing to learn")
    return _classification(task, sorted(found))


def _classification(task: Task, labels: Sequence[Any]) -> Task:
    return replace(task, labels=tuple(map(str, labels)), written=tuple(labels), metrics=("accuracy", "f1_macro"))


# --- tokenized -------------------------------------------------------------------------------------------------------


def tokenized(
    data: TextData, split: str, tokenizer: Any, args: DataTrainingArguments, privacy_unit: str | None = None
) -> Dataset:
    """Return as much of a split as is asked for, as the model takes it, with a `label` where the split has labels.

    Training rows keep the column that says whose they are.
    """
    task, rows = data.task, args.limited(data.splits[split], split)
    has_labels = task.label in rows.column_names
    if has_labels and split.startswith("test"):
        has_labels = any(value not in UNLABELED for value in rows.unique(task.label))
    if has_labels:
        # Under its own name, `map` would keep the column's type, and write the ids as strings.
        rows = rows.rename_column(task.label, "unmapped_label")
    ids = _label_ids(task)

    def prepare(batch: dict[str, list[Any]]) -> dict[str, Any]:
        texts = [["" if text is None else str(text) for text in batch[name]] for name in task.texts]
        length = min(args.max_seq_length, tokenizer.model_max_length)
        padding = "max_length" if args.pad_to_max_length else False
        encoded = dict(tokenizer(*texts, padding=padding, max_length=length, truncation=True))
        if has_labels:
            encoded["label"] = [_label_id(value, ids, task, split) for value in batch["unmapped_label"]]
        return encoded

    return rows.map(
        prepare,
        batched=True,
        remove_columns=[name for name in rows.column_names if split != "train" or name != privacy_unit],
        load_from_cache_file=not args.overwrite_cache,
        desc=f"tokenizing {split}",
    )


def _label_ids(task: Task) -> dict[Any, int]:
    """Map every way in which the data may write a label to its id."""
    ids: dict[Any, int] = {}
    if not any(name.lstrip("-").isdecimal() for name in task.labels):
        ids = {number: number for number in range(len(task.labels))}
    for labels in (task.labels, task.written):
        ids |= {way: number for number, label in enumerate(labels) for way in (label, str(label))}
    return ids


def _label_id(value: Any, ids: dict[Any, int], task: Task, split: str) -> float:
    try:
        return float(value) if task.is_regression else ids[value if value in ids else str(value)]
    except (KeyError, TypeError, ValueError):
        wanted = "expected a number" if task.is_regression else f"expected one of {', '.join(task.labels)}"
        raise UserError(f"column {task.label!r} of the {split} data: {wanted}, got {value!r}") from None
