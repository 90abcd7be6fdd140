"""What is assumed of transformers beyond its documentation, in one place: a release that changes it is named here."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from transformers import Seq2SeqTrainer, Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from worker_pool import WorkerPool

from hf_dcsgd import DCSGDSeq2SeqTrainer, DCSGDTrainer
from hf_dcsgd.checks.trainer_inputs import GUARDED_METHODS

# Methods that are overridden, with the parameters that the loop hands over.
OVERRIDDEN = {
    "train": ["resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "training_step": ["model", "inputs", "num_items_in_batch"],
    "compute_loss": ["model", "inputs", "return_outputs", "num_items_in_batch"],
    "get_train_dataloader": [],
    "get_eval_dataloader": ["eval_dataset"],
    "prediction_step": ["model", "inputs", "prediction_loss_only", "ignore_keys"],
    "get_batch_samples": ["epoch_iterator", "num_batches", "device"],
    "call_model_init": ["trial"],
    "log": ["logs", "start_time"],
    "floating_point_ops": ["inputs"],
    "save_model": ["output_dir", "_internal_call"],
    "push_to_hub": ["commit_message", "blocking", "token", "revision", "private", "kwargs"],
    "create_accelerator_and_postprocess": [],
    "_push_from_checkpoint": ["checkpoint_folder"],
}
# Parameters that not every release in the range of pyproject.toml has.
NOT_EVERYWHERE = {("push_to_hub", "private")}  # since 5.23
# Private methods that are called, and why there is no public way.
CALLED = {
    "_remove_unused_columns": ["dataset", "description"],  # the columns that the model takes
    "_get_collator_with_removed_columns": ["data_collator", "description"],  # the same for other datasets
    "_get_output_dir": ["trial"],  # where a trial of a search keeps its files
    "_finish_current_push": [],  # before another push is begun
}
# What the loop does, as its source says: (where, text that must be found there, what rests on it).
ASSUMED = (
    ("_inner_training_loop", "self.get_train_dataloader()", "ranks agree there, before the model is wrapped"),
    ("_inner_training_loop", "on_train_begin", "the run is started there, after the optimizer was made"),
    ("_run_epoch", "self.get_batch_samples(", "one call takes the micro-batches of one logical batch"),
    ("_run_epoch", "_set_sync_gradients(do_sync_step)", "`sync_gradients` says when a logical batch is complete"),
    ("_run_epoch", "self.training_step(model, inputs, num_items_in_batch)", "micro-batches are handed on as they are"),
    ("_save_checkpoint", "self.save_model(", "checkpoints are saved by the public method"),
)


def parameters(owner: type, method: str) -> list[str]:
    return [name for name in inspect.signature(getattr(owner, method)).parameters if name != "self"]


@pytest.mark.parametrize("method", OVERRIDDEN)
def test_overridden_methods_take_what_transformers_hands_them(method: str) -> None:
    theirs = parameters(Trainer, method)
    assert theirs == [name for name in OVERRIDDEN[method] if name in theirs or (method, name) not in NOT_EVERYWHERE]
    assert parameters(DCSGDTrainer, method) == OVERRIDDEN[method]


@pytest.mark.parametrize("method", CALLED)
def test_called_methods_are_there(method: str) -> None:
    assert parameters(Trainer, method) == CALLED[method]


def test_the_arguments_of_the_trainer_are_those_of_transformers_and_two_more() -> None:
    own = ["per_example_loss_func", "rows_per_example"]
    assert parameters(DCSGDTrainer, "__init__") == [*parameters(Trainer, "__init__"), *own]


def test_one_private_method_is_overridden() -> None:
    ours = {name for owner in DCSGDTrainer.__mro__ if "hf_dcsgd" in owner.__module__ for name in vars(owner)}
    private = {name for name in ours & set(dir(Trainer)) if name.startswith("_") and not name.startswith("__")}
    assert private == {"_push_from_checkpoint"}


@pytest.mark.parametrize(("method", "text", "reason"), ASSUMED, ids=lambda value: str(value)[:40])
def test_the_loop_does_what_is_assumed(method: str, text: str, reason: str) -> None:
    assert text in inspect.getsource(getattr(Trainer, method)), reason


def test_the_state_of_callbacks_is_saved_with_the_trainer(tmp_path) -> None:
    state = TrainerState(stateful_callbacks={"PrivacyCallback": {"args": {}, "attributes": {"saved": {"a": 1}}}})
    state.save_to_json(str(tmp_path / TRAINER_STATE_NAME))
    again = TrainerState.load_from_json(str(tmp_path / TRAINER_STATE_NAME))
    assert again.stateful_callbacks["PrivacyCallback"]["attributes"]["saved"] == {"a": 1}


def test_the_seq2seq_trainer_adds_evaluation_alone() -> None:
    """What the guarantee rests on is not overridden, and its `__init__`, which is passed over, sets one thing."""
    added = {
        name for name, value in vars(Seq2SeqTrainer).items() if callable(value) or isinstance(value, staticmethod)
    }
    known = {"__init__", "load_generation_config", "evaluate", "predict", "prediction_step", "_pad_tensors_to_max_len"}
    assert added == known
    assert all(getattr(DCSGDSeq2SeqTrainer, name) is getattr(DCSGDTrainer, name) for name in GUARDED_METHODS)
    source = inspect.getsource(Seq2SeqTrainer.__init__)
    assert re.findall(r"self\.([\w.]+) = ", source) == ["model.generation_config"]


def test_processes_import_the_release_under_test(
    workers: WorkerPool, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    script = tmp_path / "release.py"
    script.write_text("import transformers; print(transformers.__version__, transformers.__file__)")
    expected = f"{transformers.__version__} {transformers.__file__}"
    assert workers.run(1, [script]).output.strip() == expected
    assert importlib.metadata.version("transformers") == transformers.__version__, "what reports state"
    record_property("release", f"transformers {transformers.__version__}")
