"""How one use of a parameter contributes to every example's gradient, without writing those gradients down.

A layer rule turns (input, output gradient) of one call into a contribution per parameter. Contributions to the same
parameter, from one call or from several (shared layers, tied embeddings), are added *before* the norm is taken, so
cross terms are exact. Three forms are enough:

| form         | gradient of example i for a parameter     | kept                                  |
|--------------|-------------------------------------------|---------------------------------------|
| `Outer`      | Σ_t left[i, t] ⊗ right[i, t]               | the factors, (n, T, p) and (n, T, d)  |
| `OneHotRows` | Σ_t onehot(index[i, t]) ⊗ right[i, t]      | indices and factor                    |
| `Dense`      | value[i]                                  | the gradient itself (vectors, mostly) |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

# T positions whose directions are unrelated have a squared norm of at least 1/T of its upper bound. Well below that,
# they cancel, and the Gram form loses digits: the squared norm is then taken again in double precision, so that an
# example can never pass for smaller than it is.
_CANCELLATION = 1 / 8
# An example is taken to be no smaller than this share of its upper bound, however far its positions cancel: the
# clipped sum adds them up in fp32 among those of all other examples, and would lose digits where they far exceed C.
_SMALLEST_SHARE = 2.0**-12
# Explicit gradients of large layers are formed for a few examples at a time.
_DIRECT_CHUNK_ELEMENTS = 1 << 24


def working_precision(value: Tensor) -> Tensor:
    """Converts to fp32, or keeps fp64: norms and sums are never taken in half precision."""
    return value if value.dtype == torch.float64 else value.float()


@dataclass
class Outer:
    left: Tensor
    right: Tensor

    def select(self, keep: Tensor) -> Outer:
        return Outer(self.left[keep], self.right[keep])

    def double(self) -> Outer:
        return Outer(self.left.double(), self.right.double())

    def add_weighted_sum(self, factors: Tensor, out: Tensor) -> None:
        left, right = self.left.to(out.dtype), self.right.to(out.dtype)
        factors = factors.to(out.dtype)[:, None, None]
        if left.shape[2] <= right.shape[2]:
            left = left * factors
        else:
            right = right * factors
        out.view(left.shape[2], right.shape[2]).addmm_(left.flatten(0, 1).T, right.flatten(0, 1))

    def per_example(self) -> Tensor:
        return working_precision(self.left).transpose(1, 2) @ working_precision(self.right)

    def length_bound(self) -> Tensor:
        """Returns Σ_t ‖left_t‖·‖right_t‖, an upper bound of each example's norm."""
        left, right = working_precision(self.left), working_precision(self.right)
        return (left.norm(dim=2) * right.norm(dim=2)).sum(1)

    @property
    def positions(self) -> int:
        return self.left.shape[1]


