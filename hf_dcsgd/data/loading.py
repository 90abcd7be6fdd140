"""The training dataloader: Poisson logical batches, cut into micro-batches of which some may be empty."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import TrainingArguments
from transformers.trainer_utils import seed_worker

from hf_dcsgd.ghost import BatchCouplingError
from hf_dcsgd.privacy.randomness import secret_seed
from hf_dcsgd.privacy.sampling import PoissonBatchSampler

Batch = dict[str, Any]

_EXCHANGES = 8  # of two rows, which half of all permutations leave in place


class _RowLists(Dataset):
    """Hands out lists of rows, also empty ones, which datasets and collators do not expect."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if not indices:
            return []
        if hasattr(self._rows, "__getitems__"):
            return self._rows.__getitems__(indices)
        return [self._rows[index] for index in indices]


class EmptyAware:
    """A collator that gives an empty batch for no rows; a class, so that worker processes can receive it."""

    def __init__(self, collate: Callable[[list[Any]], Batch]) -> None:
        self._collate = collate

    def __call__(self, rows: list[Any]) -> Batch:
        if not rows:
            return {}
        try:
            batch = self._collate(rows)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"the data collator cannot make a batch of these training rows ({type(rows[0]).__name__}); do all "
                f"have the same columns, and values of one kind and length? {type(error).__name__}: {error}"
            ) from error
        return require_rows(batch, len(rows))


def poisson_dataloader(
    rows: Any, sampler: PoissonBatchSampler, collate: Callable[[list[Any]], Batch], args: TrainingArguments
) -> DataLoader:
    """One item per micro-batch; `{}` where the draw left it empty. Workers get secret seeds, as dropout does."""
    return DataLoader(
        _RowLists(rows),
        batch_sampler=sampler,
        collate_fn=EmptyAware(collate),
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        generator=None if sampler.unsafe_seed is not None else torch.Generator().manual_seed(secret_seed()),
        worker_init_fn=partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
    )


def require_rows(batch: Any, count: int) -> Batch:
    """The batch, if it is a mapping with one entry per row.

    A collator that drops or repeats rows lets one example decide about others, so that clipping bounds nothing.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"expected the data collator to return a mapping of tensors, got {type(batch).__name__}")
    found = batch_length(batch)  # type: ignore[arg-type]
    if found != count:
        raise ValueError(
            f"expected the data collator to give each row one entry of the batch, got {found} entries for {count} rows"
        )
    return batch  # type: ignore[return-value]


def require_separate_rows(collate: Callable[[list[Any]], Batch], row: Any, other: Any, third: Any) -> None:
    """Refuses a collator whose numbers for one row follow another row too: MixUp, or centring over the batch.

    The other row is exchanged for a third under the same random numbers, several times, since a mixture may be drawn.
    Nothing is said about entries that differ when nothing was exchanged. Takes the global random states as its own.
    """

    def entries(second: Any, seed: int) -> dict[str, Tensor]:
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        batch = collate([copy.deepcopy(row), copy.deepcopy(second)])
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim() > 0}
        return {name: value[0].clone() for name, value in tensors.items() if value.is_floating_point()}

    for seed in range(_EXCHANGES):
        before, again, exchanged = entries(other, seed), entries(other, seed), entries(third, seed)
        for name, value in before.items():
            if _alike(value, again.get(name)) and not _alike(value, exchanged.get(name, value)):
                raise BatchCouplingError(
                    f"the data collator mixes rows: {name!r} of one row changes when another row does, so one example "
                    "moves the gradients of others and clipping bounds nothing"
                )


def _alike(value: Tensor, other: Tensor | None) -> bool:
    """Equal numbers; a row that is padded to another length is compared by its padding (`padding.py`)."""
    if other is None or value.shape != other.shape:
        return other is not None
    return torch.allclose(value, other, rtol=0, atol=0, equal_nan=True)


def batch_length(batch: Batch) -> int:
    """Number of examples in a collated batch."""
    for value in batch.values():
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape[0]
    return 0


def cut(batch: Batch, largest: int) -> list[Batch]:
    """The batch in pieces near `largest`, when it is well above: a Poisson draw may be far larger than expected."""
    n = batch_length(batch)
    if n == 0:
        return []
    if n <= 1.5 * largest:
        return [batch]
    pieces = -(-n // largest)
    bounds = [n * k // pieces for k in range(pieces + 1)]
    return [
        {key: value[start:end] if _has_rows(value, n) else value for key, value in batch.items()}
        for start, end in pairwise(bounds)
    ]


def _has_rows(value: Any, n: int) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0 and value.shape[0] == n
    return isinstance(value, list) and len(value) == n


def row_lengths(rows: Any, length_column: str, input_name: str) -> list[int]:
    """Length of every row, for sorting a draw by length: the column of that name, or the tokens counted."""
    if length_column in (getattr(rows, "column_names", None) or ()):
        return list(rows[length_column])
    return [len(row[input_name]) for row in rows]
