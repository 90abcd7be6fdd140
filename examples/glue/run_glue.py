#!/usr/bin/env python
"""Fine-tune a text classifier with differential privacy, on a GLUE task or on files of your own.

    python run_glue.py --model_name_or_path bert-base-uncased --task_name qnli --do_train --do_eval \\
        --target_epsilon 8 --per_device_train_batch_size 32 --gradient_accumulation_steps 8 \\
        --num_train_epochs 5 --output_dir outputs/qnli

All options can also stand in one JSON or YAML file: python run_glue.py qnli.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import torch
import transformers
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from friendly_errors import UserError, exit_with_one_line, explained
from glue_arguments import DataTrainingArguments, ModelArguments, arguments
from glue_data import GlueData, load_glue_data, tokenized
from huggingface_hub.errors import HTTPError
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    Trainer,
    default_data_collator,
    set_seed,
)

from hf_dcsgd import DCSGDTrainer, DCSGDTrainingArguments
from hf_dcsgd.privacy.ledger import PrivacyLedger
from hf_dcsgd.reporting.report import format_spending
from hf_dcsgd.runs.checkpoints import last_complete_checkpoint
from hf_dcsgd.tasks.layer_selection import DEFAULT_LAYERS, select_trainable_layers

METRICS = Path(__file__).parent / "glue_metrics"


def main(argv: Sequence[str] | None = None) -> int:
    return exit_with_one_line(lambda: run(*arguments(argv, description=__doc__)))


def run(
    model_args: ModelArguments, data_args: DataTrainingArguments, training_args: DCSGDTrainingArguments
) -> dict[str, float]:
    """Trains, evaluates, predicts, as asked; returns all metrics."""
    set_up(training_args)
    checkpoint = checkpoint_to_resume(training_args, new_run=data_args.new_run)
    with training_args.main_process_first(desc="loading the data"):
        data = load_glue_data(data_args, model_args.cache_dir)
    require_splits(data, training_args)
    tokenizer, model = load_model(model_args, data)
    trainer = build_trainer(model, tokenizer, data, data_args, training_args)
    results: dict[str, float] = {}
    if training_args.do_train:
        results |= train(trainer, checkpoint)
    if training_args.do_eval:
        results |= evaluate_all(trainer, data, data_args)
    if training_args.do_predict:
        results |= predict_all(trainer, data, data_args)
    if training_args.do_train:
        publish(trainer, model_args, data)
    return results


def set_up(training_args: DCSGDTrainingArguments) -> None:
    if not (training_args.do_train or training_args.do_eval or training_args.do_predict):
        raise UserError("nothing to do: give --do_train, --do_eval or --do_predict")
    transformers.utils.logging.set_verbosity(training_args.get_process_log_level())
    transformers.utils.logging.enable_default_handler()
    if training_args.disable_tqdm:
        disable_progress_bar()
    if not torch.accelerator.is_available():
        training_args.dataloader_pin_memory = False  # it would only warn
    # Initialises the head and dropout. Noise and sampling do not use this seed.
    set_seed(training_args.seed)


def require_splits(data: GlueData, args: DCSGDTrainingArguments) -> None:
    """All data that will be wanted are there, before anything is spent."""
    for option, wanted, what, splits in (
        ("--do_train", args.do_train, "training", [name for name in data.splits if name == "train"]),
        ("--do_eval", args.do_eval, "validation", data.evaluation_splits()),
        ("--do_predict", args.do_predict, "test", data.test_splits()),
    ):
        if wanted and not splits:
            raise UserError(f"{option}: there are no {what} data (found: {', '.join(data.splits)})")


def last_checkpoint(output_dir: Path) -> str | None:
    try:
        return last_complete_checkpoint(output_dir)
    except ValueError:
        return None


def checkpoint_to_resume(training_args: DCSGDTrainingArguments, *, new_run: bool) -> str | None:
    """The checkpoint that was asked for; a run that is there already is never silently repeated or overwritten."""
    output_dir = Path(training_args.output_dir or ".")
    wanted = training_args.resume_from_checkpoint
    last = last_checkpoint(output_dir)
    if wanted is not None and not training_args.do_train:
        return None
    if wanted is not None:
        if str(wanted).lower() in ("last", "true"):
            if last is None:
                raise UserError(f"--resume_from_checkpoint {wanted}: there is no checkpoint in {output_dir}")
            return last
        if not Path(wanted).is_dir():
            hint = f"; the last one is {last}" if last else ""
            raise UserError(f"--resume_from_checkpoint {wanted}: there is no such folder{hint}")
        return str(wanted)
    if training_args.do_train and not new_run and (output_dir / PrivacyLedger.FILENAME).is_file():
        earlier = PrivacyLedger.read(output_dir)
        unfinished = earlier.charged < earlier.plan["steps"]
        go_on = "to go on with it: --resume_from_checkpoint last; " if last and unfinished else ""
        raise UserError(
            f"{output_dir} already holds a run ({earlier.charged} of {earlier.plan['steps']} steps charged); "
            f"{go_on}to start afresh: another --output_dir, or --new_run, which adds to what was spent"
        )
    return None


# --- the model -------------------------------------------------------------------------------------------------------


def load_model(args: ModelArguments, data: GlueData) -> tuple[Any, torch.nn.Module]:
    """Tokenizer and model, with a head for the labels of the data; with adapters, if asked for."""
    name = args.model_name_or_path
    options = {"cache_dir": args.cache_dir, "revision": args.model_revision}
    head: dict[str, Any] = {"num_labels": 1, "problem_type": "regression"}
    if not data.is_regression:
        names = data.label_names
        head = {
            "num_labels": len(names),
            "id2label": dict(enumerate(names)),
            "label2id": {label: number for number, label in enumerate(names)},
        }
    base = _base_of_adapters(name) or name
    with explained(partial(_cannot_load, name), OSError, ValueError, ImportError):
        config = AutoConfig.from_pretrained(args.config_name or base, **head, **options)
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name or name, **options)
    with explained(partial(_cannot_load, name), OSError, ValueError, RuntimeError):
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            base, config=config, dtype=torch.float32, ignore_mismatched_sizes=args.ignore_mismatched_sizes, **options
        )
        if base != name:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, name, is_trainable=True)
    # Some tokenizers do not know how long a text their model takes.
    positions = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
    tokenizer.model_max_length = min(tokenizer.model_max_length, positions)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return tokenizer, with_adapters(model, args) if args.lora else model


def _base_of_adapters(name: str) -> str | None:
    """Of a folder that holds peft adapters only: the model that they belong to."""
    if not (Path(name) / "adapter_config.json").is_file():
        return None
    from peft import PeftConfig

    return PeftConfig.from_pretrained(name).base_model_name_or_path


def _cannot_load(name: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    if "mismatch" in text:
        return (
            f"the head of {name} has another number of labels than the data; --ignore_mismatched_sizes starts with a "
            "fresh one"
        )
    if isinstance(error, OSError) and not Path(name).is_dir():
        return (
            f"cannot load the model {name!r}: there is no such folder, and the Hub cannot be reached or has no such "
            "model. Check the spelling and the network (HF_HUB_OFFLINE must not be set), or give a folder"
        )
    return f"cannot load the model {name!r}: {text[:300]}"


def with_adapters(model: PreTrainedModel, args: ModelArguments) -> torch.nn.Module:
    """Low-rank adapters in the model; these and the classifier are trained, the rest is frozen."""
    try:
        from peft import LoraConfig, TaskType, get_peft_model
    except ImportError:
        raise UserError("--lora needs peft: pip install peft") from None
    targets = None if args.lora_targets is None else _names(args.lora_targets)
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        modules_to_save=None if args.lora_modules_to_save is None else _names(args.lora_modules_to_save),
    )
    linear = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    message = f"--lora_targets {args.lora_targets}: no such modules; linear ones are {', '.join(sorted(linear))}"
    with explained(lambda error: message, ValueError):
        return get_peft_model(model, config)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


# --- training and evaluation -----------------------------------------------------------------------------------------


def build_trainer(
    model: torch.nn.Module,
    tokenizer: Any,
    data: GlueData,
    data_args: DataTrainingArguments,
    training_args: DCSGDTrainingArguments,
) -> Trainer:
    train_dataset = eval_dataset = None
    with training_args.main_process_first(desc="tokenizing"):
        if training_args.do_train:
            train_dataset = prepared(data, "train", tokenizer, data_args, data_args.max_train_samples)
        evaluation = data.evaluation_splits()
        if training_args.do_eval and evaluation:
            eval_dataset = prepared(data, evaluation[0], tokenizer, data_args, data_args.max_eval_samples)
    if data_args.pad_to_max_length:
        collator: Callable[..., Any] = default_data_collator
    else:
        collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if training_args.bf16 else None)
    trainer_class: type[Trainer] = DCSGDTrainer
    if data_args.non_private:
        trainer_class = Trainer
        if isinstance(model, PreTrainedModel):
            select_trainable_layers(model, training_args.trainable_layers or DEFAULT_LAYERS)
        print("NOTHING IS PRIVATE in this run (--non_private): it is a reference only")
    unwritable = explained(
        lambda error: f"--output_dir {training_args.output_dir} cannot be written to: {error}",
        *(NotADirectoryError, PermissionError, FileExistsError),
    )
    with unwritable, explained(_cannot_reach_hub, ConnectionError, HTTPError):
        return trainer_class(
            model=model,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=metrics_of(data),
            processing_class=tokenizer,
            data_collator=collator,
        )


def _cannot_reach_hub(error: Exception) -> str:
    return (
        "--push_to_hub: the repository cannot be made on the Hub, and nothing was trained. Check the network "
        f"(HF_HUB_OFFLINE must not be set), and log in by `hf auth login`. {' '.join(str(error).split())[:200]}"
    )


def prepared(data: GlueData, split: str, tokenizer: Any, args: DataTrainingArguments, limit: int | None) -> Dataset:
    """A tokenized split, cut to `limit` rows."""
    if limit is not None:
        data.splits[split] = data.splits[split].select(range(min(limit, len(data.splits[split]))))
    return tokenized(data, split, tokenizer, args)


def metrics_of(data: GlueData) -> Callable[[EvalPrediction], dict[str, float]]:
    metric = evaluate.load(str(METRICS), data.metric_config, keep_in_memory=True)

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        answers = answers_of(prediction.predictions, data.is_regression)
        values = metric.compute(predictions=answers, references=prediction.label_ids)
        if len(values) > 1 and data.task is not None:
            values["combined_score"] = float(np.mean(list(values.values())))
        return values

    return compute


def answers_of(logits: Any, is_regression: bool) -> np.ndarray:
    logits = logits[0] if isinstance(logits, tuple) else logits
    return np.squeeze(logits, axis=-1) if is_regression else np.argmax(logits, axis=-1)


def train(trainer: Trainer, checkpoint: str | None) -> dict[str, float]:
    outcome = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    metrics = dict(outcome.metrics)
    if isinstance(trainer, DCSGDTrainer) and trainer.plan is not None:
        metrics |= {"epsilon": trainer.epsilon(), "delta": trainer.plan.delta}
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    return metrics


def evaluate_all(trainer: Trainer, data: GlueData, args: DataTrainingArguments) -> dict[str, float]:
    """Every evaluation set: MNLI has a matched and a mismatched one (metrics named eval_mm_…)."""
    metrics: dict[str, float] = {}
    for split in data.evaluation_splits():
        prefix = "eval_mm" if split.endswith("mismatched") else "eval"
        rows = prepared(data, split, trainer.processing_class, args, args.max_eval_samples)
        metrics |= trainer.evaluate(rows, metric_key_prefix=prefix)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    return metrics


def predict_all(trainer: Trainer, data: GlueData, args: DataTrainingArguments) -> dict[str, float]:
    """Writes `predictions_….tsv` in the format of GLUE's server; metrics too, where the test data have labels."""
    metrics: dict[str, float] = {}
    for split in data.test_splits():
        prefix = "test_mm" if split.endswith("mismatched") else "test"
        rows = prepared(data, split, trainer.processing_class, args, args.max_predict_samples)
        outcome = trainer.predict(rows, metric_key_prefix=prefix)
        metrics |= outcome.metrics or {}
        answers = answers_of(outcome.predictions, data.is_regression)
        path = (
            Path(trainer.args.output_dir or ".") / f"predictions_{data.task.name if data.task else 'own'}_{split}.tsv"
        )
        if trainer.is_world_process_zero():
            lines = ["index\tprediction", *(f"{k}\t{data.written_label(answer)}" for k, answer in enumerate(answers))]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            print(f"predictions: {path}")
    return metrics


def publish(trainer: Trainer, model_args: ModelArguments, data: GlueData) -> None:
    """The model card, pushed with the model if asked for."""
    facts: dict[str, Any] = {"finetuned_from": model_args.model_name_or_path, "tasks": "text-classification"}
    if data.task is not None:
        facts |= {
            "language": "en",
            "dataset_tags": "glue",
            "dataset_args": data.task.name,
            "dataset": f"GLUE {data.task.name.upper()}",
        }
    if trainer.args.push_to_hub:
        trainer.push_to_hub(**facts)
    else:
        trainer.create_model_card(**facts)
    if isinstance(trainer, DCSGDTrainer) and trainer.plan is not None and trainer.is_world_process_zero():
        print(format_spending(trainer.privacy_report()))


if __name__ == "__main__":
    sys.exit(main())
