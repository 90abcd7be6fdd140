"""The only place where Gaussian noise is drawn.

Guarantee. Let `value` be a sum over examples of which adding or removing one example moves the L2 norm by at most
`sensitivity`. Then `NoiseSource.add_noise` releases one Gaussian mechanism with the given noise multiplier, and
releases it once: no two calls share a random number, whatever the global seeds are.

Where the randomness comes from. Each call takes 256 fresh bits from the operating system, seeds generators with them
and drops these after the draw. So there is no generator state that could be saved with a checkpoint, replayed after a
resume, copied to a forked worker, or set by `torch.manual_seed`. On the CPU the generators are numpy's PCG64DXSM, one
for every million numbers, each with a seed that `SeedSequence.spawn` derives from all 256 bits and the generator's
number; threads fill those millions side by side, and which thread fills which changes nothing. They are not torch's
generator, which keeps only the low 32 bits of its seed, few enough to try them all. On other devices it is torch's
own, with a 64-bit seed. Neither is a cryptographic generator, and attacks on the floating-point representation of
Gaussian samples are out of scope.

| edge case | behavior |
|---|---|
| multiplier 0 | the exact value: no privacy; the plan refuses to be silent about it |
| `unsafe_seed` | the noise is a function of the seed and the number of draws so far: no privacy |
| empty batch | `value` is zero: the release is noise only |
| `value` not fp32 | `TypeError`: sums and noise are fp32 |
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from hf_dcsgd.privacy.randomness import secret_entropy
from hf_dcsgd.validation import require_non_negative, require_positive

# Numbers per generator. Another size draws other noise from the same unsafe seed.
_STREAM_LENGTH = 1 << 20


@dataclass(frozen=True)
class SensitiveSum:
    """A private sum over examples, with its L2 sensitivity under adding or removing one example.

    Noise may be added in the memory of a `disposable` value, which saves a copy of its size.
    """

    value: torch.Tensor
    sensitivity: float
    disposable: bool = False

    def __post_init__(self) -> None:
        if self.value.dtype != torch.float32:
            raise TypeError(f"expected a float32 value, got {self.value.dtype}")
        require_positive("sensitivity", self.sensitivity)


class NoiseSource:
    """Draws Gaussian noise that never repeats (see the module's guarantee).

    `unsafe_seed` makes the noise reproducible and thereby voids privacy: it exists for debugging, and whoever passes
    it must say so in the report.
    """

    def __init__(self, *, unsafe_seed: int | None = None) -> None:
        self.unsafe_seed = unsafe_seed
        self._draws = 0

    def add_noise(self, total: SensitiveSum, noise_multiplier: float) -> torch.Tensor:
        """Return a noisy fp32 copy of `total.value`, or that itself if disposable.

        The noise has a standard deviation of `noise_multiplier × total.sensitivity`.
        """
        require_non_negative("noise_multiplier", noise_multiplier)
        in_place = total.disposable and total.value.is_contiguous()
        noisy = total.value if in_place else total.value.clone(memory_format=torch.contiguous_format)
        if noise_multiplier > 0:
            self._draws += 1
            std, entropy = noise_multiplier * total.sensitivity, secret_entropy(self.unsafe_seed, self._draws)
            if noisy.device.type == "cpu":
                _add_numpy_normal(noisy.view(-1).numpy(), std, entropy)
            else:
                _add_torch_normal(noisy, std, entropy)
        return noisy


def _add_numpy_normal(values: np.ndarray, std: float, entropy: np.random.SeedSequence) -> None:
    def fill(start: int, seed: np.random.SeedSequence) -> None:
        part = values[start : start + _STREAM_LENGTH]
        noise = np.random.Generator(np.random.PCG64DXSM(seed)).standard_normal(len(part), dtype=np.float32)
        noise *= np.float32(std)
        part += noise

    starts = range(0, len(values), _STREAM_LENGTH)
    seeds, workers = entropy.spawn(len(starts)), min(torch.get_num_threads(), len(starts))
    if workers < 2:  # to start a thread would take longer than to fill a few numbers
        list(map(fill, starts, seeds))
    else:
        with ThreadPoolExecutor(workers) as threads:
            list(threads.map(fill, starts, seeds))


def _add_torch_normal(values: torch.Tensor, std: float, entropy: np.random.SeedSequence) -> None:
    generator = torch.Generator(device=values.device)
    generator.manual_seed(int(entropy.generate_state(1, np.uint64)[0]))
    values.add_(torch.randn(values.shape, generator=generator, device=values.device, dtype=torch.float32), alpha=std)
