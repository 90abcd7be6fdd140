"""Normalization over features: LayerNorm, GroupNorm, nn.RMSNorm and the RMSNorm family of transformers.

All of them scale a normalized input x̂ by a trainable vector, so the gradient is Σ output_grad · x̂ over every axis that
the vector does not have. It is a vector per example: small enough to write down.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dcsgd.ghost.contributions import Contribution, Dense, working_precision
from hf_dcsgd.ghost.registry import register_recognized, register_rule, trainable


def _scale_and_shift(
    module: nn.Module, normalize: Callable[[], Tensor], output_grad: Tensor, summed: tuple[int, ...]
) -> dict[str, Contribution]:
    grad = working_precision(output_grad)
    contributions: dict[str, Contribution] = {}
    if trainable(module, "weight"):
        product = normalize().mul_(grad)
        contributions["weight"] = Dense(product.sum(summed) if summed else product)
    if trainable(module, "bias"):
        contributions["bias"] = Dense(grad.sum(summed) if summed else grad)
    return contributions


@register_rule(nn.LayerNorm, inputs_for=["weight"])
def layer_norm_rule(module: nn.Module, inputs: Tensor, output_grad: Tensor) -> dict[str, Contribution]:
    assert isinstance(module, nn.LayerNorm)
    shape, eps = module.normalized_shape, module.eps
    return _scale_and_shift(
        module,
        lambda: F.layer_norm(working_precision(inputs), shape, eps=eps),
        output_grad,
        tuple(range(1, inputs.dim() - len(shape))),
    )


@register_rule(nn.GroupNorm, inputs_for=["weight"])
def group_norm_rule(module: nn.Module, inputs: Tensor, output_grad: Tensor) -> dict[str, Contribution]:
    assert isinstance(module, nn.GroupNorm)
    groups, eps = module.num_groups, module.eps
    return _scale_and_shift(
        module,
        lambda: F.group_norm(working_precision(inputs), groups, eps=eps),
        output_grad,
        tuple(range(2, inputs.dim())),
    )


@register_rule(nn.RMSNorm)
def rms_norm_rule(module: nn.Module, inputs: Tensor, output_grad: Tensor) -> dict[str, Contribution]:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return _scale_and_shift(
        module,
        lambda: F.rms_norm(working_precision(inputs), weight.shape, eps=rms_epsilon(module)),
        output_grad,
        tuple(range(1, inputs.dim() - weight.dim())),
    )


def rms_epsilon(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def is_rms_norm(module: nn.Module) -> bool:
    """Tells whether this module's own autograd gradient agrees with the rule on random input.

    The family has dozens of classes, some with a unit offset (Gemma) or a gate (Mamba): the name alone proves nothing.
    """
    weight = module._parameters.get("weight")
    if len(module._parameters) != 1 or weight is None or weight.dim() != 1 or list(module.children()):
        return False
    if not type(module).__name__.endswith(("RMSNorm", "T5LayerNorm")) or rms_epsilon(module) is None:
        return False
    generator = torch.Generator().manual_seed(0)
    trial = torch.randn(weight.numel(), generator=generator).to(weight.device)
    inputs = torch.randn(2, 3, weight.numel(), generator=generator).to(weight.device) + 0.5
    output_grad = torch.randn(2, 3, weight.numel(), generator=generator).to(weight.device)

    def replaced(w: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"weight": w}, (inputs,))

    try:
        pullback = torch.func.vjp(replaced, trial)[1]
        (autograd,) = pullback(output_grad)
    except (TypeError, RuntimeError):
        return False
    normalized = F.rms_norm(inputs, weight.shape, eps=rms_epsilon(module))
    return torch.allclose(autograd, (output_grad * normalized).sum((0, 1)), rtol=1e-4, atol=1e-5)


register_recognized(is_rms_norm, rms_norm_rule)
