"""A histogram of norms that follows them: bins of growing width, averaged over steps, on a window that slides.

The paper's histogram has equal bins up to a range R that doubles when half of the norms lie beyond it. Norms of real
runs become bimodal: most examples are learned and have hardly any gradient, some have a hundred times the typical one.
Then half of them never lie beyond R, noise halves it, and the threshold sinks far below its optimum.

Here each bin is a constant factor wider than the one below it, 1.5 for twenty bins, so that the window spans three
decades however many there are. Released counts are averaged over steps, which costs nothing and takes noise away: over
the more steps, the fewer examples stand against the noise (`weight_of_the_newest`). The bins above the highest one
whose tail stands out of the noise are taken for empty: a single spurious count among large norms would outweigh all
others, and there are thousands of steps in which it might come up. The window then slides by whole bins, so that the
averages and their noise move with it: up as soon as its last bin is in use, down slowly, as a tail that is lost in the
noise for a few steps comes back. Norms of examples that are learned vanish, and a threshold must not vanish with them:
nothing follows them below three decades under the largest window that held norms.

Everything here is a function of released counts and public numbers. Whatever is released, the window moves by at most
half of its bins in a step, and shares are finite, non-negative and sum to 1.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_dcsgd.clipping.histogram import bin_edges, onto_simplex
from hf_dcsgd.clipping.options import MAX_THRESHOLD, MIN_THRESHOLD
from hf_dcsgd.validation import require, require_count, require_non_negative

_SPAN = 1.5**19  # of the window, from the upper end of its first bin to that of its last
_LEAST_NEW, _MOST_NEW = 0.05, 0.2  # weight of the newest counts in the average
_CLEAR = 200.0  # examples per standard deviation of noise from which on the newest counts have their full weight
_SIGNIFICANT = 4.0  # standard deviations of noise that a tail must stand out by
_HEADROOM = 0.1  # share of the bins that is kept empty above the highest one in use


def growth_for(bins: int) -> float:
    """Return the factor by which each bin is wider than the one below it."""
    return _SPAN ** (1 / (bins - 1))


def weight_of_the_newest(expected_batch_size: int, noise_multiplier: float) -> float:
    """Return the weight of a step's counts in the average; its noise falls by half where the weight is a quarter."""
    if noise_multiplier == 0:
        return _MOST_NEW
    clarity = expected_batch_size / (_CLEAR * noise_multiplier)
    return min(max(_MOST_NEW * math.sqrt(clarity), _LEAST_NEW), _MOST_NEW)


@dataclass(frozen=True)
class NormDistribution:
    """Estimated shares of the norms between consecutive edges; norms lie evenly over the logarithm within a bin.

    Evenly over the norm itself in the first bin, which begins at zero.
    """

    edges: np.ndarray
    shares: np.ndarray

    def mean_excess(self, threshold: float) -> float:
        """Return the mean of max(norm − threshold, 0)."""
        lower, upper = self.edges[:-1], self.edges[1:]
        reached = np.clip(threshold, lower, upper)
        excess = np.empty(len(upper))
        excess[0] = (upper[0] - reached[0]) ** 2 / (2 * upper[0])
        above, start = upper[1:], reached[1:]
        excess[1:] = (above - start - threshold * np.log(above / start)) / np.log(above / lower[1:])
        return float(self.shares @ np.maximum(excess, 0.0))

    def least_error_threshold(self, unit_variance: float) -> float:
        """Return the C that minimizes `unit_variance·C² + mean of max(norm − C, 0)²`.

        Half of its derivative, `unit_variance·C − mean_excess(C)`, rises with C from a negative value at zero, so that
        it has one root, below the last edge. It is looked for among the edges, then within its bin by halving.
        """
        edge = bisect_left(
            range(len(self.shares)),
            0.0,
            lo=1,
            key=lambda k: unit_variance * self.edges[k] - self.mean_excess(float(self.edges[k])),
        )
        lower, upper = float(self.edges[edge - 1]), float(self.edges[edge])
        beyond, further, share = self.mean_excess(upper), self.shares[edge:].sum(), self.shares[edge - 1]
        low, high = max(lower, upper * 1e-15), upper
        for _ in range(60):
            middle = math.sqrt(low * high)
            if lower == 0:
                within = (upper - middle) ** 2 / (2 * upper)
            else:
                within = (upper - middle - middle * math.log(upper / middle)) / math.log(upper / lower)
            if unit_variance * middle < share * within + beyond + further * (upper - middle):
                low = middle
            else:
                high = middle
        return math.sqrt(low * high)

    def quantile(self, fraction: float) -> float:
        """Return the norm below which this fraction of the examples lies."""
        below = np.concatenate([[0.0], np.cumsum(self.shares)])
        index = int(np.clip(np.searchsorted(below, fraction * below[-1]) - 1, 0, len(self.shares) - 1))
        part = np.clip((fraction * below[-1] - below[index]) / max(self.shares[index], 1e-300), 0.0, 1.0)
        lower, upper = float(self.edges[index]), float(self.edges[index + 1])
        return float(lower * (upper / lower) ** part if lower > 0 else upper * max(part, 0.5))


