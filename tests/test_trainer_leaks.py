"""Everything that leaves a run is searched for private values: raw losses, norms, clip fractions, batch sizes, data.

The trainer is watched from inside to know these values; then every file of the run, text or pickle, and everything
that callbacks were told is searched for them. That the search would find them is tested too.
"""

import dataclasses
import io
import json
import math
import pickletools
import random
import re
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from scipy import stats
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tiny_tasks import (
    FEATURES,
    SIGMA,
    feature_classifier,
    feature_rows,
    feature_trainer,
    flat_parameters,
    force_draws,
    text_rows,
    text_trainer,
    watch_steps,
)

from hf_dcsgd import DCSGDTrainer
from hf_dcsgd.data.rows import Batch
from hf_dcsgd.ghost import GhostClipper
from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.step import PrivateStep

# Logical batches of these sizes: numbers that nothing public comes near.
N, BATCH, SIZES = 907, 200, (173, 211, 229, 157, 193, 239, 163, 217)


def at_a_fixed_speed(split: str, start_time: float, **counts: Any) -> dict[str, float]:
    """Whatever was done took 0.7 s: examples per second might be any number, also that of a batch."""
    return hf.trainer_utils.speed_metrics(split, time.time() - 0.7, **counts)


class Watched:
    """Writes down, in memory, what must not get out of a run."""

    def __init__(self, trainer: DCSGDTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainer = trainer
        self.aggregates: dict[str, float] = {}
        self.single_values: list[float] = []
        self.sums: list[list[torch.Tensor]] = []
        self._norms: list[torch.Tensor] = []
        self._raw: list[torch.Tensor] = []
        watch_steps(monkeypatch, accumulate=self.accumulate, release=self.release)
        norms = GhostClipper.norms

        def watched_norms(clipper: GhostClipper, losses: torch.Tensor) -> torch.Tensor:
            found = norms(clipper, losses)
            # Rows that the spot check runs again, alone, come right after a stack.
            if self._is_new_stack:
                self._norms.append(found)
                self._raw.append(losses.detach())
                self._is_new_stack = False
            return found

        self._is_new_stack = False
        monkeypatch.setattr(GhostClipper, "norms", watched_norms)
        monkeypatch.setattr("transformers.trainer.speed_metrics", at_a_fixed_speed)

    def note(self, name: str, value: Any) -> None:
        self.aggregates[f"{name} of step {len(self.sums)}"] = float(value)

    def accumulate(self, step: PrivateStep, stack: Batch) -> None:
        self.single_values += stack["features"].flatten()[:FEATURES].tolist()
        self._is_new_stack = True

    def release(self, step: PrivateStep) -> None:
        norms, losses = torch.cat(self._norms), torch.cat(self._raw)
        self._norms, self._raw = [], []
        self.note("batch size", len(norms))
        for name, values in (("loss", losses), ("norm", norms)):
            for kind in ("mean", "sum", "max", "min", "median", "std"):
                self.note(f"{name} {kind}", getattr(values, kind)())
        self.note("loss sum over B", losses.sum() / BATCH)
        threshold = step.mechanism.threshold
        self.note("clip fraction", (norms > threshold.sensitivity).float().mean())
        self.note("mean clip factor", threshold.clip_factors(norms).mean())
        clipped = step._clipped_sum.clone()
        self.note("norm of the clipped sum", clipped.norm())
        self.note("norm of the clipped mean", clipped.norm() / BATCH)
        self.single_values += losses.tolist() + norms.tolist()
        self.sums.append(list(step.clipper.unflatten(clipped).values()))

    @property
    def batch_sizes(self) -> dict[str, float]:
        """Sizes of the logical batches, and running totals of them."""
        sizes = {k: v for k, v in self.aggregates.items() if k.startswith("batch size")}
        totals = np.cumsum(list(sizes.values()))
        return sizes | {f"first {i + 1} batch sizes together": float(t) for i, t in enumerate(totals)}


class Listener(hf.TrainerCallback):
    """Keeps all that a callback is told: logs, metrics and the trainer's state, at every event."""

    def __init__(self) -> None:
        self.heard = io.StringIO()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda args, state, control, **kwargs: self.write(name, state, kwargs)
        return super().__getattribute__(name)

    def write(self, event: str, state: hf.TrainerState, kwargs: dict) -> None:
        told = {key: kwargs[key] for key in ("logs", "metrics") if key in kwargs}
        json.dump({event: told, "state": dataclasses.asdict(state)}, self.heard, default=str)


# --- reading everything ----------------------------------------------------------------------------------------------

NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.])")


