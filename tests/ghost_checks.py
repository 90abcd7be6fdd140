"""One run of the clipper against autograd, for small models of the tests."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from oracles import (
    Gradients,
    LossFunction,
    clip_factors,
    clipped_sum_of,
    gradients_of,
    gradients_one_by_one,
    norms_of,
)
from torch import Tensor, nn

from hf_dcsgd.ghost import GhostClipper
from hf_dcsgd.tasks.losses import per_example_losses


def squared_output(model: nn.Module, output: Tensor, labels: Any = None) -> Tensor:
    """A loss without labels: the squared length of each example's output."""
    return output.flatten(1).square().sum(1)


def gradients_on_one_graph(
    model: nn.Module, inputs: Mapping[str, Tensor], labels: Any, losses: LossFunction, seed: int
) -> list[Gradients]:
    """∇L_i of each example within one forward of the batch, with the dropout masks that `seed` draws."""
    torch.manual_seed(seed)
    return [gradients_of(loss, model) for loss in losses(model, model(**inputs), labels)]


def run(
    clipper: GhostClipper,
    inputs: Mapping[str, Tensor],
    labels: Any = None,
    losses: LossFunction = per_example_losses,
    factors: Tensor | None = None,
    seed: int = 0,
    around_forward: Any = contextlib.nullcontext,
    into: Tensor | None = None,
) -> Tensor:
    """Norms of one micro-batch, after accumulating it (with factors of one unless told otherwise)."""
    torch.manual_seed(seed)
    with clipper:
        with around_forward():
            output = clipper.model(**inputs)
            per_example = losses(clipper.model, output, labels)
        norms = clipper.norms(per_example)
        clipper.accumulate(
            torch.ones_like(norms) if factors is None else factors, clipper.zeros() if into is None else into
        )
    return norms


def assert_sum(clipper: GhostClipper, clipped_sum: Tensor, expected: Mapping[str, Tensor], rtol: float = 1e-4) -> None:
    """The parts of the sum are the expected ones, and nothing was left where others would find it."""
    found = clipper.unflatten(clipped_sum)
    assert all(p.grad is None for p in clipper.model.parameters())
    length = torch.stack([value.norm() for value in expected.values()]).norm()
    assert set(found) == set(expected)
    for name, value in expected.items():
        error = (found[name].double() - value).norm()
        assert error <= rtol * torch.maximum(value.norm(), 1e-2 * length), (name, error, value.norm())


def check_exact(
    clipper: GhostClipper | nn.Module,
    inputs: Mapping[str, Tensor],
    labels: Any = None,
    losses: LossFunction = squared_output,
    *,
    alone: bool = True,
    rtol: float = 1e-4,
    seed: int = 0,
) -> GhostClipper:
    """Norms, and sums clipped at the median norm, are those of autograd; `alone=False` where dropout is active.

    Once as in a first batch, which is compared with autograd inside too, and once as in later ones.
    """
    clipper = clipper if isinstance(clipper, GhostClipper) else GhostClipper(clipper)
    model = clipper.model
    if alone:
        n = len(next(iter(inputs.values())))
        gradients = gradients_one_by_one(model, inputs, torch.zeros(n) if labels is None else labels, losses)
    else:
        gradients = gradients_on_one_graph(model, inputs, labels, losses, seed)
    expected = norms_of(gradients)
    factors = clip_factors(expected, expected.median().item())
    for _ in range(2):
        clipped_sum = clipper.zeros()
        norms = run(clipper, inputs, labels, losses, factors, seed, into=clipped_sum)
        torch.testing.assert_close(norms.double(), expected, rtol=rtol, atol=1e-7)
        assert_sum(clipper, clipped_sum, clipped_sum_of(gradients, factors), rtol)
    return clipper
