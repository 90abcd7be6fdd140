"""`DCSGDSFTTrainer`: TRL's `SFTTrainer` whose model is differentially private in its training examples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from trl import SFTTrainer

from hf_dcsgd.tasks.losses import IGNORE_INDEX
from hf_dcsgd.trainer import DCSGDTrainer
from hf_dcsgd.trl.arguments import DCSGDSFTConfig
from hf_dcsgd.trl.bridge import Bridge


class DCSGDSFTTrainer(Bridge, SFTTrainer, DCSGDTrainer):
    """Drop-in for TRL's `SFTTrainer`, with the guarantee of `DCSGDTrainer`. A row of the dataset is an example.

    TRL prepares the data (chat templates, prompts and completions, what counts in the loss, truncation, adapters) and
    evaluates. Batches are Poisson draws, the loss of an example is the mean over its own counted tokens, and neither
    losses, entropies nor numbers of tokens of training batches are logged.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            As for `SFTTrainer`: a model, or the name of one.
        args (`DCSGDSFTConfig`):
            The arguments of the run.
        named:
            The other arguments are those of `SFTTrainer`, by name.
    """

    config_class = DCSGDSFTConfig
    args: DCSGDSFTConfig

    def __init__(self, model: Any, args: DCSGDSFTConfig | None = None, **named: Any) -> None:
        super().__init__(model, args, **named)
        if self.args.loss_type == "dft":
            self.per_example_loss_func = dft_losses


def dft_losses(outputs: Any, labels: Tensor) -> Tensor:
    """Return the loss of Dynamic Fine-Tuning per example: each token's loss is weighted by its probability."""
    labels = F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
    flat = F.cross_entropy(outputs.logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    losses = flat.view(labels.shape) * torch.exp(-flat.detach()).view(labels.shape)
    return losses.sum(dim=1) / (labels != IGNORE_INDEX).sum(dim=1).clamp(min=1)
