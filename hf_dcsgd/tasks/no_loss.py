"""Models of transformers whose own loss cannot be told apart by examples, and why."""

from __future__ import annotations

import re

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


def why_no_loss(model_class: type) -> str | None:
    """Return why the loss of a model is not one of each example; None where nothing is known against it."""
    for ancestor in model_class.__mro__:
        for pattern, reason in _REASONS:
            if re.search(pattern, ancestor.__name__):
                return reason
    return None
