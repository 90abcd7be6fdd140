"""What the processes of `test_sharding.py` run: `sharding_worker.py DIRECTORY scenario …` on every rank.

As in `distributed_worker.py`, a scenario returns what this rank saw, which is written to `<scenario>/rank<r>.pt`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from distributed_worker import EachStep, error_of, patched, recorded_releases
from sharded_models import LARGE, MODELS, Blocks
from sharding_watch import (
    BATCH,
    RECORDS,
    EveryStep,
    allowed_bytes,
    counted_leftovers,
    digest,
    fixed_draws,
    held_bytes,
    nbytes,
    recorded_norms,
    resident_bytes,
    trained_parameters,
    watched_weights,
)
from tiny_tasks import pad, private_args, text_rows
from torch import Tensor, nn

from hf_dcsgd import DCSGDTrainer
from hf_dcsgd.jobs.arguments import ModelArguments
from hf_dcsgd.jobs.models import load_pretrained
from hf_dcsgd.reporting import report
from hf_dcsgd.sharding import trunk
from hf_dcsgd.sharding.lockstep import Lockstep
from hf_dcsgd.sharding.memory import rank_memory
from hf_dcsgd.sharding.step import ShardedStep
from hf_dcsgd.tasks.layer_selection import prepare_layers

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SEED, STEPS = 11, 4
SHARDED: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}}


def as_text(rows: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Rows of which every token is to be predicted."""
    batch = pad(rows)
    return {**batch, "labels": batch["input_ids"].where(batch["attention_mask"].bool(), -100)}


def make_trainer(directory: Path, name: str = "bert", model: nn.Module | None = None, **options: Any) -> DCSGDTrainer:
    """B = 48 over all ranks and 4 steps, with an unsafe seed, unless the options say otherwise."""
    trainer_class, callbacks = options.pop("trainer_class", DCSGDTrainer), options.pop("callbacks", None)
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": BATCH // WORLD_SIZE // options.get("gradient_accumulation_steps", 1),
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "logging_strategy": "no",
        "unsafe_noise_seed": SEED,
    }
    model = MODELS[name]() if model is None else model
    is_text = "CausalLM" in type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
    return trainer_class(
        model,
        private_args(directory / "run", **(defaults | options)),
        train_dataset=text_rows(RECORDS),
        eval_dataset=text_rows(13, seed=1),
        data_collator=as_text if is_text else pad,
        callbacks=callbacks,
    )


def trained(
    directory: Path,
    model: nn.Module,
    stop_at: int | None = None,
    weights: Any = None,
    most: int = RECORDS,
    **options: Any,
) -> dict[str, Any]:
    """A run on fixed draws, what was released in it, and the model that came out."""
    every_step = EveryStep(weights)
    prepare_layers(model, None)
    sizes = {"allowed": allowed_bytes(model, WORLD_SIZE), "estimate": rank_memory(model, WORLD_SIZE)}
    with counted_leftovers() as left:
        trainer = make_trainer(directory, model=model, callbacks=[every_step, EachStep(stop_at)], **options)
    watch = nullcontext({}) if trainer.sharded is None else watched_weights(trainer.model)
    with fixed_draws(most), recorded_norms() as norms, recorded_releases() as releases, watch as bytes_seen:
        trainer.train()
    found = {
        "releases": releases,
        "norms": norms,
        "weights": every_step.weights,
        "digests": [*every_step.digests, digest(trainer.model)],
        "history": trainer.state.log_history,
        "held": every_step.held,
        "class": type(trainer.model).__name__,
    }
    if trainer.sharded is not None:
        found |= {**sizes, **bytes_seen, "left": max(left)}
    return found


EVALUATING = {"eval_strategy": "steps", "eval_steps": 2}
SAVING = {"save_strategy": "steps", "save_steps": 2}
BEST = {**EVALUATING, **SAVING, "load_best_model_at_end": True}
CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
ACCUMULATING = {"gradient_accumulation_steps": 4}
STOPPED = {"stop_at": 3}  # so that a step is left for those who resume
FEW: dict[str, dict[str, Any]] = {"bert": BEST | STOPPED, "llama": ACCUMULATING | CHECKPOINTING | SAVING | STOPPED}


def variants() -> dict[str, tuple[str, dict[str, Any]]]:
    """Runs by name: a model, and options."""
    if os.environ.get("VARIANTS") != "all":
        return {name: (name, options) for name, options in FEW.items()}
    settings = {"accumulating, evaluating": ACCUMULATING | EVALUATING, "checkpointing": CHECKPOINTING}
    return {f"{name}, {title}": (name, options) for name in MODELS for title, options in settings.items()}


