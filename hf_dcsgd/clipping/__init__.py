"""Clipping strategies: one contract (`base.py`), one file and class for each way to set the threshold."""

from hf_dcsgd.clipping.andrew import AndrewThreshold
from hf_dcsgd.clipping.auto_clip import AutoClip
from hf_dcsgd.clipping.base import ClippingThreshold, NormClipping, PublicNumbers, Released, SideQuery
from hf_dcsgd.clipping.dc_sgd import (
    ExpectedErrorThreshold,
    HistogramThreshold,
    PercentileThreshold,
    default_histogram_noise_multiplier,
    expected_squared_error,
    minimize_expected_squared_error,
)
from hf_dcsgd.clipping.du import DuThreshold
from hf_dcsgd.clipping.fixed import FixedThreshold
from hf_dcsgd.clipping.options import StrategyOption
from hf_dcsgd.clipping.registry import STRATEGIES, register_strategy, strategy, strategy_names

# Options of the strategies above, each once. Those of other packages come later, by `register_strategy`.
BUILTIN_OPTIONS: dict[str, StrategyOption] = {
    option.name: option for known in STRATEGIES.values() for option in known.options
}

__all__ = [
    "BUILTIN_OPTIONS",
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
    "PublicNumbers",
    "Released",
    "SideQuery",
    "StrategyOption",
    "default_histogram_noise_multiplier",
    "expected_squared_error",
    "minimize_expected_squared_error",
    "register_strategy",
    "strategy",
    "strategy_names",
]
