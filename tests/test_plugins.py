"""A strategy, an accountant and a ghost rule of another package, from the arguments to the card and the audit."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_tasks import CLASSES, FEATURES, feature_trainer, private_args
from torch import Tensor, nn
from transformers import HfArgumentParser, TrainerCallback
from worker_pool import WorkerPool

import hf_dcsgd
from hf_dcsgd.audit import audit_strategy, audit_trainer
from hf_dcsgd.clipping import STRATEGIES
from hf_dcsgd.privacy.accountants import ACCOUNTANTS
from hf_dcsgd.reporting.plan_table import describe_plan

OURS = {"clipping": "linear_decay", "clipping_options": {"final_share": 0.25}, "accountant": "few_orders"}
STEPS = 4


@pytest.fixture(scope="module")
def outside() -> Iterator[ModuleType]:
    """The package, imported for these tests alone: others go through every strategy that there is."""
    with pytest.MonkeyPatch.context() as patch:
        for registry in (STRATEGIES, ACCOUNTANTS):
            patch.setattr(registry, "_values", dict(registry._values))
        yield importlib.import_module("outside_package")


class Network(nn.Module):
    def __init__(self, scale: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.classifier = scale, nn.Linear(FEATURES, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.classifier(torch.tanh(self.scale(features)))


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self.step


def trainer_of(outside: ModuleType, folder: Path, **changes: Any) -> hf_dcsgd.DCSGDTrainer:
    options = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, **OURS, **changes}
    return feature_trainer(folder, model=Network(outside.Scale(FEATURES)), **options)


def test_from_arguments_to_card_and_audit(outside: ModuleType, tmp_path: Path, no_report_page: None) -> None:
    first = trainer_of(outside, tmp_path)
    first.add_callback(StopAt(2))
    first.train()
    trainer = trainer_of(outside, tmp_path)
    trainer.train(resume_from_checkpoint=True)

    assert trainer.plan is not None
    assert trainer.plan.settings == {"clip_threshold": 1.0, "final_share": 0.25}
    assert "linear_decay, clip_threshold 1, final_share 0.25" in describe_plan(trainer.plan)
    assert trainer.step is not None
    assert trainer.step.clipper.rules()["scale"] == "scale_rule"
    report = trainer.privacy_report()
    assert report["clipping"] == {"strategy": "linear_decay", "settings": dict(trainer.plan.settings)}
    assert report["trajectory"]["clip_threshold"] == pytest.approx([1.0, 0.8125, 0.625, 0.4375])
    assert report["steps"]["charged"] == STEPS
    event = hf_dcsgd.PrivacyPlan.from_dict(trainer.plan.to_dict())
    assert report["guarantee"]["epsilon"] == event.epsilon() == trainer.epsilon()
    assert report["guarantee"]["accountant"] == "few_orders"
    assert report["guarantee"]["epsilon"] > report["budget"]["other_epsilon"]
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "with DP-SGD and a linearly decaying threshold and differential privacy" in card
    assert "clipping_options={'final_share': 0.25}" in card
    audited = trainer_of(outside, tmp_path / "audited", max_steps=100_000)
    assert all(found.passed for found in audit_trainer(audited, draws=20_000))


@pytest.mark.parametrize("level", [0, 1])
def test_the_audit_takes_it_by_name(outside: ModuleType, level: int) -> None:
    (found,) = audit_strategy("linear_decay", levels=(level,))
    assert found.passed, str(found)


def test_other_settings_do_not_continue_a_run(outside: ModuleType, tmp_path: Path, no_report_page: None) -> None:
    first = trainer_of(outside, tmp_path)
    first.add_callback(StopAt(2))
    first.train()
    other = trainer_of(outside, tmp_path, clipping_options={"final_share": 0.5})
    with pytest.raises(ValueError, match=r"final_share: 0\.25 in the checkpoint, 0\.5 now"):
        other.train(resume_from_checkpoint=True)


def test_from_the_command_line(outside: ModuleType, tmp_path: Path) -> None:
    words = [
        "--output_dir",
        str(tmp_path),
        "--clipping",
        "linear_decay",
        "--clipping_options",
        '{"final_share": 0.125}',
    ]
    (args,) = HfArgumentParser(hf_dcsgd.DCSGDTrainingArguments).parse_args_into_dataclasses(words)
    assert args.clipping_options == {"final_share": 0.125}
    assert args.privacy_plan(dataset_size=200, num_parameters=3).settings["final_share"] == 0.125


def test_its_options_are_checked_by_itself(outside: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0 < final_share <= 1, got 1\.5"):
        private_args(tmp_path, clipping="linear_decay", clipping_options={"final_share": 1.5})
    with pytest.raises(TypeError, match="final_share to be a number, got 'half'"):
        private_args(tmp_path, clipping="linear_decay", clipping_options={"final_share": "half"})
    with pytest.raises(ValueError, match=r"clipping_options of clipping=linear_decay, got final=0\.5"):
        private_args(tmp_path, clipping="linear_decay", clipping_options={"final": 0.5})


def test_a_threshold_smuggled_into_a_run_is_refused(outside: ModuleType, tmp_path: Path) -> None:
    """Else the report would say `fixed`, with thresholds that fall."""

    class Smuggler(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            smuggled = outside.LinearDecay(1.0, final_share=0.25, steps=STEPS)
            with pytest.raises(AttributeError):
                trainer.mechanism.threshold = smuggled  # type: ignore[union-attr,misc]
            trainer.mechanism._threshold = smuggled  # type: ignore[union-attr]

    trainer = feature_trainer(tmp_path, clipping="fixed", max_steps=STEPS)
    trainer.add_callback(Smuggler())
    with pytest.raises(ValueError, match=r"expected a 'fixed' threshold .* got LinearDecay"):
        trainer.train()
    assert trainer.mechanism is not None
    assert trainer.mechanism.charged == 0


def test_the_commands_find_it_by_its_entry_point(workers: WorkerPool, tmp_path: Path) -> None:
    """Nothing imports the package there but its entry point."""
    info = tmp_path / "outside_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hf_dcsgd.plugins]\noutside = outside_package\n")
    command = tmp_path / "command.py"  # its folder is searched for packages
    command.write_text(
        "import sys; assert 'outside_package' not in sys.modules\n"
        "from hf_dcsgd.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    chosen = "--clipping linear_decay --accountant few_orders"
    words = f"calibrate {chosen} --epsilon 3 --dataset-size 2000 --batch-size 200 --steps 20 --delta 1e-5 --json"
    figures = json.loads(workers.run(1, [command, *words.split()]).output)
    assert figures["accountant"] == "few_orders"
    assert figures["grad_noise_multiplier"] == figures["noise_multiplier"], "the strategy releases nothing beside"
    assert figures["noise_multiplier"] == pytest.approx(figures["other"]["noise_multiplier"], rel=0.01)
