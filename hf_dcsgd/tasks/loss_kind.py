"""The kind of loss that a model is trained by, from its class and configuration or from shapes; or why it has none."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor, nn
from transformers import PreTrainedModel

LossKind: TypeAlias = Literal[
    "single_label_classification",
    "multi_label_classification",
    "regression",
    "token_classification",
    "masked_lm",
    "causal_lm",
    "seq2seq_lm",
    "question_answering",
    "multiple_choice",
    "ctc",
    "semantic_segmentation",
]
LOSS_KINDS: tuple[LossKind, ...] = get_args(LossKind)
Labels: TypeAlias = Tensor | Mapping[str, Tensor] | Sequence[Tensor]

# The first pattern found in a class's name decides; "classification" is refined by the config and the labels.
_KIND_BY_CLASS_NAME: tuple[tuple[str, str], ...] = (
    # These do not compute the usual loss of their kind: no shift, n-gram targets, a teacher. The user must say.
    (r"^(Bart|BigBirdPegasus|Blenderbot|BlenderbotSmall|MBart|Marian|Musicgen|MusicgenMelody)ForCausalLM$", "unusual"),
    (r"^(CpmAnt|Mvp|PLBart|Pegasus|TrOCR|Whisper)ForCausalLM$|^ProphetNetFor|^(XLM|Flaubert)WithLMHead", "unusual"),
    (r"ImageClassificationWithTeacher$", "unusual"),
    (r"For(Sequence|Image|Video|Audio)Classification|ForNextSentencePrediction$", "classification"),
    (r"ForTokenClassification$", "token_classification"),
    (r"ForQuestionAnswering(Simple)?$", "question_answering"),
    (r"ForMultipleChoice$", "multiple_choice"),
    (r"ForCTC$", "ctc"),
    (r"^(Segformer|DPT|MobileViT|MobileViTV2|MobileNetV2)ForSemanticSegmentation$", "semantic_segmentation"),
    (r"ForMaskedLM$|^XLNetLMHeadModel$", "masked_lm"),
    (r"ForCausalLM$|LMHeadModel$|ModelWithLMHead$", "causal_lm"),
    (r"ForConditionalGeneration$|MTModel$|EncoderDecoderModel$", "seq2seq_lm"),
)

# Models whose own loss cannot be told apart by examples, and why.
_OWN = "pass per_example_loss_func(outputs, labels), which returns one loss per example"
_REASONS: tuple[tuple[str, str], ...] = (
    (
        r"^(CLIP|AltCLIP|ChineseCLIP|CLIPSeg|Siglip\d*|GroupViT|Align|Blip|Flava|XCLIP|Clap|OwlViT|Owlv2)Model$"
        r"|DualEncoderModel$|ForImageTextRetrieval$|^Wav2Vec2\w*ForPreTraining$",
        "it compares the examples of a batch with each other, so that one example moves the gradient of all others. "
        "Nothing can be done about that for contrastive losses",
    ),
    (
        r"For(ObjectDetection|InstanceSegmentation|UniversalSegmentation)$|ForSegmentation$",
        "it matches what is found with the objects of a whole batch, and divides by their number, so that one example "
        f"moves the gradient of all others; {_OWN}",
    ),
    (
        r"^ViTMAEForPreTraining$|ForMaskedImageModeling$",
        "it is computed within the forward, from the inputs themselves. Let the data collator give the images once "
        f"more as labels, and {_OWN}",
    ),
    (r"ForPreTraining$", f"it adds up several losses within the forward; {_OWN}"),
    (
        r"^(XLNet|XLM|Flaubert)ForQuestionAnswering$",
        "it is computed within the forward, by a search along beams; take a …ForQuestionAnsweringSimple model, or "
        f"{_OWN}",
    ),
)


def unwrapped_model(model: nn.Module) -> nn.Module:
    """Return the model under data-parallel, compile and peft wrappers: the one whose class says what it is for."""
    while True:
        inner: Any = None
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        elif "_orig_mod" in model._modules:
            inner = model._modules["_orig_mod"]
        elif callable(base_model := getattr(model, "get_base_model", None)):
            inner = base_model()
        if inner is None:
            return model
        model = inner


def loss_kind(model: nn.Module, labels: Labels | None = None, logits: Tensor | None = None) -> LossKind:
    """Tell the kind of loss, by the class and config of a transformers model, or by shapes for other modules.

    For classifiers without `config.problem_type` the rule is that of transformers: one label is regression, integer
    labels are single-label, float labels multi-label. Without `labels`, integer labels are assumed. Unlike
    transformers, the config is not written to. Modules from elsewhere need `labels` and `logits`.
    """
    model = unwrapped_model(model)
    if not isinstance(model, PreTrainedModel):
        return _kind_from_shapes(model, labels, logits)
    kind = kind_of_class(type(model))
    if kind == "classification":
        return _classification_kind(model.config.problem_type, model.config.num_labels or 0, labels)
    # A decoder-only ForConditionalGeneration (images to text and the like) is not a seq2seq model.
    if kind in LOSS_KINDS and (kind != "seq2seq_lm" or model.config.is_encoder_decoder):
        return kind
    reason = why_no_loss(type(model))
    if reason is not None:
        raise ValueError(f"{type(model).__name__} cannot be trained privately by its own loss: {reason}")
    raise ValueError(
        f"no per-example loss is known for {type(model).__name__}; pass a function of (outputs, labels) that returns "
        f"one loss per example. Known kinds: {', '.join(LOSS_KINDS)}"
    )


def is_multiple_choice(model: nn.Module) -> bool:
    """Tell whether a model takes examples of several rows, (n, choices, …), and compares these."""
    base = unwrapped_model(model)
    return isinstance(base, PreTrainedModel) and kind_of_class(type(base)) == "multiple_choice"


def is_seq2seq_lm(model: nn.Module) -> bool:
    """Tell whether a model is an encoder-decoder that predicts text."""
    is_known = isinstance(model, PreTrainedModel) and model.config.is_encoder_decoder
    return is_known and kind_of_class(type(model)) == "seq2seq_lm"


def kind_of_class(model_class: type) -> str | None:
    """Return the kind that a class is named after; None where the name does not tell."""
    return _by_name(model_class, _KIND_BY_CLASS_NAME)


def why_no_loss(model_class: type) -> str | None:
    """Return why the loss of a model is not one of each example; None where nothing is known against it."""
    return _by_name(model_class, _REASONS)


def _by_name(model_class: type, table: Sequence[tuple[str, str]]) -> str | None:
    """Look up the nearest ancestor with a telling name: users subclass a model under names of their own."""
    for ancestor in model_class.__mro__:
        for pattern, value in table:
            if re.search(pattern, ancestor.__name__):
                return value
    return None


def _classification_kind(problem_type: str | None, num_labels: int, labels: Labels | None) -> LossKind:
    if problem_type is not None:
        known = ("single_label_classification", "multi_label_classification", "regression")
        if problem_type not in known:
            raise ValueError(f"expected config.problem_type to be one of {', '.join(known)}, got {problem_type!r}")
        return problem_type  # type: ignore[return-value]
    if num_labels == 1:
        return "regression"
    is_float = isinstance(labels, Tensor) and labels.is_floating_point()
    return "multi_label_classification" if is_float else "single_label_classification"


def _kind_from_shapes(model: nn.Module, labels: Labels | None, logits: Tensor | None) -> LossKind:
    if isinstance(labels, Tensor) and isinstance(logits, Tensor) and logits.ndim and labels.ndim:
        one_per_example = labels.numel() == len(labels) == len(logits)
        if logits.ndim <= 2 and (one_per_example or labels.shape == logits.shape):
            kind = _classification_kind(None, 1 if logits.ndim == 1 else logits.shape[-1], labels)
            if kind != "multi_label_classification" or labels.shape == logits.shape:
                return kind
        if not labels.is_floating_point() and logits.ndim == 3 and labels.shape == logits.shape[:2]:
            return "token_classification"
    shapes = [f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__ for x in (logits, labels)]
    raise ValueError(
        f"cannot tell the loss of {type(model).__name__} from logits {shapes[0]} and labels {shapes[1]}; pass a "
        "function of (outputs, labels) that returns one loss per example"
    )
