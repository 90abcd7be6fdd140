"""What a run without privacy reaches with the same trained layers on the same frozen features: `CeilingTrainer`.

It trains as transformers' `Trainer` does, but takes the hidden states of the frozen blocks from a trunk cache, and
computes the one position that the head reads: the same gradients in a fraction of the time, so that several learning
rates can be tried. As in private runs with a cache, the frozen blocks drop nothing out.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from hf_dcsgd.trunk.build import open_cache
from hf_dcsgd.trunk.cut import TRUNK_ENTRY
from hf_dcsgd.trunk.evaluation import EvaluationCache
from hf_dcsgd.trunk.unread import ways_to_narrow


class CeilingTrainer(Trainer):
    """A `Trainer` on cached hidden states; for models whose head reads the first position."""

    def __init__(
        self, model: nn.Module, args: TrainingArguments, *, train_dataset: Any, data_collator: Any, **options: Any
    ) -> None:
        model.to(args.device)
        self._cache = open_cache(model, train_dataset, data_collator, label_names=None, device=args.device)
        self._cache.fill(range(len(train_dataset)))
        self._evaluation = EvaluationCache(self._cache, nullcontext)
        self._narrowed = ways_to_narrow(model)[0]

        def collate(rows: list[Any]) -> Any:
            return padded(rows) if TRUNK_ENTRY in rows[0] else data_collator(rows)

        super().__init__(model, args, train_dataset=self._cache.store, data_collator=collate, **options)  # type: ignore[arg-type]

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        hidden_states = inputs.pop(TRUNK_ENTRY).to(self.args.device)
        with self._cache.trunk.feed(hidden_states), self._narrowed.only():
            return super().training_step(model, inputs, *args, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self._evaluation.run(
            inputs, lambda: super(CeilingTrainer, self).prediction_step(model, inputs, *args, **kwargs)
        )


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack cached rows (1, T, …) of several lengths; zeros are what tokenizers of BERT's kind pad with."""

    def fill(value: Tensor, length: int) -> Tensor:
        return nn.functional.pad(value, [0, 0] * (value.dim() - 2) + [0, length - value.shape[1]])

    longest = {name: max(row[name].shape[1] for row in rows) for name, value in rows[0].items() if value.dim() > 1}
    return {
        name: torch.cat([fill(row[name], longest[name]) if name in longest else row[name] for row in rows])
        for name in rows[0]
    }
