"""Randomness that is neither noise nor sampling: dropout, collators that mask tokens, augmentations.

Two ties to the private batches must be cut.

*What is drawn.* A mask belongs to a place in the batch. Under a seed that is public, one record more or less hands
every later record another mask, known to all, and changes many gradients. Masks from fresh secret randomness are
independent of one another, so the other records keep theirs in distribution: with or without the record, the sum
differs by that record's own part.

*How much is drawn.* Transformers writes the global states into every checkpoint: how far they have moved would give
away the sizes of the private draws.

**Guarantee.** Inside a `private_randomness` block, the global states of `random`, `numpy` and `torch` are seeded by
the operating system. After it they are what they were before it, whatever was drawn inside. Noise and sampling have
generators of their own and are not touched.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def private_randomness(device: torch.device, unsafe_seed: int | None = None) -> Iterator[None]:
    """Give the block fresh global random states, and put the old ones back after it.

    Args:
        device: The accelerator whose state is taken care of too.
        unsafe_seed: Makes the block repeatable, for runs whose noise has a fixed seed and which have no guarantee.
    """
    seed = secret_seed() if unsafe_seed is None else unsafe_seed % 2**62
    python_state, numpy_state = random.getstate(), np.random.get_state()
    accelerators = [] if device.type in ("cpu", "mps") else [device.index or 0]
    mps_state = torch.mps.get_rng_state() if device.type == "mps" else None
    with torch.random.fork_rng(accelerators, device_type=device.type if accelerators else "cuda"):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # Not torch.manual_seed: it looks for every kind of accelerator each time, which outlasts a small step.
        torch.default_generator.manual_seed(seed)
        if device.type != "cpu":
            getattr(torch, device.type).manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            if mps_state is not None:
                torch.mps.set_rng_state(mps_state)


def secret_seed() -> int:
    """Draw 62 bits from the operating system."""
    return int.from_bytes(os.urandom(8), "little") >> 2


def secret_entropy(unsafe_seed: int | None, number: int) -> np.random.SeedSequence:
    """Draw 256 bits from the operating system; with `unsafe_seed`, for debugging, they follow from it and a number."""
    if unsafe_seed is not None:
        return np.random.SeedSequence(unsafe_seed, spawn_key=(number,))
    return np.random.SeedSequence(int.from_bytes(os.urandom(32), "big"), pool_size=8)
