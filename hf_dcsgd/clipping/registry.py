"""The clipping strategies by name. Arguments, plan, command line, card, report and audit all read them from here."""

from __future__ import annotations

import inspect
from typing import TypeVar

from hf_dcsgd.clipping.base import ClippingThreshold
from hf_dcsgd.plugins import Registry
from hf_dcsgd.validation import require

Strategy = TypeVar("Strategy", bound=type[ClippingThreshold])

STRATEGIES: Registry[type[ClippingThreshold]] = Registry("clipping")


def register_strategy(cls: Strategy) -> Strategy:
    """Make a subclass of `ClippingThreshold` known by its `name` (a class decorator)."""
    complete = inspect.isclass(cls) and issubclass(cls, ClippingThreshold) and not inspect.isabstract(cls)
    require(complete, f"expected a complete subclass of ClippingThreshold, got {cls!r}")
    for attribute in ("name", "title", "summary"):
        text = getattr(cls, attribute, None)
        require(
            isinstance(text, str) and bool(text), f"expected {cls.__name__}.{attribute} to be a text, got {text!r}"
        )
    for option in cls.options:
        for other in (other for known in STRATEGIES.values() for other in known.options if known.name != cls.name):
            require(
                other == option or other.name != option.name,
                f"expected another name for the option {option.name!r} of {cls.name}: another strategy has it",
            )
    STRATEGIES.add(cls.name, cls)
    return cls


def strategy(name: str) -> type[ClippingThreshold]:
    """Return the strategy of this name; `ValueError` with all names if there is none."""
    return STRATEGIES.find(name)
