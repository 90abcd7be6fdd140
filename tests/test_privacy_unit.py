"""Units of privacy by a column: grouping, draws, the run, what is refused."""

from __future__ import annotations

import io
import pickle
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import clip_factors, clipped_sum_of, gradients_of, norms_of
from scipy import stats
from tiny_tasks import (
    CLASSES,
    FEATURES,
    feature_classifier,
    feature_rows,
    flat_parameters,
    force_draws,
    pad,
    private_args,
    text_rows,
    tiny_bert,
    watch_steps,
)
from tqdm.auto import tqdm

from hf_dcsgd import DCSGDTrainer, PrivateRun
from hf_dcsgd.cli import main
from hf_dcsgd.data.grouping import group_rows
from hf_dcsgd.data.loading import poisson_dataloader, restack
from hf_dcsgd.data.rows import batch_length
from hf_dcsgd.data.units import UNIT_ENTRY, count_examples, rows_of_example, take_example
from hf_dcsgd.privacy.units import RowsOfUnits, UnitBatchSampler
from hf_dcsgd.reporting.page import render_page
from hf_dcsgd.reporting.report import format_spending
from hf_dcsgd.runs.spending import Spending, SpentRun
from hf_dcsgd.runs.trace import read_trace

pytestmark = pytest.mark.usefixtures("no_report_page", "quick_statements")

USERS = 40
ALPHA = 1e-9  # a sampler that is right fails one of some eighty comparisons once in ten million runs


def owners(n: int, users: int = USERS, seed: int = 3) -> list[str]:
    """Skewed: a few own many rows; everybody owns one."""
    generator = np.random.default_rng(seed)
    drawn = (users * generator.random(n - users) ** 2).astype(int)
    return [f"user {user}" for user in generator.permutation([*range(users), *drawn])]


def owned_rows(n: int = 120, users: int = USERS) -> list[dict[str, Any]]:
    return [{**row, "user_id": user} for row, user in zip(feature_rows(n), owners(n, users), strict=True)]


def units_trainer(output_dir: Path, rows: Any = None, **changes: Any) -> DCSGDTrainer:
    options = changes.pop("trainer_options", {})
    args = private_args(output_dir, **{"privacy_unit": "user_id", "per_device_train_batch_size": 10, **changes})
    rows = owned_rows() if rows is None else rows
    model = options.pop("model", None) or feature_classifier()
    return DCSGDTrainer(model, args, train_dataset=rows, **{"eval_dataset": feature_rows(seed=1), **options})


# --- grouping --------------------------------------------------------------------------------------------------------


def by_dict(values: list[Any]) -> set[tuple[int, ...]]:
    groups: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        groups.setdefault(value, []).append(index)
    return {tuple(rows) for rows in groups.values()}


def as_sets(units: RowsOfUnits) -> set[tuple[int, ...]]:
    return {tuple(rows) for rows in units.of_rank(0, 1)}


@given(
    st.one_of(
        st.lists(st.integers(-3, 3), min_size=1, max_size=30),
        st.lists(st.text("ab", max_size=2), min_size=1, max_size=30),
        st.lists(st.booleans(), min_size=1, max_size=30),
    )
)
@settings(max_examples=40, deadline=None)
def test_rows_of_one_value_are_one_unit(values: list[Any]) -> None:
    expected = by_dict(values)
    assert as_sets(group_rows(Dataset.from_dict({"user": values}), "user")) == expected
    assert as_sets(group_rows([{"user": value} for value in values], "user")) == expected


def test_a_selected_shuffled_transformed_dataset_is_grouped_by_what_it_shows() -> None:
    data = Dataset.from_dict({"user": list("abcabcab"), "x": list(range(8))}).shuffle(seed=0).select(range(1, 7))
    shown = list(data["user"])
    assert as_sets(group_rows(data, "user")) == by_dict(shown)
    assert as_sets(group_rows(data.with_transform(lambda rows: {"x": rows["x"]}), "user")) == by_dict(shown)


@pytest.mark.parametrize("kind", [pytest.param("whole", marks=pytest.mark.slow), "shuffled"])
def test_a_million_rows_take_seconds_and_little_memory(kind: str) -> None:
    users = np.random.default_rng(0).integers(0, 100_000, 1_000_000)
    data = Dataset.from_dict({"user": pa.array(users).cast(pa.string())})
    data = data.shuffle(seed=0) if kind == "shuffled" else data
    start = time.process_time()
    units = group_rows(data, "user")
    assert time.process_time() - start < 3
    assert len(units) == len(np.unique(users))
    assert units.rows.nbytes + units.sizes.nbytes + units.starts.nbytes < 10e6
    start = time.process_time()
    sampler = UnitBatchSampler(units, 1000, max_rows_per_unit=4, steps=1)
    for _ in range(20):
        sampler.split(sampler.draw())
    assert time.process_time() - start < 1


