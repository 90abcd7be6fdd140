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

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp
from scipy import optimize

from .validation import require, require_count, require_fraction, require_non_negative, require_positive

ACCOUNTANTS = ("rdp", "pld")

# Tenths where large budgets find their optimum, integers for usual ones, then ever wider steps (never over 7%) for
# small budgets and for the tiny δ that Liu & Talwar's tuning bound asks of a run (cut at 63: σ of 3.245 for 2.387).
LOW_RDP_ORDERS: tuple[float, ...] = (*(1 + tenths / 10 for tenths in range(1, 100)), *map(float, range(11, 64)))
HIGH_RDP_ORDERS: tuple[float, ...] = tuple(
    map(float, (*range(64, 256, 4), *range(256, 512, 16), *range(512, 1025, 32)))
)
RDP_ORDERS = LOW_RDP_ORDERS + HIGH_RDP_ORDERS

MAX_NOISE_MULTIPLIER = 1e6  # a search for σ gives up beyond it
_RDP_RESOLUTION = 1e-14  # rounding error of one step's Rényi divergence; charged on top, so that it cannot favour us
_PLD_GRID_POINTS = 2e5  # for one step, at most


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
        raise ValueError(f"expected {name} > noise_multiplier, got {shown} and {noise_multiplier:g}")
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
        return _rdp_epsilon_over_all(sigma, rate, steps, delta)[0]
    return _pld_epsilon(sigma, rate, steps, delta, coarser * _pld_interval(sigma, rate, steps))


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
    composed = pld.PLDAccountant(value_discretization_interval=min(_pld_interval(*run) for run in charged))
    for run in charged:
        composed.compose(dp_accounting.SelfComposedDpEvent(_pld_event(*run[:2]), run.steps))
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
    search = _calibrate_rdp if accountant == "rdp" else _calibrate_pld
    sigma = search(epsilon, delta, rate, steps)
    if sigma is None:
        raise ValueError(
            f"no noise_multiplier up to {MAX_NOISE_MULTIPLIER:g} meets epsilon={epsilon:g} at delta={delta:g} with "
            f"sampling_rate={rate:g}, steps={steps} and accountant={accountant!r}"
        )
    return sigma


def smallest_noise_multiplier(
    epsilon_of: Callable[[float], float],
    epsilon: float,
    *,
    guess: float = 1.0,
    factor: float = 2.0,
    tolerance: float = 1e-8,
) -> float | None:
    """The smallest σ with `epsilon_of(σ)` ≤ `epsilon`, on the safe side of it; None when there is none.

    `epsilon_of` must fall with σ; numerical wobbles and jumps are borne. The search brackets σ by widening steps from
    `guess`, the first a `factor`, and ends at a relative `tolerance`.
    """
    low = high = guess
    if epsilon_of(guess) <= epsilon:
        while epsilon_of(low) <= epsilon:
            high, low, factor = low, low / factor, min(factor**2, 8.0)
            if low < 1e-6:  # ε in the billions: nothing left to search for
                return high
    else:
        while not epsilon_of(high) <= epsilon:
            low, high, factor = high, high * factor, min(factor**2, 8.0)
            if high > MAX_NOISE_MULTIPLIER:
                return None

    def sigma_at(share: float) -> float:  # from high to low; both ends exact, for their signs must hold
        return low if share == 1 else high * (low / high) ** share

    def gap(share: float) -> float:
        return min(epsilon_of(sigma_at(share)) - epsilon, 1e12)  # brentq cannot interpolate through inf

    root = sigma_at(optimize.brentq(gap, 0.0, 1.0, xtol=tolerance / (2 * math.log(high / low))))
    while root < high:
        if epsilon_of(root) <= epsilon:
            return root
        root, tolerance = root * (1 + tolerance), tolerance * 2
    return high


def run_event(noise_multiplier: float, sampling_rate: float, steps: int) -> dp_accounting.DpEvent:
    """A whole run for the RDP accountant, with its rounding error charged as a release of its own."""
    run = dp_accounting.SelfComposedDpEvent(step_event(sampling_rate, [noise_multiplier]), steps)
    return dp_accounting.ComposedDpEvent([run, dp_accounting.ZCDpEvent(rho=0.0, xi=_RDP_RESOLUTION * steps)])


@contextlib.contextmanager
def quiet_orders() -> Iterator[None]:
    """Silence about fractional orders that do not converge: dp_accounting leaves them out, which is sound."""

    def keep(record: logging.LogRecord) -> bool:
        return "failed to converge" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


@functools.lru_cache(maxsize=1024)
def rdp_of_one_step(
    noise_multiplier: float, sampling_rate: float, orders: tuple[float, ...] = RDP_ORDERS
) -> np.ndarray:
    """The Rényi divergence of one step at every order: inf where dp_accounting has none to offer."""
    accountant = rdp.RdpAccountant(orders)
    with quiet_orders():
        accountant.compose(run_event(noise_multiplier, sampling_rate, 1))
    divergences = accountant.rdp
    divergences.setflags(write=False)  # the cache hands out this very array
    return divergences


def _rdp_epsilon(
    noise_multiplier: float, sampling_rate: float, steps: int, delta: float, orders: tuple[float, ...]
) -> tuple[float, float]:
    """(ε, the order that gave it), over the given orders."""
    divergences = steps * rdp_of_one_step(noise_multiplier, sampling_rate, orders)
    epsilon, order = rdp.compute_epsilon(orders, divergences, delta)
    return float(epsilon), float(order)


