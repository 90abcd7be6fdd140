"""Ordinary user code that used to let one record move the gradients of others: bounded by C now, or refused.

Every test trains as a user would, for one step, on all rows and on all but the adversary's, and compares what is
handed to the release. 1.0 is the change that ε is computed for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from architectures import randomized
from datasets import Dataset
from tiny_tasks import pad, private_args, text_rows, tiny_bert
from torch import Tensor, nn

from hf_dcsgd import DCSGDTrainer
from hf_dcsgd.audit import audit_strategy
from hf_dcsgd.data.rows import RowCollator
from hf_dcsgd.ghost import BatchCouplingError, UnsupportedModelError
from hf_dcsgd.privacy.ledger import PrivacyLedger
from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.privacy.sampling import PoissonBatchSampler

pytestmark = pytest.mark.usefixtures("no_report_page", "quick_statements")

CLIP = 0.1  # below the norms of these models, so that every example is clipped
ROWS = 32
Rows = Sequence[dict[str, Any]]


@pytest.fixture
def moved_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., float]]:
    """How far the last row moves the clipped sum, in units of C."""
    sums: list[Tensor] = []
    release = DPMechanism.release

    def keep(self: DPMechanism, clipped_sum: Tensor) -> Any:
        sums.append(clipped_sum.double())
        return release(self, clipped_sum)

    monkeypatch.setattr(DPMechanism, "release", keep)

    def measure(model: Callable[[], nn.Module], rows: Any, **options: Any) -> float:
        for drawn in (len(rows), len(rows) - 1):
            monkeypatch.setattr(PoissonBatchSampler, "draw", lambda self, drawn=drawn: np.arange(drawn))
            settings = {"per_device_train_batch_size": 16, "max_steps": 1, "clipping": "fixed", "clip_threshold": CLIP}
            args = {name: options[name] for name in options.keys() & {"trainable_layers", "remove_unused_columns"}}
            others = {name: value for name, value in options.items() if name not in args}
            trainer = DCSGDTrainer(
                model(),
                private_args(tmp_path / f"run-{len(sums)}", **settings, **args),
                train_dataset=rows,
                **{"data_collator": pad, **others},
            )
            trainer.train()
        return float((sums[-2] - sums[-1]).norm()) / CLIP

    yield measure
    # What is refused is refused before a release, and charged at most.
    for ledger in tmp_path.glob(f"run-*/{PrivacyLedger.FILENAME}"):
        assert PrivacyLedger.read(ledger.parent).charged <= 1


def equal_rows(longer: int = 0) -> Rows:
    """Rows of one length, the last one longer where that is asked for."""
    rows = [{"input_ids": [5 + (7 * i + j) % 36 for j in range(6)], "labels": i % 3} for i in range(ROWS)]
    if longer:
        rows[-1]["input_ids"] = [5 + j % 36 for j in range(longer)]
    return rows


def transformed(transform: Callable[[dict[str, list[Any]]], dict[str, list[Any]]]) -> Dataset:
    dataset = Dataset.from_list(list(equal_rows(longer=30)))
    dataset.set_transform(transform)
    return dataset


# --- the dataset -----------------------------------------------------------------------------------------------------


def test_a_transform_that_cuts_a_record_into_several_rows(moved_by: Callable[..., float]) -> None:
    def chunks(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        cut = [(ids[k : k + 6], y) for ids, y in zip(batch["input_ids"], batch["labels"], strict=True)
               for k in range(0, len(ids), 6)]  # fmt: skip
        return {"input_ids": [ids for ids, _ in cut], "labels": [y for _, y in cut]}

    with pytest.raises(ValueError, match="one row for one index, got 5"):
        moved_by(tiny_bert, transformed(chunks))


def test_a_dataset_that_gives_two_views_of_a_record(moved_by: Callable[..., float]) -> None:
    class Views(torch.utils.data.Dataset):
        rows = equal_rows()

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> Any:
            return self.rows[index]

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self.rows[index] for index in indices for _ in range(2)]

    with pytest.raises(ValueError, match="one row for one index, got 2"):
        moved_by(tiny_bert, Views())


class FloatClassifier(nn.Module):
    """Takes numbers, so that transforms and collators have something to mix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)


