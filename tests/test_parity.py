"""Synthetic rows, and the comparison of the clipper with autograd."""

import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES, Architecture
from tiny_tasks import feature_classifier, tiny_bert
from torch import Tensor, nn

from hf_dcsgd.checks.parity import ParityError, check_parity
from hf_dcsgd.data.synthetic import synthetic_like
from hf_dcsgd.ghost import GhostClipper
from hf_dcsgd.tasks.losses import per_example_losses, split_labels

QUICK = [
    ARCHITECTURES[name] for name in ("bert", "bert_qa", "gpt2_lm_tied", "t5", "vit", "lstm", "lora_llama", "albert")
]


def losses_of(model: nn.Module, batch: dict) -> Tensor:
    inputs, labels = split_labels(model, batch)
    return per_example_losses(model, model(**inputs), labels)


@pytest.mark.parametrize("arch", QUICK, ids=lambda arch: arch.name)
def test_synthetic_rows_pass_on_sound_models(arch: Architecture) -> None:
    model = arch.build().eval()
    inputs, labels = arch.batch(model, n=1)
    row = {**inputs, **(labels if isinstance(labels, dict) else {"labels": labels})}
    made = synthetic_like(model, row, 2)
    assert {name: value.shape for name, value in made.items()} == {
        name: (2, *value.shape[1:]) for name, value in row.items()
    }
    assert {name: value.dtype for name, value in made.items()} == {name: value.dtype for name, value in row.items()}
    check_parity(GhostClipper(model), lambda: losses_of(model, made), 1e-3)


def test_no_content_of_the_real_row_is_kept() -> None:
    model = tiny_bert()
    row = {
        "input_ids": torch.full((1, 9), 17),
        "attention_mask": torch.tensor([[1] * 4 + [0] * 5]),
        "labels": torch.tensor([2]),
        "numbers": torch.full((1, 3), 0.123),
    }
    made = synthetic_like(model, row, 2)
    assert (made["input_ids"] == 17).float().mean() < 0.5
    assert made["attention_mask"].all()
    assert made["labels"].tolist() == [0, 0]
    assert not (made["numbers"] == 0.123).any()
    again = synthetic_like(model, row, 2)
    assert all(torch.equal(made[name], again[name]) for name in made)


def test_special_tokens_stay_and_come_nowhere_else() -> None:
    model = hf.BertForSequenceClassification(hf.BertConfig(vocab_size=12, hidden_size=8, num_attention_heads=2))
    model.config.eos_token_id, model.config.pad_token_id = 3, 0
    tokens = torch.tensor([[2, 9, 9, 9, 9, 3, 0, 0]])
    made = synthetic_like(model, {"input_ids": tokens}, 3, keep_tokens=(2,))["input_ids"]
    tokens = tokens.expand(3, -1)
    special = torch.tensor([0, 2, 3])
    assert torch.equal(torch.isin(made, special), torch.isin(tokens, special))
    assert torch.equal(made[torch.isin(made, special)], tokens[torch.isin(tokens, special)])


def test_tokens_of_an_unknown_vocabulary_are_those_of_the_row() -> None:
    made = synthetic_like(feature_classifier(), {"input_ids": torch.arange(10, 22)[None]}, 2)["input_ids"]
    assert [sorted(tokens) for tokens in made.tolist()] == [list(range(10, 22))] * 2
    assert not torch.equal(made[0], made[1])


def test_entries_without_tensors_are_repeated_or_kept() -> None:
    made = synthetic_like(feature_classifier(), {"names": ["a"], "scale": 2.0}, 3)
    assert made == {"names": ["a"] * 3, "scale": 2.0}


class WrongGradient(torch.autograd.Function):
    """The identity, whose backward depends on the batch size: no hook can see that, autograd alone can."""

    @staticmethod
    def forward(context, value):  # type: ignore[no-untyped-def]
        return value.clone()

    @staticmethod
    def backward(context, grad):  # type: ignore[no-untyped-def]
        return grad * (1 + grad.flatten(1).any(1).sum())


def test_gradients_that_depend_on_the_batch_are_found() -> None:
    model = feature_classifier()
    features = torch.rand(2, 6)

    def losses() -> Tensor:
        return WrongGradient.apply(model(features)).square().sum(1)

    with pytest.raises(ParityError, match="norms: off by"):
        check_parity(GhostClipper(model), losses, 1e-3)


def test_gradients_are_left_as_they_were_found() -> None:
    model = feature_classifier()
    first = next(model.parameters())
    first.grad = torch.full_like(first, 7.0)
    check_parity(GhostClipper(model), lambda: model(torch.rand(2, 6)).square().sum(1), 1e-3)
    assert (first.grad == 7.0).all()
    assert model.classifier.weight.grad is None
