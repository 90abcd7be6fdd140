"""Whether an example's loss and gradient are its own: the same alone as in company.

Everything that sees several examples at once must treat each by itself. Here that is looked at on the real thing: one
row of a stack is run again alone, under the random numbers that it had in the stack (`random_tape.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_dcsgd.ghost import BatchCouplingError

COUPLED = (
    "an example's loss or gradient changes when it is batched with others, so clipping no longer bounds any one "
    "example's influence. Nothing in the model and its loss may be centered, scaled, sorted, counted or compared over "
    "the batch, or remembered from an earlier one"
)


class LossAndNorm(NamedTuple):
    """An example's loss and gradient norm: private values. The norm is None where it cannot be compared."""

    per_example_loss: Tensor
    per_example_norm: Tensor | None


def require_agreement(alone: LossAndNorm, together: LossAndNorm, scale: float, tolerance: float) -> None:
    """Raise `BatchCouplingError` unless an example has the same loss and norm alone and within a stack.

    Args:
        alone: Loss and norm of the example by itself.
        together: Those that it had within the stack.
        scale: The largest norm in the stack: rounding errors of small norms are measured against it.
        tolerance: How far values may differ, relatively.
    """
    pairs = [(alone.per_example_loss, together.per_example_loss, 1.0)]
    if alone.per_example_norm is not None and together.per_example_norm is not None:
        pairs.append((alone.per_example_norm, together.per_example_norm, scale))
    for one, other, unit in pairs:
        absolute = tolerance * unit * (1.0 if unit == 1.0 else 0.1)
        if not torch.allclose(one, other.to(one.dtype), rtol=tolerance, atol=absolute, equal_nan=True):
            raise BatchCouplingError(COUPLED)
