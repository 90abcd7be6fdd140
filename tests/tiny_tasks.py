"""Tiny models and tiny datasets that can be learned, and one way to make a trainer of them.

Most tests use the same N, B and σ: the accountant remembers what it has computed for a rate and a multiplier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from architectures import ENCODER, FIRST_FREE_TOKEN, VOCAB, randomized
from torch import Tensor, nn

from hf_dcsgd import DCSGDTrainer, DCSGDTrainingArguments
from hf_dcsgd.data.rows import Batch
from hf_dcsgd.privacy.mechanism import NoisyRelease
from hf_dcsgd.step import PrivateStep

FEATURES, CLASSES = 6, 3
N, BATCH, SIGMA = 64, 16, 1.0
CLASS_TOKENS = 10  # tokens of each class's own vocabulary

Row = dict[str, Any]


# --- data ------------------------------------------------------------------------------------------------------------


def feature_rows(n: int = N, seed: int = 0, spread: float = 0.5) -> list[Row]:
    """Points around one corner per class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (n,), generator=generator)
    features = spread * torch.randn(n, FEATURES, generator=generator)
    features[torch.arange(n), labels] += 1
    return [{"features": x, "labels": y} for x, y in zip(features, labels, strict=True)]


def sentence(label: int, length: int, generator: torch.Generator) -> list[int]:
    """Token ids, two thirds of them from the vocabulary of the class, the others from anywhere."""
    own = FIRST_FREE_TOKEN + label * CLASS_TOKENS
    from_class = torch.randint(own, own + CLASS_TOKENS, (length,), generator=generator)
    from_anywhere = torch.randint(FIRST_FREE_TOKEN, VOCAB, (length,), generator=generator)
    return torch.where(torch.rand(length, generator=generator) < 2 / 3, from_class, from_anywhere).tolist()


def text_rows(n: int = N, seed: int = 0, longest: int = 11) -> list[Row]:
    """Unpadded token lists of unequal length; the label is the class that most tokens come from."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        label = int(torch.randint(CLASSES, (), generator=generator))
        length = int(torch.randint(4, longest + 1, (), generator=generator))
        rows.append({"input_ids": sentence(label, length, generator), "labels": label})
    return rows


def pad(rows: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Collates token lists, padded to the longest row of the batch."""
    longest = max(len(row["input_ids"]) for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        tokens[i, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[i, : len(row["input_ids"])] = 1
    labels = torch.stack([torch.as_tensor(row["labels"]) for row in rows])
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


# --- models ----------------------------------------------------------------------------------------------------------


class FeatureClassifier(nn.Module):
    """A plain module, not from transformers: takes no labels, returns its logits as a bare tensor."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, 8)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(8, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.classifier(self.dropout(torch.tanh(self.hidden(features))))


def feature_classifier(dropout: float = 0.0, seed: int = 0) -> FeatureClassifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FeatureClassifier(dropout)


def tiny_bert(dropout: float = 0.0, **settings: Any) -> hf.BertForSequenceClassification:
    config = {**ENCODER, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, **settings}
    return randomized(lambda: hf.BertForSequenceClassification(hf.BertConfig(**config)))  # type: ignore[return-value]


# --- trainers --------------------------------------------------------------------------------------------------------


def quiet(**changes: Any) -> dict[str, Any]:
    """Arguments of transformers for a run without screen output or saved files."""
    return {
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "per_device_eval_batch_size": 64,
        **changes,
    }


def private_args(output_dir: Path | str, **changes: Any) -> DCSGDTrainingArguments:
    """B = 16, σ = 1 and one epoch of four steps on 64 rows, by RDP, which is quick, unless changed."""
    defaults = quiet(recipe="none", accountant="rdp", per_device_train_batch_size=BATCH, num_train_epochs=1)
    if "target_epsilon" not in changes:
        defaults["noise_multiplier"] = SIGMA
    return DCSGDTrainingArguments(output_dir=str(output_dir), **{**defaults, **changes})


def feature_trainer(
    output_dir: Path | str,
    model: nn.Module | None = None,
    rows: Any = None,
    trainer_class: type[DCSGDTrainer] = DCSGDTrainer,
    trainer_options: Mapping[str, Any] | None = None,
    **changes: Any,
) -> DCSGDTrainer:
    """The smallest trainer there is: a plain module on 64 points."""
    options = dict(trainer_options or {})
    if model is None and "model_init" not in options:
        model = feature_classifier()
    rows = feature_rows() if rows is None else rows
    args = private_args(output_dir, **changes)
    return trainer_class(model, args, train_dataset=rows, **{"eval_dataset": feature_rows(seed=1), **options})


def text_trainer(
    output_dir: Path | str, model: nn.Module | None = None, rows: Any = None, **changes: Any
) -> DCSGDTrainer:
    """A tiny BERT on 64 short texts; everything is trained, unless told otherwise."""
    options = changes.pop("trainer_options", {})
    args = private_args(output_dir, **{"trainable_layers": "all", **changes})
    return DCSGDTrainer(
        tiny_bert() if model is None else model,
        args,
        train_dataset=text_rows() if rows is None else rows,
        **{"eval_dataset": text_rows(seed=1), "data_collator": pad, **options},
    )


def flat_parameters(model: nn.Module, trainable_only: bool = False) -> Tensor:
    """All parameters as one vector, copied."""
    chosen = [p for p in model.parameters() if p.requires_grad or not trainable_only]
    return torch.cat([p.detach().flatten().clone() for p in chosen])


def accuracy(prediction: hf.EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class ForcedDraws(hf.TrainerCallback):
    """Makes the sampler draw what a test says."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        train_dataloader.batch_sampler.draw = self.draw


def force_draws(trainer: DCSGDTrainer, draw: Callable[[], Any]) -> None:
    """Makes the trainer's sampler draw what the test says, for instance everything."""
    trainer.add_callback(ForcedDraws(draw))


def watch_steps(
    monkeypatch: pytest.MonkeyPatch,
    *,
    accumulate: Callable[[PrivateStep, Batch], None] | None = None,
    release: Callable[[PrivateStep], None] | None = None,
) -> None:
    """Calls these with every step and stack, before they are accumulated or released."""
    original_accumulate, original_release = PrivateStep.accumulate, PrivateStep.release

    def watched_accumulate(step: PrivateStep, stack: Batch) -> Tensor:
        if accumulate is not None:
            accumulate(step, stack)
        return original_accumulate(step, stack)

    def watched_release(step: PrivateStep) -> NoisyRelease:
        if release is not None:
            release(step)
        return original_release(step)

    monkeypatch.setattr(PrivateStep, "accumulate", watched_accumulate)
    monkeypatch.setattr(PrivateStep, "release", watched_release)
