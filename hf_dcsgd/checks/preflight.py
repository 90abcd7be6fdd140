"""What is looked at before a run may spend anything, on synthetic rows of the shape of its data.

| what must hold                                                 | otherwise                                        |
|----------------------------------------------------------------|--------------------------------------------------|
| norms and clipped sum agree with autograd                      | a rule or a hook is wrong: `ParityError`         |
| the forward writes nothing into the model                      | running statistics: `UnsupportedModelError`      |
| an example's clipped gradient is the same alone and in company | any coupling of examples: `BatchCouplingError`   |
| a stack gives the same losses again after another one          | state kept between batches: `BatchCouplingError` |
| random numbers belong to one example each                      | LayerDrop and the like: `BatchCouplingError`     |

Nothing is charged, and nothing is kept but that the checks passed. During training `step.py` goes on looking.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_dcsgd.checks.forward_writes import ForwardWrites
from hf_dcsgd.checks.independence import COUPLED, require_same
from hf_dcsgd.checks.parity import check_parity
from hf_dcsgd.checks.random_tape import Order, RandomTape
from hf_dcsgd.data.rows import Batch, batch_length, take_rows
from hf_dcsgd.data.synthetic import synthetic_like
from hf_dcsgd.data.units import UNIT_ENTRY, count_examples, rows_of_example, take_example
from hf_dcsgd.ghost import BatchCouplingError, GhostClipper, UnsupportedModelError

if TYPE_CHECKING:
    from hf_dcsgd.step import PrivateStep

logger = logging.getLogger(__name__)

_ROWS = 3
_UNITS_OF_ROWS = (0, 1, 2, 1, 2, 2)
_DRAW_FOR_ALL = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mask_time_prob", "mask_feature_prob")
_VARIANTS = 64  # of random numbers that a whole stack shares: enough to meet a probability of 0.1
# How far the clipped sum of a stack may lie from that of its rows run alone, in units of the threshold.
_TOLERANCE = 1e-3


def check_before_training(step: PrivateStep, row: Batch, keep_tokens: tuple[int, ...] = ()) -> Batch | None:
    """Run all checks of this module on synthetic rows; raise before anything is charged.

    Returns these rows; None where the model made nothing of them, and `row` itself had to serve.

    Args:
        step: The private step as training will run it.
        row: One collated row, for the shapes of its entries; one of a unit where units may have several.
        keep_tokens: Special tokens that stay where they are in synthetic rows.
    """
    clipper, model = step.clipper, step.model
    batch = step.on_device(_synthetic(model, row, keep_tokens))
    made_up: Batch | None = batch
    model.eval()
    try:
        with step.randomness():
            if not _makes_sense(step, batch):
                # What a clipper learns from a real row must not be recorded, so it is not the one that trains.
                clipper, made_up = GhostClipper(model), None
                batch = step.on_device(_synthetic(model, row, keep_tokens, keep_numbers=True))
                if not _makes_sense(step, batch):
                    batch = step.on_device(_in_units(row, lambda count: take_rows(row, [0] * count)))
            with torch.no_grad():
                tolerance = step.tolerance(step.losses(batch))
            check_parity(clipper, lambda: step.losses(batch), tolerance, step.units(batch))
            step.leave_out_unread(batch)
            _check_rows_are_independent(step, clipper, batch)
            step.train()
            with clipper.over(step.units(batch)), ForwardWrites(model).refused_by_value():
                clipper.norms(step.losses(batch))
            _turn_off_shared_dropout(step, batch)
            _check_rows_are_independent(step, clipper, batch)
            _check_nothing_is_remembered(step, batch)
            step.require_frozen_unchanged()
    except BatchCouplingError as error:
        hint = _settings_that_draw_for_all(model)
        if hint is None:
            raise
        raise BatchCouplingError(f"{error}. {hint}") from error
    finally:
        step.train()
        step.clipper.reset_verification()  # on real examples, too
    if step.clipper.slow_parameters:
        logger.warning(
            "exact but slow, one backward pass per example (no module call shows what each example adds to these "
            "parameters; freeze them to avoid it): %s",
            ", ".join(sorted(step.clipper.slow_parameters)),
        )
    return made_up


def _settings_that_draw_for_all(model: nn.Module) -> str | None:
    """Name the settings of a model of speech that draw random numbers for a whole batch, and are not off."""
    config: Any = getattr(model, "config", None)
    found = [(name, getattr(config, name, None)) for name in _DRAW_FOR_ALL]
    on = [f"{name}={value:g}" for name, value in found if isinstance(value, float) and value > 0]
    return f"Set these to 0 in the model's config: {', '.join(on)}" if on else None


def _makes_sense(step: PrivateStep, batch: Batch) -> bool:
    """Tell whether the model makes something of synthetic rows: some ask for numbers that fit together."""
    try:
        with torch.no_grad():
            return bool(step.losses(batch).isfinite().all())
    except (BatchCouplingError, UnsupportedModelError):
        raise
    except Exception:
        return False


def _synthetic(model: nn.Module, row: Batch, keep_tokens: tuple[int, ...], *, keep_numbers: bool = False) -> Batch:
    """Make rows up, each an example; or three units of one to three rows."""
    alone = {name: value for name, value in row.items() if name != UNIT_ENTRY}
    return _in_units(row, lambda count: synthetic_like(model, alone, count, keep_tokens, keep_numbers=keep_numbers))


def _in_units(row: Batch, make: Callable[[int], Batch]) -> Batch:
    if UNIT_ENTRY not in row:
        return make(_ROWS)
    return {**make(len(_UNITS_OF_ROWS)), UNIT_ENTRY: torch.tensor(_UNITS_OF_ROWS)}


def _check_rows_are_independent(step: PrivateStep, clipper: GhostClipper, batch: Batch) -> None:
    """Compare the clipped sum of the stack with those of its rows alone, each under its own random numbers."""
    try:
        _compare_with_rows_alone(step, clipper, batch)
    except BatchCouplingError:
        if step.draw_order is Order.ROW_MINOR:
            raise
        step.draw_order = Order.ROW_MINOR
        _compare_with_rows_alone(step, clipper, batch)


def _compare_with_rows_alone(step: PrivateStep, clipper: GhostClipper, batch: Batch) -> None:
    examples = count_examples(batch)
    tape = RandomTape(batch_length(batch), step.draw_order)
    if step.recomputes:  # the backward would draw once more
        with torch.no_grad():
            with tape.record():
                losses = step.losses(batch)
            for example in range(examples):
                with tape.play(rows_of_example(batch, example)):
                    loss_alone = step.losses(take_example(batch, example))[0]
                require_same(loss_alone, losses[example], step.tolerance(losses))
        return
    sum_together = clipper.zeros()
    with clipper.over(step.units(batch)):
        with tape.record():
            losses = step.losses(batch)
        norms = clipper.norms(losses)
        threshold = norms.min().clamp(min=1e-12)
        factors = (threshold / norms).clamp(max=1.0)
        clipper.accumulate(factors, sum_together)
    sum_alone = clipper.zeros()
    for example in range(examples):
        alone = take_example(batch, example)
        with clipper.over(step.units(alone)):
            with tape.play(rows_of_example(batch, example)):
                loss = step.losses(alone)
            clipper.norms(loss)
            clipper.accumulate(factors[example : example + 1], sum_alone)
    allowed = max(_TOLERANCE, 0.1 * step.tolerance(losses)) * examples * float(threshold)
    if not float((sum_together - sum_alone).norm()) <= allowed + 1e-7:
        raise BatchCouplingError(COUPLED)


def _turn_off_shared_dropout(step: PrivateStep, batch: Batch) -> None:
    """Turn off dropout on what all rows share, such as DeBERTa's relative positions: its mask is nobody's share."""
    shapes: list[set[tuple[str, torch.Size]]] = []

    def note(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, args, output: shapes[-1].add((name, output.shape))

    dropouts = {name: m for name, m in step.model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0}
    hooks = [module.register_forward_hook(note(name)) for name, module in dropouts.items()]
    try:
        for inputs in (batch, take_example(batch, 0)):
            shapes.append(set())
            with torch.no_grad():
                step.losses(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    shared = sorted({name for name, _ in shapes[0] & shapes[1]})
    for name in shared:
        dropouts[name].p = 0.0
    if shared:
        logger.warning("no dropout where one mask would serve all examples of a stack: %s", ", ".join(shared))


def _check_nothing_is_remembered(step: PrivateStep, batch: Batch) -> None:
    """Run a stack, then others, then the first again under the same random numbers: it must give the same losses.

    So it must under other values of those numbers that are nobody's share.
    """
    tape = RandomTape(batch_length(batch), step.draw_order)
    others = {name: value.flip(0) if isinstance(value, Tensor) else value for name, value in batch.items()}
    with torch.no_grad():
        with tape.record():
            first = step.losses(batch)
        for inputs in (take_example(others, 0), others):
            step.losses(inputs)
        with tape.play():
            again = step.losses(batch)
        if not _same(first, again):
            raise BatchCouplingError(COUPLED)
        with tape.play(rows_of_example(batch, 0)):
            step.losses(take_example(batch, 0))
        for variant in range(_VARIANTS if tape.shares_draws else 0):
            with tape.play(variant=variant):
                if not _same(first, step.losses(batch)):
                    raise BatchCouplingError(
                        "the forward draws random numbers once for a whole stack of examples, so which examples meet "
                        "in a stack changes their gradients. Switch that off (LayerDrop, SpecAugment, stochastic "
                        "depth per batch, a common rescaling), or draw one number per example"
                    )


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
