"""What the processes of `test_sharding.py` run: `sharding_worker.py DIRECTORY scenario …` on every rank.

As in `distributed_worker.py`, a scenario returns what this rank saw, which is written to `<scenario>/rank<r>.pt`.
"""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from architectures import DECODER, randomized
from distributed_worker import EachStep, error_of, patched, recorded_releases
from peft import LoraConfig, get_peft_model
from tiny_tasks import pad, private_args, text_rows, tiny_bert
from torch import Tensor, nn

from hf_dcsgd import DCSGDTrainer
from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.privacy.sampling import PoissonBatchSampler
from hf_dcsgd.reporting import report
from hf_dcsgd.sharding import trunk
from hf_dcsgd.sharding.lockstep import Lockstep, NotedAllGather
from hf_dcsgd.sharding.memory import rank_memory
from hf_dcsgd.sharding.step import ShardedStep
from hf_dcsgd.tasks.layer_selection import prepare_layers

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SEED, STEPS, RECORDS, BATCH = 11, 4, 48, 24
SHARDED: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}}
PLAIN: dict[str, Any] = {}


# --- models and rows -------------------------------------------------------------------------------------------------


def with_lora(model: nn.Module, task: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type=task))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zeros at first, so that nothing would reach the other half of an adapter
                nn.init.normal_(parameter, std=0.1)
    return adapted


def llama_lm() -> nn.Module:
    return with_lora(randomized(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER))), "CAUSAL_LM")


def qwen3_classifier() -> nn.Module:
    config = hf.Qwen3Config(**DECODER, head_dim=8)
    return with_lora(randomized(lambda: hf.Qwen3ForSequenceClassification(config)), "SEQ_CLS")


def tied_qwen3_lm() -> nn.Module:
    config = hf.Qwen3Config(**{**DECODER, "head_dim": 8, "tie_word_embeddings": True})
    return with_lora(randomized(lambda: hf.Qwen3ForCausalLM(config)), "CAUSAL_LM")


def bf16_llama_lm() -> nn.Module:
    """The trunk in half precision, the adapters in fp32."""
    adapted = with_lora(randomized(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER))).bfloat16(), "CAUSAL_LM")
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": tiny_bert,
    "llama": llama_lm,
    "qwen3": qwen3_classifier,
    "tied qwen3": tied_qwen3_lm,
    "bf16 llama": bf16_llama_lm,
}


def as_text(rows: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Rows of which every token is to be predicted."""
    batch = pad(rows)
    return {**batch, "labels": batch["input_ids"].where(batch["attention_mask"].bool(), -100)}


def make_trainer(directory: Path, name: str = "bert", model: nn.Module | None = None, **options: Any) -> DCSGDTrainer:
    """B = 24 over all ranks and 4 steps, with an unsafe seed, unless the options say otherwise."""
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


# --- what is looked at -----------------------------------------------------------------------------------------------


def global_draw(step: int) -> np.ndarray:
    """The draw of a step over all ranks: the second is empty, the third gives rank 0 everything."""
    if step == 1:
        return np.array([], dtype=np.int64)
    drawn = np.flatnonzero(np.random.default_rng(step).random(RECORDS) < BATCH / RECORDS)
    return drawn[drawn % 12 == 0] if step == 2 else drawn


@contextmanager
def fixed_draws() -> Iterator[None]:
    step = iter(range(10_000))

    def draw(self: PoissonBatchSampler) -> np.ndarray:
        indices = global_draw(next(step))
        return indices[indices % self.world_size == self.rank]

    with patched(PoissonBatchSampler, "draw", draw):
        yield


@contextmanager
def recorded_norms() -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    original = DPMechanism.clip_factors

    def clip_factors(self: DPMechanism, per_example_norms: Tensor, *args: Any) -> Tensor:
        seen.append(per_example_norms.clone())
        return original(self, per_example_norms, *args)

    with patched(DPMechanism, "clip_factors", clip_factors):
        yield seen


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def digest(model: nn.Module) -> str:
    """One hash over every bit of all weights, gathered where they are in pieces: call it on all ranks."""
    state = hashlib.sha256()
    for name, parameter in model.named_parameters():
        state.update(name.encode() + whole(parameter).float().numpy().tobytes())
    return state.hexdigest()


class HeldBytes(hf.TrainerCallback):
    """Notes what this rank holds of the parameters, after steps and after evaluations."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen.append(nbytes(map(trunk.held_part, model.parameters())))

    on_evaluate = on_step_end


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def watched_gathers(model: nn.Module) -> Iterator[dict[str, int]]:
    """The most bytes of parameters that this rank held at any gather: its pieces, what was whole, what comes in."""
    peaks = {"peak": 0, "forward_peak": 0}
    original, idle = NotedAllGather.__call__, nbytes(map(trunk.held_part, model.parameters()))

    def gather(self: NotedAllGather, output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        frozen = [p for p in model.parameters() if not p.requires_grad]
        now = idle + nbytes(p for p in frozen if not hasattr(p, "full_tensor")) + nbytes([output_tensor])
        is_backward = torch._C._current_graph_task_id() != -1
        for name in ("peak",) if is_backward else ("peak", "forward_peak"):
            peaks[name] = max(peaks[name], now)
        return original(self, output_tensor, *args, **kwargs)

    with patched(NotedAllGather, "__call__", gather):
        yield peaks


def trained(directory: Path, name: str, **options: Any) -> dict[str, Any]:
    """A run on fixed draws, what was released in it, and the model that came out."""
    held = HeldBytes()
    trainer = make_trainer(directory, name, **{"callbacks": [held], **options})
    with (
        fixed_draws(),
        recorded_norms() as norms,
        recorded_releases() as releases,
        watched_gathers(trainer.model) as peaks,
    ):
        trainer.train()
    found = {
        "releases": releases,
        "norms": torch.cat(norms) if norms else torch.zeros(0),
        "digest": digest(trainer.model),
        "parameters": torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad]),
        "history": trainer.state.log_history,
        "held": held.seen,
        "class": type(trainer.model).__name__,
    }
    if trainer.sharded is not None:
        sharded, own = trainer.sharded, nbytes(p for p in trainer.model.parameters() if p.requires_grad)
        sizes = {"frozen": sharded.frozen_bytes, "block": sharded.block_bytes, "rest": sharded.rest_bytes}
        found |= {"bytes": {**sizes, "trained": own}, "groups": sharded.names, **peaks}
    return found


