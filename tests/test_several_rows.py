"""Examples of several rows in a run: the choices of a question, both texts of a pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from architectures import ENCODER, GPT2, randomized
from ghost_checks import assert_sum
from oracles import clipped_sum_of, gradients_of, norms_of
from tiny_tasks import private_args
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dcsgd import DCSGDTrainer
from hf_dcsgd.data.rows import stack, take_row
from hf_dcsgd.data.units import UNIT_ENTRY
from hf_dcsgd.ghost import BatchCouplingError

pytestmark = pytest.mark.usefixtures("no_report_page", "quick_statements")

BETA = 0.5


def stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# --- choices ---------------------------------------------------------------------------------------------------------


def questions(n: int = 64, choices: int = 4, length: int = 7) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 25, (n, choices, length), generator=generator)
    labels = torch.randint(choices, (n,), generator=generator)
    return [{"labels": y, "input_ids": x} for x, y in zip(tokens, labels, strict=True)]


def choices_trainer(output_dir: Path, dropout: float = 0.0, **changes: Any) -> DCSGDTrainer:
    config = hf.BertConfig(**{**ENCODER, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout})
    return DCSGDTrainer(
        randomized(lambda: hf.BertForMultipleChoice(config)),
        private_args(output_dir, **{"trainable_layers": "all", "max_steps": 3, **changes}),
        train_dataset=questions(),
        data_collator=stacked,
    )


def test_multiple_choice_trains_by_rules_alone(tmp_path: Path) -> None:
    trainer = choices_trainer(tmp_path, dropout=0.3)
    trainer.train()
    assert trainer.step is not None
    assert not trainer.step.clipper.slow_parameters


def test_a_question_is_clipped_as_a_whole(tmp_path: Path) -> None:
    step = choices_trainer(tmp_path).make_step()
    step.model.eval()
    (batch,) = stack([{name: value[None] for name, value in row.items()} for row in questions(5)])
    gradients = [gradients_of(step.losses(take_row(batch, i))[0], step.model) for i in range(5)]
    clipped_sum = step.clipper.zeros()
    with step.clipper.over(step.units(batch)):
        norms = step.clipper.norms(step.losses(batch))
        step.clipper.accumulate(torch.full((5,), 0.5), clipped_sum)
    torch.testing.assert_close(norms.double(), norms_of(gradients), rtol=1e-4, atol=1e-6)
    assert_sum(step.clipper, clipped_sum, clipped_sum_of(gradients, torch.full((5,), 0.5)))


# --- pairs -----------------------------------------------------------------------------------------------------------


def tiny_gpt2(seed: int = 0) -> nn.Module:
    config = hf.GPT2Config(**{**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
    return randomized(lambda: hf.GPT2LMHeadModel(config), seed)


def log_likelihoods(logits: Tensor, labels: Tensor) -> Tensor:
    """Of whole sequences, (…, T, vocabulary) and (…, T) → (…); prompts and padding are labeled -100."""
    targets = labels[..., 1:]
    chosen = logits[..., :-1, :].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return chosen.masked_fill(targets == -100, 0.0).sum(-1)


def dpo_loss(outputs: Any, labels: dict[str, Tensor]) -> Tensor:
    """Direct preference optimization: outputs (n, 2, T, vocabulary), chosen first."""
    gains = log_likelihoods(outputs.logits, labels["labels"]) - labels["reference_log_likelihoods"]
    return -F.logsigmoid(BETA * (gains[:, 0] - gains[:, 1]))


def pairs(n: int = 64, length: int = 8, seed: int = 0) -> list[dict[str, Tensor]]:
    """Prompts of three tokens and two answers, with what a frozen reference says of these."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, 25, (n, 2, length), generator=generator)
    tokens[:, 1, :3] = tokens[:, 0, :3]
    labels = tokens.clone()
    labels[:, :, :3] = -100
    reference = tiny_gpt2(seed=1).eval()
    with torch.no_grad():
        values = log_likelihoods(reference(tokens.flatten(0, 1)).logits.unflatten(0, (n, 2)), labels)
    return [
        {"input_ids": x, "labels": y, "reference_log_likelihoods": z}
        for x, y, z in zip(tokens, labels, values, strict=True)
    ]


