"""Interrupted and resumed runs: what is restored, what stays charged, what is refused."""

import json
import shutil
import signal
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from tiny_tasks import (
    accuracy,
    feature_classifier,
    feature_rows,
    feature_trainer,
    flat_parameters,
    pad,
    quiet,
    text_rows,
    text_trainer,
    tiny_bert,
    watch_steps,
)
from worker_pool import WorkerPool

from hf_dcsgd.privacy.ledger import LedgerError, PrivacyLedger
from hf_dcsgd.privacy.mechanism import BudgetExhausted

pytestmark = pytest.mark.usefixtures("no_report_page", "quick_statements")

# Eight steps in two epochs, a checkpoint after the third and the sixth. The threshold starts far off, and the
# histogram is clear enough to see it: it is sure to have moved by then.
SETTINGS: dict[str, Any] = {
    "num_train_epochs": 2,
    "save_strategy": "steps",
    "save_steps": 3,
    "clip_threshold": 5.0,
    "histogram_bins": 5,
    "histogram_noise_multiplier": 1.5,
}
KILLED_WITHIN = 5  # the step whose gradient was released, but whose optimizer step never came

WORKER = """
    import os, signal, sys
    import hf_dcsgd.reporting.report
    from tiny_tasks import feature_trainer
    from transformers import TrainerCallback

    class Kill(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == {within} - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    feature_trainer(sys.argv[1], trainer_options={{"callbacks": [Kill()]}}, **{settings}).train()
"""


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory, workers: WorkerPool) -> Path:
    """The output directory of a process that was killed in the middle of its fifth step."""
    directory = tmp_path_factory.mktemp("killed")
    script = directory / "worker.py"
    script.write_text(textwrap.dedent(WORKER).format(within=KILLED_WITHIN, settings=SETTINGS))
    ended = workers.run(1, [script, directory / "run"], check=False)
    assert ended.exit_codes == [-signal.SIGKILL], ended.output[-2000:]
    return directory / "run"


@pytest.fixture
def run_dir(killed_run: Path, tmp_path: Path) -> Path:
    """A copy of it for one test to go on with."""
    shutil.copytree(killed_run, tmp_path / "run")
    return tmp_path / "run"


def saved_mechanism(checkpoint: Path) -> dict[str, Any]:
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    return state["stateful_callbacks"]["PrivacyCallback"]["attributes"]["saved"]["mechanism"]


def trace(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "privacy_trace.jsonl").read_text().splitlines()]


# --- a killed process ------------------------------------------------------------------------------------------------


def test_the_killed_run_had_charged_the_step_it_died_in(killed_run: Path) -> None:
    assert sorted(path.name for path in killed_run.glob("checkpoint-*")) == ["checkpoint-3"]
    assert PrivacyLedger.read(killed_run).charged == KILLED_WITHIN
    assert saved_mechanism(killed_run / "checkpoint-3")["charged"] == 3


