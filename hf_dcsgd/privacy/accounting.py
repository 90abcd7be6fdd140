"""What the mechanism costs: ε after t steps, and σ for a budget, by accountants from `dp_accounting` or your own.

Guarantee. Every figure is for add/remove-one neighbors and Poisson sampling at rate q. One step of the mechanism
releases several Gaussian answers about *one* Poisson sample; by Theorem 1 of the paper they cost together exactly what
a single Gaussian with multiplier σ = (Σ σ_k⁻²)^(−1/2) costs on that sample. σ (`noise_multiplier`) is therefore the
only multiplier that is ever accounted. Feeding the accountant σ_T, or two separately sampled events, under-reports ε.

An accountant is a function `(event, delta) -> ε` that bounds ε from above, known by its name (`register_accountant`).

| edge case | result |
|---|---|
| no steps | ε = 0 |
| σ = 0 | ε = inf |
| q = 1 | no amplification: the plain Gaussian mechanism |
| δ below what the PLD accountant truncates (about 1e-15) | ε = inf there: calibration reports an unmeetable budget |
"""

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import dp_accounting
import numpy as np
from dp_accounting import DpEvent, pld, rdp
from scipy import optimize, special, stats

from hf_dcsgd.plugins import Registry
from hf_dcsgd.validation import require, require_count, require_fraction, require_non_negative, require_positive

Accountant = Callable[..., float]
ACCOUNTANTS: Registry[Accountant] = Registry("accountant")
MAX_NOISE_MULTIPLIER = 1e6  # a search for σ gives up beyond it

# Tenths where large budgets find their optimum, integers for usual ones, then ever wider steps (never over 7%) for
# small budgets and for the tiny δ that Liu & Talwar's tuning bound asks of a run (cut at 63: σ of 3.245 for 2.387).
LOW_RDP_ORDERS: tuple[float, ...] = (*(1 + tenths / 10 for tenths in range(1, 100)), *map(float, range(11, 64)))
HIGH_RDP_ORDERS: tuple[float, ...] = tuple(
    map(float, (*range(64, 256, 4), *range(256, 512, 16), *range(512, 1025, 32)))
)
RDP_ORDERS = LOW_RDP_ORDERS + HIGH_RDP_ORDERS
_RDP_RESOLUTION = 1e-14  # rounding error of one step's Rényi divergence; charged on top, so that it cannot favor us
_PLD_GRID_POINTS = 2e5  # for one step, at most
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
    return _epsilon(function, events[0] if len(events) == 1 else _composed(*events), float(delta), grid_scale)


@functools.lru_cache(maxsize=4096)
def _epsilon(function: Accountant, event: DpEvent, delta: float, grid_scale: float = 1.0) -> float:
    """Return what an accountant says; a scale for its grid is for those that have one."""
    try:
        found = function(event, delta, grid_scale=grid_scale) if _has_grid(function) else function(event, delta)
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

    if not _has_grid(function):
        return smallest_noise_multiplier(spent, epsilon)
    guess = group_size * (_calibrated(rdp_epsilon, epsilon, delta, rate, steps) or 1.0)
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


# -- accountants ------------------------------------------------------------------------------------------------------


def register_accountant(name: str, function: Accountant) -> None:
    """Make an accountant known by a name, for arguments, plans and reports.

    Args:
        name: What `accountant=` calls it.
        function: `function(event, delta)` returns an upper bound on ε of a `dp_accounting.DpEvent` for adding or
            removing one example: `SelfComposedDpEvent(PoissonSampledDpEvent(q, GaussianDpEvent(σ)), steps)` for a run
            (the bare Gaussian where q = 1), a `ComposedDpEvent` of these for several. If it also takes the keyword
            `grid_scale`, values above 1 ask for a quicker, looser bound, for curves and logs.
    """
    require(callable(function), f"expected a function for accountant {name!r}, got {function!r}")
    ACCOUNTANTS.add(name, function)


def rdp_epsilon(event: DpEvent, delta: float) -> float:
    """Return ε by Rényi divergences over `RDP_ORDERS`, without the slow high orders where they cannot help."""
    parts, best = list(_parts(event)), math.inf
    for first in (0, *range(len(LOW_RDP_ORDERS), len(RDP_ORDERS), 16)):
        orders = LOW_RDP_ORDERS if first == 0 else RDP_ORDERS[first : first + 16]
        divergences = np.sum([count * rdp_of_one_step(step, orders) for step, count in parts], axis=0)
        best = min(best, float(rdp.compute_epsilon(orders, divergences, delta)[0]))
        # Divergence rises with the order, and an order's ε is less than 0.1 below its divergence from order 64 on.
        if divergences[-1] > best + 0.1:
            break
    return best


