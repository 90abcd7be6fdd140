"""Global random states that tell nothing about the private batches.

Dropout, collators that mask tokens and augmentations draw as many random numbers as the batch is large, and
transformers writes the global states into every checkpoint: how far they have moved would give away the sizes of the
private draws. `public_randomness` cuts that tie.

Guarantee. The global states of `random`, `numpy` and `torch` after a block are a function of those before it, whatever
was drawn inside. Noise and sampling have generators of their own and are not touched.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def public_randomness(device: torch.device) -> Iterator[None]:
    """Inside, random numbers follow from one number drawn from torch's global state; outside, only that draw shows."""
    seed = int(torch.randint(2**62, ()))
    python_state, numpy_state = random.getstate(), np.random.get_state()
    accelerators = [] if device.type in ("cpu", "mps") else [device.index or 0]
    with torch.random.fork_rng(accelerators, device_type=device.type if accelerators else "cuda"):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # Not torch.manual_seed: it looks for every kind of accelerator each time, which outlasts a small step.
        torch.default_generator.manual_seed(seed)
        if accelerators:
            getattr(torch, device.type).manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
