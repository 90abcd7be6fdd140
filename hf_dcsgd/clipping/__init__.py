"""Clipping strategies: one contract (`base.py`), one file and class for each way to set the threshold."""

from hf_dcsgd.clipping import andrew, auto_clip, dc_sgd, du, fixed  # the imports register the strategies
from hf_dcsgd.clipping.base import ClippingThreshold, NormClipping, PublicNumbers, Released, SideQuery
from hf_dcsgd.clipping.options import StrategyOption
from hf_dcsgd.clipping.registry import STRATEGIES, register_strategy, strategy

# Options of the strategies above, each once. Those of other packages come later, by `register_strategy`.
BUILTIN_OPTIONS: dict[str, StrategyOption] = {
    option.name: option for known in STRATEGIES.values() for option in known.options
}

__all__ = [
    "BUILTIN_OPTIONS",
    "STRATEGIES",
    "ClippingThreshold",
    "NormClipping",
    "PublicNumbers",
    "Released",
    "SideQuery",
    "StrategyOption",
    "andrew",
    "auto_clip",
    "dc_sgd",
    "du",
    "fixed",
    "register_strategy",
    "strategy",
]
