"""What a run will take, told before it: measured on made-up examples, without a trace in the run that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES
from client_models import SIZES, bert_config, seeded
from tiny_tasks import N, feature_trainer, flat_parameters, private_args, text_trainer

from hf_dcsgd import DCSGDTrainer
from hf_dcsgd.checks.step_cost import measure_step
from hf_dcsgd.runs import estimate
from hf_dcsgd.runs.estimate import RunEstimate, duration, gigabytes

pytestmark = pytest.mark.usefixtures("no_report_page", "quick_statements")


def test_an_estimate_spends_and_changes_nothing(tmp_path: Path) -> None:
    trainer = text_trainer(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=2)
    weights, state = flat_parameters(trainer.model), torch.get_rng_state()
    found = trainer.estimate(sequence_length=10)
    assert (found.steps, found.examples_per_step, found.examples_at_a_time, found.sequence_length) == (4, 16, 8, 10)
    assert found.step_seconds > 0
    assert found.seconds == pytest.approx(4 * found.step_seconds)
    assert found.bytes_by_use["total"] == sum(v for name, v in found.bytes_by_use.items() if name != "total")
    assert torch.equal(weights, flat_parameters(trainer.model))
    assert torch.equal(state, torch.get_rng_state())
    assert not list(tmp_path.iterdir())
    trainer.train()
    assert trainer.state.global_step == 4
    shown = str(found)
    assert shown.startswith("Estimate (cpu, made-up examples of 10 tokens)\n  time    ")
    assert "for 4 steps of 16 examples" in shown
    assert "activations" in shown


def frozen_passes(trainer: DCSGDTrainer, monkeypatch: pytest.MonkeyPatch) -> tuple[RunEstimate, int]:
    """An estimate, and how often the first block ran while steps were measured; a pass of the trunk takes 0.5 s."""
    passes: list[int] = []
    attention = trainer.model.get_submodule("bert.encoder.layer.0.attention")
    with monkeypatch.context() as patch:

        def measure(*args: Any, **kwargs: Any) -> dict[str, Any]:
            with attention.register_forward_pre_hook(lambda *_: passes.append(1)):
                return measure_step(*args, **kwargs)

        patch.setattr(estimate, "measure_step", measure)
        patch.setattr(estimate, "seconds_of", lambda action: 0.5)
        return trainer.estimate(sequence_length=8), len(passes)


def test_a_trunk_cache_is_filled_once_and_then_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"per_device_train_batch_size": 8, "trainable_layers": None, "trunk_cache_dir": str(tmp_path / "cache")}
    trainer = text_trainer(tmp_path, **options, trunk_cache="on")
    weights = flat_parameters(trainer.model)
    cached, passes = frozen_passes(trainer, monkeypatch)
    assert passes == 0
    assert cached.fill_seconds == pytest.approx(N * 0.5 / 4), "four rows were measured"
    assert cached.seconds == pytest.approx(cached.steps * cached.step_seconds + N * 0.5 / 4)
    assert "s each, with 8 s to fill the trunk cache (nothing where it is filled); evaluation" in str(cached)
    assert torch.equal(weights, flat_parameters(trainer.model))
    assert not list(tmp_path.iterdir())
    assert trainer.model.training
    whole, passes = frozen_passes(text_trainer(tmp_path, **options), monkeypatch)
    assert passes > 0
    assert whole.fill_seconds is None
    assert "cache" not in str(whole)


def test_a_model_without_a_frozen_part_is_estimated_as_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, passes = frozen_passes(text_trainer(tmp_path, trunk_cache="auto"), monkeypatch)
    assert passes > 0
    assert found.fill_seconds is None


MORE = ("t5", "bert_token", "bert_qa", "bert_masked_lm")


@pytest.mark.parametrize("name", ["llama", "vit", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_models_of_texts_and_images(name: str, tmp_path: Path) -> None:
    model = ARCHITECTURES[name].build()
    trainer = DCSGDTrainer(model, private_args(tmp_path), train_dataset=[{"input_ids": [5]}] * N)
    assert trainer.estimate(sequence_length=8).seconds > 0


def test_whole_units_are_taken_to_have_all_rows_that_they_may(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list(
        [{"input_ids": [2, 7 + k % 9, 3], "labels": k % 2, "who": k // 2} for k in range(64)]
    )
    model = seeded(hf.BertForSequenceClassification, bert_config())
    args = private_args(tmp_path, privacy_unit="who", max_rows_per_unit=3, per_device_train_batch_size=8)
    assert DCSGDTrainer(model, args, train_dataset=rows).estimate(8).examples_per_step == 24


def test_questions_with_several_answers(tmp_path: Path) -> None:
    model = seeded(hf.BertForMultipleChoice, bert_config(initializer_range=0.2))
    trainer = DCSGDTrainer(model, private_args(tmp_path), train_dataset=[{"input_ids": [[5], [6]]}] * N)
    assert trainer.estimate(sequence_length=8).seconds > 0


def test_what_cannot_be_made_up_is_said(tmp_path: Path) -> None:
    model = seeded(
        hf.Wav2Vec2ForSequenceClassification,
        hf.Wav2Vec2Config(**SIZES, conv_dim=(8,), conv_stride=(5,), conv_kernel=(10,), num_feat_extract_layers=1),
    )
    trainer = DCSGDTrainer(model, private_args(tmp_path), train_dataset=[{"input_values": [0.0]}] * N)
    with pytest.raises(ValueError, match="cannot make examples up for Wav2Vec2ForSequenceClassification, whose input"):
        trainer.estimate()


@pytest.mark.parametrize(("seconds", "shown"), [(0.034, "0.034 s"), (42, "42 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_sizes() -> None:
    assert gigabytes(440_000_000) == "0.44 GB"
    assert gigabytes(46_000_000) == "46 MB"


def test_a_run_that_will_learn_little_says_so_before_and_after(tmp_path: Path, capsys: Any) -> None:
    feature_trainer(tmp_path).train()
    shown = capsys.readouterr().out
    before, after = shown.split("'train_runtime'")
    assert "WARNING" in before
    assert "expect little: 64 examples at ε = " in before
    assert "WARNING: as the plan said, expect little: 64 examples" in after
    assert after.rstrip().endswith("What helps: more examples, a larger target_epsilon, recipe=auto")
