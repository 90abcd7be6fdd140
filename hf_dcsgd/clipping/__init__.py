"""Clipping strategies: one contract (:mod:`.base`), six ways to set the threshold."""

from __future__ import annotations

from typing import Any

from hf_dcsgd.clipping.andrew import AndrewThreshold
from hf_dcsgd.clipping.auto_clip import AutoClip
from hf_dcsgd.clipping.base import ClippingThreshold, NormClipping, SideQuery
from hf_dcsgd.clipping.dc_sgd import (
    ExpectedErrorThreshold,
    HistogramThreshold,
    PercentileThreshold,
    expected_squared_error,
    minimise_expected_squared_error,
)
from hf_dcsgd.clipping.du import DuThreshold
from hf_dcsgd.clipping.fixed import FixedThreshold

STRATEGIES: tuple[str, ...] = ("fixed", "dc_sgd_p", "dc_sgd_e", "andrew", "du", "auto_clip")

__all__ = [
    "STRATEGIES",
    "AndrewThreshold",
    "AutoClip",
    "ClippingThreshold",
    "DuThreshold",
    "ExpectedErrorThreshold",
    "FixedThreshold",
    "HistogramThreshold",
    "NormClipping",
    "PercentileThreshold",
    "SideQuery",
    "build_threshold",
    "expected_squared_error",
    "minimise_expected_squared_error",
]


def build_threshold(plan: Any) -> ClippingThreshold:
    """The strategy that a privacy plan names, with the numbers that the plan accounts for."""
    settings = plan.settings
    match plan.clipping:
        case "fixed":
            return FixedThreshold(settings["clip_threshold"])
        case "dc_sgd_p":
            return PercentileThreshold(
                settings["clip_threshold"], percentile=settings["percentile"], **_histogram_arguments(plan)
            )
        case "dc_sgd_e":
            return ExpectedErrorThreshold(
                settings["clip_threshold"],
                grad_noise_multiplier=plan.grad_noise_multiplier,
                num_parameters=plan.num_parameters,
                **_histogram_arguments(plan),
            )
        case "andrew":
            return AndrewThreshold(
                settings["clip_threshold"],
                percentile=settings["percentile"],
                learning_rate=settings["andrew_learning_rate"],
                noise_std=settings["andrew_noise_multiplier"],
                expected_batch_size=plan.expected_batch_size,
            )
        case "du":
            return DuThreshold(settings["clip_threshold"], decay=settings["du_decay"], steps=plan.steps)
        case "auto_clip":
            return AutoClip(gamma=settings["auto_clip_gamma"])
    raise ValueError(f"expected clipping to be one of {', '.join(STRATEGIES)}, got {plan.clipping!r}")


def _histogram_arguments(plan: Any) -> dict[str, Any]:
    return {
        "bins": plan.settings["histogram_bins"],
        "histogram_range": plan.settings["histogram_range"],
        "histogram_noise_multiplier": plan.histogram_noise_multiplier,
        "expected_batch_size": plan.expected_batch_size,
    }
