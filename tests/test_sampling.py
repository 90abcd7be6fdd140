"""Poisson sampling: what the accountant assumes about the batches, checked on the batches."""

import pickle
import random
import tracemalloc
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from hf_dcsgd.privacy.sampling import PoissonBatchSampler, bernoulli_positions, map_style_length

# A correct sampler fails one of the statistical tests below about once in a million runs.
ALPHA = 1e-7


def logical_batches(sampler):
    micro_batches = list(sampler)
    size = sampler.gradient_accumulation_steps
    return [micro_batches[start : start + size] for start in range(0, len(micro_batches), size)]


def inclusion_matrix(sampler):
    """(steps, N) of 0/1: which record was in which logical batch."""
    matrix = np.zeros((sampler.steps, sampler.dataset_size))
    for step, batch in enumerate(logical_batches(sampler)):
        for micro_batch in batch:
            matrix[step, micro_batch] += 1
    return matrix


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (1, 4), (3, 2)])
def test_every_record_is_drawn_at_rate_q(world_size, accumulation):
    size, expected, steps = 301, 30, 4000
    matrix = sum(
        inclusion_matrix(
            PoissonBatchSampler(
                size,
                expected,
                steps=steps,
                gradient_accumulation_steps=accumulation,
                rank=rank,
                world_size=world_size,
            )
        )
        for rank in range(world_size)
    )
    assert matrix.max() == 1
    drawn = matrix.sum(axis=0)
    low, high = stats.binom.interval(1 - ALPHA / size, steps, expected / size)
    assert low <= drawn.min(), "a record is drawn too rarely"
    assert drawn.max() <= high, "a record is drawn too often"
    assert stats.binomtest(int(drawn.sum()), steps * size, expected / size).pvalue > ALPHA


def test_the_number_drawn_is_binomial():
    sampler = PoissonBatchSampler(200, 20, steps=20_000)
    sizes = np.array([len(batch) for batch in sampler])
    # Cells in which at least a few are expected; the tails together are one more.
    values = np.arange(10, 33)
    probabilities = stats.binom.pmf(values, 200, 0.1)
    observed = [np.sum(sizes == value) for value in values]
    assert (
        stats.chisquare(
            [*observed, len(sizes) - sum(observed)],
            len(sizes) * np.append(probabilities, 1 - probabilities.sum()),
        ).pvalue
        > ALPHA
    )


def test_records_and_steps_are_independent():
    matrix = inclusion_matrix(PoissonBatchSampler(40, 12, steps=20_000))
    rate, count = 12 / 40, len(matrix)
    low, high = stats.binom.interval(1 - ALPHA / 1600, count, rate**2)
    together = matrix.T @ matrix
    pairs = together[~np.eye(40, dtype=bool)]
    assert low <= pairs.min()
    assert pairs.max() <= high
    again = matrix[1:].T @ matrix[:-1]
    assert low <= again.min()
    assert again.max() <= high


def test_ranks_draw_independently_from_disjoint_shards():
    samplers = [PoissonBatchSampler(101, 30, steps=5000, rank=rank, world_size=4) for rank in range(4)]
    matrices = [inclusion_matrix(sampler) for sampler in samplers]
    seen = [set(np.flatnonzero(matrix.sum(axis=0))) for matrix in matrices]
    assert seen == [set(range(rank, 101, 4)) for rank in range(4)]
    sizes = np.stack([matrix.sum(axis=1) for matrix in matrices])
    for first in range(4):
        for second in range(first):
            assert stats.pearsonr(sizes[first], sizes[second]).pvalue > ALPHA
    # The same position in two shards must not be drawn together more often than chance.
    low, high = stats.binom.interval(1 - ALPHA / 100, 5000, (30 / 101) ** 2)
    for position in range(25):
        both = np.sum(matrices[0][:, 4 * position] * matrices[1][:, 4 * position + 1])
        assert low <= both <= high


