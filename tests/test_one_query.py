"""A block whose first position alone is read answers one query, without keys and values: the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES, ENCODER
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import clip_factors, clipped_sum_of, gradients_one_by_one, norms_of
from test_unread import prepared, with_labels
from tiny_tasks import tiny_bert
from torch import Tensor, nn

from hf_dcsgd.ghost.contributions import Blocks, ClipFactors, Contribution, Dense, LastResult
from hf_dcsgd.ghost.norms import squared_norms, take_norms
from hf_dcsgd.ghost.units import Units
from hf_dcsgd.step import PrivateStep
from hf_dcsgd.tasks.layer_selection import select_trainable_layers
from hf_dcsgd.trunk.one_query import OneQuery
from hf_dcsgd.trunk.unread import FirstPosition


def narrowed(model: nn.Module, batch: dict[str, Tensor], **options: Any) -> PrivateStep:
    step = PrivateStep(model, **options)
    step.leave_out_unread(batch)
    assert type(step._losses.first_position) is OneQuery
    return step


def require_autograds_gradients(step: PrivateStep, batch: dict[str, Tensor]) -> None:
    """Norms and clipped sums are those that autograd finds in the same graph, loss by loss."""
    total = step.clipper.zeros()
    with step.clipper.over(step.units(batch)):
        losses = step.losses(batch)
        expected = []
        for loss in losses:
            parameters = step.clipper.parameters
            found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
            expected.append(
                {
                    name: torch.zeros(p.shape) if grad is None else grad
                    for (name, p), grad in zip(parameters.items(), found, strict=True)
                }
            )
        norms = step.clipper.norms(losses)
        factors = torch.linspace(0.2, 1.0, len(losses))
        step.clipper.accumulate(factors, total)
    assert not step.clipper.slow_parameters
    torch.testing.assert_close(
        norms, torch.stack([torch.cat([g.flatten() for g in e.values()]).norm() for e in expected])
    )
    for name, found in step.clipper.unflatten(total).items():
        weighted = sum(f * grads[name] for f, grads in zip(factors, expected, strict=True))
        torch.testing.assert_close(found, weighted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layers", ["last_encoder_pooler_classifier", "all", "bias"])
def test_gradients_under_dropout_are_autograds(layers: str) -> None:
    model = tiny_bert(dropout=0.3)
    select_trainable_layers(model, layers)
    inputs, labels = ARCHITECTURES["bert"].batch(model, n=5)
    batch = with_labels(inputs, labels)
    step = narrowed(model.eval(), batch)
    require_autograds_gradients(step, batch)
    model.train()
    for _ in range(3):
        require_autograds_gradients(step, batch)


def test_attention_drops_as_much_out_as_that_of_the_whole_model() -> None:
    torch.manual_seed(0)
    model = tiny_bert(dropout=0.0, attention_probs_dropout_prob=0.5)
    inputs, labels = ARCHITECTURES["bert"].batch(model, n=16)
    batch = with_labels(inputs, labels)
    step, whole = narrowed(model.eval(), batch), PrivateStep(model)
    model.bert.encoder.layer[-1].train()

    def spread(of: PrivateStep) -> Tensor:
        with torch.no_grad():
            return torch.stack([of.losses(batch) for _ in range(300)]).std(0)

    torch.testing.assert_close(spread(step) / spread(whole), torch.ones(16), rtol=0, atol=0.25)


def test_a_row_alone_draws_what_it_drew_in_its_stack() -> None:
    """The tape of random numbers finds its way through the other form of attention."""
    from hf_dcsgd.checks.random_tape import RandomTape

    model = tiny_bert(dropout=0.3)
    inputs, labels = ARCHITECTURES["bert"].batch(model, n=5)
    batch = with_labels(inputs, labels)
    step = narrowed(model.eval(), batch)
    model.train()
    tape = RandomTape(5)
    with tape.record():
        losses = step.losses(batch)
    for row in range(5):
        with tape.play([row]):
            alone = step.losses({name: value[row : row + 1] for name, value in batch.items()})
        torch.testing.assert_close(alone[0], losses[row])


def test_masked_positions_have_no_part() -> None:
    model, inputs, labels = prepared("bert")
    step = narrowed(model, with_labels(inputs, labels))
    hidden = inputs["attention_mask"] == 0
    assert hidden.any()
    others = {**inputs, "input_ids": torch.where(hidden, 7, inputs["input_ids"])}
    found, again = (step.losses(with_labels(x, labels)).detach() for x in (inputs, others))
    torch.testing.assert_close(found, again, rtol=0, atol=0)


def test_units_of_several_rows() -> None:
    model, inputs, labels = prepared("bert")
    batch = with_labels(inputs, labels)
    rows = gradients_one_by_one(model, inputs, labels)
    step = narrowed(model, batch)
    units, total = Units(torch.tensor([0, 1, 0, 1])), step.clipper.zeros()
    with step.clipper.over(units):
        losses = step.losses(batch)
        norms = step.clipper.norms(units.mean(losses) * 2)
        expected = [{name: rows[k][name] + rows[k + 2][name] for name in rows[0]} for k in range(2)]
        factors = clip_factors(norms_of(expected), float(norms_of(expected).min()))
        step.clipper.accumulate(factors, total)
    torch.testing.assert_close(norms.double(), norms_of(expected), rtol=1e-5, atol=1e-7)
    for name, found in step.clipper.unflatten(total).items():
        torch.testing.assert_close(found.double(), clipped_sum_of(expected, factors)[name], rtol=1e-4, atol=1e-6)


class Rotated(hf.models.bert.modeling_bert.BertSelfAttention):
    """Attention that does more with its keys than to compare them with the query."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        handle = self.key.register_forward_hook(lambda module, args, output: output * output.shape[1])
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            handle.remove()


