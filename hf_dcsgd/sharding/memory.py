"""What one rank holds where the frozen part of a model is sharded, before anything runs.

    frozen bytes / ranks + trained + buffers + gathered + activations

The buffers are gradient, optimizer and noise of what is trained. Gathered at one time are the block that runs, the
next one in a backward pass, and what no block holds. Activations are those of the
rank's own examples, as without sharding.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from hf_dcsgd.checks.step_cost import BUFFERS
from hf_dcsgd.sharding.groups import sharding_groups


def rank_memory(model: nn.Module, ranks: int, block_classes: Collection[str] = ()) -> dict[str, int]:
    """Estimate the bytes of one of `ranks` devices, by part, without activations; on one device nothing is sharded.

    The model may be on the meta device. Trained parameters count as fp32. ValueError where nothing is frozen.
    """
    groups = sharding_groups(model, block_classes)
    sharded = {name for group in groups for name in group.parameters} if ranks > 1 else set()
    named = dict(model.named_parameters())
    frozen = {name: p for name, p in named.items() if not p.requires_grad}
    trained = sum(p.numel() for p in named.values() if p.requires_grad)
    blocks = [group.nbytes for group in groups[:-1]]
    memory = {
        "frozen": sum(_held(p, ranks if name in sharded else 1) for name, p in frozen.items()),
        "trained": 4 * trained,
        "gradient_optimizer_noise": 4 * BUFFERS * trained,
        "gathered": groups[-1].nbytes + 2 * max(blocks, default=0) if sharded else 0,
    }
    return {**memory, "total": sum(memory.values())}


def _held(parameter: nn.Parameter, ranks: int) -> int:
    """Bytes of the first rank's piece, which is the largest: rows are dealt out in equal parts, the last one short."""
    rows = -(-parameter.shape[0] // ranks) if ranks > 1 else 1
    whole = parameter.numel() * parameter.element_size()
    return rows * (whole // parameter.shape[0]) if ranks > 1 else whole
