"""Every architecture × every trainable set against one-example-at-a-time autograd.

Whatever does not go through a rule is pinned here, and listed with its reason in docs/supported_models.md.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from oracles import clip_factors, clipped_sum_of, gradients_one_by_one, norms_of

from hf_dcsgd.ghost import GhostClipper
from hf_dcsgd.tasks.layer_selection import select_trainable_layers
from hf_dcsgd.tasks.losses import per_example_losses

PAPER = "last_encoder_pooler_classifier"
TOLERANCE = 1e-4
DOCS = Path(__file__).parents[1] / "docs" / "supported_models.md"

# Trainable parameters (globs) that cost one backward pass per example.
DEBERTA_SLOW = (
    "deberta.encoder.rel_embeddings.weight",
    "deberta.encoder.LayerNorm.*",
    "deberta.encoder.layer.*.attention.self.query_proj.*",
    "deberta.encoder.layer.*.attention.self.key_proj.*",
)
SLOW = {
    "deberta_v2": DEBERTA_SLOW,
    "mpnet": ("mpnet.encoder.relative_attention_bias.weight",),
    "xlnet": ("transformer.layer.*.rel_attn.[!l]*",),  # all but its layer_norm
    "t5": ("*.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
    "bart": ("model.decoder.embed_positions.weight",),
}
# Modules (globs) that are run again alone, example by example.
FALLBACK = {
    "xlnet": ("transformer", "transformer.layer.*.rel_attn"),
    "opt": ("model.decoder.embed_positions",),
    "bart": ("model.encoder.embed_positions", "model.decoder.embed_positions"),
    "vit": ("vit.embeddings",),
    "lstm": ("lstm",),
}
# Sets that select nothing in a model, by the message of the refusal.
NOTHING_SELECTED = {
    **dict.fromkeys(
        [(name, "bias") for name in ("llama", "llama_classifier", "qwen3", "gemma", "t5")], "no parameter"
    ),
    ("bart", "head"): "tied to the input embeddings",
    ("lstm", "head"): "no list of blocks",
    ("lstm", PAPER): "no list of blocks",
}


def trainable_sets(name: str) -> tuple[str, ...]:
    return ("as_is",) if name.startswith("lora") else ("all", PAPER, "bias", "head")


CASES = [(name, expression) for name in ARCHITECTURES for expression in trainable_sets(name)]


@lru_cache(maxsize=1)
def prepared(name: str):
    """Model, batch, and the oracle's gradients of everything that any of the sets trains."""
    architecture = ARCHITECTURES[name]
    model = architecture.build().eval()
    inputs, labels = architecture.batch(model)
    select_trainable_layers(model, trainable_sets(name)[0])
    return model, inputs, labels, gradients_one_by_one(model, inputs, labels)


def matching(names, patterns: tuple[str, ...]) -> set[str]:
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


@pytest.mark.parametrize(("name", "expression"), [case for case in CASES if case not in NOTHING_SELECTED])
def test_norms_and_clipped_sum_equal_autograd_one_example_at_a_time(name, expression):
    model, inputs, labels, gradients = prepared(name)
    selected = set(select_trainable_layers(model, expression))
    expected_norms = norms_of(gradients, selected)
    factors = clip_factors(expected_norms, expected_norms.median().item())
    assert (factors < 1).any()
    assert (factors == 1).any()
    clipper = GhostClipper(model)
    clipped_sum = clipper.zeros()
    with clipper:
        norms = clipper.norms(per_example_losses(model, model(**inputs), labels))
        clipper.accumulate(factors, into=clipped_sum)

    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), expected_norms, rtol=TOLERANCE, atol=0.0)
    expected = clipped_sum_of(gradients, factors, selected)
    length = torch.stack([value.norm() for value in expected.values()]).norm()
    found = clipper.unflatten(clipped_sum)
    assert set(found) == selected
    for key, value in expected.items():
        # A share of the whole is allowed too: some gradients are zero but for rounding (attention's key biases).
        assert (found[key].double() - value).norm() <= TOLERANCE * torch.maximum(value.norm(), 1e-2 * length), key

    assert clipper.slow_parameters == matching(selected, SLOW.get(name, ()))
    fallback = {path for path, rule in clipper.rules().items() if rule == "fallback"}
    assert fallback == matching(clipper.rules(), FALLBACK.get(name, ()))


@pytest.mark.parametrize(("name", "expression"), NOTHING_SELECTED)
def test_sets_that_select_nothing(name, expression):
    with pytest.raises(ValueError, match=NOTHING_SELECTED[name, expression]):
        select_trainable_layers(ARCHITECTURES[name].build(), expression)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_docs_list_what_is_not_fast(name):
    (row,) = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{name}` ")]
    for pattern in (*SLOW.get(name, ()), *FALLBACK.get(name, ())):
        assert f"`{pattern}`" in row
    if name not in SLOW and name not in FALLBACK:
        assert "| all | – | – |" in row