@dataclass
class OneHotRows:
    index: Tensor
    right: Tensor

    def select(self, keep: Tensor) -> OneHotRows:
        return OneHotRows(self.index[keep], self.right[keep])

    def double(self) -> OneHotRows:
        return OneHotRows(self.index, self.right.double())

    def add_weighted_sum(self, factors: Tensor, out: Tensor) -> None:
        right = self.right.to(out.dtype) * factors.to(out.dtype)[:, None, None]
        out.index_add_(0, self.index.flatten(), right.flatten(0, 1))

    def length_bound(self) -> Tensor:
        return working_precision(self.right).norm(dim=2).sum(1)

    def squared_norms(self, rows: int) -> Tensor:
        """Adds up repeated rows within each example first, so nothing cancels and no (n, rows, d) table is made."""
        n, positions = self.index.shape
        example = torch.arange(n, device=self.index.device).repeat_interleave(positions)
        used, place = torch.unique(example * rows + self.index.flatten(), return_inverse=True)
        right = working_precision(self.right).flatten(0, 1)
        row_sums = right.new_zeros(len(used), right.shape[1]).index_add_(0, place, right)
        return right.new_zeros(n).index_add_(0, used // rows, row_sums.square().sum(1))


@dataclass
class Dense:
    value: Tensor

    def select(self, keep: Tensor) -> Dense:
        return Dense(self.value[keep])

    def add_weighted_sum(self, factors: Tensor, out: Tensor) -> None:
        out.view(-1).addmv_(self.value.to(out.dtype).reshape(-1, out.numel()).T, factors.to(out.dtype))


Factored: TypeAlias = Outer | OneHotRows
Contribution: TypeAlias = Factored | Dense


def squared_norms(contributions: Sequence[Contribution], shape: torch.Size) -> Tensor:
    """Returns ‖Σ contributions‖² of every example, for one parameter of the given shape.

    Rounded up where its terms all but cancel, see `_SMALLEST_SHARE`.
    """
    merged = _merge(contributions)
    factored = [c for c in merged if not isinstance(c, Dense)]
    if not factored:
        return _explicit_squared_norms(merged, shape)
    positions = sum(c.right.shape[1] for c in factored)
    bound = torch.stack([c.length_bound() for c in factored]).sum(0).square()
    p, d = shape[0], shape[1:].numel()
    written = positions > 1 and positions * (p + d) > p * d and all(isinstance(c, Outer) for c in factored)
    if len(merged) == 1 and isinstance(merged[0], OneHotRows):
        squared = merged[0].squared_norms(shape[0])
    elif len(factored) < len(merged) or written:
        squared = _explicit_squared_norms(merged, shape)
    else:
        squared = _gram_squared_norms(factored)
        cancelled = squared < _CANCELLATION / positions * bound
        if positions > 1 and cancelled.any():
            index = cancelled.nonzero().flatten()
            squared[index] = _gram_squared_norms([c.select(index).double() for c in factored]).to(squared.dtype)
    return torch.maximum(squared, _SMALLEST_SHARE**2 * bound)


def add_weighted_sum(contributions: Sequence[Contribution], factors: Tensor, out: Tensor) -> None:
    """Adds Σ_i factors[i] · (gradient of example i) to `out`, which has the parameter's shape."""
    for contribution in contributions:
        contribution.add_weighted_sum(factors, out)


def _merge(contributions: Sequence[Contribution]) -> list[Contribution]:
    """Joins several `Outer` contributions into one with more positions."""
    outers = [c for c in contributions if isinstance(c, Outer)]
    if len(outers) < 2:
        return list(contributions)
    joined = Outer(torch.cat([c.left for c in outers], 1), torch.cat([c.right for c in outers], 1))
    return [joined, *(c for c in contributions if not isinstance(c, Outer))]


def _gram_squared_norms(factored: Sequence[Factored]) -> Tensor:
    total = None
    for i, first in enumerate(factored):
        for j, second in enumerate(factored[: i + 1]):
            inner = _inner_product(first, second)
            inner = inner if i == j else 2 * inner
            total = inner if total is None else total + inner
    assert total is not None
    return total


def _inner_product(first: Factored, second: Factored) -> Tensor:
    """Returns ⟨first, second⟩ of every example, from T×T products of the factors."""
    a, b = working_precision(first.right), working_precision(second.right)
    if isinstance(first, Outer) and first is second and first.positions == 1:
        left = working_precision(first.left)
        return left.square().sum((1, 2)) * a.square().sum((1, 2))
    rights = a @ b.transpose(1, 2)
    if isinstance(first, Outer) and isinstance(second, Outer):
        lefts = working_precision(first.left) @ working_precision(second.left).transpose(1, 2)
    elif isinstance(first, OneHotRows) and isinstance(second, OneHotRows):
        lefts = (first.index[:, :, None] == second.index[:, None, :]).to(rights.dtype)
    elif isinstance(first, Outer) and isinstance(second, OneHotRows):
        lefts = _columns(first.left, second.index)
    elif isinstance(first, OneHotRows) and isinstance(second, Outer):
        lefts = _columns(second.left, first.index).transpose(1, 2)
    return (lefts * rights).sum((1, 2))


def _columns(left: Tensor, index: Tensor) -> Tensor:
    """Takes left[i, s, index[i, t]] as (n, S, T): products of factors with one-hot rows."""
    return working_precision(left.gather(2, index[:, None, :].expand(-1, left.shape[1], -1)))


def _explicit_squared_norms(merged: Sequence[Contribution], shape: torch.Size) -> Tensor:
    any_tensor = merged[0].value if isinstance(merged[0], Dense) else merged[0].right
    n, device = any_tensor.shape[0], any_tensor.device
    if len(merged) == 1 and isinstance(merged[0], Dense):
        return working_precision(merged[0].value).flatten(1).square().sum(1)
    chunk = max(1, _DIRECT_CHUNK_ELEMENTS // max(1, shape.numel()))
    pieces = [
        _per_example_sum([c.select(index) for c in merged], shape).square().sum(1)
        for index in torch.arange(n, device=device).split(chunk)
    ]
    return torch.cat(pieces) if n else working_precision(any_tensor).new_zeros(0)


def _per_example_sum(contributions: Sequence[Contribution], shape: torch.Size) -> Tensor:
    total: Tensor | None = None
    for contribution in contributions:
        if isinstance(contribution, Dense):
            value = working_precision(contribution.value).flatten(1)
        elif isinstance(contribution, Outer):
            value = contribution.per_example().flatten(1)
        else:
            right = working_precision(contribution.right)
            table = right.new_zeros(right.shape[0], shape[0], right.shape[2])
            place = contribution.index[:, :, None].expand_as(right)
            value = table.scatter_add_(1, place, right).flatten(1)
        total = value if total is None else total + value
    assert total is not None
    return total