def test_rows_that_were_filtered_out_may_be_nobodys() -> None:
    data = Dataset.from_dict({"user": ["b", None, "a", "b", "c"], "height": [1.0, 2.0, float("nan"), 2.0, 1.0]})
    assert as_sets(group_rows(data.filter(lambda row: row["user"] is not None), "user")) == by_dict(list("babc"))
    assert as_sets(group_rows(data.select([0, 3, 4]), "height")) == {(0, 2), (1,)}
    with pytest.raises(ValueError, match="in every training row"):
        group_rows(data.select([0, 1]), "user")


@pytest.mark.parametrize("kind", ["arrow", "list"])
def test_a_progress_bar_where_it_takes_more_than_a_second(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, options = io.StringIO(), {}

    def at_once(*args: Any, **kwargs: Any) -> tqdm:
        options.update(kwargs)
        return tqdm(*args, **{**kwargs, "delay": 0, "mininterval": 0, "file": printed})

    monkeypatch.setattr("hf_dcsgd.data.grouping.tqdm", at_once)
    monkeypatch.setattr("hf_dcsgd.data.grouping._ROWS_AT_ONCE", 10)
    users = [k // 3 for k in range(30)]
    data = Dataset.from_dict({"user": users}) if kind == "arrow" else [{"user": user} for user in users]
    assert as_sets(group_rows(data, "user")) == by_dict(users)
    assert options["delay"] == 1
    assert "Units by user:  33%" in printed.getvalue()
    assert "30/30" in printed.getvalue() or "30.0/30.0" in printed.getvalue()


@pytest.mark.parametrize("kind", ["arrow", "list"])
@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (["a", None], ValueError, "expected a value of privacy_unit='user' in every training row"),
        ([1.0, float("nan")], ValueError, "expected a value of privacy_unit='user' in every training row"),
        ([["a"], ["b"]], TypeError, "that can be compared, such as numbers or texts, got list"),
    ],
)
def test_columns_that_name_nobody(kind: str, values: list[Any], error: type[Exception], message: str) -> None:
    data = Dataset.from_dict({"user": values}) if kind == "arrow" else [{"user": value} for value in values]
    with pytest.raises(error, match=message):
        group_rows(data, "user")


@pytest.mark.parametrize("data", [Dataset.from_dict({"x": [1]}), [{"x": 1}], [(1, 2)]], ids=["arrow", "list", "tuple"])
def test_a_missing_column_is_named_with_those_that_there_are(data: Any) -> None:
    with pytest.raises(ValueError, match="privacy_unit to be a column of train_dataset, got 'user' and the columns"):
        group_rows(data, "user")


# --- draws -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 6), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_a_unit_enters_with_rows_of_its_own_each_once(sizes: list[int], most: int, seed: int) -> None:
    units = RowsOfUnits(np.repeat(np.arange(len(sizes)), sizes))
    drawn = units.drawn_rows(np.arange(len(sizes)), most, np.random.default_rng(seed))
    for rows, owned in zip(drawn, units.of_rank(0, 1), strict=True):
        assert len(rows) == len(set(rows)) == min(most, len(owned))
        assert set(rows) <= set(owned)


def test_every_subset_of_rows_is_as_likely_as_any_other() -> None:
    units = RowsOfUnits(np.repeat([0, 1], [5, 3]))
    generator = np.random.default_rng(0)
    counts = Counter(frozenset(units.drawn_rows(np.array([0]), 2, generator)[0]) for _ in range(4000))
    assert len(counts) == 10
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


