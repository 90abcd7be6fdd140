"""Training rows, fetched and collated one at a time, then stacked by shape.

**Guarantee.** What a row contributes to a stack is a function of that row alone (and of fresh randomness): the dataset
is asked for one index, the collator is handed one row, and rows share a stack only where their tensors have the same
shapes anyway. So neither a dataset's transform nor a collator can mix, count, drop or repeat rows, and padding follows
from the row itself.

| case                                              | behavior                                                     |
|---------------------------------------------------|--------------------------------------------------------------|
| no rows                                           | no stacks                                                    |
| the dataset gives several rows, or none           | `ValueError`                                                 |
| the collator gives several entries, or none       | `ValueError`                                                 |
| rows of different shapes                          | different stacks                                             |
| an entry without a batch axis (a number, a name)  | rows with different values of it go into different stacks    |
| an entry that is neither                          | `TypeError`                                                  |
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

Batch: TypeAlias = dict[str, Any]
Collator: TypeAlias = Callable[[list[Any]], Mapping[str, Any]]

# Lengths are rounded up to a multiple of this, so that there are few shapes and stacks stay full.
LENGTH_MULTIPLE = 8


def fetch_row(rows: Any, index: int) -> Any:
    """Ask a dataset for one index; it must give one row."""
    if not hasattr(rows, "__getitems__"):
        return rows[index]
    found = rows.__getitems__([index])
    if len(found) != 1:
        raise ValueError(
            f"expected train_dataset to give one row for one index, got {len(found)}: each of them would be clipped "
            "on its own, so one record would count several times. Cut records into rows before training, in a dataset "
            "of its own whose rows are the unit of privacy"
        )
    return found[0]


class StackedRows(ABC):
    """Rows that were collated one by one before, and are read in stacks.

    Who derives from it gives the guarantee above: what a row contributes to a stack is a function of its index alone.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Count the rows."""

    @abstractmethod
    def stacks(self, indices: Sequence[int]) -> list[Batch]:
        """Return these rows, those of one shape together."""


class RowCollator:
    """Collates rows one by one and stacks those of one shape; a class, so that worker processes can receive it."""

    def __init__(self, collate: Collator) -> None:
        self._collate = collate

    def __call__(self, rows: Sequence[Any]) -> list[Batch]:
        return stack([self.alone(row) for row in rows])

    def alone(self, row: Any) -> Batch:
        """Collate a single row into a stack of one."""
        try:
            batch = self._collate([row])
        except Exception as error:
            error.add_note(
                f"Raised by the data collator for a single training row ({type(row).__name__}). It is handed one row "
                "at a time: what depends on several rows cannot be private."
            )
            raise
        return checked_batch(batch, 1)


def checked_batch(batch: Any, rows: int) -> Batch:
    """Return what a collator made of this many rows, if it has an entry for each of them."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"expected data_collator to return a mapping of tensors, got {type(batch).__name__}")
    return {name: _checked_entry(name, value, rows) for name, value in batch.items()}


def _checked_entry(name: str, value: Any, rows: int) -> Any:
    if isinstance(value, Tensor) and value.dim() == 0:
        value = value.item()
    if isinstance(value, Tensor | list | tuple):
        if len(value) != rows:
            wanted = (
                f"one entry of {name!r} for one row" if rows == 1 else f"{rows} entries of {name!r} for {rows} rows"
            )
            raise ValueError(
                f"expected data_collator to give {wanted}, got {len(value)}: rows may not be dropped, repeated or "
                "packed together"
            )
        return value if isinstance(value, Tensor) else list(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"expected data_collator to return tensors with a batch axis, got {name!r} of type {type(value).__name__}"
    )


def stack(batches: Iterable[Batch], largest: int | None = None) -> list[Batch]:
    """Join batches whose rows have the same shapes; cut what is then larger than `largest` rows into even parts."""
    groups: dict[Hashable, list[Batch]] = {}
    for batch in batches:
        groups.setdefault(shape_key(batch), []).append(batch)
    whole = [joined(group) for group in groups.values()]
    return whole if largest is None else [part for batch in whole for part in _cut(batch, largest)]


def batch_length(batch: Mapping[str, Any]) -> int:
    """Count the rows of a stack."""
    return next((len(value) for value in batch.values() if _has_rows(value)), 0)


def take_row(batch: Mapping[str, Any], index: int) -> Batch:
    """Return one row of a stack as a stack of one."""
    return _sliced(batch, index, index + 1)


def take_rows(batch: Mapping[str, Any], indices: Sequence[int]) -> Batch:
    """Return some rows of a stack as a stack of these."""
    return {
        name: value[list(indices)]
        if isinstance(value, Tensor) and value.dim() > 0
        else [value[index] for index in indices]
        if isinstance(value, list)
        else value
        for name, value in batch.items()
    }


def move_to(batch: Mapping[str, Any], device: torch.device) -> Batch:
    """Move the tensors of a batch to a device."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def _has_rows(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)


def shape_key(batch: Batch) -> Hashable:
    """Return what batches must have in common to be joined."""
    return tuple(
        (name, value.dtype, value.shape[1:])
        if isinstance(value, Tensor)
        else (name, list)
        if isinstance(value, list)
        else (name, type(value), value)
        for name, value in sorted(batch.items())
    )


def joined(batches: list[Batch]) -> Batch:
    """Join batches of one shape."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    return {
        name: torch.cat([batch[name] for batch in batches])
        if isinstance(value, Tensor)
        else [item for batch in batches for item in batch[name]]
        if isinstance(value, list)
        else value
        for name, value in first.items()
    }


def _cut(batch: Batch, largest: int) -> list[Batch]:
    rows = batch_length(batch)
    parts = math.ceil(rows / largest)
    if parts <= 1:
        return [batch]
    bounds = [rows * k // parts for k in range(parts + 1)]
    return [_sliced(batch, start, end) for start, end in pairwise(bounds)]


def _sliced(batch: Mapping[str, Any], start: int, end: int) -> Batch:
    return {name: value[start:end] if _has_rows(value) else value for name, value in batch.items()}


def longest_row(tokenizer: Any, model: Any) -> int | None:
    """Return how many tokens a model takes, as its tokenizer or its config says; None where neither does."""
    limits = (
        getattr(tokenizer, "model_max_length", None),
        getattr(getattr(model, "config", None), "max_position_embeddings", None),
    )
    return next((limit for limit in limits if isinstance(limit, int) and 0 < limit < 1 << 30), None)


def with_rounded_lengths(collate: Collator, longest: int | None = None) -> Collator:
    """Let a padding collator round the length of a row up to a public multiple, where it can and does not yet.

    Args:
        collate: The data collator. Those of transformers and TRL that pad have `pad_to_multiple_of`; others stay as
            they are.
        longest: The longest row that the model takes: no row is padded beyond it.
    """
    can_pad = getattr(getattr(collate, "tokenizer", collate), "pad_token_id", None) is not None
    if not can_pad or getattr(collate, "pad_to_multiple_of", 1) is not None:
        return collate
    rounded: Any = copy.copy(collate)
    rounded.pad_to_multiple_of = LENGTH_MULTIPLE if not longest else math.gcd(LENGTH_MULTIPLE, longest)
    return rounded
