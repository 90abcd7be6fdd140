"""Examples must not feel how far their batch is padded, which is up to the longest of the others."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES, LENGTH, Architecture
from tiny_tasks import pad, text_rows, text_trainer, tiny_bert
from torch import Tensor, nn

from hf_dcsgd.checks.padding import padded_and_bare, require_padding_invariance
from hf_dcsgd.ghost import BatchCouplingError
from hf_dcsgd.privacy.ledger import PrivacyLedger
from hf_dcsgd.tasks.losses import per_example_losses, split_labels

pytestmark = pytest.mark.usefixtures("no_report_page")

TEXT = [
    a for a in ARCHITECTURES.values() if a.task not in ("seq2seq_lm",) and "resnet" not in a.name and a.name != "vit"
]


def losses_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    inputs, labels = split_labels(model, batch)
    with torch.no_grad():
        return per_example_losses(model, model(**inputs), labels, attention_mask=batch.get("attention_mask"))


def split_rows(arch: Architecture, model: nn.Module, n: int = 8) -> list[dict[str, Tensor]]:
    """The rows of the table's padded batch, without their padding."""
    inputs, labels = arch.batch(model, n=n)
    batch = {**inputs, **(labels if isinstance(labels, dict) else {"labels": labels})}
    rows = []
    for i in range(n):
        kept = inputs["attention_mask"][i].bool()
        rows.append({k: v[i][kept] if v.dim() > 1 and v.shape[1] == LENGTH else v[i] for k, v in batch.items()})
    return rows


def collator(pad_token: int, left: bool = False, multiple: int = 1):  # type: ignore[no-untyped-def]
    fill = {"input_ids": pad_token, "labels": -100}

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        longest += -longest % multiple

        def padded(name: str, value: Tensor) -> Tensor:
            if value.dim() == 0 or (name == "labels" and len(value) > longest):
                return value
            rest = value.new_full((longest - len(value),), fill.get(name, 0))
            return torch.cat([rest, value] if left else [value, rest])

        return {name: torch.stack([padded(name, row[name]) for row in rows]) for name in rows[0]}

    return collate


def pad_token(model: nn.Module) -> int:
    return getattr(getattr(model, "config", None), "pad_token_id", None) or 0


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("arch", TEXT, ids=lambda arch: arch.name)
def test_padding_on_the_right_side_passes_everywhere(arch: Architecture, multiple: int) -> None:
    model = arch.build().eval()
    left = arch.name == "xlnet"
    found = padded_and_bare(collator(pad_token(model), left, multiple), split_rows(arch, model))
    assert found is not None
    padded, bare = found
    assert padded["input_ids"].shape[1] == LENGTH + -LENGTH % multiple
    assert bare["input_ids"].shape[1] == 4
    require_padding_invariance(losses_of(model, padded), losses_of(model, bare), 1e-3)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "gpt2", "gpt2_lm_tied", "llama", "modernbert"])
def test_padding_on_the_wrong_side_is_found(name: str) -> None:
    """Absolute positions move, the first token is not the class token, or the first word is predicted from padding."""
    arch = ARCHITECTURES[name]
    model = arch.build().eval()
    padded, bare = padded_and_bare(collator(pad_token(model), left=True), split_rows(arch, model))
    with pytest.raises(BatchCouplingError, match="changes with the padding of its batch"):
        require_padding_invariance(losses_of(model, padded), losses_of(model, bare), 1e-3)


def test_seq2seq_targets_are_not_cut_with_the_source() -> None:
    model = ARCHITECTURES["t5"].build().eval()
    rows = [
        {
            "input_ids": torch.arange(5, 5 + n),
            "attention_mask": torch.ones(n, dtype=int),
            "labels": torch.arange(6, 12),
        }
        for n in (6, 4, 3)
    ]
    padded, bare = padded_and_bare(collator(0), rows, is_encoder_decoder=True)
    assert padded["input_ids"].shape == padded["labels"].shape == (1, 6)
    assert (bare["input_ids"].shape, bare["labels"].shape) == ((1, 3), (1, 6))
    require_padding_invariance(losses_of(model, padded), losses_of(model, bare), 1e-3)


