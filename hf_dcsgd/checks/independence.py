"""Whether an example's loss and gradient are its own: the same alone as in company.

Everything that sees several examples at once must treat each by itself. Here that is looked at on the real thing: one
row of a stack is run again alone, under the random numbers that it had in the stack (`random_tape.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dcsgd.ghost import BatchCouplingError

COUPLED = (
    "an example's loss or gradient changes when it is batched with others, so clipping no longer bounds any one "
    "example's influence. Nothing in the model and its loss may be centered, scaled, sorted, counted or compared over "
    "the batch, or remembered from an earlier one"
)


def require_same(alone: Tensor, together: Tensor, tolerance: float, scale: float = 1.0) -> None:
    """Raise `BatchCouplingError` unless an example has the same loss, or gradient norm, alone and within a stack.

    Args:
        alone: The value of the example by itself: private.
        together: The one that it had within the stack.
        tolerance: How far values may differ, relatively.
        scale: What rounding errors of small values are measured against.
    """
    if not torch.allclose(alone, together.to(alone.dtype), rtol=tolerance, atol=tolerance * scale, equal_nan=True):
        raise BatchCouplingError(COUPLED)
