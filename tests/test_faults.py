"""Real faults: processes that are killed at random, full disks, read-only folders, damaged files."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Count
from safetensors import SafetensorError
from torch import nn
from transformers import TrainerCallback

from hf_dcsgd import DCSGDTrainer, DCSGDTrainingArguments
from hf_dcsgd.privacy.ledger import LedgerError, PrivacyLedger
from hf_dcsgd.privacy.mechanism import BudgetExhausted, DPMechanism
from hf_dcsgd.runs.checkpoints import is_complete, last_complete_checkpoint, require_complete

pytestmark = [pytest.mark.usefixtures("quick_statements"), pytest.mark.proof]

STEPS = 40
KILLS = "fault: kill -9 of a training process, at a random point, resumed"


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layer(features)


def make_trainer(folder: Path, steps: int = STEPS, **options) -> DCSGDTrainer:
    settings = {
        "recipe": "none",
        "accountant": "rdp",
        "per_device_train_batch_size": 8,
        "max_steps": steps,
        "save_steps": 2,
        "logging_steps": 5,
        "disable_tqdm": True,
        "use_cpu": True,
        "clipping": "fixed",
        **options,
    }
    torch.manual_seed(0)
    rows = [{"features": torch.randn(4), "labels": torch.tensor(k % 2)} for k in range(64)]
    return DCSGDTrainer(Classifier(), DCSGDTrainingArguments(str(folder), **settings), train_dataset=rows)


def complete_checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoint-*") if is_complete(path)]


def released_steps(folder: Path) -> int:
    released = folder / "released"
    return released.stat().st_size if released.exists() else 0


def train_in_a_child(folder: Path, steps: int) -> int:
    """Forks a real process that trains, resuming where it can, and notes every release; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        release = DPMechanism.release

        def noted(self: DPMechanism, clipped_sum: torch.Tensor):
            result = release(self, clipped_sum)
            with (folder / "released").open("ab", buffering=0) as note:
                note.write(b".")
            return result

        DPMechanism.release = noted
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        trainer = make_trainer(folder, steps)
        try:
            trainer.train(resume_from_checkpoint=bool(complete_checkpoints(folder)))
            code = 0
        except BudgetExhausted:
            code = 0
    finally:
        os._exit(code)


def kill_and_resume(folder: Path, steps: int, generator: random.Random) -> int:
    """Kills the run at random points until it ends by itself; returns the number of kills."""
    kills = 0
    while True:
        target = released_steps(folder) + generator.randrange(12)
        pid = train_in_a_child(folder, steps)
        ended, status = 0, 0
        while not ended and released_steps(folder) < target:
            time.sleep(0.001)
            ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            # Anywhere: in the forward, between charge and release, in the optimizer, while a checkpoint is written.
            time.sleep(generator.uniform(0, 0.05))
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        if (folder / PrivacyLedger.FILENAME).exists():
            runs = PrivacyLedger.read(folder).runs
            assert sum(run.charged for run in runs) >= released_steps(folder)
            assert all(run.charged <= steps for run in runs)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return kills
        kills += 1


@pytest.mark.usefixtures("no_report_page")
def test_a_run_that_is_killed_again_and_again_ends_within_its_budget(tmp_path: Path, count: Count) -> None:
    count(KILLS, kill_and_resume(tmp_path, 16, random.Random(0)))
    assert PrivacyLedger.read(tmp_path).runs[-1].charged == 16


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps; each test takes a copy."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_dcsgd.reporting.report.try_to_write_report", lambda run_dir: None)
        make_trainer(folder, max_steps=8).train()
    return folder


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.slow
def test_a_hundred_kills(tmp_path: Path, count: Count) -> None:
    generator, kills, runs = random.Random(1), 0, 0
    while kills < 100:
        folder = tmp_path / f"run-{runs}"
        folder.mkdir()
        kills += kill_and_resume(folder, 120, generator)
        runs += 1
        assert PrivacyLedger.read(folder).runs[-1].charged == 120
    count(KILLS, kills)


def test_an_unfinished_checkpoint_is_passed_over(run_dir: Path, count: Count) -> None:
    last = run_dir / "checkpoint-8"
    state = (last / "trainer_state.json").read_text()
    (last / "trainer_state.json").write_text(state[: len(state) // 2])
    assert last_complete_checkpoint(run_dir) == str(run_dir / "checkpoint-6")
    with pytest.raises(ValueError, match=r"complete checkpoint at .*checkpoint-8"):
        require_complete(last)
    with pytest.raises(ValueError, match=r"complete checkpoint at .*checkpoint-8"):
        make_trainer(run_dir, max_steps=8).train(resume_from_checkpoint=str(last))
    (run_dir / "empty").mkdir()
    with pytest.raises(ValueError, match="found none"):
        last_complete_checkpoint(run_dir / "empty")
    count("fault: a checkpoint that was not written to its end", 1)


def test_a_full_disk_stops_the_step_before_it_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_report_page: None, count: Count
) -> None:
    """The disk fills up while a charge is written: nothing of that step comes out."""
    trainer = make_trainer(tmp_path, steps=12)
    write, releases = os.write, []
    released = DPMechanism.release

    def counted(self: DPMechanism, clipped_sum: torch.Tensor):
        result = released(self, clipped_sum)
        releases.append(1)
        return result

    def full(handle: int, data: bytes) -> int:
        if b'"charged": 8' in data:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data)

    with monkeypatch.context() as patch:
        patch.setattr(DPMechanism, "release", counted)
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            trainer.train()
    assert len(releases) == 7
    assert PrivacyLedger.read(tmp_path).runs[-1].charged >= 7
    resumed = make_trainer(tmp_path, steps=12)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.mechanism is not None
    assert resumed.mechanism.charged == 12
    count("fault: no space for a charge", 1)


