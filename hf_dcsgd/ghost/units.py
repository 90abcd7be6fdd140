"""Examples that own several rows of a forward: the messages of one person, the choices of a question, a pair.

**Guarantee.** The gradient of a unit is the sum of what its rows add to it. Contributions of its rows are joined along
the position axis *before* a norm is taken, so that norms and sums over units are exact, and stay factored:

| form         | rows                     | units                                                        |
|--------------|--------------------------|--------------------------------------------------------------|
| `Outer`      | (m, T, p) and (m, T, d)  | (n, k·T, p) and (n, k·T, d), k rows of the largest unit      |
| `Blocks`     | (m, H, p/H), (m, H, d)   | those of an `Outer` with one position per block              |
| `OneHotRows` | (m, T) and (m, T, d)     | (n, k·T) and (n, k·T, d)                                     |
| `Dense`      | (m, …)                   | (n, …), added up                                             |

Units of fewer rows are filled up with zeros, which add nothing. Rows of a unit may lie anywhere in the batch. What is
between the rows of one unit (a softmax over choices, a difference within a pair) is its own affair: couplings are
looked for between units.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dcsgd.ghost.contributions import Blocks, Contribution, Dense, LastResult, OneHotRows, Outer, working_precision
from hf_dcsgd.ghost.layout import fitting_layouts


class Units:
    """Says which rows of a forward belong to which of `count` units: row r to unit `of_row[r]`, counted from 0."""

    def __init__(self, of_row: Tensor) -> None:
        if of_row.dim() != 1 or of_row.is_floating_point():
            raise ValueError(
                f"expected unit_of_row to be whole numbers of shape (rows,), got {of_row.dtype} of shape "
                f"{tuple(of_row.shape)}"
            )
        self.of_row = of_row.long()
        self.rows = len(of_row)
        if self.rows and int(self.of_row.min()) < 0:
            raise ValueError(f"expected units counted from 0 in unit_of_row, got {int(self.of_row.min())}")
        self.sizes = torch.bincount(self.of_row)
        self.count = len(self.sizes)
        if self.rows and int(self.sizes.min()) == 0:
            raise ValueError(
                f"expected every unit from 0 to {self.count - 1} in unit_of_row, got none of unit "
                f"{int(self.sizes.argmin())}"
            )
        self.most_rows = int(self.sizes.max()) if self.rows else 0
        start = self.sizes.cumsum(0) - self.sizes
        in_order = torch.argsort(self.of_row, stable=True)
        position = torch.empty_like(in_order)
        position[in_order] = torch.arange(self.rows, device=of_row.device)
        self._place = position - start[self.of_row]  # of a row within its unit
        self._is_even = self.rows == self.count * self.most_rows and bool((self.of_row.diff() >= 0).all())

    def mean(self, per_row: Tensor) -> Tensor:
        """Return the mean over the rows of each unit, (m,) → (n,)."""
        return per_row.new_zeros(self.count).index_add(0, self.of_row, per_row) / self.sizes.to(per_row.dtype)

    def without_last(self) -> Units:
        return Units(self.of_row[self.of_row != self.count - 1])

    def batch_of(self, output_shapes: Sequence[torch.Size], positions: int) -> int:
        """Return the size of the batch that a module saw: all rows, or one entry per unit."""
        sees_rows = any(fitting_layouts(shape, self.rows, positions) for shape in output_shapes)
        return self.rows if sees_rows else self.count

    def others(self, unit: int, batch: int) -> Tensor:
        """Mark what is not this unit's in a batch of rows, or of units."""
        return (self.of_row if batch == self.rows else torch.arange(batch, device=self.of_row.device)) != unit

    def joined(self, part: Contribution, inputs: LastResult) -> Contribution:
        """Return a contribution per unit of one per row; one per unit already stays as it is.

        `inputs` is shared by calls in a row, as these may share their input.
        """
        if isinstance(part, Dense):
            return part if len(part.value) != self.rows else Dense(self._added(working_precision(part.value)))
        if len(part.right) != self.rows:
            return part
        if isinstance(part, Blocks):
            outer = part.as_outer()
            return Outer(self._side_by_side(outer.left), self._side_by_side(outer.right))
        bound = None if part.bound is None else self._added(part.bound)
        right = inputs.of(part.right, self._side_by_side)
        if isinstance(part, Outer):
            return Outer(self._side_by_side(part.left), right, bound)
        return OneHotRows(self._side_by_side(part.index), right, bound)

    def _added(self, value: Tensor) -> Tensor:
        return value.new_zeros(self.count, *value.shape[1:]).index_add_(0, self.of_row, value)

    def _side_by_side(self, value: Tensor) -> Tensor:
        """Lay the positions of a unit's rows one after the other, (m, T, …) → (n, k·T, …)."""
        if self._is_even:
            return value.unflatten(0, (self.count, self.most_rows)).flatten(1, 2)
        filled = value.new_zeros(self.count, self.most_rows, *value.shape[1:])
        filled[self.of_row, self._place] = value
        return filled.flatten(1, 2)
