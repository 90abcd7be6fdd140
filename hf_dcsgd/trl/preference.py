"""Pairs of texts of which one is preferred: TRL's `RewardTrainer` and `DPOTrainer` with the private step.

A pair is one example: its two texts are run as two rows, and the gradient of their common loss is clipped as one.
TRL's collators put all chosen texts of a batch before all rejected ones; for the private step they stay together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from trl import DPOTrainer, RewardTrainer

from hf_dcsgd.data.rows import Batch, Collator
from hf_dcsgd.tasks.losses import IGNORE_INDEX
from hf_dcsgd.trainer import DCSGDTrainer
from hf_dcsgd.trl.arguments import DCSGDDPOConfig, DCSGDRewardConfig
from hf_dcsgd.trl.bridge import Bridge

MARGIN, REFERENCE = "margin", "reference_log_probs"


class DCSGDRewardTrainer(Bridge, RewardTrainer, DCSGDTrainer):
    """Drop-in for TRL's `RewardTrainer`, with the guarantee of `DCSGDTrainer`. A pair of texts is an example.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            As for `RewardTrainer`: a classifier with one label, or the name of a model.
        args (`DCSGDRewardConfig`):
            The arguments of the run.
        named:
            The other arguments are those of `RewardTrainer`, by name.
    """

    config_class = DCSGDRewardConfig
    args: DCSGDRewardConfig

    def __init__(self, model: Any, args: DCSGDRewardConfig | None = None, **named: Any) -> None:
        super().__init__(model, args, **named)
        self.rows_per_example, self.train_label_names = 2, (MARGIN,)
        self.per_example_loss_func = RewardLosses(self.args.center_rewards_coefficient)

    def rows_and_collator(self) -> tuple[Any, Collator]:
        """Return the training pairs, and a collator that keeps the texts of a pair together."""
        rows, collate = super().rows_and_collator()
        return rows, PairCollator(collate, _with_margin)


class DCSGDDPOTrainer(Bridge, DPOTrainer, DCSGDTrainer):
    """Drop-in for TRL's `DPOTrainer`, with the guarantee of `DCSGDTrainer`. A pair of texts is an example.

    What the reference model says of a pair is computed once, before training.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            As for `DPOTrainer`: a causal language model, or the name of one.
        args (`DCSGDDPOConfig`):
            The arguments of the run.
        named:
            The other arguments are those of `DPOTrainer`, by name.
    """

    config_class = DCSGDDPOConfig
    args: DCSGDDPOConfig

    def __init__(self, model: Any, ref_model: Any = None, args: DCSGDDPOConfig | None = None, **named: Any) -> None:
        super().__init__(model, args, ref_model=ref_model, **named)
        self.rows_per_example, self.train_label_names = 2, ("labels", REFERENCE)
        self.per_example_loss_func = DPOLosses(self.args.loss_type[0], self.args.beta)

    def rows_and_collator(self) -> tuple[Any, Collator]:
        """Return the training pairs, and a collator that keeps the texts of a pair together."""
        rows, collate = super().rows_and_collator()
        return rows, PairCollator(collate, _with_reference)


# --- batches ---------------------------------------------------------------------------------------------------------


class PairCollator:
    """Turns what TRL's collators make of n pairs, (2n, …), into (n, 2, …); then `complete` adds the labels.

    A class, so that worker processes can receive it.
    """

    def __init__(self, collate: Collator, complete: Callable[[Batch], Batch]) -> None:
        self._collate, self._complete = collate, complete

    def __call__(self, rows: list[Any]) -> Batch:
        batch = self._collate(rows)
        return self._complete({name: _paired(value, len(rows)) for name, value in batch.items()})


def _paired(value: Tensor, pairs: int) -> Tensor:
    """Put the halves of an entry of (2 · pairs, …) side by side; others have one value per pair already."""
    return torch.stack(value.chunk(2), dim=1) if len(value) == 2 * pairs else value


def _with_margin(batch: Batch) -> Batch:
    return {MARGIN: torch.zeros(len(batch["input_ids"])), **batch}


def _with_reference(batch: Batch) -> Batch:
    labels = batch["input_ids"].masked_fill(batch.pop("completion_mask") == 0, IGNORE_INDEX)
    reference = torch.stack([batch.pop("ref_chosen_logps"), batch.pop("ref_rejected_logps")], dim=1)
    return {**batch, "labels": labels, REFERENCE: reference}


# --- losses ----------------------------------------------------------------------------------------------------------


class RewardLosses:
    """The loss of a pair under the model of Bradley and Terry, from outputs (n, 2, 1); the chosen text comes first.

    Args:
        center: How much the square of the sum of both rewards counts, None for nothing.
    """

    def __init__(self, center: float | None) -> None:
        self._center = center

    def __call__(self, outputs: Any, margin: Tensor) -> Tensor:
        chosen, rejected = outputs.logits.float().squeeze(-1).unbind(dim=1)
        losses = -F.logsigmoid(chosen - rejected - margin)
        return losses if self._center is None else losses + self._center * (chosen + rejected).square()


class DPOLosses:
    """The loss of a pair by direct preference optimization, from outputs (n, 2, T, vocabulary); the chosen text first.

    Args:
        kind: As TRL's `loss_type`: sigmoid, hinge or ipo.
        beta: How strongly the model is held to the reference.
    """

    def __init__(self, kind: str, beta: float) -> None:
        self._kind, self._beta = kind, beta

    def __call__(self, outputs: Any, labels: dict[str, Tensor]) -> Tensor:
        targets = labels["labels"]
        gains = _log_probs(outputs.logits, targets) - labels[REFERENCE]
        if self._kind == "ipo":
            gains = gains / (targets != IGNORE_INDEX).sum(dim=-1).clamp(min=1)
            return (gains[:, 0] - gains[:, 1] - 1 / (2 * self._beta)).square()
        difference = self._beta * (gains[:, 0] - gains[:, 1])
        return -F.logsigmoid(difference) if self._kind == "sigmoid" else torch.relu(1 - difference)


def _log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the logarithm of the probability of each text's counted tokens, (n, 2)."""
    labels = F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
    losses = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none")
    return -losses.view(labels.shape).sum(dim=-1)
