"""The models of the results page that are written by hand: the LSTM is torch's, and its norms are autograd's."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from oracles import gradients_one_by_one, norms_of
from torch import nn

from hf_dcsgd.ghost import GhostClipper

TASKS = Path(__file__).parents[1] / "examples" / "paper" / "tasks.py"


@pytest.fixture(scope="module")
def tasks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("paper_tasks", TASKS)
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
