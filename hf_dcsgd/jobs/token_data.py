"""Load texts whose words have tags, and tokenize them: the first token of each word carries its tag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import ClassLabel, Dataset

from hf_dcsgd.jobs.arguments import FileArguments, option
from hf_dcsgd.jobs.errors import UserError
from hf_dcsgd.jobs.text_data import first_present, load_splits, require_owners
from hf_dcsgd.tasks.losses import IGNORE_INDEX

WORDS = ("tokens", "words", "text", "sentence")
TAGS = ("ner_tags", "tags", "labels", "pos_tags", "label", "ner")


@dataclass
class TokenDataArguments(FileArguments):
    """Which data. Words and tags are lists, or texts with spaces in between (as in a CSV file)."""

    _argument_group_name = "data"

    words_column: str | None = option(None, "Column of the words. Default: found by its name (tokens, words, text).")
    tags_column: str | None = option(
        None, "Column of their tags. Default: found by its name (ner_tags, tags, labels)."
    )
    labels: str | None = option(
        None, "The tags by id, such as O,B-PER,I-PER. Default: those in the training data, then taken as public."
    )

    def __post_init__(self) -> None:
        if not self.has_files:
            raise UserError("give the data by --train_file, --validation_file or --test_file, or by --dataset_name")
        super().__post_init__()


@dataclass(frozen=True)
class TokenData:
    """Untokenized splits, and the columns and tags of them."""

    splits: dict[str, Dataset]
    words: str
    tags: str
    labels: tuple[str, ...]


def load_token_data(
    args: TokenDataArguments, cache_dir: str | None = None, privacy_unit: str | None = None
) -> TokenData:
    """Load files or a data set of the Hub, and find columns and tags."""
    splits = {name: args.limited(rows, name) for name, rows in load_splits(args, cache_dir).items()}
    rows = splits.get("train", next(iter(splits.values())))
    words = _column(args.words_column, WORDS, rows, "words_column")
    tags = _column(args.tags_column, TAGS, rows, "tags_column")
    for name, part in splits.items():
        missing = [column for column in (words, tags) if column not in part.column_names]
        if missing:
            raise UserError(f"no column {missing[0]!r} in the {name} data (columns: {', '.join(part.column_names)})")
    if privacy_unit is not None and "train" in splits:
        require_owners(splits["train"], privacy_unit)
    return TokenData(splits, words, tags, _labels(args, rows, tags))


def _column(given: str | None, names: Sequence[str], rows: Dataset, option: str) -> str:
    found = given or first_present(names, rows.column_names)
    if found is None:
        raise UserError(
            f"cannot tell which column is the {option} (columns: {', '.join(rows.column_names)}); give --{option}"
        )
    return found


def _labels(args: TokenDataArguments, rows: Dataset, column: str) -> tuple[str, ...]:
    if args.labels is not None:
        return tuple(name.strip() for name in args.labels.split(","))
    if column not in rows.column_names:
        raise UserError(f"no column {column!r} in the data (columns: {', '.join(rows.column_names)}); give --labels")
    kind: Any = getattr(rows.features[column], "feature", None)
    if isinstance(kind, ClassLabel):
        return tuple(kind.names)
    found = {str(tag) for tags in rows[column] for tag in as_list(tags)}
    if all(tag.isdecimal() for tag in found):
        return tuple(map(str, range(max(map(int, found), default=0) + 1)))
    return tuple(sorted(found, key=lambda tag: (tag != "O", tag)))


def as_list(value: Any) -> list[Any]:
    """Return words or tags as a list; a text is split at its spaces."""
    return value.split() if isinstance(value, str) else list(value)


def tokenized(
    data: TokenData, split: str, tokenizer: Any, args: TokenDataArguments, privacy_unit: str | None = None
) -> Dataset:
    """Return a split as the model takes it; training rows keep the column that says whose they are."""
    rows, ids = data.splits[split], {name: number for number, name in enumerate(data.labels)}
    length = min(args.max_seq_length, tokenizer.model_max_length)

    def tag_id(tag: Any) -> int:
        number = tag if isinstance(tag, int) else ids.get(str(tag), -1)
        if not 0 <= number < len(data.labels):
            raise UserError(f"column {data.tags!r} of the {split} data: expected one of {', '.join(data.labels)}")
        return number

    def prepare(batch: dict[str, list[Any]]) -> dict[str, Any]:
        words = [as_list(value) for value in batch[data.words]]
        encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=length)
        labels = []
        for row, tags in enumerate(as_list(value) for value in batch[data.tags]):
            if len(tags) != len(words[row]):
                raise UserError(
                    f"columns {data.words!r} and {data.tags!r} of the {split} data: expected as many tags as words in "
                    "each row, which some row has not"
                )
            places = encoded.word_ids(row)
            before = [None, *places[:-1]]
            labels.append(
                [
                    IGNORE_INDEX if word is None or word == last else tag_id(tags[word])
                    for word, last in zip(places, before, strict=True)
                ]
            )
        return {**encoded, "labels": labels}

    kept = [privacy_unit] if split == "train" else []
    return rows.map(
        prepare,
        batched=True,
        remove_columns=[name for name in rows.column_names if name not in kept],
        load_from_cache_file=not args.overwrite_cache,
        desc=f"tokenizing {split}",
    )
