"""What the mechanism costs: events, ε after t steps, and σ for a budget, all computed by `dp_accounting`.

Guarantee. Every figure is for add/remove-one neighbours and Poisson sampling at rate q. One step of the mechanism
releases several Gaussian answers about *one* Poisson sample; by Theorem 1 of the paper they cost together exactly what
a single Gaussian with multiplier σ = (Σ σ_k⁻²)^(−1/2) costs on that sample. σ (`noise_multiplier`) is therefore the
only multiplier that is ever accounted. Feeding the accountant σ_T, or two separately sampled events, under-reports ε.

ε is always an upper bound: a coarser grid of Rényi orders or of privacy losses can only raise it.

| edge case | result |
|---|---|
| no steps | ε = 0 |
| σ = 0 | ε = inf |
| q = 1 | no amplification: the plain Gaussian mechanism |
| δ below what the PLD accountant truncates (about 1e-15) | ε = inf there: calibration reports an unmeetable budget |
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import dp_accounting
from dp_accounting import pld, rdp

from hf_dcsgd.privacy.accountants import (
    MAX_NOISE_MULTIPLIER,
    RDP_ORDERS,
    calibrate_pld,
    calibrate_rdp,
    pld_epsilon,
    pld_event,
    pld_interval,
    rdp_epsilon,
    rdp_of_one_step,
)
from hf_dcsgd.validation import require, require_count, require_fraction, require_non_negative, require_positive

ACCOUNTANTS = ("rdp", "pld")


def combined_noise_multiplier(multipliers: Sequence[float]) -> float:
    """The multiplier of the one Gaussian that costs what all of these cost on the same sample: (Σ σ_k⁻²)^(−1/2)."""
    require(len(multipliers) > 0, "expected at least one of multipliers, got none")
    require(min(multipliers) >= 0, f"expected multipliers >= 0, got {list(multipliers)}")
    if min(multipliers) == 0:
        return 0.0
    if len(multipliers) == 1:
        return float(multipliers[0])
    precision = math.fsum(float(multiplier) ** -2 for multiplier in multipliers)
    return precision**-0.5 if precision > 0 else math.inf


class NothingLeftForGradientError(ValueError):
    """The side releases take all of the accounted σ, or more."""


def grad_noise_multiplier(noise_multiplier: float, side_noise_multipliers: Mapping[str, float]) -> float:
    """σ_T: what is left for the gradient when the side releases take their share of σ (Theorem 1).

    σ_T = (σ⁻² − Σ σ_k⁻²)^(−1/2). The keys of `side_noise_multipliers` are the names of the arguments that set them;
    the error for a share that is not positive repeats them.
    """
    require_non_negative("noise_multiplier", noise_multiplier)
    if not side_noise_multipliers or noise_multiplier == 0:
        return float(noise_multiplier)
    side = combined_noise_multiplier(list(side_noise_multipliers.values()))
    if not side > noise_multiplier:
        name, shown = next(iter(side_noise_multipliers)), f"{side:g}"
        if len(side_noise_multipliers) > 1:
            name = " and ".join(side_noise_multipliers) + " combined"
            shown += " (" + ", ".join(f"{key}={value:g}" for key, value in side_noise_multipliers.items()) + ")"
        raise NothingLeftForGradientError(f"expected {name} > noise_multiplier, got {shown} and {noise_multiplier:g}")
    # (1/σ − 1/s)(1/σ + 1/s) keeps its digits where 1/σ² − 1/s² would cancel.
    inverse, side_inverse = 1 / noise_multiplier, 1 / side
    return float(((inverse - side_inverse) * (inverse + side_inverse)) ** -0.5)


def default_histogram_noise_multiplier(noise_multiplier: float) -> float:
    """σ_H by the paper's rule: 5; 8 when 2 ≤ σ ≤ 3; 12 when σ > 3."""
    require_non_negative("noise_multiplier", noise_multiplier)
    if noise_multiplier > 3:
        return 12.0
    return 8.0 if noise_multiplier >= 2 else 5.0


def step_event(sampling_rate: float, noise_multipliers: Sequence[float]) -> dp_accounting.DpEvent:
    """One step as it happens: every Gaussian release of the step, on one and the same Poisson sample."""
    _require_sampling_rate(sampling_rate)
    require(len(noise_multipliers) > 0, "expected at least one of noise_multipliers, got none")
    require(min(noise_multipliers) >= 0, f"expected noise_multipliers >= 0, got {list(noise_multipliers)}")
    releases = [dp_accounting.GaussianDpEvent(float(multiplier)) for multiplier in noise_multipliers]
    release = releases[0] if len(releases) == 1 else dp_accounting.ComposedDpEvent(releases)
    return dp_accounting.PoissonSampledDpEvent(float(sampling_rate), release)


