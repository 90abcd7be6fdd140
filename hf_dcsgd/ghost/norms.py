"""Squared gradient norms of a batch, each parameter's in the form that costs least.

| form    | what is computed                         | chosen where                                                   |
|---------|------------------------------------------|---------------------------------------------------------------|
| product | ‖left‖²·‖right‖²                         | one position has a gradient, e.g. that of a [CLS] token       |
| blocks  | Σ_h ‖left_h‖²·‖right_h‖²                 | blocks of rows have one product each (`trunk/one_query.py`)   |
| Gram    | ⟨left·leftᵀ, right·rightᵀ⟩, T×T numbers   | 1.5·T·(p + d) < p·d                                           |
| written | the gradient itself, p×d numbers         | beyond: it takes little more memory than the factors, or less |

Positions at which no example has a gradient are left out first (`trimmed`). A written gradient is kept in place of its
factors from the moment that the backward pass hands them over (`written`), and the sum is taken of it. The border
follows from measured times (docs/benchmarks.md): the written form is faster from there on, and the memory of a step,
which holds activations too, hardly grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_dcsgd.ghost.contributions import (
    Blocks,
    Contribution,
    Dense,
    Factored,
    LastResult,
    OneHotRows,
    Outer,
    without_autocast,
    working_dtype,
    working_precision,
)

# T positions whose directions are unrelated have a squared norm of at least 1/T of its upper bound. Well below that,
# they cancel, and the Gram form loses digits: the squared norm is then taken again in double precision, so that an
# example can never pass for smaller than it is.
_CANCELLATION = 1 / 8
# An example is taken to be no smaller than this share of its upper bound, however far its positions cancel: the
# clipped sum adds them up in fp32 among those of all other examples, and would lose digits where they far exceed C.
_SMALLEST_SHARE = 2.0**-12
# How much larger than its factors a written gradient may be.
_WRITTEN_SHARE = 1.5
# Matrices this narrow are written at less cost than is needed to find positions without a gradient (LoRA).
_NARROW = 32
# The halves of a T×T product mirror each other: it is taken in blocks of this many positions, none of them twice.
_GRAM_BLOCK = 128

Parts = list[Contribution]


def take_norms(
    contributions: Mapping[str, Sequence[Contribution]], shapes: Mapping[str, torch.Size]
) -> tuple[Tensor, dict[str, Parts]]:
    """Return the squared norm of every example over all these parameters, and contributions that have the same sums.

    Norms are rounded up where terms all but cancel, see `_SMALLEST_SHARE`.
    """
    lengths = LastResult()
    remaining = {name: [trimmed(part, lengths) for part in _alike(parts)] for name, parts in contributions.items()}
    bounds = {name: _bound(parts) for name, parts in remaining.items()}
    squared: dict[str, Tensor] = {}
    by_gram: dict[str, list[Factored]] = {}
    vectors: list[Tensor] = []
    right_gram = LastResult()
    for name, parts in remaining.items():
        bound, shape = bounds[name], shapes[name]
        factored = [part for part in parts if isinstance(part, Outer | OneHotRows)]
        if isinstance(parts[0], Blocks):
            squared[name] = parts[0].squared_norms()
        elif len(parts) == 1 and isinstance(parts[0], Dense) and len(shape) < 2:
            vectors.append(parts[0].value.reshape(-1, shape.numel()))
        elif bound is not None and len(factored) == len(parts) and sum(part.positions for part in factored) <= 1:
            squared[name] = bound
        elif len(parts) == 1 and isinstance(parts[0], OneHotRows):
            squared[name] = _squared_row_sums(parts[0], shape[0])
        elif _is_written(parts, shape):
            squared[name], remaining[name] = _written(parts, shape)
        else:
            by_gram[name] = _joined(factored)
            squared[name] = _gram(by_gram[name], right_gram)
    _repair_cancelled(squared, bounds, by_gram)
    terms = []
    if squared:
        found = torch.stack(list(squared.values()))
        smallest = [_SMALLEST_SHARE**2 * b if (b := bounds[name]) is not None else s for name, s in squared.items()]
        terms.append(torch.maximum(found, torch.stack(smallest)).sum(0))
    if vectors:
        joined = torch.cat(vectors, 1)
        terms.append(torch.linalg.vector_norm(joined, dim=1, dtype=working_dtype(joined)).square())
    return torch.stack(terms).sum(0), remaining


def _alike(parts: Sequence[Contribution]) -> Sequence[Contribution]:
    """Write out the zeros of blocks where something is to be added to them."""
    return parts if len(parts) == 1 else [part.as_outer() if isinstance(part, Blocks) else part for part in parts]


def squared_norms(contributions: Sequence[Contribution], shape: torch.Size) -> Tensor:
    """Return ‖Σ contributions‖² of every example, for one parameter of the given shape."""
    return take_norms({"": contributions}, {"": shape})[0]


def trimmed(part: Contribution, lengths: LastResult) -> Contribution:
    """Note the bound of a contribution, then leave out positions at which no example has a gradient, if many.

    What is left out need not be held: behind a pooler that reads one token, that is all but one position. Bounds are
    taken of all positions, so that an example whose input is not finite at one of them is not finite still, whatever
    its neighbors are. `lengths` is shared by calls in a row, which may share their input. Narrow matrices are written
    of all positions at once.
    """
    if isinstance(part, Dense | Blocks) or part.bound is not None or _is_narrow(part):
        return part
    rights = lengths.of(part.right, _row_lengths)
    if isinstance(part, OneHotRows):
        return OneHotRows(part.index, part.right, rights.sum(1))
    lefts = _row_lengths(part.left)
    left, right, bound = part.left, part.right, (lefts * rights).sum(1)
    if part.positions > 1:
        busy = ((lefts != 0) & (rights != 0)).any(0).nonzero().flatten()
        if 2 * len(busy) <= part.positions:
            left, right = left[:, busy], right[:, busy]
            lengths.forget()
    return Outer(left, right, bound)


def written(part: Contribution) -> Contribution:
    """Write the gradients of a contribution down where that is the faster form."""
    if not isinstance(part, Outer):
        return part
    shape = torch.Size([part.left.shape[2], part.right.shape[2]])
    if not _is_written([part], shape):
        return part
    with without_autocast(part.right):
        return Dense(_per_example([part], shape))


def _is_narrow(part: Factored) -> bool:
    return isinstance(part, Outer) and min(part.left.shape[2], part.right.shape[2]) <= min(part.positions, _NARROW)


def _row_lengths(value: Tensor) -> Tensor:
    """Return the lengths of all rows of (n, T, d)."""
    return torch.linalg.vector_norm(value, dim=2, dtype=working_dtype(value))


def _bound(parts: Sequence[Contribution]) -> Tensor | None:
    """Return (Σ_t ‖left_t‖·‖right_t‖)², an upper bound of each example's squared norm; None for written gradients."""
    found = [part.bound for part in parts if not isinstance(part, Dense | Blocks) and part.bound is not None]
    if not found:
        return None
    return (found[0] if len(found) == 1 else torch.stack(found).sum(0)).square()