def texts_of(path: Path) -> Iterator[str]:
    """What a file says, as text with all its numbers; tensors of more than one number apart (`tensors_of`)."""
    if ".tfevents." in path.name:
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                yield value.tag
                yield from (str(number) for number in (*value.tensor.float_val, value.simple_value) if number)
                yield from (content.decode(errors="replace") for content in value.tensor.string_val)
    elif zipfile.is_zipfile(path):
        yield from (str(leaf) for leaf in leaves(torch.load(path, weights_only=False)) if not is_large(leaf))
    elif path.suffix == ".html":
        yield re.sub(r"data:[^\"']*", "", path.read_text(encoding="utf-8"))  # figures, drawn from the trace
    elif path.suffix not in {".safetensors", ".svg", ".png"}:
        yield path.read_text(encoding="utf-8")


def tensors_of(path: Path) -> Iterator[torch.Tensor]:
    if path.suffix == ".safetensors":
        yield from load_file(path).values()
    elif zipfile.is_zipfile(path):
        yield from (leaf for leaf in leaves(torch.load(path, weights_only=False)) if is_large(leaf))


def is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray) and math.prod(value.shape) > 1


def leaves(value: Any) -> Iterator[Any]:
    """Every number, string and tensor in nested containers and objects."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from leaves(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, torch.Tensor) and value.numel() == 1:
        yield value.item()
    elif hasattr(value, "__dict__") and not isinstance(value, type | torch.Tensor):
        yield from leaves(vars(value))
    else:
        yield value


def all_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def everything_said(directory: Path, listener: Listener, returned: Any) -> dict[str, str]:
    said = {str(path.relative_to(directory)): "\n".join(texts_of(path)) for path in all_files(directory)}
    said |= {"callbacks": listener.heard.getvalue(), "returned": json.dumps(returned, default=str)}
    # Names of temporary folders are numbered, and may hold any number.
    return {place: text.replace(str(directory), "").replace(str(directory.parent), "") for place, text in said.items()}


def significant_digits(number: str) -> int:
    return len(re.sub(r"[eE].*", "", number).lstrip("+-0.").replace(".", ""))


def found_in(said: dict[str, str], watched: Watched) -> set[str]:
    """Names of private values that were said, with where: batch sizes exactly, floats to six digits or more."""
    sizes = {size: name for name, size in watched.batch_sizes.items()}
    floats = {f"{v:.5e}": k for k, v in watched.aggregates.items() if not float(v).is_integer()}
    singles = {f"{value:.8e}" for value in watched.single_values if not float(value).is_integer()}
    hits = set()
    for place, text in said.items():
        for number in set(NUMBER.findall(text)):
            value = float(number)
            if value in sizes:
                hits.add(f"{sizes[value]} in {place}")
            if significant_digits(number) >= 6 and f"{value:.5e}" in floats:
                hits.add(f"{floats[f'{value:.5e}']} in {place}")
            if significant_digits(number) >= 9 and f"{value:.8e}" in singles:
                hits.add(f"a loss, norm or feature of one example in {place}")
    return hits


# --- the runs --------------------------------------------------------------------------------------------------------


# A run that saves, evaluates and reports to tensorboard.
TALKATIVE: dict[str, Any] = {
    "per_device_train_batch_size": BATCH // 2,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "eval_strategy": "epoch",
    "save_strategy": "steps",
    "save_steps": 3,
    "report_to": "tensorboard",
    "unsafe_noise_seed": 77001,
}


def watched_run(directory: Path, **changes: Any) -> tuple[Watched, dict[str, str]]:
    listener = Listener()
    trainer = feature_trainer(
        directory,
        model=feature_classifier(dropout=0.1),
        rows=feature_rows(N),
        trainer_options={"callbacks": [listener]},
        **{**TALKATIVE, "learning_rate": 0.05, **changes},
    )
    return watched_training(trainer, listener, directory, Watched)


def watched_training(
    trainer: Any, listener: Listener, directory: Path, watch: Callable[[Any, pytest.MonkeyPatch], Any]
) -> tuple[Any, dict[str, str]]:
    """Trains on draws of known sizes, and has whatever a script would write written; what was seen, what was said."""
    sizes = iter(SIZES)
    force_draws(trainer, lambda: np.random.default_rng(0).permutation(N)[: next(sizes)])
    with pytest.MonkeyPatch.context() as monkeypatch:
        watched = watch(trainer, monkeypatch)
        output = trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", output.metrics)
    trainer.save_metrics("train", output.metrics)
    trainer.create_model_card()
    returned = [output.metrics, output.training_loss, trainer.privacy_report(), trainer.state.log_history]
    return watched, everything_said(directory, listener, returned)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Watched, dict[str, str], Path]:
    directory = tmp_path_factory.mktemp("run")
    return (*watched_run(directory), directory)


def test_nothing_private_is_written_or_told(run: tuple) -> None:
    watched, said, _ = run
    assert len(watched.sums) == 8
    assert sorted(watched.batch_sizes.values())[:2] == [157, 163]
    assert len(watched.single_values) > 3000
    places = " ".join(said)
    for expected in (
        "checkpoint-3/trainer_state.json",
        "checkpoint-3/training_args.bin",
        "checkpoint-3/optimizer.pt",
        "checkpoint-3/rng_state.pth",
        "tfevents",
        "privacy_ledger.jsonl",
        "privacy_trace.jsonl",
        "privacy_report.html",
        "train_results.json",
        "README.md",
        "callbacks",
    ):
        assert expected in places
    # The search reads numbers everywhere: public ones are found.
    assert all(
        str(watched.trainer.plan.num_parameters) in said[name] for name in said if name.endswith("ledger.jsonl")
    )
    assert "grad_norm" in "".join(said[name] for name in said if "tfevents" in name)
    assert found_in(said, watched) == set()


def test_no_saved_tensor_is_a_clipped_sum(run: tuple) -> None:
    """The weights and Adam's moments come from noised gradients only."""
    watched, _, directory = run
    saved = [torch.as_tensor(array).float() for path in all_files(directory) for array in tensors_of(path)]
    assert len(saved) > 20
    for clipped in (part for parts in watched.sums for part in parts):
        direction = clipped.flatten() / clipped.norm()
        for tensor in saved:
            if tensor.shape == clipped.shape and tensor.norm() > 0:
                assert abs(float(direction @ tensor.flatten() / tensor.norm())) < 0.9999


