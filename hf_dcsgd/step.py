"""One private step, without a training loop around it: losses, clipped sum, release.

```python
step = PrivateStep(model, mechanism)
for stacks in loader:                    # one Poisson draw, see `data/loading.py`
    for stack in stacks:
        step.accumulate(stack)           # clip each example, add to the running sum
    step.release()                       # charge, noise, divide by B: now `param.grad` is private
    optimizer.step()
```

**Guarantee.** Given stacks of independent rows (`data/rows.py`) from one Poisson draw, what `release` writes into
`param.grad` is one step of the mechanism in `privacy/mechanism.py`. Until then nothing of the private sum is in
`param.grad`, where optimizers, callbacks and hooks look. Dropout draws from secret randomness. The forward is checked
while it runs: it may not write into the model, and now and then one example of a stack, chosen in secret, is run
again alone and must give the same loss and gradient norm.

| edge case                                | behavior                                                                |
|------------------------------------------|-------------------------------------------------------------------------|
| empty stack, or no stack at all          | nothing is added; the release is noise only                             |
| examples coupled, or the model written to | the step is charged, the error is raised, nothing is released          |
| an example that is not finite            | adds nothing, counts in the last bin of the histogram                   |
| gradients that user code left behind     | dropped: they were not clipped                                          |
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hf_dcsgd.checks.forward_writes import ForwardWrites
from hf_dcsgd.checks.independence import require_same
from hf_dcsgd.checks.random_tape import Order, RandomTape
from hf_dcsgd.data.rows import Batch, batch_length, move_to
from hf_dcsgd.data.units import count_examples, rows_of_example, take_example
from hf_dcsgd.example_losses import ExampleLosses
from hf_dcsgd.ghost import BatchCouplingError, GhostClipper, Units, UnsupportedModelError
from hf_dcsgd.privacy.mechanism import DPMechanism, NoisyRelease
from hf_dcsgd.privacy.randomness import private_randomness
from hf_dcsgd.tasks.layer_selection import train_mode
from hf_dcsgd.tasks.losses import LossFunction
from hf_dcsgd.trunk.cut import FrozenTrunk
from hf_dcsgd.trunk.unread import find_narrowing

# One row alone costs about as much as four within a stack: these rates keep the checks near 2% of a step.
_LARGEST_CHECK_RATE = 1 / 3
_EXAMPLES_CHECKED_AT_FIRST = 4
_EXAMPLES_PER_CHECK = 256
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_HALF_PRECISION_TOLERANCE = 5e-2


class PrivateStep:
    """Clips, sums and releases the examples of one logical batch after another: see the module's guarantee.

    Args:
        model: The model; parameters that require a gradient are trained.
        mechanism: Charges and releases. Without one, only losses and checks are available.
        loss: `loss(outputs, labels)` with one loss per example, for models whose loss is not known by their class.
        label_names: Entries of a batch that are labels; by default those of the model's forward.
        label_smoothing: As `TrainingArguments.label_smoothing_factor`, within each example.
        device: Where the model is.
        forward_context: Makes a context around each forward, such as autocast.
        reproducible_from: A seed for dropout, for debugging; voids the guarantee.
        trunk: The frozen blocks, for rows that carry their hidden states (`trunk/build.py`).
        rows_per_example: How many rows k an example has: inputs (n, k, …) run as n·k rows, and `loss` sees outputs of
            shape (n, k, …).
        spot_checks: Whether rows are run again alone now and then; off only for audits, which measure coupling.
        scale_free: Whether the released gradient is divided by its threshold, a public number, so that the way of the
            threshold stays out of the optimizer's state.
    """

    def __init__(
        self,
        model: nn.Module,
        mechanism: DPMechanism | None = None,
        *,
        loss: LossFunction | None = None,
        label_names: Sequence[str] | None = None,
        label_smoothing: float = 0.0,
        device: torch.device | str = "cpu",
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        reproducible_from: int | None = None,
        trunk: FrozenTrunk | None = None,
        rows_per_example: int = 1,
        spot_checks: bool = True,
        scale_free: bool = False,
    ) -> None:
        self.model = model
        self._scale_free = scale_free
        self.mechanism = mechanism
        self.clipper = GhostClipper(model)
        self.draw_order = Order.ROW_MAJOR
        self.forward_context = forward_context
        self._losses = ExampleLosses(model, loss, label_names, label_smoothing, trunk, rows_per_example)
        self.device = torch.device(device)
        self._reproducible_from = reproducible_from
        self._random_blocks = 0
        self._writes = ForwardWrites(model)
        self._frozen = self._writes.frozen_checksums()
        self._clipped_sum: Tensor | None = None
        self._spot_checks = spot_checks
        self._stacks_checked = 0

    def losses(self, batch: Batch) -> Tensor:
        """Run the forward and return one loss per example."""
        return self._losses(batch, only_read=True)[0]

    def units(self, batch: Batch) -> Units | None:
        """Say which rows of the forward are one example, for `clipper.over`; None where each is one."""
        return self._losses.units(batch)

    def leave_out_unread(self, batch: Batch) -> None:
        """Compute the first position of the last block alone where this batch shows that nothing reads the others."""
        self._losses.first_position = None
        if self.recomputes:  # the backward would compute the whole block
            return

        def results() -> tuple[Tensor, Tensor]:
            clipper = GhostClipper(self.model)
            with clipper.over(self.units(batch)):
                losses = self.losses(batch)
                return losses.detach(), clipper.norms(losses)

        self._losses.first_position = find_narrowing(self.model, results, self.tolerance)

    def narrowed(self) -> AbstractContextManager[None]:
        """Have other forwards, too, leave out what `leave_out_unread` found that nothing reads."""
        return self._losses.narrowed()

    # -- the logical batch -------------------------------------------------------------------------------------------

    def accumulate(self, stack: Batch) -> Tensor:
        """Clip each example of a stack and add it to the running sum; return the (private) sum of their losses."""
        mechanism = self.require_mechanism()
        if batch_length(stack) == 0:
            return torch.zeros((), device=self.device)
        try:
            return self._accumulate(mechanism, self.on_device(stack))
        except (BatchCouplingError, UnsupportedModelError):
            # That it failed depends on the examples that were drawn.
            mechanism.abandon()
            self.discard()
            raise

    def _accumulate(self, mechanism: DPMechanism, stack: Batch) -> Tensor:
        tape = RandomTape(batch_length(stack), self.draw_order) if self._is_checked(count_examples(stack)) else None
        with self.randomness(), self.forward_context():
            with self.clipper.over(self.units(stack)):
                with self._writes.refused(), tape.record() if tape else nullcontext():
                    losses = self.losses(stack)
                norms = self.clipper.norms(losses)
                for parameter in self.clipper.parameters.values():
                    parameter.grad = None
                if self._clipped_sum is None:
                    self._clipped_sum = self.clipper.zeros()
                self.clipper.accumulate(mechanism.clip_factors(norms, losses.detach()), self._clipped_sum)
            if tape is not None:
                self._check_some(stack, tape, losses.detach(), norms)
        return losses.detach().sum()

    def release(self) -> NoisyRelease:
        """Complete the logical batch: charge it, add noise, and write the noisy mean gradient into `param.grad`."""
        mechanism = self.require_mechanism()
        clipped_sum = self.clipper.zeros() if self._clipped_sum is None else self._clipped_sum
        self._clipped_sum = None
        release = mechanism.release(clipped_sum.float())
        if self._scale_free:
            release.noisy_gradient.div_(release.sensitivity)
        for name, part in self.clipper.unflatten(release.noisy_gradient).items():
            parameter = self.clipper.parameters[name]
            parameter.grad = part.to(parameter.dtype)
        return release

    def discard(self) -> None:
        """Forget the logical batch under way, which was neither charged nor released."""
        if self.mechanism is not None:
            self.mechanism.discard()
        self._clipped_sum = None
        self.model.zero_grad()

    def require_mechanism(self) -> DPMechanism:
        """Return the mechanism; RuntimeError where there is none yet."""
        if self.mechanism is None:
            raise RuntimeError("expected PrivateStep to have a mechanism before examples are clipped, got None")
        return self.mechanism

    # -- the spot check ----------------------------------------------------------------------------------------------

    def _is_checked(self, examples: int) -> bool:
        """Decide in secret; the first stack of several examples is always checked."""
        if examples < 2 or not self._spot_checks:
            return False
        rate = min(_LARGEST_CHECK_RATE, examples / _EXAMPLES_PER_CHECK) if self._stacks_checked else 1.0
        return secrets.randbelow(1 << 32) < rate * (1 << 32)

    def _check_some(self, stack: Batch, tape: RandomTape, losses: Tensor, norms: Tensor) -> None:
        """Run an example again alone; several of the first stack, as a coupling may leave some as they were."""
        count = 1 if self._stacks_checked else min(_EXAMPLES_CHECKED_AT_FIRST, len(losses))
        self._stacks_checked += 1
        for example in secrets.SystemRandom().sample(range(len(losses)), count):
            self.check_alone(stack, example, tape, losses, norms)

    def check_alone(self, stack: Batch, example: int, tape: RandomTape, losses: Tensor, norms: Tensor) -> None:
        """Run an example again alone, and raise `BatchCouplingError` where that gives another loss or norm."""
        taken = take_example(stack, example)
        with torch.random.fork_rng([]), self.clipper.over(self.units(taken)):
            with tape.play(rows_of_example(stack, example)):  # the random numbers that it had in the stack
                loss = self.losses(taken)
            # Checkpointing runs the forward again within the backward, where no tape plays.
            norm = None if self.recomputes else self.clipper.norms(loss)[0]
        tolerance = self.tolerance(losses)
        require_same(loss.detach()[0], losses[example], tolerance)
        if norm is not None:
            require_same(norm, norms[example], tolerance, 0.1 * float(norms.nan_to_num().max()))

    @property
    def recomputes(self) -> bool:
        """Whether gradient checkpointing is on."""
        return any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())

    def tolerance(self, losses: Tensor) -> float:
        """Return how far rounding may carry a value apart that is computed alone and in a stack."""
        if torch.is_autocast_enabled(losses.device.type) or losses.dtype not in _TOLERANCE:
            return _HALF_PRECISION_TOLERANCE
        in_half = any(p.dtype in (torch.float16, torch.bfloat16) for p in self.model.parameters())
        return _HALF_PRECISION_TOLERANCE if in_half else _TOLERANCE[losses.dtype]

    # -- around it ---------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Set the mode that private training runs in: `model.train()`, but frozen BatchNorm stays in eval mode."""
        train_mode(self.model)

    def settle(self, made_up: Batch | None) -> None:
        """Take note that the checks before training have passed, on these made-up rows if the model takes such."""

    def require_frozen_unchanged(self) -> None:
        """Raise `UnsupportedModelError` where a buffer or a frozen parameter is not what it was at the start."""
        self._writes.refuse_changes(self._frozen)

    def randomness(self) -> AbstractContextManager[None]:
        """Seed the global generators in secret within a block, and leave them as they were after it."""
        self._random_blocks += 1
        seed = self._reproducible_from
        return private_randomness(self.device, None if seed is None else hash((seed, self._random_blocks)))

    def on_device(self, batch: Mapping[str, Any]) -> Batch:
        """Move the tensors of a batch to where the model is."""
        return move_to(batch, self.device)
