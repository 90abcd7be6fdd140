"""L2, statistical: can an adversary tell, from what is released, whether the canary was in the batch?

One step without sampling is a Gaussian mechanism: whoever guesses from its output has at best the power of telling
N(0, 1) from N(μ, 1) with μ = 1/σ. The adversary here sees the released gradient and side value of many steps with and
without the canary, fits a linear score on half of them, and is judged on the other half. A lower bound on μ, with
confidence 1 − α, that exceeds the claim refutes the claim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from hf_dcsgd.audit.findings import Finding
from hf_dcsgd.audit.probe import as_units, canary, opposed_background
from hf_dcsgd.audit.replay import Subject, prepared
from hf_dcsgd.trainer import DCSGDTrainer

CONFIDENCE_ALPHA = 1e-3
TRIALS = 4_000


@dataclass(frozen=True)
class Distinguisher:
    """A linear score and its threshold, fitted on some trials, and its errors on others."""

    false_positives: int
    false_negatives: int
    negatives: int
    positives: int

    def mu_lower_bound(self, alpha: float = CONFIDENCE_ALPHA) -> float:
        """Bound both error rates by Clopper–Pearson, each at α/2; then the μ of the Gaussian test that has them."""
        fpr = _upper(self.false_positives, self.negatives, alpha / 2)
        fnr = _upper(self.false_negatives, self.positives, alpha / 2)
        return float(stats.norm.isf(fpr) - stats.norm.ppf(fnr))


def _upper(errors: int, trials: int, alpha: float) -> float:
    return 1.0 if errors >= trials else float(stats.beta.ppf(1 - alpha, errors + 1, trials - errors))


def fit_and_judge(without: np.ndarray, with_canary: np.ndarray) -> Distinguisher:
    """Fit a linear discriminant on the first half of each arm, and count its errors on the second."""
    fit_out, judge_out = np.array_split(without, 2)
    fit_in, judge_in = np.array_split(with_canary, 2)
    pooled = np.cov(np.vstack([fit_out - fit_out.mean(0), fit_in - fit_in.mean(0)]).T)
    pooled = np.atleast_2d(pooled) + 1e-9 * np.eye(without.shape[1]) * max(np.trace(np.atleast_2d(pooled)), 1e-30)
    weights = np.linalg.solve(pooled, fit_in.mean(0) - fit_out.mean(0))
    threshold = (fit_in @ weights).mean() / 2 + (fit_out @ weights).mean() / 2
    return Distinguisher(
        false_positives=int((judge_out @ weights > threshold).sum()),
        false_negatives=int((judge_in @ weights <= threshold).sum()),
        negatives=len(judge_out),
        positives=len(judge_in),
    )


def observe(subject: Subject, micro_batches: list[list[Any]], trials: int) -> np.ndarray:
    """Collect what an adversary sees of `trials` steps from the same first threshold: gradient and side value."""
    mechanism = subject.new_mechanism()
    start = mechanism.threshold.state_dict()
    stacks = subject.stacks(micro_batches)
    seen = []
    for _ in range(trials):
        mechanism.threshold.load_state_dict(start)
        release = subject.logical_step(stacks, mechanism)
        side = np.zeros(0) if release.noisy_side is None else release.noisy_side
        seen.append(np.concatenate([subject.released_sum(release).numpy(), side]))
    return np.stack(seen)


def distinguishing_findings(
    trainer: DCSGDTrainer, trials: int = TRIALS, rows_per_unit: int | None = None
) -> list[Finding]:
    """Run L2 on the audit's own trainer: a canary of huge norm against an opposed background; both may be units."""
    with prepared(trainer) as subject:
        micro_batches = trainer.args.gradient_accumulation_steps
        rows = as_units(opposed_background(), rows_per_unit)
        extra = canary() if rows_per_unit is None else [canary()] * rows_per_unit
        shards = [rows[k::micro_batches] for k in range(micro_batches)]
        arms = [shards, [*shards[:-1], [*shards[-1], extra]]]
        without, with_canary = (observe(subject, arm, trials) for arm in arms)
        judged = fit_and_judge(without, with_canary)
    claimed = 1 / subject.plan.noise_multiplier
    bound = judged.mu_lower_bound()
    detail = f"{bound / claimed:.2f} of the claim, {trials} trials per arm"
    return [
        Finding("lower bound on μ against the claimed 1/σ", bound, claimed, detail),
        Finding("the audit has power (claimed 1/σ against 4 × the bound)", claimed, 4 * max(bound, 0.0), detail),
    ]