@pytest.mark.parametrize("kind", ["eager", "rotated", "adapted"])
def test_other_attention_takes_the_other_form(kind: str) -> None:
    model = tiny_bert(attn_implementation="eager") if kind == "eager" else tiny_bert()
    attention = model.bert.encoder.layer[-1].attention
    if kind == "rotated":
        attention.self.__class__ = Rotated
    if kind == "adapted":
        attention.self.value = nn.Sequential(attention.self.value)
    inputs, labels = ARCHITECTURES["bert"].batch(model.eval(), n=4)
    select_trainable_layers(model)
    step = PrivateStep(model)
    step.leave_out_unread(with_labels(inputs, labels))
    assert type(step._losses.first_position) is FirstPosition


def test_the_model_is_left_as_it_was() -> None:
    model, inputs, labels = prepared("bert")
    modules = dict(model.named_modules())
    step = narrowed(model, with_labels(inputs, labels))

    def fail(*_: Any) -> None:
        raise RuntimeError("within the last block")

    handle = model.bert.encoder.layer[-1].intermediate.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="within the last block"):
        step.losses(with_labels(inputs, labels))
    handle.remove()
    assert dict(model.named_modules()) == modules
    assert not any("forward" in vars(module) or module._forward_hooks for module in modules.values())


def test_a_rule_is_compared_with_autograd_however_often_others_were() -> None:
    """The calls are those of a batch that was compared before, by name; their rules are not."""
    model, inputs, labels = prepared("bert")
    step = narrowed(model, with_labels(inputs, labels))
    whole, form = PrivateStep(model), step._losses.first_position
    with whole.clipper:
        expected = whole.clipper.norms(whole.losses(with_labels(inputs, labels)))
    whole._losses.first_position = form
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_dcsgd.trunk.one_query._KeyHeads.ghost_rule", staticmethod(lambda *_: {}))
        with whole.clipper:
            norms = whole.clipper.norms(whole.losses(with_labels(inputs, labels)))
    assert any("key.weight" in name for name in whole.clipper.slow_parameters)
    torch.testing.assert_close(norms, expected, rtol=1e-4, atol=1e-6)


def test_a_block_that_is_called_in_another_way_leaves_other_modes_alone() -> None:
    model, *_ = prepared("bert")
    block = model.bert.encoder.layer[-1]
    form = OneQuery.of(block)
    assert form is not None
    with torch.device("meta"), form.only():
        with pytest.raises(KeyError):
            block(states=torch.zeros(1))
        assert torch.zeros(1).device.type == "meta"


