"""What tests of sharding look at: fixed draws, norms, weights of every step, and the bytes that a rank holds."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from distributed_worker import patched
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.privacy.sampling import PoissonBatchSampler
from hf_dcsgd.sharding import trunk
from hf_dcsgd.sharding.groups import Group, sharding_groups
from hf_dcsgd.sharding.lockstep import NotedAllGather

RECORDS, BATCH = 96, 48


def global_draw(step: int) -> np.ndarray:
    """The draw of a step over all ranks: the second is empty, the third gives rank 0 everything."""
    if step == 1:
        return np.array([], dtype=np.int64)
    drawn = np.flatnonzero(np.random.default_rng(step).random(RECORDS) < BATCH / RECORDS)
    return drawn[drawn % 12 == 0] if step == 2 else drawn


@contextmanager
def fixed_draws(most: int = RECORDS) -> Iterator[None]:
    """Let all ranks draw what `global_draw` says, the first of it if there are too many."""
    step = iter(range(10_000))

    def draw(self: PoissonBatchSampler) -> np.ndarray:
        indices = global_draw(next(step))[:most]
        return indices[indices % self.world_size == self.rank]

    with patched(PoissonBatchSampler, "draw", draw):
        yield


@contextmanager
def recorded_norms() -> Iterator[list[Tensor]]:
    """The norms of this rank's examples, step by step."""
    seen: list[Tensor] = []
    under_way: list[Tensor] = [torch.zeros(0)]
    original_factors, original_release = DPMechanism.clip_factors, DPMechanism.release

    def clip_factors(self: DPMechanism, per_example_norms: Tensor, *args: Any) -> Tensor:
        under_way.append(per_example_norms.clone())
        return original_factors(self, per_example_norms, *args)

    def release(self: DPMechanism, clipped_sum: Tensor) -> Any:
        seen.append(torch.cat(under_way))
        del under_way[1:]
        return original_release(self, clipped_sum)

    with patched(DPMechanism, "clip_factors", clip_factors), patched(DPMechanism, "release", release):
        yield seen


