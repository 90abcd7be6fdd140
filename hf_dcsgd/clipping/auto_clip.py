"""AUTO-S (Bu et al.): every gradient is normalised, so there is no threshold to choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hf_dcsgd.clipping.base import ClippingThreshold, Released, require_threshold


class AutoClip(ClippingThreshold):
    """``fᵢ = 1/(nᵢ + γ)``: one example contributes ``nᵢ/(nᵢ + γ) < 1``, so the sensitivity is 1."""

    name = "auto_clip"

    def __init__(self, *, gamma: float) -> None:
        super().__init__()
        self._gamma = require_threshold("auto_clip_gamma", gamma)

    @property
    def sensitivity(self) -> float:
        return 1.0

    def clip_factors(self, per_example_norms: torch.Tensor) -> torch.Tensor:
        norms = per_example_norms.detach().float()
        return torch.where(torch.isfinite(norms), 1.0 / (norms + self._gamma), 0.0)

    def _release(self, noisy_side: np.ndarray) -> Released:
        return {}

    def _state(self) -> dict[str, Any]:
        return {}

    def _load(self, state: Mapping[str, Any]) -> None:
        return None
