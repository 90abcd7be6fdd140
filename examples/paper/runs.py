"""One run of the results page: a task, a method and its options, ε and a seed → accuracy, as a JSON file.

A run is described by its `Setting`, which also names its file: a run whose file is there is not repeated.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tasks
import torch
from adam_bc import AdamBC
from ceiling import CeilingTrainer
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import IntervalStrategy

from hf_dcsgd import DCSGDTrainer, DCSGDTrainingArguments
from hf_dcsgd.privacy.tuning_cost import tuning_cost
from hf_dcsgd.tasks.layer_selection import select_trainable_layers

RESULTS = Path(__file__).parent / "results"
PAPER_EPOCHS = {"mnist": 10, "names": 20, "cifar10": 2}  # the paper has 20 for CIFAR-10: hours on two cores
GRID = 10  # thresholds that the paper tries for DP-SGD
PAPER_BATCH = 256


@dataclass(frozen=True)
class Setting:
    """What a run is: everything that its result depends on, but chance.

    Args:
        task: A task of `tasks.py`.
        method: `non_private`, or a clipping strategy at the paper's setting (B = 256, Adam at 1e-3, a constant rate,
            5 epochs for text, RDP), or `recipe`: nothing given but ε.
        epsilon: ε; None without privacy.
        options: Arguments that differ from the method's; and `tuned_by`, a method of `tuning_cost`: the noise is then
            that of one run among `GRID` ones that cost ε together. `adam_bc_rate` trains with `AdamBC` at that share
            of the recipe's learning rate.
        rows: How many training rows; None for all.
        seed: Initializes the head. Noise and draws are fresh in any case.
        model: A folder under `weights` of the data, for text; None for all-MiniLM-L6-v2.
    """

    task: str
    method: str
    epsilon: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    rows: int | None = None
    seed: int = 0
    model: str | None = None

    @property
    def key(self) -> str:
        """Name the file of the result."""
        options = "_".join(f"{name}={value}" for name, value in sorted(self.options.items()))
        parts = [self.task, str(self.rows or "all"), self.method, f"eps={self.epsilon:g}" if self.epsilon else ""]
        name = re.sub(r"[^\w=.+-]+", "-", "_".join(part for part in (*parts, options, f"seed={self.seed}") if part))
        return f"{name}_{self.model}" if self.model else name

    def path(self, results: Path = RESULTS) -> Path:
        """Return where the result is kept."""
        return results / f"{self.key}.json"

    def arguments(self, folder: str, dataset_size: int) -> TrainingArguments:
        """Return the arguments of the run on so many rows."""
        common: dict[str, Any] = {
            "save_strategy": "no",
            "report_to": "none",
            "logging_strategy": "no",
            "seed": self.seed,
            "use_cpu": not torch.accelerator.is_available(),
            "per_device_eval_batch_size": 128,
            "dataloader_pin_memory": torch.accelerator.is_available(),
        }
        if self.method == "non_private":
            common |= {"remove_unused_columns": False} if self.task in tasks.TEXT else {}
            return TrainingArguments(folder, max_grad_norm=1.0, **{**common, **self.options})
        if self.task in tasks.TEXT:
            common |= {"trunk_cache": "on"}
        if self.method != "recipe":
            common |= {"recipe": "paper", "clipping": self.method}
            # A whole logical batch at a time, where little memory is needed for a row.
            common |= {"per_device_train_batch_size": PAPER_BATCH} if self.task in tasks.TEXT else {}
            common |= {"num_train_epochs": PAPER_EPOCHS[self.task]} if self.task in PAPER_EPOCHS else {}
        budget: dict[str, Any] = {"target_epsilon": self.epsilon}
        options = {name: value for name, value in self.options.items() if name not in ("tuned_by", "adam_bc_rate")}
        if "tuned_by" in self.options:
            budget = {"noise_multiplier": self._noise_of_a_tuned_run(dataset_size)}
        return DCSGDTrainingArguments(folder, **{**common, **budget, **options})

    def _noise_of_a_tuned_run(self, dataset_size: int) -> float:
        assert self.epsilon is not None
        cost = tuning_cost(
            method=self.options["tuned_by"],
            epsilon=self.epsilon,
            delta=1 / dataset_size,
            runs=GRID,
            sampling_rate=PAPER_BATCH / dataset_size,
            steps=dataset_size // PAPER_BATCH * PAPER_EPOCHS.get(self.task, 5),
        )
        if cost.noise_multiplier is None:
            raise ValueError(f"{self.key}: {cost.note}")
        return cost.noise_multiplier


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return accuracy, and Matthews' correlation for unbalanced labels."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    found, labels = np.argmax(logits, axis=-1), prediction.label_ids
    both = np.corrcoef(found, labels)[0, 1] if len(set(found)) > 1 else 0.0
    return {"accuracy": float((found == labels).mean()), "correlation": float(both)}


def carry_out(
    setting: Setting, data_folder: Path, watch: Callable[[DCSGDTrainer], None] = lambda trainer: None
) -> dict[str, Any]:
    """Train and evaluate; return the result, JSON-able. `watch` sees the trainer of a private run before it starts."""
    logging.getLogger("hf_dcsgd").setLevel(logging.ERROR)
    set_seed(setting.seed)
    data = tasks.load(setting.task, data_folder, rows=setting.rows, model=setting.model)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        args, model = setting.arguments(folder, len(data.train)), data.make_model()
        common: dict[str, Any] = {
            "train_dataset": data.train,
            "eval_dataset": data.evaluation,
            "data_collator": data.collator,
            "compute_metrics": accuracy,
        }
        if isinstance(args, DCSGDTrainingArguments):
            trainer: Trainer = DCSGDTrainer(model, args, **common, per_example_loss_func=data.loss)
            watch(trainer)
            if "adam_bc_rate" in setting.options:
                trainer.optimizer = _adam_bc(trainer, setting.options["adam_bc_rate"])
        elif setting.task in tasks.TEXT:
            select_trainable_layers(model)
            trainer = CeilingTrainer(model, args, **common)
        else:
            trainer = Trainer(model, args, **common, compute_loss_func=_mean_of(data.loss))
        if isinstance(trainer, DCSGDTrainer) and setting.task in tasks.TEXT:
            # At the last step, where hidden states of the evaluation rows are taken from the trunk cache.
            assert trainer.plan is not None
            args.eval_strategy, args.eval_steps = IntervalStrategy.STEPS, trainer.plan.steps
            trainer.train()
            metrics = trainer.state.log_history[-2]
        else:
            trainer.train()
            metrics = trainer.evaluate()
        result: dict[str, Any] = {
            "setting": dataclasses.asdict(setting),
            "accuracy": metrics["eval_accuracy"],
            "correlation": metrics["eval_correlation"],
            "evaluation_rows": len(data.evaluation),
            "cpu_seconds": round(time.process_time() - started, 1),
            "steps": trainer.state.global_step,
            "learning_rate": args.learning_rate,
            "threads": torch.get_num_threads(),
            "versions": {name: importlib.metadata.version(name) for name in ("hf-dcsgd", "torch", "transformers")},
        }
        if isinstance(trainer, DCSGDTrainer):
            assert trainer.plan is not None
            result |= {"plan": trainer.plan.to_dict(), "epsilon": trainer.epsilon()}
            result["thresholds"] = _thresholds(Path(folder))
    return result


def _adam_bc(trainer: DCSGDTrainer, share: float) -> AdamBC:
    """Return the optimizer for releases divided by their threshold: the noise of each coordinate is σ_T/B."""
    assert trainer.plan is not None
    assert trainer.args.scale_free_gradient
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    noise_std = trainer.plan.grad_noise_multiplier / trainer.plan.expected_batch_size
    return AdamBC(trained, share * trainer.args.learning_rate, noise_variance=noise_std**2)


def _mean_of(loss: Any) -> Any:
    return lambda outputs, labels, num_items_in_batch=None: loss(outputs, labels).mean()


def _thresholds(folder: Path) -> list[float]:
    """Return C at some twenty steps of the run."""
    lines = (folder / "privacy_trace.jsonl").read_text(encoding="utf-8").splitlines()
    values = [json.loads(line).get("clip_threshold") for line in lines]
    return [values[k] for k in tasks.spread(len(values), 20)]


def write(result: dict[str, Any], path: Path) -> None:
    """Write a result whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, path)
