"""The audit with whole units as canaries: it passes, and refutes what is broken about units."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Count

from hf_dcsgd.audit import audit_strategy
from hf_dcsgd.audit.processes import audit_processes
from hf_dcsgd.ghost.units import Units
from hf_dcsgd.privacy.sampling import PoissonBatchSampler
from hf_dcsgd.privacy.units import RowsOfUnits, UnitBatchSampler
from hf_dcsgd.runs.rows import TrainingRows

pytestmark = pytest.mark.proof

ROWS = 3
REFUTED = "broken variant refuted by the audit"


@pytest.mark.parametrize("clipping", ["dc_sgd_e", pytest.param("fixed", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("fewer_draws")
def test_the_audit_of_units_passes(clipping: str, count: Count) -> None:
    for report in audit_strategy(clipping, levels=(0, 1), rows_per_unit=ROWS):
        assert report.passed, str(report)
        count(f"audit of units passed by a strategy: {report.level}", 1)


@pytest.mark.slow
def test_an_adversary_who_looks_for_a_unit(count: Count) -> None:
    (report,) = audit_strategy("dc_sgd_e", levels=(2,), trials=1_500, rows_per_unit=ROWS)
    assert report.passed, str(report)
    count("audit of units passed by a strategy: L2", 1)


@pytest.mark.slow
def test_the_audit_of_units_over_processes_passes(count: Count) -> None:
    report = audit_processes("dc_sgd_e", rows_per_unit=ROWS)
    assert report.passed, str(report)
    count("audit of units passed by a strategy: L3", 1)


# --- broken variants -------------------------------------------------------------------------------------------------


def rows_sampled_where_units_are_claimed(patch: pytest.MonkeyPatch) -> None:
    def by_row(plan: Any, units: RowsOfUnits, **options: Any) -> PoissonBatchSampler:
        return PoissonBatchSampler(len(units.rows), plan.expected_batch_size, **options)

    patch.setattr("hf_dcsgd.runs.rows.poisson_sampler", by_row)


def a_unit_split_over_two_micro_batches(patch: pytest.MonkeyPatch) -> None:
    split = UnitBatchSampler.split

    def halves(self: UnitBatchSampler, draw: Any) -> list[Any]:
        units = [rows for micro_batch in split(self, draw) for rows in micro_batch]
        return [[rows[k::2] for rows in units if rows[k::2]] for k in range(self.gradient_accumulation_steps)]

    patch.setattr(UnitBatchSampler, "split", halves)


def the_cap_ignored(patch: pytest.MonkeyPatch) -> None:
    drawn_rows = RowsOfUnits.drawn_rows
    patch.setattr(RowsOfUnits, "drawn_rows", lambda self, units, most, random: drawn_rows(self, units, 99, random))


def the_mean_over_a_micro_batch(patch: pytest.MonkeyPatch) -> None:
    def mean(self: Units, per_row: torch.Tensor) -> torch.Tensor:
        return per_row.new_zeros(self.count).index_add(0, self.of_row, per_row) / (self.rows / self.count)

    patch.setattr(Units, "mean", mean)


def n_counted_in_rows(patch: pytest.MonkeyPatch) -> None:
    def sizes(self: TrainingRows) -> dict[str, int]:
        assert self.units is not None
        return {"dataset_size": len(self.units.rows), "num_units": len(self.units.rows)}

    patch.setattr(TrainingRows, "sizes", sizes)


MUTATIONS: tuple[tuple[str, str, Callable[[pytest.MonkeyPatch], None]], ...] = (
    ("rows sampled where units are claimed", "drawn twice", rows_sampled_where_units_are_claimed),
    ("a unit split over two micro-batches", "drawn twice", a_unit_split_over_two_micro_batches),
    ("the cap of rows ignored", "against the cap", the_cap_ignored),
    ("the mean over rows of a micro-batch", "clipped sum", the_mean_over_a_micro_batch),
    ("N counted in rows", "units claimed", n_counted_in_rows),
)


@pytest.mark.parametrize(("name", "finding", "break_it"), MUTATIONS, ids=[name for name, *_ in MUTATIONS])
def test_the_audit_refutes_it(
    name: str, finding: str, break_it: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, count: Count
) -> None:
    break_it(monkeypatch)
    (report,) = audit_strategy("dc_sgd_e", levels=(0,), rows_per_unit=ROWS)
    assert any(finding in failure.name for failure in report.failures), str(report)
    count(REFUTED, 1)


def test_a_unit_that_is_split_counts_twice_in_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why that matters: two halves of a unit are clipped each by themselves, and move the sum by 2C."""
    units = RowsOfUnits(np.zeros(4, dtype=np.int64))
    a_unit_split_over_two_micro_batches(monkeypatch)
    sampler = UnitBatchSampler(units, 1, max_rows_per_unit=4, steps=1, gradient_accumulation_steps=2)
    assert [len(micro_batch) for micro_batch in sampler.split([0])] == [1, 1]


def test_the_table_in_the_docs_has_them() -> None:
    text = (Path(__file__).parents[1] / "docs" / "privacy.md").read_text(encoding="utf-8")
    assert not [name for name, *_ in MUTATIONS if f"| {name} | L0 |" not in text]