# -- forms -----------------------------------------------------------------------------------------------------------


def _is_written(parts: Sequence[Contribution], shape: torch.Size) -> bool:
    factored = [part for part in parts if isinstance(part, Outer | OneHotRows)]
    if len(factored) < len(parts):
        return True
    positions = sum(part.positions for part in factored)
    return _WRITTEN_SHARE * positions * (shape[0] + shape[1:].numel()) >= shape.numel()


def _written(parts: Parts, shape: torch.Size) -> tuple[Tensor, Parts]:
    """Return the squared norms of written gradients, and those themselves."""
    first = parts[0]
    value = first.value if len(parts) == 1 and isinstance(first, Dense) else _per_example(parts, shape)
    return _squared_lengths(value, shape), [Dense(value)]


def _squared_lengths(value: Tensor, shape: torch.Size) -> Tensor:
    """Return the squared length of each example's gradient, adding up rows first and then their sums."""
    rows = value.reshape(len(value), *((1, shape.numel()) if len(shape) < 2 else (shape[0], shape[1:].numel())))
    return torch.linalg.vector_norm(rows, dim=2, dtype=working_dtype(value)).square().sum(1)


def _any_tensor(part: Contribution) -> Tensor:
    return part.value if isinstance(part, Dense) else part.right


def _per_example(parts: Parts, shape: torch.Size) -> Tensor:
    """Write down the gradient of each example, (n, p, d)."""
    n, p, d = len(_any_tensor(parts[0])), shape[:1].numel(), shape[1:].numel()
    total: Tensor | None = None
    for part in sorted(parts, key=lambda part: not isinstance(part, Outer)):
        if isinstance(part, Outer):
            left, right = working_precision(part.left), working_precision(part.right)
            if total is None:  # a product of few columns is slow, its transpose is not
                total = left.mT @ right if d > _NARROW else (right.mT @ left).mT
            else:
                total.baddbmm_(left.mT, right)
            continue
        source = working_precision(_any_tensor(part))
        total = source.new_zeros(n, p, d) if total is None else total
        if isinstance(part, Dense):
            total += source.reshape(n, p, d)
        elif isinstance(part, OneHotRows):
            total.scatter_add_(1, part.index[:, :, None].expand_as(source), source)
    assert total is not None
    return total


