"""Registries of things that other packages may add by name.

A package that is not imported by the program itself (the command line, say) is found by an entry point in the group
`hf_dcsgd.plugins` that names its module; it is imported when a name is asked for that nobody has registered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

T = TypeVar("T")

ENTRY_POINT_GROUP = "hf_dcsgd.plugins"


class Registry(Collection[str], Generic[T]):
    """Values by name, in the order of their registration; as a collection, it is that of the names."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._values: dict[str, T] = {}

    def add(self, name: str, value: T) -> None:
        """Register `value`. A name is taken once; the same definition (a module or cell run again) replaces itself."""
        taken = self._values.get(name)
        if taken is not None and _origin(taken) != _origin(value):
            raise ValueError(f"expected a new name for {self.kind}, got {name!r}, which is {_origin(taken)}")
        self._values[name] = value

    def find(self, name: str) -> T:
        """Return the value of this name; `ValueError` with all names if there is none."""
        if name not in self:
            raise ValueError(f"expected {self.kind} to be one of {', '.join(self)}, got {name!r}")
        return self._values[name]

    def values(self) -> list[T]:
        return list(self._values.values())

    def __contains__(self, name: object) -> bool:
        if name not in self._values:
            for entry_point in entry_points(group=ENTRY_POINT_GROUP):
                entry_point.load()
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _origin(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
