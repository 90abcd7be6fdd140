"""What the processes of `test_distributed.py` run: `distributed_worker.py DIRECTORY scenario …` on every rank.

A scenario is a function of a directory that returns what this rank saw; the worker writes it to
`DIRECTORY/<scenario>/rank<r>.pt`. Scenarios that end in an error do so on every rank, so the next one can follow in
the same processes.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_tasks import pad, private_args, text_rows, tiny_bert
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from collectives import CollectiveCounter, FromFirstToLastStep

from hf_dcsgd import DCSGDTrainer, DCSGDTrainingArguments
from hf_dcsgd.data.units import UNIT_ENTRY
from hf_dcsgd.privacy.ledger import PrivacyLedger
from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.privacy.sampling import PoissonBatchSampler
from hf_dcsgd.reporting import report
from hf_dcsgd.step import PrivateStep

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
FEATURES, CLASSES = 16, 3
UNSAFE_SEED = 7
LAYOUT_RECORDS, LAYOUT_BATCH, LAYOUT_STEPS = 96, 32, 4
NOISE_WIDTH, NOISE_STEPS = 26_000, 2
LOCKSTEP_RECORDS, LOCKSTEP_STEPS = 60, 100
INCLUSION_DRAWS = 4000
UNIT_DRAWS = 1500
UNIT_SIZES = (*range(1, 13), *range(1, 13))  # the rows of each of 24 units; all of them may enter with up to 4
UNIT_CAP, UNIT_STEPS = 4, 90


class Records(torch.utils.data.Dataset):
    """Made-up vectors with labels, the same on every rank."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(size, FEATURES, generator=generator) * torch.linspace(0.2, 3, size).unsqueeze(1)
        self.labels = torch.randint(CLASSES, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class OwnedRecords(Records):
    """Vectors of which several have one owner; where these lie among the others is the same on every rank."""

    def __init__(self) -> None:
        super().__init__(sum(UNIT_SIZES))
        self.owners = np.random.default_rng(3).permutation(np.repeat(np.arange(len(UNIT_SIZES)), UNIT_SIZES))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "user_id": f"user {self.owners[index]}"}

    def find(self, inputs: Tensor) -> list[int]:
        """Tell which records these are."""
        return (self.inputs[None] == inputs[:, None]).all(-1).nonzero()[:, 1].tolist()


class Net(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, width)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, CLASSES)
        # DDP's forward would broadcast it, and wait for ranks that drew nothing: the forward must not be DDP's.
        self.register_buffer("scale", torch.ones(1))

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.out(self.dropout(torch.tanh(self.scale * self.hidden(inputs))))}


def seeded_net(seed: int = 0, **kwargs: Any) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(**kwargs)


