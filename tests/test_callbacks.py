"""What hangs on the training loop: the trace, the saved state, the stop."""

import json
from pathlib import Path

import pytest
import torch
from transformers import TrainerControl, TrainerState

from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.runs.callbacks import PrivacyCallback, RunStart, saved_privacy_state
from hf_dcsgd.runs.trace import TRACE_FILENAME


def mechanism(steps: int = 3, clipping: str = "dc_sgd_e") -> DPMechanism:
    plan = PrivacyPlan.create(
        dataset_size=100,
        expected_batch_size=10,
        steps=steps,
        num_parameters=4,
        noise_multiplier=1.0,
        clipping=clipping,
    )
    return DPMechanism(plan)


def end_of_step(callback: PrivacyCallback, step: int, max_steps: int) -> TrainerControl:
    state = TrainerState(global_step=step, max_steps=max_steps)
    return callback.on_step_end(None, state, TrainerControl())  # type: ignore[arg-type]


def test_the_trace_has_a_line_of_released_values_per_step(tmp_path: Path) -> None:
    callback, steps = PrivacyCallback(), mechanism()
    callback.attach(steps, tmp_path)
    released = []
    for step in (1, 2):
        released.append(steps.release(torch.zeros(4)).values)
        end_of_step(callback, step, 3)
    lines = [json.loads(line) for line in (tmp_path / TRACE_FILENAME).read_text().splitlines()]
    assert lines == [{"step": step, **values} for step, values in enumerate(released, start=1)]
    assert {"clip_threshold", "histogram_range", "noisy_histogram"} <= set(lines[0])


def test_ranks_without_a_trace_write_none(tmp_path: Path) -> None:
    callback, steps = PrivacyCallback(), mechanism()
    callback.attach(steps, None)
    steps.release(torch.zeros(4))
    end_of_step(callback, 1, 3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("max_steps", "stops"), [(9, True), (2, False)])
def test_the_loop_is_stopped_when_the_budget_is_spent_before_its_end(
    max_steps: int, stops: bool, caplog: pytest.LogCaptureFixture
) -> None:
    callback, steps = PrivacyCallback(), mechanism(steps=2, clipping="fixed")
    callback.attach(steps, None)
    steps.release(torch.zeros(4))
    assert not end_of_step(callback, 1, max_steps).should_training_stop
    steps.release(torch.zeros(4))
    assert end_of_step(callback, 2, max_steps).should_training_stop is stops
    assert ("budget is spent after 2 charged steps, at step 2 of 9" in caplog.text) is stops


def test_the_state_survives_the_trainer_state(tmp_path: Path) -> None:
    callback, steps = PrivacyCallback(), mechanism()
    assert callback.state() == {"args": {}, "attributes": {}}
    callback.attach(steps, None)
    steps.release(torch.ones(4))
    state = TrainerState(stateful_callbacks=[callback])
    state.save_to_json(str(tmp_path / "state.json"))
    saved = saved_privacy_state(TrainerState.load_from_json(str(tmp_path / "state.json")))
    assert saved is not None
    assert PrivacyPlan.from_dict(saved["plan"]) == steps.plan
    assert saved["mechanism"] == json.loads(json.dumps(steps.state_dict()))


def test_a_state_of_others_has_no_privacy_state() -> None:
    assert saved_privacy_state(TrainerState()) is None
    assert saved_privacy_state(TrainerState(stateful_callbacks=[PrivacyCallback()])) is None


def test_the_run_starts_with_the_number_of_steps_of_the_loop() -> None:
    started: list[int] = []
    RunStart(started.append).on_train_begin(None, TrainerState(max_steps=7), TrainerControl())  # type: ignore[arg-type]
    assert started == [7]