@given(
    size=st.integers(1, 60),
    fraction=st.floats(0.01, 1),
    steps=st.integers(0, 6),
    accumulation=st.integers(1, 5),
    world_size=st.integers(1, 4),
)
@settings(deadline=None)
def test_shape_of_what_is_yielded(size, fraction, steps, accumulation, world_size):
    expected = max(1, int(size * fraction))
    for rank in range(world_size):
        sampler = PoissonBatchSampler(
            size,
            expected,
            steps=steps,
            gradient_accumulation_steps=accumulation,
            rank=rank,
            world_size=world_size,
        )
        micro_batches = list(sampler)
        assert len(micro_batches) == len(sampler) == steps * accumulation
        for batch in logical_batches(sampler):
            together = list(chain.from_iterable(batch))
            assert len(together) == len(set(together)), "a record twice in one logical batch"
            assert set(together) <= set(range(rank, size, world_size))
            assert all(type(index) is int for index in together)
            sizes = [len(micro_batch) for micro_batch in batch]
            assert max(sizes) - min(sizes) <= 1


def test_empty_draws_are_yielded():
    batches = logical_batches(PoissonBatchSampler(100, 1, steps=400, gradient_accumulation_steps=3))
    empty = [batch for batch in batches if not any(batch)]
    # (1 - 1/100)^100 = 36.6% of the draws
    low, high = stats.binom.interval(1 - ALPHA, 400, 0.99**100)
    assert low <= len(empty) <= high
    assert all(batch == [[], [], []] for batch in empty)


def test_full_batch_takes_everything():
    assert list(PoissonBatchSampler(7, 7, steps=2)) == [list(range(7))] * 2


# --- skipping from success to success --------------------------------------------------------------------------------

RATES = [0.003, 0.0999, 0.1, 0.5, 0.97, 0.9999]
MORE_RATES = [1e-3, 0.02, 0.1001]


@pytest.mark.parametrize("rate", [*RATES, *(pytest.param(rate, marks=pytest.mark.slow) for rate in MORE_RATES)])
def test_gaps_between_successes_are_geometric(rate):
    """Gaps, the first one included, have the law of those in a direct draw: (1 - q)^k · q."""
    trials = int(30_000 / rate)
    positions = bernoulli_positions(np.random.default_rng(), trials, rate)
    gaps = np.diff(positions, prepend=-1)
    assert gaps.min() >= 1
    assert positions[-1] < trials
    assert stats.binomtest(len(positions), trials, rate).pvalue > ALPHA
    # Cells of about equal probability; the long gaps together are one more.
    edges = np.unique(stats.geom.ppf(np.linspace(0.05, 0.95, 19), rate))
    observed = np.bincount(np.searchsorted(edges, gaps), minlength=len(edges) + 1)
    cells = np.diff(stats.geom.cdf(edges, rate), prepend=0.0, append=1.0)
    if len(cells) == 2:  # of which one may expect too few for a square of them
        assert stats.binomtest(int(observed[1]), len(gaps), cells[1]).pvalue > ALPHA
    else:
        assert stats.chisquare(observed, cells * len(gaps)).pvalue > ALPHA
    direct = np.diff(np.flatnonzero(np.random.default_rng().random(trials) < rate), prepend=-1)
    assert stats.ks_2samp(gaps, direct).pvalue > ALPHA
    # One gap tells nothing of the next. Most are 1 at high rates, which is far from normal.
    assert stats.pearsonr(gaps[1:], gaps[:-1]).pvalue > ALPHA / 100 or rate > 0.99


@pytest.mark.parametrize("rate", [0.004, pytest.param(0.05, marks=pytest.mark.slow), 0.1])
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 7, 120])
def test_every_position_succeeds_at_its_rate_by_skipping(rate, size):
    """Also the first and the last one, where the runs begin and end."""
    generator, rounds = np.random.default_rng(), 10_000
    successes = np.zeros(size)
    for _ in range(rounds):
        successes[bernoulli_positions(generator, size, rate)] += 1
    low, high = stats.binom.interval(1 - ALPHA / size, rounds, rate)
    assert low <= successes.min()
    assert successes.max() <= high


