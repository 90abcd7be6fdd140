"""What cannot be made private per example, found before training and named all at once."""

from __future__ import annotations

import torch
from torch import nn

_BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)
# Couplings of transformers that no gradient shows, by class name.
_HIDDEN_COUPLINGS = {
    "NllbMoeTop2Router": "drops tokens beyond an expert's capacity, which the whole batch shares; no setting avoids it"
}
_INSTANCE_STATISTICS = nn.modules.instancenorm._InstanceNorm


class UnsupportedModelError(ValueError):
    """The model has parts for which no exact per-example gradient exists; the message lists every one."""


class BatchCouplingError(RuntimeError):
    """An example's loss depends on other examples of its batch, so no clipping bounds one record's influence."""


def refuse_unsupported(model: nn.Module) -> None:
    problems = [
        f"  {name or '(the model itself)'} ({type(module).__name__}): {reason}"
        for name, module in model.named_modules()
        if (reason := _reason_to_refuse(module)) is not None
    ]
    problems += [
        f"  {name} ({parameter.dtype}): trainable parameters must be kept in fp32, or their gradients lose the digits "
        "that clipping and noise need; call model.float() (bf16 autocast around the forward is fine) or freeze it"
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64)
    ]
    if problems:
        raise UnsupportedModelError(
            "per-example gradients are not possible for these parts of the model:\n" + "\n".join(problems)
        )


def _reason_to_refuse(module: nn.Module) -> str | None:
    if isinstance(module, _BATCH_STATISTICS):
        owns_trainable = any(p.requires_grad for p in module.parameters(recurse=False))
        if owns_trainable or module.track_running_stats is False or module.training:
            return (
                "normalises with statistics of the whole batch, so one record changes the gradient of the others; "
                "replace it by nn.GroupNorm, or freeze it and keep it in eval() mode (model.train() undoes that)"
            )
    if type(module).__name__ in _HIDDEN_COUPLINGS:
        return _HIDDEN_COUPLINGS[type(module).__name__]
    if isinstance(module, _INSTANCE_STATISTICS) and module.track_running_stats and module.training:
        return (
            "collects running statistics of the records, which no noise protects; make it with "
            "track_running_stats=False, or keep it in eval() mode"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and any(p.requires_grad for p in module.parameters()):
        if module.max_norm is not None:
            return f"max_norm={module.max_norm} rewrites its weight during the forward; set max_norm=None"
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq=True scales by token counts of the whole batch; set it to False"
    return None
