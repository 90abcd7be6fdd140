"""Checks on the first batch: examples do not touch each other, and the hooks saw every use of a parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hf_dcsgd.ghost.contributions import Contribution, Dense, Outer, weighted_sum
from hf_dcsgd.ghost.layout import Layout, fitting_layouts
from hf_dcsgd.ghost.recording import Call, Owner, output_grads
from hf_dcsgd.ghost.refusals import BatchCouplingError

# How far the hooks' total may lie from autograd's before the hooks are taken to have missed a use.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}


def find_layouts(losses: Tensor, calls: list[Call], positions: int) -> dict[str, Layout]:
    """Where the batch is in each owner's outputs, found by differentiating single examples' losses.

    What example k's loss touches must be slice k of each output; a loss that touches other slices is refused. Two
    examples are probed, because one alone cannot tell (batch, position) from (position, batch) when only one position
    matters. Outputs that have no batch (a table of relative positions) are left out.
    """
    n = losses.shape[0]
    possible: dict[str, list[Layout]] = {}
    coupled: dict[str, Owner] = {}
    for k in (0, n - 1):
        for call, grads in zip(calls, output_grads(losses[k], calls, keep_graph=True), strict=True):
            for grad in grads:
                fitting = [] if grad is None else fitting_layouts(grad.shape, n, positions)
                if grad is None or not fitting or not grad.isfinite().all() or not grad.any():
                    continue
                before = possible.get(call.owner.name, fitting)
                after = [layout for layout in before if layout.holds_only(grad, n, k)]
                possible[call.owner.name] = after
                if Layout.BATCH_FIRST in before and not after:
                    coupled[call.owner.name] = call.owner
    if coupled:
        raise BatchCouplingError(
            "the loss of one example depends on other examples of its batch, so clipping bounds nothing. Seen in the "
            "gradients of:\n" + "\n".join(f"  {owner}" for owner in coupled.values()) + "\nUse a loss and modules "
            "that treat each example alone (no in-batch negatives, no batch statistics, no balancing over the batch)."
        )
    return {name: layouts[0] for name, layouts in possible.items() if layouts}


def unexplained_parameters(
    losses: Tensor, parameters: Mapping[str, nn.Parameter], contributions: Mapping[str, list[Contribution]]
) -> list[str] | None:
    """Parameters whose total gradient is not the sum of their contributions: they have a use that no hook saw.

    None when the batch cannot tell, because a gradient in it is not finite.
    """
    expected = torch.autograd.grad(losses.sum(), list(parameters.values()), retain_graph=True, allow_unused=True)
    if any(grad is not None and not grad.isfinite().all() for grad in expected):
        return None
    ones = torch.ones_like(losses, dtype=torch.float32)
    tolerance = max(_TOLERANCE[dtype] for dtype in {losses.dtype, *_dtypes(contributions)})
    unexplained = []
    for name, grad in zip(parameters, expected, strict=True):
        parts = contributions.get(name)
        total = torch.zeros_like(parameters[name]) if grad is None else grad
        found = weighted_sum(parts, ones, total.shape) if parts else torch.zeros_like(total)
        if (found - total).norm() > tolerance * total.norm() + 1e-6:
            unexplained.append(name)
    return unexplained


def _dtypes(contributions: Mapping[str, list[Contribution]]) -> set[torch.dtype]:
    found = set()
    for contribution in (c for parts in contributions.values() for c in parts):
        found.add(contribution.value.dtype if isinstance(contribution, Dense) else contribution.right.dtype)
        if isinstance(contribution, Outer):
            found.add(contribution.left.dtype)
    return found
