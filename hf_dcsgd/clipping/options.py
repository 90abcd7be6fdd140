"""Options of clipping strategies: each is declared once, with its default, its help and its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_dcsgd.validation import require, require_fraction, require_kind, require_positive

# Below, squares of coordinates vanish in fp32 and a gradient would pass for smaller than it is; above, threshold ×
# noise multiplier would leave it.
MIN_THRESHOLD = 1e-12
MAX_THRESHOLD = 1e30


@dataclass(frozen=True)
class StrategyOption:
    """One option of a strategy, as arguments, command line, plan and constructor see it.

    Args:
        name: Name of the argument; one name has one meaning in all strategies.
        default: Its default; None where the strategy derives it from public numbers (`default_settings`).
        help: One or two sentences for the command line.
        check: `check(name, value)` returns the value to use, or raises `ValueError` that names and shows it.
        kind: `float`, `int` or `str`.
    """

    name: str
    default: Any
    help: str
    check: Callable[[str, Any], Any]
    kind: type = float

    def checked(self, value: Any) -> Any:
        """Return `value` in the form to use; `TypeError` or `ValueError` if it is not usable."""
        require_kind(self.name, value, self.kind)
        return self.check(self.name, value)


def require_threshold(name: str, value: float) -> float:
    """Return `value` as a float, which must be usable as a threshold or a histogram range."""
    require_positive(name, value)
    require(
        MIN_THRESHOLD <= value <= MAX_THRESHOLD,
        f"expected {MIN_THRESHOLD:g} <= {name} <= {MAX_THRESHOLD:g}, got {value}",
    )
    return float(value)


CLIP_THRESHOLD = StrategyOption(
    "clip_threshold",
    1.0,
    "The threshold C of the first step; with clipping=fixed, of every step.",
    require_threshold,
)
PERCENTILE = StrategyOption(
    "percentile",
    0.5,
    "The fraction of examples, in (0, 1), whose gradients should stay unclipped.",
    require_fraction,
)
