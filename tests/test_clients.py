"""Scripts with the shape of transformers' examples run with two names changed, or are refused with a reason.

docs/migrating.md has the table; `SCRIPTS`, `MORE_SCRIPTS` and `REFUSED` here are its rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import client_media as media
import client_text as text
import pytest
import torch
import transformers as hf
from client_models import HIDDEN, POSITIONS, SIZES, bert_config, saved, seeded, tiny_tokenizer, vocabulary_size
from client_scripts import COMMON, TRAIN_ROWS

from hf_dcsgd import BatchCouplingError, DCSGDTrainer, DCSGDTrainingArguments, UnsupportedModelError
from hf_dcsgd.privacy.ledger import PrivacyLedger

pytestmark = pytest.mark.usefixtures("no_report_page", "quick_statements")

THEIRS = (hf.Trainer, hf.TrainingArguments)
OURS = (DCSGDTrainer, DCSGDTrainingArguments)
IMAGES = {"image_size": media.IMAGE, "patch_size": 8, "num_channels": 3}
MIGRATING = Path(__file__).parents[1] / "docs" / "migrating.md"


def gpt2() -> Any:
    sizes = {"n_embd": HIDDEN, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS}
    return seeded(
        hf.GPT2LMHeadModel, hf.GPT2Config(vocab_size=vocabulary_size(), bos_token_id=5, eos_token_id=6, **sizes)
    )


def xlnet_config() -> hf.XLNetConfig:
    sizes = {"d_model": HIDDEN, "n_layer": 2, "n_head": 2, "d_inner": 32}
    return hf.XLNetConfig(vocab_size=vocabulary_size(), **sizes)


def wav2vec2(head: Any, **settings: Any) -> Any:
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    sizes = {**SIZES, "vocab_size": 12, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    return seeded(head, hf.Wav2Vec2Config(**sizes, **convolutions, classifier_proj_size=8, pad_token_id=0, **settings))


def segformer() -> Any:
    stages = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
    sizes = {"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    config = hf.SegformerConfig(**stages, **sizes, decoder_hidden_size=8, num_labels=2)
    return seeded(hf.SegformerForSemanticSegmentation, config)


def detr() -> Any:
    backbone = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    layers = {f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    widths = {"d_model": HIDDEN, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 3}
    config = hf.DetrConfig(backbone_config=backbone, use_timm_backbone=False, backbone=None, **layers, **widths)
    return seeded(hf.DetrForObjectDetection, config)


def maskformer() -> Any:
    backbone = hf.SwinConfig(
        image_size=media.IMAGE, patch_size=4, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    decoder = hf.DetrConfig(
        d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1, decoder_attention_heads=1,
        encoder_ffn_dim=8, decoder_ffn_dim=8, num_queries=3,
    )  # fmt: skip
    config = hf.MaskFormerConfig(
        backbone_config=backbone, decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32, num_labels=2
    )
    return seeded(hf.MaskFormerForInstanceSegmentation, config)


def clip() -> Any:
    texts = {**SIZES, "vocab_size": 20, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 0}
    return seeded(hf.CLIPModel, hf.CLIPConfig(text_config=texts, vision_config={**SIZES, **IMAGES}, projection_dim=8))


def mae() -> Any:
    decoder = {f"decoder_{name}": value for name, value in SIZES.items()}
    return seeded(hf.ViTMAEForPreTraining, hf.ViTMAEConfig(**SIZES, **IMAGES, **decoder))


MODELS: dict[str, Callable[[], Any]] = {
    "bert": lambda: seeded(hf.BertModel, bert_config(initializer_range=0.2)),
    "gpt2": gpt2,
    "xlnet": lambda: seeded(hf.XLNetLMHeadModel, xlnet_config()),
    "xlnet_qa": lambda: seeded(hf.XLNetForQuestionAnswering, xlnet_config()),
    "vit": lambda: seeded(hf.ViTForImageClassification, hf.ViTConfig(**SIZES, **IMAGES, num_labels=2)),
    "vit_masked": lambda: seeded(hf.ViTForMaskedImageModeling, hf.ViTConfig(**SIZES, **IMAGES, encoder_stride=8)),
    "wav2vec2": lambda: wav2vec2(hf.Wav2Vec2ForSequenceClassification),
    "wav2vec2_quiet": lambda: wav2vec2(hf.Wav2Vec2ForSequenceClassification, mask_time_prob=0.0, layerdrop=0.0),
    "wav2vec2_ctc": lambda: wav2vec2(hf.Wav2Vec2ForCTC, mask_time_prob=0.0, layerdrop=0.0),
    "wav2vec2_adapter": lambda: wav2vec2(
        hf.Wav2Vec2ForCTC, mask_time_prob=0.0, layerdrop=0.0, adapter_attn_dim=4, do_stable_layer_norm=True
    ),
    "segformer": segformer,
    "detr": detr,
    "maskformer": maskformer,
    "clip": clip,
    "mae": mae,
}

# Script, model, options, a metric that comes out.
SCRIPTS: list[tuple[Any, str, str, str]] = [
    (text.run_glue, "bert", "--eval_strategy epoch --bf16 --warmup_steps 1 --weight_decay 0.1", "eval_accuracy"),
    (text.run_clm, "gpt2", "--gradient_checkpointing", "perplexity"),
    (media.run_image_classification, "vit", "", "eval_accuracy"),
]
# Of the same shapes, and slow together.
MORE_SCRIPTS: list[tuple[Any, str, str, str]] = [
    (text.run_glue, "bert", "", "eval_accuracy"),
    (text.run_classification, "bert", "", "eval_exact"),
    (text.run_ner, "bert", "", "eval_accuracy"),
    (text.run_qa, "bert", "", "eval_exact_match"),
    (text.run_swag, "bert", "", "eval_accuracy"),
    (text.run_fim, "gpt2", "", "perplexity"),
    (text.run_mlm, "bert", "", "perplexity"),
    (media.run_audio_classification, "wav2vec2_quiet", "", "eval_accuracy"),
    (media.run_speech_recognition_ctc, "wav2vec2_ctc", "", "eval_blank"),
    (text.run_plm, "xlnet", "", "perplexity"),
]
# With one option more than a plain trainer takes.
WITH_AN_OPTION: list[tuple[Any, str, str, str]] = [
    (
        media.run_semantic_segmentation,
        "segformer",
        "--trainable_layers decode_head.linear_*,decode_head.classifier",
        "eval_accuracy",
    ),
    (media.run_speech_recognition_ctc_adapter, "wav2vec2_adapter", "--trainable_layers as_is", "eval_blank"),
]
COUPLED_LOSS = "one example moves the gradient of all others"
# Script, model, the error, its reason.
REFUSED: list[tuple[Any, str, type[Exception], str]] = [
    (
        media.run_audio_classification,
        "wav2vec2",
        BatchCouplingError,
        "Set these to 0 in the model's config: layerdrop=0.1, mask_time_prob=0.05",
    ),
    (media.run_semantic_segmentation, "segformer", UnsupportedModelError, "batch_norm.*statistics of the whole batch"),
    (media.run_object_detection, "detr", ValueError, f"divides by their number, so that {COUPLED_LOSS}"),
    (media.run_instance_segmentation, "maskformer", ValueError, f"divides by their number, so that {COUPLED_LOSS}"),
    (media.run_clip, "clip", ValueError, f"compares the examples of a batch with each other, so that {COUPLED_LOSS}"),
    (media.run_mae, "mae", ValueError, "from the inputs themselves. Let the data collator give the images once more"),
    (media.run_mim, "vit_masked", ValueError, "from the inputs themselves"),
    (text.run_qa_beam_search, "xlnet_qa", ValueError, "by a search along beams; take a …ForQuestionAnsweringSimple"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    root = tmp_path_factory.mktemp("models")

    def of(name: str) -> str:
        if not (root / name).exists():
            saved(root / name, MODELS[name](), tiny_tokenizer())
        return str(root / name)

    return of


def run_script(script: Any, names: Any, model: str, output: Path, options: str) -> dict[str, float]:
    private = "--target_epsilon 8 " if names is OURS else ""
    argv = f"--model_name_or_path {model} --output_dir {output} {COMMON} {private}{options}".split()
    return script(names, argv)


def name_of(value: Any) -> str | None:
    return getattr(value, "__name__", None)


@pytest.mark.parametrize("names", [pytest.param(THEIRS, marks=pytest.mark.slow), OURS], ids=["theirs", "ours"])
@pytest.mark.parametrize(
    ("script", "model", "options", "metric"),
    [*SCRIPTS, *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE_SCRIPTS)],
    ids=name_of,
)
def test_a_script_with_two_names_changed(
    script: Any, model: str, options: str, metric: str, names: Any, folder: Callable[[str], str], tmp_path: Path
) -> None:
    metrics = run_script(script, names, folder(model), tmp_path, options)
    assert math.isfinite(metrics[metric])
    assert metrics["train_samples"] >= TRAIN_ROWS
    assert (tmp_path / "README.md").is_file()
    if names is OURS:
        assert PrivacyLedger.read(tmp_path).charged == 2
        assert "train_loss" not in metrics


@pytest.mark.parametrize(("script", "model", "options", "metric"), WITH_AN_OPTION, ids=name_of)
def test_a_script_with_an_option(
    script: Any, model: str, options: str, metric: str, folder: Callable[[str], str], tmp_path: Path
) -> None:
    metrics = run_script(script, OURS, folder(model), tmp_path, options)
    assert math.isfinite(metrics[metric])
    assert PrivacyLedger.read(tmp_path).charged == 2


@pytest.mark.parametrize(("script", "model", "error", "reason"), REFUSED, ids=name_of)
def test_what_is_refused_has_its_reason(
    script: Any, model: str, error: type[Exception], reason: str, folder: Callable[[str], str], tmp_path: Path
) -> None:
    with pytest.raises(error, match=re.compile(reason, re.DOTALL)):
        run_script(script, OURS, folder(model), tmp_path, "")
    assert not (tmp_path / PrivacyLedger.FILENAME).exists(), "nothing was spent"


@pytest.mark.slow
@pytest.mark.parametrize(("script", "model"), [row[:2] for row in REFUSED], ids=name_of)
def test_what_is_refused_is_sound_without_privacy(
    script: Any, model: str, folder: Callable[[str], str], tmp_path: Path
) -> None:
    assert run_script(script, THEIRS, folder(model), tmp_path, "")["train_samples"] >= TRAIN_ROWS


def test_masked_images_train_with_labels_and_a_loss(folder: Callable[[str], str], tmp_path: Path) -> None:
    model = hf.ViTMAEForPreTraining.from_pretrained(folder("mae"))

    def painted_again(outputs: Any, images: torch.Tensor) -> torch.Tensor:
        errors = (outputs.logits - model.patchify(images)).square().mean(dim=-1)
        return (errors * outputs.mask).sum(dim=1) / outputs.mask.sum(dim=1)

    rows = [{"pixel_values": media.noise(k, 3, media.IMAGE, media.IMAGE)} for k in range(TRAIN_ROWS)]
    args = DCSGDTrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", max_steps=2
    )
    trainer = DCSGDTrainer(
        model,
        args,
        lambda batch: {
            "labels": (images := torch.stack([row["pixel_values"] for row in batch])),
            "pixel_values": images,
        },
        train_dataset=rows,
        per_example_loss_func=painted_again,
    )
    trainer.train()
    assert PrivacyLedger.read(tmp_path).charged == 2


def test_the_table_of_the_docs_has_every_script() -> None:
    """Of examples/pytorch: all that use a trainer, and no other."""
    table = MIGRATING.read_text(encoding="utf-8").split("<!-- clients -->")[1].split("<!-- /clients -->")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    listed = {name for cell in first_cells for name in re.findall(r"`(run_\w+)`", cell)}
    seq2seq = {"run_summarization", "run_translation", "run_seq2seq_qa", "run_speech_recognition_seq2seq"}
    tried = {row[0].__name__ for row in (*SCRIPTS, *MORE_SCRIPTS, *WITH_AN_OPTION, *REFUSED)} | seq2seq | {"run_xnli"}
    assert listed == tried


# --- helpful answers -------------------------------------------------------------------------------------------------


def test_the_name_of_a_model_is_answered_with_how_to_load_it(tmp_path: Path) -> None:
    args = DCSGDTrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(
        TypeError, match=r"got the name 'bert-base-uncased': load it .*from_pretrained\('bert-base-unc"
    ):
        DCSGDTrainer("bert-base-uncased", args)  # type: ignore[arg-type]


def test_plain_arguments_are_answered_with_the_class_to_take(tmp_path: Path) -> None:
    args = hf.TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(
        TypeError, match=r"hf_dcsgd\.DCSGDTrainingArguments takes the same arguments, and target_epsilon"
    ):
        DCSGDTrainer(args=args, model=seeded(hf.BertForSequenceClassification, bert_config()))  # type: ignore[arg-type]


def test_a_model_init_is_taken(tmp_path: Path) -> None:
    args = DCSGDTrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", max_steps=1
    )
    rows = [{"input_ids": [2, 7 + k % 9, 3], "labels": k % 2} for k in range(TRAIN_ROWS)]
    trainer = DCSGDTrainer(
        args=args, train_dataset=rows, model_init=lambda: seeded(hf.BertForSequenceClassification, bert_config())
    )
    trainer.train()
    assert PrivacyLedger.read(tmp_path).charged == 1
