"""Rows, fetched and collated alone, then stacked by shape: what a row contributes is a function of that row."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tasks import feature_rows, pad, text_rows
from torch import Tensor
from torch.utils.data import default_collate
from transformers import BatchEncoding

from hf_dcsgd.data.rows import (
    LENGTH_MULTIPLE,
    RowCollator,
    batch_length,
    fetch_row,
    stack,
    take_row,
    with_rounded_lengths,
)


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        for name, value in one.items()
    )


# --- datasets --------------------------------------------------------------------------------------------------------


class Table(list):
    """Gives rows by lists of indices, changed by a transform that sees the whole list, as `datasets.Dataset` does."""

    def __init__(self, rows: list[Any], transform: Any) -> None:
        super().__init__(rows)
        self.transform = transform

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return self.transform([self[index] for index in indices])


def test_a_dataset_is_asked_for_one_row() -> None:
    assert fetch_row([5, 6, 7], 1) == 6
    asked: list[int] = []
    assert fetch_row(Table([5, 6, 7], lambda rows: [asked.append(len(rows)), *rows][1:]), 2) == 7
    assert asked == [1]


@pytest.mark.parametrize("transform", [lambda rows: rows * 2, lambda rows: []])
def test_a_record_that_becomes_several_rows_or_none_is_refused(transform: Any) -> None:
    with pytest.raises(ValueError, match=r"one row for one index, got [02]"):
        fetch_row(Table([5, 6, 7], transform), 1)


# --- collators -------------------------------------------------------------------------------------------------------


def mixup(rows: list[Any]) -> dict[str, Tensor]:
    batch = default_collate(rows)
    return {**batch, "features": 0.7 * batch["features"] + 0.3 * batch["features"].roll(1, 0)}


def random_mixup(rows: list[Any]) -> dict[str, Tensor]:
    batch = default_collate(rows)
    share = np.random.beta(1.0, 1.0)
    mixed = share * batch["features"] + (1 - share) * batch["features"][torch.randperm(len(rows))]
    return {**batch, "features": mixed.float()}


def centered(rows: list[Any]) -> dict[str, Tensor]:
    batch = default_collate(rows)
    return {**batch, "features": batch["features"] - batch["features"].mean(0)}


def sorted_by_label(rows: list[Any]) -> dict[str, Tensor]:
    return default_collate(sorted(rows, key=lambda row: int(row["labels"])))


def first_only(rows: list[Any]) -> dict[str, Tensor]:
    return default_collate(rows[:1])


@pytest.mark.parametrize("collate", [mixup, random_mixup, centered, sorted_by_label, first_only])
def test_a_collator_cannot_mix_rows(collate: Any) -> None:
    """One record more changes nothing for the others, and they stay in their places."""
    rows = feature_rows(6)
    alone = [RowCollator(collate).alone(row) for row in rows]
    (stacked,) = RowCollator(collate)(rows)
    (with_more,) = RowCollator(collate)([*rows, {**rows[0], "features": 1e6 * rows[0]["features"]}])
    for k, row in enumerate(alone):
        for batch in (stacked, with_more):
            for name, value in take_row(batch, k).items():
                torch.testing.assert_close(value, row[name])


def test_an_error_of_the_collator_says_that_it_got_one_row() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        RowCollator(lambda rows: 1 / 0)([{"x": 1}])  # type: ignore[arg-type,return-value]
    assert any("one row at a time" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        ({"x": torch.zeros(2, 3)}, ValueError, r"one entry of 'x' for one row, got 2"),
        ({"x": torch.zeros(0, 3)}, ValueError, r"one entry of 'x' for one row, got 0"),
        ({"x": torch.zeros(1, 3), "names": ["a", "b"]}, ValueError, r"one entry of 'names' for one row, got 2"),
        ({"x": np.zeros((1, 3))}, TypeError, r"'x' of type ndarray"),
        ([torch.zeros(1, 3)], TypeError, r"a mapping of tensors, got list"),
    ],
)
def test_what_is_not_one_row_is_refused(made: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RowCollator(lambda rows: made)([{}])


def test_encodings_of_tokenizers_are_rows_as_well() -> None:
    (batch,) = RowCollator(lambda rows: BatchEncoding({"input_ids": torch.tensor(rows)}))([[1, 2], [3, 4]])
    assert batch["input_ids"].tolist() == [[1, 2], [3, 4]]


# --- stacks ----------------------------------------------------------------------------------------------------------


def test_rows_of_one_shape_meet_and_no_others() -> None:
    rows = text_rows(40)
    stacks = RowCollator(pad)(rows)
    assert len(stacks) == len({len(row["input_ids"]) for row in rows}) > 3
    assert sum(batch_length(batch) for batch in stacks) == 40
    for batch in stacks:
        assert batch["attention_mask"].all()
        assert batch["labels"].shape == (batch_length(batch),)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": torch.zeros(1, 2)}, {"x": torch.zeros(1, 3)}),
        ({"x": torch.zeros(1, 2)}, {"x": torch.zeros(1, 2).long()}),
        ({"x": torch.zeros(1, 2)}, {"x": torch.zeros(1, 2), "y": torch.zeros(1)}),
        ({"x": torch.zeros(1, 2), "task": "a"}, {"x": torch.zeros(1, 2), "task": "b"}),
        ({"x": torch.zeros(1, 2), "scale": torch.tensor(1.0)}, {"x": torch.zeros(1, 2), "scale": torch.tensor(2.0)}),
        ({"x": torch.zeros(1, 2), "flag": 1}, {"x": torch.zeros(1, 2), "flag": True}),
        ({"x": torch.zeros(1, 2), "y": [1]}, {"x": torch.zeros(1, 2), "y": torch.zeros(1)}),
    ],
)
def test_rows_that_differ_in_anything_shared_are_kept_apart(one: Any, other: Any) -> None:
    batches = RowCollator(lambda rows: rows[0])([one, other, one])
    assert sorted(batch_length(batch) for batch in batches) == [1, 2]


@settings(deadline=None)
@given(n=st.integers(1, 50), largest=st.integers(1, 12))
def test_pieces_hold_everything_once_and_in_order(n: int, largest: int) -> None:
    batch = {"x": torch.arange(n), "y": torch.arange(2 * n).view(n, 2), "names": [str(i) for i in range(n)], "flag": 1}
    pieces = stack([batch], largest)
    assert [int(x) for piece in pieces for x in piece["x"]] == list(range(n))
    assert [name for piece in pieces for name in piece["names"]] == batch["names"]
    for piece in pieces:
        assert 0 < len(piece["x"]) == len(piece["y"]) == batch_length(piece) <= largest
        assert torch.equal(piece["y"][:, 0], 2 * piece["x"])
        assert piece["flag"] == 1
    sizes = [len(piece["x"]) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1
    # Joined again they are what they were, and so is each row.
    (joined,) = stack(pieces)
    assert same(joined, batch)
    assert same(stack([take_row(batch, k) for k in range(n)])[0], batch)


def test_no_rows_make_no_stacks() -> None:
    assert RowCollator(default_collate)([]) == stack([]) == stack([], 3) == []
    assert batch_length({}) == batch_length({"flag": 1}) == 0


# --- rounded lengths -------------------------------------------------------------------------------------------------


def padding_collator(pad_token_id: int | None = 0, multiple: int | None = None) -> Any:
    return SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=pad_token_id), pad_to_multiple_of=multiple)


def test_collators_that_pad_round_lengths_up_and_stay_as_they_were() -> None:
    collate = padding_collator()
    assert with_rounded_lengths(collate).pad_to_multiple_of == LENGTH_MULTIPLE
    assert collate.pad_to_multiple_of is None


@pytest.mark.parametrize(("longest", "multiple"), [(512, 8), (514, 2), (12, 4), (511, 1)])
def test_no_row_is_padded_beyond_what_the_model_takes(longest: int, multiple: int) -> None:
    assert with_rounded_lengths(padding_collator(), longest).pad_to_multiple_of == multiple
    assert all(-(-length // multiple) * multiple <= longest for length in range(1, longest + 1))


@pytest.mark.parametrize("collate", [padding_collator(None), padding_collator(multiple=64), default_collate])
def test_other_collators_are_left_alone(collate: Any) -> None:
    assert with_rounded_lengths(collate) is collate
