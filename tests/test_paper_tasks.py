"""What runs of the results page are made of: the LSTM is torch's, its norms autograd's, the ceiling a `Trainer`'s."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from oracles import gradients_one_by_one, norms_of
from tiny_tasks import pad, quiet, text_rows, tiny_bert
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_dcsgd.ghost import GhostClipper
from hf_dcsgd.tasks.layer_selection import select_trainable_layers

EXAMPLES = Path(__file__).parents[1] / "examples" / "paper"


@pytest.fixture(scope="module")
def tasks() -> ModuleType:
    return loaded("tasks")


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"paper_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_written_out_lstm_is_that_of_torch(tasks: ModuleType) -> None:
    ours, torchs = tasks.WrittenOutLSTM(6, 5), nn.LSTM(6, 5, batch_first=True)
    from_input, from_state = ours.from_input, ours.from_state
    torchs.load_state_dict(
        {"weight_ih_l0": from_input.weight, "bias_ih_l0": from_input.bias,
         "weight_hh_l0": from_state.weight, "bias_hh_l0": from_state.bias}
    )  # fmt: skip
    sequence = torch.randn(3, 7, 6)
    torch.testing.assert_close(ours(sequence), torchs(sequence)[0])


def test_norms_of_the_surname_lstm_are_those_of_autograd(tasks: ModuleType) -> None:
    model = tasks.SurnameLSTM(letters=9, languages=4, width=5)
    characters, labels = torch.randint(1, 9, (6, 8)), torch.randint(0, 4, (6,))
    characters[1, 5:] = 0
    clipper = GhostClipper(model)
    with clipper.over(None):
        losses = nn.functional.cross_entropy(model(characters)["logits"], labels, reduction="none")
        norms = clipper.norms(losses)

    def losses_of(model: nn.Module, outputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")

    truth = norms_of(gradients_one_by_one(model, {"characters": characters}, labels, losses_of))
    torch.testing.assert_close(norms.double(), truth, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("no_report_page")
def test_the_ceiling_is_trained_as_by_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On cached hidden states, with one position of the last block, a run ends in the same weights and answers."""
    monkeypatch.setattr("hf_dcsgd.trunk.build.HF_HOME", str(tmp_path))
    ceiling = loaded("ceiling")
    rows = text_rows(24)

    def trained(trainer_class: type[Trainer]) -> tuple[dict[str, torch.Tensor], float]:
        model = tiny_bert()
        select_trainable_layers(model)
        arguments = quiet(max_steps=5, per_device_train_batch_size=8, learning_rate=0.1, remove_unused_columns=False)
        args = TrainingArguments(str(tmp_path), **arguments, seed=3, optim="sgd")  # Adam blows rounding up
        trainer = trainer_class(model, args, train_dataset=rows, eval_dataset=rows, data_collator=pad)
        trainer.train()
        return model.state_dict(), trainer.evaluate()["eval_loss"]

    (found, loss), (expected, expected_loss) = trained(ceiling.CeilingTrainer), trained(Trainer)
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)