@pytest.mark.parametrize("world_size", [1, 2])
def test_units_are_drawn_at_rate_q_once_and_on_one_rank_only(world_size: int) -> None:
    units = RowsOfUnits(np.random.default_rng(0).permutation(np.repeat(np.arange(20), np.arange(1, 21))))
    owner = {row: unit for unit, rows in enumerate(units.of_rank(0, 1)) for row in rows}
    steps, seen, rows_seen = 1500, Counter(), Counter()
    ranks_of: dict[int, set[int]] = {}
    for rank in range(world_size):
        sampler = UnitBatchSampler(
            units, 5, max_rows_per_unit=3, steps=steps, gradient_accumulation_steps=2, rank=rank, world_size=world_size
        )
        micro_batches = list(sampler)
        assert len(micro_batches) == 2 * steps
        for first, second in zip(micro_batches[::2], micro_batches[1::2], strict=True):
            drawn = [owner[rows[0]] for rows in [*first, *second]]
            assert len(drawn) == len(set(drawn)), "a unit is in a step at most once"
            assert all(len({owner[row] for row in rows}) == 1 and len(rows) <= 3 for rows in [*first, *second])
            seen.update(drawn)
            rows_seen.update(row for rows in [*first, *second] for row in rows)
            for unit in drawn:
                ranks_of.setdefault(unit, set()).add(rank)
    assert all(len(ranks) == 1 for ranks in ranks_of.values())
    for unit in range(20):
        assert stats.binomtest(seen[unit], steps, 0.25).pvalue > ALPHA
        counts = [rows_seen[row] for row in units.of_rank(0, 1)[unit]]
        if len(counts) > 3:
            # Rows of one draw exclude each other, which makes counts more alike than independent ones.
            assert stats.chisquare(counts).pvalue > ALPHA


def test_a_sampler_that_is_sent_away_does_not_foretell_draws() -> None:
    sampler = UnitBatchSampler(RowsOfUnits(np.arange(50)), 5, max_rows_per_unit=2, steps=3)
    list(sampler)
    assert pickle.loads(pickle.dumps(sampler))._generator is None


# --- stacks ----------------------------------------------------------------------------------------------------------


def test_units_are_collated_alone_and_never_cut() -> None:
    rows = text_rows(60)
    units = RowsOfUnits(np.random.default_rng(0).permutation(np.repeat(np.arange(20), 3)))
    sampler = UnitBatchSampler(units, 10, max_rows_per_unit=2, steps=4, gradient_accumulation_steps=3)
    seen: list[int] = []

    def collate(handed: list[Any]) -> dict[str, torch.Tensor]:
        seen.append(len(handed))
        return pad(handed)

    micro_batches = list(poisson_dataloader(rows, sampler, collate))
    assert set(seen) == {2}
    for start in range(0, 12, 3):
        logical = micro_batches[start : start + 3]
        stacks = [stack for part in restack(logical, 5) for stack in part]
        assert sum(map(count_examples, stacks)) == sum(len(units) for units in logical)
        for stack in stacks:
            assert batch_length(stack) <= 5
            for unit in range(count_examples(stack)):
                alone = take_example(stack, unit)
                assert batch_length(alone) == len(rows_of_example(stack, unit)) == 2
                assert alone[UNIT_ENTRY].tolist() == [0, 0]


