"""TRL's own script for supervised fine-tuning, as the installed package has it, with two names changed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trl.scripts.sft
from test_distributed import ACCELERATE, CONFIGS, launch
from tiny_chats import conversations, model_folder
from worker_pool import WorkerPool

CHANGED = {
    "from trl import SFTTrainer, ": "from hf_dcsgd.trl import DCSGDSFTTrainer as SFTTrainer\n    from trl import ",
    "ScriptArguments, SFTConfig, TrlParser": (
        "ScriptArguments, TrlParser\n    from hf_dcsgd.trl import DCSGDSFTConfig as SFTConfig"
    ),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool("trl.scripts.sft", "hf_dcsgd.trl.sft", "trl.trainer.sft_trainer", "peft")
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    """The script and its arguments, for a model and data in local folders."""
    folder = tmp_path_factory.mktemp("sft")
    text = Path(trl.scripts.sft.__file__).read_text()
    for theirs, ours in CHANGED.items():
        assert text.count(theirs) == 1
        text = text.replace(theirs, ours)
    (folder / "sft.py").write_text(text)
    for split, rows in (("train", conversations(64)), ("test", conversations(16, start=100))):
        rows.to_json(folder / "data" / f"{split}.json")
    options = {
        "model_name_or_path": model_folder(folder / "model"),
        "dataset_name": folder / "data",
        "target_epsilon": 8,
        "accountant": "rdp",
        "recipe": "none",
        "per_device_train_batch_size": 8,
        "num_train_epochs": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 1,
        "max_length": 64,
        "lora_r": 2,
        "report_to": "none",
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return [folder / "sft.py", *words, "--use_peft", "--use_cpu"]


def statement(directory: Path) -> dict:
    return json.loads((directory / "privacy_report.json").read_text())


@pytest.mark.slow
def test_the_script_runs_with_two_names_changed_and_resumes(
    pool: WorkerPool, command: list[str | Path], tmp_path: Path
) -> None:
    """On two processes; on one, `test_trl_sft.py` does what the script does."""
    pool.run(2, [*command, "--output_dir", tmp_path])
    report = statement(tmp_path)
    assert report["guarantee"]["holds"]
    assert report["guarantee"]["epsilon"] <= 8
    assert report["layout"]["world_size"] == 2
    assert report["steps"]["charged"] == 4
    state = json.loads(next(tmp_path.glob("checkpoint-*/trainer_state.json")).read_text())
    keys = {key for line in state["log_history"] for key in line}
    assert {"epsilon", "clip_threshold", "eval_loss", "eval_entropy"} <= keys
    assert not keys & {"loss", "entropy", "mean_token_accuracy", "num_tokens", "eval_num_tokens"}
    assert (tmp_path / "adapter_model.safetensors").exists()

    resumed = [*command, "--output_dir", tmp_path, "--resume_from_checkpoint", tmp_path / "checkpoint-2"]
    ended = pool.run(2, resumed, check=False)
    assert all(ended.exit_codes), "all planned steps are charged, and lost ones stay so"
    assert "planned steps are charged already" in ended.output


@pytest.mark.slow
def test_the_script_runs_under_accelerate(command: list[str | Path], tmp_path: Path) -> None:
    options = ("--config_file", CONFIGS / "cpu.yaml", "--num_processes", "2", "--main_process_port", "0")
    launch([*ACCELERATE, *options, *command, "--output_dir", tmp_path])
    assert statement(tmp_path)["layout"]["world_size"] == 2


@pytest.mark.slow
def test_the_script_explains_its_options(command: list[str | Path]) -> None:
    shown = launch([sys.executable, command[0], "--help"]).stdout
    assert "--target_epsilon" in shown
    assert "--completion_only_loss" in shown