class FollowingHistogram:
    """The averaged counts and the range of their window.

    Args:
        bins: The number of bins.
        histogram_range: The upper end of the window at the first step.
        noise_multiplier: The standard deviation of the noise on a released count.
        expected_batch_size: The number of examples that a step counts on average.
    """

    def __init__(self, bins: int, histogram_range: float, noise_multiplier: float, expected_batch_size: int) -> None:
        self._noise_multiplier = noise_multiplier
        self._new = weight_of_the_newest(expected_batch_size, noise_multiplier)
        self.growth = growth_for(bins)
        self._average, self._variances = np.zeros(bins), np.zeros(bins)
        self._weight = 0.0
        self._peak, self._rest = 0.0, 0  # the largest range that held the norms; steps before it may come down again
        self.histogram_range = histogram_range

    def follow(self, noisy_counts: np.ndarray) -> NormDistribution | None:
        """Take in the finite counts of a step, estimate the distribution of the norms and slide the window.

        None, and no move, where noise hides the norms. None where a window that held them sees nothing above its first
        bin, too: examples that are learned have norms of almost nothing, and the few that are not are lost in noise.
        """
        old, new = 1 - self._new, self._new
        self._average = old * self._average + new * noisy_counts
        self._variances = old**2 * self._variances + new**2
        self._weight = old * self._weight + new
        counts, bins = self._average / self._weight, len(self._average)
        tails = _from_the_end(counts)
        deviations = self._noise_multiplier * np.sqrt(_from_the_end(self._variances)) / self._weight
        seen = np.flatnonzero(tails > _SIGNIFICANT * deviations)
        if not len(seen) or not 0 < tails[0] < math.inf:
            return None
        highest = int(seen[-1])
        shares = onto_simplex(counts[: highest + 1], float(tails[0]))
        if not shares.sum() > 0:  # rounding ate a total that is tiny beside the counts
            return None
        shares /= shares.sum()
        edges = bin_edges(self.histogram_range, bins, self.growth)[: highest + 2]
        self._slide(self._next_shift(highest))
        return None if self._peak and highest == 0 else NormDistribution(edges, shares)

    def _next_shift(self, highest: int) -> int:
        """Return by how many bins the window moves up, or down, for the highest bin in use.

        Up at once, and down quickly until it first holds the norms in its upper half; from then on by one bin after a
        rest, as a tail may be lost in the noise for a while, and no further than to below the largest that held them.
        """
        bins = len(self._average)
        spare = bins - 1 - math.ceil(_HEADROOM * bins) - highest
        if highest >= bins // 2:
            self._peak = max(self._peak, self.histogram_range)
        self._rest = max(0, self._rest - 1)
        shift = -min(spare, bins // 2)
        if highest == bins - 1:
            shift = max(1, bins // 4)
        elif self._peak and spare > 0:
            shift = 0 if self._rest or self.histogram_range < self._peak / _SPAN else -1
        if self._peak and (shift < 0 or highest == bins - 1):
            self._rest = math.ceil(1 / self._new)
        return shift

    def _slide(self, shift: int) -> None:
        """Move the window up by `shift` bins, or down, and the averages with it, noise and all.

        What leaves it goes to its first or last bin. What is in the first bin stays there: all that is known of it is
        that it is small.
        """
        moved_range = self.histogram_range * self.growth**shift
        if not MIN_THRESHOLD <= moved_range <= MAX_THRESHOLD:
            return
        bins = len(self._average)
        places = np.clip(np.arange(bins) - shift, 0, bins - 1)
        places[0] = 0
        self._average, self._variances = _gathered(self._average, places), _gathered(self._variances, places)
        self.histogram_range = moved_range

    def state(self) -> dict[str, Any]:
        """Return what `load` needs, JSON-able."""
        return {
            "averaged_counts": self._average.tolist(),
            "average_variances": self._variances.tolist(),
            "average_weight": self._weight,
            "window_peak": self._peak,
            "window_rest": self._rest,
        }

    def load(self, histogram_range: float, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; raises before it changes anything."""
        average, variances = (self._checked(name, state[name]) for name in ("averaged_counts", "average_variances"))
        weight = state["average_weight"]
        require(bool((variances >= 0).all()), f"expected average_variances to be at least 0, got {variances.tolist()}")
        require(0 <= weight <= 1, f"expected average_weight in [0, 1], got {weight}")
        rest = require_count("window_rest", state["window_rest"], minimum=0)
        peak = require_non_negative("window_peak", state["window_peak"])
        self._average, self._variances, self._weight = average, variances, float(weight)
        self._peak, self._rest = peak, rest
        self.histogram_range = histogram_range

    def _checked(self, name: str, values: Any) -> np.ndarray:
        array, bins = np.asarray(values, dtype=np.float64), len(self._average)
        require(
            array.shape == (bins,) and bool(np.isfinite(array).all()),
            f"expected {name} to be {bins} finite numbers, got {values}",
        )
        return array


def _gathered(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Put each value into its place, and add up those that share one."""
    gathered = np.zeros_like(values)
    np.add.at(gathered, places, values)
    return gathered


def _from_the_end(values: np.ndarray) -> np.ndarray:
    """Return the sum of each value and all behind it."""
    return np.cumsum(values[::-1])[::-1]
