"""One loss per example, from a model's outputs and labels.

Guarantee: entry i of every vector returned here is a function of row i of the outputs and row i of the labels alone.
Nothing is normalized over the batch (not even over its number of tokens), so that adding or removing one example
leaves the losses, and hence the gradients, of all others as they were. For a batch of one example the value is the
loss that transformers' own model computes.

| edge case                                      | per-example loss                                        |
|------------------------------------------------|---------------------------------------------------------|
| no label counts (all -100, QA answer cut away) | 0, with a zero gradient                                 |
| empty batch                                    | shape (0,), attached to the graph                       |
| NaN or infinite logits or regression targets   | not finite, for that example alone; nothing is raised   |
| half-precision logits                          | upcast, the loss is fp32                                |
| a class label out of range                     | ValueError that names the range, never the example      |

Auxiliary losses that some models add when they see labels (expert balancing) are left out: they couple the batch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.utils.generic import find_labels

from hf_dcsgd.tasks.dense_losses import ctc_losses, segmentation_losses
from hf_dcsgd.tasks.loss_kind import Labels, is_seq2seq_lm, loss_kind, unwrapped_model

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]

IGNORE_INDEX = -100
QA_LABELS = ("start_positions", "end_positions")
_ONE_CLASS_PER_EXAMPLE = ("single_label_classification", "multiple_choice")
_SMOOTHABLE = (*_ONE_CLASS_PER_EXAMPLE, "token_classification", "masked_lm", "causal_lm", "seq2seq_lm")


def per_example_losses(
    model: nn.Module,
    outputs: Any,
    labels: Labels,
    *,
    label_smoothing: float = 0.0,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Compute the loss of each example, shape (n,), fp32; see the module's guarantee.

    `outputs` come from a forward without labels: anything with `.logits` (or a "logits" key), a tuple that starts with
    the logits, or the logits themselves. Losses over tokens are means over the example's own counted tokens.
    `label_smoothing` is that of `TrainingArguments.label_smoothing_factor`, within each example. Answers to questions
    are sought over all positions: `attention_mask`, if given, leaves out the padding, whose length is that of the
    longest example in the batch.
    """
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"expected label_smoothing in [0, 1], got {label_smoothing}")
    base = unwrapped_model(model)
    logits = None if isinstance(base, PreTrainedModel) else _output(outputs, "logits", 0)
    kind = loss_kind(base, labels, logits)
    if label_smoothing and kind not in _SMOOTHABLE:
        raise ValueError(f"label_smoothing is not defined for {kind}, got {label_smoothing}")
    if kind == "question_answering":
        start, end = _output(outputs, "start_logits", 0), _output(outputs, "end_logits", 1)
        return _question_answering_losses(start, end, *_answer_positions(labels), attention_mask)
    logits = _output(outputs, "logits", 0).float()
    if not isinstance(labels, Tensor):
        raise TypeError(f"expected labels to be a tensor for {kind}, got {type(labels).__name__}")
    labels = labels.to(logits.device)
    if kind == "regression":
        return _regression_losses(logits, labels)
    if kind == "multi_label_classification":
        return _multi_label_losses(logits, labels)
    if kind == "ctc":
        return ctc_losses(base, logits, labels, attention_mask)
    if kind == "semantic_segmentation":
        return segmentation_losses(base, logits, labels)
    if kind in _ONE_CLASS_PER_EXAMPLE:
        return _cross_entropies(logits, _matching(labels, logits.shape[:1]), label_smoothing)
    if kind == "causal_lm":
        labels = F.pad(labels, (_virtual_tokens(model, logits, labels), 0), value=IGNORE_INDEX)
        # Token t is predicted from those before it. Labels are shifted, not logits: a shifted copy of these is large.
        labels = F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
    labels = _matching(labels, logits.shape[:2])
    losses = _cross_entropies(logits.flatten(0, 1), labels.flatten(), label_smoothing).view(labels.shape)
    return losses.sum(dim=1) / (labels != IGNORE_INDEX).sum(dim=1).clamp(min=1)


