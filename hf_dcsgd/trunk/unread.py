"""Leave out what nothing reads: all but one position of the last block, and of a language model's logits.

Classifiers of BERT's kind read the first position of the last block alone, so that the others need not be computed
there. There are two forms of this, and the first that leaves losses and norms of some rows what they are is used
(`find_narrowing`):

| form            | what is computed                                                    | where                       |
|-----------------|---------------------------------------------------------------------|-----------------------------|
| `OneQuery`      | one position of the block, one query, no keys and values            | BERT, RoBERTa, DistilBERT … |
| `FirstPosition` | keys and values of all positions, one position behind the attention | DeBERTa, MPNet, LoRA …      |

A causal language model that learns completions has no loss at the prompts in front of them. Their logits, which for a
small model and a large vocabulary are most of a step, are not computed (`without_unread_logits`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dcsgd.data.rows import LENGTH_MULTIPLE, Batch
from hf_dcsgd.ghost import BatchCouplingError, UnsupportedModelError
from hf_dcsgd.tasks.layer_selection import block_list
from hf_dcsgd.tasks.loss_kind import loss_kind, unwrapped_model
from hf_dcsgd.tasks.losses import IGNORE_INDEX
from hf_dcsgd.trunk.one_query import AttentionMode, OneQuery

# The first module behind the attention of a block that is given each position by itself, with what is added to it.
_BEHIND_ATTENTION = ("attention.output", "attention.LayerNorm", "sa_layer_norm")
Results = tuple[Tensor, Tensor]


class FirstPosition:
    """A block of which only the first position is computed behind its attention."""

    def __init__(self, block: nn.Module, behind_attention: nn.Module) -> None:
        self._block = block
        self._behind_attention = behind_attention

    @classmethod
    def of(cls, block: nn.Module) -> FirstPosition | None:
        """Find what is behind the attention; None where the block is not known to be built like this."""
        modules = dict(block.named_modules())
        return next((cls(block, modules[name]) for name in _BEHIND_ATTENTION if name in modules), None)

    @contextmanager
    def only(self) -> Iterator[None]:
        """Have forwards go on from the first position alone within a block."""
        first_query = _FirstQuery()

        def narrow(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(arg[:, :1] if isinstance(arg, Tensor) and arg.dim() == 3 else arg for arg in args)

        handles = [
            self._behind_attention.register_forward_pre_hook(narrow),
            self._block.register_forward_pre_hook(lambda *_: first_query.__enter__() and None),
            self._block.register_forward_hook(lambda *_: first_query.__exit__(None, None, None), always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _FirstQuery(AttentionMode):
    """Asks self-attention for the answer to its first query, and gives it to the others, which nothing reads."""

    def answer(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        mask = options.get("attn_mask")
        if mask is not None and mask.shape[-2] > 1:
            options = {**options, "attn_mask": mask[..., :1, :]}
        first = nn.functional.scaled_dot_product_attention(query[..., :1, :], key, value, **options)
        return first.expand(*query.shape[:-1], value.shape[-1])


Narrowing: TypeAlias = OneQuery | FirstPosition


def ways_to_narrow(model: nn.Module) -> list[Narrowing]:
    """List the forms in which the first position of the last block may be computed alone, the cheaper one first."""
    base = unwrapped_model(model)
    try:
        last = list(base.get_submodule(block_list(base)).children())[-1]
    except ValueError:
        return []
    return [form for form in (OneQuery.of(last), FirstPosition.of(last)) if form is not None]


def find_narrowing(
    model: nn.Module, results: Callable[[], Results], tolerance_of: Callable[[Tensor], float]
) -> Narrowing | None:
    """Return the cheapest form that leaves losses and norms, as `results` computes them, what they are; None: none."""
    forms = ways_to_narrow(model)
    if not forms:
        return None
    expected = results()
    tolerance = tolerance_of(expected[0])
    return next((form for form in forms if _agrees(form, results, expected, tolerance)), None)


def _agrees(form: Narrowing, results: Callable[[], Results], expected: Results, tolerance: float) -> bool:
    try:
        with form.only():
            found = results()
    except (BatchCouplingError, UnsupportedModelError, IndexError, RuntimeError, TypeError, ValueError):
        return False  # something else takes the positions that are not there
    return all(
        torch.allclose(one, other, rtol=tolerance, atol=0.1 * tolerance * float(other.abs().max()))
        for one, other in zip(found, expected, strict=True)
    )


# The argument of transformers' causal language models that says how many logits are computed, from the end.
_LOGITS_TO_KEEP = "logits_to_keep"


def can_leave_out_logits(model: nn.Module) -> bool:
    """Tell whether a model is a causal language model that computes the last of its logits alone, if asked to."""
    base = unwrapped_model(model)
    if not isinstance(base, PreTrainedModel) or _LOGITS_TO_KEEP not in inspect.signature(base.forward).parameters:
        return False
    try:
        return loss_kind(base) == "causal_lm"
    except ValueError:
        return False


def without_unread_logits(inputs: Batch, labels: Any) -> tuple[Batch, Any]:
    """Ask such a model for the logits that a loss over these labels (n, T) reads, and return the labels of these.

    Counted from the end, and rounded up, so that there are few shapes.
    """
    ids = inputs.get("input_ids")
    if ids is None or not isinstance(labels, Tensor) or labels.shape != ids.shape or _LOGITS_TO_KEEP in inputs:
        return inputs, labels
    learned = (labels[:, 1:] != IGNORE_INDEX).any(dim=0)  # a token is predicted from the position before it
    count = len(learned) - int(learned.int().argmax()) + 1 if learned.any() else 1
    count = min(labels.shape[1], -(-count // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)
    return {**inputs, _LOGITS_TO_KEEP: count}, labels[:, -count:]
