"""What single kernels cost: norms and sums of one layer in both forms, and noise for many parameters."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timing import now
from torch import Tensor

from hf_dcsgd.ghost import norms
from hf_dcsgd.ghost.contributions import ClipFactors, Contribution, Dense, LastResult, Outer
from hf_dcsgd.privacy.noise import NoiseSource, SensitiveSum

TOKENS = 2048  # of a micro-batch
SHAPES = [
    *((positions, width, width) for width in (288, 384, 768) for positions in (64, 128, 256, 512, 1024)),
    *((positions, 4 * 384, 384) for positions in (64, 128, 256, 512, 1024)),
    *((positions, 32_000, 384) for positions in (64, 128, 256, 512, 1024)),
]
PARAMETERS = 100_000_000


def fastest(action: Callable[[], Any], repeats: int) -> float:
    """Return the least seconds of a few calls, after one that is not timed."""
    action()
    taken = []
    for _ in range(repeats):
        start = now()
        action()
        taken.append(now() - start)
    return min(taken)


def by_gram(left: Tensor, right: Tensor) -> None:
    norms._gram([Outer(left, right)], LastResult())
    add_sum(Outer(left, right), left, right)


def by_writing(left: Tensor, right: Tensor) -> None:
    value: Contribution = Dense(left.mT @ right)
    norms.take_norms({"": [value]}, {"": torch.Size([left.shape[2], right.shape[2]])})
    add_sum(value, left, right)


def add_sum(part: Contribution, left: Tensor, right: Tensor) -> None:
    part.add_weighted_sum(ClipFactors(torch.ones(len(left))), torch.zeros(left.shape[2], right.shape[2]))


def run_forms(row: dict[str, Any]) -> dict[str, Any]:
    """Time norm and clipped sum of one matrix by Gram products and by written gradients, and tell which is taken."""
    found = []
    for positions, p, d in SHAPES:
        n = max(1, TOKENS // positions // (8 if p > 10_000 else 1))
        generator = torch.Generator().manual_seed(0)
        left, right = (torch.randn(n, positions, size, generator=generator) for size in (p, d))
        chosen = norms.written(Outer(left, right))
        found.append(
            {
                "positions": positions,
                "p": p,
                "d": d,
                "examples": n,
                "gram": fastest(partial(by_gram, left, right), 3),
                "written": fastest(partial(by_writing, left, right), 3),
                "taken": "written" if isinstance(chosen, Dense) else "gram",
                "memory": p * d / (positions * (p + d)),
            }
        )
    return {"shapes": found}


def run_noise(row: dict[str, Any]) -> dict[str, Any]:
    """Time the noise of one release, wall clock, with one thread and with two."""
    value, seconds = torch.zeros(PARAMETERS), {}
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        start = time.perf_counter()
        NoiseSource().add_noise(SensitiveSum(value, 1.0, disposable=True), 1.0)
        seconds[str(count)] = time.perf_counter() - start
    torch.set_num_threads(threads)
    return {"parameters": PARAMETERS, "threads": seconds}