def _squared_row_sums(part: OneHotRows, rows: int) -> Tensor:
    """Add up repeated rows within each example first, so nothing cancels and no (n, rows, d) table is made."""
    n, positions = part.index.shape
    example = torch.arange(n, device=part.index.device).repeat_interleave(positions)
    used, place = torch.unique(example * rows + part.index.flatten(), return_inverse=True)
    right = working_precision(part.right).flatten(0, 1)
    row_sums = right.new_zeros(len(used), right.shape[1]).index_add_(0, place, right)
    return right.new_zeros(n).index_add_(0, used // rows, torch.linalg.vector_norm(row_sums, dim=1).square())


# -- Gram ------------------------------------------------------------------------------------------------------------


def _joined(factored: Sequence[Factored]) -> list[Factored]:
    """Make several `Outer` one with more positions."""
    outers = [part for part in factored if isinstance(part, Outer)]
    if len(outers) < 2:
        return list(factored)
    joined = Outer(torch.cat([part.left for part in outers], 1), torch.cat([part.right for part in outers], 1))
    return [joined, *(part for part in factored if not isinstance(part, Outer))]


def _repair_cancelled(
    squared: dict[str, Tensor], bounds: Mapping[str, Tensor | None], by_gram: Mapping[str, list[Factored]]
) -> None:
    """Take norms whose terms cancel again, in double precision."""
    if not by_gram:
        return
    expected = []
    for name, factored in by_gram.items():
        bound = bounds[name]
        assert bound is not None
        expected.append(_CANCELLATION / sum(part.positions for part in factored) * bound)
    cancelled = torch.stack([squared[name] for name in by_gram]) < torch.stack(expected)
    for name, mask, is_concerned in zip(by_gram, cancelled, cancelled.any(1).tolist(), strict=True):
        if not is_concerned:
            continue
        index = mask.nonzero().flatten()
        again = _gram([_in_double(part.select(index)) for part in by_gram[name]], LastResult())
        squared[name][index] = again.to(squared[name].dtype)


def _in_double(part: Factored) -> Factored:
    if isinstance(part, Outer):
        return Outer(part.left.double(), part.right.double())
    return OneHotRows(part.index, part.right.double())


def _gram(factored: Sequence[Factored], right_gram: LastResult) -> Tensor:
    """Return ‖Σ factored‖² of every example, from T×T products of the factors."""
    if len(factored) == 1 and isinstance(factored[0], Outer):
        products = _self_products(factored[0].left).mul_(right_gram.of(factored[0].right, _self_products))
        once = _sizes_of_blocks(factored[0].positions)
        return products.sum(1) + products[:, once:].sum(1)
    total = None
    for i, first in enumerate(factored):
        for j, second in enumerate(factored[: i + 1]):
            rights = working_precision(first.right) @ working_precision(second.right).mT
            inner = _inner(_left_products(first, second), rights)
            inner = inner if i == j else 2 * inner
            total = inner if total is None else total + inner
    assert total is not None
    return total


def _inner(lefts: Tensor, rights: Tensor) -> Tensor:
    """Return ⟨lefts, rights⟩ of every example; `lefts` is used up."""
    return lefts.mul_(rights).sum((1, 2))


def _self_products(value: Tensor) -> Tensor:
    """Return products of positions, a row per example: blocks on the diagonal, then one of each mirrored pair."""
    blocks = working_precision(value).split(_GRAM_BLOCK, 1)
    products = [block @ block.mT for block in blocks]
    products += [block @ before.mT for k, block in enumerate(blocks) for before in blocks[:k]]
    flat = [product.flatten(1) for product in products]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)


def _sizes_of_blocks(positions: int) -> int:
    """Count the products in the blocks on the diagonal."""
    return positions // _GRAM_BLOCK * _GRAM_BLOCK**2 + (positions % _GRAM_BLOCK) ** 2


def _left_products(first: Factored, second: Factored) -> Tensor:
    """Return ⟨left of first at s, left of second at t⟩ as (n, S, T)."""
    if isinstance(first, Outer) and isinstance(second, Outer):
        return working_precision(first.left) @ working_precision(second.left).mT
    if isinstance(first, OneHotRows) and isinstance(second, OneHotRows):
        return (first.index[:, :, None] == second.index[:, None, :]).to(working_dtype(first.right))
    if isinstance(first, Outer) and isinstance(second, OneHotRows):
        return _columns(first.left, second.index)
    assert isinstance(first, OneHotRows)
    assert isinstance(second, Outer)
    return _columns(second.left, first.index).mT


def _columns(left: Tensor, index: Tensor) -> Tensor:
    """Take left[i, s, index[i, t]] as (n, S, T): products of factors with one-hot rows."""
    return working_precision(left.gather(2, index[:, None, :].expand(-1, left.shape[1], -1)))
