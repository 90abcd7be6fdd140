"""Checks on the first batch: examples do not touch each other, and the hooks saw every use of a parameter."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_dcsgd.ghost.contributions import Blocks, ClipFactors, Contribution, Dense, Outer
from hf_dcsgd.ghost.layout import Layout, fitting_layouts
from hf_dcsgd.ghost.norms import squared_norms
from hf_dcsgd.ghost.quarantine import is_finite, quarantined_grad
from hf_dcsgd.ghost.recording import Call, ForwardRecorder, Owner, Slot, output_grads
from hf_dcsgd.ghost.refusals import BatchCouplingError

# How far the hooks' total may lie from autograd's before the hooks are taken to have missed a use.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}


@dataclass
class FoundLayouts:
    """`batchless` outputs only looked like batches; `undecided` ones had several layouts and no gradient to tell."""

    known: dict[Slot, Layout] = field(default_factory=dict)
    batchless: set[Slot] = field(default_factory=set)
    undecided: set[Slot] = field(default_factory=set)


class Layouts:
    """Where the batch is in inputs and outputs of all calls, as learned from the first batch or as shapes say."""

    def __init__(self, recorder: ForwardRecorder) -> None:
        self._recorder = recorder
        self._known: dict[Slot, Layout] = {}

    def learn(self, losses: Tensor) -> tuple[set[str], bool]:
        """Look for the batch in all outputs, and refuse mixed examples.

        Returns the parameters of calls without a batch, and False where the next batch must tell of some output.
        """
        found = find_layouts(losses, self._recorder)
        self._known.update(found.known)
        batchless = {
            name
            for call in self._recorder.calls
            if any(call.slot(k) in found.batchless for k in range(len(call.edges)))
            for name in call.owner.parameters.values()
        }
        return batchless, not found.undecided

    def of(self, call: Call, n: int, output: int = 0) -> Layout | None:
        """Tell where the batch is in this output of a call; None: nowhere."""
        if output >= len(call.output_shapes):
            return None
        fitting = fitting_layouts(call.output_shapes[output], n, self._recorder.positions)
        known = self._known.get(call.slot(output))
        if known is not None:
            return known if known in fitting else None
        units = self._recorder.units
        is_alone = n == 1 if units is None else units.count == 1
        return fitting[0] if fitting and (is_alone or len(fitting) == 1) else None

    def for_rule(self, call: Call, n: int) -> Layout | None:
        """Tell where the batch is in input and output of a call with a rule; None where the rule does not apply."""
        if call.owner.rule is None or not isinstance(call.input, Tensor):
            return None
        layout = self.of(call, n)
        return None if layout is None or layout.batch_first(call.input, n) is None else layout


def find_layouts(losses: Tensor, recorder: ForwardRecorder) -> FoundLayouts:
    """Find where the batch is in each owner's outputs, by differentiating single examples' losses.

    What example k's loss touches must be the slices of k in each output; one that touches others is refused. Two
    examples are probed, because one alone cannot tell (batch, position) from (position, batch) when only one position
    matters; more where two leave a doubt. Outputs of other shapes have no batch (a table of relative positions), and
    those that have such a shape by accident are told apart by running the forward with one example less.
    """
    n, calls = losses.shape[0], recorder.calls
    possible = {
        call.slot(k): fitting
        for call in calls
        for k, shape in enumerate(call.output_shapes)
        if (fitting := fitting_layouts(shape, recorder.batch_of(call, n), recorder.positions))
    }
    touched: set[Slot] = set()
    finite = losses.detach().isfinite().nonzero().flatten().tolist()
    refuted: dict[Slot, tuple[Owner, list[Layout]]] = {}
    for probe, example in enumerate(dict.fromkeys([*finite[:1], *finite[-1:], *finite])):
        if probe >= 2 and all(len(layouts) == 1 for layouts in possible.values()):
            break
        for call, grads in zip(calls, output_grads(losses[example], calls, True, quarantined_grad), strict=True):
            others = recorder.others(call, example, losses)
            for slot, grad in ((call.slot(k), grad) for k, grad in enumerate(grads)):
                if grad is None or slot not in possible or not grad.any():
                    continue
                touched.add(slot)
                holding = [layout for layout in possible[slot] if layout.is_zero_at(grad, others)]
                if not holding:
                    refuted[slot] = (call.owner, possible.pop(slot))
                else:
                    possible[slot] = holding
    batchless = _batchless_or_refuse(refuted, recorder) if refuted else set()
    decided = {slot: layouts[0] for slot, layouts in possible.items() if len(layouts) == 1}
    doubtful = {slot for slot in possible if slot not in decided}
    return FoundLayouts(decided, batchless | (doubtful & touched), doubtful - touched)


def _batchless_or_refuse(refuted: Mapping[Slot, tuple[Owner, list[Layout]]], recorder: ForwardRecorder) -> set[Slot]:
    """Return the slots whose supposed batch axis keeps its size in a smaller batch; the others mix examples."""
    shapes = {call.slot(k): shape for call in recorder.calls for k, shape in enumerate(call.output_shapes)}
    smaller = recorder.shapes_without_last_example()
    batchless = {
        slot
        for slot, (_, layouts) in refuted.items()
        if slot in smaller and all(smaller[slot][x.axis] == shapes[slot][x.axis] for x in layouts)
    }
    coupled = {str(owner): None for slot, (owner, _) in refuted.items() if slot not in batchless}
    if coupled:
        raise BatchCouplingError(
            "the loss of one example depends on other examples of its batch: clipping no longer bounds any one "
            "example's influence. Seen in the gradients of:\n"
            + "\n".join(f"  {owner}" for owner in coupled)
            + "\nUse a loss and modules "
            "that treat each example alone (no in-batch negatives, no batch statistics, no balancing over the batch)."
        )
    return batchless


def unexplained_parameters(
    losses: Tensor,
    parameters: Mapping[str, nn.Parameter],
    contributions: Mapping[str, list[Contribution]],
    called: Container[str],
) -> list[str] | None:
    """List parameters whose gradient is not the sum of their contributions: a use that no hook saw, or a wrong rule.

    Only examples with a finite gradient are looked at; None when there is none. They have unequal weights, so that
    gradients given to the wrong example show too. `called` has the parameters of modules that were called.
    """
    keep = losses.detach().isfinite()
    for name, parts in contributions.items():
        if name in parameters:
            keep &= squared_norms(parts, parameters[name].shape).isfinite()
    index = keep.nonzero().flatten()
    if not len(index):
        return None
    weights = unequal_weights(losses[index])
    expected = quarantined_grad((losses[index] * weights).sum(), list(parameters.values()), allow_unused=True)
    if not all(grad is None or is_finite(grad) for grad in expected):
        return None
    tolerance = tolerance_of((part for parts in contributions.values() for part in parts), losses.dtype)
    unexplained = []
    for name, grad in zip(parameters, expected, strict=True):
        parts = [part.select(index) for part in contributions.get(name, [])]
        total = torch.zeros_like(parameters[name]) if grad is None else grad
        # Where no call uses it, a gradient counts even if it is zero as yet: behind a factor that starts at zero.
        if (grad is not None and name not in called) or differs(parts, weights, total, tolerance):
            unexplained.append(name)
    return unexplained


def unequal_weights(per_example: Tensor) -> Tensor:
    """Make a weight for each example, another one than its neighbors have; powers of two, which round nothing."""
    return 0.5 ** (torch.arange(len(per_example), device=per_example.device) % 4)


def differs(parts: Sequence[Contribution], weights: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Compare the weighted sum of contributions with autograd's."""
    found = torch.zeros(expected.shape, dtype=expected.dtype, device=expected.device)
    factors = ClipFactors(weights)
    for part in parts:
        part.add_weighted_sum(factors, found)
    return bool((found - expected).norm() > tolerance * expected.norm() + 1e-6)


def tolerance_of(contributions: Iterable[Contribution], *dtypes: torch.dtype) -> float:
    """Pick the tolerance for the coarsest dtype among the contributions and `dtypes`."""
    found = {torch.float64, *dtypes}
    for contribution in contributions:
        found.add(contribution.value.dtype if isinstance(contribution, Dense) else contribution.right.dtype)
        if isinstance(contribution, Outer | Blocks):
            found.add(contribution.left.dtype)
    return max(_TOLERANCE[dtype] for dtype in found)
