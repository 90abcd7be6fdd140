"""What a rule returned, looked at: names and shapes in every batch, values where a batch is compared with autograd."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hf_dcsgd.ghost.contributions import Blocks, Contribution, Dense, OneHotRows, without_autocast
from hf_dcsgd.ghost.fallback import is_random, tensor_leaves
from hf_dcsgd.ghost.layout import Layout
from hf_dcsgd.ghost.recording import Call, Owner
from hf_dcsgd.ghost.refusals import UnsupportedModelError
from hf_dcsgd.ghost.registry import is_built_in
from hf_dcsgd.ghost.verification import differs, tolerance_of, unequal_weights

logger = logging.getLogger(__name__)


def apply_rule(owner: Owner, inputs: Tensor, output_grad: Tensor) -> dict[str, Contribution]:
    """Call the owner's rule; `UnsupportedModelError` where what it returns cannot be a gradient per example."""
    assert owner.rule is not None
    try:
        with torch.no_grad(), without_autocast(output_grad):
            found = owner.rule(owner.module, inputs, output_grad)
    except Exception as error:
        error.add_note(f"(raised in {_rule_of(owner)})")
        raise
    _require_fitting(owner, found, len(output_grad))
    return found


def _require_fitting(owner: Owner, found: Mapping[str, Contribution], n: int) -> None:
    for attribute, contribution in found.items():
        parameter = owner.module._parameters.get(attribute)
        if parameter is None:
            owned = ", ".join(repr(name) for name, p in owner.module._parameters.items() if p is not None)
            raise UnsupportedModelError(
                f"{_rule_of(owner)} returned a contribution to {attribute!r}, but the module's parameters are {owned}"
            )
        expected, got = _shapes(contribution, parameter.shape, n)
        if expected != got:
            raise UnsupportedModelError(
                f"{_rule_of(owner)} returned {type(contribution).__name__} of a wrong shape for {attribute!r}, shape "
                f"{tuple(parameter.shape)} for {n} examples: expected {_in_words(expected)}, got {_in_words(got)}"
            )


def complain_if_wrong(
    call: Call, found: Mapping[str, Contribution], output_grad: Tensor, layout: Layout, n: int
) -> None:
    """Name the rule where it disagrees with autograd through its module alone.

    Says nothing where that cannot be told, or where the rule is right: then something else uses the parameter. A rule
    of a user's is an error that its author can mend. One of ours is right for its class, so that something changed
    what this module computes: a warning, for one backward per example is exact for it all the same.
    """
    wrong = _wrong_attributes(call, found, output_grad, layout, n)
    if not wrong:
        return
    what = f"{_rule_of(call.owner)} is wrong: its contributions to {', '.join(wrong)} disagree with autograd"
    assert call.owner.rule is not None
    if not is_built_in(call.owner.rule):
        raise UnsupportedModelError(f"{what}. Correct the rule; without one, the module is run alone per example")
    logger.warning(
        "%s. Does a hook or another forward change the output? Exact and slow: one backward per example", what
    )


def _rule_of(owner: Owner) -> str:
    return f"the rule {getattr(owner.rule, '__qualname__', owner.rule)} for {owner}"


def _shapes(
    contribution: Contribution, shape: torch.Size, n: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the shapes that the contribution's tensors must have, and those that they have."""
    if isinstance(contribution, Dense):
        return [(n, *shape)], [tuple(contribution.value.shape)]
    positions = contribution.right.shape[1] if contribution.right.dim() > 1 else 1
    columns = (n, positions, shape[1:].numel())
    if isinstance(contribution, OneHotRows):
        return [(n, positions), columns], [tuple(contribution.index.shape), tuple(contribution.right.shape)]
    rows = (n, positions, shape[0] // positions) if isinstance(contribution, Blocks) else (n, positions, *shape[:1])
    return [rows, columns], [tuple(contribution.left.shape), tuple(contribution.right.shape)]


def _in_words(shapes: list[tuple[int, ...]]) -> str:
    return " and ".join(map(str, shapes))


def _wrong_attributes(
    call: Call, found: Mapping[str, Contribution], output_grad: Tensor, layout: Layout, n: int
) -> list[str]:
    """Run the module again and differentiate ⟨output, output gradient⟩, with unequal weights of the examples."""
    module = call.owner.module
    if is_random(module):
        return []
    parameters = {name: module._parameters[name] for name in call.owner.parameters}
    values = {name: p.detach().requires_grad_() for name, p in parameters.items() if p is not None}
    dtype = next(iter(values.values())).dtype

    def prepared(leaf: object) -> object:  # in full precision: what autocast did is not on record
        return leaf.detach().to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    scaled = output_grad.to(dtype, copy=True, memory_format=torch.contiguous_format)
    by_example = layout.batch_first(scaled, n)
    assert by_example is not None
    weights = unequal_weights(by_example)
    by_example.mul_(weights.view(-1, *[1] * (by_example.dim() - 1)))
    try:
        args, kwargs = tree_map(prepared, call.arguments)
        output = tensor_leaves(torch.func.functional_call(module, values, args, kwargs))[0]
        grads = torch.autograd.grad(output, list(values.values()), scaled, allow_unused=True)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return []
    tolerance = tolerance_of(found.values())
    wrong = []
    for (name, value), grad in zip(values.items(), grads, strict=True):
        expected = torch.zeros_like(value) if grad is None else grad.to_dense()
        if expected.isfinite().all() and differs([found[name]] if name in found else [], weights, expected, tolerance):
            wrong.append(repr(name))
    return wrong
