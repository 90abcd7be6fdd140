"""How one use of a parameter contributes to every example's gradient, without writing those gradients down.

A layer rule turns (input, output gradient) of one call into a contribution per parameter. Contributions to the same
parameter, from one call or from several (shared layers, tied embeddings), are added *before* the norm is taken, so
cross terms are exact. Four forms are enough:

| form         | gradient of example i for a parameter     | kept                                  |
|--------------|-------------------------------------------|---------------------------------------|
| `Outer`      | Σ_t left[i, t] ⊗ right[i, t]               | the factors, (n, T, p) and (n, T, d)  |
| `Blocks`     | left[i, h] ⊗ right[i, h] in block h of rows | the factors, (n, H, p/H) and (n, H, d) |
| `OneHotRows` | Σ_t onehot(index[i, t]) ⊗ right[i, t]      | indices and factor                    |
| `Dense`      | value[i]                                  | the gradient itself (vectors, mostly) |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


def working_precision(value: Tensor) -> Tensor:
    """Convert to fp32, or keep fp64: norms and sums are never taken in half precision."""
    return value.to(working_dtype(value))


def working_dtype(value: Tensor) -> torch.dtype:
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def without_autocast(value: Tensor) -> torch.autocast:
    """Suspend autocast around a computation on this tensor's device: it would take products in half precision."""
    return torch.autocast(value.device.type, enabled=False)


Identity: TypeAlias = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


def identity(tensor: Tensor) -> Identity:
    """Tell tensors apart by the numbers in memory that they show; for tensors that are alive at the same time."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class LastResult:
    """Remembers what was made of the last tensor: query, key and value layers, one by one, share their input."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let go of the last tensor, which may be larger than all that is still needed of it."""
        self._tensor: Tensor | None = None
        self._result: Tensor | None = None

    def of(self, tensor: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `make(tensor)`, which is computed once for views of the same numbers."""
        if self._result is None or self._tensor is None or identity(self._tensor) != identity(tensor):
            self._result = None  # is freed before the next one is made
            self._tensor, self._result = tensor, make(tensor)
        return self._result


class ClipFactors:
    """Holds one factor per example, of shape (n,)."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._weighed = LastResult()

    def weigh(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply (n, T, d) by the factors, in `dtype` or better."""
        return self._weighed.of(value, lambda value: value * self.values.to(dtype)[:, None, None])


@dataclass
class Outer:
    left: Tensor
    right: Tensor
    # Σ_t ‖left_t‖·‖right_t‖ of every example, once `norms.trimmed` has taken it.
    bound: Tensor | None = None

    def select(self, keep: Tensor | slice) -> Outer:
        return Outer(self.left[keep], self.right[keep], None if self.bound is None else self.bound[keep])

    def add_weighted_sum(self, factors: ClipFactors, out: Tensor) -> None:
        left, right = self.left, self.right
        # The smaller factor is weighed; of two alike the right one, the input, which layers share.
        if left.shape[2] < right.shape[2]:
            left = factors.weigh(left, out.dtype)
        else:
            right = factors.weigh(right, out.dtype)
        left, right = left.to(out.dtype).flatten(0, 1), right.to(out.dtype).flatten(0, 1)
        out.view(left.shape[1], right.shape[1]).addmm_(left.T, right)

    @property
    def positions(self) -> int:
        return self.left.shape[1]


@dataclass
class Blocks:
    """One outer product for each block of rows, such as those of an attention head: they have no row in common."""

    left: Tensor
    right: Tensor

    def select(self, keep: Tensor | slice) -> Blocks:
        return Blocks(self.left[keep], self.right[keep])

    def add_weighted_sum(self, factors: ClipFactors, out: Tensor) -> None:
        left = factors.weigh(self.left, out.dtype).to(out.dtype).permute(1, 2, 0)
        out.view(*left.shape[:2], -1).baddbmm_(left, self.right.to(out.dtype).transpose(0, 1))

    def squared_norms(self) -> Tensor:
        left, right = (torch.linalg.vector_norm(f, dim=2, dtype=working_dtype(f)) for f in (self.left, self.right))
        return (left * right).square().sum(1)

    def as_outer(self) -> Outer:
        """Return the same with the zeros written down: a position for each block."""
        n, heads, size = self.left.shape
        left = self.left.new_zeros(n, heads, heads, size)
        left.diagonal(dim1=1, dim2=2).copy_(self.left.mT)
        return Outer(left.flatten(2), self.right)


@dataclass
class OneHotRows:
    index: Tensor
    right: Tensor
    bound: Tensor | None = None

    def select(self, keep: Tensor | slice) -> OneHotRows:
        return OneHotRows(self.index[keep], self.right[keep], None if self.bound is None else self.bound[keep])

    def add_weighted_sum(self, factors: ClipFactors, out: Tensor) -> None:
        out.index_add_(0, self.index.flatten(), factors.weigh(self.right, out.dtype).to(out.dtype).flatten(0, 1))

    @property
    def positions(self) -> int:
        return self.right.shape[1]


@dataclass
class Dense:
    value: Tensor

    def select(self, keep: Tensor | slice) -> Dense:
        return Dense(self.value[keep])

    def add_weighted_sum(self, factors: ClipFactors, out: Tensor) -> None:
        values = self.value.to(out.dtype).reshape(len(self.value), out.numel())
        out.view(-1).addmv_(values.T, factors.values.to(out.dtype))


Factored: TypeAlias = Outer | OneHotRows
Contribution: TypeAlias = Factored | Blocks | Dense
