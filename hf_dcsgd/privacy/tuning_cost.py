"""What tuning costs: the price of G training runs, and the σ each may use under one total (ε, δ).

Every run looks at the private data, so choosing the best of G runs costs more than one. Four ways to pay for it, each
a guarantee about a *different* procedure; a figure holds only when its procedure is the one carried out:

| method | procedure | may be released |
|---|---|---|
| `rdp_composition` | exactly G runs, chosen in any way, also one after another's result | all G runs |
| `lt` | Liu & Talwar: after each run stop with probability 1/(2G), at latest after T runs | the best |
| `papernot_steinke_poisson` | number of runs drawn from Poisson(G); 0 is possible: nothing to release | the best |
| `papernot_steinke_tnb` | drawn from a truncated negative binomial of mean G (shape 1: geometric, ≥ 1) | the best |

The last three ask two things more: every run trains with hyperparameters drawn independently at random from a list
fixed beforehand, and nothing of the other runs is looked at, not even how many there were.

Liu & Talwar's theorem as the paper uses it: runs that are (ε₁, δ₁)-DP give ε = 3ε₁ + 3√(2δ₁) and δ = 3√(2δ₁)T + δ₂,
T = ln(1/δ₂)/γ, γ = 1/(2G), δ₂ = 1e-20. Papernot & Steinke (Theorems 2 and 6) is `dp_accounting`'s
`RepeatAndSelectDpEvent` with mean G and shape η ≥ 0 (∞ for Poisson). A smaller η is cheaper; few runs are likelier.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

from dp_accounting import rdp
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from hf_dcsgd.privacy.accountants import LOW_RDP_ORDERS, RDP_ORDERS, suppress_order_warnings, with_rounding_error
from hf_dcsgd.privacy.accounting import (
    AccountedRun,
    calibrate_noise_multiplier,
    epsilon_spent,
    smallest_noise_multiplier,
)
from hf_dcsgd.validation import require, require_count, require_fraction, require_one_of, require_positive

METHODS = ("rdp_composition", "lt", "papernot_steinke_poisson", "papernot_steinke_tnb")
DEFAULT_TNB_SHAPE = 1.0  # geometric: after each run, stop with probability 1/G
_LT_DELTA_2 = 1e-20


@dataclass(frozen=True)
class TuningCost:
    """What one run may spend by one method, so that the whole tuning stays within the total budget.

    `noise_multiplier` is σ of every run; `per_run_epsilon` is what one run spends with it at `per_run_delta` (the
    total δ, but for `lt`, which needs a far smaller one). All three are None when no σ meets the budget by this
    method; `note` then says so, and else says what has to be done for the figure to hold.
    """

    method: str
    noise_multiplier: float | None
    per_run_epsilon: float | None
    per_run_delta: float | None
    note: str


def tuning_cost(
    *,
    method: str,
    epsilon: float,
    delta: float,
    runs: int,
    sampling_rate: float,
    steps: int,
    tnb_shape: float = DEFAULT_TNB_SHAPE,
) -> TuningCost:
    """Return the smallest σ per run with which tuning by `method` costs at most (`epsilon`, `delta`) in total.

    With the returned σ the total is at most `epsilon`, never on the wrong side of it. A budget out of the method's
    reach is an answer, not an error.
    """
    require_one_of("method", method, METHODS)
    require_positive("epsilon", epsilon)
    require_fraction("delta", delta)
    require_count("runs", runs)
    require_count("steps", steps)
    require(0 < sampling_rate <= 1, f"expected 0 < sampling_rate <= 1, got {sampling_rate}")
    require(0 <= tnb_shape < math.inf, f"expected a finite tnb_shape >= 0, got {tnb_shape}")
    sigma: float | None
    per_run_delta = delta
    if method == "rdp_composition":
        sigma = _calibrated(epsilon, delta, sampling_rate, steps * runs)
    elif method == "lt":
        per_run_delta = _lt_per_run_delta(delta, runs)
        per_run_epsilon = (epsilon - 3 * math.sqrt(2 * per_run_delta)) / 3
        sigma = _calibrated(per_run_epsilon, per_run_delta, sampling_rate, steps)
    else:
        shape = math.inf if method == "papernot_steinke_poisson" else tnb_shape
        sigma = _repeat_and_select_sigma(epsilon, delta, sampling_rate, steps, runs, shape)
    if sigma is None:
        return TuningCost(method, None, None, None, f"cannot meet epsilon={epsilon:g} at delta={delta:g}")
    per_run_epsilon = epsilon_spent(
        noise_multiplier=sigma, sampling_rate=sampling_rate, steps=steps, delta=per_run_delta
    )
    return TuningCost(method, sigma, per_run_epsilon, per_run_delta, _procedure(method, runs, tnb_shape))


def tuning_costs(**budget: Any) -> list[TuningCost]:
    """Return `tuning_cost` by every method, in the order of `METHODS`; the arguments are the others of that."""
    return [tuning_cost(method=method, **budget) for method in METHODS]


def _lt_cutoff(runs: int) -> float:
    """Return T, the hard limit on the number of runs: ln(1/δ₂)/γ with γ = 1/(2G)."""
    return 2 * runs * math.log(1 / _LT_DELTA_2)


def _lt_per_run_delta(delta: float, runs: int) -> float:
    """Return δ₁ from δ = 3√(2δ₁)T + δ₂; 0 when δ₂ alone takes all of δ."""
    return (max(delta - _LT_DELTA_2, 0.0) / (3 * _lt_cutoff(runs))) ** 2 / 2


def _calibrated(epsilon: float, delta: float, sampling_rate: float, steps: int) -> float | None:
    """Return σ by RDP, or None when what the bound leaves over is nothing, or nothing that noise could meet."""
    if epsilon <= 0 or delta <= 0:
        return None
    try:
        return calibrate_noise_multiplier(epsilon=epsilon, delta=delta, sampling_rate=sampling_rate, steps=steps)
    except ValueError:  # the arguments were checked: only the budget can be at fault
        return None


@functools.lru_cache(maxsize=256)
def _repeat_and_select_sigma(
    epsilon: float, delta: float, sampling_rate: float, steps: int, runs: int, shape: float
) -> float | None:
    def epsilon_of(sigma: float) -> float:
        run = with_rounding_error(AccountedRun(sigma, sampling_rate, steps).event, steps)
        return repeat_and_select_epsilon(RepeatAndSelectDpEvent(run, mean=float(runs), shape=shape), delta)

    return smallest_noise_multiplier(epsilon_of, epsilon)


@functools.lru_cache(maxsize=1024)
def repeat_and_select_epsilon(event: RepeatAndSelectDpEvent, delta: float) -> float:
    """Return ε by Rényi divergences, without the slow high orders where they cannot help.

    Fewer orders overstate ε, so leaving some out is safe. It is also tight: the divergence of a single run rises with
    the order, and an order at which it is beyond the bound alone cannot take part in a better one.
    """
    run = rdp.RdpAccountant(LOW_RDP_ORDERS[-1:])
    run.compose(event.event)
    best = math.inf
    for orders in (LOW_RDP_ORDERS, RDP_ORDERS):
        accountant = rdp.RdpAccountant(orders)
        with suppress_order_warnings():
            accountant.compose(event)
        best = min(best, float(accountant.get_epsilon(delta)))
        if run.rdp[0] > best + 1:
            break
    return best


def _procedure(method: str, runs: int, tnb_shape: float) -> str:
    if method == "rdp_composition":
        return f"exactly {runs} runs; all of them may be released"
    if method == "lt":
        stop = f"after each run stop with probability 1/{2 * runs}, at most {math.ceil(_lt_cutoff(runs))} runs"
        return f"{stop}; hyperparameters at random; release the best run only"
    distribution = f"truncated negative binomial of shape {tnb_shape:g} and mean {runs}"
    if method == "papernot_steinke_poisson":
        distribution = f"Poisson distribution of mean {runs}"
    elif tnb_shape == 1:
        distribution = f"geometric distribution of mean {runs}"
    return f"number of runs drawn from a {distribution}; hyperparameters at random; release the best run only"
