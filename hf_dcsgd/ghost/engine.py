"""Per-example clipping in one backward pass: `GhostClipper`.

**Guarantee.** For per-example losses L_1 … L_n of a model whose forward treats examples independently, `norms` gives
‖∇L_i‖₂ over all trainable parameters, and `accumulate(f, into)` adds Σ_i f_i·∇L_i to the buffer `into`; removing
example i from the batch changes that sum by exactly f_i·∇L_i, so by at most C when f_i ≤ C / ‖∇L_i‖. `param.grad` is
neither read nor written.

| case                                       | behavior                                                           |
|--------------------------------------------|---------------------------------------------------------------------|
| example with NaN or infinite gradient      | its norm is non-finite, and it adds exactly nothing to the sum      |
| batch of size zero                         | norms of shape (0,), and the buffer stays as it is                 |
| example of several rows (`over(units)`)    | its rows are joined before the norm is taken (`units.py`)           |
| parameter used several times, tied weights | uses are added before the norm is taken: cross terms are exact      |
| module without a rule                      | that module alone is run again per example (`fallback.py`)          |
| parameter that no module call explains     | one backward per example for that parameter (`slow_path.py`)        |
| loss that mixes examples, BatchNorm        | refused (`verification.py`, `refusals.py`)                          |

How: a forward hook on each module that owns trainable parameters keeps its input and the gradient edge of its output;
one backward pass hands over the output gradients as it reaches them. Frozen modules are neither hooked nor
differentiated, no gradient of a parameter is computed by autograd. The first batch is checked against autograd, so a
use of a parameter that the hooks did not see is found, not lost.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from types import TracebackType

import torch
from torch import Tensor, nn

from hf_dcsgd.ghost.contributions import ClipFactors, Contribution, LastResult, without_autocast
from hf_dcsgd.ghost.fallback import batch_leaves, fallback_contributions, is_random
from hf_dcsgd.ghost.layout import Layout
from hf_dcsgd.ghost.norms import take_norms, trimmed, written
from hf_dcsgd.ghost.recording import Call, ForwardRecorder, Slot, find_owners, hand_over_grads, output_grads
from hf_dcsgd.ghost.refusals import UnsupportedModelError, may_change, refuse_changes, refuse_unsupported
from hf_dcsgd.ghost.registry import Rule
from hf_dcsgd.ghost.rule_checks import apply_rule, complain_if_wrong
from hf_dcsgd.ghost.slow_path import add_slow_sums, slow_norms
from hf_dcsgd.ghost.units import Units
from hf_dcsgd.ghost.verification import Layouts, unexplained_parameters

logger = logging.getLogger(__name__)

# The fallback and the slow path write gradients down per example; beyond this many numbers they are computed one by
# one instead, and twice.
_WRITTEN_ELEMENTS = 1 << 27


class GhostClipper:
    """Clips per example, as a context manager around the forward of one micro-batch.

    ```python
    clipper = GhostClipper(model)            # refuses unsupported modules, all at once
    clipped_sum = clipper.zeros()            # flat; clipper.unflatten(clipped_sum) names its parts
    with clipper:
        outputs = model(**inputs)            # labels kept out of the forward
        norms = clipper.norms(per_example_losses(model, outputs, labels))
        clipper.accumulate(clip_factors, into=clipped_sum)   # clipped_sum += Σ fᵢ·gᵢ
    ```
    """

    def __init__(self, model: nn.Module) -> None:
        refuse_unsupported(model)
        self.model = model
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise UnsupportedModelError("expected at least one trainable parameter, got none: everything is frozen")
        self.num_parameters = sum(p.numel() for p in self.parameters.values())
        self._shapes = {name: p.shape for name, p in self.parameters.items()}
        self._all_parameters = list(model.parameters())
        self._changeable = [(name, module) for name, module in model.named_modules() if may_change(module)]
        self._owners = find_owners(model)
        self._recorder = ForwardRecorder(model, self._owners)
        self.slow_parameters: set[str] = set()
        self.verifies_later = True
        self._is_settled = False
        self._layouts = Layouts(self._recorder)
        self._batch_leaves: dict[Slot, list[bool]] = {}
        # Sequences of module calls and rules (and the mode they ran in) already compared with autograd; with two
        # examples or more, coupling is seen too.
        self._verified: set[tuple[tuple[tuple[str, Rule | None], ...], bool, bool, bool]] = set()
        self._forget()

    def rules(self) -> dict[str, str]:
        """Map module paths to the rules that compute their contributions, for reports."""
        return {o.name: "fallback" if o.rule is None else o.rule.__name__ for o in self._owners}

    def reset_verification(self) -> None:
        """Have the next batch compared with autograd, whatever was compared before.

        With `verifies_later` off, no batch is compared from now on, and one that would have to be, or that needs the
        slow path, is refused: both take more backward passes, which other ranks must not be left without.
        """
        if self.verifies_later:
            self._verified.clear()
        else:
            self._is_settled = True

    def over(self, units: Units | None) -> GhostClipper:
        """Take `units` for the examples of the next forward, `with clipper.over(units):`; rows where it is None."""
        self._recorder.units = units
        return self

    def __enter__(self) -> GhostClipper:
        # The model's tree is walked until it is verified; from then on, what was found there is looked at.
        parameters = self._all_parameters if self._verified else self.model.parameters()
        if {id(p) for p in parameters if p.requires_grad} != {id(p) for p in self.parameters.values()}:
            raise RuntimeError(
                "requires_grad changed after GhostClipper(model) was made: select the trainable layers first, then "
                "make the clipper"
            )
        refuse_changes(self._changeable, self.parameters)
        self._recorder.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder.remove()
        self._forget()

    def _forget(self) -> None:
        self._recorder.forget()
        self._contributions: dict[str, list[Contribution]] | None = None
        self._losses: Tensor | None = None
        self._norms: Tensor | None = None

    # -- norms -------------------------------------------------------------------------------------------------------

    def norms(self, losses: Tensor) -> Tensor:
        """Compute ‖∇losses[i]‖₂ over all trainable parameters, (n,) in fp32, in one backward pass."""
        self._check(losses)
        if losses.shape[0] == 0:
            self._contributions, self._norms = {}, torch.zeros(0, device=losses.device)
            return self._norms
        self._recorder.recording = False
        try:
            contributions = self._gather(losses)
            squared = torch.zeros(losses.shape[0], device=losses.device)
            self._contributions = {}
            if contributions:
                with without_autocast(losses):
                    fast, self._contributions = take_norms(contributions, self._shapes)
                squared += fast.float()
            if self.slow_parameters:
                self._refuse_slow_path()
                slow, written_down = slow_norms(losses, self._slow(), _WRITTEN_ELEMENTS)
                squared += slow
                self._contributions |= written_down or {}
                self._losses = losses if written_down is None else None
        finally:
            self._recorder.recording = True
        self._norms = squared.sqrt()
        return self._norms

    def _slow(self) -> dict[str, nn.Parameter]:
        return {name: self.parameters[name] for name in sorted(self.slow_parameters)}

    def _refuse_slow_path(self) -> None:
        if self._is_settled:
            raise UnsupportedModelError(
                "these parameters need one backward pass per example, so that ranks would run different numbers of "
                f"passes; freeze them: {', '.join(sorted(self.slow_parameters))}"
            )

    def _check(self, losses: Tensor) -> None:
        if not self._recorder.installed:
            raise RuntimeError("norms() belongs inside `with clipper:`, after the forward")
        if losses.dim() != 1:
            raise ValueError(
                f"expected one loss per example, a tensor of shape (n,), got shape {tuple(losses.shape)}; "
                'compute the loss with reduction="none"'
            )
        if self._contributions is not None:
            raise RuntimeError("norms() was called twice for one forward; call accumulate() in between")
        if losses.shape[0] == 0:
            return
        if not self._recorder.calls and self._recorder.batch_size is None:
            raise RuntimeError("no trainable module was called inside `with clipper:`; run the model's forward there")
        if not losses.requires_grad:
            raise ValueError("the losses do not depend on any trainable parameter (was the forward run in no_grad?)")
        batch_size, units = self._recorder.batch_size, self._recorder.units
        if units is not None and batch_size and units.rows % batch_size:
            raise ValueError(f"expected units of {batch_size} rows, as the model's input has, got {units.rows}")
        examples = batch_size if units is None else units.count
        if examples is not None and examples != losses.shape[0]:
            raise ValueError(f"expected one loss per example, got {losses.shape[0]} losses for a batch of {examples}")

    def _gather(self, losses: Tensor) -> dict[str, list[Contribution]]:
        """Run the one backward pass and collect what each call adds to each parameter; checked the first time."""
        n, calls, units = losses.shape[0], self._recorder.calls, self._recorder.units
        called = tuple((call.owner.name, call.owner.rule) for call in calls)
        key = (called, self.model.training, units is not None, n > 1)
        verify = key not in self._verified
        if verify and self._is_settled:
            raise UnsupportedModelError(
                "expected the module calls that were compared with autograd before training, got others "
                f"({len(calls)} calls of modules with trained parameters): they depend on the examples"
            )
        decided = True
        if verify and n > 1:
            batchless, decided = self._layouts.learn(losses)
            self.slow_parameters |= batchless
        # The slow path needs the graph, and a fallback may end there.
        batches = [self._recorder.batch_of(call, n) for call in calls]
        layouts = [self._layouts.for_rule(call, batch) for call, batch in zip(calls, batches, strict=True)]
        keep_graph = verify or bool(self.slow_parameters) or None in layouts
        contributions: dict[str, list[Contribution]] = {}
        uses = Counter(name for call in calls for name in call.owner.parameters.values())
        lengths, inputs = LastResult(), LastResult()

        def collect(k: int, grads: list[Tensor | None]) -> None:
            for name, contribution in self._contributions_of(calls[k], grads, layouts[k], batches[k]):
                part = trimmed(contribution, lengths)
                part = part if units is None else units.joined(part, inputs)
                # Several uses are added up in the form that suits them all; the comparison needs to see dtypes.
                part = written(part) if uses[name] == 1 and not verify else part
                contributions.setdefault(name, []).append(part)
            if not keep_graph:
                calls[k].release()

        hand_over_grads(losses.sum(), calls, keep_graph, collect)
        contributions = {name: parts for name, parts in contributions.items() if name not in self.slow_parameters}
        if verify:
            fast = {name: p for name, p in self.parameters.items() if name not in self.slow_parameters}
            unexplained = unexplained_parameters(losses, fast, contributions, uses) if fast else []
            if unexplained:
                self._complain_of_wrong_rules(losses, layouts, set(unexplained))
                self.slow_parameters.update(unexplained)
            if unexplained is not None and decided:
                self._verified |= {key, (*key[:3], False)}
        self._recorder.forget_calls()  # frees what is needed no more
        return {name: parts for name, parts in contributions.items() if name not in self.slow_parameters}

    def _contributions_of(
        self, call: Call, grads: list[Tensor | None], layout: Layout | None, n: int
    ) -> Iterator[tuple[str, Contribution]]:
        wanted = {a: name for a, name in call.owner.parameters.items() if name not in self.slow_parameters}
        if not wanted or all(grad is None for grad in grads):
            return
        call.check_unchanged()
        if call.owner.rule is None:
            found = self._by_fallback(call, grads, n)
        else:
            found = None if grads[0] is None else self._by_rule(call, grads[0], layout, n)
        if found is None:
            self.slow_parameters.update(wanted.values())
            return
        for attribute, name in wanted.items():
            if attribute in found:
                yield name, found[attribute]

    def _by_rule(self, call: Call, grad: Tensor, layout: Layout | None, n: int) -> dict[str, Contribution] | None:
        if layout is None:
            return None if grad.any() else {}
        inputs, grad_by_example = layout.batch_first(call.input.detach(), n), layout.batch_first(grad, n)
        assert inputs is not None
        assert grad_by_example is not None
        return apply_rule(call.owner, inputs, grad_by_example)

    def _complain_of_wrong_rules(self, losses: Tensor, layouts: list[Layout | None], unexplained: set[str]) -> None:
        calls = self._recorder.calls
        grads = output_grads(losses.sum(), calls, keep_graph=True)
        for call, call_grads, layout in zip(calls, grads, layouts, strict=True):
            n = self._recorder.batch_of(call, len(losses))
            if layout is None or call_grads[0] is None or unexplained.isdisjoint(call.owner.parameters.values()):
                continue
            found = self._by_rule(call, call_grads[0], layout, n)
            assert found is not None
            complain_if_wrong(call, found, call_grads[0], layout, n)

    def _by_fallback(self, call: Call, grads: list[Tensor | None], n: int) -> dict[str, Contribution] | None:
        size = sum(self.parameters[name].numel() for name in call.owner.parameters.values())
        layouts = [Layout.BATCH_FIRST if g is None else self._layouts.of(call, n, k) for k, g in enumerate(grads)]
        axes = [layout.axis for layout in layouts if layout in (Layout.BATCH_FIRST, Layout.BATCH_SECOND)]
        if is_random(call.owner.module) or n * size > _WRITTEN_ELEMENTS or len(axes) < len(grads):
            return None
        sliced = batch_leaves(call.arguments, n)
        # A leaf that once had another first axis than the batch has none now either, whatever its size is.
        before = self._batch_leaves.setdefault(call.slot(), sliced)
        if len(before) == len(sliced):
            sliced = [now and then for now, then in zip(sliced, before, strict=True)]
        self._batch_leaves[call.slot()] = sliced
        try:
            return fallback_contributions(call.owner.module, call.arguments, sliced, grads, axes)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            logger.debug("the fallback cannot run %s alone: %s", call.owner, error)
            return None

    # -- the clipped sum ---------------------------------------------------------------------------------------------

    def zeros(self) -> Tensor:
        """Make a buffer for `accumulate`: zeros of shape (num_parameters,), fp32, or fp64 where a parameter is."""
        first = next(iter(self.parameters.values()))
        return torch.zeros(self.num_parameters, dtype=self._sum_dtype(), device=first.device)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Name the parts of a buffer: parameter name → view of the parameter's shape."""
        parts = flat.split([p.numel() for p in self.parameters.values()])
        return {name: part.view(p.shape) for (name, p), part in zip(self.parameters.items(), parts, strict=True)}

    def _sum_dtype(self) -> torch.dtype:
        return torch.float64 if any(p.dtype == torch.float64 for p in self.parameters.values()) else torch.float32

    def accumulate(self, clip_factors: Tensor, into: Tensor) -> None:
        """Add Σ_i clip_factors[i] · ∇losses[i] to `into`, a buffer as `zeros` makes it.

        Examples with a non-finite norm add exactly nothing.
        """
        if self._contributions is None or self._norms is None:
            raise RuntimeError("accumulate() needs norms() of this forward first")
        if clip_factors.shape != self._norms.shape:
            raise ValueError(
                f"expected one clip factor per example, shape {tuple(self._norms.shape)}, "
                f"got {tuple(clip_factors.shape)}"
            )
        if into.shape != (self.num_parameters,) or into.dtype != self._sum_dtype():
            raise ValueError(
                f"expected `into` of shape ({self.num_parameters},) and {self._sum_dtype()}, as zeros() makes it, got "
                f"shape {tuple(into.shape)} and {into.dtype}"
            )
        sums = self.unflatten(into)
        keep = self._norms.isfinite()
        broken, unusable = torch.stack([~keep.all(), (keep & ~clip_factors.isfinite()).any()]).tolist()
        if unusable:
            raise ValueError("expected finite clip factors for all examples of finite norm")
        # Multiplying a NaN by a factor of zero would leave a NaN: such examples are taken out, not weighted down.
        index = keep.nonzero().flatten() if broken else None
        factors = ClipFactors(clip_factors if index is None else clip_factors[index])
        with without_autocast(into):
            for name, parts in self._contributions.items():
                for part in parts:
                    (part if index is None else part.select(index)).add_weighted_sum(factors, sums[name])
        if self._losses is not None:
            self._recorder.recording = False
            add_slow_sums(self._losses, self._slow(), clip_factors, keep, sums)
            self._recorder.recording = True
        self._forget()