def pairs_trainer(output_dir: Path, **changes: Any) -> DCSGDTrainer:
    loss = changes.pop("loss", dpo_loss)
    options = {"trainable_layers": "all", "max_steps": 3, "label_names": ["labels", "reference_log_likelihoods"]}
    return DCSGDTrainer(
        tiny_gpt2(),
        private_args(output_dir, **{**options, **changes}),
        train_dataset=pairs(),
        eval_dataset=pairs(8, seed=1),
        data_collator=stacked,
        per_example_loss_func=loss,
        rows_per_example=2,
    )


def test_pairs_train_by_rules_alone_and_are_evaluated_by_the_same_loss(tmp_path: Path) -> None:
    trainer = pairs_trainer(tmp_path)
    trainer.train()
    assert trainer.step is not None
    assert not trainer.step.clipper.slow_parameters
    trainer.model.eval()
    batch = stacked(pairs(8, seed=1))
    with torch.no_grad():
        logits = trainer.model(batch["input_ids"].flatten(0, 1)).logits.unflatten(0, (8, 2))
        expected = dpo_loss(hf.utils.ModelOutput(logits=logits), batch).mean()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-5)


def test_a_pair_is_clipped_as_a_whole(tmp_path: Path) -> None:
    step = pairs_trainer(tmp_path).make_step()
    step.model.eval()
    batch = stacked(pairs(5))
    gradients = []
    for i in range(5):
        one = {name: value[i : i + 1] for name, value in batch.items()}
        logits = step.model(one["input_ids"][0]).logits[None]
        gradients.append(gradients_of(dpo_loss(hf.utils.ModelOutput(logits=logits), one)[0], step.model))
    clipped_sum = step.clipper.zeros()
    with step.clipper.over(step.units(batch)):
        norms = step.clipper.norms(step.losses(batch))
        step.clipper.accumulate(torch.ones(5), clipped_sum)
    torch.testing.assert_close(norms.double(), norms_of(gradients), rtol=1e-4, atol=1e-6)
    assert_sum(step.clipper, clipped_sum, clipped_sum_of(gradients, torch.ones(5)))


def test_a_loss_over_other_pairs_is_refused(tmp_path: Path) -> None:
    def against_the_mean(outputs: Any, labels: dict[str, Tensor]) -> Tensor:
        losses = dpo_loss(outputs, labels)
        return losses - 0.5 * losses.mean()

    with pytest.raises(BatchCouplingError):
        pairs_trainer(tmp_path, loss=against_the_mean).train()


def test_pairs_need_a_loss_and_inputs_of_their_shape(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows_per_example=2 needs a per_example_loss_func"):
        DCSGDTrainer(tiny_gpt2(), private_args(tmp_path), train_dataset=pairs(), rows_per_example=2)
    step = pairs_trainer(tmp_path).make_step()
    with pytest.raises(ValueError, match=r"input_ids of shape \(n, 2, …\) with rows_per_example=2, got \(3, 8\)"):
        step.losses({**stacked(pairs(3)), "input_ids": torch.ones(3, 8, dtype=torch.long)})


# --- units and choices at once ---------------------------------------------------------------------------------------


def test_units_of_several_questions(tmp_path: Path) -> None:
    """The questions of a person, each with its choices, are one example."""
    step = choices_trainer(tmp_path).make_step()
    step.model.eval()
    (batch,) = stack([{name: value[None] for name, value in row.items()} for row in questions(5)])
    of_row = torch.tensor([0, 1, 0, 2, 1])
    losses = [step.losses({name: value[of_row == unit] for name, value in batch.items()}) for unit in range(3)]
    gradients = [gradients_of(loss.mean(), step.model) for loss in losses]
    batch[UNIT_ENTRY] = of_row
    with step.clipper.over(step.units(batch)):
        norms = step.clipper.norms(step.losses(batch))
    torch.testing.assert_close(norms.double(), norms_of(gradients), rtol=1e-4, atol=1e-6)
