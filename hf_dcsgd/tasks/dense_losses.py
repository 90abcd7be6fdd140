"""Losses of whole sequences of sound and of every pixel: one per example, as in `losses.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def ctc_losses(model: Any, logits: Tensor, labels: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the CTC loss of each example, of logits (n, T, letters) and labels (n, L), as transformers has it.

    `config.ctc_loss_reduction`: "sum" as it is, "mean" divided by the example's own number of letters.
    """
    config, times = model.config, torch.full((len(logits),), logits.shape[1], device=logits.device)
    if attention_mask is not None:
        samples = attention_mask.sum(dim=-1).to(logits.device)
        times = model._get_feat_extract_output_lengths(samples).long().clamp(max=logits.shape[1])
    letters = (labels >= 0).sum(dim=-1)
    if ((labels < 0) & (torch.arange(labels.shape[1], device=labels.device) < letters[:, None])).any():
        raise ValueError("expected labels that count in front of those that do not (below 0), got them mixed")
    if (labels >= logits.shape[-1]).any():
        raise ValueError(f"expected labels below {logits.shape[-1]}, the size of the vocabulary, got larger ones")
    losses = F.ctc_loss(
        logits.float().log_softmax(dim=-1).transpose(0, 1),
        labels.clamp(min=0),
        times,
        letters,
        blank=config.pad_token_id,
        reduction="none",
        zero_infinity=config.ctc_zero_infinity,
    )
    return losses / letters.clamp(min=1) if config.ctc_loss_reduction == "mean" else losses


def segmentation_losses(model: Any, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over the counted pixels of each example.

    Logits (n, classes, h, w) are scaled to the size of the labels (n, H, W), as in transformers.
    """
    ignored, classes = getattr(model.config, "semantic_loss_ignore_index", 255), logits.shape[1]
    if classes < 2:
        raise ValueError(f"expected at least 2 classes (num_labels) for semantic segmentation, got {classes}")
    if ((labels != ignored) & ((labels < 0) | (labels >= classes))).any():
        raise ValueError(f"expected labels from 0 to {classes - 1}, or {ignored} for ignored pixels, got others")
    scaled = F.interpolate(logits.float(), size=labels.shape[-2:], mode="bilinear", align_corners=False)
    losses = F.cross_entropy(scaled, labels.long(), ignore_index=ignored, reduction="none")
    return losses.sum(dim=(1, 2)) / (labels != ignored).sum(dim=(1, 2)).clamp(min=1)
