"""What a whole run costs, end to end through `Trainer.train()`: plain, private, and private with a trunk cache.

A BERT with random weights whose last layer, pooler and classifier are trained. Variants take turns within one run;
epochs are timed one by one, and apart from them what is done before: filling the cache, which belongs to the first
epoch, and the start of the run (plan, checks), whose cost does not depend on the number of rows. Lengths are either
all the same, or drawn as those of QNLI are (a median of 45 tokens, at most 128), where plain training pads a batch to
its longest row. An epoch is one step on all rows, in micro-batches, so that Poisson draws are of one size. The cached
variant runs twice: it fills its cache, and then finds it filled.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from step_cost import SIZES
from timing import now
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from hf_dcsgd import DCSGDTrainer, DCSGDTrainingArguments
from hf_dcsgd.tasks.layer_selection import select_trainable_layers

EPOCHS, LENGTH = 2, 128
VARIANTS = ("plain", "dc_sgd_e", "dc_sgd_e, cache filled", "dc_sgd_e, cache there")


class EpochTimes(TrainerCallback):
    """Notes when epochs begin and end, and how long it takes until the data are there, which fills the cache."""

    def __init__(self, fills_cache: bool) -> None:
        self.started = self.began = now()
        self.seconds: list[float] = []
        self.start_up = self.filling = 0.0
        self._fills_cache = fills_cache

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if self._fills_cache:
            self.filling = now() - self.started

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = now()
        if not self.seconds:
            self.start_up = self.began - self.started - self.filling

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(now() - self.began)


def make_rows(count: int, mixed: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((count,), LENGTH)
    if mixed:
        lengths = (45 * torch.exp(0.45 * torch.randn(count, generator=generator))).long().clamp(12, LENGTH)
    return [
        {"input_ids": torch.randint(1000, 30_000, (int(n),), generator=generator).tolist(), "labels": i % 2}
        for i, n in enumerate(lengths)
    ]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest row, rounded up to a multiple of 8."""
    longest = -(-max(len(row["input_ids"]) for row in rows) // 8) * 8
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        tokens[i, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[i, : len(row["input_ids"])] = 1
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor([row["labels"] for row in rows])}


def run(variant: str, row: dict[str, Any], rows: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SIZES[row["model"]]))
    select_trainable_layers(model)
    common = {
        "per_device_train_batch_size": row["batch"],
        "gradient_accumulation_steps": row["rows"] // row["batch"],
        "num_train_epochs": EPOCHS + 2 * ("cache" in variant),
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    times = EpochTimes("cache" in variant)
    settings: dict[str, Any] = {"train_dataset": rows, "data_collator": collate, "callbacks": [times]}
    if variant == "plain":
        trainer: Trainer = Trainer(
            model, TrainingArguments(f"{folder}/plain", learning_rate=1e-3, **common), **settings
        )
    else:
        clipping, _, cache = variant.partition(", ")
        cached = {"trunk_cache": "on", "trunk_cache_dir": f"{folder}/cache"} if cache else {}
        output = f"{folder}/{variant}"
        args = DCSGDTrainingArguments(output, clipping=clipping, noise_multiplier=0.5, **cached, **common)
        trainer = DCSGDTrainer(model, args, **settings)
    times.started = now()
    trainer.train()
    return {"start_up": times.start_up, "filling": times.filling, "epochs": times.seconds}


def run_epochs(row: dict[str, Any]) -> dict[str, Any]:
    """Time all variants, round by round."""
    rows = make_rows(row["rows"], row["lengths"] == "mixed")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for _ in range(row["rounds"]):
        with tempfile.TemporaryDirectory() as folder:
            for name in VARIANTS:
                found[name].append(run(name, row, rows, folder))
    return {"variants": summary(found), "rounds_taken": found, "plain_step": _plain_step(found, row)}


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Compare each variant with the plain one of the same round; medians over rounds."""
    table = {}
    for name, runs in found.items():
        pairs = [(r, statistics.mean(p["epochs"])) for r, p in zip(runs, found["plain"], strict=True)]

        def median(value: Callable[[dict[str, Any], float], float], pairs: list[Any] = pairs) -> float:
            return statistics.median(value(run, plain) for run, plain in pairs)

        table[name] = {
            "start_up": median(lambda r, _: r["start_up"]),
            "first_epoch": median(lambda r, plain: _first(r) / plain),
            "later_epoch": median(lambda r, plain: _later(r) / plain),
            "five_epochs": median(lambda r, plain: (_first(r) + 4 * _later(r)) / (5 * plain)),
        }
    return table


def _first(run: dict[str, Any]) -> float:
    return float(run["filling"] + run["epochs"][0])


def _later(run: dict[str, Any]) -> float:
    return statistics.mean(run["epochs"][1:])


def _plain_step(found: dict[str, list[dict[str, Any]]], row: dict[str, Any]) -> float:
    """Seconds of a plain step of one micro-batch."""
    return statistics.median(_later(r) for r in found["plain"]) / (row["rows"] / row["batch"])
