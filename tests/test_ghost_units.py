"""Examples of several rows: norms and clipped sums over units against autograd, one unit at a time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES, ENCODER, randomized
from ghost_checks import assert_sum
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Gradients, clip_factors, clipped_sum_of, gradients_of, norms_of
from torch import Tensor, nn

from hf_dcsgd.ghost import BatchCouplingError, GhostClipper
from hf_dcsgd.ghost.units import Units
from hf_dcsgd.tasks.layer_selection import select_trainable_layers
from hf_dcsgd.tasks.losses import per_example_losses

NAMES = ("bert", "gpt2_lm_tied", "vit", "lstm", "lora_bert", "deberta_v2", "groupnorm_resnet", "t5")
TOLERANCE = 1e-4


@st.composite
def units_of_rows(draw: st.DrawFn) -> list[int]:
    """1 to 4 units of 1 to 5 rows each, in any order."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    return draw(st.permutations([unit for unit, size in enumerate(sizes) for _ in range(size)]))


@lru_cache(maxsize=len(NAMES))
def clipper_for(name: str) -> GhostClipper:
    model = ARCHITECTURES[name].build().eval()
    select_trainable_layers(model, "as_is" if name.startswith("lora") else "all")
    return GhostClipper(model)


def selected(batch: Any, index: Tensor) -> Any:
    return batch[index] if isinstance(batch, Tensor) else {key: value[index] for key, value in batch.items()}


def gradients_unit_by_unit(model: nn.Module, inputs: Any, labels: Any, of_row: Tensor) -> list[Gradients]:
    """The gradient of each unit's mean loss, its rows run by themselves."""
    found = []
    for unit in range(int(of_row.max()) + 1):
        rows = (of_row == unit).nonzero().flatten()
        losses = per_example_losses(model, model(**selected(inputs, rows)), selected(labels, rows))
        found.append(gradients_of(losses.mean(), model))
    return found


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected).abs() / expected).max())


def check_units(name: str, of_row: Tensor, seed: int = 0) -> float:
    clipper, architecture = clipper_for(name), ARCHITECTURES[name]
    inputs, labels = architecture.batch(clipper.model, len(of_row), seed)
    gradients = gradients_unit_by_unit(clipper.model, inputs, labels, of_row)
    expected = norms_of(gradients)
    factors = clip_factors(expected, expected.median().item())
    units, clipped_sum = Units(of_row), clipper.zeros()
    with clipper.over(units):
        losses = per_example_losses(clipper.model, clipper.model(**inputs), labels)
        norms = clipper.norms(units.mean(losses))
        clipper.accumulate(factors, clipped_sum)
    torch.testing.assert_close(norms.double(), expected, rtol=TOLERANCE, atol=0.0)
    assert_sum(clipper, clipped_sum, clipped_sum_of(gradients, factors), TOLERANCE)
    return relative_error(norms, expected)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6, deadline=None)
@given(of_row=units_of_rows(), seed=st.integers(0, 1000))
def test_norms_and_sums_over_units_equal_autograd(name: str, of_row: list[int], seed: int) -> None:
    check_units(name, torch.tensor(of_row), seed)


@pytest.mark.parametrize("name", ["bert", "gpt2_lm_tied"])
def test_one_row_each_is_the_row_path(name: str) -> None:
    clipper, architecture = clipper_for(name), ARCHITECTURES[name]
    inputs, labels = architecture.batch(clipper.model, 4)
    found = []
    for units in (None, Units(torch.arange(4))):
        with clipper.over(units):
            found.append(clipper.norms(per_example_losses(clipper.model, clipper.model(**inputs), labels)))
    assert torch.equal(found[0], found[1])


# --- rows that the model makes itself, or that depend on each other --------------------------------------------------


def choices_model() -> nn.Module:
    return randomized(lambda: hf.BertForMultipleChoice(hf.BertConfig(**ENCODER))).eval()


@pytest.mark.parametrize(("questions", "choices"), [(1, 2), (3, 4), (4, 3), (5, 1)])
def test_choices_are_rows_and_need_no_slow_path(questions: int, choices: int) -> None:
    model = choices_model()
    generator = torch.Generator().manual_seed(questions)
    tokens = torch.randint(5, 25, (questions, choices, 7), generator=generator)
    labels = torch.randint(choices, (questions,), generator=generator)

    def losses_of(tokens: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(input_ids=tokens).logits, labels, reduction="none")

    gradients = [gradients_of(losses_of(tokens[i : i + 1], labels[i : i + 1])[0], model) for i in range(questions)]
    expected = norms_of(gradients)
    clipper = GhostClipper(model)
    clipped_sum = clipper.zeros()
    with clipper.over(Units(torch.arange(questions).repeat_interleave(choices))):
        norms = clipper.norms(losses_of(tokens, labels))
        clipper.accumulate(torch.ones(questions), clipped_sum)
    torch.testing.assert_close(norms.double(), expected, rtol=TOLERANCE, atol=1e-6)
    assert_sum(clipper, clipped_sum, clipped_sum_of(gradients, torch.ones(questions)), TOLERANCE)
    assert not clipper.slow_parameters


