"""The random numbers of one forward pass on tape, so that one of its rows can be run again under the same ones.

A row of a stack has its own share of what the forward draws (its slice of every dropout mask). Run alone with that
share it must give the same loss, or something else than its own content plays a part.

Numbers that are drawn once for the whole stack (LayerDrop, stochastic depth per batch, a common rescaling) are
nobody's share. Many models draw such numbers and make no use of them; where they matter, which rows meet in a stack
would decide who gets which, and the model is refused (`preflight.py`).

Fused kernels that keep their masks to themselves run without dropout while the tape is on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dcsgd.ghost import BatchCouplingError

_OtherStates: TypeAlias = tuple[Any, Any]
_FUSED = {"dropout_p", "dropout"}  # arguments of kernels that keep their masks to themselves
_MASKS = ("native_dropout", "bernoulli", "bernoulli_")


class Order(Enum):
    """How the rows lie in an axis that holds other things too, such as attention heads or positions."""

    ROW_MAJOR = "rows first"
    ROW_MINOR = "rows last"


class RandomTape:
    """Records the draws of a forward on `rows` rows, then plays back those of some rows, or all of them.

    ```python
    tape = RandomTape(rows=len(losses))
    with tape.record():
        losses = forward(stack)
    with tape.play([3]):
        alone = forward(take_row(stack, 3))      # under the very masks that row 3 had
    ```
    """

    def __init__(self, rows: int, order: Order = Order.ROW_MAJOR) -> None:
        self.rows = rows
        self.order = order
        self.draws: list[tuple[str, Tensor]] = []
        self.states: _OtherStates = _other_states()
        # What a row alone draws as often as a whole stack; known once a row was played.
        self.shared_draws: set[int] = set()
        self.other_generators_used = False

    @property
    def shares_draws(self) -> bool:
        """Whether some random numbers belong to the stack as a whole."""
        return bool(self.shared_draws) or self.other_generators_used

    def record(self) -> TorchDispatchMode:
        return _Recording(self)

    def play(self, rows: Sequence[int] | None = None, variant: int | None = None) -> TorchDispatchMode:
        """Play back the draws of some rows, or of all.

        Args:
            rows: Which rows are run by themselves, those of one example; None for the whole stack.
            variant: Gives what is shared by the stack other values, different ones for each variant.
        """
        return _Playing(self, rows, variant)


class _SeededDraws(TorchDispatchMode):
    """Sees every kernel that draws from a generator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch loads its whole compiler, for seconds, to leave this mode alone

    def __init__(self, tape: RandomTape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return self._dropout(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        if not _FUSED.isdisjoint(names):
            off = {name: 0.0 if name in _FUSED else value for name, value in kwargs.items()}
            return func(*(0.0 if name in _FUSED else value for name, value in zip(names, args, strict=False)), **off)
        return self._drawn(name, func(*args, **kwargs))

    def _drawn(self, name: str, values: Tensor) -> Tensor:
        raise NotImplementedError

    def _dropout(self, value: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
        """Compute the fused kernel from a mask that is drawn, or played back, apart."""
        keep = 1.0 - p if train else 1.0
        mask = self._drawn("native_dropout", torch.empty_like(value, dtype=torch.float32).bernoulli_(keep))
        return value * mask.to(value.dtype) / max(keep, 1e-12), mask.bool()


class _Recording(_SeededDraws):
    def __enter__(self) -> Any:
        self._tape.states = _other_states()
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        self._tape.other_generators_used = not _same_states(_other_states(), self._tape.states)

    def _drawn(self, name: str, values: Tensor) -> Tensor:
        # Masks would take as much memory as the activations that they are for.
        kept = torch.bool if name in _MASKS else values.dtype
        self._tape.draws.append((name, values.detach().to(kept, copy=True)))
        return values


class _Playing(_SeededDraws):
    def __init__(self, tape: RandomTape, rows: Sequence[int] | None, variant: int | None) -> None:
        super().__init__(tape)
        self._rows, self._variant = rows, variant
        self._next = 0

    def __enter__(self) -> Any:
        self._states_before = _other_states()
        _set_other_states(self._tape.states)
        if self._variant is not None:
            random.seed(self._variant)
            np.random.seed(self._variant)
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        _set_other_states(self._states_before)

    def _drawn(self, name: str, values: Tensor) -> Tensor:
        index, tape = self._next, self._tape
        self._next += 1
        is_known = index < len(tape.draws) and tape.draws[index][0] == name
        if not is_known or (self._rows is None and tape.draws[index][1].shape != values.shape):
            raise BatchCouplingError(
                f"the forward draws other random numbers ({name}) for an example alone than within a stack: what it "
                "draws may depend on nothing but the shape of its input"
            )
        recorded = tape.draws[index][1]
        with torch.no_grad():
            if self._variant is not None and index in tape.shared_draws:
                # The extremes first: a number below a probability, and one above.
                return values.fill_(self._variant * 0.999) if self._variant < 2 else values
            return values.copy_(recorded if self._rows is None else self._share(index, recorded, values.shape))

    def _share(self, index: int, recorded: Tensor, shape: torch.Size) -> Tensor:
        """Return the part of a recorded draw that belongs to the rows, of the shape that it has by themselves."""
        assert self._rows is not None
        rows, taken = self._tape.rows, len(self._rows)
        if recorded.shape == shape:
            if rows > taken:
                self._tape.shared_draws.add(index)
            return recorded
        same_axes = recorded.dim() == len(shape)
        axes = [axis for axis, size in enumerate(shape) if same_axes and recorded.shape[axis] != size]
        if len(axes) != 1 or shape[axes[0]] % taken or recorded.shape[axes[0]] * taken != rows * shape[axes[0]]:
            raise BatchCouplingError(
                f"the forward draws random numbers of shape {tuple(recorded.shape)} for {rows} rows and "
                f"{tuple(shape)} for {taken} of them alone: how many it draws may not depend on the rest of the stack"
            )
        axis, share = axes[0], shape[axes[0]] // taken
        is_major = self._tape.order is Order.ROW_MAJOR
        by_row = recorded.unflatten(axis, (rows, share) if is_major else (share, rows))
        chosen = torch.tensor(self._rows, device=recorded.device)
        return by_row.index_select(axis if is_major else axis + 1, chosen).flatten(axis, axis + 1)


def _other_states() -> _OtherStates:
    """Take the states of the global generators that no kernel shows."""
    return random.getstate(), np.random.get_state()


def _set_other_states(states: _OtherStates) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _same_states(one: _OtherStates, other: _OtherStates) -> bool:
    return one[0] == other[0] and one[1][2] == other[1][2] and np.array_equal(one[1][1], other[1][1])
