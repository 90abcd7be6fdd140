"""The recipes in CONTRIBUTING.md do what they say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_dcsgd import GhostClipper, PrivacyPlan
from hf_dcsgd.clipping import STRATEGIES
from hf_dcsgd.ghost.registry import rule_for
from hf_dcsgd.privacy.accountants import ACCOUNTANTS
from hf_dcsgd.privacy.mechanism import DPMechanism

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def recipes() -> Iterator[dict[str, Any]]:
    """All code of the file, run from top to bottom; what it registers is taken away again."""
    before = [set(registry) for registry in (STRATEGIES, ACCOUNTANTS)]
    namespace: dict[str, Any] = {"__name__": "contributing"}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(block, "CONTRIBUTING.md", "exec"), namespace)
    yield namespace
    for registry, names in zip((STRATEGIES, ACCOUNTANTS), before, strict=True):
        for name in set(registry) - names:
            del registry._values[name]


def test_the_rule_is_exact(recipes: dict[str, Any]) -> None:
    model = nn.Sequential(recipes["Scaled"](4, 3, bias=False), nn.Tanh(), nn.Linear(3, 1))
    assert rule_for(model[0]).__name__ == "scaled_rule"
    inputs = torch.randn(5, 2, 4)
    clipper = GhostClipper(model)
    with clipper:
        norms = clipper.norms(model(inputs).square().sum((1, 2)))
    for i, norm in enumerate(norms):
        grads = torch.autograd.grad(model(inputs[i : i + 1]).square().sum(), list(model.parameters()))
        assert norm == pytest.approx(float(torch.cat([g.flatten() for g in grads]).norm()), rel=1e-4)


def test_the_strategy_halves_and_the_accountant_accounts(recipes: dict[str, Any]) -> None:
    plan = PrivacyPlan.create(
        dataset_size=1000,
        expected_batch_size=100,
        steps=10,
        num_parameters=3,
        target_epsilon=4,
        accountant="few_orders",
        clipping="halving",
        settings={"halvings": 1.0},
    )
    assert plan.epsilon() == pytest.approx(4, rel=1e-3)
    assert plan.epsilon() >= plan.epsilon(accountant="rdp")
    mechanism = DPMechanism(plan)
    for _ in range(10):
        mechanism.release(torch.zeros(3))
    assert mechanism.threshold.sensitivity == pytest.approx(0.5)


def test_the_loss_is_one_per_example(recipes: dict[str, Any]) -> None:
    labels = torch.tensor([[1, 2, -100], [0, -100, -100]])
    losses = recipes["per_token_loss"](SimpleNamespace(logits=torch.zeros(2, 3, 4)), labels)
    assert torch.allclose(losses, torch.full((2,), 4.0).log())


def test_every_file_it_names_is_there() -> None:
    root = Path(__file__).parents[1]
    named = re.findall(r"`((?:hf_dcsgd|tests|docs)/[\w/.]*)`", TEXT)
    assert named
    assert not [name for name in named if not (root / name).exists()]
