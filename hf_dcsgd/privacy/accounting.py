"""What the mechanism costs: ε after t steps, and σ for a budget, by accountants from `dp_accounting` or your own.

Guarantee. Every figure is for add/remove-one neighbors and Poisson sampling at rate q. One step of the mechanism
releases several Gaussian answers about *one* Poisson sample; by Theorem 1 of the paper they cost together exactly what
a single Gaussian with multiplier σ = (Σ σ_k⁻²)^(−1/2) costs on that sample. σ (`noise_multiplier`) is therefore the
only multiplier that is ever accounted. Feeding the accountant σ_T, or two separately sampled events, under-reports ε.

Accountants are in `accountants.py`.

| edge case | result |
|---|---|
| no steps | ε = 0 |
| σ = 0 | ε = inf |
| q = 1 | no amplification: the plain Gaussian mechanism |
| δ below what the PLD accountant truncates (about 1e-15) | ε = inf there: calibration reports an unmeetable budget |
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import dp_accounting
import numpy as np
from dp_accounting import DpEvent
from scipy import optimize, stats

from hf_dcsgd.privacy.accountants import ACCOUNTANTS, Accountant, composed, has_grid, rough_epsilon
from hf_dcsgd.validation import require, require_count, require_fraction, require_non_negative, require_positive

MAX_NOISE_MULTIPLIER = 1e6  # a search for σ gives up beyond it
_GRID_SCALES = (1.0, 10.0, 100.0)  # the grid of the result, and coarser ones to find it by


# -- Theorem 1 --------------------------------------------------------------------------------------------------------


def combined_noise_multiplier(multipliers: Sequence[float]) -> float:
    """Return the multiplier of the one Gaussian that costs what all of these cost on the same sample."""
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
    """Return σ_T = (σ⁻² − Σ σ_k⁻²)^(−1/2), what is left for the gradient when the side releases take their share.

    The keys of `side_noise_multipliers` are the names of the arguments that set them, for the error.
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


# -- ε of runs --------------------------------------------------------------------------------------------------------