def variants() -> dict[str, tuple[str, dict[str, Any]]]:
    """Runs by name: a model, and options."""
    evaluating = {"eval_strategy": "steps", "eval_steps": 2}
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    accumulating = {"gradient_accumulation_steps": 4}
    chosen = {
        "bert": ("bert", evaluating),
        "llama": ("llama", accumulating | checkpointing),
    }
    if os.environ.get("VARIANTS") == "all":
        chosen |= {f"{name}, accumulating": (name, accumulating | evaluating) for name in MODELS}
        chosen |= {f"{name}, checkpointing": (name, checkpointing) for name in MODELS}
        chosen |= {f"{name}, evaluating": (name, evaluating) for name in MODELS}
    return chosen


# --- scenarios -------------------------------------------------------------------------------------------------------


def plain(directory: Path) -> dict[str, Any]:
    return {name: trained(directory / name, model, **options) for name, (model, options) in variants().items()}


def sharded(directory: Path) -> dict[str, Any]:
    return {
        name: trained(directory / name, model, **(options | SHARDED)) for name, (model, options) in variants().items()
    }


LARGE: dict[str, Callable[[], nn.Module]] = {
    "bert-base": lambda: hf.BertForSequenceClassification(hf.BertConfig(num_labels=3)),
    "llama": lambda: with_lora(
        hf.LlamaForCausalLM(
            hf.LlamaConfig(
                vocab_size=32000,
                hidden_size=768,
                intermediate_size=2048,
                num_hidden_layers=8,
                num_attention_heads=12,
                num_key_value_heads=4,
            )
        ).bfloat16(),
        "CAUSAL_LM",
    ),
}


def measured(directory: Path) -> dict[str, Any]:
    """Bytes of parameters that this rank holds in a step, and what was estimated; models of a real size, if asked."""
    found = {}
    for name, make in (LARGE if "LARGE" in os.environ else {key: MODELS[key] for key in ("bert", "llama")}).items():
        model = make()
        prepare_layers(model, None)
        estimate = rank_memory(model, WORLD_SIZE)
        trainer = make_trainer(directory / name, model=model, max_steps=1, **SHARDED)
        with watched_gathers(trainer.model) as peaks:
            trainer.train()
        found[name] = {"estimate": estimate, "held": nbytes(map(trunk.held_part, trainer.model.parameters())), **peaks}
    return found