@pytest.mark.parametrize("restore_callbacks", [False, True])
@pytest.mark.parametrize("changes", [{}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}])
def test_lost_steps_stay_charged_and_the_run_ends_within_the_budget(
    run_dir: Path, restore_callbacks: bool, changes: dict, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = feature_trainer(
        run_dir, **SETTINGS, restore_callback_states_from_checkpoint=restore_callbacks, **changes
    )
    output = trainer.train(resume_from_checkpoint=True)
    # Steps 4 and 5 were lost and done again: three of eight charges were left after the first five.
    assert output.global_step == 3 + 3
    assert trainer.state.max_steps == 8
    ledger = PrivacyLedger.read(run_dir)
    assert len(ledger.runs) == 1
    assert ledger.charged == trainer.plan.steps == 8
    assert trainer.epsilon() == trainer.plan.epsilon()
    assert "the privacy budget is spent after 8 charged steps, at step 6 of 8" in caplog.text
    assert len([cb for cb in trainer.callback_handler.callbacks if type(cb).__name__ == "PrivacyCallback"]) == 1


def test_threshold_and_range_are_restored(run_dir: Path) -> None:
    saved = saved_mechanism(run_dir / "checkpoint-3")["threshold"]
    assert saved["clip_threshold"] < 5.0
    trainer = feature_trainer(run_dir, **SETTINGS)
    trainer.train(resume_from_checkpoint=str(run_dir / "checkpoint-3"))
    first = next(line for line in trainer.state.log_history if line["step"] == 4)
    assert first["clip_threshold"] == saved["clip_threshold"]
    assert first["histogram_range"] == saved["histogram_range"]
    # ε goes on from what was charged, not from what the checkpoint knew.
    assert first["epsilon"] == trainer.plan.epsilon(6)


def test_weights_and_optimizer_go_on_from_the_checkpoint(run_dir: Path) -> None:
    saved = load_file(run_dir / "checkpoint-3" / "model.safetensors")
    trainer = feature_trainer(run_dir, model=feature_classifier(seed=9), **SETTINGS, learning_rate=0.0)
    trainer.train(resume_from_checkpoint=True)
    optimizer = torch.load(run_dir / "checkpoint-6" / "optimizer.pt", weights_only=False)
    assert optimizer["state"][0]["step"] == 6
    for name, parameter in trainer.model.named_parameters():
        # The learning rate of the checkpoint's optimizer is restored as well, so that parameters move a little.
        assert (parameter - saved[name]).abs().max() < 0.02


def test_noise_and_batches_are_fresh_after_a_resume(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[list[int]]] = []
    watch_steps(monkeypatch, accumulate=lambda step, stack: seen[-1].append(stack["features"][:, 0].tolist()))
    runs = []
    for name in "ab":
        seen.append([])
        shutil.copytree(run_dir, tmp_path / name)
        monkeypatch.setenv("HF_DCSGD_HOME", str(tmp_path / f"machine {name}"))
        trainer = feature_trainer(tmp_path / name, **SETTINGS)
        trainer.train(resume_from_checkpoint=True)
        runs.append((trace(tmp_path / name), flat_parameters(trainer.model)))
    assert seen[0] != seen[1]
    assert not torch.equal(runs[0][1], runs[1][1])
    for line_a, line_b in zip(runs[0][0][4:], runs[1][0][4:], strict=True):
        assert line_a["step"] == line_b["step"]
        assert not set(line_a["noisy_histogram"]) & set(line_b["noisy_histogram"])
    # Nor is the killed process' own noise of step 4 drawn once more.
    steps = [line["step"] for line in runs[0][0]]
    assert steps == [1, 2, 3, 4, 4, 5, 6]
    assert not set(runs[0][0][3]["noisy_histogram"]) & set(runs[0][0][4]["noisy_histogram"])


def test_a_second_crash_is_charged_as_well(run_dir: Path) -> None:
    class Crash(hf.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            raise KeyboardInterrupt

    trainer = feature_trainer(run_dir, trainer_options={"callbacks": [Crash()]}, **SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=True)
    assert PrivacyLedger.read(run_dir).charged == KILLED_WITHIN + 1
    trainer = feature_trainer(run_dir, **SETTINGS)
    assert trainer.train(resume_from_checkpoint=True).global_step == 3 + 2
    assert PrivacyLedger.read(run_dir).charged == 8


def test_when_all_is_charged_nothing_more_is_taken(run_dir: Path) -> None:
    trainer = feature_trainer(run_dir, **SETTINGS)
    trainer.train(resume_from_checkpoint=True)
    again = feature_trainer(run_dir, **SETTINGS)
    with pytest.raises(BudgetExhausted, match=r"all 8 planned steps are charged already \(8\)"):
        again.train(resume_from_checkpoint=str(run_dir / "checkpoint-3"))
    assert PrivacyLedger.read(run_dir).charged == 8


def test_a_torn_last_line_counts_as_a_charge(run_dir: Path) -> None:
    with (run_dir / PrivacyLedger.FILENAME).open("a") as ledger:
        ledger.write('{"charged": 6, "hash": "0')
    trainer = feature_trainer(run_dir, **SETTINGS)
    assert trainer.train(resume_from_checkpoint=True).global_step == 3 + 2
    assert PrivacyLedger.read(run_dir).charged == 8


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"noise_multiplier": 1.2}, "noise_multiplier: 1.0 in the checkpoint, 1.2 now"),
        ({"target_delta": 1e-4}, "delta: 0.015625 in the checkpoint, 0.0001 now"),
        ({"accountant": "pld"}, "accountant: rdp in the checkpoint, pld now"),
        ({"clipping": "fixed"}, "clipping: dc_sgd_e in the checkpoint, fixed now"),
        ({"histogram_bins": 10}, "histogram_bins: 5 in the checkpoint, 10 now"),
        ({"histogram_noise_multiplier": 9.0}, "histogram_noise_multiplier: 1.5 in the checkpoint, 9.0 now"),
        ({"clip_threshold": 2.0}, "clip_threshold: 5.0 in the checkpoint, 2.0 now"),
        ({"per_device_train_batch_size": 8}, "expected_batch_size: 16 in the checkpoint, 8 now"),
        ({"num_train_epochs": 3}, "steps: 8 in the checkpoint, 12 now"),
        ({"unsafe_noise_seed": 4}, "unsafe_noise_seed: None in the checkpoint, 4 now"),
        ({"log_train_loss": "raw"}, r"opt_outs: .* in the checkpoint, .*raw_train_loss.* now"),
        ({"log_train_loss": "private"}, "loss_clip: None in the checkpoint, 2.0 now"),
    ],
)
def test_changed_settings_are_refused_with_both_values(run_dir: Path, changes: dict, shown: str) -> None:
    trainer = feature_trainer(run_dir, **{**SETTINGS, **changes})
    with pytest.raises(ValueError, match=shown):
        trainer.train(resume_from_checkpoint=True)
    assert PrivacyLedger.read(run_dir).charged == KILLED_WITHIN


