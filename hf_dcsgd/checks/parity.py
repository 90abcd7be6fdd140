"""Ghost norms and clipped sum against plain autograd, on a few synthetic examples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_dcsgd.ghost import GhostClipper, Units


class ParityError(RuntimeError):
    """The per-example gradients of this model cannot be trusted; training does not start."""


def check_parity(
    clipper: GhostClipper, losses_of: Callable[[], Tensor], tolerance: float, units: Units | None = None
) -> None:
    """Raise `ParityError` unless norms and clipped sum agree with one autograd call per example on the same graph.

    Args:
        clipper: The clipper to be checked.
        losses_of: Runs the forward and returns the per-example losses.
        tolerance: How far values may differ, relative to the norms.
        units: Which rows are one example; None where each is one.
    """
    parameters = list(clipper.parameters.values())
    clipped_sum = clipper.zeros()
    with clipper.over(units):
        losses = losses_of()
        _require_usable(losses)
        each = [
            torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True) for loss in losses.unbind()
        ]
        norms = clipper.norms(losses)
        factors = torch.linspace(1.0, 0.5, len(losses), device=losses.device)
        clipper.accumulate(factors, clipped_sum)
    expected_norms = torch.stack([_norm(grads) for grads in each])
    _require_close("norms", norms, expected_norms, tolerance, expected_norms)
    for i, (name, part) in enumerate(clipper.unflatten(clipped_sum).items()):
        expected = sum(
            (f * grads[i] for f, grads in zip(factors, each, strict=True) if grads[i] is not None),
            torch.zeros_like(parameters[i]),
        )
        _require_close(f"clipped sum of {name}", part, expected, tolerance, expected_norms.sum())


def _require_usable(losses: Tensor) -> None:
    if not losses.requires_grad:
        raise ParityError(
            "the losses of synthetic examples do not depend on any trainable parameter: is the output detached, or "
            "are all parameters that it uses frozen?"
        )
    if not losses.isfinite().all():
        raise ParityError(
            "the losses of synthetic examples are not finite: are there NaN or infinite values in the weights, or "
            "does the loss function make them?"
        )


def _norm(grads: tuple[Tensor | None, ...]) -> Tensor:
    squares = [grad.float().square().sum() for grad in grads if grad is not None]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def _require_close(what: str, found: Tensor, expected: Tensor, tolerance: float, scale: Tensor) -> None:
    error = (found - expected).abs().max().item()
    allowed = tolerance * scale.abs().max().item() + 1e-7
    if not error <= allowed:
        raise ParityError(
            f"per-example gradients do not agree with autograd ({what}: off by {error:.3g}, allowed {allowed:.3g}); "
            "training would not be private, so it does not start. Select other trainable_layers, or freeze the module"
        )
