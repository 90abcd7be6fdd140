"""What is found before training without a list of names, and what is not refused although it looks suspicious."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_dcsgd.checks.preflight import check_before_training
from hf_dcsgd.data.synthetic import synthetic_like
from hf_dcsgd.ghost import BatchCouplingError, UnsupportedModelError
from hf_dcsgd.step import PrivateStep

SMALL = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SEQ2SEQ = {"vocab_size": 30, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16}
SPEECH = {
    **SMALL,
    "intermediate_size": 16,
    "layerdrop": 0.0,
    "conv_dim": (8,),
    "conv_stride": (5,),
    "conv_kernel": (10,),
    "num_feat_extract_layers": 1,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}


def text(length: int = 8, **entries: Any) -> dict[str, Any]:
    tokens = torch.arange(3, 3 + length)[None] % 27 + 3
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": torch.tensor([1]), **entries}


def checked(model: nn.Module, row: dict[str, Any]) -> PrivateStep:
    model.train()
    step = PrivateStep(model)
    check_before_training(step, row)
    return step


def opt(**settings: float) -> nn.Module:
    return hf.OPTForSequenceClassification(hf.OPTConfig(**SMALL, ffn_dim=16, word_embed_proj_dim=16, **settings))


def m2m(**settings: float) -> nn.Module:
    config = hf.M2M100Config(
        **SEQ2SEQ,
        decoder_ffn_dim=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        max_position_embeddings=32,
        **settings,
    )
    return hf.M2M100ForConditionalGeneration(config)


def speech(**settings: Any) -> nn.Module:
    return hf.Wav2Vec2ForSequenceClassification(hf.Wav2Vec2Config(**SPEECH, **settings))


SOUND = {"input_values": torch.sin(torch.arange(400.0))[None], "labels": torch.tensor([1])}
PAIR = text(labels=torch.arange(3, 11)[None], decoder_input_ids=torch.arange(3, 11)[None])
NO_LAYERDROP = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
SHARED = {
    "layerdrop": (opt, {"layerdrop": 0.05}, {"layerdrop": 0.0}, text()),
    "encoder_layerdrop": (m2m, {**NO_LAYERDROP, "encoder_layerdrop": 0.05}, NO_LAYERDROP, PAIR),
    "decoder_layerdrop": (m2m, {**NO_LAYERDROP, "decoder_layerdrop": 0.05}, NO_LAYERDROP, PAIR),
    "SpecAugment": (speech, {}, {"apply_spec_augment": False}, SOUND),
}


@pytest.mark.parametrize(
    "name",
    [
        "layerdrop",
        "SpecAugment",
        *(pytest.param(f"{side}_layerdrop", marks=pytest.mark.slow) for side in ("encoder", "decoder")),
    ],
)
def test_random_numbers_of_a_whole_stack_are_found_without_a_list_of_names(name: str):
    build, settings, cure, row = SHARED[name]
    with pytest.raises(BatchCouplingError):
        checked(build(**settings), row)
    checked(build(**cure), row)


def longrope() -> nn.Module:
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "factor": 2.0,
        "original_max_position_embeddings": 8,
    }
    config = hf.LlamaConfig(
        **SMALL, intermediate_size=16, max_position_embeddings=32, pad_token_id=0, rope_parameters=scaling
    )
    return hf.LlamaForSequenceClassification(config)


def test_frequencies_that_are_written_anew_without_change_are_no_state():
    step = checked(longrope(), text(8))
    step.mechanism = _NoMechanism()
    step.accumulate(text(8))
    with pytest.raises(UnsupportedModelError, match="inv_freq"):
        step.accumulate(text(16))


class _NoMechanism:
    def clip_factors(self, norms: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(norms)

    def abandon(self) -> None: ...

    def discard(self) -> None: ...


class RelativePositions(nn.Module):
    """A classifier with dropout on a table that serves all rows, as DeBERTa's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 4))
        self.shared_dropout, self.own_dropout = nn.Dropout(0.5), nn.Dropout(0.5)
        self.embedding, self.head = nn.Embedding(30, 4), nn.Linear(4, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.own_dropout(self.embedding(input_ids)) * self.shared_dropout(self.table)
        return self.head(hidden.mean(dim=1))


def test_dropout_on_what_all_rows_share_is_turned_off():
    model = RelativePositions()
    checked(model, text())
    assert (model.shared_dropout.p, model.own_dropout.p) == (0.0, 0.5)


class SizedImages(nn.Module):
    """Takes the shape of an image beside its patches, and none of size zero."""

    def __init__(self, *, centered: bool) -> None:
        super().__init__()
        self.head, self.centered = nn.Linear(6, 3), centered

    def forward(self, pixel_values: torch.Tensor, spatial_shapes: torch.Tensor) -> torch.Tensor:
        if (spatial_shapes <= 0).any():
            raise ValueError("expected positive sizes")
        return self.head(pixel_values - pixel_values.mean(dim=0) if self.centered else pixel_values)

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError


IMAGE = {"pixel_values": torch.rand(1, 6), "spatial_shapes": torch.tensor([[2, 3]]), "labels": torch.tensor([1])}


def test_numbers_that_cannot_be_zero_stay_those_of_the_row():
    checked(SizedImages(centered=False), IMAGE)
    with pytest.raises(BatchCouplingError):
        checked(SizedImages(centered=True), IMAGE)


def test_synthetic_pixels_ask_for_no_vocabulary():
    made = synthetic_like(SizedImages(centered=False), IMAGE, 2)
    assert made["pixel_values"].shape == (2, 6)
    assert not made["spatial_shapes"].any()
