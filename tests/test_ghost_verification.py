"""Where the batch is, wherever a model puts it; and losses that mix examples, which are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES, ENCODER, randomized
from ghost_checks import check_exact, run, squared_output
from peft import LoraConfig, get_peft_model
from test_ghost_fallback import Scale
from torch import nn

from hf_dcsgd.ghost import BatchCouplingError, GhostClipper
from hf_dcsgd.tasks.losses import per_example_losses


class Arranged(nn.Module):
    """Linear layers, a norm and a module without rule, in a layout that `arrange` makes and `restore` undoes."""

    def __init__(self, arrange: Callable, restore: Callable) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = Scale()
        self.last = nn.Linear(4, 3)
        self.arrange, self.restore = arrange, restore

    def forward(self, x):
        hidden = self.arrange(x)
        hidden = self.last(torch.tanh(self.scale(self.norm(torch.tanh(self.first(hidden))))))
        # Positions must not be alike, or a transposed batch would go unnoticed.
        return self.restore(hidden, *x.shape[:2]).cumsum(1)


LAYOUTS = {
    "batch first": (lambda x: x, lambda h, n, t: h),
    "batch second": (lambda x: x.transpose(0, 1), lambda h, n, t: h.transpose(0, 1)),
    "flattened": (lambda x: x.flatten(0, 1), lambda h, n, t: h.unflatten(0, (n, t))),
    "flattened, position first": (
        lambda x: x.transpose(0, 1).flatten(0, 1),
        lambda h, n, t: h.unflatten(0, (t, n)).transpose(0, 1),
    ),
    "batch third": (lambda x: x.transpose(0, 1)[:, None], lambda h, n, t: h[:, 0].transpose(0, 1)),
}


def inputs(n: int, positions: int, seed: int = 0):
    return {"x": torch.randn(n, positions, 4, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shapes", [[(3, 5), (5, 5), (1, 5), (4, 2)], [(5, 5), (3, 5)], [(1, 5), (5, 5)], [(1, 1), (2, 2)], [(6, 3)]]
)
def test_every_layout_is_exact_whatever_sizes_come_first(layout, shapes):
    clipper = GhostClipper(randomized(lambda: Arranged(*LAYOUTS[layout])))
    for n, positions in shapes:
        check_exact(clipper, inputs(n, positions))
    fast = {"batch first", "batch second", "flattened", "flattened, position first"}
    if layout in fast:
        assert clipper.slow_parameters <= {"scale.weight"}


class FirstPosition(Arranged):
    """Only the first position counts: for the first example, (batch, position) and (position, batch) look alike."""

    def forward(self, x):
        hidden = self.last(torch.tanh(self.scale(self.norm(torch.tanh(self.first(self.arrange(x)))))))
        return self.restore(hidden, *x.shape[:2])[:, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_example_alone_cannot_tell_the_layout(layout):
    clipper = GhostClipper(randomized(lambda: FirstPosition(*LAYOUTS[layout])))
    check_exact(clipper, inputs(5, 5))
    check_exact(clipper, inputs(5, 5, seed=1))


@pytest.mark.parametrize(
    "name",
    ["xlnet", "t5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mpnet", "bert", "bart", "deberta_v2"))],
)
def test_models_at_a_batch_size_that_equals_the_length(name):
    architecture = ARCHITECTURES[name]
    model = architecture.build().eval()
    length = next(iter(architecture.batch(model)[0].values())).shape[1]
    clipper = GhostClipper(model)
    check_exact(clipper, *architecture.batch(model, n=length), per_example_losses)
    check_exact(clipper, *architecture.batch(model, n=3), per_example_losses)


def test_a_table_of_relative_positions_of_the_size_of_the_batch():
    architecture = ARCHITECTURES["deberta_v2"]
    model = architecture.build().eval()
    rows = model.deberta.encoder.rel_embeddings.weight.shape[0]
    check_exact(model, *architecture.batch(model, n=rows), per_example_losses)


def test_a_layout_that_shows_only_when_gradients_do():
    """LoRA's B starts at zero, so nothing reaches A in the first step."""
    adapter = LoraConfig(r=3, task_type="SEQ_CLS", target_modules=["first", "last"], init_lora_weights=True)
    base = Arranged(*LAYOUTS["batch second"])
    model = get_peft_model(base, LoraConfig(r=3, target_modules=adapter.target_modules))
    clipper = GhostClipper(model)
    run(clipper, inputs(5, 5), losses=squared_output)
    assert not clipper.slow_parameters
    with torch.no_grad():
        for parameter in clipper.parameters.values():
            parameter.add_(torch.randn_like(parameter))
    check_exact(clipper, inputs(5, 5))
    assert not clipper.slow_parameters


