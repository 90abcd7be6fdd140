"""Ways around clipping and noise: what a forward writes, what it reorders, what masks give away."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from datasets import Dataset
from tiny_tasks import (
    CLASSES,
    FEATURES,
    feature_classifier,
    feature_rows,
    feature_trainer,
    flat_parameters,
    force_draws,
    watch_steps,
)
from torch import Tensor, nn
from torch.utils.data import default_collate

from hf_dcsgd.checks.forward_writes import ForwardWrites
from hf_dcsgd.ghost import BatchCouplingError, GhostClipper, UnsupportedModelError
from hf_dcsgd.privacy.ledger import LedgerError, PrivacyLedger

pytestmark = pytest.mark.usefixtures("no_report_page", "quick_statements")


# --- what the forward writes into the model --------------------------------------------------------------------------


class Behind(nn.Module):
    """A classifier behind something that is frozen."""

    def __init__(self, front: nn.Module) -> None:
        super().__init__()
        self.front = front.requires_grad_(False)
        self.classifier = nn.Linear(FEATURES, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.classifier(self.front(features))


class RunningNorm(nn.Module):
    """Batch normalization that is no subclass of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("variance", torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.variance, training=self.training)


class Largest(nn.Module):
    """Remembers the largest value it saw, in a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.detach().max())
        return x


class Drifting(nn.Module):
    """A frozen parameter that follows the examples, written where no version counts."""

    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        self.center.data.lerp_(x.detach().mean(0), 0.1)
        return x


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.count.data += len(x)
        return x


class Late(nn.Module):
    """Writes down only what is far out, which no synthetic example is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if x.detach().abs().max() > 100:
            self.seen += 1
        return x


WRITERS: dict[str, Callable[[], nn.Module]] = {
    "front.mean, front.variance": RunningNorm,
    "front.largest": Largest,
    "front.center": Drifting,
    "front.count": Counting,
    "front.weight_u": lambda: nn.utils.spectral_norm(nn.Linear(FEATURES, FEATURES)),
    r"front.parametrizations.weight.0._u": lambda: nn.utils.parametrizations.spectral_norm(
        nn.Linear(FEATURES, FEATURES)
    ),
}


@pytest.mark.parametrize("named", WRITERS)
def test_a_frozen_part_that_keeps_something_of_the_batch_is_refused_before_training(
    named: str, tmp_path: Path
) -> None:
    trainer = feature_trainer(tmp_path, Behind(WRITERS[named]()), trainable_layers="as_is")
    with pytest.raises(UnsupportedModelError, match=f"in place .*{named}"):
        trainer.train()
    assert not (tmp_path / PrivacyLedger.FILENAME).exists()


def test_what_only_some_examples_write_is_refused_where_it_happens_and_not_released(tmp_path: Path) -> None:
    rows = feature_rows()
    rows[7]["features"] = rows[7]["features"] + 1e3
    trainer = feature_trainer(tmp_path, Behind(Late()), rows=rows, trainable_layers="as_is")
    draws = iter([[0, 1], [7, 8], [2]])
    force_draws(trainer, lambda: next(draws))
    with pytest.raises(UnsupportedModelError, match=r"front\.seen"):
        trainer.train()
    # One step was released; the one that failed depends on the examples that were drawn, and is charged.
    assert PrivacyLedger.read(tmp_path).charged == 2
    assert len((tmp_path / "privacy_trace.jsonl").read_text().splitlines()) == 1


def test_transformers_models_with_running_statistics_are_found() -> None:
    config = hf.IBertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = hf.IBertForSequenceClassification(config).train()
    with pytest.raises(UnsupportedModelError, match=r"x_max.* more"), ForwardWrites(model).refused():
        model(input_ids=torch.full((2, 5), 7))


def test_a_model_that_writes_nothing_passes() -> None:
    model = feature_classifier(dropout=0.5).train()
    with ForwardWrites(model).refused_by_value():
        model(torch.randn(3, FEATURES)).sum().backward()


