"""Per-example gradient norms → counts → noisy histogram (Algorithm 2 of the paper).

Guarantee. One example adds exactly 1 to exactly one bin, whatever its norm is (NaN and infinite norms included), so
the counts have L2 sensitivity 1 under adding or removing one example. Everything that `NoisyHistogram` computes
is post-processing of the released noisy counts and costs no privacy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hf_dcsgd.validation import require, require_positive

if TYPE_CHECKING:
    import torch


def norm_histogram(per_example_norms: torch.Tensor, histogram_range: float, bins: int) -> torch.Tensor:
    """Private fp32 counts of shape `(bins,)`; bin `min(bins - 1, floor(bins × norm / range))`.

    The last bin takes everything beyond the range, and every norm that is not finite. No example: all zeros.
    """
    import torch  # here, as strategies are declared where torch is not loaded

    norms = per_example_norms.detach().reshape(-1).float()
    position = torch.nan_to_num(norms * (bins / histogram_range), nan=torch.inf).clamp(0, bins - 1)
    index = position.floor().long()
    # A comparison instead of bincount: deterministic on every device, and no wait for the device.
    return (index[:, None] == torch.arange(bins, device=norms.device)).sum(dim=0, dtype=torch.float32)


@dataclass(frozen=True)
class NoisyHistogram:
    """Released counts (noisy, possibly negative) over `bins` equal bins of `[0, histogram_range]`."""

    noisy_counts: np.ndarray
    histogram_range: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "noisy_counts", np.asarray(self.noisy_counts, dtype=np.float64))
        require(self.noisy_counts.ndim == 1, f"expected one-dimensional counts, got shape {self.noisy_counts.shape}")
        require(self.bins >= 2, f"expected at least 2 bins, got {self.bins}")
        require_positive("histogram_range", self.histogram_range)

    @property
    def bins(self) -> int:
        return len(self.noisy_counts)

    @property
    def edges(self) -> np.ndarray:
        """The `bins + 1` edges, from 0 to the range."""
        return np.arange(self.bins + 1) * (self.histogram_range / self.bins)

    @property
    def bin_centers(self) -> np.ndarray:
        """The center of each bin: the norm that its members are taken to have."""
        return (np.arange(self.bins) + 0.5) * (self.histogram_range / self.bins)

    @cached_property
    def total(self) -> float:
        """S′, the noisy number of examples: it stands in for the realized batch size, which is private."""
        with np.errstate(over="ignore", invalid="ignore"):
            return float(self.noisy_counts.sum())

    @cached_property
    def usable(self) -> bool:
        """Whether the counts are finite and their total is positive; else no threshold can be read off them."""
        return bool(np.isfinite(self.noisy_counts).all()) and 0 < self.total < np.inf

    @cached_property
    def _projected(self) -> np.ndarray:
        scale = float(np.abs(self.noisy_counts).max())
        counts, total = self.noisy_counts / scale, self.total / scale
        descending = np.sort(counts)[::-1]
        excess = (np.cumsum(descending) - total) / np.arange(1, self.bins + 1)
        # The largest count is always kept, so the index is never below zero, also when rounding eats the total.
        kept = max(int(np.count_nonzero(descending > excess)), 1)
        return np.maximum(counts - excess[kept - 1], 0.0) * scale

    def projected(self) -> np.ndarray:
        """The nearest point to the noisy counts on the simplex {x ≥ 0, Σx = S′}; needs `usable` counts."""
        require(self.usable, f"expected finite counts with a positive total, got a total of {self.total}")
        return self._projected

    def fraction_above(self, threshold: float) -> float:
        """Estimated fraction of norms above `threshold`, spreading each projected count evenly over its bin.

        Beyond the range nothing is known, so a threshold at or above it gives 0.
        """
        share = np.clip((self.edges[1:] - threshold) / (self.histogram_range / self.bins), 0.0, 1.0)
        return float(np.clip(np.dot(self.projected(), share) / self.total, 0.0, 1.0))
