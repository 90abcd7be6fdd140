"""Accounting for tests that are not about ε: a wider grid for PLD and fewer orders for RDP, so still upper bounds."""

from collections.abc import Callable
from typing import Any

from hf_dcsgd.privacy import accountants, accounting


def quicken_accounting(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    interval, whole_orders = accountants.pld_interval, tuple(map(float, range(2, 64)))
    set_attribute(accountants, "pld_interval", lambda step, count: 10 * interval(step, count))
    set_attribute(accounting, "_GRID_SCALES", (1.0, 10.0))
    set_attribute(accountants, "LOW_RDP_ORDERS", whole_orders)
    set_attribute(accountants, "RDP_ORDERS", whole_orders + accountants.HIGH_RDP_ORDERS)
    forget_accounting()


def forget_accounting() -> None:
    """What was computed one way is not to be found by who wants it the other way."""
    accounting._epsilon.cache_clear()
    accounting._calibrated.cache_clear()