def test_verification_is_done_once(monkeypatch):
    architecture = ARCHITECTURES["bert"]
    model = architecture.build().eval()
    clipper = GhostClipper(model)
    passes = []
    original = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: passes.append(1) or original(*a, **k))
    counts = []
    for n in (3, 4, 4, 1):
        passes.clear()
        run(clipper, *architecture.batch(model, n=n))
        counts.append(len(passes))
    assert counts[0] == 4  # two probes, the backward itself, and autograd's total
    assert counts[1:] == [1, 1, 1]


# --- coupled batches -------------------------------------------------------------------------------------------------


class Mixed(Arranged):
    def __init__(self, layout: str) -> None:
        super().__init__(*LAYOUTS[layout])
        self.mixer = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.mixer(self.arrange(x))
        whole = self.restore(hidden, *x.shape[:2])
        whole = whole - whole.mean(0, keepdim=True)
        return self.restore(self.last(self.arrange(whole)), *x.shape[:2])


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "batch third"])
def test_statistics_of_the_batch_are_refused_by_name(layout):
    model = randomized(lambda: Mixed(layout))
    with pytest.raises(BatchCouplingError, match=r"mixer \(Linear\)") as raised:
        run(GhostClipper(model), inputs(3, 5), losses=squared_output)
    assert "last (Linear)" not in str(raised.value)  # behind the mixing, each example is alone again


def in_batch_negatives(model, output, labels=None):
    embedded = output.flatten(1)
    return nn.functional.cross_entropy(embedded @ embedded.T, torch.arange(len(output)), reduction="none")


@pytest.mark.parametrize("n", [2, 3, 5])
def test_in_batch_negatives_are_refused(n):
    model = randomized(lambda: Arranged(*LAYOUTS["batch first"]))
    with pytest.raises(BatchCouplingError, match=r"first \(Linear\)(.|\n)*last \(Linear\)"):
        run(GhostClipper(model), inputs(n, 5), losses=in_batch_negatives)


def test_losses_in_another_order_than_the_batch_are_refused():
    model = randomized(lambda: Arranged(*LAYOUTS["batch first"]))
    with pytest.raises(BatchCouplingError):
        run(GhostClipper(model), inputs(3, 5), losses=lambda m, o, y: squared_output(m, o).flip(0))


def test_coupling_is_found_after_a_batch_of_one():
    model = randomized(lambda: Arranged(*LAYOUTS["batch first"]))
    clipper = GhostClipper(model)
    run(clipper, inputs(1, 5), losses=in_batch_negatives)
    with pytest.raises(BatchCouplingError):
        run(clipper, inputs(3, 5), losses=in_batch_negatives)
    with pytest.raises(BatchCouplingError):  # and again: a refused batch is not taken for verified
        run(clipper, inputs(3, 5), losses=in_batch_negatives)


def test_coupling_is_found_beside_an_example_that_is_not_finite():
    batch = inputs(4, 5)
    batch["x"][0] = torch.nan
    model = randomized(lambda: Arranged(*LAYOUTS["batch first"]))

    def neighbors(model, output, labels=None):
        own = squared_output(model, output)
        return own + torch.stack([own[0], own[2].sqrt(), own[3].sqrt(), own[1].sqrt()])

    with pytest.raises(BatchCouplingError):
        run(GhostClipper(model), batch, losses=neighbors)


def test_the_model_is_as_before_after_a_refusal():
    model = randomized(lambda: Arranged(*LAYOUTS["batch first"]))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BatchCouplingError):
        run(GhostClipper(model), inputs(3, 5), losses=in_batch_negatives)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_one_model_with_two_forwards_per_loss():
    """R-Drop and the like: the same modules twice, on the same examples."""
    model = randomized(lambda: Arranged(*LAYOUTS["batch first"]))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x) * self.inner(x.flip(1))

    assert not check_exact(Both(), inputs(3, 5)).slow_parameters


def test_bert_with_position_ids_for_the_whole_batch():
    model = randomized(lambda: hf.BertForSequenceClassification(hf.BertConfig(**ENCODER))).eval()
    tokens, labels = ARCHITECTURES["bert"].batch(model)
    position_ids = torch.arange(tokens["input_ids"].shape[1])[None]

    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = model

        def forward(self, **batch):
            return self.bert(**batch, position_ids=position_ids)

    def losses(module, output, labels):
        return per_example_losses(model, output, labels)

    assert not check_exact(Positioned(), tokens, labels, losses).slow_parameters


class Product(nn.Module):
    """Two factors that no module call shows, of which one starts at zero and hides the other."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterDict({"left": torch.zeros(4), "right": torch.ones(4)})

    def forward(self, x):
        return 1 + x * self.factors["left"] * self.factors["right"]


def test_a_parameter_behind_a_zero_is_not_taken_for_unused():
    model = Product()
    clipper = GhostClipper(model)
    check_exact(clipper, inputs(3, 2), None, squared_output)
    assert clipper.slow_parameters == {"factors.left", "factors.right"}
    with torch.no_grad():
        model.factors["left"].fill_(1.0)
    check_exact(clipper, inputs(3, 2), None, squared_output)
