"""Trackers of experiments get released values only, with the plan as configuration.

What transformers' callbacks hand over is read where it arrives: in TensorBoard's event files, and in stand-ins for
wandb, trackio and MLflow with the calls that these callbacks make. Where the packages themselves are installed, what
they write without a network is read as well.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sqlite3
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_tasks import feature_trainer, watch_steps

from hf_dcsgd import DCSGDTrainer
from hf_dcsgd.ghost import GhostClipper, UnsupportedModelError
from hf_dcsgd.step import PrivateStep

pytestmark = pytest.mark.usefixtures("no_report_page", "quick_statements")

RELEASED = {"clip_threshold", "histogram_range", "noisy_clip_fraction", "grad_norm", "epsilon"}
PUBLIC = {"learning_rate", "epoch", "global_step", "runtime", "samples_per_second", "steps_per_second"}
OF_EVALUATION_DATA = {"loss"}
STEPS = 4


@dataclass
class Told:
    """What a tracker was told."""

    config: dict[str, Any] = field(default_factory=dict)
    values: list[dict[str, float]] = field(default_factory=list)
    watched: list[Any] = field(default_factory=list)

    def configure(self, values: Any, **options: Any) -> None:
        self.config.update(values)


# --- stand-ins -------------------------------------------------------------------------------------------------------


class Config(dict):
    def update(self, values: Any, **options: Any) -> None:  # type: ignore[override]
        super().update(values)


def fake_wandb(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("wandb")
    module.config = told.config = Config()
    module.run, module.define_metric, module.termwarn = None, lambda *args, **options: None, print
    summary: dict[str, float] = {}

    def init(**options: Any) -> None:
        module.run = SimpleNamespace(summary=summary, _label=lambda **labels: None, id="1", name="one", url="")
        told.values.append(summary)

    module.init, module.log, module.watch = (
        init,
        told.values.append,
        lambda *args, **options: told.watched.append(args),
    )
    errors: Any = ModuleType("wandb.sdk.lib.config_util")
    errors.ConfigError = type("ConfigError", (Exception,), {})
    packages = {name: ModuleType(name) for name in ("wandb.sdk", "wandb.sdk.lib")}
    for name, known in {"wandb": module, **packages, errors.__name__: errors}.items():
        monkeypatch.setitem(sys.modules, name, known)
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", lambda: True)


def fake_trackio(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("trackio")
    module.config = told.config = Config()
    module.context_vars = SimpleNamespace(current_space_id=SimpleNamespace(get=lambda: None))
    module.init, module.finish, module.log = lambda **options: None, lambda: None, told.values.append
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setattr("transformers.integrations.integration_utils.is_trackio_available", lambda: True)


def fake_mlflow(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("mlflow")
    limits = SimpleNamespace(MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=100)
    module.utils, module.__version__ = SimpleNamespace(validation=limits), "3.0.0"
    module.is_tracking_uri_set, module.get_tracking_uri = lambda: True, lambda: "memory"
    runs: list[Any] = []
    module.active_run = lambda: runs[-1] if runs else None
    module.start_run = lambda **options: runs.append(SimpleNamespace(info=SimpleNamespace(run_id="1")))
    module.end_run, module.log_params = runs.clear, told.configure
    module.log_metrics = lambda metrics, **options: told.values.append(metrics)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setattr("transformers.integrations.integration_utils.is_mlflow_available", lambda: True)


STAND_INS: dict[str, Callable[[Told, pytest.MonkeyPatch], None]] = {
    "wandb": fake_wandb,
    "trackio": fake_trackio,
    "mlflow": fake_mlflow,
}


# --- readers of what was written -------------------------------------------------------------------------------------


def read_tensorboard(folder: Path) -> Told:
    told = Told()
    for path in (folder / "out" / "runs").iterdir():
        events = EventAccumulator(str(path)).Reload()
        told.values += [{name: e.value} for name in events.Tags()["scalars"] for e in events.Scalars(name)]
        for name in events.Tags()["tensors"]:
            if name.startswith("args/"):
                told.configure(json.loads(events.Tensors(name)[0].tensor_proto.string_val[0]))
    return told


def log_records(data: bytes) -> Iterator[bytes]:
    """Read the records of wandb's file: LevelDB's log format after seven bytes of its own."""
    place, block, record = 7, 32768, b""
    while place + 7 <= len(data):
        if block - place % block < 7:  # no room for a header: the next block
            place += block - place % block
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def read_wandb(folder: Path) -> Told:
    from wandb.proto import wandb_internal_pb2

    told = Told()
    (path,) = (folder / "wandb").rglob("*.wandb")
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        told.values.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
        for part in (record.run.config.update, record.config.update):
            told.configure({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in part})
    return told


def read_trackio(folder: Path) -> Told:
    told = Told()
    (path,) = folder.glob("*.db")
    with sqlite3.connect(path) as database:
        told.values += [json.loads(row[0]) for row in database.execute("select metrics from metrics")]
        for (text,) in database.execute("select config from configs"):
            told.configure(json.loads(text))
    return told


def read_mlflow(folder: Path) -> Told:
    import mlflow

    told = Told()
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    told.configure(run.data.params)
    client = mlflow.MlflowClient()
    for name in run.data.metrics:
        told.values += [{name: entry.value} for entry in client.get_metric_history(run.info.run_id, name)]
    return told


READERS: dict[str, Callable[[Path], Told]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "trackio": read_trackio,
    "mlflow": read_mlflow,
}


# --- what they get ---------------------------------------------------------------------------------------------------


def tracked_trainer(folder: Path, tracker: str, **changes: Any) -> DCSGDTrainer:
    return feature_trainer(
        folder / "out", report_to=tracker, run_name="one", num_train_epochs=1, eval_strategy="epoch", **changes
    )


def train_watched(trainer: DCSGDTrainer, monkeypatch: pytest.MonkeyPatch) -> set[float]:
    """Train, and return what must not be told: losses, norms and batch sizes of each step."""
    private: set[float] = set()
    norms = GhostClipper.norms
    sizes: list[int] = []

    def watched_norms(clipper: GhostClipper, losses: torch.Tensor) -> torch.Tensor:
        found = norms(clipper, losses)
        sizes.append(len(losses))
        private.update(float(value) for of in (losses.detach(), found) for value in (of.mean(), of.sum(), of.max()))
        return found

    def release(step: PrivateStep) -> None:
        private.update((float(sum(sizes)), float(step._clipped_sum.norm())))
        sizes.clear()

    monkeypatch.setattr(GhostClipper, "norms", watched_norms)
    watch_steps(monkeypatch, release=release)
    trainer.train()
    return private


def assert_only_released(told: Told, trainer: DCSGDTrainer, private: set[float]) -> None:
    plan = trainer.plan
    assert plan is not None
    logged = [(name.removeprefix("train/"), value) for values in told.values for name, value in values.items()]
    names = {name for name, _ in logged if not name.startswith("_")}
    evaluation = {name for name in names if name.startswith(("eval/", "eval_"))}
    assert {name.removeprefix("eval/").removeprefix("eval_") for name in evaluation} <= PUBLIC | OF_EVALUATION_DATA
    assert {name.removeprefix("train_") for name in names - evaluation} <= RELEASED | PUBLIC
    assert names >= RELEASED | {"learning_rate"}
    assert len([name for name, _ in logged if name == "epsilon"]) == STEPS
    # How long it took may be any number: the size of a batch, too.
    public = ("epoch", "global_step", "runtime", "per_second")
    shown = {float(f"{float(value):.6g}") for name, value in logged if not name.endswith(public)}
    assert len(private) > 2 * STEPS
    assert not shown & {float(f"{value:.6g}") for value in private}
    config = {name.replace("privacy_plan/", ""): value for name, value in told.config.items()}
    found = config.get("privacy_plan", config)
    found = ast.literal_eval(found) if isinstance(found, str) else found
    assert found["guarantee"] == f"ε ≤ {plan.epsilon():.4g} at δ = {plan.delta:.4g}, adding or removing one example"
    assert float(found["noise_multiplier"]) == plan.noise_multiplier
    assert (found["clipping"], int(found["steps"])) == ("dc_sgd_e", STEPS)
    assert "per_device_train_batch_size" in told.config


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tracked_trainer(tmp_path, "tensorboard")
    private = train_watched(trainer, monkeypatch)
    assert_only_released(read_tensorboard(tmp_path), trainer, private)


@pytest.mark.parametrize("tracker", STAND_INS)
def test_what_callbacks_hand_over(tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    STAND_INS[tracker](told, monkeypatch)
    trainer = tracked_trainer(tmp_path, tracker)
    private = train_watched(trainer, monkeypatch)
    assert_only_released(told, trainer, private)
    assert not told.watched


@pytest.mark.parametrize("tracker", STAND_INS)
def test_what_the_packages_write_offline(tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    settings = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": f"file:{tmp_path / 'mlruns'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    trainer = tracked_trainer(tmp_path, tracker)
    private = train_watched(trainer, monkeypatch)
    if tracker == "wandb":
        sys.modules["wandb"].finish()
    assert_only_released(
        READERS[tracker](tmp_path / "trackio" if tracker == "trackio" else tmp_path), trainer, private
    )


def test_the_plan_of_a_run_without_a_guarantee_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    fake_wandb(told, monkeypatch)
    tracked_trainer(tmp_path, "wandb", unsafe_noise_seed=77001).train()
    assert told.config["privacy_plan"]["guarantee"] == "none, because of unsafe_noise_seed"
    assert told.config["privacy_plan"]["unsafe_noise_seed"] is None


def test_arguments_without_a_run_have_no_plan(tmp_path: Path) -> None:
    trainer = feature_trainer(tmp_path)
    assert "privacy_plan" not in trainer.args.to_dict()
    assert json.loads(trainer.args.to_json_string())["clipping"] == "dc_sgd_e"


# --- what they do not get --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        *(("WANDB_WATCH", value, "hangs hooks on private backward passes") for value in ("gradients", "all")),
        ("WANDB_WATCH", "parameters", "counts private forwards"),
        ("WANDB_LOG_MODEL", "end", "saves the model past the checks of DCSGDTrainer"),
    ],
)
def test_settings_that_take_more_are_refused_before_anything_is_spent(
    variable: str, value: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    fake_wandb(told, monkeypatch)
    monkeypatch.setenv(variable, value)
    trainer = tracked_trainer(tmp_path, "wandb")
    with pytest.raises(ValueError, match=f"{variable}={value} cannot be used for private training: .*{reason}"):
        trainer.train()
    assert (told.values, told.config, told.watched) == ([], {}, [])
    assert not list(tmp_path.rglob("privacy_ledger*"))
    tracked_trainer(tmp_path, "none").train()  # whoever does not ask for wandb may have it set


def test_a_hook_on_gradients_that_a_callback_sets_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `wandb.watch(model)` in a user's own code does."""
    trainer = feature_trainer(tmp_path)
    next(trainer.model.parameters()).register_hook(lambda gradient: None)
    with pytest.raises(UnsupportedModelError, match="trackers of gradients set one"):
        trainer.train()
