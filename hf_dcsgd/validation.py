"""Small argument checks. Every message names the argument and shows the value."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection
from typing import Any

_KINDS: dict[type, tuple[type, str]] = {
    float: (numbers.Real, "a number"),
    int: (numbers.Integral, "a whole number"),
    str: (str, "a string"),
}


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_positive(name: str, value: float) -> float:
    """Return `value` as a float; it must be finite and above zero."""
    require(math.isfinite(value) and value > 0, f"expected a finite {name} > 0, got {value}")
    return float(value)


def require_non_negative(name: str, value: float) -> float:
    """Return `value` as a float; it must be finite and not below zero."""
    require(math.isfinite(value) and value >= 0, f"expected a finite {name} >= 0, got {value}")
    return float(value)


def require_fraction(name: str, value: float) -> float:
    """Return `value` as a float; it must lie strictly between 0 and 1."""
    require(0 < value < 1, f"expected 0 < {name} < 1, got {value}")
    return float(value)


def require_count(name: str, value: int, minimum: int = 1) -> int:
    """Return `value` as an int; it must be whole and at least `minimum`."""
    require(value == int(value) and value >= minimum, f"expected a whole {name} >= {minimum}, got {value}")
    return int(value)


def require_one_of(name: str, value: str, choices: Collection[str]) -> str:
    """Return `value`; it must be one of the choices."""
    require(value in choices, f"expected {name} to be one of {', '.join(choices)}, got {value!r}")
    return value


def require_kind(name: str, value: Any, kind: type) -> None:
    """Raise `TypeError` unless `value` is a number (`float`), a whole number (`int`) or a string (`str`)."""
    accepted, said = _KINDS[kind]
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise TypeError(f"expected {name} to be {said}, got {value!r}")