class At(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.step:
            self.action()


@contextmanager
def small_disk(folder: Path) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    """A file system of 2 MB in memory; gives what fills it up, and what makes room again."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    ballast = folder / "ballast"

    def fill() -> None:
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    try:
        yield fill, ballast.unlink
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def lockable(folder: Path) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    """Gives what makes the folder read-only, for root too, and what ends it."""
    root = os.geteuid() == 0
    lock, unlock = (["chattr", "+i"], ["chattr", "-i"]) if root else (["chmod", "a-w"], ["chmod", "u+w"])
    if subprocess.run([*lock, folder], capture_output=True).returncode:
        pytest.skip("no folder can be made read-only here")
    try:
        subprocess.run([*unlock, folder], check=True)
        yield (
            lambda: subprocess.run([*lock, folder], check=True),
            lambda: subprocess.run([*unlock, folder], check=True),
        )
    finally:
        subprocess.run([*unlock, folder], check=True)


@pytest.mark.usefixtures("no_report_page")
@pytest.mark.parametrize(("fault", "disk"), [("full", small_disk), ("read-only", lockable)], ids=["full", "read-only"])
def test_a_disk_that_really_fails_while_the_run_saves(
    fault: str, disk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Count
) -> None:
    """Nothing is lost but the steps since the last checkpoint; mended, the run resumes and ends within its budget."""
    steps, releases = 20, []
    released = DPMechanism.release

    def counted(self: DPMechanism, clipped_sum: torch.Tensor):
        result = released(self, clipped_sum)
        releases.append(1)
        return result

    monkeypatch.setattr(DPMechanism, "release", counted)
    with disk(tmp_path) as (spoil, mend):
        trainer = make_trainer(tmp_path, steps, save_total_limit=2)
        trainer.add_callback(At(11, spoil))
        with pytest.raises((OSError, SafetensorError, RuntimeError)) as caught:
            trainer.train()
        assert 11 < len(releases) < steps, caught.value
        assert PrivacyLedger.read(tmp_path).runs[-1].charged >= len(releases)
        mend()
        make_trainer(tmp_path, steps, save_total_limit=2).train(resume_from_checkpoint=True)
        assert PrivacyLedger.read(tmp_path).runs[-1].charged == steps
        assert len(releases) <= steps
    count(f"fault: a disk that is {fault} while saving", 1)


def test_a_read_only_output_directory_is_refused_before_anything_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Count
) -> None:
    trainer = make_trainer(tmp_path)
    opened = os.open

    def read_only(path, flags, *rest, **kwargs) -> int:
        if str(path).endswith(PrivacyLedger.FILENAME):
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, flags, *rest, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(OSError, match="Read-only"):
        trainer.train()
    assert trainer.mechanism is None
    count("fault: a read-only output directory", 1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("delete", "found none"),
        ("truncate", "not there"),
        ("edit", "was changed"),
        ("remove a line", "was changed"),
        ("empty", "found none"),
        ("garbage", "expected a run|was changed|is not an entry"),
    ],
)
def test_a_damaged_ledger_is_refused(run_dir: Path, damage: str, message: str, count: Count) -> None:
    path = run_dir / PrivacyLedger.FILENAME
    lines = path.read_text().splitlines(keepends=True)
    if damage == "delete":
        path.unlink()
    elif damage == "truncate":
        path.write_text("".join(lines[:3]))
    elif damage == "edit":
        path.write_text("".join(lines).replace('"charged": 3', '"charged": 1'))
    elif damage == "remove a line":
        path.write_text("".join(lines[:3] + lines[4:]))
    elif damage == "empty":
        path.write_text("")
    else:
        path.write_bytes(b"\x00\xff garbage\n" * 10)
    with pytest.raises(LedgerError, match=message):
        make_trainer(run_dir, max_steps=8).train(resume_from_checkpoint=str(run_dir / "checkpoint-4"))
    count("fault: a damaged ledger", 1)


def test_a_checkpoint_of_another_plan_is_refused(run_dir: Path, count: Count) -> None:
    with pytest.raises(ValueError, match=r"target_epsilon: 8\.0 in the checkpoint, 2\.0 now"):
        make_trainer(run_dir, max_steps=8, target_epsilon=2.0).train(
            resume_from_checkpoint=str(run_dir / "checkpoint-4")
        )
    count("fault: a checkpoint of another plan", 1)


def test_clock_jumps_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Count) -> None:
    clock = iter(range(10**9, 0, -(10**5)))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    trainer = make_trainer(tmp_path, max_steps=6)
    trainer.train()
    assert PrivacyLedger.read(tmp_path).runs[-1].charged == 6
    assert json.loads((tmp_path / "privacy_report.json").read_text())
    count("fault: a clock that runs backwards", 1)
