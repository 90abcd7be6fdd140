"""All that is looked at before a run may spend anything: kinds of arguments, then gradients, padding, independence.

The checks run the trainer's own forward on made-up examples of the shape of its data; padding, order and the collator
are tried on a few real rows. Nothing is charged by them, and nothing is kept of them but that they passed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_dcsgd.checks.forward_writes import refuse_forward_writes
from hf_dcsgd.checks.padding import batch_size_of, padded_and_bare, require_padding_invariance
from hf_dcsgd.checks.parity import check_independence, check_order, check_parity, dropout_off, synthetic_like
from hf_dcsgd.data.loading import Batch, EmptyAware, batch_length, cut, require_separate_rows
from hf_dcsgd.ghost import GhostClipper
from hf_dcsgd.privacy.sampling import map_style_length
from hf_dcsgd.tasks.losses import require_separable_losses, unwrapped_model

logger = logging.getLogger(__name__)

LOOKED_AT_ROWS = 32  # among so many there will be two of unequal length, if there are any


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
    rows, collate = _rows_and_collator(trainer)
    tolerance = 5e-2 if trainer.args.bf16 else 1e-3
    with trainer._private_randomness():
        collated = trainer._prepare_inputs(collate([rows[0], rows[1 % len(rows)]]))
        require_separate_rows(collate, *(rows[len(rows) * k // 3] for k in range(3)))
    special = tuple(getattr(trainer.processing_class, "all_special_ids", None) or ())
    batch, clipper = synthetic_like(trainer.model, collated, special), trainer.clipper
    trainer.model.eval()
    try:
        with trainer.compute_loss_context_manager(), trainer._private_randomness():
            with torch.no_grad():
                if not trainer._losses(batch)[0].isfinite().all():
                    # A model that cannot make anything of made-up examples. What the trainer's clipper finds out is
                    # written down, so that another one looks at real ones.
                    batch, clipper = collated, GhostClipper(trainer.model)
            check_parity(clipper, lambda: trainer._losses(batch)[0], tolerance)
            _check_padding(trainer, tolerance)
            _check_order(trainer, tolerance)
            if trainer.per_example_loss_func is not None:
                model_inputs, labels = trainer._split(batch)
                with torch.no_grad():
                    outputs = trainer._forward(model_inputs)
                require_separable_losses(trainer.per_example_loss_func, outputs, labels, batch_length(batch))
            _check_independence(trainer, batch, tolerance)
            _check_train_mode(trainer, clipper, batch, tolerance)
    finally:
        trainer._train_mode()
        trainer.clipper.reset_verification()  # on real examples, too
    if trainer.clipper.slow_parameters:
        logger.warning(
            "exact but slow, one backward pass per example (no module call shows what each example adds to these "
            "parameters; freeze them to avoid it): %s",
            ", ".join(sorted(trainer.clipper.slow_parameters)),
        )


def _check_train_mode(trainer: Any, clipper: GhostClipper, batch: Batch, tolerance: float) -> None:
    """As training will run it: nothing may be written into the model; examples are independent, dropout aside."""
    trainer._train_mode()
    with clipper:
        with refuse_forward_writes(trainer.model):
            losses = trainer._losses(batch)[0]
        clipper.norms(losses)
    with dropout_off(trainer.model):
        if torch.equal(trainer._losses(batch)[0], trainer._losses(batch)[0]):
            _check_independence(trainer, batch, tolerance)


def _check_independence(trainer: Any, batch: Batch, tolerance: float) -> None:
    """Losses alone and within a batch; left out where some input has no row per example to be cut by."""
    if _has_rows_only(batch):
        together, *alone = (trainer._losses(inputs)[0].detach() for inputs in (batch, *cut(batch, 1)))
        check_independence(together, torch.cat(alone), tolerance)


def _has_rows_only(batch: Batch) -> bool:
    n = batch_length(batch)
    return all(len(value) == n for value in batch.values() if isinstance(value, Tensor) and value.dim() > 0)


def _check_padding(trainer: Any, tolerance: float) -> None:
    rows, collate = _rows_and_collator(trainer)
    config = getattr(unwrapped_model(trainer.model), "config", None)
    example = padded_and_bare(collate, _some_rows(rows), getattr(config, "is_encoder_decoder", False))
    if example is not None:
        with torch.no_grad():
            padded, bare = (trainer._losses(trainer._prepare_inputs(inputs))[0] for inputs in example)
        require_padding_invariance(padded, bare, tolerance)


def _check_order(trainer: Any, tolerance: float) -> None:
    """Norms of the shortest and the longest of some rows, in either order; left out where the forward is random."""
    rows, collate = _rows_and_collator(trainer)

    def collated(*chosen: Any) -> Batch:
        copies = [copy.deepcopy(row) for row in chosen]  # collators may write into rows
        return trainer._prepare_inputs(collate(copies))

    by_size = sorted(_some_rows(rows), key=lambda row: batch_size_of(collated(row)))
    batch = collated(by_size[0], by_size[-1])
    if not _has_rows_only(batch):
        return
    reversed_batch = {name: _reversed(value) for name, value in batch.items()}
    clipper = GhostClipper(trainer.model)  # not the trainer's, which must not learn from real examples yet
    # It finds out where examples are in two of the same, whose order does not matter.
    _norms(trainer, clipper, collated(by_size[0], by_size[0]))
    norms, again, reversed_norms = (_norms(trainer, clipper, inputs) for inputs in (batch, batch, reversed_batch))
    if norms.isfinite().all() and torch.equal(norms, again):
        check_order(norms, reversed_norms, tolerance)


def _rows_and_collator(trainer: Any) -> tuple[Any, EmptyAware]:
    rows, collate = trainer._rows_and_collator()
    return rows, EmptyAware(collate)


def _reversed(value: Any) -> Any:
    """Two rows in the other order; a number for the whole batch as it is."""
    if isinstance(value, Tensor) and value.dim() > 0:
        return value.flip(0)
    return value[::-1] if isinstance(value, list) and len(value) == 2 else value


def _norms(trainer: Any, clipper: GhostClipper, batch: Batch) -> Tensor:
    with clipper:
        return clipper.norms(trainer._losses(batch)[0])


def _some_rows(rows: Any) -> list[Any]:
    """From all over the data set: it may be sorted by length."""
    count = min(len(rows), LOOKED_AT_ROWS)
    return [rows[len(rows) * k // count] for k in range(count)]
