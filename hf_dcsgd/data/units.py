"""Stacks whose examples have several rows: an entry of the stack says which rows are one unit of privacy.

**Guarantee.** What a unit contributes to a stack is a function of its own drawn rows alone (and of fresh randomness):
each row is fetched by itself, the collator is handed the rows of one unit, and units share a stack only where the
tensors of their rows have the same shapes anyway. A unit is never cut.

| stack                | example                                                                                |
|----------------------|----------------------------------------------------------------------------------------|
| without `UNIT_ENTRY` | one row                                                                                |
| with it              | all rows with the same number in it, counted from 0, anywhere in the stack             |
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hf_dcsgd.data.rows import Batch, Collator, batch_length, checked_batch, joined, shape_key, take_row, take_rows
from hf_dcsgd.ghost.units import Units

UNIT_ENTRY = "unit_of_row (private)"


class UnitCollator:
    """Collates the rows of each unit by themselves; a class, so that worker processes can receive it."""

    def __init__(self, collate: Collator) -> None:
        self._collate = collate

    def __call__(self, units: Sequence[Sequence[Any]]) -> list[Batch]:
        return [self.alone(rows) for rows in units]

    def alone(self, rows: Sequence[Any]) -> Batch:
        """Collate the rows of one unit into a stack of one example."""
        try:
            batch = self._collate(list(rows))
        except Exception as error:
            error.add_note(
                f"Raised by the data collator for {len(rows)} rows of one unit of privacy. It is handed the rows of "
                "one unit at a time, and must give them the same shapes: pad them to the longest."
            )
            raise
        return {**checked_batch(batch, len(rows)), UNIT_ENTRY: torch.zeros(len(rows), dtype=torch.long)}


def stack_units(units: Iterable[Batch], largest: int) -> list[Batch]:
    """Join units whose rows have the same shapes into stacks of at most `largest` rows, or of one unit.

    Units with as many rows as each other come together: what is missing in the shorter ones costs time.
    """
    groups: dict[Hashable, list[Batch]] = {}
    for unit in sorted(units, key=batch_length):
        groups.setdefault(shape_key(unit), []).append(unit)
    return [_joined_units(part) for group in groups.values() for part in _parts(group, largest)]


def _parts(units: list[Batch], largest: int) -> Iterator[list[Batch]]:
    part: list[Batch] = []
    rows = 0
    for unit in units:
        if part and rows + batch_length(unit) > largest:
            yield part
            part, rows = [], 0
        part.append(unit)
        rows += batch_length(unit)
    yield part


def _joined_units(units: list[Batch]) -> Batch:
    sizes = torch.tensor([batch_length(unit) for unit in units])
    return {**joined(units), UNIT_ENTRY: torch.arange(len(units)).repeat_interleave(sizes)}


def count_examples(batch: Mapping[str, Any]) -> int:
    """Count the units of a stack, or its rows where each is one."""
    if UNIT_ENTRY not in batch or not len(batch[UNIT_ENTRY]):
        return batch_length(batch)
    return int(batch[UNIT_ENTRY].max()) + 1


def rows_of_example(batch: Mapping[str, Any], example: int) -> list[int]:
    """List where the rows of one example are in a stack."""
    if UNIT_ENTRY not in batch:
        return [example]
    return (batch[UNIT_ENTRY] == example).nonzero().flatten().tolist()


def take_example(batch: Mapping[str, Any], example: int) -> Batch:
    """Return one example of a stack as a stack of one."""
    if UNIT_ENTRY not in batch:
        return take_row(batch, example)
    taken = take_rows(batch, rows_of_example(batch, example))
    return {**taken, UNIT_ENTRY: torch.zeros_like(taken[UNIT_ENTRY])}


def choices_of(batch: Mapping[str, Any]) -> int:
    """Count the choices of a multiple-choice batch, whose inputs are of shape (n, choices, …)."""
    return next((value.shape[1] for value in batch.values() if isinstance(value, Tensor) and value.dim() > 2), 1)


def units_of(batch: Mapping[str, Any], rows_per_entry: int) -> Units | None:
    """Say which rows of the forward are one example, where an entry of a stack has several; None where each is one."""
    of_entry = batch.get(UNIT_ENTRY)
    if of_entry is None:
        if rows_per_entry == 1:
            return None
        device = next(value.device for value in batch.values() if isinstance(value, Tensor))
        of_entry = torch.arange(batch_length(batch), device=device)
    return Units(of_entry.repeat_interleave(rows_per_entry))


def rows_apart(inputs: Mapping[str, Any], size: int) -> tuple[Batch, Callable[[Any], Any]]:
    """Turn inputs (n, size, …) into n·size rows; return what turns the model's outputs back into (n, size, …), too."""
    for name, value in inputs.items():
        if isinstance(value, Tensor) and (value.dim() < 2 or value.shape[1] != size):
            raise ValueError(
                f"expected {name} of shape (n, {size}, …) with rows_per_example={size}, got {tuple(value.shape)}"
            )
    flat = {name: value.flatten(0, 1) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    rows = batch_length(flat)

    def unflatten(value: Any) -> Any:
        is_per_row = isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows
        return value.unflatten(0, (-1, size)) if is_per_row else value

    return flat, lambda outputs: tree_map(unflatten, outputs)
