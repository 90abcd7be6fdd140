"""Linear layers: `nn.Linear` (weight p×d) and transformers' `Conv1D` (the same with the weight d×p)."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_dcsgd.ghost.contributions import Contribution, Dense, Outer, working_dtype
from hf_dcsgd.ghost.registry import register_rule, trainable


def as_positions(value: Tensor) -> Tensor:
    """Reshape (n, ..., d) to (n, T, d), with T = 1 for plain vectors."""
    return value.reshape(value.shape[0], value.shape[1:-1].numel(), value.shape[-1])


@register_rule(nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear, inputs_for=["weight"])
def linear_rule(module: nn.Module, inputs: Tensor, output_grad: Tensor) -> dict[str, Contribution]:
    contributions: dict[str, Contribution] = {}
    if trainable(module, "weight"):
        contributions["weight"] = Outer(as_positions(output_grad), as_positions(inputs))
    if trainable(module, "bias"):
        contributions["bias"] = Dense(as_positions(output_grad).sum(1, dtype=working_dtype(output_grad)))
    return contributions


@register_rule(Conv1D, inputs_for=["weight"])
def transposed_linear_rule(module: nn.Module, inputs: Tensor, output_grad: Tensor) -> dict[str, Contribution]:
    contributions = linear_rule(module, inputs, output_grad)
    weight = contributions.get("weight")
    if isinstance(weight, Outer):
        contributions["weight"] = Outer(weight.right, weight.left)
    return contributions
