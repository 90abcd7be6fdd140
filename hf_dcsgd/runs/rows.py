"""Where the batches of a run come from: Poisson draws of its rows, which may carry cached hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import DataLoader

from hf_dcsgd.data.grouping import group_rows, select_rows, without_column
from hf_dcsgd.data.loading import poisson_dataloader
from hf_dcsgd.data.rows import Collator
from hf_dcsgd.privacy.plan import BY_ROW, PrivacyPlan
from hf_dcsgd.privacy.sampling import PoissonBatchSampler, map_style_length
from hf_dcsgd.privacy.units import RowsOfUnits, UnitBatchSampler
from hf_dcsgd.step import PrivateStep
from hf_dcsgd.training_args import DCSGDTrainingArguments
from hf_dcsgd.trunk.build import open_cache
from hf_dcsgd.trunk.check import filled_cache
from hf_dcsgd.trunk.cut import FrozenTrunk
from hf_dcsgd.trunk.evaluation import EvaluationCache
from hf_dcsgd.trunk.units import HiddenStatesCollator, RowsWithHiddenStates, collated_units

# Those of `DataLoader` that `TrainingArguments` has, there as `dataloader_*`.
_LOADER_OPTIONS = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "multiprocessing_context")


class TrainingRows:
    """The training data as a run draws from them: rows, and the units of privacy that they belong to."""

    def __init__(self, args: DCSGDTrainingArguments, data: Any) -> None:
        self._args, self._data, self._column = args, data, args.privacy_unit
        self.units: RowsOfUnits | None = None
        if self._column is not None and data is not None:
            self.units = group_rows(data, self._column, show_progress=not args.disable_tqdm)

    def are_of(self, args: DCSGDTrainingArguments, data: Any) -> bool:
        """Tell whether these are the rows of this dataset under these arguments, as they are now."""
        return self._args is args and self._data is data and self._column == args.privacy_unit

    def sizes(self) -> dict[str, Any]:
        """Return how many examples can be drawn, and how many units of privacy they belong to."""
        if self.units is None:
            return {"dataset_size": None if self._data is None else map_style_length(self._data)}
        first = self._first_rows()
        return {"dataset_size": len(self.units if first is None else first), "num_units": len(self.units)}

    def usable(self) -> Any:
        """Return the rows that each unit may take part with, without the column of `privacy_unit`."""
        rows, first = self._data, self._first_rows()
        if self._column is not None:
            rows = without_column(rows, self._column)
        return rows if first is None else select_rows(rows, first)

    def _first_rows(self) -> np.ndarray | None:
        """Return the rows that are drawn one by one; None where units are drawn as a whole."""
        if self.units is None or self._args.privacy_unit_clipping != BY_ROW:
            return None
        return self.units.first_rows(self._args.max_rows_per_unit)


def train_dataloader(
    args: DCSGDTrainingArguments,
    plan: PrivacyPlan,
    rows: Any,
    collate: Collator | None,
    units: RowsOfUnits | None = None,
) -> DataLoader:
    """Load this rank's share of the Poisson draws of one epoch; of `units` where these are drawn."""
    sampler = poisson_sampler(
        plan,
        units,
        steps=plan.dataset_size // plan.expected_batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        rank=args.process_index,
        world_size=plan.world_size,
    )
    options = {name: getattr(args, f"dataloader_{name}", None) for name in _LOADER_OPTIONS}
    return poisson_dataloader(rows, sampler, collate, rank=args.process_index, **options)


def poisson_sampler(plan: PrivacyPlan, units: RowsOfUnits | None = None, **options: Any) -> PoissonBatchSampler:
    """Make the sampler of a plan: of rows, or of units with their rows. `options` are those of the sampler."""
    options = {"unsafe_seed": plan.unsafe_noise_seed, **options}
    if not plan.draws_units:
        return PoissonBatchSampler(plan.dataset_size, plan.expected_batch_size, **options)
    assert plan.unit is not None
    assert units is not None
    return UnitBatchSampler(units, plan.expected_batch_size, max_rows_per_unit=plan.unit.max_rows, **options)


@dataclass(frozen=True)
class CachedRows:
    """Rows that carry hidden states of the frozen trunk, which passes over what they stand for; so may evaluation."""

    rows: Any
    collate: Collator | None  # None where rows are collated already
    trunk: FrozenTrunk
    evaluation: EvaluationCache | None


def cached_rows(
    args: DCSGDTrainingArguments,
    plan: PrivacyPlan,
    model: nn.Module,
    rows: Any,
    collate: Collator,
    units: RowsOfUnits | None,
    label_names: Sequence[str] | None,
    make_step: Callable[[FrozenTrunk], PrivateStep],
    forward_context: Callable[[], AbstractContextManager[Any]],
) -> CachedRows | None:
    """Return rows with the hidden states of the frozen trunk in them; None where `trunk_cache` leaves models as is."""
    units = units if plan.draws_units else None
    with forward_context():
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
            units=None if units is None else units.of_rank(args.process_index, args.world_size),
            collated_units=lambda cache, some: collated_units(
                RowsWithHiddenStates(rows, cache.store), HiddenStatesCollator(collate), some
            ),
        )
    if cache is None:
        return None
    # A compiled evaluation would not see that blocks are passed over.
    evaluation = None if args.torch_compile else EvaluationCache(cache, forward_context)
    if units is None:
        return CachedRows(cache.store, None, cache.trunk, evaluation)
    return CachedRows(RowsWithHiddenStates(rows, cache.store), HiddenStatesCollator(collate), cache.trunk, evaluation)