def test_the_training_loss_is_nowhere(run: tuple) -> None:
    watched, said, directory = run
    keys = {key for line in watched.trainer.state.log_history for key in line}
    assert not keys & {"loss", "train_loss", "noisy_loss", "total_flos", "num_input_tokens_seen"}
    assert keys >= {
        "clip_threshold",
        "histogram_range",
        "noisy_clip_fraction",
        "epsilon",
        "grad_norm",
        "learning_rate",
    }
    state = json.loads((directory / "checkpoint-6" / "trainer_state.json").read_text())
    assert (state["total_flos"], state["num_input_tokens_seen"]) == (0, 0)
    assert "train_loss" not in said["train_results.json"]


def test_the_search_finds_what_is_said(run: tuple) -> None:
    """Private values planted one at a time are all found."""
    watched = run[0]
    for name, value in watched.aggregates.items():
        if not value.is_integer():
            assert f"{name} in log" in found_in({"log": f'{{"some_name": {value}}}'}, watched)
    for size in watched.batch_sizes.values():
        assert found_in({"log": f"{int(size)} examples"}, watched)
    for value in watched.single_values[:200]:
        assert found_in({"log": str(value)}, watched)
    assert not found_in({"log": "0.123456789 and 400"}, watched)


def test_the_search_finds_raw_losses_where_the_user_asked_for_them(tmp_path: Path) -> None:
    watched, said = watched_run(tmp_path, log_train_loss="raw")
    places = {hit.partition(" in ")[2] for hit in found_in(said, watched)}
    assert all(hit.startswith("loss sum over B") for hit in found_in(said, watched))
    assert places >= {"callbacks", "returned", "checkpoint-3/trainer_state.json"}
    assert any("tfevents" in place for place in places)


# --- seeds and random states -----------------------------------------------------------------------------------------


def test_saved_arguments_hold_no_seeds(tmp_path: Path) -> None:
    trainer = feature_trainer(tmp_path, seed=90417, data_seed=90418, unsafe_noise_seed=90419, hub_token="hf_secret")
    trainer.save_model()
    saved = torch.load(tmp_path / "training_args.bin", weights_only=False)
    values = set(map(str, leaves(saved)))
    assert not values & {"90417", "90418", "90419", "hf_secret"}
    assert (trainer.args.seed, trainer.args.unsafe_noise_seed) == (90417, 90419)
    assert saved.noise_multiplier == SIGMA