def test_a_changed_dataset_or_model_is_refused(run_dir: Path) -> None:
    with pytest.raises(ValueError, match="dataset_size: 64 in the checkpoint, 66 now"):
        feature_trainer(run_dir, rows=feature_rows(66), **SETTINGS).train(resume_from_checkpoint=True)
    frozen = feature_classifier()
    frozen.hidden.requires_grad_(False)
    with pytest.raises(ValueError, match="num_parameters: 83 in the checkpoint, 27 now"):
        feature_trainer(run_dir, model=frozen, **SETTINGS).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("damage", ["removed", "cut", "edited"])
def test_a_ledger_that_was_tampered_with_is_refused(run_dir: Path, damage: str) -> None:
    ledger = run_dir / PrivacyLedger.FILENAME
    lines = ledger.read_text().splitlines(keepends=True)
    if damage == "removed":
        ledger.unlink()
    elif damage == "cut":
        ledger.write_text("".join(lines[:3]))
    else:
        ledger.write_text("".join(lines[:2] + lines[3:]))
    with pytest.raises(LedgerError):
        feature_trainer(run_dir, **SETTINGS).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_a_plain_trainer_is_refused(tmp_path: Path) -> None:
    args = hf.TrainingArguments(str(tmp_path), **quiet(save_strategy="steps", save_steps=2, max_steps=2))
    hf.Trainer(tiny_bert(), args, train_dataset=text_rows(), data_collator=pad).train()
    trainer = text_trainer(tmp_path)
    with pytest.raises(ValueError, match="checkpoint-2 was not written by DCSGDTrainer: its cost is unknown"):
        trainer.train(resume_from_checkpoint=True)
    assert not (tmp_path / PrivacyLedger.FILENAME).exists()


# --- runs that were stopped in peace ---------------------------------------------------------------------------------


class StopAt(hf.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        control.should_training_stop = control.should_training_stop or state.global_step == self.step


@pytest.mark.parametrize(
    ("stop", "ignore_data_skip"),
    [
        (3, False),
        (4, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, True), (4, False), (6, False), (6, True))),
    ],
)
def test_a_stopped_run_goes_on_to_its_end(tmp_path: Path, stop: int, ignore_data_skip: bool) -> None:
    """Also from the middle of an epoch, where transformers skips batches of the dataloader."""
    settings = {**SETTINGS, "save_steps": 1, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}
    feature_trainer(tmp_path, trainer_options={"callbacks": [StopAt(stop)]}, **settings).train()
    assert PrivacyLedger.read(tmp_path).charged == stop
    trainer = feature_trainer(tmp_path, **settings, ignore_data_skip=ignore_data_skip)
    assert trainer.train(resume_from_checkpoint=True).global_step == 8
    assert PrivacyLedger.read(tmp_path).charged == 8
    assert trainer.epsilon() == trainer.plan.epsilon()
    assert [line["step"] for line in trace(tmp_path)] == list(range(1, 9))