def saved(directory: Path) -> dict[str, Any]:
    """Checkpoints of plain and sharded runs of the same seed, and runs that resume from them."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    found: dict[str, Any] = {}
    for name in ("bert", "llama"):
        for kind, options in (("plain", PLAIN), ("sharded", SHARDED)):
            make_trainer(directory / name / kind, name, **settings, **options, callbacks=[EachStep(stop_at=3)]).train()
        trainer = make_trainer(directory / name / "sharded", name, **settings, **SHARDED)
        trainer.train(resume_from_checkpoint=True)
        trainer.save_model(str(directory / name / "final"))
        found[name] = {"digest": digest(trainer.model), "step": trainer.state.global_step, "charged": charges(trainer)}
    best = make_trainer(
        directory / "best",
        **SHARDED,
        **(settings | {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}),
    )
    best.train()
    found["best"] = {
        "evaluated": best.evaluate()["eval_loss"],
        "best": best.state.best_metric,
        "predictions": torch.as_tensor(best.predict(text_rows(13, seed=1)).predictions),
    }
    return found


def resumed(directory: Path) -> dict[str, Any]:
    """Goes on from a checkpoint of another number of ranks, or after a rank was killed."""
    run = directory.parent / os.environ["RESUME_FROM"]
    trainer = make_trainer(run, os.environ["RESUME_MODEL"], save_strategy="steps", save_steps=2, **SHARDED)
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
    make_trainer(directory, save_strategy="steps", save_steps=2, **SHARDED).train()
    return {}


def charges(trainer: DCSGDTrainer) -> int:
    assert trainer.mechanism is not None
    return trainer.mechanism.charged


class AtStep(hf.TrainerCallback):
    """Calls an action at the end of a step."""

    def __init__(self, step: int, action: Callable[[Any], Any]) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.action(model)


def broken_lockstep(directory: Path) -> dict[str, Any]:
    """A gather that one rank noted and the others did not; and a callback that runs the model, on all ranks here."""
    found: dict[str, Any] = {}

    def attempt(name: str, action: Callable[[DCSGDTrainer], Any]) -> None:
        callback = AtStep(2, lambda model: action(trainer))
        trainer = make_trainer(directory / name, **SHARDED, callbacks=[callback])
        before: list[str] = []
        trainer.add_callback(AtStep(2, lambda model: before.append(digest(model))))
        error = error_of(trainer.train)
        assert trainer.mechanism is not None
        found[name] = {
            "error": error,
            "charged": trainer.mechanism.charged,
            "released": trainer.mechanism.released,
            "unmoved": before[:1] == [digest(trainer.model)],
        }

    def note(trainer: DCSGDTrainer) -> None:
        assert trainer.sharded is not None
        if RANK == 1:
            trainer.sharded.log.note("one more")

    attempt("noted", note)
    attempt("callback", lambda trainer: trainer.model(**pad(text_rows(2))))
    return found


def uneven(directory: Path) -> dict[str, Any]:
    """Ranks that run as many passes as they have stacks: one of them waits for gathers that never come."""
    with patched(Lockstep, "even_out", lambda self, stacks: stacks), fixed_draws():
        trainer = make_trainer(directory, **SHARDED, ddp_timeout=8)
        error = error_of(trainer.train)
    assert trainer.mechanism is not None
    return {"error": error, "charged": trainer.mechanism.charged, "released": trainer.mechanism.released}


class WritingBlock(nn.Module):
    """Writes its own weight anew, as it was."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(6, 6), writes

    def forward(self, features: Tensor) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.linear.weight.add_(0 * features.sum())
        return torch.tanh(self.linear(features))


class Blocks(nn.Module):
    def __init__(self, writes: bool = False, has_odd_parameter: bool = False, calls_head: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([WritingBlock(writes) for _ in range(2)]).requires_grad_(False)
        self.head, self.calls_head = nn.Linear(6, 3), calls_head
        self.odd = nn.Parameter(torch.ones(6)) if has_odd_parameter else None

    def forward(self, features: Tensor) -> Tensor:
        for block in self.blocks:
            features = block(features)
        features = features if self.odd is None else features * self.odd
        used = self.head(features)
        return used if self.calls_head else used + nn.functional.linear(features, self.head.weight)


def blocks_trainer(directory: Path, **settings: Any) -> DCSGDTrainer:
    torch.manual_seed(0)
    rows = [{"features": torch.randn(6), "labels": torch.tensor(k % 3)} for k in range(RECORDS)]
    args = private_args(directory / "run", per_device_train_batch_size=4, max_steps=2, unsafe_noise_seed=1, **SHARDED)
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
        assert trainer.sharded is not None
        before = trainer.sharded.held_bytes()
        trainer.evaluate()
        found["left whole"] = trainer.sharded.held_bytes() - before
        trainer.sharded.free()
        found["left whole and trained"] = error_of(trainer.train)
    trainer = make_trainer(directory / "hooked", **SHARDED)
    trainer.is_distributed_loading_by_transformers = True  # as of a model that transformers loads in pieces
    found["averaging hook"] = error_of(trainer.train)
    return found


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    function.__name__: function
    for function in (plain, sharded, measured, saved, resumed, dying, broken_lockstep, uneven, refused)
}


def run(output_dir: Path, name: str) -> None:
    directory = output_dir / name
    directory.mkdir(parents=True, exist_ok=True)
    with patched(report, "try_to_write_report", lambda run_dir: None):
        torch.save(SCENARIOS[name](directory), directory / f"rank{RANK}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()
    for scenario in sys.argv[2:]:
        run(Path(sys.argv[1]), scenario)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
