"""The slow truth: gradients by plain autograd, one example at a time. Nothing of ours is used here but the loss.

An example is run *alone*, in a batch of one cut out of the padded batch: these gradients know nothing of neighbors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_dcsgd.tasks.losses import per_example_losses

Gradients = dict[str, Tensor]
LossFunction = Callable[[nn.Module, Any, Any], Tensor]


def example_of(batch: Any, index: int) -> Any:
    """Example `index` of a tensor or of a mapping of tensors, as a batch of one."""
    if isinstance(batch, Tensor):
        return batch[index : index + 1]
    return {key: value[index : index + 1] for key, value in batch.items()}


def gradients_one_by_one(
    model: nn.Module, inputs: Mapping[str, Tensor], labels: Any, losses: LossFunction = per_example_losses
) -> list[Gradients]:
    """∇L_i over every parameter that requires grad, for each example i run alone."""
    n = len(next(iter(inputs.values())))
    return [_gradients(model, example_of(inputs, i), example_of(labels, i), losses) for i in range(n)]


def _gradients(model: nn.Module, inputs: Mapping[str, Tensor], labels: Any, losses: LossFunction) -> Gradients:
    (loss,) = losses(model, model(**inputs), labels)
    return gradients_of(loss, model)


def gradients_of(loss: Tensor, model: nn.Module) -> Gradients:
    """∇loss over every parameter that requires grad, zeros where the loss does not depend on it; the graph is kept."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
    return {
        name: torch.zeros_like(p) if grad is None else grad
        for (name, p), grad in zip(parameters.items(), found, strict=True)
    }


def norms_of(gradients: list[Gradients], names: set[str] | None = None) -> Tensor:
    """L2 norm of each example's gradient over the named parameters (all of them by default), in double precision."""
    squared = [
        sum(g.double().square().sum() for name, g in example.items() if names is None or name in names)
        for example in gradients
    ]
    return torch.stack([torch.as_tensor(s, dtype=torch.float64) for s in squared]).sqrt()


def clipped_sum_of(gradients: list[Gradients], factors: Tensor, names: set[str] | None = None) -> Gradients:
    """Σ_i factors[i]·gradients[i] over the named parameters, in double precision."""
    return {
        name: sum((f.double() * example[name].double() for f, example in zip(factors, gradients, strict=True)))  # type: ignore[misc]
        for name in gradients[0]
        if names is None or name in names
    }


def clip_factors(norms: Tensor, threshold: float) -> Tensor:
    return (threshold / norms).clamp(max=1.0).to(torch.float32)
