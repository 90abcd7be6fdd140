"""Du et al.: a threshold that decays with the step number, the same for all data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hf_dcsgd.clipping.base import NormClipping, Released, bounded
from hf_dcsgd.validation import require_count, require_positive


class DuThreshold(NormClipping):
    """C_t = C_0·ρ^(t/T), ρ = ``decay``, T = ``steps``: data-independent, so nothing more is released."""

    name = "du"

    def __init__(self, clip_threshold: float, *, decay: float, steps: int) -> None:
        super().__init__(clip_threshold)
        self._initial = self._clip_threshold
        self._decay = require_positive("du_decay", decay)
        self._steps = require_count("steps", steps)
        self._step = 0

    def _release(self, noisy_side: np.ndarray) -> Released:
        values = super()._release(noisy_side)
        self._go_to(self._step + 1)
        return values

    def _go_to(self, step: int) -> None:
        self._step = step
        self._clip_threshold = bounded(self._initial * self._decay ** (step / self._steps))

    def _state(self) -> dict[str, Any]:
        return {"step": self._step}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._go_to(require_count("step", state["step"], minimum=0))
