"""The result does not depend on how a logical batch is cut, padded, or fetched: same draws, same noise, same model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tasks import feature_rows, feature_trainer, flat_parameters, pad, text_rows, text_trainer, watch_steps

from hf_dcsgd import DCSGDTrainer
from hf_dcsgd.clipping import STRATEGIES
from hf_dcsgd.data.loading import restack

pytestmark = pytest.mark.usefixtures("no_report_page", "quick_statements")

SEED = 11
COMMON = {"unsafe_noise_seed": SEED, "optim": "sgd", "learning_rate": 0.5, "log_train_loss": "private"}


def outcome(trainer: DCSGDTrainer) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Parameters and the values released at each step."""
    trainer.train()
    names = ("clip_threshold", "histogram_range", "noisy_clip_fraction", "noisy_loss", "grad_norm", "epsilon")
    return flat_parameters(trainer.model), [
        {name: line[name] for name in names if name in line} for line in trainer.state.log_history[:-1]
    ]


def assert_same(found: tuple, expected: tuple) -> None:
    torch.testing.assert_close(found[0], expected[0], atol=2e-5, rtol=1e-4)
    assert len(found[1]) == len(expected[1]) > 0
    for here, there in zip(found[1], expected[1], strict=True):
        assert here == pytest.approx(there, rel=1e-3)


@pytest.fixture(scope="module")
def whole_batches(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_dcsgd.reporting.report.try_to_write_report", lambda run_dir: None)
        return outcome(texts(tmp_path_factory.mktemp("whole"), 32, 1))


def texts(output_dir: Path, batch: int, accumulation: int, **changes: Any) -> DCSGDTrainer:
    """128 texts of unequal length, B = 32, four steps of DC-SGD-E."""
    return text_trainer(
        output_dir,
        rows=text_rows(128),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        **{**COMMON, "histogram_bins": 5, **changes},
    )


@pytest.mark.parametrize(
    ("batch", "accumulation"), [(8, 4), *(pytest.param(*cut, marks=pytest.mark.slow) for cut in ((1, 32), (16, 2)))]
)
def test_splits_of_the_logical_batch(tmp_path: Path, whole_batches: tuple, batch: int, accumulation: int) -> None:
    assert len(whole_batches[1]) == 4
    assert len({values["clip_threshold"] for values in whole_batches[1]}) > 1
    assert_same(outcome(texts(tmp_path, batch, accumulation)), whole_batches)


def test_another_seed_gives_another_model(tmp_path: Path, whole_batches: tuple) -> None:
    other, _ = outcome(texts(tmp_path, 32, 1, unsafe_noise_seed=SEED + 1))
    assert (other - whole_batches[0]).norm() > 0.1


def test_workers_that_fetch_the_data(tmp_path: Path, whole_batches: tuple) -> None:
    trainer = texts(tmp_path, 8, 4, dataloader_num_workers=2)
    assert_same(outcome(trainer), whole_batches)


def test_stacks_of_a_few_rows(tmp_path: Path, whole_batches: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    watch_steps(monkeypatch, accumulate=lambda step, stack: sizes.append(len(stack["labels"])))
    monkeypatch.setattr("hf_dcsgd.trainer.restack", lambda micro_batches, largest: restack(micro_batches, 5))
    assert_same(outcome(texts(tmp_path, 32, 1)), whole_batches)
    assert max(sizes) <= 5
    assert len(sizes) > 4 * 20 / 5


def test_lengths_that_are_rounded_up(tmp_path: Path, whole_batches: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other padding, other stacks: the same model."""
    widths: set[int] = set()
    watch_steps(monkeypatch, accumulate=lambda step, stack: widths.add(stack["input_ids"].shape[1]))

    def rounded(rows: list[Any]) -> dict[str, torch.Tensor]:
        batch = pad(rows)
        more = -batch["input_ids"].shape[1] % 8
        return {
            name: value if name == "labels" else torch.nn.functional.pad(value, (0, more))
            for name, value in batch.items()
        }

    assert_same(outcome(texts(tmp_path, 8, 4, trainer_options={"data_collator": rounded})), whole_batches)
    assert widths == {8, 16}


@pytest.mark.parametrize(
    "clipping",
    [
        pytest.param(name, marks=() if name in ("dc_sgd_e", "dc_sgd_p", "andrew") else pytest.mark.slow)
        for name in STRATEGIES
    ],
)
def test_every_strategy(tmp_path: Path, clipping: str) -> None:
    runs = [
        feature_trainer(
            tmp_path / f"{batch}x{accumulation}",
            rows=feature_rows(128),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            clipping=clipping,
            **COMMON,
        )
        for batch, accumulation in ((32, 1), (4, 8))
    ]
    expected, found = (outcome(run) for run in runs)
    assert_same(found, expected)


def test_the_plan_is_the_same_for_every_split(tmp_path: Path) -> None:
    plans = [texts(tmp_path, batch, accumulation).plan for batch, accumulation in ((32, 1), (8, 4), (1, 32))]
    assert plans[0].privacy_dict() == plans[1].privacy_dict() == plans[2].privacy_dict()
    assert {plan.expected_batch_size for plan in plans} == {32}