@functools.lru_cache(maxsize=4096)
def rdp_of_one_step(step: DpEvent, orders: tuple[float, ...] = RDP_ORDERS) -> np.ndarray:
    """Return the Rényi divergence of one step at each order: inf where dp_accounting has none to offer."""
    accountant = rdp.RdpAccountant(orders)
    with suppress_order_warnings():
        accountant.compose(with_rounding_error(step, 1))
    divergences: np.ndarray = accountant.rdp
    divergences.setflags(write=False)  # the cache hands out this very array
    return divergences


def with_rounding_error(event: DpEvent, steps: int) -> DpEvent:
    """Charge the rounding error of Rényi divergences as a release: negative ones would pass for perfect privacy."""
    return _composed(event, dp_accounting.ZCDpEvent(rho=0.0, xi=_RDP_RESOLUTION * steps))


@contextlib.contextmanager
def suppress_order_warnings() -> Iterator[None]:
    """Silence warnings about fractional orders that do not converge: dp_accounting leaves them out, which is sound."""

    def keep(record: logging.LogRecord) -> bool:
        return "failed to converge" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def pld_epsilon(event: DpEvent, delta: float, *, grid_scale: float = 1.0) -> float:
    """Return ε by privacy loss distributions on a grid, rounded pessimistically; inf for a δ too small."""
    parts = list(_parts(event))
    interval = grid_scale * min(pld_interval(step, count) for step, count in parts)
    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    for step, count in parts:
        accountant.compose(step, count)
    return float(accountant.get_epsilon(delta))


def pld_interval(step: DpEvent, count: int) -> float:
    """Return the spacing of the grid of privacy losses: 2e-4, finer for tiny losses, coarser for huge ones.

    A tenth of the standard deviation of one step's loss, so that rounding does not outweigh it, but no more points
    than `_PLD_GRID_POINTS` up to the loss at ten standard deviations of noise.
    """
    if isinstance(step, dp_accounting.dp_event.MixtureOfGaussiansDpEvent):
        return _mixture_interval(step)
    sampled = isinstance(step, dp_accounting.PoissonSampledDpEvent)
    rate, gaussian = (step.sampling_probability, step.event) if sampled else (1.0, step)
    # Without sampling, all steps are one Gaussian.
    sigma = gaussian.noise_multiplier if sampled else gaussian.noise_multiplier / math.sqrt(count)
    deviation = rate * math.sqrt(math.expm1(min(sigma**-2, 100.0)))
    largest = np.logaddexp(0.0, math.log(rate) + 10 / sigma + 0.5 / sigma**2)
    return float(max(min(2e-4, deviation / 10), largest / _PLD_GRID_POINTS))


def _mixture_interval(step: dp_accounting.dp_event.MixtureOfGaussiansDpEvent) -> float:
    """Return that spacing for a mixture of Gaussians, ten times wider: its loss is inverted point by point."""
    sigma, shifts, probabilities = step.standard_deviation, np.array(step.sensitivities), np.array(step.sampling_probs)
    exponents = np.minimum(np.outer(shifts, shifts) / sigma**2, 100.0)
    deviation = math.sqrt(probabilities @ np.expm1(exponents) @ probabilities)
    farthest = shifts.max() + 10 * sigma
    largest = special.logsumexp((shifts * farthest - 0.5 * shifts**2) / sigma**2, b=probabilities)
    return float(max(min(1e-3, deviation / 10), largest / _PLD_GRID_POINTS))


def _parts(event: DpEvent, count: int = 1) -> Iterator[tuple[DpEvent, int]]:
    """Yield the steps that a run or several runs consist of, and how often each is taken."""
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        yield from _parts(event.event, count * event.count)
    elif isinstance(event, dp_accounting.ComposedDpEvent):
        for part in event.events:
            yield from _parts(part, count)
    else:
        yield event, count


def _composed(*events: DpEvent) -> DpEvent:
    return dp_accounting.ComposedDpEvent(events)  # a tuple, not a list: events are keys of caches


def _has_grid(function: Accountant) -> bool:
    return "grid_scale" in inspect.signature(function).parameters


def _require_sampling_rate(sampling_rate: float) -> float:
    require(0 < sampling_rate <= 1, f"expected 0 < sampling_rate <= 1, got {sampling_rate}")
    return float(sampling_rate)


register_accountant("rdp", rdp_epsilon)
register_accountant("pld", pld_epsilon)
