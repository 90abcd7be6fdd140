"""A trainer made for auditing: a linear model whose per-example gradient is whatever the row says.

The loss of a row is ⟨weights, features⟩, so its gradient is exactly its features: a canary of any size and direction
can be put against any background, and yet everything runs through `DCSGDTrainer` as in a real run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_dcsgd.clipping import BUILTIN_OPTIONS, strategy
from hf_dcsgd.trainer import DCSGDTrainer
from hf_dcsgd.training_args import DCSGDTrainingArguments

Row = dict[str, Tensor]

DIMENSIONS = 6
CLIP_THRESHOLD = 4.0  # not 1, which would hide a missing scaling
NOISE_MULTIPLIER = 1.0
SIDE_NOISE_MULTIPLIER = 1.25  # so that σ_T = 5/3 exactly
EXPECTED_BATCH_SIZE = 16
MICRO_BATCHES = 2


class LinearModel(nn.Module):
    """Two parameters, so that noise can be compared between tensors."""

    def __init__(self, dimensions: int = DIMENSIONS) -> None:
        super().__init__()
        self.first = nn.Linear(dimensions // 2, 1, bias=False)
        self.second = nn.Linear(dimensions - dimensions // 2, 1, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        split = self.first.in_features
        return (self.first(features[:, :split]) + self.second(features[:, split:])).squeeze(1)


def linear_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs * labels


def row(features: Sequence[float]) -> Row:
    return {"features": torch.tensor(features, dtype=torch.float32), "labels": torch.tensor(1.0)}


def direction(size: float, axis: int = 0, dimensions: int = DIMENSIONS) -> Row:
    """Make a row whose gradient points along one axis."""
    return row([size if k == axis else 0.0 for k in range(dimensions)])


def opposed_background(count: int = EXPECTED_BATCH_SIZE - 1) -> list[Row]:
    """Make rows that point against a canary along the first axis, from below the threshold to far above it."""
    sizes = [CLIP_THRESHOLD * 10 ** (-0.5 + 3 * k / max(1, count - 1)) for k in range(count)]
    return [direction(-size) for size in sizes]


def canary(size: float = 1e4) -> Row:
    return direction(size)


def as_units(rows: Sequence[Any], rows_per_unit: int | None) -> list[Any]:
    """Make a unit of each row: one to `rows_per_unit` copies of it. A unit of identical rows is the strongest."""
    if rows_per_unit is None:
        return list(rows)
    return [[row] * (1 + k % rows_per_unit) for k, row in enumerate(rows)]


def probe_trainer(
    output_dir: str,
    clipping: str,
    dimensions: int = DIMENSIONS,
    *,
    train_dataset: Any = None,
    data_collator: Any = None,
    rows_per_unit: int | None = None,
    **options: Any,
) -> DCSGDTrainer:
    """Make a trainer for the audit's setting: σ = 1, side multiplier 1.25, C = 4, B = 16 in two micro-batches.

    With `rows_per_unit`, units of one row more than that are protected, and enter a step with that many.
    """
    train_dataset = train_dataset or [direction(1.0, dimensions=dimensions)] * (10 * EXPECTED_BATCH_SIZE)
    if rows_per_unit is not None:
        train_dataset = [{**row, "owner": k} for k, row in enumerate(train_dataset) for _ in range(rows_per_unit + 1)]
        options = {"privacy_unit": "owner", "max_rows_per_unit": rows_per_unit, **options}
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    side_noise = strategy(clipping).side_noise_options(SIDE_NOISE_MULTIPLIER)
    outside = {name: value for name, value in side_noise.items() if name not in BUILTIN_OPTIONS}
    settings: dict[str, Any] = {
        "recipe": "none",
        "accountant": "rdp",
        "clipping": clipping,
        "noise_multiplier": NOISE_MULTIPLIER,
        "clip_threshold": CLIP_THRESHOLD,
        **{name: value for name, value in side_noise.items() if name not in outside},
        "clipping_options": outside or None,
        "per_device_train_batch_size": EXPECTED_BATCH_SIZE // MICRO_BATCHES // world_size,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "max_steps": 1_000_000,
        "trainable_layers": "all",
        "save_strategy": "no",
        "use_cpu": True,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "disable_tqdm": True,
        **options,
    }
    return DCSGDTrainer(
        LinearModel(dimensions),
        DCSGDTrainingArguments(output_dir, **settings),
        data_collator=data_collator,
        train_dataset=train_dataset,
        per_example_loss_func=linear_losses,
    )
