"""Fine-tune a text classifier privately, on a GLUE task or on files of the user's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from huggingface_hub.errors import HTTPError
from transformers import AutoModelForSequenceClassification, EvalPrediction, PreTrainedModel, Trainer

from hf_dcsgd.jobs.arguments import DataTrainingArguments, JobParser, ModelArguments
from hf_dcsgd.jobs.errors import UserError, exit_code_of, explained, needs_extra
from hf_dcsgd.jobs.glue import Task
from hf_dcsgd.jobs.text_data import TextData, load_text_data, tokenized
from hf_dcsgd.privacy.ledger import PrivacyLedger
from hf_dcsgd.reporting.report import format_spending
from hf_dcsgd.runs.checkpoints import last_complete_checkpoint, require_complete
from hf_dcsgd.tasks.layer_selection import DEFAULT_LAYERS, select_trainable_layers
from hf_dcsgd.trainer import DCSGDTrainer
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
    results: dict[str, float] = {}
    if training_args.do_train:
        results |= train(trainer, checkpoint)
    if training_args.do_eval:
        results |= evaluate(trainer, splits)
    if training_args.do_predict:
        results |= predict(trainer, splits, data.task)
    if training_args.do_train:
        publish(trainer, model_args, data.task)
    return results


def set_up(args: DCSGDTrainingArguments) -> None:
    if not (args.do_train or args.do_eval or args.do_predict):
        raise UserError("nothing to do: give --do_train, --do_eval or --do_predict")
    transformers.utils.logging.set_verbosity(args.get_process_log_level())
    transformers.utils.logging.enable_default_handler()
    if args.disable_tqdm:
        disable_progress_bar()
    if not torch.accelerator.is_available():
        args.dataloader_pin_memory = False  # it would only warn
    # Initializes the head and dropout. Noise and sampling do not use this seed.
    transformers.set_seed(args.seed)


def checkpoint_to_resume(args: DCSGDTrainingArguments, *, new_run: bool) -> str | None:
    """Return the checkpoint that was asked for; never repeat or overwrite a run that is there already."""
    output_dir = Path(args.output_dir or ".")
    wanted = args.resume_from_checkpoint
    if not args.do_train:
        return None
    if wanted is not None:
        is_last = str(wanted).lower() in ("last", "true")
        return last_complete_checkpoint(output_dir) if is_last else require_complete(wanted)
    if not new_run and (output_dir / PrivacyLedger.FILENAME).is_file():
        earlier = PrivacyLedger.read(output_dir)
        can_go_on = earlier.charged < earlier.plan["steps"] and any(output_dir.glob("checkpoint-*"))
        go_on = "to go on with it: --resume_from_checkpoint last; " if can_go_on else ""
        raise UserError(
            f"{output_dir} already holds a run ({earlier.charged} of {earlier.plan['steps']} steps charged); "
            f"{go_on}to start afresh: another --output_dir, or --new_run, which adds to what was spent"
        )
    return None


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
    name = args.model_name_or_path
    options = {"cache_dir": args.cache_dir, "revision": args.model_revision}
    head: dict[str, Any] = {"num_labels": 1, "problem_type": "regression"}
    if not task.is_regression:
        ids = {label: number for number, label in enumerate(task.labels)}
        head = {"num_labels": len(ids), "id2label": dict(enumerate(task.labels)), "label2id": ids}
    base = _base_of_adapters(name) or name
    with explained(partial(_cannot_load, name), OSError, ValueError, ImportError, RuntimeError):
        config = transformers.AutoConfig.from_pretrained(args.config_name or base, **head, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.tokenizer_name or name, **options)
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
    """Return the model that adapters belong to, where a folder holds adapters only."""
    if not (Path(name) / "adapter_config.json").is_file():
        return None
    with needs_extra(f"--model_name_or_path {name}"):
        from peft import PeftConfig
    return PeftConfig.from_pretrained(name).base_model_name_or_path


def _cannot_load(name: str, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300]
    if "mismatch" in reason:
        return f"{name} has another number of labels than the data; --ignore_mismatched_sizes starts with a fresh head"
    if isinstance(error, OSError) and not Path(name).is_dir():
        reason = (
            "there is no such folder, and the Hub cannot be reached or has no such model. Check the spelling and the "
            "network (HF_HUB_OFFLINE must not be set), or give a folder"
        )
    return f"cannot load the model {name!r}: {reason}"


def with_adapters(model: PreTrainedModel, args: ModelArguments) -> torch.nn.Module:
    """Add low-rank adapters to the model; these and the classifier are trained, the rest is frozen."""
    with needs_extra("--lora"):
        from peft import LoraConfig, TaskType, get_peft_model
    targets = _names(args.lora_targets)
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        modules_to_save=_names(args.lora_modules_to_save),
    )
    linear = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    message = f"--lora_targets {args.lora_targets}: no such modules; linear ones are {', '.join(sorted(linear))}"
    with explained(lambda error: message, ValueError):
        return get_peft_model(model, config)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


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
    trainer_class: type[Trainer] = DCSGDTrainer
    if data_args.non_private:
        trainer_class = Trainer
        args.settle(None)
        if isinstance(model, PreTrainedModel):
            select_trainable_layers(model, args.trainable_layers or DEFAULT_LAYERS)
        print("NOTHING IS PRIVATE in this run (--non_private): it is a reference only")
    padding = transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if args.bf16 else None)
    folder_errors = (NotADirectoryError, PermissionError, FileExistsError)
    unwritable = explained(
        lambda error: f"--output_dir {args.output_dir} cannot be written to: {error}", *folder_errors
    )
    with unwritable, explained(_cannot_reach_hub, ConnectionError, HTTPError):
        return trainer_class(
            model=model,
            args=args,
            train_dataset=splits.get("train"),
            eval_dataset=next((rows for name, rows in splits.items() if name.startswith("validation")), None),
            compute_metrics=metrics_of(task),
            processing_class=tokenizer,
            data_collator=transformers.default_data_collator if data_args.pad_to_max_length else padding,
        )


def _cannot_reach_hub(error: Exception) -> str:
    return (
        "--push_to_hub: the repository cannot be made on the Hub, and nothing was trained. Check the network "
        f"(HF_HUB_OFFLINE must not be set), and log in by `hf auth login`. {' '.join(str(error).split())[:200]}"
    )


def metrics_of(task: Task) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return the task's metrics as a function for the trainer; GLUE's have a combined score where they are several."""
    with needs_extra("evaluation"):
        from hf_dcsgd.jobs.metrics import TextMetrics
    metric = TextMetrics(config_name=",".join(task.metrics), keep_in_memory=True)

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        answers = answers_of(prediction.predictions, task)
        values = metric.compute(predictions=answers, references=prediction.label_ids)
        if len(values) > 1 and task.folder:
            values["combined_score"] = float(np.mean(list(values.values())))
        return values

    return compute


