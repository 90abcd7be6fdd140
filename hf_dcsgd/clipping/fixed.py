"""DP-SGD: the same threshold at every step, nothing released beside the gradient."""

from __future__ import annotations

from hf_dcsgd.clipping.base import NormClipping


class FixedThreshold(NormClipping):
    """C_t = C_0."""

    name = "fixed"
