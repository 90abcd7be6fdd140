"""The check before training: ghost norms and clipped sum against plain autograd, on two made-up examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_dcsgd.ghost import BatchCouplingError, GhostClipper


class ParityError(RuntimeError):
    """The per-example gradients of this model cannot be trusted; training does not start."""


def synthetic_like(model: nn.Module, batch: Mapping[str, Any], keep_tokens: tuple[int, ...] = ()) -> dict[str, Any]:
    """A batch of the same shapes with made-up content: random tokens and numbers, full attention, zeros elsewhere.

    Where the vocabulary is not known, the tokens are those of the batch in another order.
    Special tokens, those in `keep_tokens` and those of the model's config, stay where they are and appear nowhere
    else, since some models look for them.
    """
    generator = torch.Generator().manual_seed(0)
    input_embeddings: Any = getattr(model, "get_input_embeddings", None)
    vocabulary: Any = getattr(input_embeddings(), "num_embeddings", None) if callable(input_embeddings) else None
    special = torch.tensor(sorted({*keep_tokens, *_config_tokens(model)}), dtype=torch.long)
    made = {}
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            made[name] = value
        elif value.is_floating_point():
            made[name] = torch.rand(value.shape, generator=generator).to(value)
        elif "input_ids" in name and vocabulary is None:
            made[name] = value.flatten()[torch.randperm(value.numel(), generator=generator)].view_as(value)
        elif "input_ids" in name:
            ordinary = torch.arange(vocabulary)
            ordinary = ordinary[~torch.isin(ordinary, special)]
            tokens = ordinary[torch.randint(len(ordinary), value.shape, generator=generator)].to(value)
            made[name] = torch.where(torch.isin(value, special.to(value)), value, tokens)
        else:
            made[name] = torch.ones_like(value) if "mask" in name else torch.zeros_like(value)
    return made


def _config_tokens(model: nn.Module) -> list[int]:
    """Ids of the tokens that a transformers config names (`eos_token_id` and the like)."""
    to_dict: Any = getattr(getattr(model, "config", None), "to_dict", None)
    named = [value for key, value in to_dict().items() if key.endswith("_token_id")] if callable(to_dict) else []
    return [token for value in named for token in (value if isinstance(value, list) else [value]) if token is not None]


def check_parity(clipper: GhostClipper, losses_of: Callable[[], Tensor], tolerance: float) -> None:
    """Raises `ParityError` unless norms and clipped sum agree with one autograd call per example on the same graph.

    `losses_of` runs the forward and returns the per-example losses.
    """
    parameters, clipped_sum = list(clipper.parameters.values()), clipper.zeros()
    with clipper:
        losses = losses_of()
        _require_usable(losses)
        each = [
            torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True) for loss in losses.unbind()
        ]
        norms = clipper.norms(losses)
        factors = torch.linspace(1.0, 0.5, len(losses), device=losses.device)
        clipper.accumulate(factors, into=clipped_sum)
    expected_norms = torch.stack([_norm(grads) for grads in each])
    _require_close("norms", norms, expected_norms, tolerance, expected_norms)
    for i, (name, found) in enumerate(clipper.unflatten(clipped_sum).items()):
        expected = sum(
            (f * grads[i] for f, grads in zip(factors, each, strict=True) if grads[i] is not None),
            torch.zeros_like(found),
        )
        _require_close(f"clipped sum of {name}", found, expected, tolerance, expected_norms.sum())


def check_independence(together: Tensor, alone: Tensor, tolerance: float) -> None:
    """Raises `BatchCouplingError` unless examples have the same losses within a batch and alone.

    Finds what gradients do not show: inputs that are centred, scaled or compared over the batch before any trainable
    layer sees them.
    """
    if together.shape != alone.shape or not torch.allclose(together, alone, rtol=tolerance, atol=tolerance):
        raise BatchCouplingError(
            "the loss of an example is another one within a batch than alone, so one example moves the gradients of "
            "others and clipping bounds nothing: nothing in it may be centred, scaled or compared over the batch"
        )


@contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """The train mode without dropout: every probability that has "drop" in its name, or is that of a dropout layer."""
    found = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
        and ("drop" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd)))
    ]
    try:
        for module, name, _ in found:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, value in found:
            setattr(module, name, value)


def check_order(norms: Tensor, of_the_reversed_batch: Tensor, tolerance: float) -> None:
    """Raises `BatchCouplingError` unless the norms of a batch that is turned around are turned around too."""
    if not torch.allclose(norms, of_the_reversed_batch.flip(0), rtol=tolerance, atol=tolerance * float(norms.max())):
        raise BatchCouplingError(
            "the gradient norms of a batch change when its examples come in another order: does the model sort them? "
            "Examples must keep their places, or gradients are taken for those of others"
        )


def _require_usable(losses: Tensor) -> None:
    if not losses.requires_grad:
        raise ParityError(
            "the losses of two made-up examples do not depend on any trainable parameter: is the output detached, or "
            "are all parameters that it uses frozen?"
        )
    if not losses.isfinite().all():
        raise ParityError(
            "the losses of two made-up examples are not finite: are there NaN or infinite values in the weights, or "
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
            "training would not be private, so it does not start. Select other trainable_layers, or freeze the module."
        )
