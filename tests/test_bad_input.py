"""Bad arguments, datasets, models and files: each is refused by name before anything is released, or documented.

`ARGUMENTS`, `DATASETS`, `MODELS`, `FILES` and `BORNE` are the table. What is refused fails with an error raised from
our code that says what was wrong (or, where a model or a collator fails, with their error and a note of ours), and
nothing was charged by then. What is borne trains to its end: the weights stay
finite and all steps are charged.
"""

from __future__ import annotations

import json
import math
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Count
from tiny_tasks import (
    CLASSES,
    FEATURES,
    FeatureClassifier,
    Row,
    feature_classifier,
    feature_rows,
    feature_trainer,
    force_draws,
    private_args,
    text_rows,
    text_trainer,
    tiny_bert,
)
from torch import Tensor, nn

import hf_dcsgd
from hf_dcsgd import DCSGDTrainer
from hf_dcsgd.ghost import BatchCouplingError
from hf_dcsgd.privacy.ledger import PrivacyLedger

pytestmark = [pytest.mark.usefixtures("no_report_page", "quick_statements"), pytest.mark.proof]

PACKAGE = Path(hf_dcsgd.__file__).parent
NAN, INF = math.nan, math.inf
Make = Callable[[Path], DCSGDTrainer]


@dataclass(frozen=True)
class Refused:
    name: str
    make: Make
    error: type[Exception]
    message: str
    by: str = "hf_dcsgd"  # whose code raises it


@dataclass(frozen=True)
class Borne:
    name: str
    make: Make


# --- models that cannot be trained, or only just ---------------------------------------------------------------------


