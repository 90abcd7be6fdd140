"""Fine-tune a tagger of words privately (names, parts of speech), on files or a data set of the Hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from datasets import Dataset
from transformers import AutoModelForTokenClassification, EvalPrediction, Trainer

from hf_dcsgd.jobs.arguments import JobParser, ModelArguments
from hf_dcsgd.jobs.errors import UserError
from hf_dcsgd.jobs.metrics import span_metrics
from hf_dcsgd.jobs.models import load_pretrained
from hf_dcsgd.jobs.token_data import TokenData, TokenDataArguments, load_token_data, tokenized
from hf_dcsgd.jobs.training import carry_out, checkpoint_to_resume, make_trainer, set_up
from hf_dcsgd.tasks.losses import IGNORE_INDEX

PREDICTIONS_FILENAME = "predictions.jsonl"


def run(argv: Sequence[str], *, prog: str | None = None, description: str | None = __doc__) -> dict[str, float]:
    """Train, evaluate and predict, as asked; return all metrics."""
    usage = "%(prog)s --model_name_or_path MODEL --train_file FILE --do_train … | FILE.json | FILE.yaml"
    parser = JobParser(ModelArguments, TokenDataArguments, prog=prog, usage=usage, description=description)
    model_args, data_args, args = parser.parse(argv)
    set_up(args)
    checkpoint = checkpoint_to_resume(args, new_run=data_args.new_run)
    with args.main_process_first(desc="loading the data"):
        data = load_token_data(data_args, model_args.cache_dir, args.privacy_unit)
    wanted = {"train": args.do_train, "validation": args.do_eval, "test": args.do_predict}
    missing = [name for name, asked in wanted.items() if asked and name not in data.splits]
    if missing:
        raise UserError(f"there are no {missing[0]} data (found: {', '.join(data.splits)})")
    tokenizer, model = load_pretrained(model_args, AutoModelForTokenClassification, "TOKEN_CLS", **head_of(data))
    if not tokenizer.is_fast:
        raise UserError(f"{model_args.model_name_or_path}: the tokenizer does not say which tokens a word became")
    with args.main_process_first(desc="tokenizing"):
        names = [name for name, asked in wanted.items() if asked]
        splits = {name: tokenized(data, name, tokenizer, data_args, args.privacy_unit) for name in names}
    trainer = make_trainer(
        model,
        args,
        non_private=data_args.non_private,
        train_dataset=splits.get("train"),
        eval_dataset=splits.get("validation"),
        processing_class=tokenizer,
        data_collator=transformers.DataCollatorForTokenClassification(tokenizer),
        compute_metrics=metrics_of(data.labels),
    )
    return carry_out(
        trainer,
        checkpoint,
        data_args,
        evaluate=lambda: trainer.evaluate(splits["validation"]),
        predict=lambda: predict(trainer, splits["test"], data.labels),
        finetuned_from=model_args.model_name_or_path,
        tasks="token-classification",
    )


def head_of(data: TokenData) -> dict[str, Any]:
    """Return what the model's configuration says of the tags."""
    ids = {name: number for number, name in enumerate(data.labels)}
    return {"num_labels": len(ids), "id2label": dict(enumerate(data.labels)), "label2id": ids}


def tags_of(logits: Any, label_ids: np.ndarray, labels: Sequence[str]) -> tuple[list[list[str]], list[list[str]]]:
    """Return predicted and wanted tags, one per word."""
    answers = np.argmax(logits[0] if isinstance(logits, tuple) else logits, axis=-1)
    counted = label_ids != IGNORE_INDEX
    return (
        [[labels[k] for k in row[here]] for row, here in zip(answers, counted, strict=True)],
        [[labels[k] for k in row[here]] for row, here in zip(label_ids, counted, strict=True)],
    )


def metrics_of(labels: Sequence[str]) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return precision, recall, F1 of spans and accuracy as a function for the trainer."""
    return lambda prediction: span_metrics(*tags_of(prediction.predictions, np.asarray(prediction.label_ids), labels))


def predict(trainer: Trainer, rows: Dataset, labels: Sequence[str]) -> dict[str, float]:
    """Write the predicted tags of each row to `predictions.jsonl`, and return the metrics."""
    outcome = trainer.predict(rows)
    if trainer.is_world_process_zero():
        tags, _ = tags_of(outcome.predictions, np.asarray(outcome.label_ids), labels)
        path = Path(trainer.args.output_dir or ".") / PREDICTIONS_FILENAME
        path.write_text("".join(json.dumps({"tags": row}) + "\n" for row in tags), encoding="utf-8")
        print(f"predictions: {path}")
    return dict(outcome.metrics or {})