def float_rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = [{"features": torch.randn(6, generator=generator), "labels": torch.tensor(i % 3)} for i in range(ROWS)]
    rows[-1]["features"] = torch.full((6,), 1e3)
    return rows


def test_a_transform_that_standardizes_over_what_it_is_handed(moved_by: Callable[..., float]) -> None:
    def standardized(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        values = torch.tensor([list(map(float, value)) for value in batch["features"]])
        return {**batch, "features": list((values - values.mean(0)) / (values.std(0, correction=0) + 1))}

    dataset = Dataset.from_list(
        [{"features": r["features"].tolist(), "labels": int(r["labels"])} for r in float_rows()]
    )
    dataset.set_transform(standardized)
    assert moved_by(FloatClassifier, dataset, data_collator=None, trainable_layers="all") <= 1.0001


# --- padding ---------------------------------------------------------------------------------------------------------


def left_padded(rows: Rows) -> dict[str, Tensor]:
    padded = pad(list(rows))
    length = padded["input_ids"].shape[1]
    for i, row in enumerate(rows):
        shift = length - len(row["input_ids"])
        for name in ("input_ids", "attention_mask"):
            padded[name][i] = padded[name][i].roll(shift)
    return padded


def test_left_padding_with_one_longer_record(moved_by: Callable[..., float]) -> None:
    config = hf.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=64, num_labels=3, pad_token_id=0,
                           resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)  # fmt: skip

    def model() -> nn.Module:
        return randomized(lambda: hf.GPT2ForSequenceClassification(config))

    assert moved_by(model, equal_rows(longer=40), data_collator=left_padded) <= 1.0001


class AveragingClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.classifier = nn.Embedding(64, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.classifier(self.embedding(input_ids).mean(1))


def test_a_classifier_that_averages_over_padding(moved_by: Callable[..., float]) -> None:
    assert moved_by(AveragingClassifier, equal_rows(longer=48), trainable_layers="all") <= 1.0001


@pytest.mark.parametrize("kind", ["flaubert", pytest.param("fnet", marks=pytest.mark.slow)])
def test_models_that_are_not_indifferent_to_padding(kind: str, moved_by: Callable[..., float]) -> None:
    common = {"vocab_size": 64, "num_labels": 3, "pad_token_id": 0, "max_position_embeddings": 64}
    if kind == "flaubert":
        config: Any = hf.FlaubertConfig(
            emb_dim=16, n_layers=2, n_heads=2, dropout=0, attention_dropout=0, summary_first_dropout=0, **common
        )
        make: Any = hf.FlaubertForSequenceClassification
    else:
        config = hf.FNetConfig(
            hidden_size=16, num_hidden_layers=2, intermediate_size=32, hidden_dropout_prob=0, **common
        )
        make = hf.FNetForSequenceClassification

    def collate(rows: Rows) -> dict[str, Tensor]:
        batch = pad(list(rows))
        return batch if kind == "flaubert" else {n: v for n, v in batch.items() if n != "attention_mask"}

    rows = equal_rows(longer=40)
    assert moved_by(lambda: randomized(lambda: make(config)), rows, data_collator=collate) <= 1.0001


# --- the collator ----------------------------------------------------------------------------------------------------


def labels_of_the_neighbor(rows: Rows) -> dict[str, Tensor]:
    batch = pad(list(rows))
    return {**batch, "labels": batch["labels"].roll(1)}


def tokens_of_the_neighbor(rows: Rows) -> dict[str, Tensor]:
    batch = pad(list(rows))
    batch["input_ids"][:, 3:] = batch["input_ids"].roll(1, 0)[:, 3:]
    return batch


def shared_demonstration(rows: Rows) -> dict[str, Tensor]:
    shown = rows[-1]["input_ids"][:4]
    return pad([{**row, "input_ids": [*shown, *row["input_ids"]]} for row in rows])


@pytest.mark.parametrize(
    "collate",
    [
        tokens_of_the_neighbor,
        *(pytest.param(more, marks=pytest.mark.slow) for more in (labels_of_the_neighbor, shared_demonstration)),
    ],
)
def test_collators_that_mix_whole_numbers(collate: Any, moved_by: Callable[..., float]) -> None:
    rows = [*equal_rows()[:-1], {"input_ids": [47] * 6, "labels": 2}]
    assert moved_by(tiny_bert, rows, data_collator=collate) <= 1.0001


def scaled_by_the_largest(rows: list[Any]) -> dict[str, Tensor]:
    batch = hf.default_data_collator(rows)
    return {**batch, "features": batch["features"] / batch["features"].abs().max()}


class ScaledClassifier(FloatClassifier):
    def forward(self, features: Tensor, scale: Any) -> Tensor:  # type: ignore[override]
        return self.layers(features / scale)


def with_a_number_of_the_batch(rows: list[Any]) -> dict[str, Any]:
    batch = hf.default_data_collator(rows)
    return {**batch, "scale": batch["features"].abs().max()}


@pytest.mark.parametrize(
    ("model", "collate"),
    [(FloatClassifier, scaled_by_the_largest), (ScaledClassifier, with_a_number_of_the_batch)],
    ids=["scales by the largest", "hands over a number of the batch"],
)
def test_collators_that_look_at_the_whole_batch(model: Any, collate: Any, moved_by: Callable[..., float]) -> None:
    assert moved_by(model, float_rows(), data_collator=collate, trainable_layers="all") <= 1.0001


# --- the model -------------------------------------------------------------------------------------------------------


class InEmbeddings(nn.Module):
    """Stands in for the dropout behind BERT's embeddings, in front of everything that is trained."""


class FakeQuantization(InEmbeddings):
    def forward(self, hidden: Tensor) -> Tensor:
        scale = hidden.detach().abs().max() / 127
        return hidden + ((hidden / scale).round() * scale - hidden).detach()


class MemoryBank(InEmbeddings):
    mean: Tensor | float = 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        remembered, self.mean = self.mean, hidden.detach().mean((0, 1))
        return hidden + 0.1 * remembered


class LargeCodebook(InEmbeddings):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(70_000))

    def forward(self, hidden: Tensor) -> Tensor:
        self.codes.data[: hidden.shape[-1]] = hidden.detach().mean((0, 1))
        return hidden


class NoiseThatHidesCentering(InEmbeddings):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(0, keepdim=True) + 0.1 * torch.randn_like(hidden)


