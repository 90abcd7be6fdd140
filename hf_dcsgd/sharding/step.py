"""`ShardedStep`: a private step on a model whose frozen part is in pieces, alike on all ranks.

**Guarantee.** That of `PrivateStep`. In addition all ranks run the same passes in the same order, whatever they drew:

| what                        | how it is alike                                                             |
|-----------------------------|-----------------------------------------------------------------------------|
| stacks of a micro-batch     | evened out; for an empty one a made-up row is run, of which nothing is kept |
| checks before training      | on the same made-up rows, with the same random numbers                      |
| comparison with autograd    | in those checks alone; module calls that were not compared are refused      |
| spot checks                 | one example each, decided by a coin that all ranks have in common           |
| parameters on the slow path | refused; so are modules without a rule that hold sharded weights            |
| any error during a step     | charged; the other ranks end with an error of their own, charged too        |
| another order of gathers    | found before the release: nothing is released, the step is charged          |
"""

from __future__ import annotations

import secrets
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from hf_dcsgd.checks.random_tape import RandomTape
from hf_dcsgd.data.rows import Batch, batch_length
from hf_dcsgd.data.units import take_example
from hf_dcsgd.ghost import BatchCouplingError, UnsupportedModelError
from hf_dcsgd.privacy.mechanism import NoisyRelease
from hf_dcsgd.privacy.randomness import private_randomness
from hf_dcsgd.sharding.lockstep import LockstepError
from hf_dcsgd.sharding.trunk import ShardedTrunk, has_pieces, require_no_gradient_hooks
from hf_dcsgd.step import PrivateStep

_LARGEST_CHECK_RATE = 1 / 3
_EXAMPLES_PER_CHECK = 256


class ShardedStep(PrivateStep):
    """A `PrivateStep` in lockstep with those of the other ranks; making one is a collective call.

    Args:
        trunk: The sharded model.
        examples_per_stack: How many examples a stack may have, for the rate of spot checks.
        options: Those of `PrivateStep`.
    """

    def __init__(self, trunk: ShardedTrunk, *, examples_per_stack: int, **options: Any) -> None:
        require_no_gradient_hooks(trunk.model)
        trunk.gate.is_closed = False
        super().__init__(trunk.model, **options)
        self._refuse_fallback_on_pieces()
        self.clipper.verifies_later = False
        self._sharded = trunk
        self._common = trunk.lockstep.common_random()
        self._is_seeded = options.get("reproducible_from") is not None
        self._check_rate = min(_LARGEST_CHECK_RATE, examples_per_stack / _EXAMPLES_PER_CHECK)
        self._wants_checks = options.get("spot_checks", True)
        self._was_checked = False
        self._made_up: Batch | None = None

    def _refuse_fallback_on_pieces(self) -> None:
        by_fallback = [name for name, rule in self.clipper.rules().items() if rule == "fallback"]
        names = [name for name in by_fallback if has_pieces(self.model.get_submodule(name))]
        if names:
            raise UnsupportedModelError(
                "these modules have trained parameters without a rule and frozen ones that are sharded; they would be "
                "run once more per example, so that ranks would gather weights a different number of times. Freeze "
                f"their parameters, or train without fsdp: {', '.join(name or '(the model itself)' for name in names)}"
            )

    def settle(self, made_up: Batch | None) -> None:
        """Keep one made-up row for empty stacks, and see that it runs; refuse what cannot be run in lockstep."""
        if made_up is None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} makes nothing of made-up rows, which ranks without examples have to "
                "run where weights are sharded; train without fsdp"
            )
        self._made_up = take_example(made_up, 0)
        self.train()
        self._run_made_up(checks=False)
        if not self._sharded.lockstep.holds():
            raise LockstepError(
                "ranks went through the checks before training in different ways: do they have the same model and "
                "the same data? Nothing was charged"
            )
        self._sharded.gate.is_closed = True

    def leave_out_unread(self, batch: Batch) -> None:
        """Do as any step does; a forward that failed in it leaves nothing gathered."""
        super().leave_out_unread(batch)
        self._sharded.reset()

    def randomness(self) -> AbstractContextManager[None]:
        """Do as any step does; before training, with the same numbers on all ranks."""
        if self.mechanism is None and not self._is_seeded:
            return private_randomness(self.device, self._common.getrandbits(62))
        return super().randomness()

    # -- the logical batch -------------------------------------------------------------------------------------------

    def accumulate(self, stack: Batch) -> Tensor:
        """Clip each example of a stack and add it to the running sum; run a made-up row where there is none."""
        mechanism = self.require_mechanism()
        try:
            with self._sharded.gate.opened():
                if batch_length(stack):
                    return super().accumulate(stack)
                self._run_made_up(checks=self._is_checked(0))
                return torch.zeros((), device=self.device)
        except (BatchCouplingError, UnsupportedModelError):
            if not batch_length(stack):
                mechanism.abandon()
            raise
        except Exception:
            # Perhaps another rank has ended, for a reason that depends on the examples it drew.
            mechanism.abandon()
            self.discard()
            raise

    def release(self) -> NoisyRelease:
        """Complete the logical batch, if all ranks have gathered the same weights in the same order."""
        self._sharded.free()
        try:
            holds, cause = self._sharded.lockstep.holds(), None
        except RuntimeError as error:
            holds, cause = False, error
        if not holds:
            self.require_mechanism().abandon()
            self.discard()
            raise LockstepError(
                "ranks did not gather the same weights in the same order, so that gradients may have been computed "
                "with wrong weights: nothing was released, and the step was charged. Either a rank has ended, or "
                "something runs the model, or parts of it, on some ranks only"
            ) from cause
        return super().release()

    def _run_made_up(self, *, checks: bool) -> None:
        """Run the passes that a stack takes, forwards and backwards, and drop what they give."""
        assert self._made_up is not None
        row = self.on_device(self._made_up)
        with private_randomness(self.device), self.forward_context():
            for is_check in (False, True) if checks else (False,):
                with self.clipper.over(self.units(row)):
                    losses = self.losses(row)
                    if not (is_check and self.recomputes):
                        self.clipper.norms(losses)

    # -- the spot check ----------------------------------------------------------------------------------------------

    def _is_checked(self, examples: int) -> bool:
        """Decide for all ranks alike, whatever they have drawn; the first stack is always checked."""
        coin = self._common.random()
        is_checked = self._wants_checks and (not self._was_checked or coin < self._check_rate)
        self._was_checked |= is_checked
        return is_checked

    def _check_some(self, stack: Batch, tape: RandomTape, losses: Tensor, norms: Tensor) -> None:
        """Run one example again alone."""
        self.check_alone(stack, secrets.randbelow(len(losses)), tape, losses, norms)
