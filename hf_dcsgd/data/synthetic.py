"""Synthetic rows, made up or of the shape of real ones, for checks that must not learn from private data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_dcsgd.data.rows import Batch


def synthetic_like(
    model: nn.Module,
    row: Mapping[str, Any],
    rows: int,
    keep_tokens: tuple[int, ...] = (),
    *,
    keep_numbers: bool = False,
) -> Batch:
    """Make a stack of `rows` synthetic rows with the shapes of a stack of one.

    Tokens and numbers are random, attention is full, everything else is zero. Special tokens, those in `keep_tokens`
    and those of the model's config, stay where they are and appear nowhere else, since some models look for them.
    Where the vocabulary is not known, the tokens are those of the row in another order. With `keep_numbers`, whole
    numbers other than tokens stay those of the row, for models that cannot take zeros (the shape of an image).
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = _vocabulary(model)
    special = torch.tensor(sorted({*keep_tokens, *_config_tokens(model)}), dtype=torch.long)
    made: Batch = {}
    for name, value in row.items():
        if isinstance(value, list):
            made[name] = value * rows
        elif not isinstance(value, Tensor):
            made[name] = value
        else:
            value = value.repeat(rows, *[1] * (value.dim() - 1))
            kept = keep_numbers and not value.is_floating_point() and "input_ids" not in name
            made[name] = value if kept else _made_up(name, value, vocabulary, special, generator)
    return made


def synthetic_batch(model: Any, kind: str, n: int, length: int) -> dict[str, Any]:
    """Make a batch up, with labels for this kind of loss (`tasks.losses.loss_kind`).

    Lengths are cut to what the model can take. Questions with several answers have two.
    """
    config: Any = model.config.get_text_config()
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        pixels = torch.zeros(1, getattr(config, "num_channels", 3), height, width)
        return synthetic_like(model, {"pixel_values": pixels, "labels": torch.zeros(1, dtype=torch.long)}, n)
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"cannot make examples up for {type(model).__name__}, whose input is {model.main_input_name!r}, neither a "
            "text nor an image"
        )
    positions = getattr(config, "max_position_embeddings", None) or length
    length = max(min(length, positions - 4), 2)
    special = set(_config_tokens(model))  # these would stay as they are
    ordinary = next((token for token in range(config.vocab_size) if token not in special), 0)
    tokens = torch.full((1, length), ordinary)
    end = end_token(config)
    if end is not None:
        tokens[:, -1] = end
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    kept = () if end is None else (end,)
    if kind == "multiple_choice":
        made = synthetic_like(model, batch, 2 * n, kept)
        return {name: value.view(n, 2, length) for name, value in made.items()} | _labels(kind, n, length, 2)
    made = synthetic_like(model, batch, n, kept)
    return {**made, **_labels(kind, n, length, getattr(config, "num_labels", 2))}


def end_token(config: Any) -> int | None:
    """Return the token that ends a text, if a configuration of text names one within its vocabulary."""
    end = getattr(config, "eos_token_id", None)
    end = end[0] if isinstance(end, list) else end
    return None if end is None or end >= config.vocab_size else end


def _labels(kind: str, n: int, length: int, num_labels: int) -> dict[str, Tensor]:
    zeros = torch.zeros(n, dtype=torch.long)
    if kind == "question_answering":
        return {"start_positions": zeros, "end_positions": zeros + 1}
    if kind == "regression":
        return {"labels": torch.linspace(0.0, 1.0, n)}
    if kind == "multi_label_classification":
        return {"labels": torch.eye(num_labels)[zeros]}
    if kind in ("single_label_classification", "multiple_choice"):
        return {"labels": zeros}
    return {"labels": torch.zeros(n, length, dtype=torch.long)}


def _made_up(name: str, value: Tensor, vocabulary: int | None, special: Tensor, generator: torch.Generator) -> Tensor:
    if value.is_floating_point():
        return torch.rand(value.shape, generator=generator).to(value)
    if "input_ids" not in name:
        return torch.ones_like(value) if "mask" in name else torch.zeros_like(value)
    if vocabulary is None:
        return torch.stack([row.flatten()[torch.randperm(row.numel(), generator=generator)] for row in value]).view_as(
            value
        )
    ordinary = torch.arange(vocabulary)
    ordinary = ordinary[~torch.isin(ordinary, special)]
    tokens = ordinary[torch.randint(len(ordinary), value.shape, generator=generator)].to(value)
    return torch.where(torch.isin(value, special.to(value)), value, tokens)


def _vocabulary(model: nn.Module) -> int | None:
    input_embeddings: Any = getattr(model, "get_input_embeddings", None)
    try:
        return getattr(input_embeddings(), "num_embeddings", None) if callable(input_embeddings) else None
    except NotImplementedError:  # models of images, some of them
        return None


def _config_tokens(model: nn.Module) -> list[int]:
    """List the ids of tokens that a transformers config names (`eos_token_id` and the like)."""
    to_dict: Any = getattr(getattr(model, "config", None), "to_dict", None)
    named = [value for key, value in to_dict().items() if key.endswith("_token_id")] if callable(to_dict) else []
    return [token for value in named for token in (value if isinstance(value, list) else [value]) if token is not None]
