"""An empirical lower bound on ε from one training run with many canaries (Steinke, Nasr, Jagielski, 2023).

Each of m canaries is put into the training set by a fair coin of its own. After training, the auditor scores every
canary (a loss that is lower than expected speaks for "in") and guesses the k highest scores in, the k lowest out,
abstaining on the rest. For an (ε, 0)-private run each guess is right with probability at most e^ε / (1 + e^ε) whatever
the others were, so the number of right guesses is stochastically below a binomial; an ε for which the observed number
would be too unlikely is refuted. δ adds a correction that is negligible while δ·m is small; it is bounded by allowing
for δ·m extra right guesses' worth of probability.

The bound is usually far below the claim: it shows that nothing is badly broken, not that the claim is tight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

CONFIDENCE_ALPHA = 0.05


@dataclass(frozen=True)
class OneRunAudit:
    """What the guesses of one run say about ε."""

    canaries: int
    guesses: int
    correct: int
    epsilon_lower_bound: float
    claimed_epsilon: float
    confidence: float

    @property
    def passed(self) -> bool:
        return self.epsilon_lower_bound <= self.claimed_epsilon

    def __str__(self) -> str:
        verdict = "consistent with" if self.passed else "REFUTES"
        return (
            f"{self.correct} of {self.guesses} guesses about {self.canaries} canaries were right: ε ≥ "
            f"{self.epsilon_lower_bound:.3f} with {self.confidence:.0%} confidence, {verdict} the claimed ε = "
            f"{self.claimed_epsilon:.3f}"
        )


def epsilon_lower_bound(correct: int, guesses: int, canaries: int, delta: float, alpha: float) -> float:
    """Return the largest ε that `correct` right guesses of `guesses` refute at level α; 0 where they refute none."""
    if guesses == 0:
        return 0.0

    def p_value(epsilon: float) -> float:
        right = 1 / (1 + math.exp(-epsilon))
        tail = float(stats.binom.sf(correct - 1, guesses, right))
        # Theorem 5.2 of the paper: δ raises the tail by at most 2·m·δ times the largest of P[v − i ≤ X < v] / i.
        raised = 0.0
        below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, right))
        if len(below):
            raised = float((below / np.arange(1, len(below) + 1)).max())
        return tail + 2 * canaries * delta * raised

    if p_value(0.0) > alpha:
        return 0.0
    if p_value(20.0) <= alpha:
        return 20.0
    return float(optimize.brentq(lambda epsilon: p_value(epsilon) - alpha, 0.0, 20.0))


def judge_one_run(
    scores: Sequence[float],
    included: Sequence[bool],
    *,
    claimed_epsilon: float,
    delta: float,
    guesses: int | None = None,
    alpha: float = CONFIDENCE_ALPHA,
) -> OneRunAudit:
    """Guess "in" for the highest scores and "out" for the lowest; by default for a third of the canaries in all.

    `guesses` must be chosen without looking at `included`.
    """
    order = np.argsort(np.asarray(scores, dtype=np.float64), kind="stable")
    truth = np.asarray(included, dtype=bool)
    if len(order) != len(truth):
        raise ValueError(f"expected one score per canary, got {len(order)} scores and {len(truth)} canaries")
    half = (len(order) // 3 if guesses is None else guesses) // 2
    if not 0 < half <= len(order) // 2:
        raise ValueError(f"expected 2 <= guesses <= {len(order)}, got {guesses}")
    correct = int(truth[order[-half:]].sum() + (~truth[order[:half]]).sum())
    return OneRunAudit(
        canaries=len(order),
        guesses=2 * half,
        correct=correct,
        epsilon_lower_bound=epsilon_lower_bound(correct, 2 * half, len(order), delta, alpha),
        claimed_epsilon=claimed_epsilon,
        confidence=1 - alpha,
    )
