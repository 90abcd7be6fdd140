"""Differentiating one example's loss in a batch where another example is not finite.

The other example's slice of the gradient is zero, but zero times a NaN activation is NaN: where a kernel adds up the
slices (the gradient of a parameter, a table of positions) one broken example would erase all others, and with them the
bound on its own influence. Here such activations count as zero, so that it adds what it should: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

# What an additive attention mask of -inf becomes: as good as -inf in a softmax, harmless when multiplied by zero.
_MASKED = -1e30


class _FiniteOperands(TorchDispatchMode):
    """Shows every kernel zeros in place of NaN and +inf, also in the activations saved by the forward."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.is_write:  # a buffer of the backward itself: what is written to a copy would be lost
                tree_map(_make_finite_, args[position] if position < len(args) else kwargs.get(argument.name))
        return func(*tree_map(_finite, args), **tree_map(_finite, kwargs))


def _has_non_finite(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not is_finite(value)


def _finite(value: Any) -> Any:
    return value.nan_to_num(nan=0.0, posinf=0.0, neginf=_MASKED) if _has_non_finite(value) else value


def _make_finite_(value: Any) -> None:
    if _has_non_finite(value):
        value.nan_to_num_(nan=0.0, posinf=0.0, neginf=_MASKED)


def quarantined_grad(loss: Tensor, inputs: Sequence[Any], **options: Any) -> tuple[Tensor | None, ...]:
    """Differentiate a loss that is finite itself: as `torch.autograd.grad`, dense, not poisoned by neighbors."""
    grads = torch.autograd.grad(loss, inputs, **{**options, "retain_graph": True})
    if not all(grad is None or is_finite(grad) for grad in grads):
        with _FiniteOperands():
            grads = torch.autograd.grad(loss, inputs, **{**options, "retain_graph": True})
    return tuple(grad if grad is None else grad.to_dense() for grad in grads)


def shield_recurrent(module: nn.RNNBase) -> list[RemovableHandle]:
    """Keep broken examples out of recurrent kernels, which hide their activations where nothing above can reach them.

    Such an example runs as zeros, and its outputs are NaN again: for itself nothing changes. Packed sequences pass as
    they are.
    """
    broken: list[Tensor | None] = []
    batch_axis = 0 if module.batch_first else 1

    def take_out(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        broken.append(None)
        if args and isinstance(args[0], Tensor) and args[0].dim() == 3:
            examples = args[0].detach().movedim(batch_axis, 0).flatten(1)
            # A bound below the largest float: products of larger numbers overflow inside.
            mask = ~(examples.abs() < 1e30).all(1)
            if mask.any():
                broken[-1] = mask
                shape = (-1, 1, 1) if batch_axis == 0 else (1, -1, 1)
                return (args[0].masked_fill(mask.view(shape), 0.0), *args[1:])
        return None

    def put_back(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        mask = broken.pop()
        if mask is None:
            return None
        first = output[0].masked_fill(mask.view((-1, 1, 1) if batch_axis == 0 else (1, -1, 1)), torch.nan)
        return (first, tree_map(lambda state: state.masked_fill(mask.view(1, -1, 1), torch.nan), output[1]))

    return [module.register_forward_pre_hook(take_out), module.register_forward_hook(put_back)]


def is_finite(value: Tensor) -> bool:
    return bool((value.coalesce().values() if value.is_sparse else value).isfinite().all())
