"""More architectures of transformers, all parameters trainable; what is slow is pinned as in test_ghost_models.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as hf
from architectures import DECODER, ENCODER, NEO_X, VOCAB, image_batch, randomized, text_batch
from ghost_checks import check_exact
from test_ghost_models import DOCS, matching
from torch import nn

from hf_dcsgd.ghost import GhostClipper, UnsupportedModelError
from hf_dcsgd.tasks.losses import per_example_losses

IMAGES = {"image_size": 16, "patch_size": 8, "num_labels": 3}
VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, **IMAGES}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": -1}
GROUPS = {f"{name}_groups": 2 for name in ("q", "k", "v", "intermediate", "output")}
# class prefix, class suffix, config settings, slow parameters (globs)
MORE: dict[str, tuple[str, str, dict, tuple[str, ...]]] = {
    "bigbird": ("BigBird", "ForSequenceClassification", {**ENCODER, "attention_type": "original_full"}, ()),
    "convbert": ("ConvBert", "ForSequenceClassification", {**ENCODER, "embedding_size": 16}, ()),
    "deberta": (
        "Deberta",
        "ForSequenceClassification",
        {**ENCODER, **RELATIVE},
        ("*.pos_*proj.*", "*.rel_embeddings.*"),
    ),
    "funnel": (
        "Funnel",
        "ForSequenceClassification",
        {"vocab_size": VOCAB, "block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32},
        (),
    ),
    "longformer": (
        "Longformer",
        "ForSequenceClassification",
        {**ENCODER, "attention_window": 4, "max_position_embeddings": 64},
        ("*.query_global.*",),
    ),
    "squeezebert": ("SqueezeBert", "ForSequenceClassification", {**ENCODER, "embedding_size": 16, **GROUPS}, ()),
    "xlm_roberta": ("XLMRoberta", "ForSequenceClassification", ENCODER, ()),
    "bloom": ("Bloom", "ForCausalLM", {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 2}, ()),
    "falcon": ("Falcon", "ForCausalLM", NEO_X, ()),
    "gemma3": ("Gemma3Text", "ForCausalLM", {**DECODER, "head_dim": 8, "query_pre_attn_scalar": 8}, ()),
    "phi3": ("Phi3", "ForCausalLM", DECODER, ()),
    "mamba": (
        "Mamba",
        "ForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "use_cache": False},
        ("*.mixer.conv1d.*", "*.mixer.dt_proj.*"),
    ),
    "mixtral": ("Mixtral", "ForCausalLM", {**DECODER, "num_local_experts": 4}, ("*.mlp.gate.*", "*.mlp.experts.*")),
    "gpt_oss": (
        "GptOss",
        "ForCausalLM",
        {**DECODER, "num_local_experts": 4, "head_dim": 8, "num_experts_per_tok": 2},
        ("*.mlp.router.*", "*.mlp.experts.*", "*.self_attn.sinks"),
    ),
    "beit": ("Beit", "ForImageClassification", VIT, ()),
    "convnext": (
        "ConvNext",
        "ForImageClassification",
        {**IMAGES, "image_size": 32, "patch_size": 2, "hidden_sizes": [8] * 4, "depths": [1] * 4},
        (),
    ),
    "deit": ("DeiT", "ForImageClassification", VIT, ()),
    "dinov2": ("Dinov2", "ForImageClassification", {**VIT, "mlp_ratio": 1}, ()),
    "swin": (
        "Swin",
        "ForImageClassification",
        {**IMAGES, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        ("*.layers.0.*.attention.*_proj.*", "*.relative_position_bias_table"),
    ),
}


def build(prefix: str, suffix: str, settings: dict) -> nn.Module:
    config = getattr(hf, f"{prefix}Config")(**settings)
    return randomized(lambda: getattr(hf, f"{prefix.removesuffix('Text')}{suffix}")(config)).eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_architectures(name):
    prefix, suffix, settings, slow = MORE[name]
    model = build(prefix, suffix, settings)
    task = "causal_lm" if suffix == "ForCausalLM" else "single_label_classification"
    batch: Callable = image_batch if suffix == "ForImageClassification" else text_batch
    inputs, labels = batch(model, n=3, **({} if batch is image_batch else {"task": task}))
    clipper = check_exact(model, inputs, labels, per_example_losses)
    assert clipper.slow_parameters == matching(clipper.parameters, slow)


@pytest.mark.parametrize("name", MORE)
def test_the_docs_list_them(name):
    (row,) = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{name}` ")]
    for pattern in MORE[name][3]:
        assert f"`{pattern}`" in row


def test_convolutional_networks_with_batch_norm_are_refused():
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=3)
    with pytest.raises(UnsupportedModelError, match="BatchNorm2d"):
        GhostClipper(hf.ResNetForImageClassification(config))


def test_routers_with_a_capacity_for_the_batch_are_refused():
    config = hf.NllbMoeConfig(
        vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=1, encoder_sparse_step=1, decoder_sparse_step=1,
        num_experts=2, encoder_ffn_dim=8, decoder_ffn_dim=8, encoder_attention_heads=2, decoder_attention_heads=2,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=r"NllbMoeTop2Router\): drops tokens"):
        GhostClipper(hf.NllbMoeForConditionalGeneration(config))


def test_multiple_choice_is_exact():
    model = build("Bert", "ForMultipleChoice", ENCODER)
    tokens = torch.randint(5, 25, (3, 4, 7), generator=torch.Generator().manual_seed(0))

    def losses(model, outputs, labels):
        return nn.functional.cross_entropy(outputs.logits, labels.long(), reduction="none")

    clipper = check_exact(model, {"input_ids": tokens}, torch.tensor([0, 3, 2]), losses)
    assert not any("classifier" in name or "pooler" in name for name in clipper.slow_parameters)
