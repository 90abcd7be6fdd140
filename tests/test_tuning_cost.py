"""Figures of the paper; every total recomputed from Opacus' divergences and the theorems' own formulas."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from dp_accounting import rdp
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from opacus.accountants.analysis import rdp as opacus_rdp
from scipy import optimize

from hf_dcsgd.privacy import tuning_cost as tuning
from hf_dcsgd.privacy.accountants import RDP_ORDERS
from hf_dcsgd.privacy.accounting import AccountedRun, calibrate_noise_multiplier, epsilon_spent
from hf_dcsgd.privacy.tuning_cost import METHODS, tuning_cost, tuning_costs

N, B, T = 104743, 256, 2045
QNLI = {"sampling_rate": B / N, "steps": T, "delta": 1 / N}
ORDERS = np.array(RDP_ORDERS)

RUNS = (9, 10, 45, 90)
COMPOSITION = {
    2: (0.97996, 1.00948, 1.74526, 2.36804),
    4: (0.73485, 0.74695, 1.08838, 1.39599),
    8: (0.59620, 0.60381, 0.77656, 0.92837),
}
LT = {
    2: (2.2476, 2.2602, 2.3816, 2.3867),
    4: (1.5876, 1.5888, 1.6442, 1.6709),
    8: (1.1519, 1.1588, 1.1951, 1.2022),
}


def figures(table: dict[int, tuple[float, ...]]) -> list[Any]:
    """One of each row by default, the whole table among the slow tests."""
    return [
        pytest.param(epsilon, runs, sigma, marks=() if number == line % len(row) else pytest.mark.slow)
        for line, (epsilon, row) in enumerate(table.items())
        for number, (runs, sigma) in enumerate(zip(RUNS, row, strict=True))
    ]


@pytest.mark.parametrize(("epsilon", "runs", "expected"), figures(COMPOSITION))
def test_rdp_composition_reproduces_the_figures(epsilon: int, runs: int, expected: float):
    cost = tuning_cost(method="rdp_composition", epsilon=epsilon, runs=runs, **QNLI)
    assert cost.noise_multiplier == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("epsilon", "runs", "expected"), figures(LT))
def test_lt_reproduces_the_figures(epsilon: int, runs: int, expected: float):
    cost = tuning_cost(method="lt", epsilon=epsilon, runs=runs, **QNLI)
    assert cost.noise_multiplier == pytest.approx(expected, abs=1e-4)


# --- totals, recomputed ----------------------------------------------------------------------------------------------


def divergences(noise_multiplier: float, steps: int) -> np.ndarray:
    return np.array(
        opacus_rdp.compute_rdp(
            q=QNLI["sampling_rate"], noise_multiplier=noise_multiplier, steps=steps, orders=list(RDP_ORDERS)
        )
    )


def converted(orders: np.ndarray, rdp: np.ndarray, delta: float) -> float:
    """ε of the best order: Proposition 12 of Canonne, Kamath & Steinke."""
    return float(np.min(rdp + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)))


def poisson_total(sigma: float, runs: int, delta: float) -> float:
    """Theorem 6 of Papernot & Steinke: ε′(λ) = ε(λ) + μδ' + log(μ)/(λ−1), a run being (log(1 + 1/(λ−1)), δ')-DP."""
    rdp = divergences(sigma, T)
    hat = np.log1p(1 / (ORDERS - 1))
    log_delta = (ORDERS - 1) * (rdp - hat[:, None] + np.log1p(-1 / ORDERS)) - np.log(ORDERS)
    total_variation = np.sqrt(-np.expm1(-rdp))
    delta_hat = np.minimum(np.exp(np.minimum(log_delta, 0)), total_variation).min(axis=1)
    return converted(ORDERS, rdp + runs * delta_hat + math.log(runs) / (ORDERS - 1), delta)


def tnb_total(sigma: float, runs: int, delta: float, shape: float) -> float:
    """Theorem 2 of the same: ε′(λ) = ε(λ) + (1+η)(1−1/λ̂)ε̂ + (1+η)log(1/γ)/λ̂ + log(E[K])/(λ−1), best λ̂."""
    rdp = divergences(sigma, T)

    def mean(gamma: float) -> float:
        if shape == 0:
            return (1 / gamma - 1) / math.log(1 / gamma)
        return shape * (1 - gamma) / (gamma * (1 - gamma**shape))

    gamma = optimize.brentq(lambda gamma: mean(gamma) - runs, 1e-9, 1 - 1e-9, xtol=1e-14)
    constant = (1 + shape) * np.min((1 - 1 / ORDERS) * rdp + math.log(1 / gamma) / ORDERS)
    return converted(ORDERS, rdp + constant + math.log(runs) / (ORDERS - 1), delta)


def lt_total(sigma: float, runs: int, delta: float) -> float:
    cutoff = math.log(1e20) * 2 * runs
    root = (delta - 1e-20) / (3 * cutoff)  # √(2δ₁)
    return 3 * converted(ORDERS, divergences(sigma, T), root**2 / 2) + 3 * root


def recomputed(method: str, sigma: float, runs: int, shape: float = 1.0) -> float:
    if method == "rdp_composition":
        return converted(ORDERS, divergences(sigma, T * runs), QNLI["delta"])
    if method == "lt":
        return lt_total(sigma, runs, QNLI["delta"])
    if method == "papernot_steinke_poisson":
        return poisson_total(sigma, runs, QNLI["delta"])
    return tnb_total(sigma, runs, QNLI["delta"], shape)


@pytest.mark.parametrize(("epsilon", "runs"), [(2, 10), (8, 90)])
@pytest.mark.parametrize("method", METHODS)
def test_every_total_holds_when_recomputed(method: str, epsilon: float, runs: int):
    cost = tuning_cost(method=method, epsilon=epsilon, runs=runs, **QNLI)
    assert recomputed(method, cost.noise_multiplier, runs) == pytest.approx(epsilon, rel=1e-3)
    one_run = epsilon_spent(
        noise_multiplier=cost.noise_multiplier,
        sampling_rate=QNLI["sampling_rate"],
        steps=T,
        delta=cost.per_run_delta,
    )
    assert cost.per_run_epsilon == one_run < epsilon


@pytest.mark.parametrize("shape", [0.5, *(pytest.param(shape, marks=pytest.mark.slow) for shape in (0.0, 2.0))])
def test_shape_of_the_negative_binomial(shape: float):
    cost = tuning_cost(method="papernot_steinke_tnb", epsilon=2, runs=10, tnb_shape=shape, **QNLI)
    assert recomputed("papernot_steinke_tnb", cost.noise_multiplier, 10, shape) == pytest.approx(2, rel=1e-3)
    geometric = tuning_cost(method="papernot_steinke_tnb", epsilon=2, runs=10, **QNLI)
    assert (cost.noise_multiplier < geometric.noise_multiplier) == (shape < 1)


def test_lt_splits_the_budget_as_the_theorem_says():
    cost = tuning_cost(method="lt", epsilon=2, runs=10, **QNLI)
    root = math.sqrt(2 * cost.per_run_delta)
    assert 3 * root * (2 * 10 * math.log(1e20)) + 1e-20 == pytest.approx(QNLI["delta"], rel=1e-12)
    assert 3 * cost.per_run_epsilon + 3 * root == pytest.approx(2, rel=1e-5)


def test_one_run_by_composition_is_plain_calibration():
    budget = {"epsilon": 2, **QNLI}
    assert tuning_cost(method="rdp_composition", runs=1, **budget).noise_multiplier == calibrate_noise_multiplier(
        **budget
    )


# --- choosing --------------------------------------------------------------------------------------------------------


def test_costs_come_in_order():
    costs = tuning_costs(epsilon=8, runs=90, **QNLI)
    assert tuple(cost.method for cost in costs) == METHODS
    assert min(costs, key=lambda cost: cost.noise_multiplier).method == "papernot_steinke_tnb"
    assert all(cost.note for cost in costs)


def test_totals_are_safe_and_tight():
    """Here `repeat_and_select_epsilon` leaves out orders; a plain accountant over all of them must agree."""
    cost = tuning_cost(method="papernot_steinke_tnb", epsilon=2, runs=10, **QNLI)
    run = AccountedRun(cost.noise_multiplier, QNLI["sampling_rate"], T).event
    total = rdp.RdpAccountant(RDP_ORDERS).compose(RepeatAndSelectDpEvent(run, mean=10.0, shape=1.0))
    assert 2 * (1 - 1e-6) <= total.get_epsilon(QNLI["delta"]) <= 2


@pytest.mark.slow
def test_a_budget_out_of_reach_is_an_answer():
    budget = {"epsilon": 0.005, "delta": 1e-5, "runs": 10, "sampling_rate": 0.01, "steps": 100}
    costs = {cost.method: cost for cost in tuning_costs(**budget)}
    assert costs["rdp_composition"].noise_multiplier == pytest.approx(184.868, abs=1e-3)
    for method in METHODS[1:]:
        unmet = tuning.TuningCost(method, None, None, None, "cannot meet epsilon=0.005 at delta=1e-05")
        assert dataclasses.astuple(costs[method]) == dataclasses.astuple(unmet)


def test_lt_cannot_meet_a_delta_below_its_own():
    budget = {"epsilon": 2, "delta": 1e-21, "runs": 10, "sampling_rate": 0.01, "steps": 100}
    assert tuning_cost(method="lt", **budget).noise_multiplier is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "grid"}, "method.*rdp_composition.*got 'grid'"),
        ({"runs": 0}, "runs >= 1, got 0"),
        ({"epsilon": 0.0}, "epsilon > 0, got 0.0"),
        ({"delta": 1.0}, "delta.*got 1.0"),
        ({"steps": 0}, "steps >= 1, got 0"),
        ({"sampling_rate": 0.0}, "sampling_rate.*got 0.0"),
        ({"tnb_shape": -1.0}, "tnb_shape >= 0, got -1.0"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict, message: str):
    with pytest.raises(ValueError, match=message):
        tuning_cost(**{"method": "papernot_steinke_tnb", "epsilon": 2.0, "runs": 10, **QNLI, **wrong})