def checked_user_losses(loss_function: LossFunction, outputs: Any, labels: Any, batch_size: int) -> Tensor:
    """Return `loss_function(outputs, labels)` as fp32; it must be one differentiable loss per example.

    What cannot be seen from one call, namely whether entry i depends on other examples, is left to
    `checks/preflight.py`.
    """
    losses = loss_function(outputs, labels)
    name = getattr(loss_function, "__name__", type(loss_function).__name__)
    if not isinstance(losses, Tensor):
        raise TypeError(f"expected the loss function {name} to return a tensor, got {type(losses).__name__}")
    if losses.ndim == 0:
        raise ValueError(
            f"the loss function {name} returned a scalar: return one loss per example, shape ({batch_size},), for "
            'instance with reduction="none". Each example\'s gradient is clipped on its own before the sum, which '
            "cannot be done once the losses are summed or averaged over the batch."
        )
    if losses.shape != (batch_size,):
        raise ValueError(
            f"expected the loss function {name} to return one loss per example, shape ({batch_size},), got shape "
            f"{tuple(losses.shape)}; losses per token are to be averaged within each example"
        )
    if not losses.is_floating_point():
        raise TypeError(f"expected the loss function {name} to return floating-point losses, got {losses.dtype}")
    if torch.is_grad_enabled() and not losses.requires_grad:
        raise ValueError(f"the losses of {name} do not require grad: they are detached from the model's outputs")
    return losses.float()


def split_labels(
    model: nn.Module, inputs: Mapping[str, Any], label_names: Sequence[str] | None = None
) -> tuple[dict[str, Any], Any]:
    """Split a batch into inputs without labels, and labels, so that the forward computes no loss over the batch.

    Label names are `label_names` or those in the signature of the model's forward ("labels" if it has none). The
    labels are returned as a tensor if the batch holds one label entry, else as a dict. Seq2seq models get the
    `decoder_input_ids` that their forward would otherwise have built from the labels.
    """
    base = unwrapped_model(model)
    names = list(label_names or find_labels(type(base)) or ["labels"])
    model_inputs = {key: value for key, value in inputs.items() if key not in names}
    found = {name: inputs[name] for name in names if inputs.get(name) is not None}
    if not found:
        raise ValueError(f"expected a label entry ({' or '.join(names)}) in the batch, got {', '.join(inputs)}")
    labels: Any = next(iter(found.values())) if len(found) == 1 else found
    has_decoder_inputs = any(inputs.get(key) is not None for key in ("decoder_input_ids", "decoder_inputs_embeds"))
    if is_seq2seq_lm(base) and not has_decoder_inputs:
        model_inputs["decoder_input_ids"] = _decoder_input_ids(base, labels)
    return model_inputs, labels


# --- the losses ------------------------------------------------------------------------------------------------------