class PairScorer(nn.Module):
    """Sees rows apart in its first layer, and both rows of a pair at once in its second."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(5, 4)
        self.pairs = nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.rows(x.flatten(0, 1))).view(len(x), 2, 4)
        hidden = hidden - hidden.mean(1, keepdim=True) / 3
        return self.scale * self.pairs(hidden.flatten(1))


def test_layers_that_see_a_whole_unit_are_exact_too() -> None:
    torch.manual_seed(0)
    model, x = PairScorer(), torch.randn(4, 2, 5)
    gradients = [gradients_of(model(x[i : i + 1]).square().sum(), model) for i in range(4)]
    factors = torch.tensor([1.0, 0.5, 0.25, 2.0])
    clipper = GhostClipper(model)
    clipped_sum = clipper.zeros()
    with clipper.over(Units(torch.arange(4).repeat_interleave(2))):
        norms = clipper.norms(model(x).square().sum(1))
        clipper.accumulate(factors, clipped_sum)
    torch.testing.assert_close(norms.double(), norms_of(gradients), rtol=TOLERANCE, atol=0.0)
    assert_sum(clipper, clipped_sum, clipped_sum_of(gradients, factors), TOLERANCE)
    assert clipper.rules() == {"": "fallback", "rows": "linear_rule", "pairs": "linear_rule"}
    assert not clipper.slow_parameters


class Centered(nn.Module):
    """Takes the mean over a group of rows out of each of them."""

    def __init__(self, group_of_row: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.group_of_row = group_of_row

    def forward(self, x: Tensor) -> Tensor:
        groups = Units(self.group_of_row[: len(x)])
        hidden = self.layer(x)
        means = torch.stack([hidden[groups.of_row == group].mean(0) for group in range(groups.count)])
        return torch.tanh(hidden - means[groups.of_row]).square().sum(1)


def test_coupling_within_a_unit_is_fine_and_between_units_is_refused() -> None:
    torch.manual_seed(0)
    units, x = Units(torch.tensor([0, 1, 0, 2, 1, 0])), torch.randn(6, 5)
    model = Centered(units.of_row)
    gradients = []
    for unit in range(3):
        rows = units.of_row == unit
        gradients.append(gradients_of(Centered.forward(_with_groups(model, rows), x[rows]).mean(), model))
    clipper = GhostClipper(model)
    with clipper.over(units):
        norms = clipper.norms(units.mean(model(x)))
    torch.testing.assert_close(norms.double(), norms_of(gradients), rtol=TOLERANCE, atol=1e-7)

    coupled = GhostClipper(Centered(torch.tensor([0, 0, 0, 1, 1, 1])))
    with pytest.raises(BatchCouplingError, match=r"layer \(Linear\)"), coupled.over(units):
        coupled.norms(units.mean(coupled.model(x)))


def _with_groups(model: Centered, rows: Tensor) -> Centered:
    """The same layer, for the rows of one unit alone."""
    alone = Centered(torch.zeros(int(rows.sum()), dtype=torch.long))
    alone.layer = model.layer
    return alone


# --- edges -----------------------------------------------------------------------------------------------------------


def test_a_broken_row_takes_its_unit_out_and_no_other() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    x[3] = torch.nan
    of_row = torch.tensor([0, 1, 0, 2, 2])
    units, clipper = Units(of_row), GhostClipper(model)
    clipped_sum = clipper.zeros()
    with clipper.over(units):
        norms = clipper.norms(units.mean(model(x).square().sum(1)))
        clipper.accumulate(torch.ones(3), clipped_sum)
    assert norms.isfinite().tolist() == [True, True, False]
    gradients = [gradients_of(model(x[of_row == unit]).square().sum(1).mean(), model) for unit in (0, 1)]
    assert_sum(clipper, clipped_sum, clipped_sum_of(gradients, torch.ones(2)))


def test_units_are_forgotten_after_one_forward() -> None:
    clipper = GhostClipper(nn.Linear(4, 3))
    with clipper.over(Units(torch.zeros(2, dtype=torch.long))):
        clipper.norms(clipper.model(torch.ones(2, 4)).sum(1).sum(0, keepdim=True))
    with clipper:
        assert clipper.norms(clipper.model(torch.ones(2, 4)).sum(1)).shape == (2,)


@pytest.mark.parametrize(
    ("of_row", "message"),
    [
        (torch.tensor([0.0, 1.0]), "whole numbers of shape"),
        (torch.tensor([[0, 1]]), "whole numbers of shape"),
        (torch.tensor([0, -1]), "counted from 0"),
        (torch.tensor([0, 2, 2]), "got none of unit 1"),
    ],
)
def test_what_cannot_be_units(of_row: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Units(of_row)


def test_losses_and_rows_must_fit_the_units() -> None:
    clipper = GhostClipper(nn.Linear(4, 3))
    with (
        clipper.over(Units(torch.tensor([0, 0, 1]))),
        pytest.raises(ValueError, match="got 3 losses for a batch of 2"),
    ):
        clipper.norms(clipper.model(torch.ones(3, 4)).sum(1))
    with (
        clipper.over(Units(torch.tensor([0, 0, 1]))),
        pytest.raises(ValueError, match="units of 5 rows, as the model"),
    ):
        clipper.norms(clipper.model(torch.ones(5, 4)).sum(1)[:2])


def test_the_table_of_models_covers_rules_fallback_and_slow_path() -> None:
    for name in NAMES:
        check_units(name, torch.tensor([1, 0, 1]))
    assert "fallback" in clipper_for("lstm").rules().values()
    assert clipper_for("deberta_v2").slow_parameters
    assert not clipper_for("bert").slow_parameters
