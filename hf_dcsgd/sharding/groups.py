"""Which frozen parameters are kept in pieces, and which are gathered together.

| part of the model                                   | kept                                         |
|-----------------------------------------------------|----------------------------------------------|
| trained parameters, adapters inside a block too     | whole on every rank                          |
| frozen parameters of a block                        | in pieces, gathered while that block runs    |
| frozen embeddings that nothing else uses            | in pieces, gathered while they are looked up |
| other frozen parameters, tied embeddings among them | in pieces, gathered while the model runs     |
| frozen numbers without an axis, and buffers         | whole on every rank: they are small          |
| frozen parameters that a block shares with others   | whole on every rank                          |
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn

from hf_dcsgd.tasks.loss_kind import unwrapped_model

# Lists of these are blocks themselves, not lists of blocks.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
EVERYTHING_TRAINED = (
    "fsdp shards frozen parameters, and every parameter of this model is trained. Sharding those needs clipped sums "
    "that are scattered over the ranks, and noise that each rank adds to its own piece alone, which is not built: "
    "train fewer trainable_layers or a LoRA adapter, or leave fsdp out"
)


@dataclass(frozen=True)
class Group:
    """Frozen parameters that are gathered together, when `module` runs; those of the whole model come last."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]

    @property
    def nbytes(self) -> int:
        """How many bytes the parameters have together."""
        return sum(p.numel() * p.element_size() for p in self.parameters.values())


def sharding_groups(model: nn.Module, block_classes: Collection[str] = ()) -> list[Group]:
    """Divide the frozen parameters of a model into groups, blocks first; ValueError where there are none.

    Blocks are the modules of the classes that are named, by default the entries of the outermost lists of modules.
    """
    shardable = {
        id(p): (name, p) for name, p in model.named_parameters() if not p.requires_grad and p.dim() > 0 and p.numel()
    }
    if not shardable:
        raise ValueError(EVERYTHING_TRAINED)
    for name, parameter in shardable.values():
        if type(parameter) is not nn.Parameter or not parameter.is_floating_point():
            raise ValueError(
                f"expected frozen parameters in fp32, bf16 or fp16 with fsdp, got {name} in {parameter.dtype} "
                f"({type(parameter).__name__}): quantized weights do not come apart in rows; leave fsdp out, or load "
                "them in bf16"
            )
    uses = _uses(model)
    groups: list[Group] = []
    within: set[int] = set()
    for name, module in [*_blocks(model, block_classes), *_embeddings(model)]:
        inside = {id(m) for m in module.modules()}
        # What other modules use as well must be there when they run.
        own = {key: p for key, (_, p) in shardable.items() if uses[key] <= inside}
        if own and not inside & within:
            groups.append(Group(name, module, {shardable[key][0]: p for key, p in own.items()}))
            within |= inside
    rest = {name: p for key, (name, p) in shardable.items() if not uses[key] & within}
    return [*groups, Group("", model, rest)]


def _uses(model: nn.Module) -> dict[int, set[int]]:
    """List, for each parameter, the modules that hold it."""
    uses: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                uses.setdefault(id(parameter), set()).add(id(module))
    return uses


def _blocks(model: nn.Module, classes: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    found: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        if classes:
            if type(module).__name__ in classes:
                found.append(name)
                yield name, module
        elif isinstance(module, nn.ModuleList):
            found.append(name)
            for key, block in module.named_children():
                if not isinstance(block, _CONTAINERS):
                    yield f"{name}.{key}", block
    if classes and not found:
        raise ValueError(
            f"expected transformer_layer_cls_to_wrap to name classes of blocks in {type(model).__name__}, got "
            f"{', '.join(classes)}"
        )


def _embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield plain embeddings before and after the blocks, where all of them is frozen."""
    base = unwrapped_model(model)
    names = {id(module): name for name, module in model.named_modules()}
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        get = getattr(base, getter, None)
        try:
            module = get() if callable(get) else None
        except NotImplementedError:  # models of images, some of them
            continue
        if not isinstance(module, nn.Module) or type(module) not in (nn.Embedding, nn.Linear):
            continue
        if id(module) in names and not any(p.requires_grad for p in module.parameters()):
            yield names[id(module)], module
