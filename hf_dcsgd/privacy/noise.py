"""The only place where Gaussian noise is drawn.

Guarantee. Let ``value`` be a sum over examples of which adding or removing one example moves the L2 norm by at most
``sensitivity``. Then :meth:`NoiseSource.add_noise` releases one Gaussian mechanism with the given noise multiplier,
and releases it once: no two calls share a random number, whatever the global seeds are.

Where the randomness comes from. Each call takes 256 fresh bits from the operating system, seeds a generator with them
and drops it after the draw. So there is no generator state that could be saved with a checkpoint, replayed after a
resume, copied to a forked worker, or set by ``torch.manual_seed``. On the CPU the generator is numpy's PCG64DXSM and
not torch's: the latter keeps only the low 32 bits of its seed, few enough to try them all. On other devices it is
torch's own, with a 64-bit seed. Neither is a cryptographic generator, and attacks on the floating-point representation
of Gaussian samples are out of scope.

| edge case | behavior |
|---|---|
| multiplier 0 | the exact value: no privacy; the plan refuses to be silent about it |
| ``unsafe_seed`` | the noise is a function of the seed and the number of draws so far: no privacy |
| empty batch | ``value`` is zero: the release is noise only |
| ``value`` not fp32 | ``TypeError``: sums and noise are fp32 |
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np
import torch

from hf_dcsgd.validation import require, require_non_negative

_ENTROPY_BYTES = 32


@dataclass(frozen=True)
class SensitiveSum:
    """A private sum over examples, with its L2 sensitivity under adding or removing one example."""

    value: torch.Tensor
    sensitivity: float

    def __post_init__(self) -> None:
        if self.value.dtype != torch.float32:
            raise TypeError(f"expected a float32 value, got {self.value.dtype}")
        require(
            math.isfinite(self.sensitivity) and self.sensitivity > 0,
            f"expected a finite sensitivity > 0, got {self.sensitivity}",
        )


class NoiseSource:
    """Draws Gaussian noise that never repeats (see the module's guarantee).

    ``unsafe_seed`` makes the noise reproducible and thereby voids privacy: it exists for debugging, and whoever passes
    it must say so in the report.
    """

    def __init__(self, *, unsafe_seed: int | None = None, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.unsafe_seed = unsafe_seed
        self._draws = 0

    def add_noise(self, total: SensitiveSum, noise_multiplier: float) -> torch.Tensor:
        """A noisy fp32 copy of ``total.value``; the noise has std ``noise_multiplier × total.sensitivity``."""
        require_non_negative("noise_multiplier", noise_multiplier)
        if noise_multiplier == 0:
            return total.value.clone()
        noise = self._standard_normal(total.value.shape).to(total.value.device)
        return noise.mul_(noise_multiplier * total.sensitivity).add_(total.value)

    def _standard_normal(self, shape: torch.Size) -> torch.Tensor:
        entropy = self._next_entropy()
        if self.device.type == "cpu":
            return _numpy_normal(shape, entropy)
        return _torch_normal(shape, entropy, self.device)

    def _next_entropy(self) -> np.random.SeedSequence:
        self._draws += 1
        if self.unsafe_seed is not None:
            return np.random.SeedSequence(self.unsafe_seed, spawn_key=(self._draws,))
        return np.random.SeedSequence(int.from_bytes(os.urandom(_ENTROPY_BYTES), "big"), pool_size=_ENTROPY_BYTES // 4)


def _numpy_normal(shape: torch.Size, entropy: np.random.SeedSequence) -> torch.Tensor:
    generator = np.random.Generator(np.random.PCG64DXSM(entropy))
    return torch.from_numpy(np.asarray(generator.standard_normal(tuple(shape), dtype=np.float32)))


def _torch_normal(shape: torch.Size, entropy: np.random.SeedSequence, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device=device)
    generator.manual_seed(int(entropy.generate_state(1, np.uint64)[0]))
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
