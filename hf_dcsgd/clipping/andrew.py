"""Andrew et al.: the threshold follows a quantile of the norms by a noisy geometric update."""

from __future__ import annotations

import math

import numpy as np
import torch

from hf_dcsgd.clipping.base import MAX_THRESHOLD, MIN_THRESHOLD, NormClipping, Released, SideQuery, bounded
from hf_dcsgd.validation import require_count, require_fraction, require_positive

_MIN_LOG, _MAX_LOG = math.log(MIN_THRESHOLD), math.log(MAX_THRESHOLD)


class AndrewThreshold(NormClipping):
    """C ← C·exp(−η_C(β̃ − p)), β̃ the noisy fraction of norms at or below C.

    Each example contributes the centred bit ``1[nᵢ ≤ C] − ½``: it moves the sum by ½, so noise of std σ_b on the sum
    is a noise multiplier of 2σ_b. ``noise_std`` is σ_b. β̃ divides by the expected batch size, which is public. An
    example whose norm is not finite counts as clipped. A released value that is not a number keeps C.
    """

    name = "andrew"

    def __init__(
        self,
        clip_threshold: float,
        *,
        percentile: float,
        learning_rate: float,
        noise_std: float,
        expected_batch_size: int,
    ) -> None:
        super().__init__(clip_threshold)
        self._percentile = require_fraction("percentile", percentile)
        self._learning_rate = require_positive("andrew_learning_rate", learning_rate)
        self._noise_std = require_positive("andrew_noise_multiplier", noise_std)
        self._expected_batch_size = require_count("expected_batch_size", expected_batch_size)

    @property
    def side_query(self) -> SideQuery:
        return SideQuery(size=1, sensitivity=0.5, noise_multiplier=2 * self._noise_std)

    def side_contribution(self, per_example_norms: torch.Tensor) -> torch.Tensor:
        # A comparison with NaN is false, so a norm that is not finite counts as clipped.
        within = (per_example_norms.detach().float() <= self._clip_threshold).float()
        return (within - 0.5).sum().reshape(1)

    def _release(self, noisy_side: np.ndarray) -> Released:
        values = super()._release(noisy_side)
        noisy_fraction_within = float(noisy_side[0]) / self._expected_batch_size + 0.5
        if not math.isnan(noisy_fraction_within):
            values["noisy_clip_fraction"] = min(max(1 - noisy_fraction_within, 0.0), 1.0)
            # In logarithms, so that a huge noisy value cannot overflow.
            log_threshold = math.log(self._clip_threshold) - self._learning_rate * (
                noisy_fraction_within - self._percentile
            )
            self._clip_threshold = bounded(math.exp(min(max(log_threshold, _MIN_LOG), _MAX_LOG)))
        return values