class OneNumberForTheBatch(InEmbeddings):
    """As DINOv3 rescales its positions, under a name that is on nobody's list."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * (0.5 + torch.rand(1)) if self.training else hidden


@pytest.mark.parametrize(
    ("module", "error"),
    [
        (FakeQuantization, BatchCouplingError),
        (MemoryBank, BatchCouplingError),
        (LargeCodebook, UnsupportedModelError),
        (NoiseThatHidesCentering, BatchCouplingError),
        (OneNumberForTheBatch, BatchCouplingError),
    ],
    ids=lambda value: value.__name__,
)
def test_models_that_see_the_whole_batch_are_refused(
    module: type[nn.Module], error: type[Exception], moved_by: Callable[..., float]
) -> None:
    def model() -> nn.Module:
        made = tiny_bert()
        made.bert.embeddings.dropout = module()
        return made

    with pytest.raises(error):
        moved_by(model, equal_rows())


def test_noise_on_every_example_of_its_own_is_allowed(moved_by: Callable[..., float]) -> None:
    class InputNoise(InEmbeddings):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + 0.1 * torch.randn_like(hidden)

    def model() -> nn.Module:
        made = tiny_bert(dropout=0.1)
        made.bert.embeddings.dropout = InputNoise()
        return made

    moved_by(model, text_rows(ROWS))  # trains: masks differ between the two runs, so nothing can be compared


class ImageClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "num_attention_heads": 2}
        self.trunk = hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**sizes, intermediate_size=32, num_hidden_layers=2))
        self.classifier = nn.Linear(16, 3)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.classifier(self.trunk(pixel_values).pooler_output)


def test_dinov3_in_its_default_configuration(moved_by: Callable[..., float]) -> None:
    rows = [{"pixel_values": torch.randn(3, 16, 16), "labels": torch.tensor(i % 3)} for i in range(ROWS)]
    with pytest.raises(BatchCouplingError, match="once for a whole stack"):
        moved_by(ImageClassifier, rows, data_collator=None, trainable_layers="classifier")


# --- while a run goes on ---------------------------------------------------------------------------------------------


class CenteringOnRareExamples(InEmbeddings):
    """Mixes rows only where a certain token is among them: nothing that synthetic rows would show."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(0, keepdim=True) if self.switched_on else hidden

    switched_on = False


def test_coupling_that_only_real_rows_show_is_charged_and_not_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_bert()
    module = model.bert.embeddings.dropout = CenteringOnRareExamples()
    model.bert.embeddings.register_forward_pre_hook(
        lambda _, args, kwargs: setattr(module, "switched_on", bool((kwargs["input_ids"] == 47).any())),
        with_kwargs=True,
    )
    released: list[int] = []
    release = DPMechanism.release
    monkeypatch.setattr(DPMechanism, "release", lambda self, value: released.append(1) or release(self, value))
    rows = [*equal_rows()[:-1], {"input_ids": [47] * 6, "labels": 0}]
    monkeypatch.setattr(PoissonBatchSampler, "draw", lambda self: np.arange(ROWS))
    args = private_args(tmp_path, clipping="fixed", per_device_train_batch_size=ROWS, max_steps=1)
    trainer = DCSGDTrainer(model, args, pad, rows)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(BatchCouplingError) as caught:
        trainer.train()
    assert not released
    assert PrivacyLedger.read(tmp_path).charged == 1
    assert "47" not in str(caught.value)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


class LateCodebook(InEmbeddings):
    """Writes, where no version counts, and only when a certain row comes along."""

    switched_on = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(16))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.switched_on:
            self.codes.data.copy_(hidden.detach().mean((0, 1)))
        return hidden


def test_what_only_real_rows_write_into_a_frozen_part_is_not_saved(tmp_path: Path) -> None:
    model = tiny_bert()
    module = model.bert.embeddings.dropout = LateCodebook()
    args = private_args(tmp_path / "run", clipping="fixed", max_steps=1)
    trainer = DCSGDTrainer(model, args, pad, equal_rows())
    trainer.train()
    trainer.save_model(str(tmp_path / "before"))
    assert (tmp_path / "before" / "model.safetensors").exists()
    module.switched_on = True
    trainer.step.losses(pad(list(equal_rows()[:2])))
    with pytest.raises(UnsupportedModelError, match="codes"):
        trainer.save_model(str(tmp_path / "after"))
    assert not (tmp_path / "after").exists()


# --- the audit's adversary -------------------------------------------------------------------------------------------


def test_the_audit_plays_this_adversary(monkeypatch: pytest.MonkeyPatch) -> None:
    (report,) = audit_strategy("dc_sgd_e", levels=(4,))
    assert report.passed, str(report)
    # With a collator that sees all rows at once, as transformers calls it, most attacks succeed.
    monkeypatch.setattr(RowCollator, "__call__", lambda self, rows: [dict(self._collate(list(rows)))] if rows else [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (report,) = audit_strategy("dc_sgd_e", levels=(4,))
    assert len(report.failures) >= 4, str(report)
