"""Parameters that no module call explains: one backward pass per example, slow and exact."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hf_dcsgd.ghost.contributions import Contribution, Dense
from hf_dcsgd.ghost.quarantine import quarantined_grad

Parameters = Mapping[str, nn.Parameter]


def slow_norms(
    losses: Tensor, parameters: Parameters, most_written: int
) -> tuple[Tensor, dict[str, list[Contribution]] | None]:
    """Compute squared norms over these parameters, and write the gradients down, up to so many numbers.

    None stands for gradients that are too large for that: `add_slow_sums` computes them once more.
    """
    written: dict[str, list[Tensor]] | None = None
    if losses.shape[0] * sum(p.numel() for p in parameters.values()) <= most_written:
        written = {name: [] for name in parameters}
    squared = torch.full((losses.shape[0],), torch.nan, device=losses.device)
    for i, loss in enumerate(losses.unbind()):
        finite = bool(loss.isfinite())
        grads = _gradients(loss, parameters) if finite else {}
        if finite:
            squared[i] = torch.stack([grad.float().square().sum() for grad in grads.values()]).sum()
        for name, parts in (written or {}).items():
            parts.append(grads[name] if finite else torch.full_like(parameters[name], torch.nan))
    if written is None:
        return squared, None
    return squared, {name: [Dense(torch.stack(parts))] for name, parts in written.items()}


def add_slow_sums(
    losses: Tensor, parameters: Parameters, factors: Tensor, keep: Tensor, sums: Mapping[str, Tensor]
) -> None:
    """Add f_i·∇L_i over these parameters to `sums`, for the examples that `keep` marks."""
    # Factors are not put into the loss: half-precision parts of the graph would round them, some upwards.
    for i in keep.nonzero().flatten().tolist():
        for name, grad in _gradients(losses[i], parameters).items():
            sums[name].add_(factors[i].to(grad.dtype) * grad.detach())


def _gradients(loss: Tensor, parameters: Parameters) -> dict[str, Tensor]:
    """Compute ∇loss, whatever the other examples are."""
    found = quarantined_grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if grad is None else grad
        for (name, p), grad in zip(parameters.items(), found, strict=True)
    }