def planned_steps(dataset_size: int, expected_batch_size: int, epochs: float) -> int:
    """Return T as the Hugging Face loop counts it: ⌈epochs × ⌊N / B⌋⌉."""
    require_count("expected_batch_size", expected_batch_size)
    require(
        dataset_size >= expected_batch_size,
        f"expected dataset_size >= expected_batch_size, got {dataset_size} and {expected_batch_size}",
    )
    require_positive("epochs", epochs)
    return math.ceil(epochs * (dataset_size // expected_batch_size))


class AccountedRun(NamedTuple):
    """What an accountant needs to know of one run: σ, q, the steps charged to it, and whose privacy it is about.

    With `group_size` k, ε is that of adding or removing k examples at once, each drawn and clipped by itself.
    """

    noise_multiplier: float
    sampling_rate: float
    steps: int
    group_size: int = 1

    @property
    def event(self) -> DpEvent:
        """Steps of one Gaussian (σ, by Theorem 1) on a Poisson sample each; the bare Gaussian where q = 1.

        Of a group, i examples are in the sample with the binomial probability of i, and move the sum by at most i: a
        mixture of Gaussians, which dominates whatever directions they move it in.
        """
        sigma, rate, group = float(self.noise_multiplier), float(self.sampling_rate), int(self.group_size)
        step: DpEvent = dp_accounting.GaussianDpEvent(sigma / group)
        if rate < 1 and group == 1:
            step = dp_accounting.PoissonSampledDpEvent(rate, step)
        elif rate < 1:
            drawn = stats.binom.pmf(np.arange(group + 1), group, rate).tolist()
            step = dp_accounting.dp_event.MixtureOfGaussiansDpEvent(sigma, tuple(range(group + 1)), tuple(drawn))
        return dp_accounting.SelfComposedDpEvent(step, int(self.steps))


def epsilon_spent(
    *,
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    delta: float,
    accountant: str = "rdp",
    grid_scale: float = 1.0,
    group_size: int = 1,
) -> float:
    """Return ε at `delta` after `steps` steps with multiplier σ: an upper bound, 0 for no steps, inf for σ = 0.

    For curves and second opinions, `grid_scale` > 1 widens the grid of the PLD accountant by that factor: about as
    much faster, and still an upper bound (ten times wider adds less than 1e-3 at the paper's settings).
    """
    run = AccountedRun(noise_multiplier, sampling_rate, steps, group_size)
    return composed_epsilon([run], delta, accountant, grid_scale)


def composed_epsilon(
    runs: Sequence[AccountedRun], delta: float, accountant: str = "rdp", grid_scale: float = 1.0
) -> float:
    """Return ε at `delta` of all these runs on one dataset, each possibly chosen by the results of those before it."""
    function = ACCOUNTANTS.find(accountant)
    require_fraction("delta", delta)
    for run in runs:
        require_non_negative("noise_multiplier", run.noise_multiplier)
        _require_sampling_rate(run.sampling_rate)
        require_count("group_size", run.group_size)
    charged = [run for run in runs if require_count("steps", run.steps, minimum=0)]
    if not charged:
        return 0.0
    if min(run.noise_multiplier for run in charged) == 0:
        return math.inf
    events = tuple(run.event for run in charged)
    return _epsilon(function, events[0] if len(events) == 1 else composed(*events), float(delta), grid_scale)


@functools.lru_cache(maxsize=4096)
def _epsilon(function: Accountant, event: DpEvent, delta: float, grid_scale: float = 1.0) -> float:
    """Return what an accountant says; a scale for its grid is for those that have one."""
    try:
        found = function(event, delta, grid_scale=grid_scale) if has_grid(function) else function(event, delta)
    except dp_accounting.UnsupportedEventError as error:
        raise ValueError(f"{function.__name__} cannot account for a group of rows; use accountant='pld'") from error
    epsilon = float(found)
    require(epsilon >= 0, f"expected {function.__name__} to return an epsilon >= 0, got {epsilon} for {event}")
    return epsilon


# -- σ for a budget ---------------------------------------------------------------------------------------------------


def calibrate_noise_multiplier(
    *, epsilon: float, delta: float, sampling_rate: float, steps: int, accountant: str = "rdp", group_size: int = 1
) -> float:
    """Return the smallest σ whose ε after `steps` steps is at most `epsilon`, never on the wrong side of it.

    `epsilon_spent` with the returned σ is ≤ `epsilon`, and within 4e-6 of it, relatively (1e-2 for a group). A budget
    that no σ up to `MAX_NOISE_MULTIPLIER` meets raises ValueError.
    """
    function = ACCOUNTANTS.find(accountant)
    epsilon, delta = require_positive("epsilon", epsilon), require_fraction("delta", delta)
    rate, steps = _require_sampling_rate(sampling_rate), require_count("steps", steps)
    sigma = _calibrated(function, epsilon, delta, rate, steps, require_count("group_size", group_size))
    if sigma is None:
        raise ValueError(
            f"no noise_multiplier up to {MAX_NOISE_MULTIPLIER:g} meets epsilon={epsilon:g} at delta={delta:g} with "
            f"sampling_rate={rate:g}, steps={steps} and accountant={accountant!r}"
        )
    return sigma


@functools.lru_cache(maxsize=1024)
def _calibrated(
    function: Accountant, epsilon: float, delta: float, rate: float, steps: int, group_size: int = 1
) -> float | None:
    def spent(sigma: float, grid_scale: float = 1.0) -> float:
        return _epsilon(function, AccountedRun(sigma, rate, steps, group_size).event, delta, grid_scale)

    if function is rough_epsilon:
        return smallest_noise_multiplier(spent, epsilon)
    guess = group_size * (_calibrated(rough_epsilon, epsilon, delta, rate, steps) or 1.0)
    if not has_grid(function):
        return smallest_noise_multiplier(spent, epsilon, guess=guess, factor=1.1)
    # The fine grid is slower still for a group, and the next one is good to a fraction of a percent.
    return _solved_by_grids(spent, epsilon, guess, _GRID_SCALES if group_size == 1 else _GRID_SCALES[1:2])


def _solved_by_grids(
    spent: Callable[[float, float], float], epsilon: float, guess: float, scales: Sequence[float]
) -> float | None:
    """Solve on the first of these grids, the finest: on the next one, for a target moved by what that overstates.

    Two looks at a grid do as a rule, since what the next one overstates hardly depends on σ.
    """
    scale, *coarser = scales
    if not coarser:
        return smallest_noise_multiplier(lambda sigma: spent(sigma, scale), epsilon, guess=guess, factor=1.1)
    target = epsilon
    for _ in range(6):
        sigma = _solved_by_grids(spent, target, guess, coarser)
        if sigma is None:
            return None
        guess, excess = sigma, spent(sigma, scale) - epsilon
        if -4e-6 * epsilon <= excess <= 0:
            return sigma
        target -= excess + 2e-6 * epsilon
    return smallest_noise_multiplier(lambda sigma: spent(sigma, scale), epsilon, guess=guess, factor=1.01)


def smallest_noise_multiplier(
    epsilon_of: Callable[[float], float], epsilon: float, *, guess: float = 1.0, factor: float = 2.0
) -> float | None:
    """Return the smallest σ with `epsilon_of(σ)` ≤ `epsilon`, on the safe side of it; None when there is none.

    `epsilon_of` must fall with σ; small numerical non-monotonicities and jumps are tolerated. The search brackets σ by
    widening steps from `guess`, then solves in logarithms, in which ε is nearly a line, to a relative 1e-8.
    """
    low = high = guess
    while epsilon_of(low) <= epsilon:
        high, low, factor = low, low / factor, min(factor**2, 8.0)
        if low < 1e-6:  # ε in the billions: nothing left to search for
            return high
    while low == high or not epsilon_of(high) <= epsilon:
        low, high, factor = high, high * factor, min(factor**2, 8.0)
        if high > MAX_NOISE_MULTIPLIER:
            return None

    def gap(share: float) -> float:  # brentq cannot interpolate through infinities
        return math.log(min(max(epsilon_of(sigma_at(share)), 1e-99), 1e99) / epsilon)

    def sigma_at(share: float) -> float:  # from high to low; both ends exact, for their signs must hold
        return low if share == 1 else high * (low / high) ** share

    tolerance = 1e-8
    root = sigma_at(optimize.brentq(gap, 0.0, 1.0, xtol=tolerance / (2 * math.log(high / low))))
    while root < high and epsilon_of(root) > epsilon:
        root, tolerance = root * (1 + tolerance), tolerance * 2
    return min(root, high)


def _require_sampling_rate(sampling_rate: float) -> float:
    require(0 < sampling_rate <= 1, f"expected 0 < sampling_rate <= 1, got {sampling_rate}")
    return float(sampling_rate)
