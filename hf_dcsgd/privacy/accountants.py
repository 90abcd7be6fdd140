"""The two accountants of `dp_accounting` for runs of one repeated step, and the search for the σ that meets a budget.

Both take σ, the one multiplier that stands for all releases of a step, and bound ε from above for add/remove-one
neighbours. What makes them differ from a plain call of the library is speed, silence and the rounding of Rényi
divergences: the library takes a divergence that rounding made negative for perfect privacy (ε = 0), so the rounding
error is charged here as a cost of its own. Arguments are checked by `accounting`, which is the door to this room.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp
from scipy import optimize

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
    step = dp_accounting.PoissonSampledDpEvent(sampling_rate, dp_accounting.GaussianDpEvent(noise_multiplier))
    run = dp_accounting.SelfComposedDpEvent(step, steps)
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


def _rdp_epsilon_over(
    noise_multiplier: float, sampling_rate: float, steps: int, delta: float, orders: tuple[float, ...]
) -> tuple[float, float]:
    """(ε, the order that gave it), over the given orders."""
    divergences = steps * rdp_of_one_step(noise_multiplier, sampling_rate, orders)
    epsilon, order = rdp.compute_epsilon(orders, divergences, delta)
    return float(epsilon), float(order)


def rdp_epsilon(noise_multiplier: float, sampling_rate: float, steps: int, delta: float) -> tuple[float, float]:
    """(ε, the order that gave it) over `RDP_ORDERS`, without computing the slow high orders where they cannot help.

    Divergence rises with the order, and an order's ε is less than 0.1 below its divergence from order 64 on.
    """
    low = _rdp_epsilon_over(noise_multiplier, sampling_rate, steps, delta, LOW_RDP_ORDERS)
    if steps * rdp_of_one_step(noise_multiplier, sampling_rate, LOW_RDP_ORDERS)[-1] > low[0] + 0.1:
        return low
    return min(low, _rdp_epsilon_over(noise_multiplier, sampling_rate, steps, delta, HIGH_RDP_ORDERS))


@functools.lru_cache(maxsize=1024)
def calibrate_rdp(epsilon: float, delta: float, sampling_rate: float, steps: int) -> float | None:
    """Solves on few orders, looks at all, solves around the best one, until looking at all finds nothing better.

    Any subset of the orders overstates ε, so every σ on the way is safe, and the last one is tight: there the best of
    all orders is among those that were solved for.
    """

    def solve(orders: tuple[float, ...], guess: float, tolerance: float) -> float | None:
        def epsilon_of(sigma: float) -> float:
            return _rdp_epsilon_over(sigma, sampling_rate, steps, delta, orders)[0]

        return smallest_noise_multiplier(epsilon_of, epsilon, guess=guess, factor=1.5, tolerance=tolerance)

    sigma = solve(LOW_RDP_ORDERS[::6], 1.0, 1e-3)
    # A budget out of the low orders' reach is met at last by so much noise that ε drops to 0 at once.
    if sigma is None or _rdp_epsilon_over(sigma, sampling_rate, steps, delta, LOW_RDP_ORDERS)[0] < epsilon / 2:
        sigma = solve(RDP_ORDERS, 1.0, 1e-3)
    orders: tuple[float, ...] = ()
    while sigma is not None:
        best = RDP_ORDERS.index(rdp_epsilon(sigma, sampling_rate, steps, delta)[1])
        if RDP_ORDERS[best] in orders:
            return sigma
        orders += RDP_ORDERS[max(best - 3, 0) : best + 4]  # added, not replaced: so this ends
        sigma = solve(orders, sigma, 1e-8)
    return None


def pld_interval(noise_multiplier: float, sampling_rate: float, steps: int) -> float:
    """Spacing of the grid of privacy losses: 1e-4, finer where losses are tiny, coarser where they are huge.

    A tenth of the standard deviation of one step's loss, so that rounding does not outweigh it, but no more points
    than `_PLD_GRID_POINTS` up to the loss at ten standard deviations of noise.
    """
    sigma = noise_multiplier if sampling_rate < 1 else noise_multiplier / math.sqrt(steps)  # as accounted: see below
    deviation = sampling_rate * math.sqrt(math.expm1(min(sigma**-2, 100.0)))
    largest = np.logaddexp(0.0, math.log(sampling_rate) + 10 / sigma + 0.5 / sigma**2)
    return float(max(min(1e-4, deviation / 10), largest / _PLD_GRID_POINTS))


@functools.lru_cache(maxsize=1024)
def pld_epsilon(noise_multiplier: float, sampling_rate: float, steps: int, delta: float, interval: float) -> float:
    """ε by privacy loss distributions on a grid of this spacing, rounded pessimistically; inf for a δ too small."""
    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    accountant.compose(dp_accounting.SelfComposedDpEvent(pld_event(noise_multiplier, sampling_rate), steps))
    return float(accountant.get_epsilon(delta))


def pld_event(noise_multiplier: float, sampling_rate: float) -> dp_accounting.DpEvent:
    """One step in the form that the PLD accountant takes: one Gaussian (σ, by Theorem 1) inside a Poisson sample.

    Without sampling it composes Gaussians in closed form, so q = 1 leaves the sample out.
    """
    release = dp_accounting.GaussianDpEvent(noise_multiplier)
    return release if sampling_rate == 1 else dp_accounting.PoissonSampledDpEvent(sampling_rate, release)


@functools.lru_cache(maxsize=256)
def calibrate_pld(epsilon: float, delta: float, sampling_rate: float, steps: int) -> float | None:
    """A secant search with few looks at the slow grid: start, slope and a first correction come from coarser ones."""

    def spent(log_sigma: float, coarser: float = 1.0) -> float:
        sigma = math.exp(log_sigma)
        interval = coarser * pld_interval(sigma, sampling_rate, steps)
        return pld_epsilon(sigma, sampling_rate, steps, delta, interval)

    guess = calibrate_rdp(epsilon, delta, sampling_rate, steps) or 1.0
    start = smallest_noise_multiplier(
        lambda sigma: spent(math.log(sigma), coarser=10), epsilon, guess=guess, factor=1.2, tolerance=1e-4
    )
    if start is None:
        return None
    point = math.log(start)
    coarse, finer = spent(point, coarser=10), spent(point, coarser=5)
    slope = (spent(point + 1e-3, coarser=10) - coarse) / 1e-3
    # What a coarse grid adds to ε goes with the square of its spacing.
    excess = coarse - (coarse - finer) * 99 / 75 - epsilon
    for _ in range(6):
        if not slope < 0:
            break
        previous, previous_excess = point, excess
        point -= min(max((excess + 2e-6 * epsilon) / slope, -0.2), 0.2)
        excess = spent(point) - epsilon
        if -4e-6 * epsilon <= excess <= 0:
            return math.exp(point)
        if abs(point - previous) > 1e-6:
            slope = (excess - previous_excess) / (point - previous)
    return smallest_noise_multiplier(
        lambda sigma: spent(math.log(sigma)), epsilon, guess=start, factor=1.01, tolerance=1e-7
    )
