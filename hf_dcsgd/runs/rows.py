"""Where the batches of a run come from: Poisson draws of its rows, which may carry cached hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from hf_dcsgd.data.loading import poisson_dataloader
from hf_dcsgd.data.rows import Collator, take_only_row
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.privacy.sampling import PoissonBatchSampler
from hf_dcsgd.step import PrivateStep
from hf_dcsgd.training_args import DCSGDTrainingArguments
from hf_dcsgd.trunk.build import TrunkCache, open_cache
from hf_dcsgd.trunk.check import filled_cache
from hf_dcsgd.trunk.cut import FrozenTrunk

# Those of `DataLoader` that `TrainingArguments` has, there as `dataloader_*`.
_LOADER_OPTIONS = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "multiprocessing_context")


def train_dataloader(args: DCSGDTrainingArguments, plan: PrivacyPlan, rows: Any, collate: Collator) -> DataLoader:
    """Load this rank's share of the Poisson draws of one epoch."""
    sampler = PoissonBatchSampler(
        plan.dataset_size,
        plan.expected_batch_size,
        steps=plan.dataset_size // plan.expected_batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        rank=args.process_index,
        world_size=plan.world_size,
        unsafe_seed=plan.unsafe_noise_seed,
    )
    options = {name: getattr(args, f"dataloader_{name}", None) for name in _LOADER_OPTIONS}
    return poisson_dataloader(rows, sampler, collate, rank=args.process_index, **options)


def cached_rows(
    args: DCSGDTrainingArguments,
    model: nn.Module,
    rows: Any,
    collate: Collator,
    *,
    label_names: Sequence[str] | None,
    make_step: Callable[[FrozenTrunk], PrivateStep],
) -> tuple[Any, Collator, TrunkCache | None]:
    """Return rows with the hidden states of the frozen trunk in them, if `trunk_cache` asks for it and it can be done.

    Their collator comes with them, and the cache; None where there is none.
    """
    if args.trunk_cache == "off":
        return rows, collate, None
    cache = filled_cache(
        lambda: open_cache(
            model,
            rows,
            collate,
            label_names=label_names,
            device=args.device,
            cache_dir=args.trunk_cache_dir,
            dtype=args.trunk_cache_dtype,
            largest=args.per_device_train_batch_size,
        ),
        make_step,
        device=args.device,
        required=args.trunk_cache == "on",
        rank=args.process_index,
        world_size=args.world_size,
        show_progress=not args.disable_tqdm,
    )
    return (rows, collate, None) if cache is None else (cache.store, take_only_row, cache)
