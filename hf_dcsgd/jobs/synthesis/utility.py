"""Ask what synthetic rows are good for: classifiers trained on them, and on the real rows with and without privacy.

All three are the same linear classifier on features of a frozen public model, so that what differs is the rows. What
is returned here is PRIVATE, not noised.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer

from hf_dcsgd.jobs.errors import explained
from hf_dcsgd.trainer import DCSGDTrainer
from hf_dcsgd.training_args import DCSGDTrainingArguments

_STEPS, _RATE, _DECAY = 300, 0.02, 1e-3  # of plain training on all rows at once


class LinearClassifier(nn.Module):
    """A linear layer on features that are normalized one row at a time."""

    def __init__(self, width: int, labels: int) -> None:
        super().__init__()
        self.output = nn.Linear(width, labels)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits."""
        return self.output(F.layer_norm(features, features.shape[-1:]))


@dataclass(frozen=True)
class Encoder:
    """A frozen public model without its head, and its tokenizer; texts are cut to `length` tokens."""

    model: Any
    tokenizer: Any
    length: int

    @classmethod
    def load(cls, name: str, length: int) -> Encoder:
        """Load it from the Hub or a folder."""
        with explained(lambda error: f"cannot load the model {name!r}: {error}", OSError, ValueError):
            tokenizer = AutoTokenizer.from_pretrained(name)
            model = AutoModel.from_pretrained(name, dtype=torch.float32).eval()
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        tokenizer.padding_side = "right"
        return cls(model, tokenizer, length)

    @torch.no_grad()
    def features(self, texts: Sequence[str], *, batch_size: int = 64, show_progress: bool = True) -> Tensor:
        """Return the mean of the last hidden states over the tokens of each text."""
        encoded = [self.tokenizer(text or " ", truncation=True, max_length=self.length)["input_ids"] for text in texts]
        order = sorted(range(len(texts)), key=lambda place: len(encoded[place]))
        found: dict[int, Tensor] = {}
        with tqdm(total=len(texts), desc="features", unit="text", disable=not show_progress) as progress:
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                batch = self.tokenizer.pad({"input_ids": [encoded[place] for place in chosen]}, return_tensors="pt")
                mask = batch["attention_mask"]
                states = self.model(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
                means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
                found |= dict(zip(chosen, means, strict=True))
                progress.update(len(chosen))
        return torch.stack([found[place] for place in range(len(texts))])


def trained_plainly(features: Tensor, labels: Tensor, classes: int) -> LinearClassifier:
    """Train a classifier without privacy, on all rows at once."""
    model = LinearClassifier(features.shape[1], classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=_DECAY)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(features), labels).backward()
        optimizer.step()
    return model


def trained_privately(
    features: Tensor, labels: Tensor, classes: int, epsilon: float, delta: float
) -> LinearClassifier:
    """Train a classifier by DC-SGD at this budget, by the recipe; its run leaves nothing behind."""
    model = LinearClassifier(features.shape[1], classes)
    rows = Dataset.from_dict({"features": features.tolist(), "labels": labels.tolist()}).with_format("torch")
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        args = DCSGDTrainingArguments(
            folder,
            target_epsilon=epsilon,
            target_delta=delta,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        DCSGDTrainer(model, args, train_dataset=rows).train()
    return model


def scores(model: LinearClassifier, features: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy, and the mean over labels of the accuracy on each, in percent."""
    with torch.no_grad():
        hits = (model(features).argmax(1) == labels).numpy()
    per_label = [hits[labels.numpy() == label].mean() for label in np.unique(labels.numpy())]
    return {"accuracy": 100 * float(hits.mean()), "balanced_accuracy": 100 * float(np.mean(per_label))}


def compare_classifiers(
    real: tuple[Tensor, Tensor],
    synthetic: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    *,
    classes: int,
    epsilon: float | None,
    delta: float | None,
) -> dict[str, dict[str, float]]:
    """Score classifiers on held-out rows; without an ε there is no private one to compare with."""
    labels, count = held_out[1], torch.bincount(real[1], minlength=classes)
    majority = float((labels == count.argmax()).float().mean())
    present = len(np.unique(labels.numpy()))
    found = {
        "real_rows": scores(trained_plainly(*real, classes), *held_out),
        "synthetic_rows": scores(trained_plainly(*synthetic, classes), *held_out),
        "always_the_commonest_label": {"accuracy": 100 * majority, "balanced_accuracy": 100 / present},
    }
    if epsilon is not None and delta is not None:
        found["real_rows_privately"] = scores(trained_privately(*real, classes, epsilon, delta), *held_out)
    return found
