"""Where the batch is in a module's input and output: first, second, or folded into the rows with the positions."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor


class Layout(Enum):
    BATCH_FIRST = "batch first"
    BATCH_SECOND = "batch second"
    FLATTENED = "batch and positions in one axis"
    FLATTENED_POSITION_FIRST = "positions and batch in one axis"

    def batch_first(self, value: Tensor, n: int) -> Tensor | None:
        """Return the same values as (n, ...), or None where they do not have this layout."""
        if self is Layout.BATCH_FIRST:
            return value if value.dim() > 0 and value.shape[0] == n else None
        if self is Layout.BATCH_SECOND:
            return value.movedim(1, 0) if value.dim() > 1 and value.shape[1] == n else None
        if value.dim() == 0 or value.shape[0] % n:
            return None
        if self is Layout.FLATTENED:
            return value.unflatten(0, (n, -1))
        return value.unflatten(0, (-1, n)).movedim(1, 0)

    @property
    def axis(self) -> int:
        """Return the axis of the batch, or of the rows that it is part of."""
        return 1 if self is Layout.BATCH_SECOND else 0

    def is_zero_at(self, grad: Tensor, others: Tensor) -> bool:
        """Tell whether a gradient is zero in these slices, which `others` marks among all of them."""
        slices = self.batch_first(grad, len(others))
        return slices is not None and not slices[others].any()


def fitting_layouts(shape: torch.Size, n: int, positions: int) -> list[Layout]:
    """List the layouts that an output of this shape may have, most usual first.

    Rows count as flattened only when there is one for every position of the model's input: rows picked by a router
    would fit by accident.
    """
    fitting = []
    if len(shape) > 0 and shape[0] == n:
        fitting.append(Layout.BATCH_FIRST)
    if len(shape) > 2 and shape[1] == n:
        fitting.append(Layout.BATCH_SECOND)
    if len(shape) == 2 and positions > 1 and shape[0] == n * positions:
        fitting += [Layout.FLATTENED, Layout.FLATTENED_POSITION_FIRST]
    return fitting
