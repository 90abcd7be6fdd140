"""The random numbers of one forward pass on tape, so that one of its rows can be run again under the same ones.

A row of a stack has its own share of what the forward draws (its slice of every dropout mask). Run alone with that
share it must give the same loss, or something else than its own content plays a part. Numbers that are drawn once for
the whole stack (LayerDrop, stochastic depth per batch, a common rescaling) are nobody's share: which rows meet in a
stack would then decide who gets which, so they are refused.

Fused kernels that keep their masks to themselves run without dropout while the tape is on.
"""

from __future__ import annotations

import random
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dcsgd.ghost import BatchCouplingError

SHARED_DRAW = (
    "the forward draws random numbers once for a whole stack of examples ({what}), so which examples meet in a stack "
    "changes their gradients. Switch that off (LayerDrop, SpecAugment, stochastic depth per batch), or draw one "
    "number per example"
)


class Order(Enum):
    """How the rows lie in an axis that holds other things too, such as attention heads or positions."""

    ROW_MAJOR = "rows first"
    ROW_MINOR = "rows last"


class RandomTape:
    """Records the draws of a forward on `rows` rows, then plays back those of one row, or all of them.

    ```python
    tape = RandomTape(rows=len(losses))
    with tape.record():
        losses = forward(stack)
    with tape.play(row=3):
        alone = forward(take_row(stack, 3))      # under the very masks that row 3 had
    ```
    """

    def __init__(self, rows: int, order: Order = Order.ROW_MAJOR) -> None:
        self._rows = rows
        self._order = order
        self._draws: list[tuple[str, Tensor]] = []

    def record(self) -> TorchDispatchMode:
        return _Recording(self._draws)

    def play(self, row: int | None = None) -> TorchDispatchMode:
        """Play back the draws of one row; of all rows for None."""
        return _Playing(self._draws, self._rows, row, self._order)


class _SeededDraws(TorchDispatchMode):
    """Sees every kernel that draws from a generator."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return self._dropout(*args, **kwargs)
        arguments = func._schema.arguments
        switched_off = {a.name: 0.0 for a in arguments if a.name in ("dropout_p", "dropout")}
        if switched_off:
            return func(*_replaced(args, arguments, switched_off), **{**kwargs, **_given(kwargs, switched_off)})
        return self._drawn(name, func(*args, **kwargs))

    def _drawn(self, name: str, values: Tensor) -> Tensor:
        raise NotImplementedError

    def _dropout(self, value: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
        """Compute the fused kernel from a mask that is drawn, or played back, apart."""
        keep = 1.0 - p if train else 1.0
        mask = self._drawn("native_dropout", torch.empty_like(value, dtype=torch.float32).bernoulli_(keep))
        return value * mask.to(value.dtype) / max(keep, 1e-12), mask.bool()

    def __enter__(self) -> Any:
        self._other_states = _other_random_states()
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        if error is None and _other_random_states() != self._other_states:
            raise BatchCouplingError(SHARED_DRAW.format(what="by Python's or numpy's global generator"))


class _Recording(_SeededDraws):
    def __init__(self, draws: list[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._draws = draws

    def _drawn(self, name: str, values: Tensor) -> Tensor:
        self._draws.append((name, values.detach().clone()))
        return values


class _Playing(_SeededDraws):
    def __init__(self, draws: list[tuple[str, Tensor]], rows: int, row: int | None, order: Order) -> None:
        super().__init__()
        self._draws, self._rows, self._row, self._order = draws, rows, row, order
        self._next = 0

    def _drawn(self, name: str, values: Tensor) -> Tensor:
        if self._next >= len(self._draws) or self._draws[self._next][0] != name:
            raise BatchCouplingError(
                f"the forward draws other random numbers ({name}) for an example alone than within a stack: what it "
                "draws may depend on nothing but the shape of its input"
            )
        recorded = self._draws[self._next][1]
        self._next += 1
        with torch.no_grad():
            return values.copy_(recorded if self._row is None else self._share(name, recorded, values.shape))

    def _share(self, name: str, recorded: Tensor, shape: torch.Size) -> Tensor:
        """The part of a recorded draw that belongs to the row, of the shape that it has alone."""
        assert self._row is not None
        if recorded.dim() != len(shape) or self._rows * shape.numel() != recorded.numel():
            raise BatchCouplingError(SHARED_DRAW.format(what=f"{name} of shape {tuple(recorded.shape)}"))
        axes = [axis for axis, size in enumerate(shape) if recorded.shape[axis] != size]
        if not axes:  # a stack of one
            return recorded
        (axis,) = axes if len(axes) == 1 else (0,)
        if self._order is Order.ROW_MAJOR:
            return recorded.narrow(axis, self._row * shape[axis], shape[axis])
        return recorded.unflatten(axis, (shape[axis], self._rows)).select(axis + 1, self._row)


def _replaced(args: tuple[Any, ...], arguments: Any, values: dict[str, Any]) -> list[Any]:
    return [values.get(argument.name, given) for argument, given in zip(arguments, args, strict=False)]


def _given(kwargs: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in kwargs}


def _other_random_states() -> tuple[Any, Any]:
    """Generators that no kernel shows; their position, not their whole state."""
    _, keys, position, *_ = np.random.get_state()
    return hash(random.getstate()), (position, int(keys[0]))