def _cross_entropies(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Compare logits (m, classes) with labels (m,), not reduced; 0 where the label is -100."""
    classes = logits.shape[-1]
    if labels.is_floating_point():
        raise TypeError(f"expected integer class labels, got {labels.dtype}")
    labels = labels.long()
    # Checked here, as torch's own error would print the example's label (and on a GPU end the process).
    if ((labels != IGNORE_INDEX) & ((labels < 0) | (labels >= classes))).any():
        raise ValueError(
            f"expected labels from 0 to {classes - 1} (num_labels = {classes}) or {IGNORE_INDEX} for ignored ones, "
            "got at least one outside that range"
        )
    return F.cross_entropy(
        logits.float(), labels, ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=label_smoothing
    )


def _multi_label_losses(logits: Tensor, labels: Tensor) -> Tensor:
    labels = _matching(labels, logits.shape).float()
    if ((labels < 0) | (labels > 1)).any():
        raise ValueError(
            "expected multi-label targets between 0 and 1, got at least one outside; for regression with several "
            'outputs set config.problem_type = "regression"'
        )
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(dim=-1)


def _regression_losses(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits.unsqueeze(-1) if logits.ndim == 1 else logits
    return (logits - _matching(labels, logits.shape).float()).square().mean(dim=-1)


def _question_answering_losses(
    start_logits: Tensor, end_logits: Tensor, start: Tensor, end: Tensor, attention_mask: Tensor | None
) -> Tensor:
    """Average the two cross entropies; an answer beyond the input counts for nothing, as in transformers."""
    length = start_logits.shape[1]
    padding = None
    if attention_mask is not None and attention_mask.shape == start_logits.shape:
        padding = ~attention_mask.to(start_logits.device).bool()
    halves = []
    for logits, positions in ((start_logits, start), (end_logits, end)):
        positions = _matching(positions.to(logits.device), logits.shape[:1]).clamp(0, length)
        beyond = positions == length
        if padding is not None:
            logits = logits.float().masked_fill(padding, torch.finfo(torch.float32).min)
            beyond |= F.pad(padding, (0, 1)).gather(1, positions[:, None]).squeeze(1)
        halves.append(_cross_entropies(logits, positions.masked_fill(beyond, IGNORE_INDEX)))
    return (halves[0] + halves[1]) / 2


def _answer_positions(labels: Labels) -> tuple[Tensor, Tensor]:
    if isinstance(labels, Mapping) and set(QA_LABELS) <= set(labels):
        return labels[QA_LABELS[0]], labels[QA_LABELS[1]]
    if isinstance(labels, Sequence) and len(labels) == 2:
        return labels[0], labels[1]
    raise TypeError(
        f"expected question-answering labels as ({', '.join(QA_LABELS)}) or a mapping with these keys, got "
        f"{type(labels).__name__}"
    )


def _matching(labels: Tensor, shape: torch.Size) -> Tensor:
    """Return labels in the wanted shape, up to axes of size one."""
    if [size for size in labels.shape[1:] if size != 1] != [size for size in shape[1:] if size != 1]:
        raise ValueError(f"expected labels of shape {tuple(shape)} to go with the outputs, got {tuple(labels.shape)}")
    if labels.shape[:1] != shape[:1]:
        raise ValueError(f"expected labels for {shape[0]} examples, got shape {tuple(labels.shape)}")
    return labels.reshape(shape)


# --- reading outputs and batches -------------------------------------------------------------------------------------


def _output(outputs: Any, name: str, position: int) -> Tensor:
    """Find the named tensor in a model's outputs, however the model returns them."""
    if isinstance(outputs, Mapping):
        value = outputs.get(name)
    elif isinstance(outputs, tuple | list):
        value = outputs[position] if len(outputs) > position else None
    else:
        value = outputs if isinstance(outputs, Tensor) and position == 0 else getattr(outputs, name, None)
    if not isinstance(value, Tensor):
        known = ", ".join(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise ValueError(f"expected {name} in the model's outputs, got {known}; pass a loss function of your own")
    return value


def _virtual_tokens(model: nn.Module, logits: Tensor, labels: Tensor) -> int:
    """Count the tokens that peft's prompt tuning has put in front of every row: they have outputs, and no labels."""
    config: Any = getattr(model, "active_peft_config", None)
    count = config.num_virtual_tokens if getattr(config, "is_prompt_learning", False) else 0
    return count if logits.shape[1] == labels.shape[-1] + count else 0  # prefix tuning has its own in the cache


def _decoder_input_ids(model: nn.Module, labels: Tensor) -> Tensor:
    for name in ("prepare_decoder_input_ids_from_labels", "_shift_right"):
        if hasattr(model, name):
            return getattr(model, name)(labels)
    # Others (M2M100, Whisper) shift labels within their forward, by a function of the file that defines them.
    homes = (sys.modules[ancestor.__module__] for ancestor in type(model).__mro__)
    shift: Any = next((home.shift_tokens_right for home in homes if hasattr(home, "shift_tokens_right")), None)
    if shift is not None and "decoder_start_token_id" in inspect.signature(shift).parameters:
        config: Any = model.config
        return shift(labels, config.pad_token_id, config.decoder_start_token_id)
    raise ValueError(
        f"{type(model).__name__} cannot build decoder_input_ids from labels, and the batch has none: add them in the "
        "data collator"
    )