# --- scenarios -------------------------------------------------------------------------------------------------------


def plain(directory: Path, at_weights_of: Path | None = None) -> dict[str, Any]:
    """Whole models; where the file of a rank is given, each step starts from the weights that it had there."""
    given = {} if at_weights_of is None else torch.load(at_weights_of, weights_only=False)
    return {
        name: trained(directory / name, MODELS[model](), weights=given.get(name, {}).get("weights"), **options)
        for name, (model, options) in variants().items()
    }


def sharded(directory: Path) -> dict[str, Any]:
    return {
        name: trained(directory / name, MODELS[model](), **(options | SHARDED))
        for name, (model, options) in variants().items()
    }


def large(directory: Path) -> dict[str, Any]:
    """Two steps of models of a real size."""
    return {
        name: trained(directory / name, make(), max_steps=2, most=6, **CHECKPOINTING, **SHARDED)
        for name, make in LARGE.items()
    }


def loading(directory: Path) -> dict[str, Any]:
    """Memory that this rank takes at most while it reads weights in half precision as fp32, and while it shards them.

    Read by the main process alone, as `accelerate launch` asks for by `fsdp_cpu_ram_efficient_loading`; then by all.
    """
    asked = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    model_args = ModelArguments(model_name_or_path=str(directory.parent / "checkpoint"))
    found: dict[str, Any] = {}
    for name, environment in (("by one", asked), ("by all", {})):
        os.environ |= environment
        args = private_args(directory / name, max_steps=1, **({} if environment else SHARDED))
        assert args.device.type == "cpu"  # which also makes the process group
        with resident_bytes() as when_read:
            _, model = load_pretrained(model_args, hf.AutoModelForSequenceClassification, "SEQ_CLS")
            torch.distributed.barrier()
        prepare_layers(model, None)
        sizes = {"whole": nbytes(model.parameters()), **allowed_bytes(model, WORLD_SIZE)}
        with resident_bytes() as when_sharded:
            trainer = DCSGDTrainer(model, args, train_dataset=text_rows(RECORDS), data_collator=pad)
        found[name] = {**sizes, "read": when_read[0], "sharded": when_sharded[0], "digest": digest(trainer.model)}
        del model, trainer
        for variable in environment:
            del os.environ[variable]
    return found


def continued(directory: Path) -> dict[str, Any]:
    """Runs that go on where those of `sharded` were stopped."""
    found: dict[str, Any] = {}
    for name, options in FEW.items():
        options = {key: value for key, value in options.items() if key != "stop_at"}
        trainer = make_trainer(directory.parent / "sharded" / name, name, **options, **SHARDED)
        trainer.train(resume_from_checkpoint=True)
        found[name] = {"digest": digest(trainer.model), "step": trainer.state.global_step, "charged": charges(trainer)}
        if "load_best_model_at_end" in options:
            found["best"] = {
                "evaluated": trainer.evaluate()["eval_loss"],
                "best": trainer.state.best_metric,
                "predictions": torch.as_tensor(trainer.predict(text_rows(13, seed=1)).predictions),
            }
        trainer.save_model(str(directory / name))
    return found


def resumed(directory: Path) -> dict[str, Any]:
    """Goes on after a rank was killed, maybe on another number of ranks."""
    trainer = make_trainer(directory.parent / "dying", **SAVING, **SHARDED)
    trainer.train(resume_from_checkpoint=True)
    return {"digest": digest(trainer.model), "step": trainer.state.global_step, "charged": charges(trainer)}


def dying(directory: Path) -> dict[str, Any]:
    """One rank is killed in its third step, in the middle of a pass."""
    if int(os.environ["VICTIM_RANK"]) == RANK:
        original = ShardedStep.accumulate

        def accumulate(self: ShardedStep, stack: Any) -> Tensor:
            if self.mechanism is not None and self.mechanism.released == 2:
                self.model.get_submodule("bert.encoder").register_forward_pre_hook(
                    lambda *_: os.kill(os.getpid(), signal.SIGKILL)
                )
            return original(self, stack)

        ShardedStep.accumulate = accumulate  # type: ignore[method-assign]
    make_trainer(directory, **SAVING, **SHARDED).train()
    return {}


def charges(trainer: DCSGDTrainer) -> int:
    assert trainer.mechanism is not None
    return trainer.mechanism.charged


