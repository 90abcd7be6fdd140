"""Ways of launching and loading that split a model or a batch behind the clipping: refused, with the alternative."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tasks import feature_classifier, feature_rows, feature_trainer, private_args
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from hf_dcsgd import DCSGDTrainer, DCSGDTrainingArguments
from hf_dcsgd.checks.environment import refuse_lone_processes, refuse_sharding_environment, refuse_split_model

FLAGS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}


@pytest.mark.parametrize(("flag", "name"), FLAGS.items())
def test_sharding_asked_for_by_accelerate_is_refused(
    flag: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the package is missing: the refusal comes before transformers looks for it."""
    refuse_sharding_environment()
    args = private_args(tmp_path)
    monkeypatch.setenv(flag, "true")
    with pytest.raises(ValueError, match=rf"{name} \({flag}=true\).*plain data parallelism.*LoRA"):
        DCSGDTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match=rf"{name} \({flag}=true\)"):
        DCSGDTrainer(feature_classifier(), args, train_dataset=feature_rows())
    monkeypatch.setenv(flag, "false")
    refuse_sharding_environment()


@pytest.mark.parametrize(
    "option",
    [
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
        feature_trainer(tmp_path)


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of this process alone, closed again."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_model_in_pieces_is_refused() -> None:
    model = feature_classifier()
    refuse_split_model(model, is_model_parallel=False)
    pieces = distribute_tensor(model.classifier.weight.detach(), init_device_mesh("cpu", (1,)))
    model.classifier.weight = nn.Parameter(pieces)
    with pytest.raises(ValueError, match=r"loaded in pieces \(classifier.weight and 0 more\).*tp_plan"):
        refuse_split_model(model, is_model_parallel=False)


@pytest.mark.usefixtures("process_group")
def test_a_wrapped_model_is_refused() -> None:
    for wrapped in (nn.DataParallel(feature_classifier()), nn.parallel.DistributedDataParallel(feature_classifier())):
        with pytest.raises(ValueError, match=rf"wrapped in {type(wrapped).__name__}.*pass model.module"):
            refuse_split_model(wrapped, is_model_parallel=False)


def test_a_model_over_several_devices_is_refused(tmp_path: Path) -> None:
    model = feature_classifier()
    model.hf_device_map = {"hidden": 0, "classifier": 1}
    with pytest.raises(ValueError, match=r"one device per process.*hf_device_map.*'classifier': 1"):
        feature_trainer(tmp_path, model=model)


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
            feature_trainer(tmp_path, use_cpu=False)


def test_the_environment_is_clean_here() -> None:
    """Otherwise the tests above would prove nothing."""
    assert not [name for name in (*FLAGS, "LOCAL_RANK") if name in os.environ]
