"""What is handed to `DCSGDTrainer`: things of the wrong kind, and methods that may not be replaced."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from hf_dcsgd.privacy.sampling import map_style_length
from hf_dcsgd.tasks.loss_kind import why_no_loss
from hf_dcsgd.validation import require_count

Arguments = TypeVar("Arguments")

# The guarantee rests on these methods of the trainer.
GUARDED_METHODS = ("compute_loss", "get_train_dataloader", "_get_train_sampler", "get_batch_samples", "training_step")


def refuse_overrides(trainer: object, own: type) -> None:
    """Refuse subclasses and instances that replace a method on which the guarantee rests."""
    for method in GUARDED_METHODS:
        if method in vars(trainer) or getattr(type(trainer), method) is not getattr(own, method):
            raise TypeError(
                f"{type(trainer).__name__} overrides {method}, on which the guarantee rests; use "
                "per_example_loss_func for another loss. The sampler is Poisson and cannot be replaced"
            )


def require_arguments(args: Any, wanted: type[Arguments]) -> Arguments:
    """Return the arguments of a trainer; TypeError unless they are of the class that makes it private."""
    if not isinstance(args, wanted):
        home = wanted.__module__.rpartition(".")[0]
        raise TypeError(
            f"expected args to be {wanted.__name__}, got {type(args).__name__}: nothing would be private. "
            f"{home}.{wanted.__name__} takes the same arguments, and target_epsilon"
        )
    return args


def validate_inputs(
    model: Any,
    label_smoothing: float,
    data_collator: Any,
    train_dataset: Any,
    compute_loss_func: Any,
    per_example_loss_func: Any,
    rows_per_example: int,
    *,
    needs_weights: bool = True,
) -> None:
    """Raise for things of the wrong kind, before transformers takes them apart."""
    if compute_loss_func is not None:
        raise ValueError(
            "compute_loss_func returns one loss for a whole batch (normalized by num_items_in_batch), which cannot be "
            "clipped per example; pass per_example_loss_func(outputs, labels), which returns a tensor of shape (n,), "
            "instead"
        )
    if isinstance(model, str):
        raise TypeError(
            f"expected model to be a model, got the name {model!r}: load it by the class of its task, such as "
            f"AutoModelForSequenceClassification.from_pretrained({model!r})"
        )
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"expected model to be an nn.Module, loaded or made, got {model!r}")
    if needs_weights and isinstance(model, nn.Module) and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("expected a model with weights, got one on the meta device")
    if "_orig_mod" in getattr(model, "_modules", ()):
        raise ValueError("expected model as it was before torch.compile, whose graph does not call modules one by one")
    if label_smoothing and model is not None and not hasattr(model, "config"):
        raise ValueError(
            f"label_smoothing_factor={label_smoothing:g} needs a transformers model; {type(model).__name__} has no "
            "config. Smooth the labels in a per_example_loss_func"
        )
    for name, function in (("data_collator", data_collator), ("per_example_loss_func", per_example_loss_func)):
        if function is not None and not callable(function):
            raise TypeError(f"expected {name} to be callable, got {function!r}")
    if require_count("rows_per_example", rows_per_example) > 1 and per_example_loss_func is None:
        raise ValueError(
            f"rows_per_example={rows_per_example} needs a per_example_loss_func: it makes one loss of the outputs of "
            f"shape (n, {rows_per_example}, …)"
        )
    if train_dataset is not None:
        map_style_length(train_dataset)
        reason = why_no_loss(type(model)) if per_example_loss_func is None else None
        if reason is not None:
            raise ValueError(f"{type(model).__name__} cannot be trained privately by its own loss: {reason}")