def test_the_same_trainer_may_resume_after_an_interruption(tmp_path: Path) -> None:
    class CrashOnce(hf.TrainerCallback):
        crashed = False

        def on_step_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            if state.global_step == 4 and not self.crashed:
                self.crashed = True
                raise KeyboardInterrupt

    trainer = feature_trainer(tmp_path, trainer_options={"callbacks": [CrashOnce()]}, **SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    with pytest.raises(BudgetExhausted, match="trained for 4 charged steps already"):
        trainer.train()
    assert trainer.train(resume_from_checkpoint=True).global_step == 7
    assert PrivacyLedger.read(tmp_path).charged == 8


@pytest.mark.parametrize(
    "schedule",
    [
        {"max_steps": 3},
        *(pytest.param(more, marks=pytest.mark.slow) for more in ({"num_train_epochs": 1}, {"max_steps": 6})),
    ],
)
def test_a_finished_run_has_nothing_to_resume(tmp_path: Path, schedule: dict) -> None:
    settings = {**SETTINGS, "save_steps": 1, **schedule}
    feature_trainer(tmp_path, **settings).train()
    charged = PrivacyLedger.read(tmp_path).charged
    with pytest.raises(BudgetExhausted, match="planned steps are charged already"):
        feature_trainer(tmp_path, **settings).train(resume_from_checkpoint=True)
    assert PrivacyLedger.read(tmp_path).charged == charged


def test_a_new_run_in_the_same_directory_is_a_run_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        feature_trainer(tmp_path, **SETTINGS).train()
    assert [run.charged for run in PrivacyLedger.read(tmp_path).runs] == [8, 8]
    assert [line["step"] for line in trace(tmp_path)] == list(range(1, 9))


# --- checkpoints as transformers keeps them --------------------------------------------------------------------------


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    trainer = feature_trainer(
        tmp_path,
        trainer_options={"compute_metrics": accuracy},
        **{**SETTINGS, "save_steps": 1},
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        learning_rate=0.3,
    )
    trainer.train()
    scores = [line["eval_accuracy"] for line in trainer.state.log_history if "eval_accuracy" in line]
    assert len(scores) == 8
    best = int(np.argmax(scores)) + 1
    assert Path(trainer.state.best_model_checkpoint).name == f"checkpoint-{best}"
    saved = load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors")
    assert all(torch.equal(parameter, saved[name]) for name, parameter in trainer.model.named_parameters())
    assert trainer.evaluate()["eval_accuracy"] == max(scores)
    assert trainer.epsilon() == trainer.plan.epsilon()


def test_old_checkpoints_are_deleted_and_the_last_can_be_resumed(tmp_path: Path) -> None:
    settings = {**SETTINGS, "save_steps": 1, "save_total_limit": 1}
    feature_trainer(tmp_path, trainer_options={"callbacks": [StopAt(5)]}, **settings).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-5"]
    assert feature_trainer(tmp_path, **settings).train(resume_from_checkpoint=True).global_step == 8


def test_checkpoints_carry_plan_threshold_and_the_witness_of_the_ledger(tmp_path: Path) -> None:
    trainer = feature_trainer(tmp_path, **SETTINGS)
    trainer.train()
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    saved = state["stateful_callbacks"]["PrivacyCallback"]["attributes"]["saved"]
    assert saved["plan"] == json.loads(json.dumps(trainer.plan.to_dict()))
    assert (saved["mechanism"]["charged"], saved["mechanism"]["step"]) == (6, 6)
    hashes = [json.loads(line)["hash"] for line in (tmp_path / PrivacyLedger.FILENAME).read_text().splitlines()]
    assert saved["mechanism"]["ledger_head"] == hashes[6]
