"""Poisson sampling of logical batches.

Guarantee. Every record enters every logical batch independently with probability q = B/N, where B (expected batch
size) and N (dataset size) are public; a record is at most once in a logical batch. Ranks draw from disjoint shards
with separate randomness, so the union over ranks is one Poisson draw from the whole dataset. The randomness comes from
the operating system: the global generators and their public seeds are neither read nor moved, and it is never saved.

A draw takes time and memory in proportion to the records drawn, qN, not to N. It is then cut into micro-batches; the
released sum does not depend on the cut.

| edge case | behavior |
|---|---|
| empty draw | `gradient_accumulation_steps` empty micro-batches: the step is noise only, never skipped |
| draw smaller than `gradient_accumulation_steps` | the last micro-batches are empty |
| B > N | `ValueError` |
| iterable dataset, or one without a length | `TypeError` from `map_style_length` |
| `unsafe_seed` | the draws are a function of the seed and the rank: amplification by sampling is void |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, Sampler

from hf_dcsgd.privacy.randomness import secret_entropy
from hf_dcsgd.validation import require, require_count

# Up to this rate, drawing the gaps between records is cheaper than one number for every record.
_LARGEST_SKIPPING_RATE = 0.1


def map_style_length(dataset: object) -> int:
    """Return the number of records of a map-style dataset; Poisson sampling is defined for nothing else."""
    if isinstance(dataset, Mapping):
        raise TypeError(
            f"expected one train_dataset, got a {type(dataset).__name__} with the keys "
            f"{', '.join(map(str, list(dataset)[:8]))}; pass one of its entries"
        )
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            "expected a map-style train_dataset with a length, because every record must be drawn independently with "
            f"probability expected_batch_size / dataset_size, got {type(dataset).__name__}"
        )
    return require_count("dataset size", len(dataset))


def bernoulli_positions(generator: np.random.Generator, size: int, rate: float) -> np.ndarray:
    """Return the ascending positions of the successes among `size` independent trials of probability `rate`.

    Below a rate of 0.1 in time and memory O(rate·size), by drawing the number of failures before each success:

    - Let E be exponential with mean 1 and λ = -log(1 - rate). Then P(⌊E/λ⌋ ≥ k) = P(E ≥ kλ) = (1 - rate)^k, the
      probability of k failures in a row: ⌊E/λ⌋ has the law of the failures before a success, also before the first.
    - Independent trials begin anew after each success, so the runs of failures between successes are independent. A
      sequence of trials is determined by its runs: trials made from independent runs of this law are Bernoulli trials.
    - When to stop is seen from the runs drawn so far, so that those drawn in vain change nothing.

    As in comparing one uniform number per trial with the rate, the only error is that of double precision.
    """
    if rate > _LARGEST_SKIPPING_RATE:
        return np.flatnonzero(generator.random(size) < rate)
    found, last = [], -1
    while last < size - 1:
        missing = rate * (size - 1 - last)
        failures = generator.standard_exponential(int(missing + 4 * np.sqrt(missing)) + 16) / -np.log1p(-rate)
        # A run longer than all trials is as good as one of that length, and cannot overflow.
        positions = last + np.cumsum(1 + np.minimum(failures, size).astype(np.int64))
        found.append(positions[: np.searchsorted(positions, size)])
        last = int(positions[-1])
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


class PoissonBatchSampler(Sampler[list[int]]):
    """Yields `steps` logical batches, each cut into `gradient_accumulation_steps` micro-batches.

    Rank r draws from the shard `r::world_size`. `expected_batch_size` is B over all ranks. Each `iter()` draws afresh.
    """

    def __init__(
        self,
        dataset_size: int,
        expected_batch_size: int,
        *,
        steps: int,
        gradient_accumulation_steps: int = 1,
        rank: int = 0,
        world_size: int = 1,
        unsafe_seed: int | None = None,
    ) -> None:
        self.dataset_size = require_count("dataset_size", dataset_size)
        self.expected_batch_size = require_count("expected_batch_size", expected_batch_size)
        require(
            expected_batch_size <= dataset_size,
            f"expected expected_batch_size <= dataset_size, got {expected_batch_size} and {dataset_size}",
        )
        self.steps = require_count("steps", steps, minimum=0)
        self.gradient_accumulation_steps = require_count("gradient_accumulation_steps", gradient_accumulation_steps)
        self.world_size = require_count("world_size", world_size)
        require(0 <= rank < world_size, f"expected 0 <= rank < world_size, got {rank} and {world_size}")
        self.rank = rank
        self.unsafe_seed = unsafe_seed
        self._generator: np.random.Generator | None = None

    @property
    def sampling_rate(self) -> float:
        """q = B/N."""
        return self.expected_batch_size / self.dataset_size

    def __len__(self) -> int:
        return self.steps * self.gradient_accumulation_steps

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            yield from self.split(self.draw())

    def draw(self) -> np.ndarray:
        """Make one Poisson draw from this rank's shard: ascending dataset indices, each at most once."""
        shard_size = len(range(self.rank, self.dataset_size, self.world_size))
        return self.rank + self.world_size * bernoulli_positions(self.generator(), shard_size, self.sampling_rate)

    def split(self, draw: Sequence[int] | np.ndarray) -> list[list[int]]:
        """Cut the draw into `gradient_accumulation_steps` lists whose sizes differ by at most one."""
        indices = np.asarray(draw, dtype=np.int64)
        return [part.tolist() for part in np.array_split(indices, self.gradient_accumulation_steps)]

    def generator(self) -> np.random.Generator:
        """Return this rank's secret generator, of this process alone."""
        if self._generator is None:
            self._generator = np.random.Generator(np.random.PCG64DXSM(secret_entropy(self.unsafe_seed, self.rank)))
        return self._generator

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process, or in a checkpoint, must never repeat or foretell our draws.
        return {**self.__dict__, "_generator": None}
