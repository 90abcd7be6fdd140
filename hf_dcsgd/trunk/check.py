"""Fill a trunk cache, once a model is seen to compute the same from cached hidden states as from its inputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_dcsgd.data.rows import Batch, stack
from hf_dcsgd.privacy.randomness import private_randomness
from hf_dcsgd.tasks.layer_selection import train_mode
from hf_dcsgd.trunk.build import TrunkCache, default_cache_dir
from hf_dcsgd.trunk.cut import TRUNK_ENTRY, FrozenTrunk, TrunkCacheError

if TYPE_CHECKING:
    from hf_dcsgd.step import PrivateStep

logger = logging.getLogger(__name__)

_ROWS_TRIED = 4  # of one unit
# How far losses and norms may differ, by the precision in which hidden states are kept.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def filled_cache(
    open_cache: Callable[[], TrunkCache],
    make_step: Callable[[FrozenTrunk], PrivateStep],
    *,
    device: torch.device,
    required: bool,
    **options: Any,
) -> TrunkCache | None:
    """Open a cache, try it and fill it; None, with a warning, where that cannot be done and is not `required`.

    `options` are those of `fill_and_check`.
    """
    try:
        with private_randomness(device):
            cache = open_cache()
            train_mode(cache.trunk.model)  # a step looks at it
            fill_and_check(cache, make_step(cache.trunk), **options)
    except TrunkCacheError as error:
        if required:
            error.add_note('trunk_cache="auto" trains such a model without a cache.')
            raise
        logger.warning("training goes on without a trunk cache: %s", error)
        return None
    return cache


def fill_and_check(
    cache: TrunkCache,
    step: PrivateStep,
    *,
    rank: int = 0,
    world_size: int = 1,
    show_progress: bool = True,
    units: Sequence[Sequence[int]] | None = None,
    collated_units: Callable[[TrunkCache, Sequence[Sequence[int]]], list[Batch]] | None = None,
) -> None:
    """Try a cache on a few rows of this rank, then fill it with all of them.

    Where rows belong to `units`, this rank's are those of its units, and some of these are tried as a whole, too.
    """
    shard = f"{rank}-of-{world_size}"
    mine: Sequence[int] = range(rank, len(cache.store), world_size)
    few = mine[:: max(1, len(mine) // 8)]
    if units is not None and collated_units is not None:
        some_units = units[:: max(1, len(units) // 4)][:4]
        mine = [row for unit in units for row in unit]
        few = [row for unit in some_units for row in unit[:_ROWS_TRIED]]
    cache.fill(few, shard, show_progress=False)
    require_same_results(step, stack([cache.store[index] for index in few]))
    if units is not None and collated_units is not None:
        require_same_results(step, collated_units(cache, [unit[:_ROWS_TRIED] for unit in some_units]))
    if rank == 0:
        where = "" if cache.folder.parent == default_cache_dir() else f" --cache-dir {cache.folder.parent}"
        print(f"Trunk cache ({cache.size}): {cache.folder}, private; `hf-dcsgd cache rm {cache.folder.name}{where}`")
    cache.fill(mine, shard, show_progress=show_progress and rank == 0)


def require_same_results(step: PrivateStep, stacks: list[Batch]) -> None:
    """Raise `TrunkCacheError` unless losses and norms of some cached rows are those without the cache."""
    was_training = step.model.training
    step.model.eval()
    try:
        with step.randomness(), step.forward_context():
            for cached in stacks:
                whole = {name: value for name, value in cached.items() if name != TRUNK_ENTRY}
                tolerance = _TOLERANCE[cached[TRUNK_ENTRY].dtype]
                for found, expected in zip(_results(step, cached), _results(step, whole), strict=True):
                    if not torch.allclose(
                        found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
                    ):
                        raise TrunkCacheError(
                            "losses or gradient norms differ with and without the cache: the trained part of the "
                            "model uses more of the frozen part than its hidden states"
                        )
    except (AttributeError, IndexError, KeyError, TypeError, RuntimeError) as error:
        raise TrunkCacheError(f"the model cannot run with its frozen blocks passed over: {error}") from error
    finally:
        step.model.train(was_training)
        step.clipper.reset_verification()


def _results(step: PrivateStep, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    with step.clipper.over(step.units(batch)):
        losses = step.losses(step.on_device(batch))
        return losses.detach(), step.clipper.norms(losses)
