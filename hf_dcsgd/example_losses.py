"""One loss per example of a batch, whatever an example is: a row, its choices, a pair, a unit of several rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from hf_dcsgd.data.rows import Batch, batch_length
from hf_dcsgd.data.units import UNIT_ENTRY, choices_of, rows_apart, units_of
from hf_dcsgd.ghost import BatchCouplingError, Units, UnsupportedModelError
from hf_dcsgd.tasks.loss_kind import is_multiple_choice
from hf_dcsgd.tasks.losses import LossFunction, checked_user_losses, per_example_losses, split_labels
from hf_dcsgd.trunk.cut import TRUNK_ENTRY, FrozenTrunk
from hf_dcsgd.trunk.unread import Narrowing, can_leave_out_logits, without_unread_logits


class ExampleLosses:
    """Runs a model on a batch and returns one loss per example with the outputs; labels are kept out of the forward.

    The arguments are those of `PrivateStep`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None = None,
        label_names: Sequence[str] | None = None,
        label_smoothing: float = 0.0,
        trunk: FrozenTrunk | None = None,
        rows_per_example: int = 1,
    ) -> None:
        self._model = model
        self._rows_per_example = rows_per_example
        self._has_choices = is_multiple_choice(model)
        self._trunk = trunk
        self.first_position: Narrowing | None = None
        self._leaves_out_logits = loss is None and rows_per_example == 1 and can_leave_out_logits(model)
        self._loss = loss
        self._label_names = label_names
        self._label_smoothing = label_smoothing

    def units(self, batch: Batch) -> Units | None:
        """Say which rows of the forward are one example: those of a unit, its choices, its pair; None where one is."""
        return units_of(batch, choices_of(batch) if self._has_choices else self._rows_per_example)

    def __call__(self, batch: Batch, *, only_read: bool = False) -> tuple[Tensor, Any]:
        """Return losses and outputs; `only_read` leaves out logits at positions where nothing is learned."""
        rows = {name: value for name, value in batch.items() if name != UNIT_ENTRY}
        losses, outputs = self._run(rows, only_read and self._leaves_out_logits)
        return (Units(batch[UNIT_ENTRY]).mean(losses) if UNIT_ENTRY in batch else losses), outputs

    def _run(self, batch: Batch, only_read: bool) -> tuple[Tensor, Any]:
        inputs, labels = split_labels(self._model, batch, self._label_names)
        if only_read:
            inputs, labels = without_unread_logits(inputs, labels)
        hidden_states = inputs.pop(TRUNK_ENTRY, None)
        fed = self._require_trunk().feed(hidden_states) if hidden_states is not None else nullcontext()
        with self.narrowed(), fed:
            outputs = self._forward(inputs)
        if self._loss is not None:
            return checked_user_losses(self._loss, outputs, labels, batch_length(batch)), outputs
        mask, smoothing = batch.get("attention_mask"), self._label_smoothing
        losses = per_example_losses(self._model, outputs, labels, label_smoothing=smoothing, attention_mask=mask)
        return losses, outputs

    def narrowed(self) -> AbstractContextManager[None]:
        """Have the model compute the first position of its last block alone, where it was found to read no other."""
        return nullcontext() if self.first_position is None else self.first_position.only()

    def mean(self, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        """Return the mean loss of an evaluation batch, and the outputs by their names."""
        losses, outputs = self(batch)
        if not isinstance(outputs, Mapping):
            outputs = {"logits": outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "logits", outputs)}
        return losses.mean(), dict(outputs)

    def _require_trunk(self) -> FrozenTrunk:
        if self._trunk is None:
            raise ValueError(f"expected a trunk for rows that carry {TRUNK_ENTRY!r}, got None")
        return self._trunk

    def _forward(self, inputs: Batch) -> Any:
        if self._rows_per_example > 1:
            flat, unflatten = rows_apart(inputs, self._rows_per_example)
            return unflatten(self._model_outputs(flat))
        return self._model_outputs(inputs)

    def _model_outputs(self, inputs: Batch) -> Any:
        try:
            return self._model(**inputs)
        except (BatchCouplingError, UnsupportedModelError):
            raise
        except Exception as error:
            shapes = [
                f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
                for name, value in inputs.items()
                if isinstance(value, Tensor)
            ]
            error.add_note(
                f"Raised by {type(self._model).__name__} for {', '.join(shapes) or 'no tensors'}: do columns, types "
                "and lengths fit the model, and token ids its vocabulary?"
            )
            raise
