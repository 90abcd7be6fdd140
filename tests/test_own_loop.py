"""A training loop of one's own: charged, released and reported as a run of the trainer is."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from tiny_tasks import feature_classifier, feature_rows
from transformers import default_data_collator

from hf_dcsgd import BatchCouplingError, PrivacyPlan, PrivateRun
from hf_dcsgd.privacy.ledger import PrivacyLedger

pytestmark = pytest.mark.usefixtures("quick_statements")

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_loop" / "train.py"


def plan_for(model: torch.nn.Module, rows: int = 64, steps: int = 5) -> PrivacyPlan:
    size = sum(p.numel() for p in model.parameters())
    return PrivacyPlan.create(
        dataset_size=rows, expected_batch_size=16, steps=steps, num_parameters=size, noise_multiplier=1.0
    )


def test_the_example_learns_and_leaves_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    runpy.run_path(str(EXAMPLE))["main"](str(tmp_path))
    accuracy = float(capsys.readouterr().out.split("new points: ")[1].split("%")[0])
    assert accuracy > 85
    report = json.loads((tmp_path / "privacy_report.json").read_text())
    assert report["guarantee"]["holds"]
    assert report["guarantee"]["epsilon"] <= 4
    assert report["steps"] == {"planned": 60, "charged": 60, "released": 60, "lost": 0, "torn_ledger_lines": 0}
    assert len(EXAMPLE.read_text().split("    with PrivateRun")[1].splitlines()) < 25


def test_a_loop_that_breaks_off_is_charged_for_what_it_released(tmp_path: Path) -> None:
    model = feature_classifier()

    def broken_off() -> None:
        with PrivateRun(model, feature_rows(), default_data_collator, plan_for(model), tmp_path) as run:
            for number, stacks in enumerate(run.batches()):
                run.step(stacks)
                if number == 2:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert PrivacyLedger.read(tmp_path).charged == 3
    assert json.loads((tmp_path / "privacy_report.json").read_text())["steps"]["released"] == 3


def test_what_the_optimizer_sees_carries_noise_and_nothing_is_there_before(tmp_path: Path) -> None:
    model = feature_classifier()
    with PrivateRun(model, feature_rows(), default_data_collator, plan_for(model, steps=2), tmp_path) as run:
        for stacks in run.batches():
            assert all(p.grad is None for p in model.parameters())
            release = run.step(stacks)
            grads = torch.cat([p.grad.flatten() for p in model.parameters()])
            assert torch.equal(grads, release.noisy_gradient)
            assert grads.abs().min() > 0
            model.zero_grad()


def test_a_model_that_couples_rows_is_refused_before_the_ledger_is_opened(tmp_path: Path) -> None:
    class Centered(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = feature_classifier()

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.inner(features - features.mean(0))

    model = Centered()
    with (
        pytest.raises(BatchCouplingError),
        PrivateRun(model, feature_rows(), default_data_collator, plan_for(model), tmp_path),
    ):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("rows", "message"), [(63, "a plan for 63 rows, got one for 64")])
def test_a_plan_for_other_data_is_refused(tmp_path: Path, rows: int, message: str) -> None:
    model = feature_classifier()
    with pytest.raises(ValueError, match=message):
        PrivateRun(model, feature_rows()[:rows], default_data_collator, plan_for(model), tmp_path)