def planned_steps(dataset_size: int, expected_batch_size: int, epochs: float) -> int:
    """T as the Hugging Face loop counts it: ⌈epochs × ⌊N / B⌋⌉."""
    require_count("expected_batch_size", expected_batch_size)
    require(
        dataset_size >= expected_batch_size,
        f"expected dataset_size >= expected_batch_size, got {dataset_size} and {expected_batch_size}",
    )
    require_positive("epochs", epochs)
    return math.ceil(epochs * (dataset_size // expected_batch_size))


def epsilon_spent(
    *,
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    delta: float,
    accountant: str = "rdp",
    coarser: float = 1.0,
) -> float:
    """ε at `delta` after `steps` steps with multiplier σ: an upper bound, 0 for no steps, inf for σ = 0.

    For curves and second opinions, `coarser` > 1 widens the grid of the PLD accountant by that factor: about as much
    faster, and still an upper bound (ten times coarser adds less than 1e-3 at the paper's settings).
    """
    sigma = require_non_negative("noise_multiplier", noise_multiplier)
    rate = _require_sampling_rate(sampling_rate)
    steps = require_count("steps", steps, minimum=0)
    delta = require_fraction("delta", delta)
    _require_accountant(accountant)
    if steps == 0:
        return 0.0
    if sigma == 0:
        return math.inf
    if accountant == "rdp":
        return rdp_epsilon(sigma, rate, steps, delta)[0]
    return pld_epsilon(sigma, rate, steps, delta, coarser * pld_interval(sigma, rate, steps))


class AccountedRun(NamedTuple):
    """What the accountant needs to know of one run: σ, q and the steps charged to it."""

    noise_multiplier: float
    sampling_rate: float
    steps: int


def composed_epsilon(runs: Sequence[AccountedRun], delta: float, accountant: str = "rdp") -> float:
    """ε at `delta` of all these runs on one dataset, each possibly chosen by the results of those before it."""
    delta = require_fraction("delta", delta)
    _require_accountant(accountant)
    charged = [run for run in runs if require_count("steps", run.steps, minimum=0)]
    for run in charged:
        require_non_negative("noise_multiplier", run.noise_multiplier)
        _require_sampling_rate(run.sampling_rate)
    if not charged:
        return 0.0
    if min(run.noise_multiplier for run in charged) == 0:
        return math.inf
    if accountant == "rdp":
        divergences = sum(run.steps * rdp_of_one_step(*run[:2], RDP_ORDERS) for run in charged)
        return float(rdp.compute_epsilon(RDP_ORDERS, divergences, delta)[0])
    composed = pld.PLDAccountant(value_discretization_interval=min(pld_interval(*run) for run in charged))
    for run in charged:
        composed.compose(dp_accounting.SelfComposedDpEvent(pld_event(*run[:2]), run.steps))
    return float(composed.get_epsilon(delta))


def calibrate_noise_multiplier(
    *, epsilon: float, delta: float, sampling_rate: float, steps: int, accountant: str = "rdp"
) -> float:
    """The smallest σ whose ε after `steps` steps is at most `epsilon`, never on the wrong side of it.

    `epsilon_spent` with the returned σ is ≤ `epsilon`, and within 4e-6 of it, relatively. A budget that no σ up to
    `MAX_NOISE_MULTIPLIER` meets raises ValueError.
    """
    epsilon = require_positive("epsilon", epsilon)
    delta = require_fraction("delta", delta)
    rate = _require_sampling_rate(sampling_rate)
    steps = require_count("steps", steps)
    _require_accountant(accountant)
    search = calibrate_rdp if accountant == "rdp" else calibrate_pld
    sigma = search(epsilon, delta, rate, steps)
    if sigma is None:
        raise ValueError(
            f"no noise_multiplier up to {MAX_NOISE_MULTIPLIER:g} meets epsilon={epsilon:g} at delta={delta:g} with "
            f"sampling_rate={rate:g}, steps={steps} and accountant={accountant!r}"
        )
    return sigma


def _require_sampling_rate(sampling_rate: float) -> float:
    require(0 < sampling_rate <= 1, f"expected 0 < sampling_rate <= 1, got {sampling_rate}")
    return float(sampling_rate)


def _require_accountant(accountant: str) -> None:
    require(
        accountant in ACCOUNTANTS, f"expected accountant to be one of {', '.join(ACCOUNTANTS)}, got {accountant!r}"
    )