def _rdp_epsilon_over_all(
    noise_multiplier: float, sampling_rate: float, steps: int, delta: float
) -> tuple[float, float]:
    """(ε, the order that gave it) over `RDP_ORDERS`, without computing the slow high orders where they cannot help.

    Divergence rises with the order, and an order's ε is less than 0.1 below its divergence from order 64 on.
    """
    low = _rdp_epsilon(noise_multiplier, sampling_rate, steps, delta, LOW_RDP_ORDERS)
    if steps * rdp_of_one_step(noise_multiplier, sampling_rate, LOW_RDP_ORDERS)[-1] > low[0] + 0.1:
        return low
    return min(low, _rdp_epsilon(noise_multiplier, sampling_rate, steps, delta, HIGH_RDP_ORDERS))


@functools.lru_cache(maxsize=1024)
def _calibrate_rdp(epsilon: float, delta: float, sampling_rate: float, steps: int) -> float | None:
    """Solves on few orders, looks at all, solves around the best one, until looking at all finds nothing better.

    Any subset of the orders overstates ε, so every σ on the way is safe, and the last one is tight: there the best of
    all orders is among those that were solved for.
    """

    def solve(orders: tuple[float, ...], guess: float, tolerance: float) -> float | None:
        def epsilon_of(sigma: float) -> float:
            return _rdp_epsilon(sigma, sampling_rate, steps, delta, orders)[0]

        return smallest_noise_multiplier(epsilon_of, epsilon, guess=guess, factor=1.5, tolerance=tolerance)

    sigma = solve(LOW_RDP_ORDERS[::6], 1.0, 1e-3)
    # A budget out of the low orders' reach is met at last by so much noise that ε drops to 0 at once.
    if sigma is None or _rdp_epsilon(sigma, sampling_rate, steps, delta, LOW_RDP_ORDERS)[0] < epsilon / 2:
        sigma = solve(RDP_ORDERS, 1.0, 1e-3)
    orders: tuple[float, ...] = ()
    while sigma is not None:
        best = RDP_ORDERS.index(_rdp_epsilon_over_all(sigma, sampling_rate, steps, delta)[1])
        if RDP_ORDERS[best] in orders:
            return sigma
        orders = RDP_ORDERS[max(best - 3, 0) : best + 4]
        sigma = solve(orders, sigma, 1e-8)
    return None


def _pld_interval(noise_multiplier: float, sampling_rate: float, steps: int) -> float:
    """Spacing of the grid of privacy losses: 1e-4, finer where losses are tiny, coarser where they are huge.

    A tenth of the standard deviation of one step's loss, so that rounding does not outweigh it, but no more points
    than `_PLD_GRID_POINTS` up to the loss at ten standard deviations of noise.
    """
    sigma = noise_multiplier if sampling_rate < 1 else noise_multiplier / math.sqrt(steps)  # as accounted: see below
    deviation = sampling_rate * math.sqrt(math.expm1(min(sigma**-2, 100.0)))
    largest = np.logaddexp(0.0, math.log(sampling_rate) + 10 / sigma + 0.5 / sigma**2)
    return float(max(min(1e-4, deviation / 10), largest / _PLD_GRID_POINTS))


@functools.lru_cache(maxsize=1024)
def _pld_epsilon(noise_multiplier: float, sampling_rate: float, steps: int, delta: float, interval: float) -> float:
    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    accountant.compose(dp_accounting.SelfComposedDpEvent(_pld_event(noise_multiplier, sampling_rate), steps))
    return float(accountant.get_epsilon(delta))


def _pld_event(noise_multiplier: float, sampling_rate: float) -> dp_accounting.DpEvent:
    # The PLD accountant takes a single Gaussian inside a Poisson sample: σ, by Theorem 1. Without sampling it composes
    # Gaussians in closed form.
    if sampling_rate == 1:
        return dp_accounting.GaussianDpEvent(noise_multiplier)
    return step_event(sampling_rate, [noise_multiplier])


@functools.lru_cache(maxsize=256)
def _calibrate_pld(epsilon: float, delta: float, sampling_rate: float, steps: int) -> float | None:
    """A secant search with few looks at the slow grid: start, slope and a first correction come from coarser ones."""

    def spent(log_sigma: float, coarser: float = 1.0) -> float:
        sigma = math.exp(log_sigma)
        interval = coarser * _pld_interval(sigma, sampling_rate, steps)
        return _pld_epsilon(sigma, sampling_rate, steps, delta, interval)

    guess = _calibrate_rdp(epsilon, delta, sampling_rate, steps) or 1.0
    start = smallest_noise_multiplier(
        lambda sigma: spent(math.log(sigma), coarser=10), epsilon, guess=guess, factor=1.2, tolerance=1e-4
    )
    if start is None:
        return None
    point = math.log(start)
    coarse, finer = spent(point, coarser=10), spent(point, coarser=5)
    slope = (spent(point + 1e-3, coarser=10) - coarse) / 1e-3
    excess = (
        coarse - epsilon - (coarse - finer) * 99 / 75
    )  # what a coarse grid adds to ε goes with its spacing squared
    for _ in range(6):
        if not slope < 0:
            break
        previous, previous_excess = point, excess
        point -= (excess + 2e-6 * epsilon) / slope
        excess = spent(point) - epsilon
        if -4e-6 * epsilon <= excess <= 0:
            return math.exp(point)
        if abs(point - previous) > 1e-6:
            slope = (excess - previous_excess) / (point - previous)
    return smallest_noise_multiplier(
        lambda sigma: spent(math.log(sigma)), epsilon, guess=start, factor=1.01, tolerance=1e-7
    )


def _require_sampling_rate(sampling_rate: float) -> float:
    require(0 < sampling_rate <= 1, f"expected 0 < sampling_rate <= 1, got {sampling_rate}")
    return float(sampling_rate)


def _require_accountant(accountant: str) -> None:
    require(
        accountant in ACCOUNTANTS, f"expected accountant to be one of {', '.join(ACCOUNTANTS)}, got {accountant!r}"
    )