class Plain(nn.Module):
    """One linear layer behind something else."""

    def __init__(self, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.after(self.layer(self.before(features)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.classifier = nn.Linear(FEATURES, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.classifier(self.second(torch.tanh(self.first(features))))


def frozen() -> nn.Module:
    return feature_classifier().requires_grad_(False)


def filled(value: float) -> nn.Module:
    model = feature_classifier()
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def failing(_: Tensor) -> Tensor:
    raise KeyError("inside a user's model")


def other_loss(change: Callable[[Tensor], Any]) -> dict[str, Any]:
    def loss(outputs: Tensor, labels: Tensor) -> Any:
        return change(nn.functional.cross_entropy(outputs, labels, reduction="none"))

    return {"per_example_loss_func": loss}


# --- data ------------------------------------------------------------------------------------------------------------


def changed(at: int | None = None, source: Callable[[], list[Row]] = feature_rows, **values: Any) -> list[Row]:
    """The usual rows, one of them (or all) with other values; a function is applied to the value that is there."""
    rows = []
    for index, row in enumerate(source()):
        if at in (None, index):
            row = {**row, **{k: v(row[k]) if callable(v) else v for k, v in values.items()}}
        rows.append(row)
    return rows


def without(column: str, at: int | None = None, source: Callable[[], list[Row]] = feature_rows) -> list[Row]:
    rows = source()
    return [{k: v for k, v in row.items() if k != column or at not in (None, i)} for i, row in enumerate(rows)]


def stacked(rows: list[Row]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# --- how a case is made ----------------------------------------------------------------------------------------------


def args(**changes: Any) -> Make:
    return lambda folder: feature_trainer(folder, **changes)


def rows(data: Any) -> Make:
    """Every step draws every row, so that none can hide."""

    def make(folder: Path) -> DCSGDTrainer:
        trainer = feature_trainer(folder, rows=data)
        force_draws(trainer, lambda: list(range(len(data))))
        return trainer

    return make


def texts(data: Any, **changes: Any) -> Make:
    def make(folder: Path) -> DCSGDTrainer:
        trainer = text_trainer(folder, rows=data, **changes)
        force_draws(trainer, lambda: list(range(len(data))))
        return trainer

    return make


def model(made: Callable[[], Any], **changes: Any) -> Make:
    return lambda folder: feature_trainer(folder, model=made(), **changes)


def trainer(**options: Any) -> Make:
    return lambda folder: feature_trainer(folder, trainer_options=options)


def bare(*given: Any, **options: Any) -> Make:
    return lambda folder: DCSGDTrainer(*given, **{"args": private_args(folder), **options})


def text_model(**changes: Any) -> Make:
    return lambda folder: text_trainer(folder, **changes)


ARGUMENTS = (
    Refused("ε = 0", args(target_epsilon=0.0), ValueError, "target_epsilon > 0, got 0"),
    Refused("ε < 0", args(target_epsilon=-1.0), ValueError, "target_epsilon > 0, got -1"),
    Refused("ε is NaN", args(target_epsilon=NAN), ValueError, "target_epsilon > 0, got nan"),
    Refused("ε is text", args(target_epsilon="8"), TypeError, "target_epsilon to be a number, got '8'"),
    Refused("ε is a flag", args(target_epsilon=True), TypeError, "target_epsilon to be a number, got True"),
    Refused(
        "ε out of reach", args(target_epsilon=1e-9, target_delta=1e-12), ValueError, "epsilon=1e-09|epsilon = 1e-09"
    ),
    Refused("ε and σ", args(target_epsilon=1.0, noise_multiplier=1.0), ValueError, "got both: 1.0 and 1.0"),
    Refused("σ = 0", args(noise_multiplier=0.0), ValueError, "noise_multiplier > 0, got 0"),
    Refused("σ is infinite", args(noise_multiplier=INF), ValueError, "noise_multiplier > 0, got inf"),
    Refused("σ beyond floats", args(noise_multiplier=1e300), ValueError, r"noise_multiplier <= 1e\+06, got 1e\+300"),
    Refused("σ is text", args(noise_multiplier="1"), TypeError, "noise_multiplier to be a number, got '1'"),
    Refused("δ = 1", args(target_delta=1.0), ValueError, "target_delta < 1, got 1"),
    Refused("δ = 0", args(target_delta=0.0), ValueError, "target_delta < 1, got 0"),
    Refused("δ is text", args(target_delta="1e-5"), TypeError, "target_delta to be a number, got '1e-5'"),
    Refused("unknown accountant", args(accountant="gdp"), ValueError, "accountant to be one of rdp, pld, got 'gdp'"),
    Refused("unknown strategy", args(clipping="adaptive"), ValueError, "clipping to be one of .*, got 'adaptive'"),
    Refused("no strategy", args(clipping=None), TypeError, "clipping to be a string, got None"),
    Refused("C = 0", args(clip_threshold=0.0), ValueError, "clip_threshold > 0, got 0"),
    Refused("C is None", args(clip_threshold=None), TypeError, "clip_threshold to be a number, got None"),
    Refused("C beyond floats", args(clip_threshold=1e38), ValueError, r"clip_threshold <= 1e\+30, got 1e\+38"),
    Refused("C below floats", args(clip_threshold=1e-40), ValueError, "clip_threshold <= .*, got 1e-40"),
    Refused("p = 0", args(clipping="dc_sgd_p", percentile=0.0), ValueError, "percentile < 1, got 0"),
    Refused("p = 1", args(clipping="dc_sgd_p", percentile=1.0), ValueError, "percentile < 1, got 1"),
    Refused("p is text", args(percentile="half"), TypeError, "percentile to be a number, got 'half'"),
    Refused("b = 1", args(histogram_bins=1), ValueError, "histogram_bins >= 2, got 1"),
    Refused("b = 2.5", args(histogram_bins=2.5), TypeError, "histogram_bins to be a whole number, got 2.5"),
    Refused("b beyond memory", args(histogram_bins=10**12), ValueError, "histogram_bins <= 100000, got 1000000000000"),
    Refused("R = 0", args(histogram_range=0.0), ValueError, "histogram_range > 0, got 0"),
    Refused("R beyond floats", args(histogram_range=1e300), ValueError, r"histogram_range <= 1e\+30, got 1e\+300"),
    Refused("σ_H < σ", args(histogram_noise_multiplier=0.5), ValueError, "> noise_multiplier, got 0.5 and 1"),
    Refused("σ_H = σ", args(histogram_noise_multiplier=1.0), ValueError, "> noise_multiplier, got 1 and 1"),
    Refused("η_C infinite", args(andrew_learning_rate=INF), ValueError, "andrew_learning_rate > 0, got inf"),
    Refused("ρ_C = 2", args(clipping="du", du_decay=2.0), ValueError, "du_decay < 1, got 2"),
    Refused("γ < 0", args(auto_clip_gamma=-0.1), ValueError, "auto_clip_gamma > 0, got -0.1"),
    Refused("unknown loss mode", args(log_train_loss="on"), ValueError, "log_train_loss .*, got 'on'"),
    Refused("loss_clip < 0", args(loss_clip=-2.0), ValueError, "loss_clip > 0, got -2"),
    Refused("seed < 0", args(unsafe_noise_seed=-1), ValueError, "unsafe_noise_seed >= 0, got -1"),
    Refused("seed 1.5", args(unsafe_noise_seed=1.5), TypeError, "unsafe_noise_seed to be a whole number, got 1.5"),
    Refused("B = 0", args(per_device_train_batch_size=0), ValueError, "per_device_train_batch_size >= 1, got 0"),
    Refused("B < 0", args(per_device_train_batch_size=-4), ValueError, "per_device_train_batch_size >= 1, got -4"),
    Refused("no accumulation", args(gradient_accumulation_steps=0), ValueError, "accumulation_steps >= 1, got 0"),
    Refused("half a step", args(gradient_accumulation_steps=1.5), ValueError, "accumulation_steps >= 1, got 1.5"),
    Refused("no epoch", args(num_train_epochs=0), ValueError, "epochs > 0, got 0"),
    Refused("NaN epochs", args(num_train_epochs=NAN), ValueError, "epochs > 0, got nan"),
    Refused("endless epochs", args(num_train_epochs=INF), ValueError, "epochs > 0, got inf"),
    Refused("no steps", args(max_steps=0), ValueError, "max_steps >= 1, or -1 .*, got 0"),
    Refused("2.5 steps", args(max_steps=2.5), ValueError, "steps >= 1, got 2.5"),
    Refused("NaN learning rate", args(learning_rate=NAN), ValueError, "learning_rate >= 0 and finite, got nan"),
    Refused("learning rate as text", args(learning_rate="fast"), TypeError, "learning_rate .* number, got 'fast'"),
    Refused("NaN decay", args(weight_decay=NAN), ValueError, "weight_decay >= 0 and finite, got nan"),
    Refused(
        "smoothing of 2", args(label_smoothing_factor=2.0), ValueError, r"label_smoothing_factor in \[0, 1\], got 2"
    ),
    Refused(
        "smoothing of no config", args(label_smoothing_factor=0.1), ValueError, "label_smoothing_factor=0.1 needs"
    ),
    Refused("fp16", args(fp16=True), ValueError, "fp16=True cannot be used for private training"),
    Refused("unknown optimizer", args(optim="best"), ValueError, "best is not a valid", by="transformers"),
    Refused("unknown schedule", args(lr_scheduler_type="up"), ValueError, "up is not a valid", by="transformers"),
)

DATASETS = (
    Refused("empty dataset", args(rows=[]), ValueError, "dataset size >= 1, got 0"),
    Refused("N < B", args(rows=feature_rows(8)), ValueError, "got 8 examples and 16"),
    Refused("a number for a dataset", args(rows=5), TypeError, "map-style train_dataset .* got int"),
    Refused("a generator", args(rows=iter([])), TypeError, "map-style train_dataset .* got list_iterator"),
    Refused(
        "a dict of datasets", args(rows={"train": [], "test": []}), TypeError, "one train_dataset, .* train, test"
    ),
    Refused("no dataset", bare(feature_classifier()), ValueError, "requires a train_dataset"),
    Refused("rows are numbers", rows(list(range(64))), TypeError, r"data collator .*\(int\)"),
    Refused("rows are None", rows([None] * 64), TypeError, r"data collator .*\(NoneType\)"),
    Refused("no labels", rows(without("labels")), ValueError, r"label entry \(labels\) in the batch, got features"),
    Refused("no inputs", rows(without("features")), TypeError, "'features'.*FeatureClassifier for no tensors"),
    Refused("one row without labels", rows(without("labels", 40)), ValueError, "label entry"),
    Refused("labels are words", rows(changed(labels="cat")), ValueError, "label entry"),
    Refused("labels are None", rows(changed(labels=None)), ValueError, "label entry"),
    Refused("one label is None", rows(changed(40, labels=None)), ValueError, "label entry"),
    Refused("labels out of range", rows(changed(labels=torch.tensor(99))), ValueError, "labels from 0 to 2"),
    Refused("one label out of range", rows(changed(40, labels=torch.tensor(3))), ValueError, "labels from 0 to 2"),
    Refused("labels of -1", rows(changed(labels=torch.tensor(-1))), ValueError, "labels from 0 to 2"),
    Refused("labels are fractions", rows(changed(labels=torch.Tensor.float)), ValueError, "cannot tell the loss"),
    Refused("labels are NaN", rows(changed(labels=torch.tensor(NAN))), ValueError, "cannot tell the loss"),
    Refused("two labels each", rows(changed(labels=torch.zeros(2).long())), ValueError, "cannot tell the loss"),
    Refused("inputs too short", rows(changed(features=torch.zeros(3))), RuntimeError, r"features \(3, 3\) float32"),
    Refused("one input too short", rows(changed(40, features=torch.zeros(3))), RuntimeError, r"\(1, 3\)"),
    Refused("inputs are integers", rows(changed(features=torch.Tensor.long)), RuntimeError, r"\(3, 6\) int64"),
    Refused("inputs in double", rows(changed(features=torch.Tensor.double)), RuntimeError, r"\(3, 6\) float64"),
    Refused("inputs in half", rows(changed(features=torch.Tensor.half)), RuntimeError, r"\(3, 6\) float16"),
    Refused("inputs are words", rows(changed(features="word")), TypeError, "FeatureClassifier"),
    Refused(
        "tokens beyond the vocabulary",
        texts(changed(source=text_rows, input_ids=[10**6] * 5)),
        IndexError,
        "token ids its vocabulary",
    ),
    Refused(
        "one token beyond the vocabulary",
        texts(changed(60, source=text_rows, input_ids=[10**6])),
        IndexError,
        "token ids its vocabulary",
    ),
    Refused("no tokens", texts(changed(source=text_rows, input_ids=[])), RuntimeError, r"input_ids \(3, 0\)"),
    Refused("texts too long", texts(changed(source=text_rows, input_ids=[7] * 500)), RuntimeError, r"\(3, 500\)"),
    Refused("one text too long", texts(changed(60, source=text_rows, input_ids=[7] * 500)), RuntimeError, ", 500\\)"),
    Refused("texts that are not tokenized", texts([{"text": "hello", "labels": 0}] * 64), KeyError, "data collator"),
    Refused("a collator that fails", trainer(data_collator=lambda rows: rows[99]), IndexError, "data collator"),
    Refused("a collator of nothing", trainer(data_collator=lambda rows: None), TypeError, "mapping .* got NoneType"),
    Refused("a collator of lists", trainer(data_collator=lambda rows: [1, 2]), TypeError, "mapping .* got list"),
    Refused(
        "a collator that drops rows",
        trainer(data_collator=lambda rows: {name: value[1:] for name, value in stacked(rows).items()}),
        ValueError,
        "one entry of 'features' for one row, got 0",
    ),
    Refused(
        "a collator that repeats rows",
        trainer(data_collator=lambda rows: stacked(rows * 2)),
        ValueError,
        "one entry of 'features' for one row, got 2",
    ),
    Refused("a number for a collator", trainer(data_collator=3), TypeError, "data_collator to be callable, got 3"),
)

MODELS = (
    Refused(
        "a name for a model", bare("bert", train_dataset=feature_rows()), TypeError, "got the name 'bert': load it"
    ),
    Refused(
        "a class", bare(FeatureClassifier, train_dataset=feature_rows()), TypeError, "nn.Module.*FeatureClassifier"
    ),
    Refused("a function", bare(len, train_dataset=feature_rows()), TypeError, "nn.Module.*function len"),
    Refused("no model", bare(None, train_dataset=feature_rows()), RuntimeError, "requires either", by="transformers"),
    Refused(
        "no arguments",
        lambda folder: DCSGDTrainer(feature_classifier(), train_dataset=feature_rows()),
        TypeError,
        "DCSGDTrainingArguments, got NoneType",
    ),
    Refused("no parameters", model(nn.Identity), ValueError, "no parameter of the model requires a gradient"),
    Refused("nothing trainable", model(frozen), ValueError, "no parameter of the model requires a gradient"),
    Refused("no weights", model(lambda: feature_classifier().to("meta")), ValueError, "on the meta device"),
    Refused("NaN weights", model(lambda: filled(NAN)), RuntimeError, "not finite: .* in the weights"),
    Refused("double weights", model(lambda: feature_classifier().double()), RuntimeError, r"\(3, 6\) float32"),
    Refused("complex weights", model(lambda: feature_classifier().to(torch.complex64)), ValueError, "kept in fp32"),
    Refused("BatchNorm", model(lambda: Plain(nn.BatchNorm1d(FEATURES))), ValueError, r"before \(BatchNorm1d\)"),
    Refused(
        "centered inputs", model(lambda: Plain(lambda x: x - x.mean(0))), BatchCouplingError, "batched with others"
    ),
    Refused("compared outputs", model(lambda: Plain(abs, lambda x: x / x.norm())), RuntimeError, "batch"),
    Refused("detached outputs", model(lambda: Plain(abs, Tensor.detach)), RuntimeError, "do not depend on any train"),
    Refused("one number as output", model(lambda: Plain(abs, Tensor.sum)), ValueError, r"cannot tell .* logits \(\)"),
    Refused("a forward that fails", model(lambda: Plain(failing)), KeyError, "inside a user's model.*by Plain"),
    Refused("unknown layers", text_model(trainable_layers="encodr"), ValueError, "'encodr' matches no module"),
    Refused("last:99", text_model(trainable_layers="last:99"), ValueError, "got last:99"),
    Refused("last:x", text_model(trainable_layers="last:x"), ValueError, "got last:x"),
    Refused("layers of nothing", text_model(trainable_layers=" , "), ValueError, "trainable_layers is empty"),
    Refused("layers by number", text_model(trainable_layers=3), TypeError, "trainable_layers to be a string, got 3"),
    Refused("a list of numbers", text_model(trainable_layers=[1]), TypeError, r"trainable_layers .*, got \[1\]"),
    Refused("a number for a loss", trainer(per_example_loss_func=3), TypeError, "per_example_loss_func .* got 3"),
    Refused("a scalar loss", trainer(**other_loss(Tensor.mean)), ValueError, "returned a scalar"),
    Refused("a NaN loss", trainer(**other_loss(lambda x: x * NAN)), RuntimeError, "not finite: .* loss function"),
    Refused("a loss of another type", trainer(**other_loss(Tensor.tolist)), TypeError, "a tensor, got list"),
    Refused("a detached loss", trainer(**other_loss(Tensor.detach)), ValueError, "do not require grad"),
    Refused("a loss over the batch", trainer(**other_loss(lambda x: x / len(x))), BatchCouplingError, "batched with"),
    Refused("a loss of one batch", trainer(compute_loss_func=len), ValueError, "compute_loss_func returns one loss"),
)

BORNE = (
    Borne("one NaN example", rows(changed(0, features=torch.full((FEATURES,), NAN)))),
    Borne("one infinite example", rows(changed(1, features=torch.full((FEATURES,), INF)))),
    Borne("all examples NaN", rows(changed(features=torch.full((FEATURES,), NAN)))),
    Borne("one huge example", rows(changed(2, features=torch.full((FEATURES,), 1e30)))),
    Borne("all examples huge", rows(changed(features=torch.full((FEATURES,), 1e30)))),
    Borne("all examples zero", rows(changed(features=torch.zeros(FEATURES)))),
    Borne("all examples alike", rows([feature_rows()[0]] * 64)),
    Borne("each example twice", rows(feature_rows(32) * 2)),
    Borne("one class only", rows(changed(labels=torch.tensor(1)))),
    Borne("no label counts", rows(changed(labels=torch.tensor(-100)))),
    Borne("a collator that takes the first row only", trainer(data_collator=lambda rows: stacked(rows[:1]))),
    Borne("a column that nobody asked for", rows(changed(extra="text"))),
    Borne("tied weights", model(Tied)),
    Borne("everything trainable", text_model(model=tiny_bert(), trainable_layers="all", max_steps=2)),
    Borne("weights of zero", model(lambda: filled(0.0))),
    Borne("almost no noise", args(noise_multiplier=1e-30)),
    Borne("as many steps as one", args(max_steps=1)),
    Borne("N = B", args(rows=feature_rows(16))),
)

TABLE = (*ARGUMENTS, *DATASETS, *MODELS, *BORNE)
KINDS = {
    case: kind
    for kind, cases in (("arguments", ARGUMENTS), ("datasets", DATASETS), ("models", MODELS))
    for case in cases
}


def charged(folder: Path) -> int:
    return (
        sum(run.charged for run in PrivacyLedger.read(folder).runs)
        if (folder / PrivacyLedger.FILENAME).exists()
        else 0
    )


@pytest.mark.parametrize("case", [*ARGUMENTS, *DATASETS, *MODELS], ids=lambda case: case.name)
def test_it_is_refused_by_name_before_anything_is_released(case: Refused, tmp_path: Path, count: Count) -> None:
    with pytest.raises(case.error, match=f"(?s){case.message}") as caught:
        case.make(tmp_path).train()
    assert charged(tmp_path) == 0
    raised_in = Path(traceback.extract_tb(caught.value.__traceback__)[-1].filename)
    if case.by == "hf_dcsgd":
        # Ours, or one of a model or collator to which we added what was being done.
        assert raised_in.is_relative_to(PACKAGE) or getattr(caught.value, "__notes__", None)
    else:
        assert case.by in raised_in.parts
    count(f"bad input refused before any release: {KINDS[case]}", 1)


@pytest.mark.parametrize("case", BORNE, ids=lambda case: case.name)
def test_it_is_borne_to_the_end(case: Borne, tmp_path: Path, count: Count) -> None:
    trainer = case.make(tmp_path)
    trainer.train()
    assert trainer.mechanism is not None
    assert charged(tmp_path) == trainer.mechanism.charged == trainer.plan.steps
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert 0 < trainer.mechanism.threshold.sensitivity < INF
    assert not any(isinstance(v, float) and math.isnan(v) for line in trainer.state.log_history for v in line.values())
    count("bad input borne, as documented", 1)


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint in its middle."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_dcsgd.reporting.report.try_to_write_report", lambda run_dir: None)
        feature_trainer(folder, max_steps=4, save_strategy="steps", save_steps=2).train()
    return folder


def edit_state(folder: Path, change: Callable[[dict], Any]) -> None:
    path = folder / "checkpoint-2" / "trainer_state.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))


def saved(state: dict) -> dict:
    return state["stateful_callbacks"]["PrivacyCallback"]["attributes"]["saved"]


def edit_saved(change: Callable[[dict], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_state(folder, lambda state: change(saved(state)))


def write(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content)


FILES: tuple[tuple[str, Callable[[Path], Any], type[Exception], str], ...] = (
    ("no checkpoint", lambda f: shutil.rmtree(f / "checkpoint-2"), ValueError, "complete checkpoint at"),
    ("state gone", lambda f: (f / "checkpoint-2/trainer_state.json").unlink(), ValueError, "missing or broken"),
    ("state is empty", write("checkpoint-2/trainer_state.json", b""), ValueError, "missing or broken"),
    ("state is a list", write("checkpoint-2/trainer_state.json", b"[]"), ValueError, "missing or broken"),
    ("state is binary", write("checkpoint-2/trainer_state.json", b"\x80\x04\x95"), ValueError, "missing or broken"),
    (
        "no privacy state",
        lambda f: edit_state(f, lambda s: s["stateful_callbacks"].clear()),
        ValueError,
        "not written by",
    ),
    ("other σ", edit_saved(lambda s: s["plan"].update(noise_multiplier=0.5)), ValueError, "noise_multiplier"),
    ("other N", edit_saved(lambda s: s["plan"].update(dataset_size=65)), ValueError, "dataset_size: 65 .* 64 now"),
    ("unknown setting", edit_saved(lambda s: s["plan"].update(bribe=1)), ValueError, "got also bribe"),
    ("fewer charges", edit_saved(lambda s: s["mechanism"].update(charged=0)), RuntimeError, "expected 0 charged"),
    ("negative charges", edit_saved(lambda s: s["mechanism"].update(charged=-1)), ValueError, "charged >= 0, got -1"),
    ("no witness", edit_saved(lambda s: s["mechanism"].update(ledger_head=None)), RuntimeError, "ledger_head"),
    ("false witness", edit_saved(lambda s: s["mechanism"].update(ledger_head="0" * 64)), RuntimeError, "not there"),
    ("NaN threshold", edit_saved(lambda s: s["mechanism"]["threshold"].update(clip_threshold=NAN)), ValueError, "nan"),
    ("ledger is gone", lambda f: (f / PrivacyLedger.FILENAME).unlink(), RuntimeError, "found none"),
    ("ledger is empty", write(PrivacyLedger.FILENAME, b""), RuntimeError, "found none"),
    ("ledger is binary", write(PrivacyLedger.FILENAME, bytes(range(256))), RuntimeError, "ledger|found none"),
    ("ledger of numbers", write(PrivacyLedger.FILENAME, b"1\n2\n3\n"), RuntimeError, "found none|ledger line"),
    (
        "ledger without a plan",
        write(PrivacyLedger.FILENAME, b'{"kind": "run", "hash": "0"}\n'),
        RuntimeError,
        "does not follow",
    ),
)


@pytest.mark.parametrize(("name", "damage", "error", "message"), FILES, ids=[name for name, *_ in FILES])
def test_damaged_files_are_refused_and_nothing_is_charged(
    finished: Path,
    tmp_path: Path,
    name: str,
    damage: Callable[[Path], Any],
    error: type[Exception],
    message: str,
    count: Count,
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    damage(folder)
    ledger = folder / PrivacyLedger.FILENAME
    before = ledger.read_bytes() if ledger.exists() else None
    trainer = feature_trainer(folder, max_steps=4, save_strategy="steps", save_steps=2)
    with pytest.raises(error, match=message) as caught:
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert trainer.mechanism is None
    assert (ledger.read_bytes() if ledger.exists() else None) == before
    assert Path(traceback.extract_tb(caught.value.__traceback__)[-1].filename).is_relative_to(PACKAGE)
    count("bad input refused before any release: files", 1)


def test_an_output_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        feature_trainer(tmp_path / "file").train()


def test_an_error_in_the_midst_of_a_run_leaves_it_charged(tmp_path: Path) -> None:
    """Documented: a row that cannot be used ends the run where it is drawn, and the steps before it stay charged."""
    trainer = feature_trainer(tmp_path, rows=changed(40, labels=torch.tensor(3)))
    draws = iter([[0, 1], [2], [40], [3]])
    force_draws(trainer, lambda: next(draws))
    with pytest.raises(ValueError, match="labels from 0 to 2"):
        trainer.train()
    assert charged(tmp_path) == 2


def test_the_table_is_long_enough() -> None:
    assert len(TABLE) + len(FILES) >= 60
    names = [case.name for case in TABLE]
    assert len(set(names)) == len(names)
