"""Parameters without a rule: modules run again alone, and one backward per example where no module call explains."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES, ENCODER, randomized
from ghost_checks import check_exact
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_dcsgd.ghost import GhostClipper, engine
from hf_dcsgd.ghost.fallback import fallback_contributions, is_random
from hf_dcsgd.tasks.losses import per_example_losses


class Scale(nn.Module):
    """No rule, and it treats every position alike."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return x * self.weight


class Around(nn.Module):
    """A module without rule between two linear layers."""

    def __init__(self, inner: nn.Module, forward=None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = inner
        self.last = nn.Linear(4, 3)
        self.through = forward or (lambda module, x: module(x))

    def forward(self, x):
        return self.last(torch.tanh(self.through(self.inner, torch.tanh(self.first(x)))))


def inputs(n: int = 3, positions: int = 5, seed: int = 0):
    return {"x": torch.randn(n, positions, 4, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("inner", "through"),
    [
        (Scale, None),
        (lambda: nn.LSTM(4, 4, num_layers=2, batch_first=True), lambda m, x: m(x)[0]),
        (lambda: nn.GRU(4, 2, batch_first=True, bidirectional=True), lambda m, x: m(x)[0]),
        (lambda: nn.LSTM(4, 4, num_layers=2, batch_first=True), lambda m, x: m(x)[1][0].movedim(0, 1)),  # h_n
        (lambda: nn.LSTM(4, 4, batch_first=True), lambda m, x: m(x)[0] + m(x)[1][1].movedim(0, 1)),  # output and c_n
        (lambda: nn.Bilinear(4, 4, 4), lambda m, x: m(x, x.flip(1))),
        (lambda: nn.PReLU(5), None),
        (lambda: nn.ConvTranspose1d(5, 5, 1), None),
    ],
)
def test_modules_without_a_rule(inner, through, n):
    clipper = check_exact(randomized(lambda: Around(inner(), through)), inputs(n))
    assert clipper.rules()["inner"] == "fallback"
    assert not clipper.slow_parameters


def test_several_contributions_of_one_fallback_module_are_added():
    clipper = check_exact(randomized(lambda: Around(Scale(), lambda m, x: torch.tanh(m(m(x))))), inputs())
    assert not clipper.slow_parameters


def test_the_batch_size_changes_from_batch_to_batch():
    clipper = GhostClipper(randomized(lambda: Around(nn.LSTM(4, 4, batch_first=True), lambda m, x: m(x)[0])))
    for n, positions in ((3, 5), (1, 5), (5, 5), (4, 2)):
        check_exact(clipper, inputs(n, positions))


class WithTable(nn.Module):
    """Takes a table over positions, which has the size of the batch by accident when n == positions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x, table):
        return x * self.weight + torch.cumsum(x * self.weight, 1) * table


def test_an_argument_without_batch_that_has_its_size_later():
    table = {n: torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in (5, 6)}
    model = randomized(lambda: Around(WithTable(), lambda m, x: m(x, table[x.shape[1]])))
    clipper = GhostClipper(model)
    for n, positions in ((3, 5), (5, 5), (6, 6)):
        check_exact(clipper, inputs(n, positions))
    assert not clipper.slow_parameters


def test_an_argument_without_batch_that_has_its_size_at_first():
    table = torch.randn(5, 4)
    clipper = check_exact(randomized(lambda: Around(WithTable(), lambda m, x: m(x, table))), inputs(5, 5))
    assert clipper.slow_parameters == {"inner.weight"}
    check_exact(clipper, inputs(3, 5))


def test_a_fallback_that_would_write_down_too_much_becomes_slow(monkeypatch):
    clipper = GhostClipper(randomized(lambda: Around(Scale())))
    monkeypatch.setattr(engine, "_WRITTEN_ELEMENTS", 4 * 4)
    check_exact(clipper, inputs(4))
    assert not clipper.slow_parameters
    check_exact(clipper, inputs(5))  # one too many: also after the first batch, when the graph is not kept for checks
    assert clipper.slow_parameters == {"inner.weight"}


# --- one backward per example ----------------------------------------------------------------------------------------


def functional_use(module: nn.Linear, x):
    return nn.functional.linear(x, module.weight, module.bias)


class Tied(nn.Module):
    """Shares a weight between a module that is called and an expression that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        hidden = self.head(self.table(x))
        return hidden @ self.table.weight.T


SLOW = {
    "functional": (lambda: Around(nn.Linear(4, 4), functional_use), {"inner.weight", "inner.bias"}),
    "attention": (
        lambda: Around(nn.MultiheadAttention(4, 2, batch_first=True), lambda m, x: m(x, x, x, need_weights=False)[0]),
        {"inner.in_proj_weight", "inner.in_proj_bias", "inner.out_proj.weight", "inner.out_proj.bias"},
    ),
    "weight_norm": (
        lambda: Around(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
        {"inner.parametrizations.weight.original0", "inner.parametrizations.weight.original1"},
    ),
}


@pytest.mark.parametrize("limit", [1 << 20, 0])  # 0: nothing may be written down, every gradient is found twice
@pytest.mark.parametrize("n", [1, 2, 4, 5])  # 4 is also the size of all weights
@pytest.mark.parametrize("name", SLOW)
def test_uses_that_no_hook_sees_are_exact(name, n, limit, monkeypatch):
    monkeypatch.setattr(engine, "_WRITTEN_ELEMENTS", limit)
    build, slow = SLOW[name]
    clipper = check_exact(randomized(build), inputs(n))
    # Where the fallback may write gradients down, it explains what these modules own themselves.
    found_by_fallback = {"inner.bias", "inner.in_proj_weight", "inner.in_proj_bias"}
    assert clipper.slow_parameters - found_by_fallback == slow - found_by_fallback
    assert limit == 0 or name == "functional" or not clipper.slow_parameters & found_by_fallback
    check_exact(clipper, inputs(n, seed=1))


def test_a_use_that_no_hook_sees_beside_one_that_is_seen():
    tokens = torch.randint(7, (3, 6), generator=torch.Generator().manual_seed(0))
    clipper = check_exact(randomized(Tied), {"x": tokens})
    assert clipper.slow_parameters == {"table.weight"}


@pytest.mark.parametrize("n", [4, 16])  # 16 is also the width of the adapted layers
def test_dora(n):
    adapter = LoraConfig(r=3, use_dora=True, task_type="SEQ_CLS", target_modules=["query", "value"])
    model = randomized(lambda: get_peft_model(hf.BertForSequenceClassification(hf.BertConfig(**ENCODER)), adapter))
    model.eval()
    clipper = check_exact(model, *ARCHITECTURES["lora_bert"].batch(model, n=n), per_example_losses)
    assert {rule for path, rule in clipper.rules().items() if "magnitude" in path} == {"fallback"}
    assert not any("classifier" in name for name in clipper.slow_parameters)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).eval(), False),
        (nn.GRU(2, 2, num_layers=2, dropout=0.1), True),
        (nn.GRU(2, 2, num_layers=2), False),
        (type("StableDropout", (nn.Module,), {})(), True),  # some other dropout: by its name
        (nn.Linear(2, 2), False),
    ],
)
def test_modules_that_draw_random_numbers_are_known(module, expected):
    assert is_random(module) is expected


def test_a_module_that_draws_random_numbers_unknown_is_not_run_again():
    class Hidden(Scale):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5)

    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="random"):
        fallback_contributions(Hidden(), ((x,), {}), [True], [torch.ones(3, 4)], [0])
