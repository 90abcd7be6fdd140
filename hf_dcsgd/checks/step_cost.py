"""What one step costs in time and memory, measured on a small batch and scaled to the size that is wanted."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.benchmark import Timer

from hf_dcsgd.ghost import GhostClipper, Units

# Per trainable parameter and 4 bytes each: gradient, two moments of Adam, and the sum, its noise and the noisy sum.
BUFFERS = 6


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors made and still alive inside the `with` block; `peak` is the most at one time.

    What existed before is not counted, nor are views of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._counted: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage_id(leaf) for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)}
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, Tensor) and _storage_id(leaf) not in given:
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _storage_id(tensor)
        if key in self._counted or tensor.is_meta:
            return
        self._counted.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.live -= size


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def measure_step(
    clipper: GhostClipper,
    losses_of: Callable[[], Tensor],
    units: Units | None = None,
    *,
    measured_size: int,
    batch_size: int,
    compare: bool = True,
) -> dict[str, Any]:
    """Measure a step on `batch_size` examples, in seconds and bytes, by `losses_of()` of `measured_size` examples.

    Time and activations grow with the number of examples; weights and buffers do not. `plain_seconds`, left out unless
    `compare`, is the same forward and backward without clipping. `units` says which rows are one example, where these
    have several.
    """
    parameters, clipped_sum = list(clipper.parameters.values()), clipper.zeros()

    def private() -> None:
        with clipper.over(units):
            norms = clipper.norms(losses_of())
            clipper.accumulate((1.0 / (norms + 1.0)).clamp(max=1.0), into=clipped_sum)

    def plain() -> None:
        torch.autograd.grad(losses_of().mean(), parameters, allow_unused=True)

    private()  # the first batch is checked against autograd, which later ones are not
    scale = batch_size / measured_size
    private_seconds = seconds_of(private)
    activations = _peak_bytes(private, parameters[0].device)
    trainable = sum(p.numel() for p in parameters)
    memory = {
        "weights": sum(p.numel() * p.element_size() for p in clipper.model.parameters()),
        "gradient_optimizer_noise": 4 * BUFFERS * trainable,
        "activations": int(scale * activations),
    }
    return {
        "batch_size": batch_size,
        "measured_size": measured_size,
        "seconds": scale * private_seconds,
        **({"plain_seconds": scale * seconds_of(plain)} if compare else {}),
        "bytes": {**memory, "total": sum(memory.values())},
        "device": str(parameters[0].device),
    }


def seconds_of(action: Callable[[], object]) -> float:
    """Take the fastest of a few runs: others share the machine."""
    timer = Timer("action()", globals={"action": action}, num_threads=torch.get_num_threads())
    return min(timer.timeit(1).mean for _ in range(3))


def _peak_bytes(action: Callable[[], None], device: torch.device) -> int:
    """Measure the most bytes at one time beyond weights and the clipped sum, which are counted elsewhere."""
    if device.type == "cuda":
        start = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        action()
        return int(torch.cuda.max_memory_allocated(device)) - int(start)
    with PeakMemory() as memory:
        action()
    return memory.peak
