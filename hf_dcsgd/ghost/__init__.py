"""Per-example gradient norms and clipped sums in one backward pass, without storing a per-example gradient."""

from hf_dcsgd.ghost import convolution, embedding, linear, normalization  # the imports register the rules
from hf_dcsgd.ghost.contributions import Dense, OneHotRows, Outer
from hf_dcsgd.ghost.engine import GhostClipper
from hf_dcsgd.ghost.refusals import BatchCouplingError, UnsupportedModelError
from hf_dcsgd.ghost.registry import register_rule, rule_for, trainable
from hf_dcsgd.ghost.units import Units

__all__ = [
    "BatchCouplingError",
    "Dense",
    "GhostClipper",
    "OneHotRows",
    "Outer",
    "Units",
    "UnsupportedModelError",
    "convolution",
    "embedding",
    "linear",
    "normalization",
    "register_rule",
    "rule_for",
    "trainable",
]
