"""A histogram of norms that follows them: bins of growing width, averaged over steps, on a window that slides.

The paper's histogram has equal bins up to a range R that doubles when half of the norms lie beyond it. Norms of real
runs become bimodal: most examples are learned and have hardly any gradient, some have a hundred times the typical one.
Then half of them never lie beyond R, noise halves it, and the threshold sinks far below its optimum.

Here each bin is a constant factor wider than the one below it, 1.5 for twenty bins, so that the window spans three
decades however many there are. Released counts are averaged over steps, which costs nothing and takes noise away: over
the more steps, the fewer examples stand against the noise (`weight_of_the_newest`). The bins above the highest one
whose tail stands out of the noise are taken for empty: a single spurious count among large norms would outweigh all
others, and there are thousands of steps in which it might come up. The window then slides by whole bins, so that the
averages move with it.

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
from hf_dcsgd.validation import require

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
        self._average = np.zeros(bins)
        self._weight = self._squared_weight = 0.0
        self.histogram_range = histogram_range

    def follow(self, noisy_counts: np.ndarray) -> NormDistribution | None:
        """Take in the finite counts of a step, estimate the distribution of the norms and slide the window.

        None, and no move, where noise hides the norms.
        """
        old, new = 1 - self._new, self._new
        self._average = old * self._average + new * noisy_counts
        self._weight = old * self._weight + new
        self._squared_weight = old**2 * self._squared_weight + new**2
        counts, bins = self._average / self._weight, len(self._average)
        deviation = _SIGNIFICANT * self._noise_multiplier * math.sqrt(self._squared_weight) / self._weight
        tails = np.cumsum(counts[::-1])[::-1]
        seen = np.flatnonzero(tails > deviation * np.sqrt(np.arange(bins, 0, -1)))
        if not len(seen) or not 0 < tails[0] < math.inf:
            return None
        highest = int(seen[-1])
        shares = onto_simplex(counts[: highest + 1], float(tails[0]))
        if not shares.sum() > 0:  # rounding ate a total that is tiny beside the counts
            return None
        shares /= shares.sum()
        edges = bin_edges(self.histogram_range, bins, self.growth)[: highest + 2]
        headroom = math.ceil(_HEADROOM * bins)
        if highest == bins - 1 and counts[-1] > deviation:
            self._slide(max(1, bins // 4))
        else:
            # Slowly down, as a tail may be lost in the noise for a while, unless all norms are below the window.
            most = headroom if highest else bins // 2
            self._slide(max(highest + headroom - (bins - 1), -most))
        return NormDistribution(edges, shares)

    def _slide(self, shift: int) -> None:
        """Move the window up by `shift` bins, or down, and the averages with it.

        What leaves it goes to its first or last bin. What is in the first bin stays there: all that is known of it is
        that it is small.
        """
        moved_range = self.histogram_range * self.growth**shift
        if not MIN_THRESHOLD <= moved_range <= MAX_THRESHOLD:
            return
        moved, places = np.zeros_like(self._average), np.arange(len(self._average)) - shift
        places[0] = 0
        np.add.at(moved, np.clip(places, 0, len(moved) - 1), self._average)
        self._average, self.histogram_range = moved, moved_range

    def state(self) -> dict[str, Any]:
        """Return what `load` needs, JSON-able."""
        return {
            "averaged_counts": self._average.tolist(),
            "average_weight": self._weight,
            "average_squared_weight": self._squared_weight,
        }

    def load(self, histogram_range: float, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; raises before it changes anything."""
        average = np.asarray(state["averaged_counts"], dtype=np.float64)
        require(
            average.shape == self._average.shape and bool(np.isfinite(average).all()),
            f"expected averaged_counts to be {len(self._average)} finite numbers, got {state['averaged_counts']}",
        )
        weights = [state[name] for name in ("average_weight", "average_squared_weight")]
        require(all(0 <= weight <= 1 for weight in weights), f"expected weights of averages in [0, 1], got {weights}")
        self._average, self.histogram_range = average, histogram_range
        self._weight, self._squared_weight = map(float, weights)
