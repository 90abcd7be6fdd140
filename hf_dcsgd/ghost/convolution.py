"""Convolutions as linear layers over patches: `nn.Conv1d` and `nn.Conv2d`, any stride, padding, dilation, groups."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from hf_dcsgd.ghost.contributions import Contribution, Dense, Outer, working_precision
from hf_dcsgd.ghost.registry import register_rule, trainable


@register_rule(nn.Conv1d, nn.Conv2d, inputs_for=["weight"])
def convolution_rule(module: nn.Module, inputs: Tensor, output_grad: Tensor) -> dict[str, Contribution]:
    assert isinstance(module, nn.Conv1d | nn.Conv2d)
    grad = working_precision(output_grad).flatten(2)  # (n, out, L)
    contributions: dict[str, Contribution] = {}
    if trainable(module, "weight"):
        patches = _patches(module, working_precision(inputs), grad.shape[2])  # (n, in·k, L)
        if module.groups == 1:
            contributions["weight"] = Outer(grad.transpose(1, 2), patches.transpose(1, 2))
        else:
            by_group = grad.unflatten(1, (module.groups, -1)) @ patches.unflatten(1, (module.groups, -1)).mT
            contributions["weight"] = Dense(by_group.reshape(len(grad), *module.weight.shape))
    if trainable(module, "bias"):
        contributions["bias"] = Dense(grad.sum(2))
    return contributions


def _patches(module: nn.Conv1d | nn.Conv2d, inputs: Tensor, positions: int) -> Tensor:
    """Cut the input window of every output position; channels vary slowest, as in the weight."""
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    if not inputs.shape[0]:  # F.pad and F.unfold refuse an empty batch
        return inputs.new_zeros(0, inputs.shape[1] * math.prod(kernel), positions)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    inputs = F.pad(inputs, module._reversed_padding_repeated_twice, mode=mode)
    if isinstance(module, nn.Conv1d):
        inputs, kernel, stride, dilation = inputs.unsqueeze(2), (1, *kernel), (1, *stride), (1, *dilation)
    return F.unfold(inputs, kernel_size=kernel, stride=stride, dilation=dilation)
