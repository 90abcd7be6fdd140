"""Fine-tune a causal language model privately, on conversations, prompts with completions, or plain texts."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, EvalPrediction, Trainer

from hf_dcsgd.jobs.arguments import JobParser
from hf_dcsgd.jobs.errors import UserError, exit_code_of, needs_extra
from hf_dcsgd.jobs.generation import generate_texts
from hf_dcsgd.jobs.language_arguments import LanguageDataArguments, LanguageModelArguments
from hf_dcsgd.jobs.language_data import (
    TEXT,
    RowFormat,
    load_language_data,
    tokenized,
    use_chat_template,
    use_end_token,
)
from hf_dcsgd.jobs.models import load_pretrained
from hf_dcsgd.jobs.training import carry_out, checkpoint_to_resume, kept, make_trainer, set_up
from hf_dcsgd.tasks.losses import IGNORE_INDEX
from hf_dcsgd.training_args import DCSGDTrainingArguments

PREDICTIONS_FILENAME = "predictions.jsonl"


def main(argv: Sequence[str] | None = None, *, prog: str | None = None, description: str | None = __doc__) -> int:
    """Run a job from `argv`, or from the command line; return the exit code."""
    return exit_code_of(lambda: run(sys.argv[1:] if argv is None else argv, prog=prog, description=description))


def run(argv: Sequence[str], *, prog: str | None = None, description: str | None = __doc__) -> dict[str, float]:
    """Train, evaluate and generate, as asked; return all metrics."""
    usage = "%(prog)s --model_name_or_path MODEL --train_file FILE --do_train … | FILE.json | FILE.yaml"
    parser = JobParser(LanguageModelArguments, LanguageDataArguments, prog=prog, usage=usage, description=description)
    model_args, data_args, training_args = parser.parse(argv)
    set_up(training_args)
    checkpoint = checkpoint_to_resume(training_args, new_run=data_args.new_run)
    with training_args.main_process_first(desc="loading the data"):
        data, columns = load_language_data(data_args, model_args.cache_dir, training_args.privacy_unit)
    _require_splits(data, columns.kind, training_args)
    tokenizer, model = load_pretrained(model_args, AutoModelForCausalLM, "CAUSAL_LM")
    use_chat_template(tokenizer, data_args)
    use_end_token(tokenizer, data_args)
    row_format = RowFormat(tokenizer, columns, data_args.separator)
    wanted = [
        name for name, asked in (("train", training_args.do_train), ("validation", training_args.do_eval)) if asked
    ]
    with training_args.main_process_first(desc="tokenizing"):
        splits = {
            name: tokenized(data[name], name, row_format, data_args, training_args.privacy_unit) for name in wanted
        }
    trainer = build_trainer(model, tokenizer, splits, training_args, non_private=data_args.non_private)
    return carry_out(
        trainer,
        checkpoint,
        data_args,
        evaluate=lambda: trainer.evaluate(splits["validation"]),
        predict=lambda: predict(trainer, data["test"], row_format, data_args),
        finetuned_from=model_args.model_name_or_path,
        tasks="text-generation",
    )


def _require_splits(splits: dict[str, Dataset], kind: str, args: DCSGDTrainingArguments) -> None:
    needed = {"do_train": "train_file", "do_eval": "validation_file", "do_predict": "test_file"}
    for (option, file), split in zip(needed.items(), ("train", "validation", "test"), strict=True):
        if getattr(args, option) and split not in splits:
            raise UserError(f"--{option}: there are no {split} data; give --{file}")
    if args.do_predict and kind == TEXT:
        raise UserError("--do_predict: there is nothing to go on from in plain texts; give prompts or conversations")


def build_trainer(
    model: torch.nn.Module,
    tokenizer: Any,
    splits: dict[str, Dataset],
    args: DCSGDTrainingArguments,
    *,
    non_private: bool = False,
) -> Trainer:
    """Build the trainer for tokenized rows; its evaluation counts tokens, not batches."""
    return make_trainer(
        model,
        args,
        non_private=non_private,
        train_dataset=splits.get("train"),
        eval_dataset=splits.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORE_INDEX),
        compute_metrics=token_metrics,
        preprocess_logits_for_metrics=summed_losses,
    )


# --- evaluation ------------------------------------------------------------------------------------------------------


def summed_losses(logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Return the sum of losses and the number of tokens of each row, so that no logits are kept."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    wanted = labels[:, 1:]
    losses = F.cross_entropy(
        logits[:, :-1].float().transpose(1, 2), wanted, ignore_index=IGNORE_INDEX, reduction="none"
    )
    return torch.stack([losses.sum(dim=1), (wanted != IGNORE_INDEX).sum(dim=1)], dim=1)


def token_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Return loss and perplexity over all tokens that count."""
    losses, tokens = np.asarray(prediction.predictions).sum(axis=0)
    loss = float(losses / max(tokens, 1))
    return {"loss_per_token": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": int(tokens)}


def predict(trainer: Trainer, rows: Dataset, row_format: RowFormat, args: LanguageDataArguments) -> dict[str, float]:
    """Go on from each prompt once, write `predictions.jsonl`, and compare with all completions that the data have."""
    references: dict[str, list[str]] = {}
    for row in rows:
        found = references.setdefault(row_format.prompt(row), [])
        reference = row_format.reference(row)
        found += [] if reference is None else [reference]
    if not trainer.is_world_process_zero():
        return {}
    texts = generate_texts(
        trainer.model, row_format.tokenizer, list(references), args, show_progress=not trainer.args.disable_tqdm
    )
    lines = [
        {"prompt": prompt, "prediction": generated.text, "references": known}
        for (prompt, known), generated in zip(references.items(), texts, strict=True)
    ]
    path = Path(trainer.args.output_dir or ".") / PREDICTIONS_FILENAME
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    print(f"predictions: {path}")
    metrics: dict[str, float] = {"test_prompts": len(lines)}
    if all(references.values()):
        metrics["test_bleu"] = multi_reference_bleu([text.text for text in texts], list(references.values()))
    return kept(trainer, "test", metrics)


def multi_reference_bleu(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return corpus BLEU (0 to 100, sacrebleu's), each prediction against as many references as it has."""
    with needs_extra("BLEU", "text"):
        from sacrebleu import corpus_bleu
    most = max(map(len, references))
    streams: Any = [[known[place] if place < len(known) else None for known in references] for place in range(most)]
    return float(corpus_bleu(list(predictions), streams).score)
