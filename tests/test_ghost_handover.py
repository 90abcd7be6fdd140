"""Output gradients, handed over as the backward pass reaches them: the same ones, none forgotten, none held."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from architectures import ARCHITECTURES, randomized
from ghost_checks import check_exact, run, squared_output
from torch import nn

from hf_dcsgd.ghost import GhostClipper
from hf_dcsgd.ghost.recording import ForwardRecorder, find_owners, hand_over_grads, output_grads
from hf_dcsgd.tasks.losses import per_example_losses


class Branching(nn.Module):
    """Parallel ends, a layer used twice, an output changed in place, one of several outputs, and one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.again, self.idle = (nn.Linear(4, 4) for _ in range(4))
        self.recurrent = nn.GRU(4, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        self.idle(x)
        hidden = torch.tanh(self.left(x)) + self.right(x).mul_(2.0)
        hidden = self.again(torch.tanh(self.again(hidden)))
        return self.head(self.recurrent(hidden)[0])[:, 0]


def recorded(model: nn.Module, *args, **kwargs):
    recorder = ForwardRecorder(model, find_owners(model))
    recorder.install()
    output = model(*args, **kwargs)
    return output, recorder.calls


@pytest.mark.parametrize("keep_graph", [False, True])
def test_handed_over_are_the_gradients_that_autograd_gives(keep_graph):
    output, calls = recorded(randomized(Branching), torch.randn(3, 5, 4))
    loss = output.square().sum()
    expected = output_grads(loss, calls, keep_graph=True)
    found = {}
    hand_over_grads(loss, calls, keep_graph, lambda k, grads: found.update({k: grads}))
    assert sorted(found) == list(range(len(calls)))
    for k, grads in enumerate(expected):
        torch.testing.assert_close(found[k], grads, rtol=0.0, atol=0.0)
    if keep_graph:  # nothing is left on the graph that would hand over again
        found.clear()
        output_grads(loss, calls, keep_graph=True)
        assert not found


@pytest.mark.parametrize("name", ["bert", "gpt2_lm_tied", "t5", "albert", "vit"])
def test_the_same_for_models_of_transformers(name):
    model = ARCHITECTURES[name].build()
    inputs, labels = ARCHITECTURES[name].batch(model)
    output, calls = recorded(model.eval(), **inputs)
    loss = per_example_losses(model, output, labels).sum()
    expected = output_grads(loss, calls, keep_graph=True)
    found = {}
    hand_over_grads(loss, calls, False, lambda k, grads: found.update({k: grads}))
    for k, grads in enumerate(expected):
        torch.testing.assert_close(found[k], grads, rtol=0.0, atol=0.0)


class Deep(nn.Module):
    """A chain of layers whose first positions are read; remembers weakly what goes into each."""

    def __init__(self, positions: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(40, 40) for _ in range(4)])
        self.positions = positions
        self.inputs: list[weakref.ref] = []

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(x)
            self.inputs.append(weakref.ref(x.untyped_storage()))
            x = layer(x)
        return x[:, : self.positions]


def test_gradients_come_while_the_pass_is_under_way():
    model = Deep()
    output, calls = recorded(model, torch.randn(2, 3, 40))
    order = []
    calls[0].edges[0].node.register_prehook(lambda grads: order.append("first layer"))
    calls[1].edges[0].node.register_prehook(lambda grads: order.append("second layer"))
    hand_over_grads(output.sum(), calls, False, lambda k, grads: order.append(k))
    assert order == [3, 2, "second layer", 1, 0]


@pytest.mark.parametrize(("positions", "held"), [(1, 0), (8, 4)])
def test_positions_without_a_gradient_are_not_held_between_norms_and_sum(positions, held):
    model = randomized(lambda: Deep(positions=positions))
    clipper = check_exact(model, {"x": torch.randn(3, 8, 40)}, losses=squared_output)
    model.inputs.clear()
    with clipper:
        clipper.norms(squared_output(model, model(torch.randn(3, 8, 40))))
        gc.collect()
        assert sum(ref() is not None for ref in model.inputs) == held


def test_norms_and_sums_are_in_fp32_inside_of_autocast():
    model = randomized(lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)))
    x = torch.randn(8, 5, 64)
    autocast = torch.autocast("cpu", torch.bfloat16)
    outside, inside = GhostClipper(model), GhostClipper(model)
    expected, found = outside.zeros(), inside.zeros()
    for _ in range(2):
        norms = run(outside, {"input": x}, losses=squared_output, around_forward=lambda: autocast, into=expected)
        with autocast:
            again = run(inside, {"input": x}, losses=squared_output, into=found)
    torch.testing.assert_close(again, norms, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
