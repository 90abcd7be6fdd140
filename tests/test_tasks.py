"""Every task from end to end on a tiny model, with the collators that scripts use; and a script, two names changed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES, NUM_LABELS, VOCAB
from datasets import Dataset
from tiny_tasks import flat_parameters, private_args, quiet, text_rows, tiny_bert
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from hf_dcsgd import DCSGDTrainer, DCSGDTrainingArguments
from hf_dcsgd.privacy.ledger import PrivacyLedger

pytestmark = pytest.mark.usefixtures("no_report_page", "quick_statements")

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tiny_tokenizer() -> hf.PreTrainedTokenizerFast:
    """Words w5 … w59 are their own token ids; the first five ids are BERT's special tokens."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), VOCAB))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    name: str
    model: Callable[[], Any]
    label: Callable[[list[int], int], dict[str, Any]]  # tokens and class of a row → its labels
    collator: Callable[[Any, Any], Any] = lambda tokenizer, model: hf.DataCollatorWithPadding(tokenizer)


def multi_label(tokens: list[int], label: int) -> dict[str, Any]:
    return {"labels": [float(label == 0), 1.0, float(label == 2)]}


def collate_images(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}


TASKS = [
    Task("sequence_classification", tiny_bert, lambda tokens, label: {"labels": label}),
    Task(
        "multi_label_classification",
        lambda: tiny_bert(problem_type="multi_label_classification"),
        multi_label,
    ),
    Task("regression", lambda: tiny_bert(num_labels=1), lambda tokens, label: {"labels": float(label) - 1}),
    Task(
        "token_classification",
        ARCHITECTURES["bert_token"].build,
        lambda tokens, label: {"labels": [token % NUM_LABELS for token in tokens]},
        lambda tokenizer, model: hf.DataCollatorForTokenClassification(tokenizer),
    ),
    Task(
        "question_answering",
        ARCHITECTURES["bert_qa"].build,
        lambda tokens, label: {"start_positions": label, "end_positions": label + 1},
    ),
    Task(
        "causal_lm",
        ARCHITECTURES["llama"].build,
        lambda tokens, label: {},
        lambda tokenizer, model: hf.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    ),
    Task(
        "causal_lm_tied",
        ARCHITECTURES["gpt2_lm_tied"].build,
        lambda tokens, label: {},
        lambda tokenizer, model: hf.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    ),
    Task(
        "masked_lm",
        ARCHITECTURES["bert_masked_lm"].build,
        lambda tokens, label: {},
        lambda tokenizer, model: hf.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3),
    ),
    Task(
        "seq2seq",
        ARCHITECTURES["t5"].build,
        lambda tokens, label: {"labels": tokens[::2]},
        lambda tokenizer, model: hf.DataCollatorForSeq2Seq(tokenizer, model=model),
    ),
    Task(
        "seq2seq_bart",
        ARCHITECTURES["bart"].build,
        lambda tokens, label: {"labels": tokens[:3]},
        lambda tokenizer, model: hf.DataCollatorForSeq2Seq(tokenizer),
    ),
    Task("image_classification", ARCHITECTURES["vit"].build, lambda tokens, label: {"labels": label}),
]


def task_rows(task: Task, n: int = 32) -> list[dict[str, Any]]:
    rows = [(row["input_ids"], row["labels"]) for row in text_rows(n)]
    if task.name == "image_classification":
        images, _ = ARCHITECTURES["vit"].batch(None, n=n)
        return [
            {"pixel_values": image + label, "labels": label}
            for image, (_, label) in zip(images["pixel_values"], rows, strict=True)
        ]
    return [{"input_ids": tokens, **task.label(tokens, label)} for tokens, label in rows]


BY_DEFAULT = ("sequence_classification", "causal_lm")


@pytest.mark.parametrize(
    "task",
    [pytest.param(task, marks=() if task.name in BY_DEFAULT else pytest.mark.slow) for task in TASKS],
    ids=lambda task: task.name,
)
def test_the_loss_falls_and_the_books_are_right(tmp_path: Path, task: Task) -> None:
    """Full batches and little noise, so that a few steps are enough: do gradients and labels meet?"""
    model, tokenizer = task.model(), tiny_tokenizer()
    rows = task_rows(task)
    is_image = task.name == "image_classification"
    trainer = DCSGDTrainer(
        model,
        private_args(
            tmp_path,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            max_steps=8,
            noise_multiplier=0.01,
            clipping="fixed",
            clip_threshold=3.0,
            trainable_layers="all",
            learning_rate=0.01,
            unsafe_noise_seed=1,
        ),
        train_dataset=rows,
        processing_class=None if is_image else tokenizer,
        data_collator=collate_images if is_image else task.collator(tokenizer, model),
    )
    torch.manual_seed(0)
    before, start = trainer.predict(rows).metrics["test_loss"], flat_parameters(model)
    trainer.train()
    torch.manual_seed(0)
    after = trainer.predict(rows).metrics["test_loss"]
    moved = flat_parameters(model)
    assert moved.isfinite().all()
    assert (moved - start).norm() > 0.1
    assert after < 0.97 * before, f"{task.name}: {before} → {after}"
    assert trainer.plan.steps == trainer.state.global_step == PrivacyLedger.read(tmp_path).charged == 8
    assert trainer.plan.num_parameters == len(start)


