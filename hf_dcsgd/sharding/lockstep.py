"""All ranks gather the same weights in the same order, or nothing is released.

A gather is a collective call without a name: when one rank gathers block 3 while another gathers block 5, both get a
mixture and neither gets an error. So ranks run the same number of passes by construction (`even_out`), nothing else
may run the model meanwhile (`Gate`), every gather is noted in a running checksum (`GatherLog`), and the checksums are
compared before each release (`Lockstep.holds`). Gathers have a process group of their own, so that none is ever taken
for a call of another kind: a rank with a pass too many waits, and the run ends after `ddp_timeout` seconds.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from hf_dcsgd.data.rows import Batch
from hf_dcsgd.privacy.randomness import secret_seed

# Another name in torch before 2.13.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class LockstepError(RuntimeError):
    """Ranks did not gather the same weights in the same order; the step under way was charged, and not released."""


class GatherLog:
    """Notes every gather in a number that depends on all of them and on their order."""

    def __init__(self) -> None:
        self._count, self._checksum = 0, 0

    def note(self, name: str) -> None:
        """Add a gather of the group of this name."""
        self._count += 1
        self._checksum = zlib.crc32(f"{name}\n".encode(), self._checksum)

    @property
    def value(self) -> int:
        """The number of gathers and their checksum, in 63 bits."""
        return (self._count % (1 << 31)) << 32 | self._checksum


class NotedAllGather:
    """How FSDP gathers a group: as it does by itself, after the gather was noted."""

    def __init__(self, name: str, log: GatherLog) -> None:
        self._name, self._log = name, log

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make the buffer that a gather writes to, or reads from."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Gather the pieces of all ranks; `LockstepError` where one of them does not take part."""
        self._log.note(self._name)
        try:
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        except RuntimeError as error:
            raise LockstepError(
                f"not all ranks came to gather the weights of {self._name or 'the model'}: one has ended, or runs the "
                "model a different number of times. Of a step under way nothing is released, and it is charged"
            ) from error


class Gate:
    """Keeps the model from running on some ranks only, as from a callback of the main process.

    Closed while a run is under way, but for what all ranks do alike: `with gate.opened():`.
    """

    def __init__(self) -> None:
        self.is_closed = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let the model run within the block."""
        was_closed, self.is_closed = self.is_closed, False
        try:
            yield
        finally:
            self.is_closed = was_closed

    def check(self, *_: Any) -> None:
        """Raise `LockstepError` where the model must not run."""
        if self.is_closed:
            raise LockstepError(
                "a model whose weights are sharded can run only where all ranks run it alike: during training, in "
                "its steps and in evaluate and predict. Leave it alone in callbacks, or wait until training ends"
            )


class Lockstep:
    """What all ranks have in common during a run; every method is a collective call."""

    def __init__(self, log: GatherLog, device: torch.device, timeout: timedelta | None = None) -> None:
        self._log, self._device = log, device
        self._group = distributed.new_group(timeout=timeout)

    def holds(self) -> bool:
        """Tell all ranks alike whether all of them have noted the same gathers; RuntimeError where one is missing."""
        value = torch.tensor([self._log.value, -self._log.value], dtype=torch.int64, device=self._device)
        distributed.all_reduce(value, op=distributed.ReduceOp.MAX, group=self._group)
        highest, lowest = value[0].item(), -value[1].item()
        return highest == lowest

    def common_random(self) -> random.Random:
        """Make a generator of random numbers that are the same on all ranks, and known to nobody else."""
        seed = torch.tensor([secret_seed() % (1 << 62)], dtype=torch.int64, device=self._device)
        distributed.broadcast(seed, src=0, group=self._group)
        return random.Random(seed.item())

    def even_out(self, micro_batches: Sequence[list[Batch]]) -> list[list[Batch]]:
        """Give every rank as many stacks per micro-batch as the rank with the most has; those added are empty."""
        counts = torch.tensor([len(stacks) for stacks in micro_batches], dtype=torch.int64, device=self._device)
        distributed.all_reduce(counts, op=distributed.ReduceOp.MAX, group=self._group)
        most = counts.tolist()
        return [stacks + [{}] * (count - len(stacks)) for stacks, count in zip(micro_batches, most, strict=True)]
