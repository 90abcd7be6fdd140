"""Micro-batches of a Poisson draw as stacks, from any map-style dataset, with and without workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, default_collate

from hf_dcsgd.data.loading import poisson_dataloader, restack
from hf_dcsgd.data.rows import RowCollator, batch_length
from hf_dcsgd.privacy.sampling import PoissonBatchSampler


class Squares(Dataset):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"x": index * index}


class ByLists(Squares):
    """As `datasets.Dataset` does it: rows by lists of indices. Given two, it would mix them."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, int]]:
        assert len(indices) == 1
        return [self[index] for index in indices]


def forced_sampler(draws: list[list[int]], accumulation: int, unsafe_seed: int | None = None) -> PoissonBatchSampler:
    sampler = PoissonBatchSampler(
        30, 3, steps=len(draws), gradient_accumulation_steps=accumulation, unsafe_seed=unsafe_seed
    )
    left = iter(draws)
    sampler.draw = lambda: next(left)  # type: ignore[method-assign,assignment,return-value]
    return sampler


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("rows", [Squares(), ByLists(), [{"x": i * i} for i in range(30)]])
def test_one_item_per_micro_batch_and_nothing_for_nobody(rows: Any, workers: int) -> None:
    sampler = forced_sampler([[1, 4, 5, 9], [], [7], [0, 29]], accumulation=3)
    loader = poisson_dataloader(rows, sampler, default_collate, num_workers=workers)
    assert len(loader) == 12
    found = [[stack["x"].tolist() for stack in stacks] for stacks in loader]
    assert found == [[[1, 16]], [[25]], [[81]], [], [], [], [[49]], [], [], [[0]], [[841]], []]
    assert len(loader.dataset) == 30  # type: ignore[arg-type]


def noisy(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {"x": torch.rand(len(rows))}


@pytest.mark.parametrize("unsafe_seed", [None, 3])
def test_workers_have_secret_seeds_unless_the_run_is_reproducible(unsafe_seed: int | None) -> None:
    seen = []
    for _ in range(2):
        torch.manual_seed(1)
        loader = poisson_dataloader(Squares(), forced_sampler([[1, 2]], 1, unsafe_seed), noisy, num_workers=1, rank=0)
        ((stack,),) = list(loader)
        seen.append(stack["x"])
    assert torch.equal(*seen) is (unsafe_seed is not None)


@settings(deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 3), max_size=8), min_size=1, max_size=4),
    largest=st.integers(1, 5),
)
def test_restacking_keeps_every_row_once_and_stacks_within_the_limit(lengths: list[list[int]], largest: int) -> None:
    """Rows of up to three lengths in up to four micro-batches; each row carries its number in all its places."""
    number = iter(range(100))
    collate = RowCollator(lambda rows: {"x": torch.full((1, rows[0]), next(number))})
    micro_batches = [collate(rows) for rows in lengths]
    restacked = restack(micro_batches, largest)
    assert len(restacked) == len(micro_batches)
    stacks = [stack for stacks in restacked for stack in stacks]
    assert all(0 < batch_length(stack) <= largest for stack in stacks)
    count = sum(len(rows) for rows in lengths)
    assert sorted(number for stack in stacks for number in stack["x"][:, 0].tolist()) == list(range(count))
    # As few stacks as the limit allows, and evenly spread.
    for length in (1, 2, 3):
        sizes = [batch_length(stack) for stack in stacks if stack["x"].shape[1] == length]
        assert len(sizes) == -(-sum(rows.count(length) for rows in lengths) // largest)
        assert not sizes or max(sizes) - min(sizes) <= 1
    sizes = [len(stacks) for stacks in restacked]
    assert max(sizes) - min(sizes) <= 1
