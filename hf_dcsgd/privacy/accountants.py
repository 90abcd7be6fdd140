"""Accountants: functions `(event, delta) -> ε` that bound ε from above, known by their names.

Those of `dp_accounting`, by Rényi divergences and by privacy loss distributions, and any that is registered. Call them
through `accounting.py`, which checks the arguments.
"""

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import dp_accounting
import numpy as np
from dp_accounting import DpEvent, pld, rdp
from scipy import special

from hf_dcsgd.plugins import Registry
from hf_dcsgd.validation import require

Accountant = Callable[..., float]
ACCOUNTANTS: Registry[Accountant] = Registry("accountant")

# Tenths where large budgets find their optimum, integers for usual ones, then ever wider steps (never over 7%) for
# small budgets and for the tiny δ that Liu & Talwar's tuning bound asks of a run (cut at 63: σ of 3.245 for 2.387).
LOW_RDP_ORDERS: tuple[float, ...] = (*(1 + tenths / 10 for tenths in range(1, 100)), *map(float, range(11, 64)))
HIGH_RDP_ORDERS: tuple[float, ...] = tuple(
    map(float, (*range(64, 256, 4), *range(256, 512, 16), *range(512, 1025, 32)))
)
RDP_ORDERS = LOW_RDP_ORDERS + HIGH_RDP_ORDERS
_ROUGH_ORDERS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128, 256)
_RDP_RESOLUTION = 1e-14  # rounding error of one step's Rényi divergence; charged on top, so that it cannot favor us
_PLD_GRID_POINTS, _PLD_COMPOSED_POINTS = 2e5, 1e7  # for one step and for all of them, at most
_WIDEST_INTERVAL = 500.0  # of the grid: its exponential must be a number


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


def rough_epsilon(event: DpEvent, delta: float) -> float:
    """Return ε by Rényi divergences over a few whole orders, which are quick: where to look for the best σ first."""
    return float(rdp.RdpAccountant(_ROUGH_ORDERS).compose(event).get_epsilon(delta))


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
    return composed(event, dp_accounting.ZCDpEvent(rho=0.0, xi=_RDP_RESOLUTION * steps))


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
    """Return ε by privacy loss distributions on a grid, rounded pessimistically.

    inf for a δ too small, and for so little noise that a step between two losses of the grid is no number any more.
    """
    parts = list(_parts(event))
    interval = grid_scale * common_interval(parts)
    if interval > _WIDEST_INTERVAL:
        return math.inf
    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    for step, count in parts:
        accountant.compose(step, count)
    return float(accountant.get_epsilon(delta))


def common_interval(parts: Sequence[tuple[DpEvent, int]]) -> float:
    """Return the spacing of one grid for steps of several kinds, and how often each is taken.

    The finest of theirs, but no step has more points than `_PLD_GRID_POINTS`, and all together have no more than
    `_PLD_COMPOSED_POINTS`. Where huge losses stand beside tiny ones, the tiny ones are rounded up to a grid on which
    the huge ones fit: ε is an upper bound on any grid.
    """
    losses = [_losses(step, count) for step, count in parts]
    # By Hoeffding's inequality hardly any sum is farther off; dp_accounting cuts the rest off, and adds it to δ.
    widths = [loss.largest + 20 * math.sqrt(loss.times) * min(loss.deviation, loss.largest) for loss in losses]
    return max(
        min(pld_interval(step, count) for step, count in parts),
        max(loss.largest for loss in losses) / _PLD_GRID_POINTS,
        sum(widths) / _PLD_COMPOSED_POINTS,
    )


def pld_interval(step: DpEvent, count: int) -> float:
    """Return the spacing of the grid of privacy losses: 2e-4, finer for tiny losses, coarser for huge ones.

    A tenth of the standard deviation of one step's loss, so that rounding does not outweigh it, but no more points
    than `_PLD_GRID_POINTS` up to the loss at ten standard deviations of noise.
    """
    loss = _losses(step, count)
    return max(min(loss.widest_interval, loss.deviation / 10), loss.largest / _PLD_GRID_POINTS)


class _Losses(NamedTuple):
    """How far the privacy losses of a step scatter and reach, how often it is taken, and its widest grid."""

    deviation: float
    largest: float
    times: int
    widest_interval: float


def _losses(step: DpEvent, count: int) -> _Losses:
    if isinstance(step, dp_accounting.dp_event.MixtureOfGaussiansDpEvent):
        return _mixture_losses(step, count)
    sampled = isinstance(step, dp_accounting.PoissonSampledDpEvent)
    rate, gaussian = (step.sampling_probability, step.event) if sampled else (1.0, step)
    # Without sampling, all steps are one Gaussian.
    sigma = gaussian.noise_multiplier if sampled else gaussian.noise_multiplier / math.sqrt(count)
    deviation = rate * math.sqrt(math.expm1(min(sigma**-2, 100.0)))
    largest = float(np.logaddexp(0.0, math.log(rate) + 10 / sigma + 0.5 / sigma**2))
    return _Losses(deviation, largest, count if sampled else 1, 2e-4)


def _mixture_losses(step: dp_accounting.dp_event.MixtureOfGaussiansDpEvent, count: int) -> _Losses:
    """Look at a mixture of Gaussians, whose grid is five times wider: its loss is inverted point by point."""
    sigma, shifts, probabilities = step.standard_deviation, np.array(step.sensitivities), np.array(step.sampling_probs)
    exponents = np.minimum(np.outer(shifts, shifts) / sigma**2, 100.0)
    deviation = math.sqrt(probabilities @ np.expm1(exponents) @ probabilities)
    farthest = shifts.max() + 10 * sigma
    largest = special.logsumexp((shifts * farthest - 0.5 * shifts**2) / sigma**2, b=probabilities)
    return _Losses(deviation, float(largest), count, 1e-3)


def _parts(event: DpEvent, count: int = 1) -> Iterator[tuple[DpEvent, int]]:
    """Yield the steps that a run or several runs consist of, and how often each is taken."""
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        yield from _parts(event.event, count * event.count)
    elif isinstance(event, dp_accounting.ComposedDpEvent):
        for part in event.events:
            yield from _parts(part, count)
    else:
        yield event, count


def composed(*events: DpEvent) -> DpEvent:
    """Return the event of all these together."""
    return dp_accounting.ComposedDpEvent(events)  # a tuple, not a list: events are keys of caches


def has_grid(function: Accountant) -> bool:
    """Tell whether an accountant takes a scale for its grid."""
    return "grid_scale" in inspect.signature(function).parameters


register_accountant("rdp", rdp_epsilon)
register_accountant("pld", pld_epsilon)
