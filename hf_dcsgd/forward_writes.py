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
            "from the private examples and is saved without noise. Switch that off (running statistics, max_norm, "
            "spectral norm, a cache), or keep the module in eval() mode"
        )


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_buffers(), model.named_parameters())


class _State:
    """Which tensor it is, and how often it was written to; batch normalisation writes without counting."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version
        is_statistic = tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)
        self._value = tensor.clone() if is_statistic else None

    def differs(self, tensor: Tensor) -> bool:
        if tensor is not self._tensor or tensor._version != self._version:
            return True
        return self._value is not None and not torch.equal(tensor, self._value)
