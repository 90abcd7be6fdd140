"""Weights in pieces, as one process would have saved them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed, nn
from torch.distributed.tensor import DTensor

from hf_dcsgd.tasks.loss_kind import unwrapped_model


@contextmanager
def whole_on_main_process(model: nn.Module) -> Iterator[None]:
    """Hold every parameter whole within the block, on the main process alone and on its CPU.

    A collective call at its start, where something is in pieces; nothing happens where nothing is. Of a model with
    adapters, which are saved without the model below them, the embeddings are made whole alone: peft saves them, too,
    where the vocabulary has grown. The model cannot run within the block.
    """
    pieces: list[tuple[nn.Module, str, Any]] = [
        (module, key, parameter)
        for module in _saved_modules(model)
        for key, parameter in module._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    is_main_process = not pieces or distributed.get_rank() == 0
    whole: dict[int, nn.Parameter] = {}
    for _, _, parameter in pieces:
        if id(parameter) not in whole:
            gathered = parameter.full_tensor()
            if is_main_process:
                whole[id(parameter)] = nn.Parameter(gathered.detach().cpu(), requires_grad=False)
    try:
        for module, key, parameter in pieces if is_main_process else ():
            module._parameters[key] = whole[id(parameter)]
        yield
    finally:
        for module, key, parameter in pieces:
            module._parameters[key] = parameter


def _saved_modules(model: nn.Module) -> list[nn.Module]:
    base = unwrapped_model(model)
    if base is model and not getattr(model, "_hf_peft_config_loaded", False):
        return list(model.modules())
    getters = [getattr(base, name, None) for name in ("get_input_embeddings", "get_output_embeddings")]
    found = [getter() for getter in getters if callable(getter)]
    return [part for module in found if module is not None for part in module.modules()]
