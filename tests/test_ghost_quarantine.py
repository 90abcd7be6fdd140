"""Examples that are not finite add exactly nothing, and change nothing for the others, wherever the numbers break."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES, randomized
from ghost_checks import assert_sum, run, squared_output
from oracles import clipped_sum_of, gradients_one_by_one, norms_of
from test_ghost_fallback import SLOW, Around, Scale, functional_use
from torch import nn

from hf_dcsgd.ghost import GhostClipper, engine
from hf_dcsgd.tasks.losses import per_example_losses

MODELS = {
    "rules": lambda: Around(nn.LayerNorm(4)),
    "direct form": lambda: nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 2)),
    "convolution": lambda: nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.Tanh(), nn.Conv1d(5, 5, 1, groups=5)),
    "fallback": lambda: Around(Scale()),
    "recurrent": lambda: Around(nn.LSTM(4, 4, batch_first=True), lambda m, x: m(x)[0]),
    "checkpointed": lambda: Around(
        nn.Linear(4, 4),
        lambda m, x: torch.utils.checkpoint.checkpoint(
            lambda x: nn.functional.linear(x, m.weight, m.bias), x, use_reentrant=False
        ),
    ),
    **{f"slow {name}": build for name, (build, _) in SLOW.items()},
}
BROKEN = {"nan": torch.nan, "inf": torch.inf, "minus inf": -torch.inf, "overflow": 3e38}


def batch(n: int = 4):
    return torch.randn(n, 5, 4, generator=torch.Generator().manual_seed(0))


def first_input(model: nn.Module) -> str:
    return "input" if isinstance(model, nn.Sequential) else "x"


@pytest.mark.parametrize("limit", [1 << 20, 0])
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("name", MODELS)
def test_broken_inputs(name, broken, limit, monkeypatch):
    monkeypatch.setattr(engine, "_WRITTEN_ELEMENTS", limit)
    model = randomized(MODELS[name])
    key, x = first_input(model), batch()
    kept = [0, 2, 3]
    gradients = gradients_one_by_one(model, {key: x[kept]}, torch.zeros(3), squared_output)
    x[1, 2] = BROKEN[broken]
    clipper = GhostClipper(model)
    for _ in range(2):  # the first batch is verified, the second is not
        clipped_sum = clipper.zeros()
        factors = torch.tensor([0.3, torch.nan, 1.0, 0.7])
        with clipper:
            losses = squared_output(model, model(x))
            if losses[1].isfinite():  # tanh saturates: infinite inputs, a finite loss, and gradients that are NaN
                factors[1] = 0.0
            norms = clipper.norms(losses)
            torch.testing.assert_close(norms[kept].double(), norms_of(gradients), rtol=1e-5, atol=0.0)
            if not norms[1].isfinite():
                factors[1] = torch.nan
            clipper.accumulate(factors, into=clipped_sum)
        assert_sum(clipper, clipped_sum, clipped_sum_of(gradients, factors[kept]), rtol=1e-5)


@pytest.mark.parametrize("name", ["bert", "gpt2_lm_tied", "t5", "deberta_v2", "xlnet", "vit", "lstm"])
def test_broken_losses(name):
    model = ARCHITECTURES[name].build().eval()
    inputs, labels = ARCHITECTURES[name].batch(model)
    gradients = gradients_one_by_one(model, inputs, labels)
    scale = torch.tensor([1.0, torch.nan, 1.0, torch.inf])

    def losses(model, output, labels):
        return per_example_losses(model, output, labels) * scale

    clipper = GhostClipper(model)
    clipped_sum = clipper.zeros()
    norms = run(clipper, inputs, labels, losses, into=clipped_sum)
    assert norms.isfinite().tolist() == [True, False, True, False]
    torch.testing.assert_close(norms[[0, 2]].double(), norms_of(gradients)[[0, 2]], rtol=1e-5, atol=0.0)
    assert_sum(clipper, clipped_sum, clipped_sum_of([gradients[0], gradients[2]], torch.ones(2)))


@pytest.mark.parametrize("name", ["vit", "groupnorm_resnet"])
def test_broken_images(name):
    model = ARCHITECTURES[name].build().eval()
    inputs, labels = ARCHITECTURES[name].batch(model)
    clipper = GhostClipper(model)
    expected = run(clipper, inputs, labels)
    inputs["pixel_values"][2, 0, 3, 3] = torch.inf
    norms = run(clipper, inputs, labels)
    assert norms.isfinite().tolist() == [True, True, False, True]
    kept = [0, 1, 3]
    torch.testing.assert_close(norms[kept], expected[kept], rtol=1e-6, atol=0.0)


def test_slow_uses_are_found_although_the_first_batch_is_broken():
    model = randomized(MODELS["slow functional"])
    x = batch()
    x[0] = torch.nan
    clipper = GhostClipper(model)
    run(clipper, {"x": x}, losses=squared_output)
    assert clipper.slow_parameters == SLOW["functional"][1]


def test_a_batch_in_which_nothing_is_finite():
    model = randomized(MODELS["slow functional"])
    clipper = GhostClipper(model)
    clipped_sum = clipper.zeros()
    norms = run(clipper, {"x": torch.full((3, 5, 4), torch.nan)}, losses=squared_output, into=clipped_sum)
    assert not norms.isfinite().any()
    assert not clipped_sum.any()
    run(clipper, {"x": batch()}, losses=squared_output)
    assert clipper.slow_parameters == SLOW["functional"][1]


def test_masked_attention_is_exact_beside_a_broken_example():
    """Additive masks hold -inf: they must stay what they are."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x, ignored):
            mask = torch.zeros(ignored.shape).masked_fill(ignored, -torch.inf)
            return self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]

    model = randomized(Masked)
    inputs = {"x": batch(), "ignored": torch.arange(5).expand(4, 5) >= torch.tensor([[5], [3], [2], [4]])}
    gradients = gradients_one_by_one(model, inputs, torch.zeros(4), squared_output)
    inputs["x"] = inputs["x"].clone()
    inputs["x"][0, 0] = torch.nan
    clipper = GhostClipper(model)
    clipped_sum = clipper.zeros()
    norms = run(clipper, inputs, losses=squared_output, into=clipped_sum)
    torch.testing.assert_close(norms[1:].double(), norms_of(gradients)[1:], rtol=1e-5, atol=0.0)
    assert_sum(clipper, clipped_sum, clipped_sum_of(gradients[1:], torch.ones(3)))


class LogPlusIdentity(torch.autograd.Function):
    """Adds up its gradient in place, in a buffer that is not finite where the example is broken (0/0)."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.log() + x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        total = grad / x
        return total.add_(grad)


def test_gradients_that_are_added_in_place_beside_a_broken_example():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return LogPlusIdentity.apply(functional_use(self.inner, x).square() + 0.1)

    model, x = randomized(InPlace), batch()
    gradients = gradients_one_by_one(model, {"x": x}, torch.zeros(4), squared_output)
    x[0] = torch.nan
    norms = run(GhostClipper(model), {"x": x}, losses=squared_output)
    torch.testing.assert_close(norms[1:].double(), norms_of(gradients)[1:], rtol=1e-5, atol=0.0)
