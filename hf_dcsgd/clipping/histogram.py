"""Per-example gradient norms → counts → noisy histogram (Algorithm 2 of the paper).

Guarantee. One example adds exactly 1 to exactly one bin, whatever its norm is (NaN and infinite norms included), so
the counts have L2 sensitivity 1 under adding or removing one example. Everything that `NoisyHistogram` computes
is post-processing of the released noisy counts and costs no privacy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hf_dcsgd.validation import require, require_positive

if TYPE_CHECKING:
    import torch


def bin_edges(histogram_range: float, bins: int, growth: float = 1.0) -> np.ndarray:
    """Return `bins + 1` edges from 0 to the range: evenly spaced, or each `growth` times the one below it."""
    if growth == 1:
        return np.arange(bins + 1) * (histogram_range / bins)
    edges = histogram_range * growth ** np.arange(-bins, 1, dtype=np.float64)
    edges[0] = 0.0
    return edges


def norm_histogram(
    per_example_norms: torch.Tensor, histogram_range: float, bins: int, growth: float = 1.0
) -> torch.Tensor:
    """Return private fp32 counts of shape `(bins,)` between the edges of `bin_edges`.

    The last bin takes everything beyond the range, and every norm that is not finite. No example: all zeros.
    """
    import torch  # here, as strategies are declared where torch is not loaded

    norms = torch.nan_to_num(per_example_norms.detach().reshape(-1).float(), nan=torch.inf)
    if growth == 1:
        position = norms * (bins / histogram_range)
    else:
        position = (norms / histogram_range).log() / math.log(growth) + bins
    index = position.clamp(0, bins - 1).floor().long()
    # A comparison instead of bincount: deterministic on every device, and no wait for the device.
    return (index[:, None] == torch.arange(bins, device=norms.device)).sum(dim=0, dtype=torch.float32)


def onto_simplex(counts: np.ndarray, total: float) -> np.ndarray:
    """Return the nearest point to finite counts on the simplex {x ≥ 0, Σx = total > 0}."""
    scale = max(float(np.abs(counts).max()), total)
    counts, total = counts / scale, total / scale
    descending = np.sort(counts)[::-1]
    excess = (np.cumsum(descending) - total) / np.arange(1, len(counts) + 1)
    # The largest count is always kept, so the index is never below zero, also when rounding eats the total.
    kept = max(int(np.count_nonzero(descending > excess)), 1)
    return np.maximum(counts - excess[kept - 1], 0.0) * scale


@dataclass(frozen=True)
class NoisyHistogram:
    """Released counts (noisy, possibly negative) over bins of `[0, histogram_range]`, equal or growing ones."""

    noisy_counts: np.ndarray
    histogram_range: float
    growth: float = 1.0

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
        return bin_edges(self.histogram_range, self.bins, self.growth)

    @property
    def bin_centers(self) -> np.ndarray:
        """The center of each bin: the norm that its members are taken to have."""
        return (self.edges[1:] + self.edges[:-1]) / 2

    @cached_property
    def total(self) -> float:
        """S′, the noisy number of examples: it stands in for the realized batch size, which is private."""
        with np.errstate(over="ignore", invalid="ignore"):
            return float(self.noisy_counts.sum())

    @cached_property
    def usable(self) -> bool:
        """Whether the counts are finite and their total is positive; else no threshold can be read off them."""
        return bool(np.isfinite(self.noisy_counts).all()) and 0 < self.total < np.inf

    def projected(self) -> np.ndarray:
        """Return the nearest point to the noisy counts on the simplex {x ≥ 0, Σx = S′}; needs `usable` counts."""
        require(self.usable, f"expected finite counts with a positive total, got a total of {self.total}")
        return onto_simplex(self.noisy_counts, self.total)

    def fraction_above(self, threshold: float) -> float:
        """Estimate the fraction of norms above `threshold`, spreading each projected count evenly over its bin.

        Beyond the range nothing is known, so a threshold at or above it gives 0.
        """
        share = np.clip((self.edges[1:] - threshold) / np.diff(self.edges), 0.0, 1.0)
        return float(np.clip(np.dot(self.projected(), share) / self.total, 0.0, 1.0))
