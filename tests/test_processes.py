"""What needs no second process: messages, and the main process' errors. The rest is in test_distributed."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distributed_worker as worker
import pytest

from hf_dcsgd.runs import processes
from hf_dcsgd.runs.processes import on_main_process, public_settings, quiet_replica, require_agreement

# --- agreement -------------------------------------------------------------------------------------------------------


def test_the_public_settings_leave_out_what_may_differ(tmp_path: Path) -> None:
    def found(**options: Any) -> dict[str, Any]:
        trainer = worker.make_trainer(tmp_path, **options)
        assert trainer.plan is not None
        return public_settings(trainer.plan, trainer.args, trainer.model)

    first = found()
    assert {"dataset_size", "expected_batch_size", "steps", "world_size", "noise_multiplier"} <= first.keys()
    assert first == found(seed=1, data_seed=2, disable_tqdm=False, dataloader_num_workers=1)
    for name, option in {
        "learning_rate": {"learning_rate": 0.5},
        "logging_steps": {"logging_steps": 7},
        "unsafe_noise_seed": {"unsafe_noise_seed": 7},
        "dataset_size": {"records": 61},
        "trainable parameters": {"trainable_layers": "out"},
        "gradient_accumulation_steps": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    }.items():
        assert found(**option)[name] != first[name]


def test_disagreement_names_every_number_of_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    require_agreement({"steps": 3})
    monkeypatch.setattr(processes, "PartialState", lambda: SimpleNamespace(num_processes=3))
    monkeypatch.setattr(
        processes, "gather_object", lambda own: [*own, {"steps": 3, "q": 0.1}, {"steps": 4, "only": 1}]
    )
    with pytest.raises(RuntimeError) as caught:
        require_agreement({"steps": 3, "q": 0.1})
    assert "steps: 3 | 3 | 4; q: 0.1 | 0.1 | None; only: None | None | 1" in str(caught.value)
    monkeypatch.setattr(processes, "gather_object", lambda own: own * 3)
    require_agreement({"steps": 3, "q": 0.1})


# --- the main process speaks for all ---------------------------------------------------------------------------------


def test_an_action_runs_on_the_main_process_and_its_error_is_raised() -> None:
    assert on_main_process(lambda: 5) == 5

    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        on_main_process(fail)


def test_other_processes_stop_with_the_main_one(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = SimpleNamespace(is_main_process=False, num_processes=2)
    monkeypatch.setattr(processes, "PartialState", lambda: replica)
    monkeypatch.setattr(processes, "broadcast_object_list", lambda _: ["disk full"])
    with pytest.raises(RuntimeError, match="the main process stopped: disk full"):
        on_main_process(lambda: pytest.fail("not here"))
    monkeypatch.setattr(processes, "broadcast_object_list", lambda _: [None])
    assert on_main_process(lambda: pytest.fail("not here")) is None


def test_replicas_log_errors_only() -> None:
    logger = logging.getLogger("hf_dcsgd")
    before = logger.level
    try:
        quiet_replica()
        assert not logging.getLogger("hf_dcsgd.runs.callbacks").isEnabledFor(logging.WARNING)
        assert logging.getLogger("hf_dcsgd.runs.callbacks").isEnabledFor(logging.ERROR)
    finally:
        logger.setLevel(before)
