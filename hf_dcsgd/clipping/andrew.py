"""Andrew et al.: the threshold follows a quantile of the norms by a noisy geometric update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_dcsgd.clipping.base import NormClipping, PublicNumbers, Released, SideQuery
from hf_dcsgd.clipping.options import MAX_THRESHOLD, MIN_THRESHOLD, PERCENTILE, StrategyOption
from hf_dcsgd.clipping.registry import register_strategy
from hf_dcsgd.validation import require_count, require_positive

if TYPE_CHECKING:
    import torch

LEARNING_RATE = StrategyOption(
    "andrew_learning_rate", 0.2, "The step size η_C of the threshold's logarithm.", require_positive
)
COUNT_NOISE_STD = StrategyOption(
    "andrew_count_noise_std",
    None,
    "Standard deviation σ_b of the noise on the count of unclipped examples. Default: B/20.",
    require_positive,
)
_MIN_LOG, _MAX_LOG = math.log(MIN_THRESHOLD), math.log(MAX_THRESHOLD)
_BIT_SENSITIVITY = 0.5  # of the centered bit 1[nᵢ ≤ C] − ½


@register_strategy
class AndrewThreshold(NormClipping):
    """C ← C·exp(−η_C(β̃ − p)), β̃ the noisy fraction of norms at or below C.

    Each example contributes the centered bit `1[nᵢ ≤ C] − ½`: it moves the sum by ½, so noise of std σ_b on the sum
    is a noise multiplier of 2σ_b. β̃ divides by the expected batch size, which is public. An example whose norm is not
    finite counts as clipped. A released value that is not a number keeps C.
    """

    name = "andrew"
    title = "DP-SGD and adaptive clipping by Andrew et al."
    summary = "geometric quantile tracking"
    options = (*NormClipping.options, PERCENTILE, LEARNING_RATE, COUNT_NOISE_STD)
    public_numbers = ("expected_batch_size",)

    def __init__(
        self,
        clip_threshold: float,
        *,
        percentile: float,
        andrew_learning_rate: float,
        andrew_count_noise_std: float,
        expected_batch_size: int,
    ) -> None:
        super().__init__(clip_threshold)
        self._percentile = PERCENTILE.checked(percentile)
        self._learning_rate = LEARNING_RATE.checked(andrew_learning_rate)
        self._noise_std = COUNT_NOISE_STD.checked(andrew_count_noise_std)
        self._expected_batch_size = require_count("expected_batch_size", expected_batch_size)

    @classmethod
    def default_settings(cls, settings: Mapping[str, Any], numbers: PublicNumbers) -> dict[str, Any]:
        return {"andrew_count_noise_std": numbers.expected_batch_size / 20}

    @classmethod
    def side_noise_multipliers(cls, settings: Mapping[str, Any]) -> dict[str, float]:
        return {"2*andrew_count_noise_std": settings["andrew_count_noise_std"] / _BIT_SENSITIVITY}

    @classmethod
    def side_noise_options(cls, noise_multiplier: float) -> dict[str, Any]:
        return {"andrew_count_noise_std": noise_multiplier * _BIT_SENSITIVITY}

    @property
    def side_query(self) -> SideQuery:
        return SideQuery(1, _BIT_SENSITIVITY, noise_multiplier=self._noise_std / _BIT_SENSITIVITY)

    def side_contribution(self, per_example_norms: torch.Tensor) -> torch.Tensor:
        # A comparison with NaN is false, so a norm that is not finite counts as clipped.
        within = (per_example_norms.detach().float() <= self.clip_threshold).float()
        return (within - 0.5).sum().reshape(1)

    def advance(self, noisy_side: np.ndarray) -> Released:
        values = super().advance(noisy_side)
        noisy_fraction_within = float(noisy_side[0]) / self._expected_batch_size + 0.5
        if not math.isnan(noisy_fraction_within):
            values["noisy_clip_fraction"] = min(max(1 - noisy_fraction_within, 0.0), 1.0)
            # In logarithms, so that a huge noisy value cannot overflow.
            log_threshold = math.log(self.clip_threshold) - self._learning_rate * (
                noisy_fraction_within - self._percentile
            )
            self.move_to(math.exp(min(max(log_threshold, _MIN_LOG), _MAX_LOG)))
        return values