def test_no_generator_of_ours_is_pickled(run: tuple) -> None:
    """Noise and sampling have numpy generators; only the states of the global ones are saved."""
    _, _, directory = run
    looked_at = 0
    for path in all_files(directory):
        if not zipfile.is_zipfile(path):
            continue
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith("data.pkl"):
                    looked_at += 1
                    globals_used = {
                        str(arg) for op, arg, _ in pickletools.genops(archive.read(name)) if arg is not None
                    }
                    assert not {g for g in globals_used if re.search("PCG64|Philox|Generator|NoiseSource|Sampler", g)}
    assert looked_at >= 6


class Augmenting:
    """A collator that draws from all three global states, as much as the batch is large."""

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        features = torch.stack([row["features"] for row in rows])
        features = features + 0.01 * torch.rand_like(features) + 0.01 * np.random.random((len(rows), 1))
        features = features.float() + torch.tensor([[0.01 * random.random()] for _ in rows])
        return {"features": features, "labels": torch.stack([row["labels"] for row in rows])}


def run_with_dropout(directory: Path, **changes: Any) -> DCSGDTrainer:
    trainer = feature_trainer(
        directory,
        model=feature_classifier(dropout=0.5),
        trainer_options={"data_collator": Augmenting()},
        save_strategy="steps",
        save_steps=2,
        **changes,
    )
    trainer.train()
    return trainer


def global_states() -> list:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


@pytest.mark.usefixtures("no_report_page")
@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4}])
def test_random_states_follow_from_the_public_seed_alone(tmp_path: Path, changes: dict) -> None:
    """Draws and noise differ between the runs, so dropout and collator draw other amounts; the states agree."""
    states, parameters = [], []
    for name in "ab":
        trainer = run_with_dropout(tmp_path / name, seed=5, **changes)
        parameters.append(flat_parameters(trainer.model))
        saved = torch.load(tmp_path / name / "checkpoint-2" / "rng_state.pth", weights_only=False)
        saved["numpy"] = saved["numpy"][1].tolist()
        states.append([saved["python"], saved["numpy"], saved["cpu"].tolist(), *global_states()])
    assert not torch.equal(*parameters)
    assert states[0] == states[1]
    other = run_with_dropout(tmp_path / "c", seed=6, **changes)
    assert other is not None
    assert global_states()[2] != states[0][5]


@pytest.mark.usefixtures("no_report_page")
def test_dropout_still_differs_from_step_to_step(tmp_path: Path) -> None:
    masks = []

    class Spy(torch.nn.Module):
        def forward(self, values):  # type: ignore[no-untyped-def]
            dropped = torch.nn.functional.dropout(values, 0.5, self.training)
            if self.training:
                masks.append((dropped[0] == 0).tolist())
            return dropped

    model = feature_classifier()
    model.dropout = Spy()
    trainer = feature_trainer(tmp_path, model=model, num_train_epochs=3)
    force_draws(trainer, lambda: np.arange(16))
    trainer.train()
    assert len(masks) >= 12
    assert len(set(map(tuple, masks[-12:]))) > 6


@pytest.mark.usefixtures("no_report_page")
def test_setting_up_the_parity_check_does_not_move_the_state_with_the_data(tmp_path: Path) -> None:
    """A collator that masks tokens draws as many numbers as the first rows are long."""
    states = []
    for longest in (5, 30):
        rows = [{"input_ids": [7] * longest, "labels": 1}, *text_rows(63)]
        trainer = text_trainer(tmp_path / str(longest), rows=rows, max_steps=1, seed=3)
        pad = trainer.data_collator

        def masking(rows, pad=pad):  # type: ignore[no-untyped-def]
            batch = pad(rows)
            batch["input_ids"][torch.rand(batch["input_ids"].shape) < 0.1] = 4
            return batch

        trainer.data_collator = masking
        force_draws(trainer, lambda: np.arange(1, 5))
        torch.manual_seed(3)
        trainer.train()
        states.append(torch.get_rng_state().tolist())
    assert states[0] == states[1]


# --- the three modes of the training loss ----------------------------------------------------------------------------