def digest(model: nn.Module) -> str:
    """One hash over every bit of all weights, gathered where they are in pieces: call it on all ranks."""
    state = hashlib.sha256()
    for name, parameter in model.named_parameters():
        whole = parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        state.update(name.encode() + whole.float().numpy().tobytes())
    return state.hexdigest()


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def held_bytes(model: nn.Module) -> int:
    """What this rank holds of the parameters now, in pieces or whole."""
    with torch.no_grad():
        return nbytes(p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class EveryStep(hf.TrainerCallback):
    """Notes the trained weights before every step, all bits after it, and what this rank holds after it.

    Where weights are given, every step starts from them: so another number of ranks is compared with at the same ones,
    rather than at those that rounding has led it to.
    """

    def __init__(self, weights: list[Tensor] | None = None) -> None:
        self.given = weights
        self.weights: list[Tensor] = []
        self.digests: list[str] = []
        self.held: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        trained = trained_parameters(model)
        if self.given is not None:
            nn.utils.vector_to_parameters(self.given[state.global_step].clone(), trained)
        self.weights.append(nn.utils.parameters_to_vector(trained).detach().clone())

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.digests.append(digest(model))
        self.on_evaluate(args, state, control, model)

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.held.append(held_bytes(model))


@contextmanager
def watched_weights(model: nn.Module) -> Iterator[dict[str, int]]:
    """What a rank holds of the parameters at the worst moment: looked at when FSDP takes or frees memory for them.

    Storages are counted, so that nothing depends on what a parameter says about itself. `groups` is how many groups
    are whole at once, `peak` the bytes of pieces, trained and whole parameters, `buffered` the same with the buffers
    in which pieces arrive, and `ahead` how many groups are under way to be whole when one has run backwards.
    """
    found = {"groups": 0, "peak": 0, "buffered": 0, "ahead": 0}
    buffers: list[weakref.ref[torch.UntypedStorage]] = []
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    fsdp_groups = [group for state in states for group in state._fsdp_param_groups]
    # The first is that of the model itself: what belongs to no block.
    everywhere, *blocks = [group.fsdp_params for group in fsdp_groups]
    idle = nbytes(p for p in model.parameters() if not isinstance(p, DTensor))
    for group in (everywhere, *blocks):
        idle += storage_bytes(p._sharded_param_data for p in group)

    def note(name: str, value: int) -> None:
        found[name] = max(found[name], value)

    def in_buffers() -> int:
        alive = [storage for storage in (buffer() for buffer in buffers) if storage is not None]
        return sum(storage.nbytes() for storage in alive)

    def look() -> None:
        taken = [sum(storage_bytes(p.all_gather_outputs) for p in group) for group in blocks]
        now = idle + sum(taken) + sum(storage_bytes(p.all_gather_outputs) for p in everywhere)
        note("groups", sum(size > 0 for size in taken))
        note("peak", now)
        note("buffered", now + in_buffers())

    def allocate(self: NotedAllGather, *args: Any, **kwargs: Any) -> Tensor:
        buffer = original_allocate(self, *args, **kwargs)
        buffers.append(weakref.ref(buffer.untyped_storage()))
        look()
        return buffer

    def alloc_all_gather_outputs(self: FSDPParam) -> None:
        original_outputs(self)
        look()

    def free_unsharded_param(self: FSDPParam) -> None:
        if torch._C._current_graph_task_id() != -1:  # in a backward pass
            note("ahead", sum(group._all_gather_result is not None for group in fsdp_groups))
        original_free(self)

    original_allocate, original_outputs = NotedAllGather.allocate, FSDPParam.alloc_all_gather_outputs
    original_free = FSDPParam.free_unsharded_param
    with (
        patched(NotedAllGather, "allocate", allocate),
        patched(FSDPParam, "alloc_all_gather_outputs", alloc_all_gather_outputs),
        patched(FSDPParam, "free_unsharded_param", free_unsharded_param),
    ):
        yield found


@contextmanager
def counted_leftovers() -> Iterator[list[int]]:
    """How many tensors that were sharded are still there, before each further group is, and at the end."""
    seen: list[int] = []
    done: list[weakref.ref[nn.Parameter]] = []
    original = trunk._shard

    def count() -> None:
        seen.append(sum(reference() is not None for reference in done))

    def shard(group: Group, *args: Any) -> None:
        count()
        done.extend(map(weakref.ref, group.parameters.values()))
        original(group, *args)

    with patched(trunk, "_shard", shard):
        yield seen
    count()


@contextmanager
def resident_bytes() -> Iterator[list[int]]:
    """The most memory that this process took within the block, beyond what it had; mapped files do not count."""
    most = [0]
    is_over = threading.Event()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = anonymous_bytes()

    def watch() -> None:
        while not is_over.wait(0.002):
            most[0] = max(most[0], anonymous_bytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        is_over.set()
        thread.join()


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def allowed_bytes(model: nn.Module, ranks: int) -> dict[str, int]:
    """What the parameters of a rank may take: trained, pieces, and what is gathered; rows are dealt out evenly."""

    def dealt(parameters: Iterable[nn.Parameter]) -> int:
        rows = [(p, -(-p.shape[0] // ranks) * ranks) for p in parameters]
        return sum(count * (p.numel() // p.shape[0]) * p.element_size() for p, count in rows)

    groups = [list(group.parameters.values()) for group in sharding_groups(model)]
    *blocks, rest = map(dealt, groups)
    return {
        "trained": nbytes(trained_parameters(model)),
        "frozen": sum(blocks) + rest,
        "block": max(blocks),
        "rest": rest,
        "padding": max(dealt(group) - nbytes(group) for group in groups),
    }
