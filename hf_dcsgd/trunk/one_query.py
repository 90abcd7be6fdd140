"""A block of which one position is read: its attention answers one query, without keys and values of all positions.

With one query per head, both projections can be moved to where there is one vector instead of T (x_t: the block's
input; K, V: rows of the two matrices that belong to a head; a: attention weights, after dropout):

    score_t = q·(K x_t) = (Kᵀq)·x_t          output = Σ_t a_t (V x_t + b) = V (Σ_t a_t x_t) + b Σ_t a_t

The bias of the keys adds the same to all scores of a head, so that it has no effect, and its gradient is zero. The
gradient of a matrix is one outer product per head (`Blocks`), whatever the length of the row.

The model's own code still runs the block, on its first position: in place of key and value layers it finds stand-ins
which hand on NaN. Attention that is not torch's one operation, or that does something else with keys and values
(rotates, repeats or keeps them) gives NaN, and `find_narrowing` takes the other form then.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_dcsgd.ghost.contributions import Blocks, Contribution, Dense
from hf_dcsgd.ghost.registry import trainable

# What the layers for queries, keys and values are called in self-attention.
_LAYERS = (("query", "key", "value"), ("q", "k", "v"), ("q_lin", "k_lin", "v_lin"))


class OneQuery:
    """A block whose attention has plain linear layers for keys and values."""

    def __init__(self, block: nn.Module, attention: nn.Module, key: str, value: str) -> None:
        self._block, self._attention, self._names = block, attention, (key, value)

    @classmethod
    def of(cls, block: nn.Module) -> OneQuery | None:
        """Find the attention of a block; None where there is no such one, or more than one."""
        found = [
            cls(block, module, key, value)
            for module in block.modules()
            for query, key, value in _LAYERS
            if all(type(getattr(module, name, None)) is nn.Linear for name in (query, key, value))
        ]
        return found[0] if len(found) == 1 else None

    @contextmanager
    def only(self) -> Iterator[None]:
        """Have forwards compute the first position of the block alone."""
        key, value = (getattr(self._attention, name) for name in self._names)
        attend = _Attend(key, value)

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            states = args[0] if args else kwargs["hidden_states"]
            attend.states = states
            attend.__enter__()
            for name in self._names:
                self._attention._modules[name] = _StandIn(key.out_features)
            first = states[:, :1]
            return ((first, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": first})

        def leave(*_: Any) -> None:
            if attend.states is None:  # never entered: the block was not given what it takes
                return
            self._attention._modules.update(zip(self._names, (key, value), strict=True))
            attend.__exit__(None, None, None)
            attend.states = None

        handles = [
            self._block.register_forward_pre_hook(enter, with_kwargs=True),
            self._block.register_forward_hook(leave, always_call=True),
        ]
        key.forward, value.forward = _KeyHeads(key), _ValueHeads(value)
        try:
            yield
        finally:
            del key.forward, value.forward
            for handle in handles:
                handle.remove()


class _StandIn(nn.Module):
    """Takes the place of a layer whose output is not needed, and spoils the results of all that need it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def forward(self, states: Tensor) -> Tensor:
        return states.new_full((*states.shape[:-1], self._size), torch.nan)


class AttentionMode(TorchFunctionMode):
    """Has `answer` take the place of torch's attention, where that is one operation and not causal."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention or len(args) != 3 or kwargs.get("is_causal"):
            return func(*args, **kwargs)
        return self.answer(*args, **kwargs)

    @abstractmethod
    def answer(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return what is handed on in place of torch's answer; `options` are those of torch's operation."""


class _Attend(AttentionMode):
    """Answers the one query of torch's attention from the states of all positions."""

    def __init__(self, key: nn.Linear, value: nn.Linear) -> None:
        super().__init__()
        self._key, self._value = key, value
        self.states: Tensor | None = None

    def answer(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return the answer (n, H, 1, d/H) to a query of this shape; key and value are those of the stand-ins."""
        assert self.states is not None
        mask, dropout, scale = options.get("attn_mask"), options.get("dropout_p", 0.0), options.get("scale")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = self._key(query.squeeze(2) * scale) @ self.states.mT
        if mask is not None:
            # (n, 1 or H, 1 or T, T) → (n, 1 or H, T)
            mask = mask[..., 0, :]
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        weights = nn.functional.dropout(scores.softmax(-1), dropout)
        mixed = torch.cat([weights @ self.states, weights.sum(-1, keepdim=True)], -1)
        return self._value(mixed).unsqueeze(2)


def _by_head(weight: Tensor, heads: int) -> Tensor:
    return weight.unflatten(0, (heads, -1))


class _KeyHeads:
    """The forward of a key layer for one query: (n, H, p/H) → (n, H, d), each head through its rows, transposed."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer

    def __call__(self, query: Tensor) -> Tensor:
        return torch.bmm(query.transpose(0, 1), _by_head(self._layer.weight, query.shape[1])).transpose(0, 1)

    @staticmethod
    def ghost_rule(module: nn.Module, inputs: Tensor, output_grad: Tensor) -> dict[str, Contribution]:
        return {"weight": Blocks(inputs, output_grad)} if trainable(module, "weight") else {}


class _ValueHeads:
    """The forward of a value layer for mixed states and the sum of their weights: (n, H, d + 1) → (n, H, p/H)."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer

    def __call__(self, mixed: Tensor) -> Tensor:
        states, mass = mixed[..., :-1], mixed[..., -1:]
        output = torch.bmm(states.transpose(0, 1), _by_head(self._layer.weight, mixed.shape[1]).mT).transpose(0, 1)
        return output if self._layer.bias is None else output + mass * _by_head(self._layer.bias, mixed.shape[1])

    @staticmethod
    def ghost_rule(module: nn.Module, inputs: Tensor, output_grad: Tensor) -> dict[str, Contribution]:
        states, mass = inputs[..., :-1], inputs[..., -1:]
        contributions: dict[str, Contribution] = {}
        if trainable(module, "weight"):
            contributions["weight"] = Blocks(output_grad, states)
        if trainable(module, "bias"):
            contributions["bias"] = Dense((output_grad * mass).flatten(1))
        return contributions
