"""A model whose frozen parameters are in pieces, one per rank: `ShardedTrunk`.

**Guarantee.** While a block runs, forwards or backwards, its frozen parameters are whole and have, bit by bit, the
numbers that the main process had at the start; so norms and clipped sums of a rank's own examples are those of plain
data parallelism. Trained parameters are never in pieces, and no gradient of theirs is summed here. One block at a time
is whole, beside what belongs to no block, and outside of a pass nothing is.

FSDP2 (`fully_shard`) keeps, gathers and frees the pieces. It is given frozen parameters only, so that it has no
gradient to reduce.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_dcsgd.ghost import UnsupportedModelError
from hf_dcsgd.sharding.groups import Group, sharding_groups
from hf_dcsgd.sharding.lockstep import Gate, GatherLog, Lockstep, NotedAllGather


class ShardedTrunk:
    """Shards the frozen parameters of a model in place, over all ranks; a collective call.

    Every rank gets the weights of the main process, block by block: on the others they may be on the meta device, or
    zeros, as transformers leaves them there with `cpu_ram_efficient_loading`. What is trained, and buffers, come from
    the main process, too.

    Args:
        model: The model, with the layers to train selected; on the CPU, or on `device`.
        device: Where it is to run.
        block_classes: Names of classes that are sharded as one; by default the entries of lists of modules.
        timeout: How long a rank waits for the others.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        block_classes: Collection[str] = (),
        timeout: timedelta | None = None,
    ) -> None:
        if not hasattr(FSDPModule, "set_custom_all_gather"):
            raise ValueError(
                f"fsdp needs a release of torch that lets gathers be counted, 2.8 or later: {torch.__version__}"
            )
        groups = sharding_groups(model, block_classes)
        self.model = model
        self.log = GatherLog()
        self.lockstep = Lockstep(self.log, device, timeout)
        self.gate = Gate()
        mesh = DeviceMesh.from_group(distributed.new_group(timeout=timeout), device.type)
        sharded = {id(p) for group in groups for p in group.parameters.values()}
        whole = [p for p in model.parameters() if id(p) not in sharded]
        _take_from_main_process([*whole, *model.buffers()], device)
        for group in groups:
            _take_from_main_process(list(group.parameters.values()), device)
            _shard(group, mesh, self.log)
            group.module.register_forward_pre_hook(self.gate.check, prepend=True)
            group.parameters.clear()  # nothing else holds the whole tensors: they go before the next ones come
        self._sharded_modules: list[Any] = [group.module for group in groups]
        model.register_load_state_dict_pre_hook(_cut_loaded_weights)

    def prepare(self, accelerator: Any) -> None:
        """Have accelerate take the model as it is: without DDP, which cannot hold pieces, and has nothing to sum."""
        if not getattr(self.model, "_is_accelerate_prepared", False):
            accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
            self.model._is_accelerate_prepared = True  # type: ignore[assignment]

    def reset(self) -> None:
        """Start anew after a pass that broke off in the middle, on all ranks alike."""
        reset = getattr(self.model, "reset_iter_state", self.free)  # not in every release of torch
        reset()

    def free(self) -> None:
        """Free what a pass left whole, if it did."""
        for module in self._sharded_modules:
            module.reshard()


def has_pieces(module: nn.Module) -> bool:
    """Tell whether parameters of a module are in pieces."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def require_no_gradient_hooks(model: nn.Module) -> None:
    """Refuse hooks on the gradients of trained parameters: transformers has one that averages them over ranks."""
    for name, parameter in model.named_parameters():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter.requires_grad and (hooks or getattr(parameter, "_replicated_grad_hook_registered", False)):
            raise ValueError(
                f"expected no hooks on the gradients of trained parameters, found some on {name}: they would change "
                "gradients behind clipping and noise; pass a model that no other trainer has prepared"
            )


def _take_from_main_process(tensors: list[Tensor], device: torch.device) -> None:
    """Move tensors to the device, with the numbers that the main process has; whatever the others had is lost."""
    is_main_process = distributed.get_rank() == 0
    for tensor in tensors:
        # New memory on the others: theirs may be a file that is mapped, which writing would make resident.
        data = tensor.detach().to(device) if is_main_process else torch.empty_like(tensor, device=device)
        data = data.contiguous()
        distributed.broadcast(data, src=0)
        if tensor.is_meta:
            whole = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
            torch.utils.swap_tensors(tensor, whole)
        else:
            tensor.data = data


def _shard(group: Group, mesh: DeviceMesh, log: GatherLog) -> None:
    own = {id(p) for p in group.parameters.values()}
    holders = [
        (module, key) for module in group.module.modules() for key, p in module._parameters.items() if id(p) in own
    ]
    ignored = {p for p in group.module.parameters() if id(p) not in own}
    # True for the whole model, too: by default, an evaluation would leave its weights whole.
    sharded = fully_shard(group.module, mesh=mesh, reshard_after_forward=True, ignored_params=ignored)
    sharded.set_custom_all_gather(NotedAllGather(group.name, log))  # type: ignore[arg-type]
    # By default the next group would be fetched ahead in a backward pass. The group itself is whole by then.
    sharded.set_modules_to_backward_prefetch([sharded])
    _keep_class_name(group.module)
    _refuse_writes(group, holders)


def _keep_class_name(module: nn.Module) -> None:
    """Let the class that FSDP made keep the name of the original: tasks, cards and refusals go by it."""
    made, original = type(module), type(module).__mro__[2]
    made.__name__, made.__qualname__ = original.__name__, original.__qualname__


def _refuse_writes(group: Group, holders: list[tuple[nn.Module, str]]) -> None:
    """Raise `UnsupportedModelError` where a forward writes to weights that were gathered for it.

    The write is lost when they are freed, so that nobody would see it later; until then it mixes examples.
    """
    versions: list[tuple[Tensor, int]] = []
    name = group.name or "the model"

    def before(module: nn.Module, args: Any) -> None:
        gathered = [owner._parameters[key] for owner, key in holders]
        versions[:] = [(p, p._version) for p in gathered if p is not None and not p.is_inference()]

    def after(module: nn.Module, args: Any, output: Any) -> None:
        written = any(tensor._version != version for tensor, version in versions)
        versions.clear()
        if written:
            raise UnsupportedModelError(
                f"the forward of {name} ({type(module).__name__}) writes into its frozen "
                "weights, which then depend on private examples"
            )

    group.module.register_forward_pre_hook(before)  # after FSDP's own, which gathers
    group.module.register_forward_hook(after, prepend=True)  # before FSDP's own, which frees


def _cut_loaded_weights(module: nn.Module, state_dict: dict[str, Any], *_: Any) -> None:
    """Cut whole tensors of a state dict to the pieces of this rank, so that `load_state_dict` takes them."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, value in list(state_dict.items()):
        parameter = parameters.get(name)
        if isinstance(parameter, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
            whole = value.to(parameter.device, parameter.dtype)
            mesh, placements = parameter.device_mesh, parameter.placements
            state_dict[name] = distribute_tensor(whole, mesh, placements, src_data_rank=None)