class AfterFirstStep(hf.TrainerCallback):
    """Calls an action at the end of the first step."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.action()


def broken_lockstep(directory: Path) -> dict[str, Any]:
    """After one step, ranks run the blocks in different orders; or a callback runs the model, on all of them here."""
    found: dict[str, Any] = {}

    def attempt(name: str, action: Callable[[DCSGDTrainer], Any]) -> None:
        trainer = blocks_trainer(directory / name)
        before: list[str] = []
        trainer.add_callback(AfterFirstStep(lambda: before.append(digest(trainer.model))))
        trainer.add_callback(AfterFirstStep(lambda: action(trainer)))
        error = error_of(trainer.train)
        assert trainer.mechanism is not None
        found[name] = {
            "error": error,
            "charged": trainer.mechanism.charged,
            "released": trainer.mechanism.released,
            "unmoved": before == [digest(trainer.model)],
        }

    def swap(trainer: DCSGDTrainer) -> None:
        if RANK == 1:
            trainer.model.order.reverse()

    attempt("swapped", swap)
    attempt("callback", lambda trainer: trainer.model(torch.zeros(2, 6)))
    with patched(Lockstep, "holds", lambda self: True):
        attempt("swapped and unseen", swap)
    return found


def uneven(directory: Path) -> dict[str, Any]:
    """One rank runs a piece more than the other: it waits for gathers that never come, and so does the other."""
    original = Lockstep.even_out

    def even_out(self: Lockstep, micro_batches: Any) -> Any:
        first, *others = original(self, micro_batches)
        return [first + [{}] * RANK, *others]

    with patched(Lockstep, "even_out", even_out):
        trainer = blocks_trainer(directory, ddp_timeout=8)
        before = [parameter.detach().clone() for parameter in trained_parameters(trainer.model)]
        error = error_of(trainer.train)
    assert trainer.mechanism is not None
    return {
        "error": error,
        "charged": trainer.mechanism.charged,
        "released": trainer.mechanism.released,
        "unmoved": all(map(torch.equal, before, trained_parameters(trainer.model))),
    }


def blocks_trainer(directory: Path, ddp_timeout: int = 1800, **settings: Any) -> DCSGDTrainer:
    torch.manual_seed(0)
    rows = [{"features": torch.randn(6), "labels": torch.tensor(k % 3)} for k in range(RECORDS)]
    options = {"per_device_train_batch_size": 4, "max_steps": 2, "unsafe_noise_seed": 1, "ddp_timeout": ddp_timeout}
    args = private_args(directory / "run", **options, **SHARDED)
    return DCSGDTrainer(Blocks(**settings), args, train_dataset=rows)


def refused(directory: Path) -> dict[str, Any]:
    """What must not start, or must not go on, and what a change of ours would let through."""
    found = {
        "writes": error_of(blocks_trainer(directory / "writes", writes=True).train),
        "writes nothing": error_of(blocks_trainer(directory / "fine").train),
        "fallback": error_of(blocks_trainer(directory / "odd", has_odd_parameter=True).train),
        "slow path": error_of(blocks_trainer(directory / "slow", calls_head=False).train),
        "everything": error_of(lambda: make_trainer(directory / "all", trainable_layers="all", **SHARDED)),
        "classes": error_of(
            lambda: make_trainer(
                directory / "classes", **SHARDED | {"fsdp_config": {"transformer_layer_cls_to_wrap": ["NoLayer"]}}
            )
        ),
        "search": error_of(lambda: make_trainer(directory / "search", **SHARDED).hyperparameter_search()),
    }
    with patched(trunk, "_refuse_writes", lambda group, holders: None):
        found["unguarded writes"] = error_of(blocks_trainer(directory / "unguarded", writes=True).train)
    original = trunk.fully_shard
    with patched(trunk, "fully_shard", lambda *args, **kw: original(*args, **(kw | {"reshard_after_forward": None}))):
        trainer = make_trainer(directory / "default", **SHARDED)
        before = held_bytes(trainer.model)
        trainer.evaluate()
        found["left whole"] = held_bytes(trainer.model) - before
        assert trainer.sharded is not None
        trainer.sharded.free()
        found["left whole and trained"] = error_of(trainer.train)
    trainer = make_trainer(directory / "hooked", **SHARDED)
    trainer.is_distributed_loading_by_transformers = True  # as of a model that transformers loads in pieces
    found["averaging hook"] = error_of(trainer.train)
    return found


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function
    for function in (plain, sharded, large, loading, continued, resumed, dying, broken_lockstep, uneven, refused)
}


def run(output_dir: Path, name: str, **options: Any) -> None:
    directory = output_dir / name
    directory.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with patched(report, "try_to_write_report", lambda run_dir: None):
        torch.save(SCENARIOS[name](directory, **options), directory / f"rank{RANK}.pt")
    print(f"rank {RANK}: {name} took {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()
    for scenario in sys.argv[2:]:
        run(Path(sys.argv[1]), scenario)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