@pytest.mark.parametrize("rate", [1e-12, 0.1, 1.0])
def test_positions_at_the_borders(rate):
    generator = np.random.default_rng()
    assert bernoulli_positions(generator, 0, rate).tolist() == []
    for size in (1, 10):
        positions = bernoulli_positions(generator, size, rate)
        assert positions.dtype == np.int64
        assert positions.tolist() == sorted(set(positions.tolist()) & set(range(size)))
        assert rate < 1 or len(positions) == size


def test_a_draw_from_ten_million_records_takes_memory_for_the_drawn_ones_alone():
    sampler = PoissonBatchSampler(10_000_000, 20_000, steps=1)
    sampler.draw()  # numpy's own modules are loaded
    tracemalloc.start()
    drawn = [index for part in sampler for index in part]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * 20_000 < 10_000_000
    low, high = stats.binom.interval(1 - ALPHA, 10_000_000, 0.002)
    assert low <= len(drawn) <= high


def test_each_iteration_draws_afresh_whatever_the_global_seeds():
    def seeded():
        torch.manual_seed(42)
        np.random.seed(42)
        random.seed(42)

    drawn = []
    sampler = PoissonBatchSampler(200, 100, steps=1)
    for _ in range(3):
        seeded()
        drawn += [tuple(next(iter(sampler))), tuple(next(iter(PoissonBatchSampler(200, 100, steps=1))))]
    assert len(set(drawn)) == len(drawn)

    seeded()
    expected = torch.rand(1), np.random.rand(), random.random()
    seeded()
    list(PoissonBatchSampler(200, 100, steps=3))
    assert (torch.rand(1), np.random.rand(), random.random()) == expected, "a global generator was moved"


def test_a_pickled_copy_does_not_foretell_the_draws():
    sampler = PoissonBatchSampler(200, 100, steps=1)
    sampler.draw()
    copy = pickle.loads(pickle.dumps(sampler))
    assert copy.draw().tolist() != sampler.draw().tolist()
    assert b"PCG64" not in pickle.dumps(sampler)


def test_unsafe_seed_repeats_and_differs_between_ranks():
    def draws(rank, seed=7):
        sampler = PoissonBatchSampler(400, 200, steps=5, rank=rank, world_size=2, unsafe_seed=seed)
        return [[index // 2 for index in batch] for batch in sampler]

    assert draws(0) == draws(0)
    assert draws(0) != draws(1)
    assert draws(0) != draws(0, seed=8)
    assert draws(0)[0] != draws(0)[1]


class Numbers(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_works_under_a_data_loader(workers):
    sampler = PoissonBatchSampler(50, 2, steps=30, gradient_accumulation_steps=2)
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers, collate_fn=list)
    batches = list(loader)
    assert len(batches) == len(loader) == 60
    assert [] in batches
    assert all(0 <= index < 50 for batch in batches for index in batch)


def test_only_map_style_datasets_have_a_length():
    class Stream(IterableDataset):
        def __iter__(self):
            yield 1

    class SizedStream(Stream):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            return index

    assert map_style_length(TensorDataset(torch.zeros(5))) == 5
    assert map_style_length([1, 2, 3]) == 3
    for dataset in (Stream(), SizedStream(), iter([1, 2]), {1, 2}):
        with pytest.raises(TypeError, match=f"map-style.*{type(dataset).__name__}"):
            map_style_length(dataset)
    with pytest.raises(ValueError, match="dataset size"):
        map_style_length([])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset_size": 0}, "dataset_size"),
        ({"expected_batch_size": 11}, "expected_batch_size <= dataset_size, got 11 and 10"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"rank": 1}, "rank < world_size, got 1 and 1"),
        ({"steps": -1}, "steps"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        PoissonBatchSampler(**({"dataset_size": 10, "expected_batch_size": 2, "steps": 1} | arguments))
