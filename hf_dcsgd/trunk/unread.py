"""Leave out what nothing reads: positions of the last block behind its attention.

Classifiers of BERT's kind read the first position of the last block alone. Behind its attention a block treats each
position by itself, so that the others need not be computed there at all. Losses, gradients and norms stay what they
are, at about a third of the block's cost; `reads_first_position` sees to it on rows before this is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_dcsgd.ghost import BatchCouplingError, UnsupportedModelError
from hf_dcsgd.tasks.layer_selection import block_list
from hf_dcsgd.tasks.losses import unwrapped_model

# The first module behind the attention of a block that is given each position by itself, with what is added to it.
_BEHIND_ATTENTION = ("attention.output", "attention.LayerNorm", "sa_layer_norm")
Results = tuple[Tensor, Tensor]


class FirstPosition:
    """The last block of a model, of which only the first position may be asked for."""

    def __init__(self, behind_attention: nn.Module) -> None:
        self._behind_attention = behind_attention

    @classmethod
    def of(cls, model: nn.Module) -> FirstPosition | None:
        """Find the last block; None where none is known to be built like this."""
        base = unwrapped_model(model)
        try:
            last = list(base.get_submodule(block_list(base)).children())[-1]
        except ValueError:
            return None
        modules = dict(last.named_modules())
        return next((cls(modules[name]) for name in _BEHIND_ATTENTION if name in modules), None)

    @contextmanager
    def only(self) -> Iterator[None]:
        """Within the block, forwards go on from the first position alone."""

        def narrow(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(arg[:, :1] if isinstance(arg, Tensor) and arg.dim() == 3 else arg for arg in args)

        handle = self._behind_attention.register_forward_pre_hook(narrow)
        try:
            yield
        finally:
            handle.remove()


def reads_first_position(first: FirstPosition, results: Callable[[], Results], tolerance: float) -> bool:
    """Whether losses and norms, as `results` computes them, are the same without the other positions."""
    expected = results()
    try:
        with first.only():
            found = results()
    except (BatchCouplingError, UnsupportedModelError, IndexError, RuntimeError, TypeError, ValueError):
        return False  # something else takes the positions that are not there
    return all(
        torch.allclose(one, other, rtol=tolerance, atol=0.1 * tolerance * float(other.abs().max()))
        for one, other in zip(found, expected, strict=True)
    )
