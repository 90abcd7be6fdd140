"""From a GLUE task or from files to tokenized splits, with what the model must know about the labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, Value, load_dataset
from friendly_errors import UserError, explained
from glue_arguments import FILE_FORMATS, DataTrainingArguments
from glue_tasks import Task, find_task, read_glue_folder, read_official_tsv, split_names

TEXT_PAIRS = (
    ("sentence1", "sentence2"),
    ("question", "sentence"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("text", "text_pair"),
    ("text1", "text2"),
    ("text_a", "text_b"),
)
TEXTS = ("text", "sentence", "content", "review", "document", "message", "body")
LABELS = ("label", "labels", "target", "class", "category", "gold_label", "score", "is_duplicate", "rating")


@dataclass(frozen=True)
class Columns:
    texts: tuple[str, ...]
    label: str | None


@dataclass(frozen=True)
class GlueData:
    """Untokenized splits: `train`, and the validation and test sets by their names."""

    splits: DatasetDict
    columns: Columns
    labels: tuple[Any, ...]  # as the data have them, by id; none for regression
    label_names: tuple[str, ...]
    task: Task | None

    @property
    def is_regression(self) -> bool:
        return not self.label_names

    @property
    def metric_config(self) -> str:
        if self.task is not None:
            return self.task.name
        return "regression" if self.is_regression else "classification"

    def evaluation_splits(self) -> tuple[str, ...]:
        return tuple(name for name in split_names(self.task)["validation"] if name in self.splits)

    def test_splits(self) -> tuple[str, ...]:
        return tuple(name for name in split_names(self.task)["test"] if name in self.splits)

    def written_label(self, prediction: float) -> str:
        """A prediction as GLUE's server, or the user's own data, would have it."""
        if self.is_regression:
            return f"{prediction:.3f}"
        if self.task is not None:
            return self.task.label_texts[int(prediction)]
        return str(self.labels[int(prediction)])


def load_glue_data(args: DataTrainingArguments, cache_dir: str | None = None) -> GlueData:
    """A GLUE task from a folder or the Hub, files of the user's own, or a task whose splits files replace."""
    task = None if args.task_name is None else find_task(args.task_name)
    files = _split_files(args, task)
    as_official = task if args.text_column is None else None
    splits = {name: _read_file(name, path, as_official, cache_dir) for name, path in files.items()}
    if task is not None:
        if args.glue_dir is not None:
            splits = {**read_glue_folder(task, Path(args.glue_dir)), **splits}
        elif not files:
            splits = _from_hub(task, cache_dir)
    columns = _find_columns(args, task, splits)
    if task is not None and columns.label is None:
        columns = Columns(columns.texts, "label")
    labels, names = _find_labels(args, task, splits, columns)
    return GlueData(DatasetDict(splits), columns, labels, names, task)


def _split_files(args: DataTrainingArguments, task: Task | None) -> dict[str, str]:
    names = split_names(task)
    given = {
        "train": args.train_file,
        names["validation"][0]: args.validation_file,
        names["test"][0]: args.test_file,
    }
    return {name: path for name, path in given.items() if path is not None}


def _read_file(split: str, path: str, task: Task | None, cache_dir: str | None) -> Dataset:
    suffix = Path(path).suffix.lower()
    if task is not None and suffix == ".tsv":
        return read_official_tsv(task, Path(path), test=split.startswith("test"))
    options: dict[str, Any] = {}
    if suffix in (".csv", ".tsv"):
        # Without this, a text such as "None" or "NA" would be read as missing.
        options["keep_default_na"] = False
    if suffix == ".tsv":
        options.update(sep="\t", quoting=3)
    with explained(lambda error: f"{path} cannot be read as {suffix[1:]}: {_innermost(error)}", Exception):
        return load_dataset(
            FILE_FORMATS[suffix], data_files={"rows": path}, split="rows", cache_dir=cache_dir, **options
        )


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:300]


def _from_hub(task: Task, cache_dir: str | None) -> dict[str, Dataset]:
    message = (
        f"cannot load GLUE's {task.name} from the Hub (no network, or HF_HUB_OFFLINE is set, and no copy in the "
        "cache); give --glue_dir with the official TSV files, or --train_file and --validation_file"
    )
    with explained(lambda error: f"{message}. {type(error).__name__}: {_innermost(error)}", Exception):
        return dict(load_dataset("nyu-mll/glue", task.name, cache_dir=cache_dir))


# --- columns and labels ----------------------------------------------------------------------------------------------


def _find_columns(args: DataTrainingArguments, task: Task | None, splits: dict[str, Dataset]) -> Columns:
    first = next(iter(splits.values()))
    available = first.column_names
    for option in ("text_column", "text_pair_column", "label_column"):
        name = getattr(args, option)
        if name is not None and name not in available:
            raise UserError(f"--{option} {name!r}: no such column (columns: {', '.join(available)})")
    label = args.label_column or _first_present(("label",) if task else LABELS, available)
    texts = _given_texts(args) or (task.text_columns if task else _guess_texts(first, label))
    required = {name: [*texts, *([label] if label else [])] for name in splits}
    for split, names in required.items():
        missing = [name for name in names if name not in splits[split].column_names]
        if missing and not (split.startswith("test") and missing == [label]):
            raise UserError(
                f"no column {missing[0]!r} in the {split} data (columns: {', '.join(splits[split].column_names)}); "
                "name the right one by --text_column, --text_pair_column or --label_column"
            )
    if label is None and any(not split.startswith("test") for split in splits):
        raise UserError(f"no column for the label found (columns: {', '.join(available)}); give --label_column")
    return Columns(tuple(texts), label)


