"""L4: an adversary who writes the dataset, its transform, the collator and one record.

Each attack tries to let that one record move the gradients of others, or count several times. The rows take the way of
a training run (`data/rows.py`), all of them are drawn, with and without the record, and the clipped sums are compared.
An attack fails when the sum moves by at most C, or when the run is refused.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import default_data_collator

from hf_dcsgd.audit.findings import Finding
from hf_dcsgd.audit.probe import CLIP_THRESHOLD, Row, canary, direction, probe_trainer
from hf_dcsgd.audit.replay import Subject, prepared
from hf_dcsgd.data.rows import fetch_row
from hf_dcsgd.ghost import BatchCouplingError

_ROWS = 12
_SLACK = 1e-4


class _Records:
    """A dataset whose `__getitems__` is the adversary's."""

    def __init__(self, rows: Sequence[Row], hand_out: Callable[[list[Row]], list[Row]]) -> None:
        self._rows = rows
        self._hand_out = hand_out

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def __getitems__(self, indices: list[int]) -> list[Row]:
        return self._hand_out([self._rows[index] for index in indices])


@dataclass(frozen=True)
class Attack:
    """What the adversary's dataset and collator do with the rows that they are handed."""

    name: str
    hand_out: Callable[[list[Row]], list[Row]] = list
    collate: Callable[[list[Row]], Any] = default_data_collator


def _changed(change: Callable[[Tensor], Tensor], entry: str = "features") -> Callable[[list[Row]], Any]:
    """Make a collator that changes an entry of all rows together."""

    def collate(rows: list[Row]) -> Any:
        batch = default_data_collator(rows)
        return {**batch, entry: change(batch[entry])}

    return collate


def _several_views(rows: list[Row]) -> list[Row]:
    return [row for row in rows for _ in range(5)]


def _standardized(rows: list[Row]) -> list[Row]:
    mean = torch.stack([row["features"] for row in rows]).mean(0)
    return [{**row, "features": row["features"] - mean} for row in rows]


def _dropped_rows(rows: list[Row]) -> Any:
    huge = [row for row in rows if row["features"].abs().max() > 1e3]
    return default_data_collator(huge or rows)


ATTACKS = (
    Attack("several views of a record", hand_out=_several_views),
    Attack("a transform that standardizes", hand_out=_standardized),
    Attack("a collator that mixes rows", collate=_changed(lambda x: x + x.flip(0))),
    Attack("a collator that scales by the largest value", collate=_changed(lambda x: x / x.abs().max())),
    Attack("a collator that takes a neighbor's label", collate=_changed(lambda x: x.roll(1), "labels")),
    Attack("a collator that repeats rows", collate=lambda rows: default_data_collator(rows * 3)),
    Attack("a collator that drops rows when the record is there", collate=_dropped_rows),
)


def adversary_findings(clipping: str, attacks: Sequence[Attack] = ATTACKS) -> list[Finding]:
    """Try each attack on the audit's own trainer."""
    return [_finding(clipping, attack) for attack in attacks]


def _finding(clipping: str, attack: Attack) -> Finding:
    # All of the background points one way, at or above the threshold: what moves it as a whole shows.
    background = [direction(CLIP_THRESHOLD * (1 + k / 4), axis=1) for k in range(_ROWS)]
    record = {**canary(), "labels": torch.tensor(-1.0)}
    dataset = _Records([*background, record], attack.hand_out)
    name = f"clipped sum, {attack.name}"
    with tempfile.TemporaryDirectory() as folder:
        options = {"per_device_train_batch_size": _ROWS, "gradient_accumulation_steps": 1}
        trainer = probe_trainer(folder, clipping, train_dataset=dataset, data_collator=attack.collate, **options)
        with prepared(trainer, double=True) as subject:
            allowed = subject.new_mechanism().threshold.sensitivity * (1 + _SLACK)
            try:
                change = _clipped_sum(subject, dataset, _ROWS + 1) - _clipped_sum(subject, dataset, _ROWS)
            except (ValueError, TypeError, BatchCouplingError) as error:
                return Finding(name, 0.0, allowed, f"refused: {error}")
    moved = change.norm().item()
    return Finding(name, moved if math.isfinite(moved) else math.inf, allowed)


def _clipped_sum(subject: Subject, dataset: Any, rows: int) -> Tensor:
    """Return the sum over the first rows, all of them drawn, without noise."""
    drawn = [fetch_row(dataset, index) for index in range(rows)]
    return subject.released_sum(subject.noiseless_step([drawn])[0])
