"""One step of the private mechanism: sum over ranks, noise once, release, next threshold, all charged beforehand.

Guarantee. Let the sum handed to `release` be `Σ fᵢ·gᵢ` with the factors that
`clip_factors` gave for this logical batch. Then what a release returns, and every later threshold,
follows from one Gaussian mechanism with noise multiplier σ on one Poisson sample (Theorem 1 of the paper). The
gradient gets σ_T times the very sensitivity that the factors were computed with, the side value and the loss their own
multipliers. Noise enters once per logical batch, on the main process. The step is charged before its noise is drawn.

| edge case | behavior |
|---|---|
| empty logical batch, on some ranks or all | a noise-only release, charged as any other |
| budget spent | `BudgetExhausted` before anything is charged, drawn or reduced, on every rank alike |
| NaN or infinite norm | factor 0, counted in the last bin |
| NaN or infinite loss | counts as `loss_clip` |
| state loaded in the middle of a logical batch | `RuntimeError`: its factors belong to another threshold |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_dcsgd.clipping import ClippingThreshold, Released, strategy
from hf_dcsgd.privacy.ledger import LedgerError, PrivacyLedger
from hf_dcsgd.privacy.noise import NoiseSource, SensitiveSum
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.validation import require, require_count


class BudgetExhausted(RuntimeError):  # noqa: N818 (a planned end, not a fault)
    """Every planned step is charged: one more would break the guarantee."""


@dataclass(frozen=True)
class NoisyRelease:
    """What one step makes public: `(Σ fᵢ·gᵢ + noise)/B`, the noisy mean loss, and values that are safe to log.

    `sensitivity` is what the noise on the gradient was scaled to: the threshold, where there is one.
    """

    noisy_gradient: torch.Tensor
    sensitivity: float
    noisy_loss: float | None
    noisy_side: np.ndarray | None
    values: Released


class DPMechanism:
    """Owns the step of one run: see the module's guarantee.

    `all_reduce` sums a tensor over ranks in place; give it on every rank or on none. Only the main process adds
    noise and holds the ledger.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        *,
        threshold: ClippingThreshold | None = None,
        noise: NoiseSource | None = None,
        ledger: PrivacyLedger | None = None,
        all_reduce: Callable[[torch.Tensor], None] | None = None,
        is_main_process: bool = True,
    ) -> None:
        require(is_main_process or ledger is None, "expected no ledger outside the main process, which alone charges")
        # Without the sum over ranks, another process would hand back its own part, which carries no noise.
        require(is_main_process or all_reduce is not None, "expected all_reduce outside the main process, got None")
        self.plan = plan
        self._threshold = strategy(plan.clipping).from_plan(plan) if threshold is None else threshold
        _require_accounted(plan, self._threshold)
        self._noise = noise
        self._ledger = ledger
        self._all_reduce = all_reduce
        self._is_main_process = is_main_process
        # Private sums beside the clipped one, and the sensitivity that its factors were computed with.
        self._sums: dict[str, torch.Tensor] = {}
        self._sensitivity: float | None = None
        self._step = 0
        self._released = 0
        self._charged = 0 if ledger is None else ledger.charged
        self._agreed = all_reduce is None

    @property
    def threshold(self) -> ClippingThreshold:
        """The clipping strategy that the plan names. It cannot be replaced: the report states what the plan says."""
        return self._threshold

    @property
    def released(self) -> int:
        """Steps released in this process."""
        return self._released

    @property
    def charged(self) -> int:
        """Steps charged to this run: at least as many as were released, over all its processes and resumptions."""
        return self._charged

    @property
    def exhausted(self) -> bool:
        """Whether the next release would raise `BudgetExhausted`."""
        return self._charged >= self.plan.steps

    def epsilon(self) -> float:
        """Return ε of the steps charged so far."""
        return self.plan.epsilon(self._charged)

    def clip_factors(
        self, per_example_norms: torch.Tensor, per_example_losses: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the factors fᵢ of one micro-batch, whose share of the side values joins the present logical batch."""
        count = per_example_norms.shape[0]
        self._sensitivity = self.threshold.sensitivity
        self._add("side", self.threshold.side_contribution(per_example_norms))
        if self.plan.loss_clip is not None and count > 0:
            require(
                per_example_losses is not None and per_example_losses.shape == (count,),
                f"expected {count} per_example_losses, because the plan releases the loss, got "
                f"{None if per_example_losses is None else tuple(per_example_losses.shape)}",
            )
            assert per_example_losses is not None
            self._add("loss", _clipped_loss_sum(per_example_losses, self.plan.loss_clip))
        return _bounded_factors(self.threshold, per_example_norms)

    def _add(self, name: str, part: torch.Tensor | None) -> None:
        if part is not None:
            self._sums[name] = self._sums[name] + part if name in self._sums else part

    def release(self, clipped_sum: torch.Tensor) -> NoisyRelease:
        """Complete the logical batch: charge, add noise, sum over ranks, divide by B, move the threshold.

        `clipped_sum` is this rank's fp32 `Σ fᵢ·gᵢ` of shape `(num_parameters,)`, zeros for no example. It is used up:
        noise is added in its memory.
        """
        require(
            clipped_sum.shape == (self.plan.num_parameters,),
            f"expected a clipped_sum of shape ({self.plan.num_parameters},), got {tuple(clipped_sum.shape)}",
        )
        self.agree_on_charges(clipped_sum.device)
        if self.exhausted:
            raise BudgetExhausted(
                f"all {self.plan.steps} planned steps are charged ({self._charged}), one more would pass "
                f"ε = {self.plan.epsilon():.4g}"
            )
        queries = self._queries(clipped_sum.detach())
        self._charge()
        self.discard()
        parts = self._noisy_totals(queries)
        noisy_gradient = parts["gradient"].div_(self.plan.expected_batch_size)
        noisy_loss = parts["loss"].item() / self.plan.expected_batch_size if "loss" in parts else None
        sensitivity = self.threshold.sensitivity
        # Last: the sensitivity above was that of the threshold which this batch was clipped with.
        noisy_side = parts["side"].cpu().numpy().astype(np.float64) if "side" in parts else None
        self.threshold.update(noisy_side)
        self._step += 1
        self._released += 1
        return NoisyRelease(noisy_gradient, sensitivity, noisy_loss, noisy_side, self.threshold.released_values())

    def abandon(self) -> None:
        """Charge the logical batch under way and forget it without a release: that it failed depends on the data."""
        if not self.exhausted:
            self._charge()
        self.discard()

    def discard(self) -> None:
        """Forget the logical batch under way; the caller must forget its clipped sum as well."""
        self._sums.clear()
        self._sensitivity = None

    def close(self) -> None:
        """Unlock the ledger for another run; nothing more can be released."""
        if self._ledger is not None:
            self._ledger.close()

    def agree_on_charges(self, device: torch.device | str) -> None:
        """Give every rank the main process' count of charges, so that all stop at the same step.

        A collective call; done once by the first release, unless it was called before.
        """
        if self._agreed:
            return
        assert self._all_reduce is not None
        count = torch.tensor([self._charged if self._is_main_process else 0], dtype=torch.int64, device=device)
        self._all_reduce(count)
        self._charged = int(count.item())
        self._agreed = True

    def state_dict(self) -> dict[str, Any]:
        """Return, JSON-able, the threshold's state, the step, and a witness of what the ledger held."""
        return {
            "threshold": self.threshold.state_dict(),
            "step": self._step,
            "charged": self._charged,
            "ledger_head": None if self._ledger is None else self._ledger.head,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. Charges are never taken back: those after the checkpoint stay charged.

        Where there is a ledger it must contain the checkpoint's witness, else `LedgerError`.
        """
        if self._sensitivity is not None:
            raise RuntimeError(
                "expected no logical batch under way when a state is loaded: release or discard it first"
            )
        step, charged = require_count("step", state["step"], 0), require_count("charged", state["charged"], 0)
        if self._ledger is not None:
            head = state.get("ledger_head")
            if head is None:
                raise LedgerError(
                    "expected a checkpoint with a ledger_head, got none: it was written without a ledger"
                )
            self._ledger.verify_contains(charged, head)
        self.threshold.load_state_dict(state["threshold"])
        self._step = step
        self._charged = max(self._charged, charged)
        self._agreed = self._all_reduce is None

    def _queries(self, clipped_sum: torch.Tensor) -> dict[str, tuple[SensitiveSum, float]]:
        """Collect what this step asks of the data: each private sum with its sensitivity, and its noise multiplier."""
        _require_accounted(self.plan, self.threshold)
        sensitivity = self.threshold.sensitivity
        if self._sensitivity not in (None, sensitivity):
            raise RuntimeError(
                f"the threshold moved within a logical batch: factors were computed for sensitivity "
                f"{self._sensitivity}, it is now {sensitivity}"
            )
        gradient = SensitiveSum(clipped_sum, sensitivity, disposable=True)
        queries = {"gradient": (gradient, self.plan.grad_noise_multiplier)}
        side = self.threshold.side_query
        if side is not None:
            counts = self._sums.get("side", torch.zeros(side.size)).to(clipped_sum.device)
            queries["side"] = (SensitiveSum(counts, side.sensitivity), side.noise_multiplier)
        if self.plan.loss_clip is not None and self.plan.loss_noise_multiplier is not None:
            loss = self._sums.get("loss", torch.zeros(1)).to(clipped_sum.device)
            queries["loss"] = (SensitiveSum(loss, self.plan.loss_clip), self.plan.loss_noise_multiplier)
        return queries

    def _charge(self) -> None:
        self._charged = self._charged + 1 if self._ledger is None else self._ledger.charge(self._step)

    def _noisy_totals(self, queries: Mapping[str, tuple[SensitiveSum, float]]) -> dict[str, torch.Tensor]:
        """Return the sums over all ranks, with the noise that the main process put into its part."""
        if self._is_main_process:
            if self._noise is None:
                self._noise = NoiseSource(unsafe_seed=self.plan.unsafe_noise_seed)
            parts = [self._noise.add_noise(total, multiplier) for total, multiplier in queries.values()]
        else:
            parts = [total.value for total, _ in queries.values()]
        if self._all_reduce is not None:
            flat = torch.cat(parts)
            self._all_reduce(flat)
            parts = list(flat.split([len(part) for part in parts]))
        return dict(zip(queries, parts, strict=True))


def _bounded_factors(threshold: ClippingThreshold, per_example_norms: torch.Tensor) -> torch.Tensor:
    """Return the strategy's factors, cut to fᵢ·nᵢ ≤ sensitivity: the guarantee does not rest on its arithmetic."""
    norms = per_example_norms.detach().float()
    factors = threshold.clip_factors(per_example_norms).clamp(min=0.0).minimum(threshold.sensitivity / norms)
    return factors.where(norms.isfinite() & factors.isfinite(), 0.0)


def _clipped_loss_sum(per_example_losses: torch.Tensor, loss_clip: float) -> torch.Tensor:
    """Return the fp32 sum, shape (1,), of losses cut to [0, loss_clip]: one example moves it by at most loss_clip."""
    losses = torch.nan_to_num(per_example_losses.detach().float(), nan=loss_clip, posinf=loss_clip, neginf=0.0)
    return losses.clamp(0.0, loss_clip).sum().reshape(1)


def _require_accounted(plan: PrivacyPlan, threshold: ClippingThreshold) -> None:
    """Refuse a threshold that is not what the plan says, or asks for other noise than the plan accounts for."""
    named = strategy(plan.clipping)
    require(
        type(threshold) is named,
        f"expected a {plan.clipping!r} threshold ({named.__name__}), got {type(threshold).__name__}: register it as a "
        "strategy of its own",
    )
    planned = list(named.side_noise_multipliers(plan.settings).values())
    asked = [] if threshold.side_query is None else [threshold.side_query.noise_multiplier]
    require(asked == planned, f"expected a threshold with the plan's side noise multipliers {planned}, got {asked}")
