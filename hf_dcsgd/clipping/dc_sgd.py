"""DC-SGD: the threshold follows a noisy histogram of the norms, by percentile (P) or by expected squared error (E)."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hf_dcsgd.clipping.base import NormClipping, PublicNumbers, Released, SideQuery, bounded
from hf_dcsgd.clipping.following import FollowingHistogram, NormDistribution
from hf_dcsgd.clipping.histogram import NoisyHistogram, norm_histogram
from hf_dcsgd.clipping.options import CLIP_THRESHOLD, PERCENTILE, StrategyOption, require_threshold
from hf_dcsgd.clipping.registry import register_strategy
from hf_dcsgd.validation import require, require_count, require_non_negative, require_one_of, require_positive

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Algorithm 4: candidates 0.1C … 2.0C, and a cap on the rounds that it may take.
_CANDIDATES = np.arange(1, 21) / 10
_MAX_ROUNDS = 64
_STALLED_SHARE = 0.25
_NOISY_SHARE = 0.1
_MOST_BINS = 100_000


def _require_bins(name: str, value: int) -> int:
    require(value <= _MOST_BINS, f"expected {name} <= {_MOST_BINS}, got {value}")
    return require_count(name, value, minimum=2)


BINS = StrategyOption("histogram_bins", 20, "The number of bins of the histogram of norms.", _require_bins, int)
RANGE = StrategyOption(
    "histogram_range",
    None,
    "The first range R of the histogram. Default: 100 × clip_threshold; with histogram_rule=paper, histogram_bins for "
    "dc_sgd_e and 1 for dc_sgd_p.",
    require_threshold,
)
FOLLOWING_RULE, PAPER_RULE = "following", "paper"


RULE = StrategyOption(
    "histogram_rule",
    None,
    "How the histogram keeps up with the norms. following (default of dc_sgd_e): growing bins on a window that "
    "slides, averaged over steps. paper (default of dc_sgd_p): equal bins, a range set anew at each step, the newest "
    "counts alone.",
    partial(require_one_of, choices=(FOLLOWING_RULE, PAPER_RULE)),
    str,
)
NOISE_MULTIPLIER = StrategyOption(
    "histogram_noise_multiplier",
    None,
    "The noise multiplier σ_H of the histogram, which must exceed σ. Default, by the paper's rule: 5, or 8 when "
    "2 ≤ σ ≤ 3, or 12 when σ > 3.",
    require_positive,
)


def default_histogram_noise_multiplier(noise_multiplier: float) -> float:
    """Return σ_H by the paper's rule: 5; 8 when 2 ≤ σ ≤ 3; 12 when σ > 3."""
    require_non_negative("noise_multiplier", noise_multiplier)
    if noise_multiplier > 3:
        return 12.0
    return 8.0 if noise_multiplier >= 2 else 5.0


def expected_squared_error(
    thresholds: np.ndarray, norms: np.ndarray, counts: np.ndarray, unit_variance: float
) -> np.ndarray:
    """Return E(C) of the paper for each threshold: `unit_variance·C² + Σ counts·max(norms − C, 0)² / Σ counts`.

    `unit_variance` is σ_T²·d/B², the variance of the released gradient per unit of C².
    """
    shortfall = np.maximum(norms - thresholds[:, None], 0.0)
    return unit_variance * thresholds**2 + (shortfall * shortfall) @ (counts / counts.sum())


def minimize_expected_squared_error(
    start: float, norms: np.ndarray, counts: np.ndarray, unit_variance: float
) -> float | None:
    """Search as Algorithm 4 does: the best of 0.1C … 2.0C, again from a winner at either end; `None` after 64 rounds.

    With non-negative counts E is convex and the search ends; with raw noisy counts it may not.
    """
    threshold = start
    for _ in range(_MAX_ROUNDS):
        candidates = threshold * _CANDIDATES
        best = int(expected_squared_error(candidates, norms, counts, unit_variance).argmin())
        threshold = float(candidates[best])
        if 0 < best < len(_CANDIDATES) - 1:
            return threshold
    return None