def test_units_of_like_lengths_and_numbers_of_rows_share_stacks() -> None:
    """Stacks are of equal shapes, whatever the sampling strategy: little is padded, and they are full."""
    generator = np.random.default_rng(0)
    rows = [{"input_ids": [1] * int(n), "labels": 0} for n in generator.geometric(0.08, 3000).clip(3, 60)]
    units = RowsOfUnits(np.arange(3000) // 3)
    sampler = UnitBatchSampler(units, 300, max_rows_per_unit=2, steps=3, gradient_accumulation_steps=5)

    def in_eights(handed: list[Any]) -> dict[str, torch.Tensor]:
        return {
            name: torch.nn.functional.pad(value, (0, -value.shape[1] % 8)) if value.dim() == 2 else value
            for name, value in pad(handed).items()
        }

    micro_batches = list(poisson_dataloader(rows, sampler, in_eights))
    used = padded = stacks = by_chance = 0
    for start in range(0, 15, 5):
        logical = micro_batches[start : start + 5]
        for stack in (stack for part in restack(logical, 60) for stack in part):
            stacks += 1
            used += int(stack["attention_mask"].sum())
            padded += stack["input_ids"].numel()
        by_chance += sum(
            sum(map(batch_length, part)) * max(unit["input_ids"].shape[1] for unit in part) for part in logical if part
        )
    # What is left is rounding, and the shorter row of a unit; each of 64/8 lengths leaves one stack that is not full.
    assert padded < 2 * used
    assert padded < 0.6 * by_chance
    assert stacks < 3 * (600 / 60 + 64 / 8)


def test_a_unit_larger_than_a_stack_is_a_stack() -> None:
    units = [{"x": torch.ones(k, 2), UNIT_ENTRY: torch.zeros(k, dtype=torch.long)} for k in (7, 1, 1, 2)]
    (stacks,) = restack([units], 3)
    assert [stack[UNIT_ENTRY].tolist() for stack in stacks] == [[0, 1], [0, 0], [0] * 7]


# --- the run ---------------------------------------------------------------------------------------------------------


def test_all_numbers_count_units(tmp_path: Path) -> None:
    plan = units_trainer(tmp_path, max_rows_per_unit=3).plan
    assert plan is not None
    assert (plan.dataset_size, plan.num_units, plan.delta) == (USERS, USERS, 1 / USERS)
    assert plan.sampling_rate == 10 / USERS
    assert plan.steps == USERS // 10
    assert plan.unit is not None
    assert (plan.unit.column, plan.unit.count, plan.unit.max_rows) == ("user_id", USERS, 3)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_clipped_sum_is_that_of_units_by_autograd(
    tmp_path: Path, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All units are drawn with all of their rows: the sum must be Σ clip(∇ mean of the unit's losses)."""
    rows, model = owned_rows(), feature_classifier()
    parameters = [p.detach().clone() for p in model.parameters()]
    sums: list[torch.Tensor] = []
    watch_steps(monkeypatch, release=lambda step: sums.append(step._clipped_sum.clone()))
    trainer = units_trainer(
        tmp_path, rows, trainer_options={"model": model}, clipping="fixed", clip_threshold=0.3, max_steps=1,
        max_rows_per_unit=100, gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    force_draws(trainer, lambda: np.arange(USERS))
    trainer.train()

    alone = feature_classifier()
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), parameters, strict=True))
    gradients = []
    for user in dict.fromkeys(row["user_id"] for row in rows):
        own = [row for row in rows if row["user_id"] == user]
        logits = alone(torch.stack([row["features"] for row in own]))
        loss = torch.nn.functional.cross_entropy(logits, torch.stack([row["labels"] for row in own]))
        gradients.append(gradients_of(loss, alone))
    factors = clip_factors(norms_of(gradients), 0.3)
    assert (factors < 1).any()
    expected = torch.cat([value.flatten() for value in clipped_sum_of(gradients, factors).values()])
    torch.testing.assert_close(sums[0].double(), expected, rtol=1e-4, atol=1e-5)


def test_texts_of_unequal_length_with_dropout(tmp_path: Path) -> None:
    rows = [{**row, "user_id": user} for row, user in zip(text_rows(120), owners(120), strict=True)]
    trainer = units_trainer(
        tmp_path, rows, trainable_layers="all", num_train_epochs=3, dataloader_num_workers=2,
        trainer_options={"model": tiny_bert(dropout=0.3), "data_collator": pad, "eval_dataset": text_rows(seed=1)},
    )  # fmt: skip
    trainer.train()
    assert trainer.mechanism is not None
    assert trainer.mechanism.charged == 3 * (USERS // 10)
    assert trainer.step is not None
    assert not trainer.step.clipper.slow_parameters


def test_an_empty_draw_of_units_is_a_step(tmp_path: Path) -> None:
    trainer = units_trainer(tmp_path)
    force_draws(trainer, lambda: np.arange(0))
    before = flat_parameters(trainer.model)
    trainer.train()
    assert trainer.mechanism is not None
    assert trainer.mechanism.charged == USERS // 10
    assert not torch.equal(before, flat_parameters(trainer.model))


def test_the_unit_is_named_wherever_the_guarantee_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = units_trainer(tmp_path)
    trainer.train()
    trainer.create_model_card()
    assert trainer.plan is not None
    report = trainer.privacy_report()
    printed = capsys.readouterr().out
    assert main(["report", str(tmp_path)]) == 0
    said = {
        "plan": printed,
        "sentence": report["guarantee"]["sentence"],
        "spent": format_spending(report),
        "page": render_page(report, read_trace(tmp_path)),
        "card": (tmp_path / "README.md").read_text(encoding="utf-8"),
        "command line": capsys.readouterr().out,
    }
    assert [name for name, text in said.items() if "one user_id with all of its rows" not in text] == []
    assert "40 of them (a public number)" in said["card"]
    assert "40 of them (a public number)" in said["plan"]
    assert "units of privacy, a public number" in said["page"]


@pytest.mark.parametrize(
    ("kind", "remove_unused"),
    [
        ("arrow", True),
        ("list", False),
        pytest.param("arrow", False, marks=pytest.mark.slow),
        pytest.param("list", True, marks=pytest.mark.slow),
    ],
)
def test_the_column_reaches_no_collator(tmp_path: Path, kind: str, remove_unused: bool) -> None:
    rows: Any = [{**row, "user_id": f"secret-{k % 30}"} for k, row in enumerate(text_rows(60))]
    rows = Dataset.from_list(rows) if kind == "arrow" else rows
    seen: set[str] = set()

    def collate(handed: list[Any]) -> dict[str, torch.Tensor]:
        seen.update(*handed)
        return pad(handed)

    trainer = units_trainer(
        tmp_path, rows, trainable_layers="head", max_steps=2, remove_unused_columns=remove_unused,
        trainer_options={"model": tiny_bert(), "data_collator": collate, "eval_dataset": None},
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    assert seen == {"input_ids", "labels"}
    assert not any(b"secret-" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_bad_column_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 'author' and the columns features, labels, user_id"):
        units_trainer(tmp_path, privacy_unit="author")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_rows_per_unit": 0}, "max_rows_per_unit"),
        ({"privacy_unit": ""}, "expected a column for privacy_unit, got ''"),
        ({"privacy_unit_clipping": "person"}, "privacy_unit_clipping to be one of unit, row, got 'person'"),
        ({"per_device_train_batch_size": 41}, "40 examples and 41"),
    ],
)
def test_contradictions(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        units_trainer(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "rows", "name"),
    [
        ({"privacy_unit": "other_id"}, None, "privacy_unit_column"),
        ({"max_rows_per_unit": 5}, None, "privacy_unit_max_rows"),
        ({}, owned_rows(120, USERS - 1), "privacy_unit_count"),
        ({"privacy_unit": None}, None, "privacy_unit"),
    ],
)
def test_resume_refuses_another_unit(tmp_path: Path, changes: dict[str, Any], rows: Any, name: str) -> None:
    rows = [{**row, "other_id": row["user_id"]} for row in (owned_rows() if rows is None else rows)]
    first = [{**row, "other_id": row["user_id"]} for row in owned_rows()]
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    units_trainer(tmp_path, first, **saving).train()
    with pytest.raises(ValueError, match=name):
        units_trainer(tmp_path, rows, **{**saving, **changes}).train(str(tmp_path / "checkpoint-2"))


def test_it_learns(tmp_path: Path) -> None:
    """Persons with three rows each, enough of them for the noise."""
    rows = [{**row, "user_id": k // 3} for k, row in enumerate(feature_rows(3000, spread=0.3))]
    trainer = units_trainer(
        tmp_path, rows, per_device_train_batch_size=100, num_train_epochs=5, learning_rate=0.05, logging_steps=50
    )
    trainer.train()
    data = feature_rows(300, seed=5, spread=0.3)
    predicted = trainer.model(torch.stack([row["features"] for row in data])).argmax(1)
    assert (predicted == torch.stack([row["labels"] for row in data])).float().mean() > 0.9
    assert FEATURES >= CLASSES


@pytest.mark.slow
def test_a_trunk_cache_changes_nothing(tmp_path: Path) -> None:
    rows = [{**row, "user_id": user} for row, user in zip(text_rows(80), owners(80), strict=True)]
    found = []
    for mode in ("off", "on"):
        trainer = units_trainer(
            tmp_path / mode, rows, trainable_layers="last:1", num_train_epochs=2, unsafe_noise_seed=7, optim="sgd",
            trunk_cache=mode, trunk_cache_dir=str(tmp_path / "cache"),
            trainer_options={"model": tiny_bert(), "data_collator": pad, "eval_dataset": None},
        )  # fmt: skip
        trainer.train()
        assert (trainer.step._losses._trunk is not None) == (mode == "on")
        found.append(flat_parameters(trainer.model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert not torch.equal(found[0], flat_parameters(tiny_bert()))


def test_what_runs_for_different_units_spent_is_not_added_up(tmp_path: Path) -> None:
    plan = units_trainer(tmp_path).plan
    rows_plan = units_trainer(tmp_path, privacy_unit=None).plan
    assert plan is not None
    assert rows_plan is not None
    persons, rows = (SpentRun.of(p, 3, name) for p, name in ((plan, "one"), (rows_plan, "two")))
    assert Spending((persons, replace(persons, run_id="three"))).epsilon(1e-3) < np.inf
    assert Spending((persons, rows)).epsilon(1e-3) == np.inf
    assert Spending.from_list(Spending((persons, rows)).to_list()) == Spending((persons, rows))


def test_a_loop_of_ones_own_refuses_units(tmp_path: Path) -> None:
    plan = units_trainer(tmp_path).plan
    assert plan is not None
    with pytest.raises(ValueError, match="expected a plan that protects rows, because PrivateRun draws rows"):
        PrivateRun(feature_classifier(), feature_rows(USERS), pad, plan, tmp_path)