def answers_of(logits: Any, task: Task) -> np.ndarray:
    logits = logits[0] if isinstance(logits, tuple) else logits
    return np.squeeze(logits, axis=-1) if task.is_regression else np.argmax(logits, axis=-1)


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


def evaluate(trainer: Trainer, splits: dict[str, Dataset]) -> dict[str, float]:
    """Evaluate on every validation split: MNLI has a matched and a mismatched one (metrics named eval_mm_…)."""
    metrics: dict[str, float] = {}
    for split in (name for name in splits if name.startswith("validation")):
        prefix = "eval_mm" if split.endswith("mismatched") else "eval"
        metrics |= trainer.evaluate(splits[split], metric_key_prefix=prefix)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
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


def publish(trainer: Trainer, model_args: ModelArguments, task: Task) -> None:
    """Write the model card, and push it with the model if asked for."""
    facts: dict[str, Any] = {"finetuned_from": model_args.model_name_or_path, "tasks": "text-classification"}
    if task.folder:
        of_glue = {"language": "en", "dataset_tags": "glue", "dataset_args": task.name}
        facts |= of_glue | {"dataset": f"GLUE {task.name.upper()}"}
    (trainer.push_to_hub if trainer.args.push_to_hub else trainer.create_model_card)(**facts)
    if isinstance(trainer, DCSGDTrainer) and trainer.plan is not None and trainer.is_world_process_zero():
        print(format_spending(trainer.privacy_report()))
