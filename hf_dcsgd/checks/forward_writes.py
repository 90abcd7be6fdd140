"""What a forward pass writes into the model: running statistics, caches, re-normalized embeddings.

Clipping and noise guard gradients. A buffer or a frozen weight that the forward changes is a function of the private
batch too, is saved with the model, and would leave the run as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_dcsgd.ghost import UnsupportedModelError

_SMALL = 1 << 16
_PLAIN = (Tensor, nn.Parameter)


class ForwardWrites:
    """Looks for tensors of a model that were written to, by version and address: cheap enough for every forward.

    `.data` and some kernels write without counting: `refused_by_value` compares the numbers themselves. A small buffer
    that is written anew with the numbers that it had from the start (frequencies of RoPE are) was not changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tree = _Tree(model)
        buffers = model.named_buffers()
        self._first = {name: tensor.detach().clone() for name, tensor in buffers if tensor.numel() <= _SMALL}

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Raise `UnsupportedModelError` where the block wrote to a buffer or a parameter, or replaced one."""
        before = {name: (tensor, *_place(tensor)) for name, tensor in self._tree.tensors()}
        yield
        after = dict(self._tree.tensors())
        changed = {
            name
            for name in before.keys() | after.keys()
            if name not in before or name not in after or not _is_same(before[name], after[name])
        }
        self._refuse({name for name in changed if not self._is_as_at_first(name, after.get(name))})

    @contextmanager
    def refused_by_value(self) -> Iterator[None]:
        """Do as `refused`, comparing every number: before training."""
        before = {name: tensor.detach().clone() for name, tensor in _tensors(self._model)}
        with self.refused():
            yield
        after = dict(_tensors(self._model))
        self._refuse({name for name, value in before.items() if not _same_numbers(after[name].detach(), value)})

    def _is_as_at_first(self, name: str, now: Tensor | None) -> bool:
        return now is not None and name in self._first and _same_numbers(now.detach(), self._first[name])

    def frozen_checksums(self) -> dict[str, int]:
        """Sum up the bits of every buffer and frozen parameter, which a run must leave as they were."""
        return {name: _checksum(tensor) for name, tensor in _tensors(self._model) if not tensor.requires_grad}

    def refuse_changes(self, checksums: dict[str, int]) -> None:
        """Raise `UnsupportedModelError` where a frozen tensor is not what it was."""
        now = self.frozen_checksums()
        self._refuse({name for name in checksums.keys() | now.keys() if checksums.get(name) != now.get(name)})

    def _refuse(self, names: set[str]) -> None:
        if names:
            listed = sorted(names)
            shown = ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
            raise UnsupportedModelError(
                f"{type(self._model).__name__}.forward modifies the model in place ({shown}). These values depend on "
                "private examples and would be saved without noise. Disable running statistics, max_norm or spectral "
                "norm, call eval() on the module, or preallocate the cache"
            )


class _Tree:
    """The modules of a model by their names, walked again where a child was added, removed or replaced."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._named_modules: list[tuple[str, nn.Module]] = [("", model)]
        self._children: list[nn.Module | None] = []

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """List buffers and parameters, as the model's own methods do at many times the cost."""
        if self._listed_children() != self._children:
            self._named_modules = list(self._model.named_modules())
            self._children = self._listed_children()
        seen: set[int] = set()
        for prefix, module in self._named_modules:
            for name, tensor in chain(module._buffers.items(), module._parameters.items()):
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    path = f"{prefix}.{name}" if prefix else name
                    if type(tensor) in _PLAIN:
                        yield path, tensor
                    else:
                        yield from _parts(path, tensor)

    def _listed_children(self) -> list[nn.Module | None]:
        return [child for _, module in self._named_modules for child in module._modules.values()]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in chain(model.named_buffers(), model.named_parameters()):
        yield from _parts(name, tensor)


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor; of one that is sharded over ranks the piece that is here, of a quantized one its parts."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            yield name, tensor.to_local()
    elif is_traceable_wrapper_subclass(tensor) and not tensor.requires_grad:
        for part in tensor.__tensor_flatten__()[0]:
            yield from _parts(f"{name}.{part}", getattr(tensor, part))
    else:
        yield name, tensor


def _place(tensor: Tensor) -> tuple[int | None, int | None]:
    version = None if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr() if tensor.layout == torch.strided else None


def _is_same(before: tuple[Tensor, int | None, int | None], after: Tensor) -> bool:
    """Tell whether a tensor is what it was, or was replaced by one with the same numbers."""
    tensor, *place = before
    if tuple(place) != _place(tensor):
        return False
    return tensor is after or _same_numbers(after.detach(), tensor.detach())


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return alike and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _checksum(tensor: Tensor) -> int:
    value = tensor.detach()
    value = (value.to_dense() if value.layout != torch.strided else value).contiguous().reshape(-1)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(value.element_size())
    return int(value.view(bits or torch.uint8).sum(dtype=torch.int64))
