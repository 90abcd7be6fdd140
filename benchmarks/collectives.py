"""What processes send each other per logical batch: number of collective calls and bytes, private and plain training.

    python benchmarks/collectives.py [--processes 2] [--output benchmarks/results/collectives.json]

Starts its own processes (gloo, CPU) with torchrun. Private training must make one call, of (d + b) × 4 bytes for d
trainable parameters and b histogram bins, whatever the accumulation is; DDP's reducer must stay silent. Plain
`Trainer` runs beside it, which also shows that the count would see the reducer. Logging is off, except in the last
row: what the loop of transformers itself gathers when it logs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from hf_dcsgd import DCSGDTrainer, DCSGDTrainingArguments

STEPS, RECORDS, LENGTH, BINS = 5, 200, 12, 20
RESULTS = Path(__file__).parent / "results" / "collectives.json"


class CollectiveCounter(TorchDispatchMode):
    """Sees every call of torch.distributed below Python, hence also those that DDP's reducer makes from C++."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.calls.append((func._schema.name.split("::")[1].rstrip("_"), sum(t.nbytes for t in tensors)))
        return func(*args, **(kwargs or {}))


class FromFirstToLastStep(TrainerCallback):
    """Counts from the end of the first step to the end of the last one: neither set-up, nor farewell, nor the first
    step, in which DDP arranges its buckets.
    """

    def __init__(self, last: int) -> None:
        self.last = last
        self.counter = CollectiveCounter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.counter.__enter__()
        elif state.global_step == self.last:
            self.counter.__exit__(None, None, None)


def make_model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=200, max_position_embeddings=LENGTH, **sizes))


def make_records() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 200, (RECORDS, LENGTH), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": int(row[0]) % 2} for row in tokens]


def measure(private: bool, output_dir: str, **options: Any) -> dict[str, Any]:
    """Count the collective calls per step of one short run, as this rank sees them."""
    watch = FromFirstToLastStep(STEPS)
    settings: dict[str, Any] = {
        **{"output_dir": output_dir, "max_steps": STEPS, "use_cpu": True, "report_to": "none", "disable_tqdm": True},
        **{"logging_strategy": "no", "save_strategy": "no", "per_device_train_batch_size": 4},
    } | options
    if private:
        settings |= {"noise_multiplier": 1.0, "trainable_layers": "all", "histogram_bins": BINS}
        args: TrainingArguments = DCSGDTrainingArguments(**settings)
        trainer: Trainer = DCSGDTrainer(make_model(), args, train_dataset=make_records(), callbacks=[watch])
    else:
        trainer = Trainer(make_model(), TrainingArguments(**settings), train_dataset=make_records(), callbacks=[watch])
    trainer.train()
    counted, calls = STEPS - 1, watch.counter.calls
    return {
        "calls_per_step": len(calls) / counted,
        "bytes_per_step": sum(size for _, size in calls) / counted,
        "kinds": dict(Counter(kind for kind, _ in calls)),
        "largest_bytes": max((size for _, size in calls), default=0),
        "d": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "world_size": trainer.args.world_size,
    }


def run_worker(output: Path) -> None:
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, private, options in (
            ("private", True, {}),
            ("private, 4 micro-batches", True, {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}),
            ("plain Trainer", False, {}),
            (
                "plain Trainer, 4 micro-batches",
                False,
                {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1},
            ),
            ("private, logging every step", True, {"logging_strategy": "steps", "logging_steps": 1}),
        ):
            rows[name] = measure(private, directory, **options)
    if int(os.environ.get("RANK", 0)) == 0:
        expected = (rows["private"]["d"] + BINS) * 4
        result = {"bins": BINS, "expected_calls": 1, "expected_bytes": expected, "rows": rows}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n")
    torch.distributed.destroy_process_group()


def show(result: Mapping[str, Any]) -> None:
    private = result["rows"]["private"]
    print(
        f"{private['world_size']} processes, d = {private['d']:,} parameters, b = {result['bins']} bins: "
        f"expected 1 call of (d + b) × 4 = {result['expected_bytes']:,} bytes per logical batch"
    )
    for name, row in result["rows"].items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in row["kinds"].items())
        print(f"  {name:<32} {row['calls_per_step']:6.2f} calls {row['bytes_per_step']:12,.0f} bytes   ({kinds})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(options.output)
        return 0
    returncode = launch(options.processes, options.output)
    if returncode == 0:
        show(json.loads(options.output.read_text()))
    return returncode


def launch(processes: int, output: Path) -> int:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [*launcher, __file__, "--worker", "--output", str(output)]
    environment = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", **os.environ}
    return subprocess.run(command, env=environment, timeout=600, stdout=subprocess.DEVNULL).returncode


def run_collectives(row: Mapping[str, Any]) -> dict[str, Any]:
    """Count between two processes, for the table of all benchmarks."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "collectives.json"
        if launch(2, output):
            raise RuntimeError("the processes failed")
        return dict(json.loads(output.read_text()))


if __name__ == "__main__":
    sys.exit(main())
