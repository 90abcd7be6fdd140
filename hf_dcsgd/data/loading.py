"""The training dataloader: one item per micro-batch of a Poisson draw, each a list of stacks, some of them empty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers.trainer_utils import seed_worker

from hf_dcsgd.data.rows import Batch, Collator, RowCollator, StackedRows, fetch_row, stack
from hf_dcsgd.data.units import UNIT_ENTRY, UnitCollator, stack_units
from hf_dcsgd.privacy.randomness import secret_seed
from hf_dcsgd.privacy.sampling import PoissonBatchSampler
from hf_dcsgd.privacy.units import UnitBatchSampler


class _RowByRow(Dataset):
    """Fetches each drawn row by itself, whatever the dataset would do with a list of indices; a unit as its rows."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int | list[int]) -> Any:
        if isinstance(index, list):
            return [fetch_row(self._rows, row) for row in index]
        return fetch_row(self._rows, index)


class _Stacked(Dataset):
    """Reads the rows of a micro-batch at once."""

    def __init__(self, rows: StackedRows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, indices: list[int]) -> list[Batch]:
        return self._rows.stacks(indices)


def poisson_dataloader(
    rows: Any, sampler: PoissonBatchSampler, collate: Collator | None, *, rank: int = 0, **options: Any
) -> DataLoader:
    """Load the draws of a sampler. Workers get secret seeds, as dropout does.

    Args:
        rows: A map-style dataset, or `StackedRows`.
        sampler: Decides which rows are drawn, and their split into micro-batches.
        collate: Any data collator; it sees one row at a time, or the rows of one unit. None for `StackedRows`.
        rank: The index of this process, for the seeds of its workers.
        options: Further arguments of `DataLoader`, such as `num_workers`.
    """
    return DataLoader(
        _Stacked(rows) if isinstance(rows, StackedRows) else _RowByRow(rows),
        batch_sampler=sampler,
        collate_fn=_collation(sampler, collate),
        generator=None if sampler.unsafe_seed is not None else torch.Generator().manual_seed(secret_seed()),
        worker_init_fn=partial(seed_worker, num_workers=options.get("num_workers", 0), rank=rank),
        **options,
    )


def _collation(sampler: PoissonBatchSampler, collate: Collator | None) -> Callable[[Any], list[Batch]]:
    if collate is None:
        return _as_they_are
    return UnitCollator(collate) if isinstance(sampler, UnitBatchSampler) else RowCollator(collate)


def _as_they_are(stacks: list[Batch]) -> list[Batch]:
    return stacks


def restack(micro_batches: Sequence[list[Batch]], largest: int) -> list[list[Batch]]:
    """Spread a whole logical batch anew over its micro-batches, so that stacks are as full as `largest` allows."""
    batches = [batch for micro_batch in micro_batches for batch in micro_batch]
    has_units = any(UNIT_ENTRY in batch for batch in batches)
    stacks = stack_units(batches, largest) if has_units else stack(batches, largest)
    return [stacks[k :: len(micro_batches)] for k in range(len(micro_batches))]
