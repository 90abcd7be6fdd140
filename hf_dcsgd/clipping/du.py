"""Du et al.: a threshold that decays with the step number, the same for all data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hf_dcsgd.clipping.base import NormClipping, Released
from hf_dcsgd.clipping.options import StrategyOption
from hf_dcsgd.clipping.registry import register_strategy
from hf_dcsgd.validation import require_count, require_fraction

DECAY = StrategyOption(
    "du_decay", 0.5, "ρ_C; the threshold falls from clip_threshold to ρ_C · clip_threshold.", require_fraction
)


@register_strategy
class DuThreshold(NormClipping):
    """C_t = C_0·ρ^(t/T), ρ = `du_decay`, T = `steps`: data-independent, so nothing more is released."""

    name = "du"
    title = "DP-SGD and the decaying clipping threshold of Du et al."
    summary = "a decay set beforehand"
    options = (*NormClipping.options, DECAY)
    public_numbers = ("steps",)

    def __init__(self, clip_threshold: float, *, du_decay: float, steps: int) -> None:
        super().__init__(clip_threshold)
        self._initial = self.clip_threshold
        self._decay = DECAY.checked(du_decay)
        self._steps = require_count("steps", steps)
        self._step = 0

    def advance(self, noisy_side: np.ndarray) -> Released:
        values = super().advance(noisy_side)
        self._go_to(self._step + 1)
        return values

    def _go_to(self, step: int) -> None:
        self._step = step
        self.move_to(self._initial * self._decay ** (step / self._steps))

    def own_state(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self._go_to(require_count("step", state["step"], minimum=0))
