"""What cannot be made private per example, found before training and named all at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from hf_dcsgd.ghost.quantized import shared_scale

_BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)
# Couplings that the few rows of a check do not show, by class name.
_HIDDEN_COUPLINGS = {
    "NllbMoeTop2Router": "drops tokens beyond a capacity that the whole batch shares; no setting avoids it",
    "Linear8bitLt": "picks outlier columns over the whole batch; load the model in 4 bits, or in bf16",
}
_INSTANCE_STATISTICS = nn.modules.instancenorm._InstanceNorm


class UnsupportedModelError(ValueError):
    """The model has parts for which no exact per-example gradient exists; the message lists every one."""


class BatchCouplingError(RuntimeError):
    """An example's loss depends on others in its batch: clipping no longer bounds any one example's influence."""


def refuse_unsupported(model: nn.Module) -> None:
    """Raise UnsupportedModelError with every problem and its cure."""
    # What a configuration sets for many modules is named once.
    by_setting = {s: module for module in reversed(list(model.modules())) for s in _coupling_settings(module)}
    settings = [f"  {type(module).__name__}: {setting}" for setting, module in by_setting.items()]
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    _refuse(_module_problems(model.named_modules()) + settings + _parameter_problems(parameters))


def may_change(module: nn.Module) -> bool:
    """Tell whether `train()` can make a module unsupported: it turns a frozen BatchNorm to batch statistics."""
    return isinstance(module, (*_BATCH_STATISTICS, _INSTANCE_STATISTICS))


def refuse_changes(modules: Iterable[tuple[str, nn.Module]], parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise UnsupportedModelError with the problems of these modules and trainable parameters."""
    _refuse(_module_problems(modules) + _parameter_problems(parameters))


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UnsupportedModelError(
            "per-example gradients are not possible for these parts of the model:\n" + "\n".join(problems)
        )


def _module_problems(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    return [
        f"  {name or '(the model itself)'} ({type(module).__name__}): {reason}"
        for name, module in modules
        if (reason := _reason_to_refuse(module)) is not None
    ]


def _parameter_problems(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    return [
        f"  {name} ({parameter.dtype}): trainable parameters must be kept in fp32, or their gradients lose the digits "
        "that clipping and noise need; call model.float() (bf16 autocast around the forward is fine) or freeze it"
        for name, parameter in parameters.items()
        if parameter.dtype not in (torch.float32, torch.float64)
    ] + [
        f"  {name}: a hook of its own (register_hook; trackers of gradients set one) would see gradients before "
        "clipping and noise; remove it"
        for name, parameter in parameters.items()
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    ]


def _reason_to_refuse(module: nn.Module) -> str | None:
    if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
        return "was compiled, and a graph does not call its modules one by one; hand over the model as it was before"
    if isinstance(module, _BATCH_STATISTICS):
        owns_trainable = any(p.requires_grad for p in module.parameters(recurse=False))
        if owns_trainable or module.track_running_stats is False or module.training:
            return (
                "normalizes with statistics of the whole batch, so one record changes the gradient of the others; "
                "replace it by nn.GroupNorm, or freeze it and keep it in eval() mode (model.train() undoes that)"
            )
    if type(module).__name__ in _HIDDEN_COUPLINGS:
        return _HIDDEN_COUPLINGS[type(module).__name__]
    if isinstance(module, _INSTANCE_STATISTICS) and module.track_running_stats and module.training:
        return (
            "collects running statistics of the records, which no noise protects; make it with "
            "track_running_stats=False, or keep it in eval() mode"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.max_norm is not None:
            return f"max_norm={module.max_norm} rewrites its weight during the forward; set max_norm=None"
        if module.scale_grad_by_freq and any(p.requires_grad for p in module.parameters()):
            return "scale_grad_by_freq=True scales by token counts of the whole batch; set it to False"
    return shared_scale(module)


def _coupling_settings(module: nn.Module) -> Iterator[str]:
    """Name settings that show only when rows of certain lengths come along, in the middle of a run."""
    types = getattr(module, "rope_type", None)
    for rope_type in types.values() if isinstance(types, dict) else (types,):
        if isinstance(rope_type, str) and "dynamic" in rope_type:
            yield (
                f"rope_type {rope_type!r} keeps the frequencies of the longest example so far; load the model with "
                "another, e.g. linear or yarn"
            )
    if "BigBird" in type(module).__name__ and getattr(module, "attention_type", None) == "block_sparse":
        yield (
            "block-sparse attention turns to full attention, for good, when a batch is short; load the model with "
            'attention_type="original_full"'
        )