def losses_of(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"], labels, reduction="none")


def make_trainer(
    output_dir: Path,
    *,
    model: nn.Module | None = None,
    model_init: Callable[[], nn.Module] | None = None,
    records: int | Records = 60,
    callbacks: Any = None,
    **options: Any,
) -> DCSGDTrainer:
    """B = 8 over all ranks, 6 steps, nothing logged, saved or evaluated, unless the options say otherwise."""
    defaults = {
        "recipe": "none",
        "accountant": "rdp",
        "per_device_train_batch_size": 8 // WORLD_SIZE,
        "max_steps": 6,
        "noise_multiplier": 1.0,
        "learning_rate": 1e-2,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_cpu": True,
    }
    return DCSGDTrainer(
        model=seeded_net() if model is None and model_init is None else model,
        model_init=model_init,
        args=DCSGDTrainingArguments(output_dir=str(output_dir / "run"), **(defaults | options)),
        train_dataset=Records(records) if isinstance(records, int) else records,
        eval_dataset=Records(21),
        per_example_loss_func=losses_of,
        callbacks=callbacks,
    )


@contextmanager
def patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def global_draw(step: int) -> np.ndarray:
    """The fixed draw of a step over all ranks; the second is empty, so that a step of noise alone is among them."""
    if step == 1:
        return np.array([], dtype=np.int64)
    return np.flatnonzero(np.random.default_rng(100 + step).random(LAYOUT_RECORDS) < LAYOUT_BATCH / LAYOUT_RECORDS)


@contextmanager
def fixed_draws() -> Iterator[None]:
    """Every rank gets its part of `global_draw`."""
    step = iter(range(10_000))

    def draw(self: PoissonBatchSampler) -> np.ndarray:
        indices = global_draw(next(step))
        return indices[indices % self.world_size == self.rank]

    with patched(PoissonBatchSampler, "draw", draw):
        yield


@contextmanager
def recorded_releases() -> Iterator[list[dict[str, Any]]]:
    """What goes into each release on this rank, before noise and sum, and what comes out of it."""
    seen: list[dict[str, Any]] = []
    counts = torch.zeros(20)
    original_factors, original_release = DPMechanism.clip_factors, DPMechanism.release

    def clip_factors(self: DPMechanism, per_example_norms: Tensor, *args: Any) -> Tensor:
        counts.add_(self.threshold.side_contribution(per_example_norms))
        return original_factors(self, per_example_norms, *args)

    def release(self: DPMechanism, clipped_sum: Tensor) -> Any:
        entry = {
            "clipped_sum": clipped_sum.clone(),
            "counts": counts.clone(),
            "sensitivity": self.threshold.sensitivity,
        }
        counts.zero_()
        result = original_release(self, clipped_sum)
        noisy_counts = torch.tensor(result.values["noisy_histogram"])
        seen.append(entry | {"noisy_gradient": result.noisy_gradient.clone(), "noisy_counts": noisy_counts})
        return result

    with patched(DPMechanism, "clip_factors", clip_factors), patched(DPMechanism, "release", release):
        yield seen


@contextmanager
def recorded_stacks(steps_before: Callable[[], int]) -> Iterator[list[tuple[int, Tensor, Tensor]]]:
    """What each forward gets on this rank: the step, inputs, and which rows of them are one unit."""
    seen: list[tuple[int, Tensor, Tensor]] = []
    original = PrivateStep.accumulate

    def accumulate(self: PrivateStep, stack: Any) -> Tensor:
        seen.append((steps_before(), stack["inputs"].clone(), stack[UNIT_ENTRY].clone()))
        return original(self, stack)

    with patched(PrivateStep, "accumulate", accumulate):
        yield seen


def gradient_noise(trainer: DCSGDTrainer, releases: list[dict[str, Any]]) -> Tensor:
    """Measured noise of the gradients of all releases, in units of σ_T·C."""
    assert trainer.plan is not None
    found = []
    for entry in releases:
        total = entry["clipped_sum"].clone()
        if WORLD_SIZE > 1:
            torch.distributed.all_reduce(total)
        drawn = entry["noisy_gradient"].double() * trainer.plan.expected_batch_size - total.double()
        found.append(drawn / (trainer.plan.grad_noise_multiplier * entry["sensitivity"]))
    return torch.cat(found)


def digest(trainer: DCSGDTrainer) -> str:
    """One hash over every bit of the parameters and over what the threshold holds (C and R)."""
    assert trainer.mechanism is not None
    state = hashlib.sha256(json.dumps(trainer.mechanism.threshold.state_dict(), sort_keys=True).encode())
    for parameter in trainer.model.parameters():
        state.update(parameter.detach().numpy().tobytes())
    return state.hexdigest()


class EachStep(TrainerCallback):
    """Keeps a digest of every step; stops the loop after `stop_at`, as a user's own callback might."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.trainer: DCSGDTrainer | None = None
        self.values: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.trainer is not None:
            self.values.append(digest(self.trainer))
        control.should_training_stop = control.should_training_stop or state.global_step == self.stop_at
        return control


def error_of(action: Callable[[], Any]) -> str:
    """The error that this rank saw."""
    try:
        action()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# --- scenarios -------------------------------------------------------------------------------------------------------


def layout(directory: Path) -> dict[str, Any]:
    """1 × 32, 2 × 16 or 4 × 8 on the same draws with the same (unsafe) noise."""
    trainer = make_trainer(
        directory,
        records=LAYOUT_RECORDS,
        per_device_train_batch_size=LAYOUT_BATCH // WORLD_SIZE,
        max_steps=LAYOUT_STEPS,
        unsafe_noise_seed=UNSAFE_SEED,
    )
    with fixed_draws(), recorded_releases() as releases:
        trainer.train()
    return {"releases": releases, "parameters": nn.utils.parameters_to_vector(trainer.model.parameters()).detach()}


def noise(directory: Path) -> dict[str, Any]:
    """Measured noise over more than 10⁶ coordinates, in units of σ_T·C."""
    trainer = make_trainer(
        directory,
        model=seeded_net(width=NOISE_WIDTH),
        records=LAYOUT_RECORDS,
        per_device_train_batch_size=LAYOUT_BATCH // WORLD_SIZE,
        max_steps=NOISE_STEPS,
        learning_rate=1e-4,
    )
    with recorded_releases() as releases:
        trainer.train()
    drawn = gradient_noise(trainer, releases)
    return {
        "coordinates": len(drawn),
        "ratio": drawn.square().mean().sqrt().item(),
        "mean": drawn.mean().item(),
        "thresholds": [entry["sensitivity"] for entry in releases],
    }


def lockstep(directory: Path) -> dict[str, Any]:
    """Many steps of B = one record per rank: about a third of the local draws are empty. Seeds differ by rank."""
    draws: list[list[int]] = []
    original = PoissonBatchSampler.draw

    def draw(self: PoissonBatchSampler) -> np.ndarray:
        drawn = original(self)
        draws.append(drawn.tolist())
        return drawn

    each_step = EachStep()
    trainer = make_trainer(
        directory,
        model=seeded_net(seed=RANK, dropout=0.3),
        records=LOCKSTEP_RECORDS,
        per_device_train_batch_size=1,
        histogram_rule="paper",  # which moves even for so few records
        max_steps=LOCKSTEP_STEPS,
        seed=100 + RANK,
        callbacks=[each_step],
    )
    each_step.trainer = trainer
    with patched(PoissonBatchSampler, "draw", draw), recorded_releases() as releases:
        trainer.train()
    assert trainer.plan is not None
    units = []
    for entry in releases:
        counts = entry["counts"].clone()
        if WORLD_SIZE > 1:
            torch.distributed.all_reduce(counts)
        units.append(
            (entry["noisy_counts"].double() - counts.double()) / trainer.plan.settings["histogram_noise_multiplier"]
        )
    return {
        "draws": draws,
        "digests": each_step.values,
        "thresholds": [entry["sensitivity"] for entry in releases],
        "count_noise_ratio": torch.cat(units).square().mean().sqrt().item(),
    }


def inclusion(directory: Path) -> dict[str, Any]:
    """Draws of the sampler that the trainer makes for this rank."""
    trainer = make_trainer(directory, records=LOCKSTEP_RECORDS, per_device_train_batch_size=1)
    sampler = trainer.get_train_dataloader().batch_sampler
    mask = np.zeros((INCLUSION_DRAWS, LOCKSTEP_RECORDS), dtype=bool)
    for row in mask:
        row[sampler.draw()] = True
    return {"mask": mask}


def units(directory: Path) -> dict[str, Any]:
    """A run that protects owners of several records: what reaches each forward, the noise of releases; more draws."""
    records = OwnedRecords()
    trainer = make_trainer(
        directory,
        records=records,
        privacy_unit="user_id",
        max_rows_per_unit=UNIT_CAP,
        per_device_train_batch_size=8 // WORLD_SIZE // 2,
        gradient_accumulation_steps=2,
        max_steps=UNIT_STEPS,
        learning_rate=1e-3,
    )
    with recorded_releases() as releases, recorded_stacks(lambda: len(releases)) as stacks:
        trainer.train()
    assert trainer.plan is not None
    sampler = trainer.get_train_dataloader().batch_sampler
    draws = [unit for _ in range(UNIT_DRAWS) for part in sampler.split(sampler.draw()) for unit in part]
    entered = []  # (step, stack, the rows that a unit has in it)
    for number, (step, inputs, of_row) in enumerate(stacks):
        rows = np.array(records.find(inputs))
        entered += [(step, number, rows[of_row.numpy() == unit].tolist()) for unit in of_row.unique().tolist()]
    return {
        "draws": draws,
        "entered": entered,
        "sums": [entry["clipped_sum"] for entry in releases],
        "rate": trainer.plan.sampling_rate,
        "noise": gradient_noise(trainer, releases).square().mean().sqrt().item(),
    }


def seeded(directory: Path) -> dict[str, Any]:
    """Two runs with the same unsafe_noise_seed, other global seeds, and rows fetched here or in a worker process."""
    digests = []
    for attempt in range(2):
        trainer = make_trainer(
            directory / str(attempt),
            unsafe_noise_seed=UNSAFE_SEED,
            per_device_train_batch_size=8 // WORLD_SIZE // 2,
            gradient_accumulation_steps=2,
            seed=attempt,
            dataloader_num_workers=attempt,
        )
        trainer.train()
        digests.append(digest(trainer))
    return {"digests": digests}


def disagreement(directory: Path) -> dict[str, Any]:
    """One rank has other public numbers than the rest."""
    options: dict[str, dict[str, Any]] = {
        "dataset_size": {"records": 60 + RANK},
        "batch_size": {"per_device_train_batch_size": 4 + 4 * RANK},
        "steps": {"max_steps": 6 + RANK},
        "noise": {"noise_multiplier": 1.0 + RANK},
        "strategy": {"clipping": "dc_sgd_p" if RANK else "dc_sgd_e"},
        "learning_rate": {"learning_rate": 1e-2 * (1 + RANK)},
        "layers": {"trainable_layers": "hidden.weight" if RANK else "hidden.weight,hidden.bias"},
        "model": {"model": seeded_net(width=8 + RANK)},
    }
    return {name: error_of(make_trainer(directory / name, **option).train) for name, option in options.items()}


def interrupted(directory: Path) -> dict[str, Any]:
    """A run of 6 steps stopped after 3, the last checkpoint being that of step 2; then resumed in several ways."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    make_trainer(directory, callbacks=[EachStep(stop_at=3)], **settings).train()
    checkpoint = get_last_checkpoint(str(directory / "run"))
    assert checkpoint is not None
    name = Path(checkpoint).name

    def resume(**options: Any) -> DCSGDTrainer:
        trainer = make_trainer(directory, **(settings | options))
        trainer.train(resume_from_checkpoint=str(directory / "run" / name))
        return trainer

    refusals = {
        "batch_size": error_of(lambda: resume(per_device_train_batch_size=8)),
        "noise": error_of(lambda: resume(noise_multiplier=2.0)),
        "one_rank_anew": error_of(lambda: resume() if RANK == 0 else make_trainer(directory, **settings).train()),
    }
    finished = resume()
    assert finished.mechanism is not None
    return {
        "checkpoint": name,
        "refusals": refusals,
        "global_step": finished.state.global_step,
        "charged": finished.mechanism.charged,
        "exhausted": error_of(resume),
        "digest": digest(finished),
    }


def two_then_one(directory: Path) -> dict[str, Any]:
    """First half on this many processes; the test goes on with another number."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    trainer = make_trainer(directory, callbacks=[EachStep(stop_at=3)], **settings)
    trainer.train()
    return {"digest": digest(trainer)}


def own_disks(directory: Path) -> dict[str, Any]:
    """Machines without a common disk: each saves, and resumes from, its own checkpoint."""
    directory = directory / f"machine{RANK}"
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "save_on_each_node": True}
    make_trainer(directory, callbacks=[EachStep(stop_at=3)], **settings).train()
    trainer = make_trainer(directory, **settings)
    trainer.train(resume_from_checkpoint=str(directory / "run" / "checkpoint-3"))
    assert trainer.mechanism is not None
    return {"digest": digest(trainer), "step": trainer.state.global_step, "charged": trainer.mechanism.charged}


def search(directory: Path) -> dict[str, Any]:
    """Two trials of a search, which transformers steers from the main process."""
    trainer = make_trainer(directory, model_init=lambda: seeded_net())
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2)},
        compute_objective=lambda metrics: metrics["eval_loss"],
        n_trials=2,
        backend="optuna",
    )
    assert (best is not None) == (RANK == 0)
    assert trainer.search_cost is not None
    return {"cost": trainer.search_cost.describe()}


def whole_job(directory: Path) -> dict[str, Any]:
    """Logging, evaluation, checkpoints, the best model at the end, a final save, and a prediction."""
    trainer = make_trainer(
        directory,
        save_strategy="steps",
        eval_strategy="steps",
        save_steps=2,
        eval_steps=2,
        logging_strategy="steps",
        logging_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        log_train_loss="private",
        target_epsilon=20.0,
        noise_multiplier=None,
        disable_tqdm=False,
    )
    warnings, printed = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(warnings)
    logging.getLogger("hf_dcsgd").addHandler(handler)
    with contextlib.redirect_stdout(printed):
        output = trainer.train()
    logging.getLogger("hf_dcsgd").removeHandler(handler)
    trainer.save_model(str(directory / "final"))
    predictions = trainer.predict(Records(21)).predictions
    return {
        "digest": digest(trainer),
        "metrics": output.metrics,
        "history": trainer.state.log_history,
        "best": trainer.state.best_model_checkpoint,
        "evaluation": trainer.evaluate(),
        "losses_of_a_bert": losses_of_a_bert(directory),
        "predictions": torch.as_tensor(predictions),
        "epsilon": trainer.epsilon(),
        "printed": printed.getvalue(),
        "warnings": warnings.getvalue(),
    }


def losses_of_a_bert(directory: Path) -> tuple[float, float]:
    """What evaluation over all ranks says, and the loss of the model on all rows."""
    model, rows = tiny_bert(), text_rows(16)
    trainer = DCSGDTrainer(model, private_args(directory / "bert"), eval_dataset=rows, data_collator=pad)
    found = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        return found, float(model(**pad(rows)).loss)


def collectives(directory: Path) -> dict[str, Any]:
    """Every call of torch.distributed from the second step to the last, without logging and with it."""
    seen: dict[str, Any] = {}
    for name, options in {
        "plain": {},
        "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        "logged": {"logging_strategy": "steps", "logging_steps": 1},
    }.items():
        watch = FromFirstToLastStep(last=6)
        trainer = make_trainer(directory / name, callbacks=[watch], **options)
        trainer.train()
        seen[name] = watch.counter.calls
    # What the count must be able to see: a backward pass through DDP's reducer.
    with CollectiveCounter() as counter:
        trainer.model_wrapped(torch.ones(2, FEATURES))["logits"].sum().backward()
    return seen | {"reducer": counter.calls, "d": sum(p.numel() for p in trainer.model.parameters())}


def dying(directory: Path) -> dict[str, Any]:
    """One rank dies by SIGKILL (or stops answering) in its fifth step: charged, and not yet summed over ranks."""
    kind = getattr(signal, os.environ.get("VICTIM_SIGNAL", "SIGKILL"))
    original_charge, original_release = PrivacyLedger.charge, DPMechanism.release

    def die() -> None:
        (directory / "killed").touch()
        os.kill(os.getpid(), kind)

    def charge(self: PrivacyLedger, step: int) -> int:
        charged = original_charge(self, step)
        if charged == 5:
            die()
        return charged

    def release(self: DPMechanism, clipped_sum: Tensor) -> Any:
        if self.released == 4:
            die()
        return original_release(self, clipped_sum)

    # The main process alone charges; another one has nothing left to do before the sum but to enter the release.
    main_dies, other_dies = patched(PrivacyLedger, "charge", charge), patched(DPMechanism, "release", release)
    is_victim = int(os.environ["VICTIM_RANK"]) == RANK
    with (main_dies if RANK == 0 else other_dies) if is_victim else contextlib.nullcontext():
        make_trainer(directory, save_strategy="steps", save_steps=3, max_steps=8).train()
    return {}


def resumed(directory: Path) -> dict[str, Any]:
    """Goes on where `dying` left off."""
    directory = directory.parent / "dying"
    trainer = make_trainer(directory, save_strategy="steps", save_steps=3, max_steps=8)
    checkpoint = get_last_checkpoint(str(directory / "run"))
    trainer.train(resume_from_checkpoint=checkpoint)
    assert trainer.mechanism is not None
    return {
        "checkpoint": Path(checkpoint or "").name,
        "global_step": trainer.state.global_step,
        "charged": trainer.mechanism.charged,
        "digest": digest(trainer),
    }


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        layout,
        noise,
        lockstep,
        inclusion,
        units,
        seeded,
        disagreement,
        interrupted,
        two_then_one,
        own_disks,
        search,
        whole_job,
        collectives,
        dying,
        resumed,
    )
}


def run(output_dir: Path, name: str) -> None:
    directory = output_dir / name
    directory.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    # The page with its figures takes longer than the runs themselves; one scenario writes it.
    without_report = patched(report, "try_to_write_report", lambda run_dir: None)
    with contextlib.nullcontext() if name == "whole_job" else without_report:
        torch.save(SCENARIOS[name](directory), directory / f"rank{RANK}.pt")
    print(f"rank {RANK}: {name} took {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "COLLECTIVE_TIMEOUT" in os.environ:
        # transformers passes ddp_timeout on for GPUs only; a group that exists already is kept.
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=int(os.environ["COLLECTIVE_TIMEOUT"])))
    gc.freeze()  # accelerate collects at every start of a run, also what was imported
    for scenario in sys.argv[2:]:
        run(Path(sys.argv[1]), scenario)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
