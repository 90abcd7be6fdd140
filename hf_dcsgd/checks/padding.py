"""The second check before training: how far a batch is padded must not matter to its examples.

A batch is padded to its longest example. If a loss follows that length (positions counted from the padded side, a
model without an attention mask, logits of padding in a softmax), one example moves the gradients of all others, and
clipping each of them bounds nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_dcsgd.ghost import BatchCouplingError

Batch = Mapping[str, Any]


def padded_and_bare(
    collate: Callable[[list[Any]], Batch], rows: Sequence[Any], is_encoder_decoder: bool = False
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """One example as the batch of `rows` pads it, and without that padding; None if batches are not padded.

    Also None where it cannot be told apart: a random collator without an attention mask.
    """

    def collated(chosen: Sequence[Any]) -> Batch:
        return collate([copy.deepcopy(row) for row in chosen])  # collators may write into rows

    together = collated(rows)
    index = _most_padded(together, len(rows))
    if index is None:
        sizes = [batch_size_of(collated([row])) for row in rows]
        index = sizes.index(min(sizes))
    alone = collated([rows[index]])
    if _row_shapes(together) == _row_shapes(alone):
        return None
    padded = {
        name: value[index : index + 1] if _has_rows(value, len(rows)) else value for name, value in together.items()
    }
    mask = padded.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return padded, _trimmed(padded, mask[0].bool(), is_encoder_decoder)
    again = collated([rows[index]])
    if any(isinstance(v, Tensor) and not torch.equal(v, again[name]) for name, v in alone.items()):
        return None
    return padded, dict(alone)


def _most_padded(batch: Batch, n: int) -> int | None:
    mask = batch.get("attention_mask")
    return int(mask.bool().sum(1).argmin()) if _has_rows(mask, n) and mask.dim() == 2 else None  # type: ignore[union-attr]


def batch_size_of(batch: Batch) -> int:
    """How many numbers a batch holds."""
    return sum(value.numel() for value in batch.values() if isinstance(value, Tensor))


def _trimmed(example: Batch, kept: Tensor, is_encoder_decoder: bool) -> dict[str, Any]:
    """Without the positions that the attention mask leaves out; what belongs to a decoder is left as it is."""
    trimmed = dict(example)
    for name, value in example.items():
        of_decoder = is_encoder_decoder and ("decoder" in name or "labels" in name)
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == len(kept) and not of_decoder:
            trimmed[name] = value[:, kept]
        elif name in ("start_positions", "end_positions"):
            trimmed[name] = value - int(kept.long().argmax())  # counted from the left, where padding may have been
    return trimmed


def _row_shapes(batch: Batch) -> dict[str, torch.Size]:
    return {name: value.shape[1:] for name, value in batch.items() if isinstance(value, Tensor)}


def _has_rows(value: Any, n: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == n


def require_padding_invariance(padded_loss: Tensor, bare_loss: Tensor, tolerance: float) -> None:
    """Raises `BatchCouplingError` if an example's loss with padding is not its loss without."""
    if torch.isfinite(bare_loss).all() and not torch.allclose(padded_loss, bare_loss, rtol=tolerance, atol=tolerance):
        raise BatchCouplingError(
            "the loss of an example changes with the padding of its batch, that is with the lengths of other "
            "examples, so clipping bounds nothing. Pad on the side that the model expects (tokenizer.padding_side, "
            "mostly 'right'), give the model an attention mask, or pad all examples to one length "
            "(padding='max_length')"
        )
