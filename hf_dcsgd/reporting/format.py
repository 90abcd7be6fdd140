"""Numbers and names as reports, cards and the command line show them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypedDict


class ParameterGroup(TypedDict):
    """One block or part of a model: how many tensors of it are trained, and how many numbers they hold."""

    name: str
    tensors: int
    parameters: int


def rounded_up(value: float | None, digits: int = 4, *, decimals: int | None = None) -> str:
    """Show a bound, never smaller than it is: 7.99999 becomes 8, infinity and None become ∞.

    With `decimals`, that many places after the point instead of `digits` significant ones: a σ copied from the screen
    must not spend more than its budget.
    """
    if value is None or not math.isfinite(value):
        return "∞"
    if decimals is not None:
        return f"{math.ceil(value * 10**decimals) / 10**decimals:.{decimals}f}"
    if value <= 0:
        return "0"
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return f"{math.ceil(value * scale * (1 - 1e-12)) / scale:.{digits}g}"


def finite(value: float) -> float | None:
    """Return a number as JSON can hold it: None for an infinite one."""
    return value if math.isfinite(value) else None


def shown_number(value: Any) -> str:
    """Show counts with thousands separators, other numbers with five digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def parameter_groups(sizes: Mapping[str, int]) -> list[ParameterGroup]:
    """Group parameters by the block or part of the model they belong to, in the model's order."""
    groups: dict[str, list[int]] = {}
    for name, size in sizes.items():
        groups.setdefault(_group_of(name), []).append(size)
    return [{"name": name, "tensors": len(group), "parameters": sum(group)} for name, group in groups.items()]


def _group_of(name: str) -> str:
    path = name.removeprefix("base_model.model.").split(".")[:-1] or [name]
    numbered = next((i for i, part in enumerate(path) if part.isdecimal()), None)
    return ".".join(path[: 2 if numbered is None else numbered + 1])