class HistogramThreshold(NormClipping):
    """What P and E share: one released histogram per step, sensitivity 1, noise multiplier σ_H.

    C and R move only on counts that are finite and whose total S′ is positive; else both are kept.
    """

    options = (*NormClipping.options, BINS, RANGE, RULE, NOISE_MULTIPLIER)
    public_numbers: ClassVar[tuple[str, ...]] = ("expected_batch_size",)
    default_rule: ClassVar[str]

    def __init__(
        self,
        clip_threshold: float,
        *,
        histogram_bins: int,
        histogram_range: float,
        histogram_rule: str,
        histogram_noise_multiplier: float,
        expected_batch_size: int,
    ) -> None:
        super().__init__(clip_threshold)
        self._bins = BINS.checked(histogram_bins)
        self._range = RANGE.checked(histogram_range)
        self._noise_multiplier = NOISE_MULTIPLIER.checked(histogram_noise_multiplier)
        self._expected_batch_size = require_count("expected_batch_size", expected_batch_size)
        self._following, self._growth = None, 1.0
        if RULE.checked(histogram_rule) == FOLLOWING_RULE:
            self._following = FollowingHistogram(
                self._bins, self._range, self._noise_multiplier, self._expected_batch_size
            )
            self._growth = self._following.growth
        relative_noise = self._noise_multiplier * math.sqrt(self._bins) / self._expected_batch_size
        if relative_noise > _NOISY_SHARE:
            logger.warning(
                "the noise on the histogram's total is %.0f%% of the expected batch size %d "
                "(histogram_noise_multiplier %g, %d bins): above %.0f%% the threshold becomes erratic; "
                "raise the batch size or use fewer bins",
                100 * relative_noise,
                self._expected_batch_size,
                self._noise_multiplier,
                self._bins,
                100 * _NOISY_SHARE,
            )

    @classmethod
    def default_settings(cls, settings: Mapping[str, Any], numbers: PublicNumbers) -> dict[str, Any]:
        rule = settings["histogram_rule"] or cls.default_rule
        follows, bins = rule == FOLLOWING_RULE, settings["histogram_bins"]
        return {
            "histogram_rule": rule,
            "histogram_range": 100 * settings["clip_threshold"] if follows else cls.paper_range(bins),
            "histogram_noise_multiplier": default_histogram_noise_multiplier(numbers.noise_multiplier),
        }

    @staticmethod
    @abstractmethod
    def paper_range(histogram_bins: int) -> float:
        """Return the paper's R of the first step."""

    @classmethod
    def side_noise_multipliers(cls, settings: Mapping[str, Any]) -> dict[str, float]:
        return {"histogram_noise_multiplier": settings["histogram_noise_multiplier"]}

    @classmethod
    def side_noise_options(cls, noise_multiplier: float) -> dict[str, Any]:
        return {"histogram_noise_multiplier": noise_multiplier}

    @property
    def histogram_range(self) -> float:
        """R of the current step: public, as it is a function of released values."""
        return self._range

    @property
    def side_query(self) -> SideQuery:
        return SideQuery(size=self._bins, sensitivity=1.0, noise_multiplier=self._noise_multiplier)

    def side_contribution(self, per_example_norms: torch.Tensor) -> torch.Tensor:
        return norm_histogram(per_example_norms, self._range, self._bins, self._growth)

    def advance(self, noisy_side: np.ndarray) -> Released:
        histogram = NoisyHistogram(noisy_side, self._range, self._growth)
        values: Released = {
            "clip_threshold": self.clip_threshold,
            "histogram_range": self._range,
            "histogram_edges": histogram.edges.tolist(),
            "noisy_histogram": noisy_side.tolist(),
        }
        if histogram.usable:
            values["noisy_clip_fraction"] = histogram.fraction_above(self.clip_threshold)
            if self._following is None:
                threshold, histogram_range = self._next(histogram)
                self.move_to(threshold)
                self._range = bounded(histogram_range)
            else:
                distribution = self._following.follow(noisy_side)
                self._range = self._following.histogram_range
                if distribution is not None:
                    self.move_to(self._threshold_for(distribution))
        return values

    @abstractmethod
    def _threshold_for(self, distribution: NormDistribution) -> float:
        """Return C of the next step for norms of this distribution."""

    @abstractmethod
    def _next(self, histogram: NoisyHistogram) -> tuple[float, float]:
        """Return (C, R) of the next step by the paper's rule, from usable counts."""

    def own_state(self) -> dict[str, Any]:
        following = {} if self._following is None else self._following.state()
        return {**super().own_state(), "histogram_range": self._range, **following}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        histogram_range = RANGE.checked(state["histogram_range"])
        CLIP_THRESHOLD.checked(state["clip_threshold"])
        if self._following is not None:
            self._following.load(histogram_range, state)
        super().load_own_state(state)
        self._range = histogram_range


