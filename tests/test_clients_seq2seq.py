"""Scripts that use `Seq2SeqTrainer`: with two names changed they train privately, and generate in evaluation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import client_seq2seq as scripts
import pytest
import torch
import transformers as hf
from client_models import POSITIONS, saved, seeded, sentence, tiny_tokenizer, vocabulary_size
from client_scripts import COMMON, TRAIN_ROWS

from hf_dcsgd import DCSGDSeq2SeqTrainer, DCSGDSeq2SeqTrainingArguments, DCSGDTrainer, DCSGDTrainingArguments
from hf_dcsgd.privacy.ledger import PrivacyLedger

pytestmark = pytest.mark.usefixtures("no_report_page", "quick_statements")

THEIRS = (hf.Seq2SeqTrainer, hf.Seq2SeqTrainingArguments)
OURS = (DCSGDSeq2SeqTrainer, DCSGDSeq2SeqTrainingArguments)
TOKENS = {"pad_token_id": 0, "eos_token_id": 6, "decoder_start_token_id": 0}


def t5_config() -> hf.T5Config:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return hf.T5Config(vocab_size=vocabulary_size(), tie_word_embeddings=True, **sizes, **TOKENS)


def bart_config() -> hf.BartConfig:
    layers = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    widths = {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    tokens = TOKENS | {"bos_token_id": 5, "forced_eos_token_id": 6}
    return hf.BartConfig(vocab_size=vocabulary_size(), max_position_embeddings=POSITIONS, **layers, **widths, **tokens)


def whisper_config() -> hf.WhisperConfig:
    layers = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    widths = {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8}
    lengths = {"max_source_positions": 10, "max_target_positions": POSITIONS}
    tokens = TOKENS | {"bos_token_id": 5, "suppress_tokens": None, "begin_suppress_tokens": None}
    return hf.WhisperConfig(vocab_size=vocabulary_size(), **layers, **widths, **lengths, **tokens)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    models = {
        "t5": (hf.T5ForConditionalGeneration, t5_config()),
        "bart": (hf.BartForConditionalGeneration, bart_config()),
        "whisper": (hf.WhisperForConditionalGeneration, whisper_config()),
    }
    root = tmp_path_factory.mktemp("models")
    return {
        name: saved(root / name, seeded(make, config), tiny_tokenizer("[EOS]"))
        for name, (make, config) in models.items()
    }


GENERATED = ["--predict_with_generate", "--generation_max_length", "12"]
SCRIPTS: list[tuple[Any, str, list[str], str]] = [
    (scripts.run_summarization, "t5", [*GENERATED, "--do_predict"], "eval_overlap"),
    pytest.param(
        scripts.run_summarization, "bart", [*GENERATED, "--num_beams", "2"], "eval_gen_len", marks=pytest.mark.slow
    ),
    pytest.param(
        scripts.run_translation, "bart", ["--label_smoothing_factor", "0.1"], "eval_loss", marks=pytest.mark.slow
    ),
    pytest.param(
        *(
            scripts.run_translation,
            "t5",
            [*GENERATED, "--eval_strategy", "steps", "--eval_steps", "1"],
            "eval_overlap",
        ),
        marks=pytest.mark.slow,
    ),
    pytest.param(scripts.run_seq2seq_qa, "t5", GENERATED, "eval_exact_match", marks=pytest.mark.slow),
    pytest.param(scripts.run_speech_recognition_seq2seq, "whisper", GENERATED, "eval_overlap", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("names", [pytest.param(THEIRS, marks=pytest.mark.slow), OURS], ids=["theirs", "ours"])
@pytest.mark.parametrize(
    ("script", "model", "options", "metric"), SCRIPTS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_script_with_two_names_changed(
    script: Any, model: str, options: list[str], metric: str, names: Any, folders: dict[str, str], tmp_path: Path
) -> None:
    private = ["--target_epsilon", "8"] if names is OURS else []
    argv = ["--model_name_or_path", folders[model], "--output_dir", str(tmp_path), *COMMON.split(), *options, *private]
    metrics = script(names, argv)
    assert math.isfinite(metrics[metric])
    assert metrics["train_samples"] == TRAIN_ROWS
    if "--do_predict" in options:
        assert metrics["predicted_texts"] > 0
    assert (tmp_path / "README.md").is_file()
    if names is OURS:
        ledger = PrivacyLedger.read(tmp_path)
        assert ledger.charged == 2
        assert "train_loss" not in metrics


def seq2seq_trainer(folder: str, output: Path, **settings: Any) -> DCSGDSeq2SeqTrainer:
    tokenizer = tiny_tokenizer("[EOS]")
    rows = [
        {**tokenizer(sentence(k)), "labels": tokenizer(sentence(k, 3))["input_ids"]} for k in range(TRAIN_ROWS + 4)
    ]
    args = DCSGDSeq2SeqTrainingArguments(
        str(output), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", max_steps=1, **settings
    )
    model = hf.AutoModelForSeq2SeqLM.from_pretrained(folder)
    collate = hf.DataCollatorForSeq2Seq(tokenizer, model=model)
    train, held_out = rows[:TRAIN_ROWS], rows[TRAIN_ROWS:]
    return DCSGDSeq2SeqTrainer(
        model, args, collate, train_dataset=train, eval_dataset=held_out, processing_class=tokenizer
    )


def test_generated_texts_are_those_of_the_plain_trainer(folders: dict[str, str], tmp_path: Path) -> None:
    ours = seq2seq_trainer(folders["t5"], tmp_path, predict_with_generate=True, generation_max_length=9)
    args = hf.Seq2SeqTrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, predict_with_generate=True
    )
    plain = hf.Seq2SeqTrainer(ours.model, args, ours.data_collator, processing_class=ours.processing_class)
    rows = ours.eval_dataset
    for given, same in (({}, {"max_length": 9}), ({"max_length": 5}, {"max_length": 5})):
        found, expected = ours.predict(rows, **given), plain.predict(rows, **same)
        assert found.predictions.tolist() == expected.predictions.tolist()


def test_a_generation_config_is_taken(folders: dict[str, str], tmp_path: Path) -> None:
    wanted = hf.GenerationConfig(max_length=7, num_beams=2, **TOKENS)
    trainer = seq2seq_trainer(folders["t5"], tmp_path, generation_config=wanted, predict_with_generate=True)
    assert trainer.model.generation_config.max_length == 7
    trainer.train()
    trainer.save_model()
    assert hf.GenerationConfig.from_pretrained(tmp_path).num_beams == 2
    assert trainer.args.to_dict()["generation_config"]["max_length"] == 7


def test_defaults_are_those_of_private_training(tmp_path: Path) -> None:
    args = DCSGDSeq2SeqTrainingArguments(str(tmp_path), use_cpu=True)
    assert args.per_device_train_batch_size is None
    assert args.target_epsilon == 8
    assert args.max_grad_norm == 0
    assert args.predict_with_generate is False


def test_a_loss_of_ones_own_may_be_given(folders: dict[str, str], tmp_path: Path) -> None:
    def last_token(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs.logits[:, -1], labels[:, -1].clamp(min=0), reduction="none")

    made = seq2seq_trainer(folders["t5"], tmp_path)
    trainer = DCSGDSeq2SeqTrainer(
        made.model, made.args, made.data_collator, train_dataset=made.train_dataset, per_example_loss_func=last_token
    )
    trainer.train()
    assert PrivacyLedger.read(tmp_path).charged == 1


def test_arguments_that_do_not_say_how_to_generate_are_refused(folders: dict[str, str], tmp_path: Path) -> None:
    model = hf.AutoModelForSeq2SeqLM.from_pretrained(folders["t5"])
    with pytest.raises(TypeError, match="expected args to be DCSGDSeq2SeqTrainingArguments, got DCSGDTrainingArg"):
        DCSGDSeq2SeqTrainer(model, DCSGDTrainingArguments(str(tmp_path), use_cpu=True))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got Seq2SeqTrainingArguments: nothing would be private"):
        DCSGDSeq2SeqTrainer(model, hf.Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True))  # type: ignore[arg-type]
    assert issubclass(DCSGDSeq2SeqTrainer, DCSGDTrainer)
