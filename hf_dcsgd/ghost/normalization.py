"""Normalization over features: LayerNorm, GroupNorm, nn.RMSNorm and the RMSNorm family of transformers.

All of them scale a normalized input x̂ by a trainable vector, so the gradient is Σ output_grad · x̂ over every axis that
the vector does not have. It is a vector per example: small enough to write down.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dcsgd.ghost.contributions import Contribution, Dense, working_precision
from hf_dcsgd.ghost.registry import register_recognized, register_rule, trainable


def _scale_and_shift(
    module: nn.Module, normalize: Callable[[Tensor], Tensor], inputs: Tensor, output_grad: Tensor, summed: range
) -> dict[str, Contribution]:
    """Return the contributions to weight and bias, summed over these axes."""
    grad = working_precision(output_grad)
    values: dict[str, Tensor] = {}
    if trainable(module, "weight"):
        values["weight"] = normalize(working_precision(inputs)).mul_(grad)
    if trainable(module, "bias"):
        values["bias"] = grad
    return {name: Dense(value.sum(tuple(summed)) if summed else value) for name, value in values.items()}


@register_rule(nn.LayerNorm, inputs_for=["weight"])
def layer_norm_rule(module: nn.Module, inputs: Tensor, output_grad: Tensor) -> dict[str, Contribution]:
    assert isinstance(module, nn.LayerNorm)
    normalize = partial(F.layer_norm, normalized_shape=module.normalized_shape, eps=module.eps)
    summed = range(1, inputs.dim() - len(module.normalized_shape))
    return _scale_and_shift(module, normalize, inputs, output_grad, summed)


@register_rule(nn.GroupNorm, inputs_for=["weight"])
def group_norm_rule(module: nn.Module, inputs: Tensor, output_grad: Tensor) -> dict[str, Contribution]:
    assert isinstance(module, nn.GroupNorm)
    normalize = partial(F.group_norm, num_groups=module.num_groups, eps=module.eps)
    return _scale_and_shift(module, normalize, inputs, output_grad, range(2, inputs.dim()))


@register_rule(nn.RMSNorm)
def rms_norm_rule(module: nn.Module, inputs: Tensor, output_grad: Tensor) -> dict[str, Contribution]:
    weight = module.weight
    assert isinstance(weight, Tensor)
    normalize = partial(F.rms_norm, normalized_shape=weight.shape, eps=rms_epsilon(module))
    return _scale_and_shift(module, normalize, inputs, output_grad, range(1, inputs.dim() - weight.dim()))


def rms_epsilon(module: nn.Module) -> float | None:
    values = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    return next((value for value in values if isinstance(value, float)), None)


def is_rms_norm(module: nn.Module) -> bool:
    """Tell whether this module's own autograd gradient agrees with the rule on random input.

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
