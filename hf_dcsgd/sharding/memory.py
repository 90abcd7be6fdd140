"""What one rank holds where the frozen part of a model is sharded, before anything runs.

    frozen bytes / ranks + trained + buffers + gathered + activations

The buffers are gradient, optimizer and noise of what is trained. Gathered at one time are one block and what no
block holds. Their pieces arrive in buffers of the same size; FSDP2 keeps one until the next is full, so that there are
up to two. Activations are those of the rank's own examples, as without sharding.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from hf_dcsgd.checks.step_cost import BUFFERS
from hf_dcsgd.sharding.groups import Group, sharding_groups


def rank_memory(model: nn.Module, ranks: int, block_classes: Collection[str] = ()) -> dict[str, int]:
    """Estimate the bytes of one of `ranks` devices, by part, without activations; on one device nothing is sharded.

    The model may be on the meta device. Trained parameters count as fp32. ValueError where nothing is frozen.
    """
    groups = sharding_groups(model, block_classes)
    sharded = {name for group in groups for name in group.parameters} if ranks > 1 else set()
    named = dict(model.named_parameters())
    frozen = {name: p for name, p in named.items() if not p.requires_grad}
    trained = sum(p.numel() for p in named.values() if p.requires_grad)
    memory = {
        "frozen": sum(_held(p, ranks if name in sharded else 1) for name, p in frozen.items()),
        "trained": 4 * trained,
        "gradient_optimizer_noise": 4 * BUFFERS * trained,
        "gathered": _gathered(groups) if sharded else 0,
    }
    return {**memory, "total": sum(memory.values())}


def _gathered(groups: list[Group]) -> int:
    """Count bytes at the worst moment: a group is copied out of its buffer, and that of the one before is still there.

    Embeddings and head have a block or what no block holds before them, never each other.
    """
    *parts, rest = groups
    tables = [group.nbytes for group in parts if isinstance(group.module, nn.Embedding | nn.Linear)]
    blocks = [group.nbytes for group in parts if not isinstance(group.module, nn.Embedding | nn.Linear)]
    table, block = max(tables, default=0), max(blocks, default=0)
    before = max(block, rest.nbytes)
    return rest.nbytes + max(2 * table + before, 2 * block + max(table, before))


def _held(parameter: nn.Parameter, ranks: int) -> int:
    """Count the bytes of the first rank's piece, the largest: rows are dealt out in equal parts, the last short."""
    rows = -(-parameter.shape[0] // ranks) if ranks > 1 else 1
    whole = parameter.numel() * parameter.element_size()
    return rows * (whole // parameter.shape[0]) if ranks > 1 else whole
