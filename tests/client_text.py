"""Scripts with the shape of transformers' examples for texts: classification, tagging, questions, language models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import transformers as hf
from client_models import WORDS, sentence
from client_scripts import Names, made_up, parse, train_and_evaluate


def accuracy(prediction: hf.EvalPrediction) -> dict[str, float]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    counted = prediction.label_ids != -100
    return {"accuracy": float((np.argmax(logits, axis=-1) == prediction.label_ids)[counted].mean())}


def run_glue(names: Names, argv: Sequence[str]) -> dict:
    """Pairs of texts and one label, as run_glue and run_xnli have it."""
    parsed = parse(names[1], argv)
    args: Any = parsed.training
    config = hf.AutoConfig.from_pretrained(parsed.path, num_labels=3, finetuning_task="mnli")
    tokenizer = hf.AutoTokenizer.from_pretrained(parsed.path)
    model = hf.AutoModelForSequenceClassification.from_pretrained(parsed.path, config=config)

    def prepare(rows: dict[str, list[Any]]) -> Any:
        return tokenizer(rows["premise"], rows["hypothesis"], max_length=parsed.data.max_seq_length, truncation=True)

    def row(k: int) -> dict[str, Any]:
        return {"premise": sentence(k), "hypothesis": sentence(k + 500, 3), "label": k % 3, "idx": k}

    train, validation = made_up(row, args, prepare, load_from_cache_file=False)
    trainer = names[0](
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=validation,
        compute_metrics=accuracy,
        processing_class=tokenizer,
        data_collator=hf.DataCollatorWithPadding(tokenizer),
    )
    metrics = train_and_evaluate(trainer, parsed, tasks="text-classification", dataset="GLUE MNLI")
    found = trainer.predict(validation.remove_columns("label"), metric_key_prefix="predict").predictions
    return metrics | {"predicted": len(np.argmax(found, axis=1))}


def run_classification(names: Names, argv: Sequence[str]) -> dict:
    """Several labels at once: vectors of zeros and ones, and a threshold."""
    parsed = parse(names[1], argv)
    args: Any = parsed.training
    config = hf.AutoConfig.from_pretrained(
        parsed.path, num_labels=4, problem_type="multi_label_classification", finetuning_task="text-classification"
    )
    tokenizer = hf.AutoTokenizer.from_pretrained(parsed.path)
    model = hf.AutoModelForSequenceClassification.from_pretrained(parsed.path, config=config)

    def prepare(rows: dict[str, list[Any]]) -> Any:
        encoded = tokenizer(rows["text"], padding="max_length", max_length=16, truncation=True)
        encoded["label"] = [[float(place in wanted) for place in range(4)] for wanted in rows["topics"]]
        return encoded

    def row(k: int) -> dict[str, Any]:
        return {"text": sentence(k), "topics": sorted({k % 4, k % 3})}

    train, validation = made_up(row, args, prepare)
    trainer = names[0](
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=validation,
        compute_metrics=lambda p: {"exact": float(((p.predictions > 0) == (p.label_ids > 0)).all(axis=1).mean())},
        processing_class=tokenizer,
        data_collator=hf.default_data_collator,
    )
    return train_and_evaluate(trainer, parsed, tasks="text-classification")


def run_ner(names: Names, argv: Sequence[str]) -> dict:
    parsed = parse(names[1], argv)
    args: Any = parsed.training
    config = hf.AutoConfig.from_pretrained(parsed.path, num_labels=3, finetuning_task="ner")
    tokenizer = hf.AutoTokenizer.from_pretrained(parsed.path)
    model = hf.AutoModelForTokenClassification.from_pretrained(parsed.path, config=config)

    def prepare(rows: dict[str, list[Any]]) -> Any:
        encoded = tokenizer(rows["tokens"], truncation=True, is_split_into_words=True)
        encoded["labels"] = [
            [-100 if word is None else tags[word] for word in encoded.word_ids(batch_index=place)]
            for place, tags in enumerate(rows["ner_tags"])
        ]
        return encoded

    def row(k: int) -> dict[str, Any]:
        words = sentence(k).split()
        return {"id": str(k), "tokens": words, "ner_tags": [WORDS.index(word) % 3 for word in words]}

    train, validation = made_up(row, args, prepare)
    trainer = names[0](
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=hf.DataCollatorForTokenClassification(tokenizer),
        compute_metrics=accuracy,
    )
    return train_and_evaluate(trainer, parsed, tasks="token-classification")


def answering(trainer_class: Any) -> Any:
    """Return the subclass of run_qa: evaluation turns logits into spans, and these into metrics."""

    class QuestionAnsweringTrainer(trainer_class):
        def __init__(self, *args: Any, eval_examples: Any = None, post_process_function: Any = None, **settings: Any):
            super().__init__(*args, **settings)
            self.eval_examples, self.post_process_function = eval_examples, post_process_function

        def evaluate(
            self, eval_dataset: Any = None, eval_examples: Any = None, ignore_keys: Any = None,
            metric_key_prefix: str = "eval",
        ) -> dict[str, float]:  # fmt: skip
            rows = self.eval_dataset if eval_dataset is None else eval_dataset
            loader = self.get_eval_dataloader(rows)
            compute_metrics, self.compute_metrics = self.compute_metrics, None
            try:
                output = self.evaluation_loop(
                    loader, description="Evaluation", prediction_loss_only=None, ignore_keys=ignore_keys,
                    metric_key_prefix=metric_key_prefix,
                )  # fmt: skip
            finally:
                self.compute_metrics = compute_metrics
            found = compute_metrics(self.post_process_function(self.eval_examples, rows, output.predictions))
            metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()} | output.metrics
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    return QuestionAnsweringTrainer


def run_qa(names: Names, argv: Sequence[str], auto_class: Any = hf.AutoModelForQuestionAnswering) -> dict:
    parsed = parse(names[1], argv)
    args: Any = parsed.training
    tokenizer = hf.AutoTokenizer.from_pretrained(parsed.path)
    model = auto_class.from_pretrained(parsed.path)

    def prepare(rows: dict[str, list[Any]]) -> Any:
        encoded = tokenizer(
            rows["question"], rows["context"], truncation="only_second", max_length=16, stride=4,
            return_overflowing_tokens=True, return_offsets_mapping=True, padding="max_length",
        )  # fmt: skip
        encoded.pop("overflow_to_sample_mapping")
        encoded.pop("offset_mapping")
        encoded["start_positions"] = [6] * len(encoded["input_ids"])
        encoded["end_positions"] = [7] * len(encoded["input_ids"])
        return encoded

    def row(k: int) -> dict[str, Any]:
        return {"id": str(k), "question": sentence(k, 3), "context": sentence(k + 500, 14)}

    train, validation = made_up(row, args, prepare, remove_columns=["id", "question", "context"])
    validation = validation.remove_columns(["start_positions", "end_positions"])

    def spans(examples: Any, features: Any, predictions: Any) -> list[tuple[int, int]]:
        start, end = predictions[:2]
        assert len(start) == len(features)
        return list(zip(start.argmax(axis=-1).tolist(), end.argmax(axis=-1).tolist(), strict=True))

    trainer = answering(names[0])(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=validation,
        eval_examples=validation,
        processing_class=tokenizer,
        data_collator=hf.default_data_collator,
        post_process_function=spans,
        compute_metrics=lambda found: {"exact_match": float(np.mean([span == (6, 7) for span in found]))},
    )
    return train_and_evaluate(trainer, parsed, tasks="question-answering")


def run_qa_beam_search(names: Names, argv: Sequence[str]) -> dict:
    return run_qa(names, argv, hf.XLNetForQuestionAnswering)


def run_swag(names: Names, argv: Sequence[str]) -> dict:
    parsed = parse(names[1], argv)
    args: Any = parsed.training
    tokenizer = hf.AutoTokenizer.from_pretrained(parsed.path)
    model = hf.AutoModelForMultipleChoice.from_pretrained(parsed.path)
    endings = [f"ending{k}" for k in range(4)]

    def prepare(rows: dict[str, list[Any]]) -> dict[str, Any]:
        first = [[text] * 4 for text in rows["sent1"]]
        second = [[f"{head} {rows[end][k]}" for end in endings] for k, head in enumerate(rows["sent2"])]
        encoded = tokenizer(list(chain(*first)), list(chain(*second)), truncation=True, max_length=24)
        return {name: [values[k : k + 4] for k in range(0, len(values), 4)] for name, values in encoded.items()}

    def row(k: int) -> dict[str, Any]:
        texts = {name: sentence(k + 100 * place, 2 + place) for place, name in enumerate(endings)}
        return {"video-id": str(k), "sent1": sentence(k), "sent2": sentence(k, 2), "label": k % 4, **texts}

    train, validation = made_up(row, args, prepare)
    trainer = names[0](
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=hf.DataCollatorForMultipleChoice(tokenizer=tokenizer),
        compute_metrics=accuracy,
    )
    return train_and_evaluate(trainer, parsed, tasks="multiple-choice", dataset="SWAG")


# --- language models -------------------------------------------------------------------------------------------------


def language_model(names: Names, argv: Sequence[str], auto_class: Any, collator: Any, prepared: Any = None) -> dict:
    """Texts joined and cut into blocks, which are the rows; the metric is the perplexity."""
    parsed = parse(names[1], argv)
    args: Any = parsed.training
    tokenizer = hf.AutoTokenizer.from_pretrained(parsed.path)
    model = auto_class.from_pretrained(parsed.path)

    def prepare(rows: dict[str, list[Any]]) -> dict[str, Any]:
        encoded = tokenizer(rows["text"], return_special_tokens_mask=True)
        joined = {name: list(chain(*encoded[name])) for name in ("input_ids", "attention_mask", "special_tokens_mask")}
        length = len(joined["input_ids"]) // 8 * 8
        blocks = {name: [values[k : k + 8] for k in range(0, length, 8)] for name, values in joined.items()}
        return blocks if prepared is None else prepared(blocks)

    train, validation = made_up(lambda k: {"text": sentence(k, 7)}, args, prepare, remove_columns=["text"])
    trainer = names[0](
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=collator(tokenizer),
        compute_metrics=accuracy if args.eval_strategy == "no" else None,
        preprocess_logits_for_metrics=None,
    )
    metrics = train_and_evaluate(trainer, parsed, tasks="fill-mask")
    return metrics | {"perplexity": math.exp(metrics["eval_loss"])}


def run_clm(names: Names, argv: Sequence[str]) -> dict:
    def with_labels(blocks: dict[str, Any]) -> dict[str, Any]:
        blocks.pop("special_tokens_mask")
        return blocks | {"labels": [list(block) for block in blocks["input_ids"]]}

    return language_model(names, argv, hf.AutoModelForCausalLM, lambda t: hf.default_data_collator, with_labels)


def run_fim(names: Names, argv: Sequence[str]) -> dict:
    """Some blocks are turned around: prefix, suffix, middle."""

    def rearranged(blocks: dict[str, Any]) -> dict[str, Any]:
        rows = [block[:2] + block[5:] + block[2:5] if k % 2 else block for k, block in enumerate(blocks["input_ids"])]
        return {"input_ids": rows, "attention_mask": blocks["attention_mask"], "labels": [list(row) for row in rows]}

    return language_model(names, argv, hf.AutoModelForCausalLM, lambda t: hf.default_data_collator, rearranged)


def run_mlm(names: Names, argv: Sequence[str]) -> dict:
    return language_model(
        names, argv, hf.AutoModelForMaskedLM,
        lambda tokenizer: hf.DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm_probability=0.3),
    )  # fmt: skip


def run_plm(names: Names, argv: Sequence[str]) -> dict:
    def collator(tokenizer: Any) -> Any:
        return hf.DataCollatorForPermutationLanguageModeling(tokenizer=tokenizer, plm_probability=0.3)

    def tokens_alone(blocks: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": blocks["input_ids"]}

    return language_model(names, argv, hf.XLNetLMHeadModel, collator, tokens_alone)
