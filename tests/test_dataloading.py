"""Micro-batches, empty ones too, from any map-style dataset; and the cut of those that came out too large."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tasks import private_args, text_rows
from torch.utils.data import Dataset, default_collate
from transformers import BatchEncoding

from hf_dcsgd.data.loading import batch_length, cut, poisson_dataloader, row_lengths
from hf_dcsgd.privacy.sampling import PoissonBatchSampler


class Squares(Dataset):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"x": index * index}


class ByLists(Squares):
    """As `datasets.Dataset` does it: many rows at once, and no lists without rows."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, int]]:
        assert indices
        return [self[index] for index in indices]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("rows", [Squares(), ByLists(), [{"x": i * i} for i in range(30)]])
def test_one_item_per_micro_batch_and_nothing_for_nobody(tmp_path, rows, workers: int) -> None:  # type: ignore[no-untyped-def]
    sampler = PoissonBatchSampler(30, 3, steps=4, gradient_accumulation_steps=3)
    draws = iter([[1, 4, 5, 9], [], [7], [0, 29]])
    sampler.draw = lambda: next(draws)  # type: ignore[method-assign]
    loader = poisson_dataloader(rows, sampler, default_collate, private_args(tmp_path, dataloader_num_workers=workers))
    assert len(loader) == 12
    found = [batch["x"].tolist() if batch else [] for batch in loader]
    assert found == [[1, 16], [25], [81], [], [], [], [49], [], [], [0], [841], []]
    assert len(loader.dataset) == 30


@settings(deadline=None)
@given(n=st.integers(0, 50), largest=st.integers(1, 12))
def test_pieces_hold_everything_once_and_in_order(n: int, largest: int) -> None:
    batch = {"x": torch.arange(n), "y": torch.arange(2 * n).view(n, 2), "names": [str(i) for i in range(n)], "flag": 1}
    pieces = cut(batch, largest)
    assert [int(x) for piece in pieces for x in piece["x"]] == list(range(n))
    assert [name for piece in pieces for name in piece["names"]] == batch["names"]
    for piece in pieces:
        assert 0 < len(piece["x"]) == len(piece["y"]) == batch_length(piece) <= max(1.5 * largest, 1)
        assert torch.equal(piece["y"][:, 0], 2 * piece["x"])
        assert piece["flag"] == 1
    sizes = [len(piece["x"]) for piece in pieces]
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_a_batch_near_the_expected_size_is_left_whole() -> None:
    batch = {"x": torch.arange(12)}
    assert cut(batch, 8)[0] is batch
    assert len(cut(batch, 7)) == 2


def test_encodings_of_tokenizers_are_cut_as_well() -> None:
    pieces = cut(BatchEncoding({"input_ids": torch.arange(20).view(10, 2)}), 3)
    assert [len(piece["input_ids"]) for piece in pieces] == [2, 3, 2, 3]


def test_lengths_come_from_the_column_or_are_counted() -> None:
    rows = text_rows(5)
    assert row_lengths(rows, "length", "input_ids") == [len(row["input_ids"]) for row in rows]
