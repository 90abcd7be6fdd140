"""Evaluation from cached hidden states: the same figures, the trunk runs once, files are private and looked at."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tasks import pad, private_args, text_rows, tiny_bert
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import BertForSequenceClassification

from hf_dcsgd import DCSGDTrainer
from hf_dcsgd.trunk.build import stored_caches

pytestmark = pytest.mark.usefixtures("no_report_page", "quick_statements")


def trained(folder: Path, cache: Path, model: nn.Module | None = None, **options: Any) -> DCSGDTrainer:
    settings = {
        **{"trunk_cache": "on", "trunk_cache_dir": str(cache), "unsafe_noise_seed": 3, "disable_tqdm": True},
        **{"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8},
    }
    run = DCSGDTrainer(
        model or tiny_bert(),
        private_args(folder, **(settings | options)),
        data_collator=pad,
        train_dataset=text_rows(),
        eval_dataset=text_rows(20, seed=5),
        compute_metrics=lambda predicted: {"logits": [part.tolist() for part in tree_leaves(predicted.predictions)]},
    )
    run.train()
    return run


def evaluations(run: DCSGDTrainer) -> list[Any]:
    return [(entry["eval_loss"], entry["eval_logits"]) for entry in run.state.log_history if "eval_loss" in entry]


def close(first: Any, second: Any, tolerance: float) -> bool:
    return all(
        torch.allclose(torch.tensor(a), torch.tensor(b), rtol=tolerance, atol=tolerance)
        for (_, firsts), (_, seconds) in zip(first, second, strict=True)
        for a, b in zip(firsts, seconds, strict=True)
    )


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-5),
        pytest.param({"trunk_cache_dtype": "bf16"}, 3e-2, marks=pytest.mark.slow),
        pytest.param({"bf16": True}, 3e-2, marks=pytest.mark.slow),
    ],
)
def test_evaluations_are_those_without_a_cache(tmp_path: Path, options: dict[str, Any], tolerance: float) -> None:
    cached = evaluations(trained(tmp_path / "1", tmp_path / "cache", **options))
    whole = evaluations(trained(tmp_path / "2", tmp_path / "cache", **options, trunk_cache="off"))
    assert len(cached) == 3
    assert close(cached, whole, tolerance)
    assert cached[0] != cached[-1]  # the trained part does learn


def test_each_batch_goes_through_the_trunk_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def counted() -> nn.Module:
        model = tiny_bert()
        model.bert.encoder.layer[0].attention.register_forward_hook(
            lambda module, args, output: None if module.training else calls.append(len(args[0]))
        )
        calls.clear()
        return model

    trained(tmp_path / "1", tmp_path / "cache", counted(), eval_strategy="no")
    without = sum(calls)
    trained(tmp_path / "2", tmp_path / "cache", counted(), eval_strategy="no")
    before = sum(calls)
    assert before < without  # the training rows were cached
    trained(tmp_path / "3", tmp_path / "cache", counted())
    assert sum(calls) - before == 20 + 8  # all rows once, and the first batch as a whole
    trained(tmp_path / "4", tmp_path / "cache", counted(), clipping="fixed")
    assert sum(calls) - before == 8


class ShowsItsLastStates(BertForSequenceClassification):
    """Learns from the first position alone, and hands all of them on where it is evaluated."""

    def forward(self, **inputs: Any) -> Any:
        last: list[Tensor] = []
        handle = self.bert.encoder.register_forward_hook(lambda module, args, output: last.append(output[0]))
        try:
            outputs = super().forward(**inputs)
        finally:
            handle.remove()
        return outputs if self.training else {**outputs, "states": last[0].mean((1, 2))}


@pytest.mark.parametrize(("kind", "narrowed"), [(None, True), (ShowsItsLastStates, False)])
def test_evaluation_computes_no_position_that_nothing_reads(
    tmp_path: Path, kind: type[nn.Module] | None, narrowed: bool
) -> None:
    positions: list[int] = []

    def watched() -> nn.Module:
        model = tiny_bert() if kind is None else kind(tiny_bert().config)
        model.bert.encoder.layer[-1].intermediate.register_forward_hook(
            lambda module, args, output: None if module.training else positions.append(args[0].shape[1])
        )
        return model

    options = {"remove_unused_columns": False}
    torch.manual_seed(0)
    cached = evaluations(trained(tmp_path / "1", tmp_path / "cache", watched(), **options))
    assert (set(positions[-6:]) == {1}) is narrowed  # of the second and third evaluation
    torch.manual_seed(0)
    whole = evaluations(trained(tmp_path / "2", tmp_path / "cache", watched(), **options, trunk_cache="off"))
    assert close(cached, whole, 1e-5)


def test_changed_and_cut_off_files_are_computed_again(tmp_path: Path) -> None:
    expected = evaluations(trained(tmp_path / "1", tmp_path / "cache"))
    (cache,) = stored_caches(tmp_path / "cache")
    files = sorted((Path(cache["path"]) / "evaluation").iterdir())
    assert len(files) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700
    assert cache["bytes"] > sum(path.stat().st_size for path in files)
    whole = [path.read_bytes() for path in files]
    files[0].write_bytes(whole[0][:-1] + bytes([whole[0][-1] ^ 1]))
    files[1].write_bytes(whole[1][: len(whole[1]) // 2])
    files[2].write_bytes(b"")
    assert close(evaluations(trained(tmp_path / "2", tmp_path / "cache")), expected, 1e-6)
    assert [path.read_bytes() for path in files] == whole


@pytest.mark.slow
def test_a_model_that_shows_its_frozen_blocks_is_evaluated_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cached = trained(tmp_path / "1", tmp_path / "cache", tiny_bert(output_hidden_states=True, num_hidden_layers=3))
    whole = trained(
        tmp_path / "2",
        tmp_path / "cache",
        tiny_bert(output_hidden_states=True, num_hidden_layers=3),
        trunk_cache="off",
    )
    assert close(evaluations(cached), evaluations(whole), 1e-5)
    assert "evaluation goes on without the trunk cache" in caplog.text
