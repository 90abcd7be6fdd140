"""DP-SGD: the same threshold at every step, nothing released beside the gradient."""

from __future__ import annotations

from hf_dcsgd.clipping.base import NormClipping
from hf_dcsgd.clipping.registry import register_strategy


@register_strategy
class FixedThreshold(NormClipping):
    """C_t = C_0."""

    name = "fixed"
    title = "DP-SGD (a fixed clipping threshold)"
    summary = "DP-SGD"