def test_buffers_of_any_kind_that_nobody_writes_pass() -> None:
    model = feature_classifier().train()
    model.register_buffer("nothing", torch.tensor([torch.nan, 1.0]))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    with torch.inference_mode():
        model.register_buffer("frozen", torch.ones(2))
    with ForwardWrites(model).refused_by_value():
        model(torch.randn(3, FEATURES))


def test_a_buffer_written_anew_passes_only_with_the_numbers_that_it_had_from_the_start() -> None:
    model = feature_classifier()
    model.register_buffer("frequencies", torch.tensor([1.0, 2.0, 3.0]))
    writes = ForwardWrites(model)
    with writes.refused():
        model.frequencies.copy_(torch.tensor([1.0, 2.0, 3.0]))
    for _ in range(2):  # what was refused once is no precedent
        with pytest.raises(UnsupportedModelError, match="frequencies"), writes.refused():
            model.frequencies.copy_(torch.tensor([3.0, 2.0, 1.0]))


def test_modules_that_come_or_go_in_a_forward_are_found() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    writes = ForwardWrites(model)
    with pytest.raises(UnsupportedModelError, match="memory"), writes.refused():
        model.memory = nn.Linear(2, 2)
    with writes.refused():
        model(torch.ones(1, 2))
    with pytest.raises(UnsupportedModelError, match=r"1\.bias"), writes.refused():
        model[1] = nn.Linear(2, 2, bias=False)
    with pytest.raises(UnsupportedModelError, match=r"0\.weight"), writes.refused():
        model[0] = nn.Linear(2, 2)


def test_coupling_in_the_train_mode_of_a_frozen_part_is_found(tmp_path: Path) -> None:
    class Centering(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0) if self.training else x

    trainer = feature_trainer(tmp_path, Behind(Centering()), trainable_layers="as_is")
    with pytest.raises(BatchCouplingError, match="batched with others"):
        trainer.train()


def test_frozen_tensors_are_compared_with_what_they_were() -> None:
    model = Behind(Drifting())
    writes = ForwardWrites(model)
    before = writes.frozen_checksums()
    with torch.no_grad():
        model.classifier.weight += 1
    writes.refuse_changes(before)
    model(torch.ones(2, FEATURES))
    with pytest.raises(UnsupportedModelError, match=r"front\.center"):
        writes.refuse_changes(before)


