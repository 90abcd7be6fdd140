"""Scripts with the shape of run_summarization, run_translation, run_seq2seq_qa and run_speech_recognition_seq2seq."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers as hf
from client_models import sentence
from client_scripts import Names, Parsed, made_up, parse, train_and_evaluate


def decoded(tokenizer: Any, tokens: Any) -> list[str]:
    tokens = tokens[0] if isinstance(tokens, tuple) else tokens
    return tokenizer.batch_decode(np.where(tokens != -100, tokens, tokenizer.pad_token_id), skip_special_tokens=True)


def word_overlap(tokenizer: Any) -> Any:
    """Compare generated texts with the wanted ones, where scripts use ROUGE or BLEU."""

    def compute(prediction: Any) -> dict[str, float]:
        tokens, labels = prediction
        pairs = zip(decoded(tokenizer, tokens), decoded(tokenizer, labels), strict=True)
        shares = [len({*made.split()} & {*wanted.split()}) / max(len({*wanted.split()}), 1) for made, wanted in pairs]
        lengths = [np.count_nonzero(row != tokenizer.pad_token_id) for row in tokens]
        return {"overlap": float(np.mean(shares)), "gen_len": float(np.mean(lengths))}

    return compute


def text_to_text(names: Names, argv: Sequence[str], source: str, target: str, prefix: str, task: str) -> dict:
    trainer_class, arguments_class = names
    parsed = parse(arguments_class, argv)
    args: Any = parsed.training
    tokenizer = hf.AutoTokenizer.from_pretrained(parsed.path)
    model = hf.AutoModelForSeq2SeqLM.from_pretrained(parsed.path)

    def prepare(rows: dict[str, list[str]]) -> Any:
        encoded = tokenizer([prefix + text for text in rows[source]], max_length=24, truncation=True)
        encoded["labels"] = tokenizer(text_target=rows[target], max_length=12, truncation=True)["input_ids"]
        return encoded

    def row(k: int) -> dict[str, str]:
        return {source: sentence(k, 8), target: sentence(k, 3)}

    train, validation = made_up(row, args, prepare, remove_columns=[source, target])
    if args.generation_max_length is None:
        args.generation_max_length = 12
    args.generation_num_beams = parsed.data.num_beams or args.generation_num_beams
    trainer = trainer_class(
        model=model,
        args=args,
        train_dataset=train if args.do_train else None,
        eval_dataset=validation if args.do_eval else None,
        processing_class=tokenizer,
        data_collator=hf.DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
        compute_metrics=word_overlap(tokenizer) if args.predict_with_generate else None,
    )
    metrics = train_and_evaluate(trainer, parsed, tasks=task)
    if args.do_predict:
        found = trainer.predict(validation, metric_key_prefix="predict")
        texts = decoded(tokenizer, found.predictions) if args.predict_with_generate else []
        metrics |= {**(found.metrics or {}), "predicted_texts": len(texts)}
    return metrics


def run_summarization(names: Names, argv: Sequence[str]) -> dict:
    return text_to_text(names, argv, "article", "summary", "the ", "summarization")


def run_translation(names: Names, argv: Sequence[str]) -> dict:
    return text_to_text(names, argv, "en", "ro", "", "translation")


def answering(trainer_class: Any) -> Any:
    """Return the subclass of run_seq2seq_qa, which overrides evaluation alone."""

    class QuestionAnsweringSeq2SeqTrainer(trainer_class):
        def __init__(self, *args: Any, post_process: Any = None, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.post_process = post_process

        def evaluate(
            self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval", **generation: Any
        ) -> dict[str, float]:
            self._gen_kwargs = {"max_length": self.args.generation_max_length, **generation}
            loader = self.get_eval_dataloader(self.eval_dataset if eval_dataset is None else eval_dataset)
            compute_metrics, self.compute_metrics = self.compute_metrics, None
            try:
                output = self.evaluation_loop(loader, "Evaluation", metric_key_prefix=metric_key_prefix)
            finally:
                self.compute_metrics = compute_metrics
            found = compute_metrics(self.post_process(output))
            metrics = output.metrics | {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    return QuestionAnsweringSeq2SeqTrainer


def run_seq2seq_qa(names: Names, argv: Sequence[str]) -> dict:
    parsed = parse(names[1], argv)
    args: Any = parsed.training
    tokenizer = hf.AutoTokenizer.from_pretrained(parsed.path)
    model = hf.AutoModelForSeq2SeqLM.from_pretrained(parsed.path)

    def prepare(rows: dict[str, list[str]]) -> Any:
        pairs = zip(rows["question"], rows["context"], strict=True)
        encoded = tokenizer([f"{question} {context}" for question, context in pairs], max_length=24, truncation=True)
        encoded["labels"] = tokenizer(text_target=rows["answer"], max_length=8, truncation=True)["input_ids"]
        return encoded

    columns = ["question", "context", "answer"]
    train, validation = made_up(lambda k: {name: sentence(k, 4) for name in columns}, args, prepare)
    args.generation_max_length = 8
    trainer = answering(names[0])(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=hf.DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
        compute_metrics=lambda answers: {"exact_match": float(np.mean([made == want for made, want in answers]))},
        post_process=lambda output: list(
            zip(decoded(tokenizer, output.predictions), validation["answer"], strict=True)
        ),
    )
    return train_and_evaluate(trainer, parsed, tasks="question-answering")


class SpeechCollator:
    """Pads features by the processor and labels by the tokenizer, and takes a common first token away."""

    def __init__(self, tokenizer: Any, start: int) -> None:
        self.tokenizer, self.start = tokenizer, start

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        labels = self.tokenizer.pad([{"input_ids": row["labels"]} for row in rows], return_tensors="pt")
        wanted = labels["input_ids"].masked_fill(labels["attention_mask"].ne(1), -100)
        if (wanted[:, 0] == self.start).all():
            wanted = wanted[:, 1:]
        return {"input_features": torch.tensor([row["input_features"] for row in rows]), "labels": wanted}


def run_speech_recognition_seq2seq(names: Names, argv: Sequence[str]) -> dict:
    parsed: Parsed = parse(names[1], argv)
    args: Any = parsed.training
    tokenizer = hf.AutoTokenizer.from_pretrained(parsed.path)
    model = hf.AutoModelForSpeechSeq2Seq.from_pretrained(parsed.path)
    config = model.config

    def row(k: int) -> dict[str, Any]:
        features = torch.randn(
            config.num_mel_bins, 2 * config.max_source_positions, generator=torch.Generator().manual_seed(k)
        )
        return {"input_features": features.tolist(), "labels": tokenizer(sentence(k, 4))["input_ids"]}

    train, validation = made_up(row, args)
    trainer = names[0](
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=SpeechCollator(tokenizer, config.decoder_start_token_id),
        compute_metrics=word_overlap(tokenizer) if args.predict_with_generate else None,
    )
    return train_and_evaluate(trainer, parsed, tasks="automatic-speech-recognition")
