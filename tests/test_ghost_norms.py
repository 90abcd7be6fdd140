"""What the norms save: idle positions, shared inputs, inputs that nobody needs; exact all the same."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from architectures import randomized
from ghost_checks import assert_sum, check_exact, run, squared_output
from oracles import clipped_sum_of, gradients_one_by_one, norms_of
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_dcsgd.ghost import Dense, GhostClipper, Outer
from hf_dcsgd.ghost.contributions import LastResult
from hf_dcsgd.ghost.norms import take_norms, written


class FirstToken(nn.Module):
    """A classifier of the first position, behind layers that see all of them."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.mixing = nn.Linear(width, width)
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        hidden = hidden + torch.tanh(self.mixing(hidden)).mean(1, keepdim=True)
        return self.last(hidden)[:, 0]


def tokens(n: int = 4, positions: int = 8):
    return torch.randn(n, positions, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("width", [6, 40])
@pytest.mark.parametrize("n", [1, 4])
def test_positions_without_a_gradient_are_left_out(n, width):
    check_exact(randomized(lambda: FirstToken(width)), {"x": tokens(n)})


def test_the_sum_is_taken_of_positions_with_a_gradient_alone():
    left = torch.zeros(3, 8, 20)
    left[0, 2], left[2, 5] = 1.0, 2.0
    outer = Outer(left, torch.ones(3, 8, 30))
    squared, remaining = take_norms({"weight": [outer]}, {"weight": torch.Size([20, 30])})
    assert squared.tolist() == [600.0, 0.0, 2400.0]
    (part,) = remaining["weight"]
    assert isinstance(part, Outer)
    assert part.positions == 2


def test_nothing_has_a_gradient():
    model = randomized(FirstToken)
    with torch.no_grad():
        model.last.weight.zero_()
    check_exact(model, {"x": tokens()})


class Gated(nn.Module):
    """Only the positions that an example opens have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)

    def forward(self, x, gate):
        return self.inner(x)[gate].new_zeros(len(x), 6).index_add(0, gate.nonzero()[:, 0], self.inner(x)[gate])


@pytest.mark.parametrize("opened", [0, 3])
def test_whether_an_example_is_finite_does_not_depend_on_the_gradients_of_its_neighbors(opened):
    """Example 0 is infinite where it has no gradient itself, and its neighbors may have one, or not."""
    x, gate = tokens(), torch.zeros(4, 8, dtype=torch.bool)
    gate[:, 1] = True
    x[0, 5] = torch.inf
    gate[1, 2 : 2 + opened + 1] = True
    model = randomized(Gated)
    clipper = GhostClipper(model)
    clipped_sum = clipper.zeros()
    norms = run(clipper, {"x": x, "gate": gate}, losses=squared_output, into=clipped_sum)
    assert norms.isfinite().tolist() == [False, True, True, True]
    gradients = gradients_one_by_one(model, {"x": x[1:], "gate": gate[1:]}, torch.zeros(3), squared_output)
    torch.testing.assert_close(norms[1:].double(), norms_of(gradients), rtol=1e-5, atol=0.0)
    assert_sum(clipper, clipped_sum, clipped_sum_of(gradients, torch.ones(3)))


class SharedInput(nn.Module):
    """Layers on one input, on a part of it that starts at the same place in memory, and on it again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(4, 8), nn.Linear(8, 8, bias=False)])

    def forward(self, x):
        query, key, part, value = self.layers
        return torch.tanh(query(x)) * key(x) + part(x[..., :4]) + value(x)


@pytest.mark.parametrize("positions", [1, 3, 9])
def test_layers_that_share_their_input(positions):
    x = torch.randn(3, positions, 8, generator=torch.Generator().manual_seed(0))
    check_exact(randomized(SharedInput), {"x": x})


def test_a_result_is_remembered_for_the_same_numbers_alone():
    made: list[torch.Tensor] = []
    last = LastResult()
    x = torch.arange(12.0).view(3, 4)
    for tensor in (x, x.detach(), x[:, :2], x.T, x.view(torch.int32), x):
        assert torch.equal(last.of(tensor, lambda tensor: made.append(tensor) or tensor * 2), tensor * 2)
    assert len(made) == 5


@pytest.mark.parametrize(("width", "positions"), [(4, 2), (4, 3), (40, 8), (40, 13), (40, 14), (40, 40)])
def test_contributions_are_written_down_where_that_is_faster(width, positions):
    generator = torch.Generator().manual_seed(0)
    outer = Outer(
        torch.randn(3, positions, 40, generator=generator), torch.randn(3, positions, width, generator=generator)
    )
    found = written(outer)
    assert isinstance(found, Dense) is (1.5 * positions * (40 + width) >= 40 * width)
    if isinstance(found, Dense):
        torch.testing.assert_close(found.value, torch.einsum("ntp,ntd->npd", outer.left, outer.right))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.inner(x) * self.temperature


def test_a_parameter_that_is_a_single_number():
    assert not check_exact(randomized(Scaled), {"x": tokens()}).slow_parameters


class Watching(nn.Module):
    """Remembers weakly what goes into its inner module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: list[weakref.ref] = []

    def forward(self, x):
        x = x.clone()
        self.seen.append(weakref.ref(x.untyped_storage()))
        return self.inner(x)


@pytest.mark.parametrize("trained", ["weight", "bias"])
@pytest.mark.parametrize("inner", [nn.Linear(4, 4), Conv1D(4, 4)], ids=lambda m: type(m).__name__)
def test_inputs_are_held_for_weights_alone(inner, trained):
    model = Watching(inner)
    for name, parameter in inner.named_parameters():
        parameter.requires_grad_(name == trained)
    clipper = check_exact(model, {"x": tokens()})
    model.seen.clear()
    with clipper:
        losses = squared_output(model, model(tokens()))
        gc.collect()
        assert (model.seen[0]() is None) is (trained == "bias")
        clipper.norms(losses)
