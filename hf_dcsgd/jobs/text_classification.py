"""Fine-tune a text classifier privately, on a GLUE task or on files of the user's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, EvalPrediction, Trainer

from hf_dcsgd.jobs.arguments import DataTrainingArguments, JobParser, ModelArguments
from hf_dcsgd.jobs.errors import UserError, exit_code_of
from hf_dcsgd.jobs.glue import Task
from hf_dcsgd.jobs.metrics import text_metrics
from hf_dcsgd.jobs.models import load_pretrained
from hf_dcsgd.jobs.text_data import TextData, load_text_data, tokenized
from hf_dcsgd.jobs.training import carry_out, checkpoint_to_resume, make_trainer, set_up
from hf_dcsgd.training_args import DCSGDTrainingArguments


def main(argv: Sequence[str] | None = None, *, prog: str | None = None, description: str | None = __doc__) -> int:
    """Run a job from `argv`, or from the command line; return the exit code."""
    return exit_code_of(lambda: run(sys.argv[1:] if argv is None else argv, prog=prog, description=description))


def run(argv: Sequence[str], *, prog: str | None = None, description: str | None = __doc__) -> dict[str, float]:
    """Train, evaluate and predict, as asked; return all metrics."""
    usage = "%(prog)s --model_name_or_path MODEL --task_name TASK --do_train … | FILE.json | FILE.yaml"
    model_args, data_args, training_args = JobParser(prog=prog, usage=usage, description=description).parse(argv)
    set_up(training_args)
    checkpoint = checkpoint_to_resume(training_args, new_run=data_args.new_run)
    with training_args.main_process_first(desc="loading the data"):
        data = load_text_data(data_args, model_args.cache_dir, training_args.privacy_unit)
    wanted = wanted_splits(data, training_args)
    tokenizer, model = load_model(model_args, data.task)
    with training_args.main_process_first(desc="tokenizing"):
        splits = {name: tokenized(data, name, tokenizer, data_args, training_args.privacy_unit) for name in wanted}
    trainer = build_trainer(model, tokenizer, data.task, splits, data_args, training_args)
    return carry_out(
        trainer,
        checkpoint,
        data_args,
        evaluate=lambda: evaluate(trainer, splits),
        predict=lambda: predict(trainer, splits, data.task),
        **card_facts(model_args, data.task),
    )


def wanted_splits(data: TextData, args: DCSGDTrainingArguments) -> list[str]:
    """Return the names of all splits that the job needs; refuse to start without one of them."""
    names: list[str] = []
    for option, kind in (("do_train", "train"), ("do_eval", "validation"), ("do_predict", "test")):
        if getattr(args, option):
            if not data.splits_of(kind):
                raise UserError(f"--{option}: there are no {kind} data (found: {', '.join(data.splits)})")
            names += data.splits_of(kind)
    return names


# --- the model -------------------------------------------------------------------------------------------------------


def load_model(args: ModelArguments, task: Task) -> tuple[Any, torch.nn.Module]:
    """Load tokenizer and model, with a head for the task's labels, and with adapters if asked for."""
    head: dict[str, Any] = {"num_labels": 1, "problem_type": "regression"}
    if not task.is_regression:
        ids = {label: number for number, label in enumerate(task.labels)}
        head = {"num_labels": len(ids), "id2label": dict(enumerate(task.labels)), "label2id": ids}
    return load_pretrained(args, AutoModelForSequenceClassification, "SEQ_CLS", **head)


# --- training and evaluation -----------------------------------------------------------------------------------------


def build_trainer(
    model: torch.nn.Module,
    tokenizer: Any,
    task: Task,
    splits: dict[str, Dataset],
    data_args: DataTrainingArguments,
    args: DCSGDTrainingArguments,
) -> Trainer:
    """Build the trainer; without privacy, as a reference, if asked for."""
    padding = transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if args.bf16 else None)
    return make_trainer(
        model,
        args,
        non_private=data_args.non_private,
        train_dataset=splits.get("train"),
        eval_dataset=next((rows for name, rows in splits.items() if name.startswith("validation")), None),
        compute_metrics=metrics_of(task),
        processing_class=tokenizer,
        data_collator=transformers.default_data_collator if data_args.pad_to_max_length else padding,
    )


def metrics_of(task: Task) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return the task's metrics as a function for the trainer; GLUE's have a combined score where they are several."""

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        answers = answers_of(prediction.predictions, task)
        values = text_metrics(task.metrics, answers, np.asarray(prediction.label_ids))
        if len(values) > 1 and task.folder:
            values["combined_score"] = float(np.mean(list(values.values())))
        return values

    return compute


def answers_of(logits: Any, task: Task) -> np.ndarray:
    logits = logits[0] if isinstance(logits, tuple) else logits
    return np.squeeze(logits, axis=-1) if task.is_regression else np.argmax(logits, axis=-1)


def evaluate(trainer: Trainer, splits: dict[str, Dataset]) -> dict[str, float]:
    """Evaluate on every validation split: MNLI has a matched and a mismatched one (metrics named eval_mm_…)."""
    metrics: dict[str, float] = {}
    for split in (name for name in splits if name.startswith("validation")):
        prefix = "eval_mm" if split.endswith("mismatched") else "eval"
        metrics |= trainer.evaluate(splits[split], metric_key_prefix=prefix)
    return metrics


def predict(trainer: Trainer, splits: dict[str, Dataset], task: Task) -> dict[str, float]:
    """Write `predictions_….tsv` in the format of GLUE's server; return metrics where the test data have labels."""
    metrics: dict[str, float] = {}
    for split in (name for name in splits if name.startswith("test")):
        prefix = "test_mm" if split.endswith("mismatched") else "test"
        outcome = trainer.predict(splits[split], metric_key_prefix=prefix)
        metrics |= outcome.metrics or {}
        if trainer.is_world_process_zero():
            answers = answers_of(outcome.predictions, task)
            lines = ["index\tprediction", *(f"{k}\t{task.shown(answer)}" for k, answer in enumerate(answers))]
            path = Path(trainer.args.output_dir or ".") / f"predictions_{task.name}_{split}.tsv"
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            print(f"predictions: {path}")
    return metrics


def card_facts(model_args: ModelArguments, task: Task) -> dict[str, Any]:
    """Return what the model card says of model and data."""
    facts: dict[str, Any] = {"finetuned_from": model_args.model_name_or_path, "tasks": "text-classification"}
    if task.folder:
        of_glue = {"language": "en", "dataset_tags": "glue", "dataset_args": task.name}
        facts |= of_glue | {"dataset": f"GLUE {task.name.upper()}"}
    return facts
