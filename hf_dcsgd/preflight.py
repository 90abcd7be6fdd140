"""All that is looked at before a run may spend anything: kinds of arguments, then gradients, padding, independence.

The checks run the trainer's own forward on made-up examples of the shape of its data. Nothing is charged by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_dcsgd.dataloading import Batch, EmptyAware, batch_length, cut
from hf_dcsgd.losses import require_separable_losses, unwrapped_model
from hf_dcsgd.padding import padded_and_bare, require_padding_invariance
from hf_dcsgd.parity import check_independence, check_parity, synthetic_like
from hf_dcsgd.randomness import public_randomness
from hf_dcsgd.sampling import map_style_length

PADDING_CHECK_ROWS = 32  # among so many there will be two of unequal length, if there are any


def require_kinds(args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Any) -> None:
    """Things of the wrong kind, before transformers takes them apart."""
    given = {**dict(zip(("model", "args", "data_collator", "train_dataset"), args, strict=False)), **kwargs}
    model = given.get("model")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"expected model to be an nn.Module, loaded or made, got {model!r}")
    if isinstance(model, nn.Module) and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("expected a model with weights, got one on the meta device")
    for name, function in (("data_collator", given.get("data_collator")), ("per_example_loss_func", loss)):
        if function is not None and not callable(function):
            raise TypeError(f"expected {name} to be callable, got {function!r}")
    smoothing = getattr(given.get("args"), "label_smoothing_factor", 0)
    if smoothing and isinstance(model, nn.Module) and not hasattr(model, "config"):
        raise ValueError(
            f"label_smoothing_factor={smoothing:g} needs a transformers model; {type(model).__name__} has no config. "
            "Smooth the labels in a per_example_loss_func"
        )
    if given.get("train_dataset") is not None:
        map_style_length(given["train_dataset"])


def check_before_training(trainer: Any) -> None:
    """Ghost norms against autograd, and that no example moves another; raises before anything is charged."""
    rows, collate = trainer._rows_and_collator()
    tolerance = 5e-2 if trainer.args.bf16 else 1e-3
    with public_randomness(trainer.args.device):
        collated = trainer._prepare_inputs(EmptyAware(collate)([rows[0], rows[1 % len(rows)]]))
    special = tuple(getattr(trainer.processing_class, "all_special_ids", None) or ())
    batch = synthetic_like(trainer.model, collated, special)
    trainer.model.eval()
    try:
        with trainer.compute_loss_context_manager():
            with torch.no_grad():
                if not trainer._losses(batch)[0].isfinite().all():
                    batch = collated  # a model that cannot make anything of made-up examples
            check_parity(trainer.clipper, lambda: trainer._losses(batch)[0], tolerance)
            _check_padding(trainer, tolerance)
            if trainer.per_example_loss_func is not None:
                model_inputs, labels = trainer._split(batch)
                with torch.no_grad():
                    outputs = trainer._forward(model_inputs)
                require_separable_losses(trainer.per_example_loss_func, outputs, labels, batch_length(batch))
            _check_independence(trainer, batch, tolerance)
    finally:
        trainer._train_mode()


def _check_independence(trainer: Any, batch: Batch, tolerance: float) -> None:
    """Losses alone and within a batch; left out where some input has no row per example to be cut by."""
    n = batch_length(batch)
    if all(len(value) == n for value in batch.values() if isinstance(value, Tensor) and value.dim() > 0):
        with torch.no_grad():
            together, *alone = (trainer._losses(inputs)[0] for inputs in (batch, *cut(batch, 1)))
        check_independence(together, torch.cat(alone), tolerance)


def _check_padding(trainer: Any, tolerance: float) -> None:
    rows, collate = trainer._rows_and_collator()
    config = getattr(unwrapped_model(trainer.model), "config", None)
    with public_randomness(trainer.args.device):
        some_rows = [rows[i] for i in range(min(len(rows), PADDING_CHECK_ROWS))]
        example = padded_and_bare(collate, some_rows, getattr(config, "is_encoder_decoder", False))
    if example is not None:
        with torch.no_grad():
            padded, bare = (trainer._losses(trainer._prepare_inputs(inputs))[0] for inputs in example)
        require_padding_invariance(padded, bare, tolerance)
