"""`nn.Embedding`, and its scaled kind in transformers: each position adds its output gradient to its token's row."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_dcsgd.ghost.contributions import Contribution, OneHotRows
from hf_dcsgd.ghost.registry import register_recognized, register_rule, trainable


@register_rule(nn.Embedding)
def embedding_rule(module: nn.Module, inputs: Tensor, output_grad: Tensor) -> dict[str, Contribution]:
    assert isinstance(module, nn.Embedding)
    if not trainable(module, "weight"):
        return {}
    index = inputs.reshape(inputs.shape[0], inputs.shape[1:].numel())
    rows = output_grad.reshape(*index.shape, output_grad.shape[-1])
    if module.padding_idx is not None:
        rows = rows.masked_fill((index == module.padding_idx)[:, :, None], 0.0)
    return {"weight": OneHotRows(index, rows)}


def scaled_embedding_rule(module: nn.Module, inputs: Tensor, output_grad: Tensor) -> dict[str, Contribution]:
    return embedding_rule(module, inputs, output_grad * _scale(module))


def is_scaled_embedding(module: nn.Module) -> bool:
    """Recognize BART's and Gemma's word embeddings: the output is the looked-up row times `embed_scale`."""
    if not isinstance(module, nn.Embedding) or not hasattr(module, "embed_scale"):
        return False
    index = torch.arange(min(4, module.num_embeddings), device=module.weight.device)[None]
    with torch.no_grad():
        return torch.allclose(module(index), module.weight[index] * _scale(module))


def _scale(module: nn.Module) -> Tensor | float:
    scale = module.embed_scale
    return scale if isinstance(scale, Tensor) else float(scale)  # type: ignore[arg-type]


register_recognized(is_scaled_embedding, scaled_embedding_rule)
