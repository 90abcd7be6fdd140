"""Rows for the zoo: a small dataset for each task, and the records that are added to it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models
from torch import nn
from zoo_models import NUM_LABELS, Species
from zoo_sizes import IMAGE_SIZE, POSITIONS, VOCABULARY

from hf_dcsgd.data.rows import RowCollator, with_rounded_lengths

Row = dict[str, Any]

BEGIN, END, FIRST_TOKEN = 1, 2, 5
LENGTHS = (4, 5, 6, 5, 10, 12, 11)


def text_row(task: str, tokens: Sequence[int]) -> Row:
    ids = [BEGIN, *tokens, END]
    labels: Any = ids
    if task in ("SequenceClassification", "ImageClassification"):
        labels = sum(ids) % NUM_LABELS
    elif task == "TokenClassification":
        labels = [token % NUM_LABELS for token in ids]
    elif task == "MaskedLM":
        labels = [token if i % 3 == 1 else -100 for i, token in enumerate(ids)]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}


def random_text(task: str, length: int, seed: int) -> Row:
    tokens = torch.randint(FIRST_TOKEN, 60, (length - 2,), generator=torch.Generator().manual_seed(seed))
    return text_row(task, tokens.tolist())


def image_row(config: Any, seed: int) -> Row:
    size = getattr(config, "image_size", IMAGE_SIZE)
    shape = (getattr(config, "num_channels", 3), *((size, size) if isinstance(size, int) else size))
    if config.model_type == "siglip2":  # takes patches
        vision = config.vision_config
        shape = (vision.num_patches, vision.num_channels * vision.patch_size**2)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    row = {"pixel_values": pixels, "labels": seed % NUM_LABELS}
    if config.model_type == "siglip2":
        row |= {"pixel_attention_mask": torch.ones(len(pixels)).long(), "spatial_shapes": torch.tensor([4, 4])}
    return row


def takes_pixels(kind: Species) -> bool:
    return kind.task == "ImageClassification" and kind.model_type != "imagegpt"


def rows_and_records(kind: Species, config: Any) -> tuple[list[Row], dict[str, Row]]:
    """Return the rows of a small dataset, and the records that are added to it."""
    if takes_pixels(kind):
        rows = [image_row(config, seed) for seed in range(8)]
        record = rows.pop()
        pixels = record["pixel_values"]
        return rows, {
            "A": record,
            "C: constant": {**record, "pixel_values": torch.full_like(pixels, 3.0)},
            "C: extreme": {**record, "pixel_values": pixels.sign() * 1e4},
        }
    task, last = kind.task, VOCABULARY - 2
    return [random_text(task, length, seed) for seed, length in enumerate(LENGTHS)], {
        "A": random_text(task, 5, 100),
        "B: longest of its stack": random_text(task, 8, 101),
        "B: alone in its stack": random_text(task, 23, 102),
        "C: one token": text_row(task, [last] * 6),
        "C: rare tokens": text_row(task, [last, 4, last - 1] * 4 + [last]),
    }


def collator(kind: Species, model: nn.Module) -> RowCollator:
    """As the trainer's: padded by the row's own length, without the columns that the model does not take."""
    taken = set(inspect.signature(model.forward).parameters)

    def kept(row: Row) -> Row:
        return {name: value for name, value in row.items() if name in taken or name == "labels"}

    if takes_pixels(kind):
        return RowCollator(lambda rows: hf.default_data_collator([kept(row) for row in rows]))
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t4"))
    pad_token = f"t{getattr(model.config, 'pad_token_id', None) or 0}"
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad_token)
    labels_tokens = kind.task in ("TokenClassification", "MaskedLM", "CausalLM")
    make: Any = hf.DataCollatorForTokenClassification if labels_tokens else hf.DataCollatorWithPadding
    padded = with_rounded_lengths(make(tokenizer, pad_to_multiple_of=FULL_LENGTH.get(kind.model_type)))
    return RowCollator(lambda rows: kept(EXTRA_INPUTS.get(kind.model_type, dict)(padded(rows))))


def _with_boxes(batch: Any) -> Any:
    return {**batch, "bbox": torch.zeros(*batch["input_ids"].shape, 4, dtype=torch.long)}


# These take rows of one length alone.
FULL_LENGTH = dict.fromkeys(("perceiver", "reformer"), POSITIONS)
EXTRA_INPUTS: dict[str, Any] = {"bros": _with_boxes}
