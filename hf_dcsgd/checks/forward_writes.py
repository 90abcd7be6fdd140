"""What a forward pass writes into the model: running statistics, caches, re-normalised embeddings.

Clipping and noise guard gradients. A buffer or a frozen weight that the forward changes is a function of the private
batch too, is saved with the model, and would leave the run as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from hf_dcsgd.ghost import UnsupportedModelError

# Statistics are small. Larger tensors are compared by version and address in every step.
_COMPARED_NUMBERS = 1 << 16


@contextmanager
def refuse_forward_writes(model: nn.Module) -> Iterator[None]:
    """UnsupportedModelError when the block changed or replaced a buffer or a parameter, which are then named."""
    before = {name: _State(tensor) for name, tensor in _tensors(model)}
    yield
    after = dict(_tensors(model))
    written = sorted(
        name
        for name in before.keys() | after.keys()
        if name not in before or name not in after or before[name].differs(after[name])
    )
    if written:
        shown = ", ".join(written[:5]) + (f" and {len(written) - 5} more" if len(written) > 5 else "")
        raise UnsupportedModelError(
            f"the forward of {type(model).__name__} writes into the model itself: {shown}. What it writes follows "
            "from the private examples, and stays there without noise, for later steps or to be saved. Switch that "
            "off (running statistics, max_norm, spectral norm), keep the module in eval() mode, or make a cache at "
            "its full length at once"
        )


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_buffers(), model.named_parameters())


class _State:
    """Which tensor it is, where its numbers lie, how often it was written to; and the numbers, unless they are many.

    Batch normalisation, and whatever goes through `.data`, writes without counting.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._place = tensor, _place(tensor)
        self._value = tensor.detach().clone() if tensor.numel() <= _COMPARED_NUMBERS else None

    def differs(self, tensor: Tensor) -> bool:
        if tensor is not self._tensor or _place(tensor) != self._place:
            return True
        return self._value is not None and not _same_numbers(tensor.detach(), self._value)


def _place(tensor: Tensor) -> tuple[int | None, int | None]:
    version = None if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr() if tensor.layout == torch.strided else None


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if one.is_floating_point() or one.is_complex():
        return bool(((one == other) | (one.isnan() & other.isnan())).all())
    return torch.equal(one, other)
