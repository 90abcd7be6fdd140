"""What is refused before training: by name, with the cure, and all at once."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from ghost_checks import run, squared_output
from torch import nn

from hf_dcsgd.ghost import GhostClipper, UnsupportedModelError


class Troubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))
        self.table = nn.Embedding(5, 4, max_norm=1.0)
        self.counts = nn.Embedding(5, 4, scale_grad_by_freq=True)
        self.half = nn.Linear(4, 4).bfloat16()
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True)


def test_all_problems_are_listed_at_once_with_their_cures():
    with pytest.raises(UnsupportedModelError) as raised:
        GhostClipper(Troubled())
    lines = str(raised.value).splitlines()[1:]
    for path, cure in {
        "features.1 (BatchNorm1d)": "nn.GroupNorm",
        "table (Embedding)": "set max_norm=None",
        "counts (Embedding)": "set it to False",
        "half.weight (torch.bfloat16)": "model.float()",
        "half.bias (torch.bfloat16)": "or freeze it",
        "instance (InstanceNorm1d)": "track_running_stats=False",
    }.items():
        (line,) = [line for line in lines if line.startswith(f"  {path}: ")]
        assert cure in line
    assert len(lines) == 6


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_trainable_parameters_in_half_precision(half):
    model = nn.Sequential(nn.Linear(4, 4).to(half), nn.Linear(4, 3))
    with pytest.raises(UnsupportedModelError, match="must be kept in fp32"):
        GhostClipper(model)
    model[0].requires_grad_(False)
    GhostClipper(model)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.SyncBatchNorm(4), nn.LazyBatchNorm1d()])
def test_batch_norm(norm):
    with pytest.raises(UnsupportedModelError, match=r"1 \(\w*BatchNorm\w*\).*statistics of the whole batch"):
        GhostClipper(nn.Sequential(nn.Linear(4, 4), norm))


def frozen_batch_norm() -> nn.Module:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    return model


def test_a_frozen_batch_norm_in_eval_mode_is_fine_until_the_model_is_put_into_train_mode():
    model = frozen_batch_norm().eval()
    clipper = GhostClipper(model)
    batch = {"input": torch.randn(3, 4)}
    run(clipper, batch, losses=squared_output)
    # No gradient passes through the norm, so that nothing but its mode shows that the batch is mixed.
    model.train()
    with pytest.raises(UnsupportedModelError, match=r"0 \(BatchNorm1d\)"):
        run(clipper, batch, losses=squared_output)
    model[0].eval()
    run(clipper, batch, losses=squared_output)


def test_a_batch_norm_without_running_statistics_is_refused_in_eval_mode_too():
    model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False, affine=False), nn.Linear(4, 3)).eval()
    with pytest.raises(UnsupportedModelError, match=r"0 \(BatchNorm1d\)"):
        GhostClipper(model)


def test_an_instance_norm_without_running_statistics_is_fine():
    GhostClipper(nn.Sequential(nn.InstanceNorm1d(4, affine=True), nn.Linear(4, 3)))


def test_a_frozen_embedding_may_not_have_a_max_norm_either():
    """Its rows are rewritten where they are looked up: what is saved would list the tokens of the private texts."""
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    with pytest.raises(UnsupportedModelError, match=r"0 \(Embedding\): max_norm=1"):
        GhostClipper(model)


SMALL = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LENGTHS = {"intermediate_size": 16, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
COUPLED = {
    "linear or yarn": lambda: hf.LlamaForSequenceClassification(
        hf.LlamaConfig(**SMALL, **LENGTHS, rope_parameters=DYNAMIC)
    ),
    "original_full": lambda: hf.BigBirdForSequenceClassification(hf.BigBirdConfig(**SMALL, intermediate_size=16)),
}


@pytest.mark.parametrize("cure", COUPLED)
def test_settings_that_show_only_on_rows_of_certain_lengths(cure: str):
    with pytest.raises(UnsupportedModelError, match=cure) as caught:
        GhostClipper(COUPLED[cure]())
    assert str(caught.value).count(cure) == 1


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_would_see_gradients_before_the_noise(register: str):
    model = nn.Linear(4, 3)
    hook = getattr(model.weight, register)(lambda gradient: None)
    with pytest.raises(UnsupportedModelError, match=r"weight: a hook of its own"):
        GhostClipper(model)
    hook.remove()
    GhostClipper(model)


def test_nothing_trainable():
    with pytest.raises(UnsupportedModelError, match="at least one trainable parameter"):
        GhostClipper(nn.Linear(4, 3).requires_grad_(False))
