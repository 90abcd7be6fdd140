"""What needs no second process: refusals, messages, and the main process' errors. The rest is in test_distributed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distributed_worker as worker
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from hf_dcsgd import DCSGDTrainingArguments
from hf_dcsgd.runs import processes
from hf_dcsgd.runs.processes import (
    on_main_process,
    public_numbers,
    quiet_replica,
    refuse_lone_processes,
    refuse_sharding_environment,
    refuse_split_model,
    require_agreement,
)

FLAGS = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}


# --- sharding is refused, with the reason and the alternative --------------------------------------------------------


@pytest.mark.parametrize(("flag", "name"), FLAGS.items())
def test_sharding_asked_for_by_accelerate_is_refused(
    flag: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the package is missing: the refusal comes before transformers looks for it."""
    refuse_sharding_environment()
    trainer = worker.make_trainer(tmp_path)
    monkeypatch.setenv(flag, "true")
    with pytest.raises(ValueError, match=rf"{name} \({flag}=true\).*plain data parallelism.*LoRA"):
        DCSGDTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match=rf"{name} \({flag}=true\)"):
        trainer._refuse_incompatible()
    monkeypatch.setenv(flag, "false")
    refuse_sharding_environment()


@pytest.mark.parametrize(
    "option",
    [
        {"fsdp": True},
        {"fsdp": "full_shard"},
        {"fsdp": True, "fsdp_config": {"version": 2}},
        {"deepspeed": {"zero": 3}},
    ],
    ids=str,
)
def test_sharding_asked_for_by_arguments_is_refused(option: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be used for private training.*plain data parallelism"):
        DCSGDTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **option)


def test_several_gpus_in_one_process_are_refused_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(DCSGDTrainingArguments, "n_gpu", property(lambda self: 2))
    with pytest.raises(ValueError, match=r"2 GPUs in one process.*accelerate launch.*CUDA_VISIBLE_DEVICES"):
        worker.make_trainer(tmp_path)


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of this process alone, closed again."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_model_in_pieces_is_refused() -> None:
    model = worker.seeded_net()
    refuse_split_model(model, is_model_parallel=False)
    pieces = distribute_tensor(model.out.weight.detach(), init_device_mesh("cpu", (1,)))
    model.out.weight = nn.Parameter(pieces)
    with pytest.raises(ValueError, match=r"loaded in pieces \(out.weight and 0 more\).*tp_plan"):
        refuse_split_model(model, is_model_parallel=False)


@pytest.mark.usefixtures("process_group")
def test_a_wrapped_model_is_refused() -> None:
    for wrapped in (nn.DataParallel(worker.Net()), nn.parallel.DistributedDataParallel(worker.Net())):
        with pytest.raises(ValueError, match=rf"wrapped in {type(wrapped).__name__}.*pass model.module"):
            refuse_split_model(wrapped, is_model_parallel=False)


def test_a_model_over_several_devices_is_refused(tmp_path: Path) -> None:
    model = worker.seeded_net()
    model.hf_device_map = {"hidden": 0, "out": 1}
    with pytest.raises(ValueError, match=r"one device per process.*hf_device_map.*'out': 1"):
        worker.make_trainer(tmp_path, model=model)


def test_processes_that_do_not_find_each_other_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torchrun on a machine without GPU and without use_cpu: accelerate lets every process train alone."""
    refuse_lone_processes(1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuse_lone_processes(1)  # not a launcher's variable: no LOCAL_RANK beside it
    monkeypatch.setenv("LOCAL_RANK", "0")
    refuse_lone_processes(2)
    if not torch.cuda.is_available():
        # accelerate makes the group and then forgets it: no backend for the GPU, and use_cpu was not given.
        monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: None)
        with pytest.raises(
            ValueError, match=r"started 2 processes \(WORLD_SIZE\), but this one works with 1.*use_cpu"
        ):
            worker.make_trainer(tmp_path, use_cpu=False)


# --- agreement -------------------------------------------------------------------------------------------------------


def test_the_public_numbers_leave_out_what_may_differ(tmp_path: Path) -> None:
    def numbers(**options: Any) -> dict[str, Any]:
        trainer = worker.make_trainer(tmp_path, **options)
        assert trainer.plan is not None
        return public_numbers(trainer.plan, trainer.args, trainer.model)

    first = numbers()
    assert {"dataset_size", "expected_batch_size", "steps", "world_size", "noise_multiplier"} <= first.keys()
    assert first == numbers(seed=1, data_seed=2, disable_tqdm=False, dataloader_num_workers=1)
    for name, option in {
        "learning_rate": {"learning_rate": 0.5},
        "logging_steps": {"logging_steps": 7},
        "unsafe_noise_seed": {"unsafe_noise_seed": 7},
        "dataset_size": {"records": 61},
        "trainable parameters": {"trainable_layers": "out"},
        "gradient_accumulation_steps": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    }.items():
        assert numbers(**option)[name] != first[name]


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


def test_the_environment_is_clean_here() -> None:
    """Otherwise the tests above would prove nothing."""
    assert not [name for name in (*FLAGS, "LOCAL_RANK") if name in os.environ]