def test_question_answering_needs_the_mask() -> None:
    """Over all positions of the batch, padding included, the loss of an answer would follow the longest example."""
    arch = ARCHITECTURES["bert_qa"]
    model = arch.build().eval()
    padded, bare = padded_and_bare(collator(0), split_rows(arch, model))
    inputs, labels = split_labels(model, padded)
    unmasked = per_example_losses(model, model(**inputs), labels)
    assert not torch.allclose(unmasked, losses_of(model, bare), rtol=1e-2)
    torch.testing.assert_close(losses_of(model, padded), losses_of(model, bare))
    # As transformers computes it for the example alone.
    expected = model(**bare).loss
    torch.testing.assert_close(losses_of(model, padded)[0], expected)


def test_an_answer_in_the_padding_counts_for_nothing_however_long_the_batch() -> None:
    model = ARCHITECTURES["bert_qa"].build().eval()
    for length in (5, 9):
        batch = {
            "input_ids": torch.full((1, length), 7),
            "attention_mask": (torch.arange(length) < 4).long()[None],
            "start_positions": torch.tensor([4]),
            "end_positions": torch.tensor([8]),
        }
        assert losses_of(model, batch).tolist() == [0.0]


def test_batches_of_one_length_are_not_looked_at() -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": 1}, {"input_ids": [8, 9, 7], "labels": 0}]
    assert padded_and_bare(pad, rows) is None

    def to_max_length(rows: list[dict]) -> dict[str, Tensor]:
        return {name: value[1:] for name, value in pad([{"input_ids": [5] * 20, "labels": 0}, *rows]).items()}

    assert padded_and_bare(to_max_length, text_rows(8)) is None


# --- in the trainer --------------------------------------------------------------------------------------------------


class Averaging(nn.Module):
    """Averages over all positions, padding included."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked = masked
        self.embedding = nn.Embedding(60, 8)
        self.classifier = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        weights = (input_ids != 0).float() if self.masked else torch.ones_like(input_ids, dtype=torch.float32)
        hidden = (self.embedding(input_ids) * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
        return self.classifier(hidden)


def without_mask(rows: list[dict]) -> dict[str, Tensor]:
    return {name: value for name, value in pad(rows).items() if name != "attention_mask"}


def test_a_model_without_a_mask_is_refused_before_anything_is_charged(tmp_path: Path) -> None:
    options = {"data_collator": without_mask}
    text_trainer(tmp_path / "fine", model=Averaging(masked=True), trainer_options=options, max_steps=1).train()
    trainer = text_trainer(tmp_path / "bad", model=Averaging(masked=False), trainer_options=options, max_steps=1)
    with pytest.raises(BatchCouplingError, match="padding='max_length'"):
        trainer.train()
    assert not (tmp_path / "bad" / PrivacyLedger.FILENAME).exists()


def test_left_padding_of_a_model_that_counts_from_the_left_is_refused(tmp_path: Path) -> None:
    def pad_left(rows: list[dict]) -> dict[str, Tensor]:
        batch = pad([{**row, "input_ids": row["input_ids"][::-1]} for row in rows])
        return {name: value.flip(1) if value.dim() > 1 else value for name, value in batch.items()}

    trainer = text_trainer(tmp_path, trainer_options={"data_collator": pad_left}, max_steps=1)
    with pytest.raises(BatchCouplingError, match="padding_side"):
        trainer.train()
    assert not (tmp_path / PrivacyLedger.FILENAME).exists()


def test_a_collator_that_masks_at_random_is_compared_on_the_same_masks(tmp_path: Path) -> None:
    def masking(rows: list[dict]) -> dict[str, Tensor]:
        batch = pad(rows)
        hidden = (torch.rand(batch["input_ids"].shape) < 0.3) & batch["attention_mask"].bool()
        return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 4)}

    trainer = text_trainer(tmp_path, model=tiny_bert(), trainer_options={"data_collator": masking}, max_steps=1)
    assert isinstance(trainer.train(), hf.trainer_utils.TrainOutput)
