"""Positions of the last block that nothing reads are left out: the same losses, norms, sums and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from oracles import clip_factors, clipped_sum_of, gradients_one_by_one, norms_of
from tiny_tasks import pad, private_args, text_rows, tiny_bert
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dcsgd import DCSGDTrainer
from hf_dcsgd.step import PrivateStep
from hf_dcsgd.tasks.layer_selection import default_layers, select_trainable_layers
from hf_dcsgd.trunk.one_query import OneQuery
from hf_dcsgd.trunk.unread import FirstPosition

pytestmark = pytest.mark.usefixtures("no_report_page")

# The form in which the last block of each is narrowed.
READ_FIRST = {
    "bert": OneQuery,
    "roberta": OneQuery,
    "distilbert": OneQuery,
    "electra": OneQuery,
    "deberta_v2": FirstPosition,
    "mpnet": FirstPosition,
    "lora_bert": FirstPosition,
}
READ_MORE = ("bert_masked_lm", "bert_token", "bert_qa", "gpt2", "llama_classifier", "vit", "lstm")


def prepared(name: str) -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    model = ARCHITECTURES[name].build().eval()
    select_trainable_layers(model, default_layers(model))
    inputs, labels = ARCHITECTURES[name].batch(model, n=4)
    return model, inputs, labels


def with_labels(inputs: dict[str, Tensor], labels: Any) -> dict[str, Tensor]:
    return {**inputs, **(labels if isinstance(labels, dict) else {"labels": labels})}


def positions_behind_attention(model: nn.Module, step: PrivateStep, batch: dict[str, Tensor]) -> int:
    """How many positions the last linear layer of the last block is given."""
    seen: list[int] = []
    last = [module for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".1." in name][-1]
    handle = last.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
    step.losses(batch)
    handle.remove()
    return seen[-1]


@pytest.mark.parametrize("name", READ_FIRST)
def test_norms_and_sums_are_those_of_the_whole_model(name: str) -> None:
    model, inputs, labels = prepared(name)
    batch = with_labels(inputs, labels)
    one_by_one = gradients_one_by_one(model, inputs, labels)
    step = PrivateStep(model)
    assert positions_behind_attention(model, step, batch) > 1
    step.leave_out_unread(batch)
    assert type(step._losses.first_position) is READ_FIRST[name]
    assert positions_behind_attention(model, step, batch) == 1
    total = step.clipper.zeros()
    with step.clipper:
        norms = step.clipper.norms(step.losses(batch))
        expected = norms_of(one_by_one)
        factors = clip_factors(expected, float(expected.median()))
        step.clipper.accumulate(factors, total)
    assert not step.clipper.slow_parameters or READ_FIRST[name] is FirstPosition
    torch.testing.assert_close(norms.double(), expected, rtol=1e-5, atol=1e-7)
    for part, found in step.clipper.unflatten(total).items():
        torch.testing.assert_close(found.double(), clipped_sum_of(one_by_one, factors)[part], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", READ_MORE)
def test_a_head_that_reads_more_gets_more(name: str) -> None:
    model, inputs, labels = prepared(name)
    batch = with_labels(inputs, labels)
    step = PrivateStep(model)
    before = step.losses(batch).detach()
    step.leave_out_unread(batch)
    torch.testing.assert_close(step.losses(batch).detach(), before, rtol=0, atol=0)


def test_a_loss_that_reads_more_gets_more() -> None:
    model, inputs, labels = prepared("bert")
    model.config.output_hidden_states = True

    def reads_all(outputs: Any, labels: Tensor) -> Tensor:
        return outputs.hidden_states[-1].square().mean((1, 2)) + outputs.logits[:, 0]

    step = PrivateStep(model, loss=reads_all)
    batch = with_labels(inputs, labels)
    step.leave_out_unread(batch)
    assert positions_behind_attention(model, step, batch) > 1


def test_nothing_is_left_out_where_the_backward_computes_the_block_again() -> None:
    model, inputs, labels = prepared("bert")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    step = PrivateStep(model)
    batch = with_labels(inputs, labels)
    step.leave_out_unread(batch)
    assert positions_behind_attention(model, step, batch) > 1


def test_no_hook_stays_on_the_model() -> None:
    model, inputs, labels = prepared("bert")
    step = PrivateStep(model)
    step.leave_out_unread(with_labels(inputs, labels))
    step.losses(with_labels(inputs, labels))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def queries_answered(model: nn.Module, step: PrivateStep, batch: dict[str, Tensor]) -> list[int]:
    """How many queries each block's attention is asked for, in one forward."""
    counts: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "scaled_dot_product" in str(func):
                counts.append(args[0].shape[-2])
            return func(*args, **(kwargs or {}))

    with Watch():
        step.losses(batch)
    return counts


@pytest.mark.parametrize(("name", "in_the_last_block"), [("bert", []), ("lora_bert", [1])])
def test_attention_of_the_last_block_answers_its_first_query_alone(name: str, in_the_last_block: list[int]) -> None:
    model, inputs, labels = prepared(name)
    step, batch = PrivateStep(model), with_labels(inputs, labels)
    step.leave_out_unread(batch)
    # `OneQuery` answers it without torch's operation.
    assert queries_answered(model, step, batch) == [inputs["input_ids"].shape[1], *in_the_last_block]


def test_an_error_within_the_block_leaves_attention_as_it_was() -> None:
    model, inputs, labels = prepared("bert")
    step, batch = PrivateStep(model), with_labels(inputs, labels)
    step.leave_out_unread(batch)

    def fail(*_: Any) -> None:
        raise RuntimeError("within the last block")

    handle = model.bert.encoder.layer[-1].intermediate.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="within the last block"):
        step.losses(batch)
    handle.remove()
    query = torch.arange(6.0).reshape(1, 1, 3, 2)
    attended = nn.functional.scaled_dot_product_attention(query, query, query)
    assert not torch.equal(attended[..., 0, :], attended[..., 2, :])


@pytest.mark.parametrize("trunk_cache", ["off", "on"])
def test_a_run_ends_in_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trunk_cache: str) -> None:
    def trained(folder: str) -> dict[str, Tensor]:
        model = tiny_bert()
        options = {"max_steps": 4, "unsafe_noise_seed": 7, "trunk_cache": trunk_cache}
        args = private_args(tmp_path / folder, **options, trunk_cache_dir=str(tmp_path / "cache"))
        trainer = DCSGDTrainer(model, args, train_dataset=text_rows(), data_collator=pad)
        trainer.train()
        assert trainer.step is not None
        batch = pad(text_rows(4))
        widths.append(positions_behind_attention(model, trainer.step, batch))
        return model.state_dict()

    widths: list[int] = []
    narrowed = trained("narrowed")
    monkeypatch.setattr("hf_dcsgd.trunk.unread.ways_to_narrow", lambda model: [])
    whole = trained("whole")
    assert widths[0] == 1 < widths[1]
    for name, value in whole.items():
        torch.testing.assert_close(narrowed[name], value, rtol=1e-4, atol=1e-6)
