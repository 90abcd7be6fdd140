"""Watching a forward pass: which modules with trainable parameters were called, on what, with which output edges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.hooks import RemovableHandle

from hf_dcsgd.ghost.fallback import tensor_leaves
from hf_dcsgd.ghost.quarantine import shield_recurrent
from hf_dcsgd.ghost.registry import Rule, needs_input, rule_for
from hf_dcsgd.ghost.units import Units

Slot: TypeAlias = tuple[str, int, int]  # owner's name, which of its calls in one forward, which of its outputs


@dataclass(frozen=True)
class Owner:
    """A module that owns trainable parameters, the rule for it, and those parameters (attribute → name)."""

    name: str
    module: nn.Module
    rule: Rule | None
    parameters: dict[str, str]
    needs_input: bool

    def __str__(self) -> str:
        return f"{self.name or '(the model itself)'} ({type(self.module).__name__})"


@dataclass
class Call:
    """One forward call of an owner; an output that needs no gradient has no edge."""

    owner: Owner
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    edges: list[GradientEdge | None]
    output_shapes: list[torch.Size]
    occurrence: int  # 0 for the owner's first call in this forward

    def __post_init__(self) -> None:
        self._input_version = _version(self.input)

    @property
    def input(self) -> Any:
        args, kwargs = self.arguments
        return args[0] if args else next(iter(kwargs.values()), None)

    def slot(self, output: int = 0) -> Slot:
        return (self.owner.name, self.occurrence, output)

    def release(self) -> None:
        """Let go of the arguments."""
        self.arguments = ((), {})

    def check_unchanged(self) -> None:
        if _version(self.input) != self._input_version:
            raise RuntimeError(f"the input of {self.owner} was changed in place after its forward")


def find_owners(model: nn.Module) -> list[Owner]:
    """List every module with trainable parameters of its own.

    A parameter that an inner module owns too (BERT's tied output bias) belongs to the inner one: its rule accounts for
    it, and the outer module must not count it again.
    """
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    owners = []
    for name, module in model.named_modules():
        inner = {id(p) for child in module.children() for p in child.parameters()}
        owned = {
            attribute: names[id(p)]
            for attribute, p in module._parameters.items()
            if p is not None and p.requires_grad and id(p) not in inner
        }
        if owned:
            rule = rule_for(module)
            owners.append(Owner(name, module, rule, owned, rule is None or needs_input(rule, owned)))
    return owners


class ForwardRecorder:
    """Hooks the forward of all owners, from `install` to `remove`; what the hooks see is in `calls`.

    Calls outside of `recording` are ignored: gradient checkpointing runs the forward again during the backward.
    `units` says which rows are one example; None where each is one.
    """

    def __init__(self, model: nn.Module, owners: list[Owner], units: Units | None = None) -> None:
        self.units = units
        self._model = model
        self._owners = owners
        self._handles: list[RemovableHandle] = []
        self.recording = False
        self.forget()

    def forget_calls(self) -> None:
        self.calls: list[Call] = []

    def forget(self) -> None:
        self.forget_calls()
        self.batch_size: int | None = None
        self.positions = 1
        self._rows_are_examples = True
        self._seen: Counter[str] = Counter()
        self._model_arguments: Any = None

    @property
    def installed(self) -> bool:
        return bool(self._handles)

    def install(self) -> None:
        if self.installed:
            raise RuntimeError("`with clipper:` cannot be nested in itself: each module call would count twice")
        self._handles.append(self._model.register_forward_pre_hook(self._note_batch_size, with_kwargs=True))
        for owner in self._owners:
            if isinstance(owner.module, nn.RNNBase):
                self._handles += shield_recurrent(owner.module)
            # peft's prompts are looked up once and repeated behind the look-up: left to the slow path.
            if type(owner.module) is nn.Embedding and "prompt_encoder" not in owner.name.split("."):
                self._handles.append(owner.module.register_forward_pre_hook(self._give_batch))
            self._handles.append(owner.module.register_forward_hook(self._recorder_of(owner), with_kwargs=True))
        self.recording = True

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.recording = False
        self.units = None
        self.forget()

    def batch_of(self, call: Call, examples: int) -> int:
        """Return the size of the batch that a call saw: one entry per example, or per row of all examples."""
        return examples if self.units is None else self.units.batch_of(call.output_shapes, self.positions)

    def others(self, call: Call, example: int, losses: Tensor) -> Tensor:
        """Mark what is not this example's in the batch that a call saw."""
        if self.units is None:
            return torch.arange(len(losses), device=losses.device) != example
        return self.units.others(example, self.batch_of(call, len(losses)))

    def _note_batch_size(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (self.recording and torch.is_grad_enabled()):
            return
        self._model_arguments = (args, kwargs)
        for leaf in tree_flatten((args, kwargs))[0]:
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                self.batch_size = leaf.shape[0]
                # Tokens of shape (n, choices, T) become n·choices rows inside, and look-ups are to match those.
                has_rows_apart = self.units is not None and leaf.shape[0] != self.units.rows
                sizes = leaf.shape[2:] if has_rows_apart else leaf.shape[1:]
                self.positions = sizes[0] if sizes else 1
                self._rows_are_examples = leaf.is_floating_point() or leaf.dim() <= 2
                return

    def _give_batch(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Give every example its own look-up where position ids of shape (1, T) serve the whole batch."""
        n = self.batch_size if self._rows_are_examples else None
        n = n if self.units is None else self.units.rows
        if self.recording and n is not None and n > 1 and args and args[0].dim() > 1 and args[0].shape[0] == 1:
            return (args[0].expand(n, *args[0].shape[1:]), *args[1:])
        return None

    def _recorder_of(self, owner: Owner) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self.recording and torch.is_grad_enabled():
                outputs = tensor_leaves(output)
                edges = [get_gradient_edge(t) if t.requires_grad else None for t in outputs]
                shapes = [t.shape for t in outputs]
                called = _as_called(owner)
                arguments = (args, kwargs) if called.needs_input else _without_values(args, kwargs)
                self.calls.append(Call(called, arguments, edges, shapes, self._seen[owner.name]))
                self._seen[owner.name] += 1

        return record

    def shapes_without_last_example(self) -> dict[Slot, torch.Size]:
        """Return output shapes of the same forward with one example less; empty where that cannot be run.

        An axis that keeps its size is not the batch, even if its size happened to be the batch size.
        """
        arguments, n, units = self._model_arguments, self.batch_size, self.units
        again = ForwardRecorder(self._model, self._owners, None if units is None else units.without_last())
        if arguments is None or n is None:
            return {}
        keep: Any = slice(-1) if units is None else units.of_row[:: units.rows // n] != units.count - 1
        cut = tree_map(lambda x: x[keep] if isinstance(x, Tensor) and x.dim() and x.shape[0] == n else x, arguments)
        again.install()
        try:
            self._model(*cut[0], **cut[1])
        except (RuntimeError, ValueError, TypeError, IndexError):
            return {}
        else:
            return {call.slot(k): shape for call in again.calls for k, shape in enumerate(call.output_shapes)}
        finally:
            again.remove()


def output_grads(
    loss: Tensor, calls: list[Call], keep_graph: bool, differentiate: Any = None
) -> list[list[Tensor | None]]:
    """Compute gradients of the loss at every recorded output, call by call, in one backward pass."""
    edges = [edge for call in calls for edge in call.edges if edge is not None]
    differentiate = differentiate or torch.autograd.grad
    found = differentiate(loss, edges, retain_graph=keep_graph, allow_unused=True) if edges else ()
    remaining = iter(found)
    return [[None if edge is None else next(remaining) for edge in call.edges] for call in calls]


def hand_over_grads(
    loss: Tensor, calls: list[Call], keep_graph: bool, arrived: Callable[[int, list[Tensor | None]], None]
) -> None:
    """Call `arrived(k, gradients at the outputs of calls[k])` for every call, in one backward pass.

    Calls with one output are handed over as the pass reaches them, so that nothing of them need be held here; those
    at its ends, and those with several outputs, after it. Those that the loss does not depend on may be left out.
    """
    nodes = {edge.node for call in calls for edge in call.edges if edge is not None}
    inner, handles, later = _inner_nodes(nodes), [], []
    for k, call in enumerate(calls):
        edge = call.edges[0] if len(call.edges) == 1 else None
        if edge is not None and edge.node in inner:
            handles.append(edge.node.register_prehook(_handing_over(arrived, k, edge.output_nr)))
        else:
            later.append(k)
    try:
        grads = output_grads(loss, [calls[k] for k in later], keep_graph)
    finally:
        for handle in handles:
            handle.remove()
    for k in later:
        arrived(k, grads.pop(0))


def _handing_over(arrived: Callable[[int, list[Tensor | None]], None], k: int, output: int) -> Any:
    def hand_over(grads: tuple[Tensor | None, ...]) -> None:
        arrived(k, [grads[output]])

    return hand_over


def _inner_nodes(nodes: set[Any]) -> set[Any]:
    """Find those nodes of the graph behind which there is another one of them."""
    leads_to_one = dict.fromkeys(nodes, True)  # or is one itself
    return {node for node in nodes if any(_leads_to_one(found, leads_to_one) for found in _behind(node))}


def _leads_to_one(start: Any, known: dict[Any, bool]) -> bool:
    """Look for a node that is known to lead to one, as far down as it takes; what is learned is added to `known`."""
    if start in known:
        return known[start]
    path = [(start, iter(_behind(start)))]
    while path:
        node, behind = path[-1]
        for found in behind:
            if known.get(found):
                known.update({passed: True for passed, _ in path})
                return True
            if found not in known:
                path.append((found, iter(_behind(found))))
                break
        else:
            known[node] = False
            path.pop()
    return False


def _behind(node: Any) -> list[Any]:
    return [found for found, _ in node.next_functions if found is not None]


def _without_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Keep shapes alone, in tensors that no rule can compute with and that hold no memory."""
    return tree_map(lambda x: x.detach().to("meta") if isinstance(x, Tensor) else x, (args, kwargs))


def _as_called(owner: Owner) -> Owner:
    """Take the rule of a forward that was put in place of the module's own and brings one along (`ghost_rule`)."""
    rule = getattr(vars(owner.module).get("forward"), "ghost_rule", None)
    return owner if rule is None else replace(owner, rule=rule, needs_input=True)


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0
