"""AUTO-S (Bu et al.): every gradient is normalized, so there is no threshold to choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_dcsgd.clipping.base import ClippingThreshold, Released
from hf_dcsgd.clipping.options import StrategyOption, require_threshold
from hf_dcsgd.clipping.registry import register_strategy

if TYPE_CHECKING:
    import torch

GAMMA = StrategyOption("auto_clip_gamma", 0.01, "γ in the factor 1 / (norm + γ).", require_threshold)


@register_strategy
class AutoClip(ClippingThreshold):
    """`fᵢ = 1/(nᵢ + γ)`: one example contributes `nᵢ/(nᵢ + γ) < 1`, so the sensitivity is 1."""

    name = "auto_clip"
    title = "DP-SGD and automatic clipping (AUTO-S)"
    summary = "AUTO-S: normalized gradients"
    options = (GAMMA,)

    def __init__(self, *, auto_clip_gamma: float) -> None:
        super().__init__()
        self._gamma = GAMMA.checked(auto_clip_gamma)

    @property
    def sensitivity(self) -> float:
        return 1.0

    def clip_factors(self, per_example_norms: torch.Tensor) -> torch.Tensor:
        norms = per_example_norms.detach().float()
        return (1.0 / (norms + self._gamma)).where(norms.isfinite(), 0.0)

    def advance(self, noisy_side: np.ndarray) -> Released:
        return {}

    def own_state(self) -> dict[str, Any]:
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        return None