def _given_texts(args: DataTrainingArguments) -> tuple[str, ...]:
    if args.text_pair_column is not None and args.text_column is None:
        raise UserError(f"--text_pair_column {args.text_pair_column!r} needs --text_column, too")
    return tuple(name for name in (args.text_column, args.text_pair_column) if name is not None)


def _first_present(names: Sequence[str], available: Sequence[str]) -> str | None:
    return next((name for name in names if name in available), None)


def _guess_texts(rows: Dataset, label: str | None) -> tuple[str, ...]:
    for pair in TEXT_PAIRS:
        if set(pair) <= set(rows.column_names):
            return pair
    known = _first_present(TEXTS, rows.column_names)
    if known is not None:
        return (known,)
    strings = [
        name
        for name, kind in rows.features.items()
        if name != label and getattr(kind, "dtype", None) in ("string", "large_string")
    ]
    if len(strings) in (1, 2):
        return tuple(strings)
    raise UserError(
        f"cannot tell which columns hold the text (columns: {', '.join(rows.column_names)}); give --text_column, and "
        "--text_pair_column for pairs"
    )


def _find_labels(
    args: DataTrainingArguments, task: Task | None, splits: dict[str, Dataset], columns: Columns
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Labels as the data have them and their names, by id; both empty for regression."""
    if task is not None:
        return task.labels, task.labels
    if args.labels is not None:
        names = tuple(name.strip() for name in args.labels.split(","))
        return names, names
    source = splits.get("train", next(iter(splits.values())))
    if columns.label is None or columns.label not in source.column_names:
        raise UserError("the data have no labels to learn their names from; give --labels, such as --labels no,yes")
    kind = source.features[columns.label]
    if isinstance(kind, ClassLabel):
        return tuple(range(kind.num_classes)), tuple(kind.names)
    if args.regression or (isinstance(kind, Value) and kind.dtype.startswith("float")):
        return (), ()
    unique = source.unique(columns.label)
    if None in unique or "" in unique:
        raise UserError(f"column {columns.label!r} is empty in some rows of the training data; take them out")
    found = tuple(sorted(unique))
    if len(found) < 2:
        raise UserError(f"column {columns.label!r} holds only the label {found[0]!r}: there is nothing to learn")
    return found, tuple(str(label) for label in found)


# --- tokenized -------------------------------------------------------------------------------------------------------


def tokenized(data: GlueData, split: str, tokenizer: Any, args: DataTrainingArguments) -> Dataset:
    """One split as the model takes it, with a `label` column where the split is labelled."""
    rows = data.splits[split]
    ids = _label_ids(data)
    limit = min(args.max_seq_length, tokenizer.model_max_length)
    label = data.columns.label
    has_labels = label in rows.column_names and not (split.startswith("test") and _unlabelled(rows, label))
    if has_labels:
        # Under its own name, `map` would keep the column's type, and write the ids as strings.
        rows = rows.rename_column(label, "unmapped_label")

    def prepare(batch: dict[str, list[Any]]) -> dict[str, Any]:
        texts = [["" if text is None else str(text) for text in batch[name]] for name in data.columns.texts]
        padding = "max_length" if args.pad_to_max_length else False
        encoded = dict(tokenizer(*texts, padding=padding, max_length=limit, truncation=True))
        if has_labels:
            encoded["label"] = [
                _label_id(value, ids, data.label_names, label, split) for value in batch["unmapped_label"]
            ]
        return encoded

    return rows.map(
        prepare,
        batched=True,
        remove_columns=rows.column_names,
        load_from_cache_file=not args.overwrite_cache,
        desc=f"tokenizing {split}",
    )


def _label_ids(data: GlueData) -> dict[Any, int]:
    """Every way in which the data may write a label → its id."""
    ids: dict[Any, int] = {}
    for number, name in enumerate(data.label_names):
        ids[name] = number
        ids[data.labels[number]] = number
        ids[str(data.labels[number])] = number
    if not any(name.lstrip("-").isdecimal() for name in data.label_names):
        ids.update({number: number for number in range(len(data.label_names))})
    return ids


def _unlabelled(rows: Dataset, label: str) -> bool:
    """GLUE's test sets have -1 in place of labels."""
    return all(value in (None, "", -1, "-1") for value in rows.unique(label))


def _label_id(value: Any, ids: dict[Any, int], names: Sequence[str], label: str, split: str) -> float:
    if not ids:
        try:
            return float(value)
        except (TypeError, ValueError):
            raise UserError(f"column {label!r} of the {split} data: expected a number, got {value!r}") from None
    if value in ids:
        return ids[value]
    if str(value) in ids:
        return ids[str(value)]
    raise UserError(
        f"column {label!r} of the {split} data holds {value!r}, which is not among the labels {', '.join(names)}"
    )