class CenteringFarOut(nn.Module):
    """Couples only rows that are far out, which no synthetic row is."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if x.detach().abs().max() > 100 else x


def test_coupling_that_only_real_rows_show_is_charged_and_not_released(tmp_path: Path) -> None:
    rows = feature_rows()
    for row in rows[:16]:
        row["features"] = 1e3 * row["features"]
    trainer = feature_trainer(tmp_path, Behind(CenteringFarOut()), rows=rows, trainable_layers="as_is")
    before = flat_parameters(trainer.model)
    force_draws(trainer, lambda: list(range(16)))
    with pytest.raises(BatchCouplingError, match="batched with others"):
        trainer.train()
    assert PrivacyLedger.read(tmp_path).charged == 1
    assert torch.equal(flat_parameters(trainer.model), before)
    assert trainer.mechanism.released == 0


# --- gradients that nobody clipped -----------------------------------------------------------------------------------


class PouringIn(nn.Module):
    """Calls backward() itself, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(FEATURES, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            (1e3 * self.classifier(features).sum()).backward()
        return self.classifier(features)


def test_a_gradient_that_the_forward_leaves_behind_is_dropped(tmp_path: Path) -> None:
    trainer = feature_trainer(
        tmp_path, PouringIn(), clipping="fixed", clip_threshold=0.1, noise_multiplier=1e-6, max_steps=1
    )
    released = []

    class Look(hf.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            released.append(torch.cat([p.grad.flatten() for p in model.parameters()]))

    trainer.add_callback(Look())
    force_draws(trainer, lambda: list(range(10)))
    trainer.train()
    assert released[0].norm() <= 0.1 * 10 / trainer.plan.expected_batch_size * 1.01


def test_between_micro_batches_there_is_no_gradient_to_look_at(tmp_path: Path) -> None:
    seen = []

    class Spy(hf.TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen.extend(parameter.grad for parameter in model.parameters())

    trainer = feature_trainer(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=8)
    trainer.add_callback(Spy())
    trainer.train()
    assert seen
    assert all(gradient is None for gradient in seen)


# --- positions that cancel -------------------------------------------------------------------------------------------


class Difference(nn.Module):
    """Uses the difference of two positions: where they are alike, the gradient is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        return (z[:, 0] - z[:, 1]).sum(1)


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6, 1e8, 1e10])
@pytest.mark.parametrize("positions", [2, 40])
def test_an_example_whose_positions_cancel_does_not_blur_the_others(size: float, positions: int) -> None:
    torch.manual_seed(0)
    model = Difference()
    clipper = GhostClipper(model)
    rows = torch.randn(12, positions, 16)
    canary = (size * torch.randn(16)).expand(1, positions, 16)

    def clipped_sum(batch: Tensor) -> Tensor:
        total = clipper.zeros()
        with clipper:
            norms = clipper.norms(model(batch))
            clipper.accumulate((1 / norms).clamp(max=1.0), into=total)
        return total

    assert (clipped_sum(torch.cat([rows, canary])) - clipped_sum(rows)).norm() <= 1 + 1e-3


# --- collators -------------------------------------------------------------------------------------------------------


def augmented(rows: list[Any]) -> dict[str, Tensor]:
    return default_collate([{**row, "features": row["features"] + random.random()} for row in rows])


def with_own_generator(rows: list[Any]) -> dict[str, Tensor]:
    batch = default_collate(rows)
    return {**batch, "features": (batch["features"] + np.random.default_rng().random()).float()}


def in_place(rows: list[Any]) -> dict[str, Tensor]:
    for row in rows:
        row["features"] /= 255
    return default_collate(rows)


def popping(rows: list[Any]) -> dict[str, Tensor]:
    labels = torch.stack([row.pop("labels") for row in rows])
    return {**default_collate(rows), "labels": labels}


@pytest.mark.parametrize("collate", [with_own_generator, in_place, popping])
def test_odd_but_sound_collators_pass_the_checks(collate: Any, tmp_path: Path) -> None:
    rows = Dataset.from_list([{name: value.tolist() for name, value in row.items()} for row in feature_rows()])
    trainer = feature_trainer(tmp_path, rows=rows.with_format("torch"), trainer_options={"data_collator": collate})
    trainer.train()
    assert PrivacyLedger.read(tmp_path).charged == 4


def test_a_list_with_an_entry_per_row_is_stacked_with_them(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(FEATURES, CLASSES)

        def forward(self, features: Tensor, scales: list[float]) -> Tensor:
            return self.classifier(features) * torch.tensor(scales)[:, None]

    def collate(rows: list[Any]) -> dict[str, Any]:
        return {**default_collate(rows), "scales": [float(row["features"][0]) for row in rows]}

    options = {"data_collator": collate, "eval_dataset": None}
    feature_trainer(tmp_path, Scaled(), remove_unused_columns=False, trainer_options=options).train()


def test_collators_that_augment_each_row_are_fine(tmp_path: Path) -> None:
    trainer = feature_trainer(tmp_path, trainer_options={"data_collator": augmented})
    trainer.train()
    assert PrivacyLedger.read(tmp_path).charged == 4


# --- order within the batch ------------------------------------------------------------------------------------------


class Sorting(nn.Module):
    """Sorts its examples, longest first, and puts them back at the end, as code for packed sequences does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 8)
        self.classifier = nn.Linear(8, CLASSES)

    def forward(self, features: Tensor, length: Tensor) -> Tensor:
        order = length.argsort(descending=True, stable=True)
        return self.classifier(torch.tanh(self.layer(features[order]))[order.argsort()])


def test_models_that_sort_their_examples_are_refused(tmp_path: Path) -> None:
    rows = [{**row, "length": torch.tensor(5 + k % 3)} for k, row in enumerate(feature_rows())]
    trainer = feature_trainer(tmp_path, Sorting(), rows=rows, trainer_options={"eval_dataset": None})
    force_draws(trainer, lambda: list(range(16)))  # the first is the shortest, and is sorted elsewhere
    with pytest.raises(BatchCouplingError, match="depends on other examples"):
        trainer.train()


# --- what is written and said ----------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Each example goes to one expert, which is run on its examples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.classifier = nn.Linear(FEATURES, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        route, out = features[:, 0].round().long().clamp(0, 3), torch.zeros_like(features)
        for k, expert in enumerate(self.experts):
            chosen = (route == k).nonzero().flatten()
            if len(chosen):
                out = out.index_add(0, chosen, expert(features[chosen]))
        return self.classifier(out)


def test_which_parameters_turn_out_slow_on_private_batches_is_told_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reports, logs = [], []
    for route in (0.0, 3.0):
        rows = feature_rows()
        for row in rows:
            row["features"][0] = 0.0
        rows[0]["features"][0] = route  # the row whose shapes the checks before training look at
        caplog.clear()
        trainer = feature_trainer(
            tmp_path / str(route), Experts(), rows=rows, trainer_options={"eval_dataset": None}, clipping="fixed"
        )
        force_draws(trainer, lambda: [1, 2, 0])
        trainer.train()
        reports.append(trainer.privacy_report()["model"])
        logs.append(caplog.messages)
    assert trainer.step.clipper.slow_parameters
    assert reports[0] == reports[1]
    assert logs[0] == logs[1]


def test_parameters_that_are_slow_from_the_start_are_named_in_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(FEATURES, CLASSES)

        def forward(self, features: Tensor) -> Tensor:
            return nn.functional.linear(features, self.inner.weight, self.inner.bias)

    trainer = feature_trainer(tmp_path, Functional())
    trainer.train()
    (message,) = [message for message in caplog.messages if "slow" in message]
    assert "inner.bias, inner.weight" in message
    assert trainer.privacy_report()["model"]["slow_parameters"] == ["inner.bias", "inner.weight"]


def test_the_training_data_are_no_evaluation_data(tmp_path: Path) -> None:
    rows = feature_rows()
    for given in (rows, {"train": rows, "other": feature_rows(seed=1)}):
        with pytest.raises(ValueError, match="is the training data"):
            feature_trainer(tmp_path, rows=rows, trainer_options={"eval_dataset": given})
    trainer = feature_trainer(tmp_path, rows=rows)
    with pytest.raises(ValueError, match="is the training data"):
        trainer.evaluate(rows)
    assert len(trainer.predict(rows).predictions) == len(rows)


def test_a_ledger_with_fewer_charges_than_releases_gives_no_report(tmp_path: Path) -> None:
    trainer = feature_trainer(tmp_path)
    trainer.train()
    path = tmp_path / PrivacyLedger.FILENAME
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]))
    with pytest.raises(LedgerError, match="2 charges, but 4 steps were released"):
        trainer.privacy_report()


# --- masks -----------------------------------------------------------------------------------------------------------


def test_dropout_differs_between_runs_with_one_public_seed(tmp_path: Path) -> None:
    masks = []
    for _ in range(2):
        model = feature_classifier(dropout=0.5)
        trainer = feature_trainer(tmp_path / str(len(masks)), model, seed=1, max_steps=1)
        kept: list[Tensor] = []
        force_draws(trainer, lambda: [0, 1, 2, 3])
        model.dropout.register_forward_hook(
            lambda module, inputs, output, kept=kept: kept.append(output != 0) if len(output) == 4 else None
        )
        trainer.train()
        masks.append(kept[-1])
    assert not torch.equal(*masks)


@pytest.mark.parametrize("workers", [0, 1])
def test_collators_that_draw_differ_between_runs_with_one_public_seed(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []
    watch_steps(monkeypatch, accumulate=lambda step, stack: seen.append(stack["features"]))
    for k in range(2):
        trainer = feature_trainer(
            tmp_path / str(k),
            trainer_options={"data_collator": augmented},
            seed=1,
            dataloader_num_workers=workers,
            max_steps=1,
        )
        force_draws(trainer, lambda: [0, 1])
        trainer.train()
    assert not torch.equal(*seen)
