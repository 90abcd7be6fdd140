"""Cached hidden states of the rows of one unit of privacy, which must have one length to be run together.

A row's hidden states were computed at its own padded length. Among the rows of its unit it may be padded further: the
collator pads its entries again, and zeros are added to the hidden states, where the mask of the entries hides them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_dcsgd.data.rows import Batch, Collator, fetch_row
from hf_dcsgd.data.units import UnitCollator
from hf_dcsgd.trunk.cut import TRUNK_ENTRY


class RowsWithHiddenStates:
    """A dataset of pairs: a row as it is, and its cached hidden states."""

    def __init__(self, rows: Any, store: Any) -> None:
        self._rows, self._store = rows, store

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        return fetch_row(self._rows, index), self._store[index][TRUNK_ENTRY]


class HiddenStatesCollator:
    """Collates the rows of such pairs by a collator that pads, and pads the hidden states as it does."""

    def __init__(self, collate: Collator) -> None:
        self._collate = collate
        self._pads_left = getattr(getattr(collate, "tokenizer", None), "padding_side", "right") == "left"

    def __call__(self, pairs: Sequence[tuple[Any, Tensor]]) -> Mapping[str, Any]:
        longest = max(hidden.shape[1] for _, hidden in pairs)
        padded = [self._padded(hidden, longest - hidden.shape[1]) for _, hidden in pairs]
        return {**self._collate([row for row, _ in pairs]), TRUNK_ENTRY: torch.cat(padded)}

    def _padded(self, hidden: Tensor, missing: int) -> Tensor:
        after_last_axis = [0, 0] * (hidden.dim() - 2)
        return F.pad(hidden, [*after_last_axis, *((missing, 0) if self._pads_left else (0, missing))])


def collated_units(rows: Any, collate: Collator, units: Sequence[Sequence[int]]) -> list[Batch]:
    """Collate some units as training does."""
    collator = UnitCollator(collate)
    return [collator.alone([fetch_row(rows, index) for index in unit]) for unit in units]
