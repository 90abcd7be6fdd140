"""A model cut in two: the frozen blocks in front of the first trained one, and the rest.

The hidden states behind the frozen blocks are a function of the row alone and never change during a run. `FrozenTrunk`
computes them once (`capture`), and later feeds them in again (`feed`): frozen blocks are passed over, with the module
that hands the first of them its input (BERT's embeddings), and everything else (masks, positions, trained blocks,
poolers, heads) is computed by the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_dcsgd.tasks.layer_selection import block_list
from hf_dcsgd.tasks.loss_kind import unwrapped_model

# The entry of a stack that holds the hidden states at the cut.
TRUNK_ENTRY = "trunk_hidden_states"


class TrunkCacheError(ValueError):
    """The frozen part of this model cannot be computed once and for all; the message says why."""


class FrozenTrunk:
    """The blocks of a model in front of the first one with trained parameters.

    Raises `TrunkCacheError` where there is no such block, or where they cannot be told apart from the rest.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        base = unwrapped_model(model)
        if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
            raise TrunkCacheError("encoder-decoder models attend from every decoder block to the encoder")
        try:
            self.name = block_list(base)
        except ValueError as error:
            raise TrunkCacheError(str(error)) from error
        blocks = list(base.get_submodule(self.name).children())
        trained = [any(p.requires_grad for p in block.parameters()) for block in blocks]
        count = trained.index(True) if any(trained) else len(blocks)
        if count == 0:
            raise TrunkCacheError(f"the first block of {self.name} is trained, so no part of the model is frozen")
        self.blocks = blocks[:count]
        self._as_output: Callable[[Tensor], Any] = lambda hidden: hidden
        self._dtype = torch.float32
        self._front: nn.Module | None = None

    def __str__(self) -> str:
        return f"{len(self.blocks)} frozen blocks of {self.name}"

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what the hidden states at the cut depend on: frozen parameters and buffers, with their names."""
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if not tensor.requires_grad:
                yield name, tensor

    def capture(self, inputs: dict[str, Any]) -> Tensor:
        """Run the model up to the cut, in eval mode, and return the hidden states there: (rows, ...)."""
        seen: list[Any] = []
        early: list[str] = []

        def stop(module: nn.Module, args: Any, output: Any) -> None:
            seen.append(output)
            raise _CutReached

        front = _Front(self.model, self.blocks[0])
        handles = [self.blocks[-1].register_forward_hook(stop), *front.handles]
        for name, module in self.model.named_modules():
            if any(p.requires_grad for p in module.parameters(recurse=False)):
                handles.append(module.register_forward_pre_hook(_noting(early, name)))
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                self.model(**inputs)
        except _CutReached:
            pass
        finally:
            for handle in handles:
                handle.remove()
            self.model.train(was_training)
        if early:
            raise TrunkCacheError(f"{early[0]} is trained and comes before the frozen blocks of {self.name}")
        if not seen:
            raise TrunkCacheError(f"the forward does not call the blocks of {self.name} one by one")
        hidden_states = self._hidden_states(seen[0])
        self._dtype, self._front = hidden_states.dtype, front.found(hidden_states)
        return hidden_states

    def _hidden_states(self, output: Any) -> Tensor:
        """Take the hidden states out of a block's output, and remember in which form blocks return them."""
        if isinstance(output, Tensor):
            self._as_output = lambda hidden: hidden
            return output
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            if any(value is not None for value in output[1:]):
                raise TrunkCacheError(f"blocks of {self.name} hand on more than their hidden states")
            rest = output[1:]
            self._as_output = lambda hidden: (hidden, *rest)
            return output[0]
        raise TrunkCacheError(f"blocks of {self.name} return {type(output).__name__}, not their hidden states")

    @contextmanager
    def feed(self, hidden_states: Tensor) -> Iterator[None]:
        """Have the model pass over its frozen blocks within a block of code, and go on from these hidden states."""

        def last(*args: Any, **kwargs: Any) -> Any:
            return self._as_output(hidden_states.to(self._dtype))

        def earlier(*args: Any, **kwargs: Any) -> Any:
            return self._as_output(args[0] if args else kwargs["hidden_states"])

        forwards = dict.fromkeys(self.blocks[:-1], earlier) | {self.blocks[-1]: last}
        if self._front is not None:
            forwards[self._front] = lambda *args, **kwargs: hidden_states.to(self._dtype)
        for module, forward in forwards.items():
            module.forward = forward
        try:
            yield
        finally:
            for module in forwards:
                del module.forward


class _Front:
    """Looks for the module in front of the blocks: the outermost one whose output is what the first block is given."""

    def __init__(self, model: nn.Module, first_block: nn.Module) -> None:
        self._outputs: list[tuple[nn.Module, Tensor]] = []
        self._given: Any = None
        self.handles = [first_block.register_forward_pre_hook(self._note_given, with_kwargs=True)]
        self.handles += [
            module.register_forward_hook(self._note_output)
            for module in model.modules()
            if "forward" not in vars(module)
        ]

    def _note_given(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given = args[0] if args else kwargs.get("hidden_states")

    def _note_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._given is None and isinstance(output, Tensor):
            self._outputs.append((module, output))

    def found(self, hidden_states: Tensor) -> nn.Module | None:
        """Return the module if its output can be told from hidden states by its values alone; None otherwise."""
        named = [module for module, output in self._outputs if output is self._given]
        if not named or self._given.shape != hidden_states.shape or self._given.dtype != hidden_states.dtype:
            return None
        return named[-1]  # the outermost one ends last


class _CutReached(Exception):  # noqa: N818 (ends a forward that has done its work)
    pass


def _noting(names: list[str], name: str) -> Callable[..., None]:
    return lambda module, args: names.append(name)