@register_strategy
class PercentileThreshold(HistogramThreshold):
    """C is a percentile of the norms.

    By the paper's rule (Algorithm 3), C is the center of the bin where the running (raw) count reaches p·S′; R = 2C.
    """

    name = "dc_sgd_p"
    title = "DC-SGD-P"
    default_rule = PAPER_RULE
    summary = "a percentile of the norms"
    options = (*HistogramThreshold.options, PERCENTILE)

    def __init__(self, clip_threshold: float, *, percentile: float, **histogram: Any) -> None:
        super().__init__(clip_threshold, **histogram)
        self._percentile = PERCENTILE.checked(percentile)

    @staticmethod
    def paper_range(histogram_bins: int) -> float:
        return 1.0

    def _next(self, histogram: NoisyHistogram) -> tuple[float, float]:
        reached = np.cumsum(histogram.noisy_counts) >= self._percentile * histogram.total
        index = int(np.argmax(reached)) if reached.any() else histogram.bins - 1
        threshold = bounded(float(histogram.bin_centers[index]))
        return threshold, 2 * threshold

    def _threshold_for(self, distribution: NormDistribution) -> float:
        return distribution.quantile(self._percentile)


@register_strategy
class ExpectedErrorThreshold(HistogramThreshold):
    """C minimizes the expected squared error of the released gradient.

    By the paper's rule (Algorithm 4), R doubles or halves. The error is computed on the counts projected onto the
    simplex, where it is convex and the search ends; the rule for R sees the raw counts. A search that does not end
    within 64 rounds keeps C.
    """

    name = "dc_sgd_e"
    title = "DC-SGD-E"
    default_rule = FOLLOWING_RULE
    summary = "least expected squared error; nothing to tune"
    public_numbers = ("expected_batch_size", "grad_noise_multiplier", "num_parameters")

    def __init__(
        self,
        clip_threshold: float,
        *,
        grad_noise_multiplier: float,
        num_parameters: int,
        expected_batch_size: int,
        **histogram: Any,
    ) -> None:
        super().__init__(clip_threshold, expected_batch_size=expected_batch_size, **histogram)
        noise_multiplier = require_non_negative("grad_noise_multiplier", grad_noise_multiplier)
        require_count("num_parameters", num_parameters)
        self._unit_variance = noise_multiplier**2 * num_parameters / expected_batch_size**2
        self._warned = False

    @staticmethod
    def paper_range(histogram_bins: int) -> float:
        return float(histogram_bins)

    def _threshold_for(self, distribution: NormDistribution) -> float:
        return distribution.least_error_threshold(self._unit_variance)

    def _next(self, histogram: NoisyHistogram) -> tuple[float, float]:
        start, counts, best = self.clip_threshold, histogram.projected(), None
        if counts.sum() > 0:  # it is not when rounding ate a total that is tiny beside the counts
            best = minimize_expected_squared_error(start, histogram.bin_centers, counts, self._unit_variance)
        return start if best is None else best, self._next_range(histogram)

    def _next_range(self, histogram: NoisyHistogram) -> float:
        counts, total, bins = histogram.noisy_counts, histogram.total, histogram.bins
        if counts[-1] >= 0.5 * total:
            return 2 * self._range
        if counts[bins // 2 :].sum() <= total / bins:
            return self._range / 2
        if counts[-1] > _STALLED_SHARE * total and not self._warned:
            self._warned = True
            logger.warning(
                "gradients are clipped harder than is good: about %.0f%% of the examples have larger norms than the "
                "histogram can tell apart (histogram_range is at %g and stays there). Leave out histogram_rule=paper "
                "(recipe=paper sets it) for bins that follow the norms, or start with histogram_range=%g. The "
                "guarantee is not affected",
                100 * counts[-1] / total,
                self._range,
                10 * self._range,
            )
        return self._range
