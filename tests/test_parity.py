"""The made-up batch, and the comparison of the clipper with autograd."""

import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES, Architecture
from tiny_tasks import feature_classifier, tiny_bert
from torch import Tensor, nn

from hf_dcsgd.checks.parity import ParityError, check_parity, synthetic_like
from hf_dcsgd.ghost import GhostClipper
from hf_dcsgd.tasks.losses import per_example_losses, split_labels

QUICK = [
    ARCHITECTURES[name] for name in ("bert", "bert_qa", "gpt2_lm_tied", "t5", "vit", "lstm", "lora_llama", "albert")
]


def losses_of(model: nn.Module, batch: dict) -> Tensor:
    inputs, labels = split_labels(model, batch)
    return per_example_losses(model, model(**inputs), labels)


@pytest.mark.parametrize("arch", QUICK, ids=lambda arch: arch.name)
def test_made_up_batches_pass_on_sound_models(arch: Architecture) -> None:
    model = arch.build().eval()
    inputs, labels = arch.batch(model, n=2)
    batch = {**inputs, **(labels if isinstance(labels, dict) else {"labels": labels})}
    made = synthetic_like(model, batch)
    assert {name: value.shape for name, value in made.items()} == {name: value.shape for name, value in batch.items()}
    assert {name: value.dtype for name, value in made.items()} == {name: value.dtype for name, value in batch.items()}
    check_parity(GhostClipper(model), lambda: losses_of(model, made), 1e-3)


def test_no_content_of_the_real_batch_is_kept() -> None:
    model = tiny_bert()
    batch = {
        "input_ids": torch.full((2, 9), 17),
        "attention_mask": torch.tensor([[1] * 9, [1] * 4 + [0] * 5]),
        "labels": torch.tensor([2, 1]),
        "numbers": torch.full((2, 3), 0.123),
    }
    made = synthetic_like(model, batch)
    assert (made["input_ids"] == 17).float().mean() < 0.5
    assert made["attention_mask"].all()
    assert made["labels"].tolist() == [0, 0]
    assert not (made["numbers"] == 0.123).any()
    again = synthetic_like(model, batch)
    assert all(torch.equal(made[name], again[name]) for name in made)


def test_special_tokens_stay_and_come_nowhere_else() -> None:
    model = hf.BertForSequenceClassification(hf.BertConfig(vocab_size=12, hidden_size=8, num_attention_heads=2))
    model.config.eos_token_id, model.config.pad_token_id = 3, 0
    tokens = torch.tensor([[9, 9, 9, 9, 3, 0], [2, 9, 9, 9, 9, 3]])
    made = synthetic_like(model, {"input_ids": tokens}, keep_tokens=(2,))["input_ids"]
    special = torch.tensor([0, 2, 3])
    assert torch.equal(torch.isin(made, special), torch.isin(tokens, special))
    assert torch.equal(made[torch.isin(made, special)], tokens[torch.isin(tokens, special)])


def test_tokens_of_an_unknown_vocabulary_are_those_of_the_batch() -> None:
    tokens = torch.arange(10, 22).view(2, 6)
    made = synthetic_like(feature_classifier(), {"input_ids": tokens})["input_ids"]
    assert sorted(made.flatten().tolist()) == list(range(10, 22))
    assert not torch.equal(made, tokens)


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
