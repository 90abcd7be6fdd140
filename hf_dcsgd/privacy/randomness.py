"""Randomness that is neither noise nor sampling: dropout, collators that mask tokens, augmentations.

Two ties to the private batches must be cut.

*What is drawn.* A mask belongs to a place in the batch. Under a seed that is public, one record more or less hands
every later record another mask, known to all, and changes many gradients. Masks from fresh secret randomness are
independent of one another, so the other records keep theirs in distribution: with or without the record, the sum
differs by that record's own part.

*How much is drawn.* Transformers writes the global states into every checkpoint: how far they have moved would give
away the sizes of the private draws.

Guarantee. Inside a `private_randomness` block, the global states of `random`, `numpy` and `torch` are seeded by the
operating system. After it they are a function of those before it, whatever was drawn inside. Noise and sampling have
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
def private_randomness(device: torch.device, *, reproducible: bool = False) -> Iterator[None]:
    """Fresh global states inside, and the old ones after it, moved on by one draw.

    `reproducible` takes the fresh states from that draw, and so from the public seed: for runs whose noise has a fixed
    seed too, which have no guarantee.
    """
    drawn = int(torch.randint(2**62, ()))
    seed = drawn if reproducible else secret_seed()
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
    """62 bits from the operating system."""
    return int.from_bytes(os.urandom(8), "little") >> 2
