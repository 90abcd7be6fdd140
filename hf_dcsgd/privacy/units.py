"""Poisson sampling of units of privacy that own several rows: whole persons, whose messages are rows.

Guarantee. Every unit enters every logical batch independently with probability q = B/N, N units; it is in a logical
batch at most once, and in one micro-batch of one process with all of the rows that it enters with. These are at most
`max_rows_per_unit` of its own, drawn afresh at each step without replacement, each subset of that size being as likely
as any other. Which rows a unit enters with depends on nothing but the unit and secret randomness.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_dcsgd.privacy.sampling import PoissonBatchSampler
from hf_dcsgd.validation import require, require_count


class RowsOfUnits:
    """Which rows of a dataset belong to which unit, in two flat arrays: unit u owns `rows[starts[u] : starts[u + 1]]`.

    Args:
        unit_of_row: The unit of every row, counted from 0; every unit has a row.
    """

    def __init__(self, unit_of_row: np.ndarray) -> None:
        self.sizes = np.bincount(unit_of_row)
        require(len(self.sizes) > 0 and self.sizes.min() > 0, "expected units counted from 0, each with a row")
        self.rows = np.argsort(unit_of_row, kind="stable")  # in the order of the dataset within each unit
        self.starts = np.concatenate([[0], np.cumsum(self.sizes)])

    def __len__(self) -> int:
        return len(self.sizes)

    def of_rank(self, rank: int, world_size: int) -> list[list[int]]:
        """Return the rows of each unit that a rank draws from."""
        bounds = zip(self.starts[:-1][rank::world_size], self.starts[1:][rank::world_size], strict=True)
        return [self.rows[start:end].tolist() for start, end in bounds]

    def first_rows(self, most: int) -> np.ndarray:
        """Return the first `most` rows of every unit, in the order of the dataset."""
        place = np.arange(len(self.rows)) - np.repeat(self.starts[:-1], self.sizes)
        return np.sort(self.rows[place < require_count("max_rows_per_unit", most)])

    def drawn_rows(self, units: np.ndarray, most: int, generator: np.random.Generator) -> list[list[int]]:
        """Draw at most `most` rows of each of these units, without replacement, all subsets alike."""
        places = _subsets(self.sizes[units], most, generator)
        counts = np.minimum(self.sizes[units], most)
        chosen = self.rows[np.where(places < 0, 0, self.starts[units][:, None] + places)]
        return [row[:count].tolist() for row, count in zip(chosen, counts, strict=True)]


def _subsets(sizes: np.ndarray, most: int, generator: np.random.Generator) -> np.ndarray:
    """Draw a subset of {0 … size-1} of min(size, most) elements for every size, at once; -1 fills the others up.

    Floyd's algorithm: for j = size - most … size - 1 a number t ≤ j is drawn and joins the subset, or j where t is in
    it already. Every subset comes out with the same probability. Where all rows are taken, they are in order.
    """
    places = np.full((len(sizes), most), -1, dtype=np.int64)
    small = sizes <= most
    places[small] = np.where(np.arange(most) < sizes[small, None], np.arange(most), -1)
    large = np.flatnonzero(~small)
    for k in range(most if len(large) else 0):
        j = sizes[large] - most + k
        drawn = generator.integers(0, j + 1)
        taken = (places[large, :k] == drawn[:, None]).any(1)
        places[large, k] = np.where(taken, j, drawn)
    return places


class UnitBatchSampler(PoissonBatchSampler):
    """Draws units instead of rows; a micro-batch is a list of units, each a list of its rows.

    Args:
        units: The rows of each unit.
        expected_batch_size: B, the expected number of units of a logical batch over all ranks.
        max_rows_per_unit: How many rows a unit enters a step with at most.
        options: Those of `PoissonBatchSampler`.
    """

    def __init__(
        self, units: RowsOfUnits, expected_batch_size: int, *, max_rows_per_unit: int, **options: Any
    ) -> None:
        super().__init__(len(units), expected_batch_size, **options)
        self.units = units
        self.max_rows_per_unit = require_count("max_rows_per_unit", max_rows_per_unit)

    def split(self, draw: Sequence[int] | np.ndarray) -> list[Any]:
        """Cut a draw of units into micro-batches of whole units, and draw the rows that these enter with."""
        micro_batches = np.array_split(np.asarray(draw, dtype=np.int64), self.gradient_accumulation_steps)
        return [self.units.drawn_rows(part, self.max_rows_per_unit, self.generator()) for part in micro_batches]
