"""Modules without a rule of their own: their gradient per example, by running that module alone on each example.

Exact for any module whose output for an example is a deterministic function of that example's slice of the inputs. A
module that draws random numbers (an active dropout inside) would draw others the second time, so it is not taken here.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hf_dcsgd.ghost.contributions import Contribution, Dense

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def is_random(module: nn.Module) -> bool:
    """Tell whether a second run of this module in its present mode may give another result."""
    for child in module.modules():
        if not child.training:
            continue
        if isinstance(child, _DROPOUTS) and child.p > 0:
            return True
        if isinstance(child, nn.RNNBase) and child.dropout > 0 and child.num_layers > 1:
            return True
        if "dropout" in type(child).__name__.lower() and not isinstance(child, _DROPOUTS):
            return True
    return False


def tensor_leaves(output: Any) -> list[Tensor]:
    """List the differentiable tensors of a module's output, in a fixed order."""
    leaves = [output] if isinstance(output, Tensor) else tree_flatten(output)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def batch_leaves(arguments: tuple[tuple[Any, ...], dict[str, Any]], n: int) -> list[bool]:
    """Tell which leaves of a call's arguments have the batch as their first axis, as far as shapes show."""
    return [isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == n for x in tree_flatten(arguments)[0]]


def fallback_contributions(
    module: nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    sliced: list[bool],
    output_grads: list[Tensor | None],
    axes: list[int],
) -> dict[str, Contribution]:
    """Compute contributions to what `module` owns itself; RuntimeError where it cannot be run that way.

    `sliced` says which argument leaves are cut along their first axis, `axes` where the batch is in each output.
    """
    parameters = {name: p.detach() for name, p in module._parameters.items() if p is not None and p.requires_grad}
    leaves, structure = tree_flatten(arguments)
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    used = [k for k, grad in enumerate(output_grads) if grad is not None]
    grads = [grad.movedim(axis, 0) for grad, axis in zip(output_grads, axes, strict=True) if grad is not None]

    def one_example(slices: list[Tensor], example_grads: list[Tensor]) -> dict[str, Tensor]:
        taken = iter(slices)
        args, kwargs = tree_unflatten(
            [next(taken).unsqueeze(0) if is_sliced else leaf for leaf, is_sliced in zip(leaves, sliced, strict=True)],
            structure,
        )

        def forward(values: dict[str, Tensor]) -> list[Tensor]:
            outputs = tensor_leaves(torch.func.functional_call(module, values, args, kwargs))
            return [outputs[k] for k in used]

        evaluated = torch.func.vjp(forward, parameters)
        outputs, pullback = evaluated[0], evaluated[1]
        cotangents = [g.unsqueeze(axes[k]).to(o.dtype) for k, g, o in zip(used, example_grads, outputs, strict=True)]
        return pullback(cotangents)[0]

    slices = [leaf for leaf, is_sliced in zip(leaves, sliced, strict=True) if is_sliced]
    return {name: Dense(value.detach()) for name, value in _over_examples(one_example, slices, grads, module).items()}


def _over_examples(
    one_example: Any, slices: list[Tensor], grads: list[Tensor], module: nn.Module
) -> dict[str, Tensor]:
    if not any(isinstance(child, nn.RNNBase) for child in module.modules()):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="There is a performance drop")
                return torch.func.vmap(one_example, randomness="error")(slices, grads)
        except (RuntimeError, ValueError) as error:
            if "randomness error mode" in str(error):
                raise
    # Recurrent kernels and data-dependent branches cannot be vectorized: one example after the other.
    each = [one_example([s[i] for s in slices], [g[i] for g in grads]) for i in range(len(grads[0]))]
    return {name: torch.stack([grads_i[name] for grads_i in each]) for name in each[0]}