def test_keys_and_values_of_other_positions_are_not_computed() -> None:
    model, inputs, labels = prepared("bert")
    step = narrowed(model, with_labels(inputs, labels))
    shapes: dict[str, list[tuple[int, ...]]] = {}
    attention = model.bert.encoder.layer[-1].attention.self
    for name in ("query", "key", "value"):
        note = lambda module, args, output, name=name: shapes.setdefault(name, []).append(tuple(output.shape))  # noqa: E731
        getattr(attention, name).register_forward_hook(note)
    step.losses(with_labels(inputs, labels))
    n, heads, size = len(labels), ENCODER["num_attention_heads"], ENCODER["hidden_size"]
    assert shapes == {"query": [(n, 1, size)], "key": [(n, heads, size)], "value": [(n, heads, size // heads)]}


# -- blocks of rows --------------------------------------------------------------------------------------------------

SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))


def gradients_of(blocks: Blocks) -> Tensor:
    """Write each example's gradient down, block by block."""
    return torch.stack(
        [
            torch.cat([torch.outer(a, b) for a, b in zip(x, y, strict=True)])
            for x, y in zip(blocks.left, blocks.right, strict=True)
        ]
    )


def some_blocks(sizes: tuple[int, int, int, int], seed: int) -> Blocks:
    (n, heads, size, columns), generator = sizes, torch.Generator().manual_seed(seed)
    left, right = (torch.randn(n, heads, k, generator=generator, dtype=torch.float64) for k in (size, columns))
    return Blocks(left, right)


@given(SIZES, st.integers(0, 99))
@settings(deadline=None)
def test_norms_and_sums_of_blocks_are_those_of_the_written_gradients(sizes: tuple[int, ...], seed: int) -> None:
    blocks = some_blocks(sizes, seed)
    written = gradients_of(blocks)
    shape = written.shape[1:]
    torch.testing.assert_close(squared_norms([blocks], shape), written.square().sum((1, 2)))
    factors = torch.rand(len(written), dtype=torch.float64)
    for part in (blocks, blocks.as_outer()):
        total = torch.ones(shape, dtype=torch.float64)
        part.add_weighted_sum(ClipFactors(factors), total)
        torch.testing.assert_close(total, 1 + torch.einsum("n,npd->pd", factors, written))


@given(SIZES, st.integers(0, 99))
@settings(deadline=None)
def test_blocks_are_added_to_other_uses_before_the_norm_is_taken(sizes: tuple[int, ...], seed: int) -> None:
    first, second = some_blocks(sizes, seed), some_blocks(sizes, seed + 100)
    written = gradients_of(first) + gradients_of(second)
    uses: list[list[Contribution]] = [[first, second], [first, Dense(gradients_of(second))]]
    for parts in uses:
        found, remaining = take_norms({"weight": parts}, {"weight": written.shape[1:]})
        torch.testing.assert_close(found, written.square().sum((1, 2)))
        total = torch.zeros(written.shape[1:], dtype=torch.float64)
        for part in remaining["weight"]:
            part.add_weighted_sum(ClipFactors(torch.ones(len(written), dtype=torch.float64)), total)
        torch.testing.assert_close(total, written.sum(0))


def test_an_example_that_is_not_finite_says_so_and_no_other() -> None:
    blocks = some_blocks((3, 2, 4, 5), 0)
    blocks.right[1, 0, 2] = torch.inf
    found = squared_norms([blocks], torch.Size([8, 5]))
    assert found.isfinite().tolist() == [True, False, True]


def test_blocks_of_rows_join_into_units() -> None:
    blocks = some_blocks((5, 2, 3, 4), 1)
    units = Units(torch.tensor([0, 1, 0, 2, 1]))
    written = torch.zeros(3, 6, 4, dtype=torch.float64).index_add_(0, units.of_row, gradients_of(blocks))
    joined = units.joined(blocks, LastResult())
    torch.testing.assert_close(squared_norms([joined], written.shape[1:]), written.square().sum((1, 2)))