def logged(trainer: DCSGDTrainer, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


def mean_loss(trainer: DCSGDTrainer, rows: list[dict], cut_at: float = math.inf) -> float:
    with torch.no_grad():
        logits = trainer.model(torch.stack([row["features"] for row in rows]))
    labels = torch.stack([row["labels"] for row in rows])
    return float(torch.nn.functional.cross_entropy(logits, labels, reduction="none").clamp(max=cut_at).mean())


@pytest.mark.usefixtures("no_report_page")
def test_off(tmp_path: Path) -> None:
    trainer = feature_trainer(tmp_path, save_strategy="epoch")
    output = trainer.train()
    assert math.isnan(output.training_loss)
    assert not {"train_loss", "loss", "noisy_train_loss", "total_flos"} & set(output.metrics)
    assert "loss" not in (tmp_path / "checkpoint-4" / "trainer_state.json").read_text().replace("loss_", "_")
    assert trainer.plan.opt_outs == ()


@pytest.mark.usefixtures("no_report_page")
def test_floating_point_operations_are_not_counted(tmp_path: Path) -> None:
    """Transformers counts them by the tokens of each batch."""
    trainer = text_trainer(tmp_path, save_strategy="epoch")
    assert hf.Trainer.floating_point_ops(trainer, {"input_ids": torch.ones(2, 5)}) > 0
    output = trainer.train()
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["total_flos"] == trainer.state.total_flos == 0
    assert "total_flos" not in output.metrics


@pytest.mark.usefixtures("no_report_page")
@pytest.mark.parametrize("accumulation", [1, 4])
def test_raw(tmp_path: Path, accumulation: int, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = feature_trainer(
        tmp_path,
        log_train_loss="raw",
        learning_rate=0.0,
        per_device_train_batch_size=16 // accumulation,
        gradient_accumulation_steps=accumulation,
    )
    force_draws(trainer, lambda: np.arange(16))
    output = trainer.train()
    expected = mean_loss(trainer, feature_rows()[:16])
    assert logged(trainer, "loss") == pytest.approx([expected] * 4)
    assert output.training_loss == pytest.approx(expected)
    assert output.metrics["train_loss"] == pytest.approx(expected)
    assert "raw_train_loss" in trainer.plan.opt_outs
    assert "no guarantee, because of raw_train_loss" in capsys.readouterr().out
    assert "raw_train_loss" in json.dumps(trainer.privacy_report())


@pytest.mark.usefixtures("no_report_page")
def test_private(tmp_path: Path) -> None:
    """A mean of clipped losses with Gaussian noise of std σ_L · loss_clip / B, paid for out of σ."""
    steps, batch, clip, multiplier = 160, 16, 0.9, 6.0
    trainer = feature_trainer(
        tmp_path,
        log_train_loss="private",
        loss_clip=clip,
        loss_noise_multiplier=multiplier,
        learning_rate=0.0,
        max_steps=steps,
    )
    force_draws(trainer, lambda: np.arange(batch))
    output = trainer.train()
    plan = trainer.plan
    assert plan.noise_multiplier**-2 == pytest.approx(
        plan.grad_noise_multiplier**-2 + plan.settings["histogram_noise_multiplier"] ** -2 + multiplier**-2
    )
    assert plan.opt_outs == ()
    cut, uncut = mean_loss(trainer, feature_rows()[:batch], clip), mean_loss(trainer, feature_rows()[:batch])
    assert uncut > cut + 0.05
    released = np.array(logged(trainer, "noisy_loss"))
    assert len(released) == steps
    std = multiplier * clip / batch
    # Each fails once in a hundred million runs.
    assert abs(released.mean() - cut) < 5.8 * std / math.sqrt(steps)
    low, high = stats.chi2.interval(1 - 1e-8, steps - 1)
    assert low < steps * (released.std() / std) ** 2 < high
    assert output.training_loss == output.metrics["noisy_train_loss"] == pytest.approx(released.mean(), rel=1e-4)
    assert not {"loss", "train_loss"} & {key for line in trainer.state.log_history for key in line}


@pytest.mark.usefixtures("no_report_page")
def test_the_unclipped_and_unnoised_never_reach_the_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With log_train_loss off, the mechanism keeps no loss at all."""
    kept = []
    release = DPMechanism.release
    monkeypatch.setattr(
        DPMechanism, "release", lambda self, total: (kept.append(self._sums.get("loss")), release(self, total))[1]
    )
    feature_trainer(tmp_path).train()
    assert kept == [None] * 4
