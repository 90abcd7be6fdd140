"""What a whole run costs, end to end through `Trainer.train()`: plain, private, and private with a trunk cache.

A BERT with random weights whose last layer, pooler and classifier are trained. Variants take turns within one run;
epochs are timed one by one, the start of a run apart. Lengths are either all the same, or drawn as those of QNLI are
(a median of 45 tokens, cut at `--length`), where plain training pads a batch to its longest row.

    python benchmarks/epochs.py --size base --rows 128
    python benchmarks/epochs.py --size mini --rows 1024 --lengths mixed
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from step_cost import SIZES
from timing import RESULTS
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from hf_dcsgd import DCSGDTrainer, DCSGDTrainingArguments
from hf_dcsgd.tasks.layer_selection import select_trainable_layers

EPOCHS = 3


class EpochTimes(TrainerCallback):
    """Notes when epochs begin and end, and the highest memory in use meanwhile."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: list[float] = []
        self.start_up = 0.0

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        if not self.seconds:
            self.start_up = now - self.started
            Path("/proc/self/clear_refs").write_text("5")
        self.began = now

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)


def peak_megabytes() -> float:
    """Return the highest resident memory since it was last reset (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def make_rows(count: int, length: int, mixed: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((count,), length)
    if mixed:
        lengths = (45 * torch.exp(0.45 * torch.randn(count, generator=generator))).long().clamp(12, length)
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


def run(variant: str, options: argparse.Namespace, rows: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SIZES[options.size]))
    select_trainable_layers(model)
    common = {
        "per_device_train_batch_size": options.batch,
        "num_train_epochs": EPOCHS,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    times = EpochTimes()
    settings: dict[str, Any] = {"train_dataset": rows, "data_collator": collate, "callbacks": [times]}
    if variant == "plain Trainer":
        trainer: Trainer = Trainer(
            model, TrainingArguments(f"{folder}/plain", learning_rate=1e-3, **common), **settings
        )
    else:
        clipping, _, cache = variant.partition(", ")
        cached = {"trunk_cache": "on", "trunk_cache_dir": f"{folder}/cache"} if cache else {}
        args = DCSGDTrainingArguments(f"{folder}/private", clipping=clipping, noise_multiplier=0.5, **cached, **common)
        trainer = DCSGDTrainer(model, args, **settings)
    times.started = time.perf_counter()
    trainer.train()
    return {"start_up": times.start_up, "epochs": times.seconds, "peak_megabytes": peak_megabytes()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="mini", help="the model (default: mini)")
    parser.add_argument("--rows", type=int, default=512, help="training rows (default: 512)")
    parser.add_argument("--batch", type=int, default=32, help="examples per step, expected (default: 32)")
    parser.add_argument("--length", type=int, default=128, help="tokens per row, at most (default: 128)")
    parser.add_argument(
        "--lengths", choices=("fixed", "mixed"), default="fixed", help="all alike, or as those of QNLI"
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default: 3)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = make_rows(options.rows, options.length, options.lengths == "mixed")
    variants = ("plain Trainer", "fixed", "dc_sgd_e", "dc_sgd_e, trunk cache")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"epochs_{options.size}_{options.lengths}.json"
    for _ in range(options.rounds):
        for name in variants:
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(run(name, options, rows, folder))
        path.write_text(
            json.dumps({"setting": vars(options), "table": summary(found), "rounds": found}, indent=2) + "\n"
        )
    print(f"Through Trainer.train() ({', '.join(f'{k} {v}' for k, v in vars(options).items())})")
    for name, row in summary(found).items():
        shown = "  ".join(f"{key} {value:.3g}" for key, value in row.items())
        print(f"  {name:<24} {shown}")


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Compare each variant with the plain one of the same round; medians over rounds."""
    table = {}
    for name, runs in found.items():
        pairs = list(zip(runs, found["plain Trainer"], strict=False))
        table[name] = {
            "seconds per later epoch": statistics.median(statistics.mean(r["epochs"][1:]) for r in runs),
            "later epoch": statistics.median(statistics.mean(r["epochs"][1:]) / _epoch(p) for r, p in pairs),
            "first epoch with start-up": statistics.median(
                (r["start_up"] + r["epochs"][0]) / _epoch(p) for r, p in pairs
            ),
            "five epochs": statistics.median(
                (r["start_up"] + r["epochs"][0] + 4 * statistics.mean(r["epochs"][1:])) / (5 * _epoch(p))
                for r, p in pairs
            ),
            "start-up in seconds": statistics.median(r["start_up"] for r in runs),
            "peak memory": statistics.median(r["peak_megabytes"] / p["peak_megabytes"] for r, p in pairs),
        }
    return table


def _epoch(run: dict[str, Any]) -> float:
    return statistics.mean(run["epochs"])


if __name__ == "__main__":
    main()