# --- a script --------------------------------------------------------------------------------------------------------


def fine_tune(Trainer: Any, TrainingArguments: Any, output_dir: Path, **options: Any) -> dict[str, Any]:  # noqa: N803
    """Text classification the way transformers' examples and course do it."""

    def texts(n: int, seed: int) -> Dataset:
        rows = text_rows(n, seed)
        sentences = [" ".join(f"w{token}" for token in row["input_ids"]) for row in rows]
        return Dataset.from_dict({"sentence": sentences, "label": [row["labels"] for row in rows], "idx": range(n)})

    tokenizer = tiny_tokenizer()
    raw = {"train": texts(256, 0), "validation": texts(96, 1), "test": texts(48, 2)}
    tokenized = {
        split: table.map(lambda batch: tokenizer(batch["sentence"], truncation=True, max_length=16), batched=True)
        for split, table in raw.items()
    }
    model = tiny_bert(dropout=0.1, id2label={0: "A", 1: "B", 2: "C"}, label2id={"A": 0, "B": 1, "C": 2})

    def compute_metrics(prediction: Any) -> dict[str, float]:
        logits, labels = prediction
        return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}

    args = TrainingArguments(
        output_dir=str(output_dir),
        per_device_train_batch_size=64,
        num_train_epochs=3,
        learning_rate=0.01,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        **options,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["validation"],
        processing_class=tokenizer,
        data_collator=hf.DataCollatorWithPadding(tokenizer=tokenizer),
        compute_metrics=compute_metrics,
    )
    result = trainer.train()
    trainer.save_model()
    metrics = result.metrics
    metrics["train_samples"] = len(tokenized["train"])
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    evaluation = trainer.evaluate()
    trainer.save_metrics("eval", evaluation)
    predictions = trainer.predict(tokenized["test"].remove_columns("label"))
    return {
        "trainer": trainer,
        "metrics": metrics,
        "evaluation": evaluation,
        "predictions": predictions,
        "raw": raw,
        "tokenized": tokenized,
    }


@pytest.mark.parametrize("private", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_script_with_two_names_changed(tmp_path: Path, private: bool) -> None:
    names = (DCSGDTrainer, DCSGDTrainingArguments) if private else (hf.Trainer, hf.TrainingArguments)
    options = {key: value for key, value in quiet().items() if key not in ("save_strategy", "dataloader_pin_memory")}
    done = fine_tune(*names, tmp_path, **options)
    trainer = done["trainer"]
    reached = [line["eval_accuracy"] for line in trainer.state.log_history if "eval_accuracy" in line]
    assert len(reached) == 4
    assert done["evaluation"]["eval_accuracy"] == max(reached), "the best model was loaded"
    assert private or max(reached) > 0.5  # chance is 0.33
    assert done["predictions"].predictions.shape == (48, 3)
    assert done["predictions"].label_ids is None
    assert {path.name for path in tmp_path.glob("*.json")} >= {
        "config.json",
        "tokenizer.json",
        "train_results.json",
        "eval_results.json",
        "trainer_state.json",
    }
    assert trainer.state.best_model_checkpoint is not None

    loaded = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    batch = hf.DataCollatorWithPadding(trainer.processing_class)(
        [{key: row[key] for key in ("input_ids", "attention_mask")} for row in done["tokenized"]["test"]]
    )
    with torch.no_grad():
        logits = loaded(**batch).logits.numpy()
    np.testing.assert_allclose(logits, done["predictions"].predictions, atol=1e-4)
    classify = hf.pipeline("text-classification", model=str(tmp_path), device="cpu")
    first = classify(done["raw"]["test"][0]["sentence"])[0]
    assert first["label"] == "ABC"[logits[0].argmax()]

    if private:
        assert trainer.epsilon() == trainer.plan.epsilon() <= 8.0
        assert trainer.state.global_step == PrivacyLedger.read(tmp_path).charged == 12
        assert "train_loss" not in done["metrics"]
        frozen = [name for name, p in trainer.model.named_parameters() if not p.requires_grad]
        assert any("embeddings" in name for name in frozen)
