"""A wrong rule is named: with its module, its parameter, and the shapes where it is the shape that is wrong."""

from __future__ import annotations

import logging

import pytest
import torch
from architectures import randomized
from ghost_checks import check_exact, run, squared_output
from test_ghost_fallback import SLOW, Around
from torch import nn

from hf_dcsgd.ghost import Dense, GhostClipper, OneHotRows, Outer, UnsupportedModelError, register_rule


def model_with(rule) -> nn.Module:
    """A model whose inner module, of a class of its own, has this rule."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_parameter("bias", None)

        def forward(self, x):
            return x * self.weight

    register_rule(Scale)(rule)
    return randomized(lambda: Around(Scale()))


def inputs(n: int = 3):
    return {"x": torch.randn(n, 5, 4, generator=torch.Generator().manual_seed(0))}


def right_rule(module, x, grad):
    return {"weight": Dense((x * grad).sum(1))}


def half_rule(module, x, grad):
    return {"weight": Dense((x * grad).sum(1) / 2)}


def forgetful_rule(module, x, grad):
    return {}


def shuffling_rule(module, x, grad):
    """Right in sum, and wrong for every example."""
    return {"weight": Dense((x * grad).sum(1).flip(0))}


def averaging_rule(module, x, grad):
    return {"weight": Dense((x * grad).sum(1).mean(0).expand(len(x), 4))}


@pytest.mark.parametrize("rule", [half_rule, forgetful_rule, shuffling_rule, averaging_rule])
def test_a_rule_that_disagrees_with_autograd_is_an_error_that_names_it(rule):
    model = model_with(rule)
    with pytest.raises(UnsupportedModelError, match=rf"{rule.__name__} for inner \(Scale\) is wrong.*'weight'"):
        run(GhostClipper(model), inputs(), losses=squared_output)


def test_a_right_rule_is_exact_and_not_complained_of():
    assert not check_exact(model_with(right_rule), inputs()).slow_parameters


def test_a_right_rule_is_not_blamed_for_a_use_that_no_hook_sees(caplog):
    def forward(module, x):
        return module(x) + x * module.weight

    model = model_with(right_rule)
    model.through = forward
    with caplog.at_level(logging.WARNING, "hf_dcsgd"):
        clipper = check_exact(model, inputs())
        check_exact(randomized(SLOW["functional"][0]), inputs())
    assert clipper.slow_parameters == {"inner.weight"}
    assert not caplog.messages


@pytest.mark.parametrize("autocast", [False, True])
def test_a_rule_of_ours_on_a_module_that_was_changed_is_a_warning(autocast, caplog):
    model = randomized(lambda: Around(nn.Linear(4, 4)))
    model.inner.register_forward_hook(lambda module, args, output: output * 2)
    clipper = GhostClipper(model)
    with caplog.at_level(logging.WARNING, "hf_dcsgd"):
        run(
            clipper,
            inputs(),
            losses=squared_output,
            around_forward=lambda: torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        )
    (message,) = caplog.messages
    assert "linear_rule for inner (Linear)" in message
    assert clipper.slow_parameters == {"inner.weight", "inner.bias"}
    check_exact(clipper, inputs())


SHAPES = {
    "not per example": (lambda x, grad: Dense((x * grad).sum((0, 1))), r"expected \(3, 4\), got \(4,\)"),
    "per position": (lambda x, grad: Dense(x * grad), r"expected \(3, 4\), got \(3, 5, 4\)"),
    "one row": (lambda x, grad: Outer(grad, x), r"expected \(3, 5, 4\) and \(3, 5, 1\), got .* and \(3, 5, 4\)"),
    "positions": (lambda x, grad: Outer(grad, x[:, :1, :1]), r"expected \(3, 1, 4\) and \(3, 1, 1\), got \(3, 5, 4\)"),
    "rows": (lambda x, grad: OneHotRows(x[0, :, 0].long(), grad), r"expected \(3, 5\) and \(3, 5, 1\), got \(5,\)"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_wrong_shape_is_told_in_words(name):
    contribution, message = SHAPES[name]
    model = model_with(lambda module, x, grad: {"weight": contribution(x, grad)})
    with pytest.raises(UnsupportedModelError, match=rf"inner \(Scale\).*'weight', shape \(4,\).*{message}"):
        run(GhostClipper(model), inputs(), losses=squared_output)


@pytest.mark.parametrize("name", ["wieght", "bias"])
def test_a_contribution_to_something_that_the_module_does_not_have(name):
    model = model_with(lambda module, x, grad: {name: Dense((x * grad).sum(1))})
    with pytest.raises(UnsupportedModelError, match=rf"inner \(Scale\).*{name!r}.*parameters are 'weight'$"):
        run(GhostClipper(model), inputs(), losses=squared_output)


def test_an_error_within_a_rule_says_whose_rule_it_is():
    def broken_rule(module, x, grad):
        return {"weight": Dense(x @ grad)}

    with pytest.raises(RuntimeError) as raised:
        run(GhostClipper(model_with(broken_rule)), inputs(), losses=squared_output)
    (note,) = raised.value.__notes__
    assert "broken_rule" in note
    assert "inner (Scale)" in note
