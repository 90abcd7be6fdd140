"""Figures of the paper and cross-checks: dp_accounting's own events, Opacus, and integrals done here."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from opacus.accountants.analysis import rdp as opacus_rdp
from scipy import stats

from hf_dcsgd.clipping.dc_sgd import default_histogram_noise_multiplier
from hf_dcsgd.privacy.accountants import ACCOUNTANTS, RDP_ORDERS
from hf_dcsgd.privacy.accounting import (
    AccountedRun,
    calibrate_noise_multiplier,
    combined_noise_multiplier,
    composed_epsilon,
    epsilon_spent,
    grad_noise_multiplier,
    planned_steps,
)

# QNLI as in the paper.
N, B = 104743, 256
QNLI = {"sampling_rate": B / N, "delta": 1 / N}
T = 2045
LAST_DIGIT = 1e-5  # the figures are given to five decimals

EPSILONS = (2, 4, 8)
RDP_SIGMAS = {2: (0.75093, 0.75954), 4: (0.60082, 0.60520), 8: (0.48978, 0.49214)}
PLD_SIGMAS = {2: (0.67331, 0.67950), 4: (0.56167, 0.56524), 8: (0.46376, 0.46577)}

sigmas = st.floats(0.4, 8.0)
rates = st.floats(-4.5, 0.0).map(lambda exponent: 10**exponent)
training_rates = st.floats(-4.5, -1.5).map(lambda exponent: 10**exponent)
step_counts = st.integers(1, 20_000)
deltas = st.floats(-9.0, -2.0).map(lambda exponent: 10**exponent)


# Every example takes a tenth of a second or more: few of them, and no shrinking.
FEW = settings(max_examples=5, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))


def step_event(sampling_rate: float, noise_multipliers: list[float]) -> dp_accounting.DpEvent:
    """One step as it happens: every Gaussian release of the step, on one and the same Poisson sample."""
    releases = [dp_accounting.GaussianDpEvent(multiplier) for multiplier in noise_multipliers]
    release = releases[0] if len(releases) == 1 else dp_accounting.ComposedDpEvent(releases)
    return dp_accounting.PoissonSampledDpEvent(sampling_rate, release)


def opacus_epsilon(noise_multiplier: float, sampling_rate: float, steps: int, delta: float) -> float:
    orders = list(RDP_ORDERS)
    spent = opacus_rdp.compute_rdp(q=sampling_rate, noise_multiplier=noise_multiplier, steps=steps, orders=orders)
    return float(opacus_rdp.get_privacy_spent(orders=orders, rdp=spent, delta=delta)[0])


# --- the paper's figures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accountant", "figures", "epsilon"),
    [
        *(("rdp", RDP_SIGMAS, epsilon) for epsilon in EPSILONS),
        # `test_cli.py` has that of ε = 2.
        *(pytest.param("pld", PLD_SIGMAS, epsilon, marks=pytest.mark.slow) for epsilon in EPSILONS),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_calibration_reproduces_the_table(accountant: str, figures: dict[int, tuple[float, float]], epsilon: int):
    sigma = calibrate_noise_multiplier(epsilon=epsilon, steps=T, accountant=accountant, **QNLI)
    expected, expected_grad = figures[epsilon]
    assert sigma == pytest.approx(expected, abs=LAST_DIGIT)
    assert grad_noise_multiplier(sigma, {"histogram_noise_multiplier": 5.0}) == pytest.approx(
        expected_grad, abs=LAST_DIGIT
    )
    spent = epsilon_spent(noise_multiplier=sigma, steps=T, accountant=accountant, **QNLI)
    assert epsilon * (1 - 5e-6) <= spent <= epsilon


@pytest.mark.parametrize(("epsilon", "expected"), [(2, 0.75102), (4, 0.60090), (8, 0.48987)])
def test_calibration_at_2050_steps(epsilon: int, expected: float):
    sigma = calibrate_noise_multiplier(epsilon=epsilon, steps=2050, **QNLI)
    assert sigma == pytest.approx(expected, abs=LAST_DIGIT)


def test_theorem_1():
    assert grad_noise_multiplier(1.0, {"histogram_noise_multiplier": 5.0}) == pytest.approx(1.0206207262, abs=1e-10)


@pytest.mark.parametrize(("epsilon", "true_epsilon"), [(2, 2.067), (4, 4.099), (8, 8.125)])
def test_sigma_instead_of_sigma_t_on_the_gradient_overspends(epsilon: int, true_epsilon: float):
    sigma = calibrate_noise_multiplier(epsilon=epsilon, steps=T, **QNLI)
    released = combined_noise_multiplier([sigma, 5.0])
    assert epsilon_spent(noise_multiplier=released, steps=T, **QNLI) == pytest.approx(true_epsilon, abs=5e-4)


def test_accountant_fed_sigma_t_under_reports():
    sigma = calibrate_noise_multiplier(epsilon=2, steps=T, **QNLI)
    sigma_t = grad_noise_multiplier(sigma, {"histogram_noise_multiplier": 5.0})
    assert epsilon_spent(noise_multiplier=sigma_t, steps=T, **QNLI) < 1.95


def test_two_separately_sampled_events_under_report():
    """Why a step is one Poisson sample with two releases: as two samples it would seem to cost 1.938 instead of 2."""
    sigma = calibrate_noise_multiplier(epsilon=2, steps=T, **QNLI)
    sigma_t = grad_noise_multiplier(sigma, {"histogram_noise_multiplier": 5.0})
    separate = rdp.RdpAccountant(RDP_ORDERS)
    for multiplier in (sigma_t, 5.0):
        separate.compose(step_event(QNLI["sampling_rate"], [multiplier]), T)
    assert separate.get_epsilon(QNLI["delta"]) == pytest.approx(1.938, abs=5e-4)


# --- Theorem 1 against dp_accounting and against integrals -----------------------------------------------------------


@FEW
@given(sigma=st.floats(0.4, 4.0), side=st.floats(4.5, 50.0), rate=rates, steps=st.integers(1, 5000), delta=deltas)
def test_composed_releases_cost_one_gaussian(sigma: float, side: float, rate: float, steps: int, delta: float):
    sigma_t = grad_noise_multiplier(sigma, {"histogram_noise_multiplier": side})
    event = step_event(rate, [sigma_t, side])
    orders = RDP_ORDERS[10:150:20]  # integers and fractions; few, for speed
    composed = rdp.RdpAccountant(orders).compose(event, steps)
    single = rdp.RdpAccountant(orders).compose(step_event(rate, [sigma]), steps)
    np.testing.assert_allclose(composed.rdp, single.rdp, rtol=1e-8)


def test_composed_releases_cost_one_gaussian_by_privacy_losses():
    """δ(ε) of one step with two releases, integrated over the plane, equals the PLD accountant's for one Gaussian σ.

    The PLD accountant refuses two Gaussians in one Poisson sample, so Theorem 1 is checked beside it.
    """
    rate, sigma, side = 0.1, 0.8, 5.0
    sigma_t = grad_noise_multiplier(sigma, {"histogram_noise_multiplier": side})
    assert not pld.PLDAccountant().supports(step_event(rate, [sigma_t, side]))
    x, y = np.linspace(-8 * sigma_t, 1 + 8 * sigma_t, 1201), np.linspace(-8 * side, 1 + 8 * side, 1201)
    without = np.outer(stats.norm.pdf(x, 0, sigma_t), stats.norm.pdf(y, 0, side))
    with_one = (1 - rate) * without + rate * np.outer(stats.norm.pdf(x, 1, sigma_t), stats.norm.pdf(y, 1, side))
    cell = (x[1] - x[0]) * (y[1] - y[0])
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4).compose(step_event(rate, [sigma]))
    for epsilon in (0.1, 0.5, 1.0):
        removed = np.maximum(with_one - math.exp(epsilon) * without, 0).sum() * cell
        added = np.maximum(without - math.exp(epsilon) * with_one, 0).sum() * cell
        assert accountant.get_delta(epsilon) == pytest.approx(max(removed, added), rel=1e-3)


@settings(max_examples=100, deadline=None)
@given(sigma=st.floats(0.1, 50.0), sides=st.lists(st.floats(1.01, 100.0), min_size=1, max_size=3))
def test_grad_noise_multiplier_inverts_combination(sigma: float, sides: list[float]):
    multipliers = {f"side_{i}": sigma * math.sqrt(len(sides)) * factor for i, factor in enumerate(sides)}
    sigma_t = grad_noise_multiplier(sigma, multipliers)
    assert sigma_t > sigma
    assert combined_noise_multiplier([sigma_t, *multipliers.values()]) == pytest.approx(sigma, rel=1e-9)


def test_no_side_release_leaves_all_to_the_gradient():
    assert grad_noise_multiplier(0.7, {}) == 0.7
    assert grad_noise_multiplier(0.7, {"histogram_noise_multiplier": math.inf}) == pytest.approx(0.7, rel=1e-15)
    assert grad_noise_multiplier(0.0, {"histogram_noise_multiplier": 5.0}) == 0.0
    assert combined_noise_multiplier([0.0, 5.0]) == 0.0
    assert combined_noise_multiplier([math.inf, math.inf]) == math.inf


@pytest.mark.parametrize(("sigma", "expected"), [(0.5, 5), (1.999, 5), (2, 8), (3, 8), (3.001, 12), (20, 12)])
def test_default_histogram_noise_multiplier(sigma: float, expected: float):
    assert default_histogram_noise_multiplier(sigma) == expected


# --- ε against other accountants -------------------------------------------------------------------------------------


@FEW
@given(sigma=sigmas, rate=rates, steps=step_counts, delta=deltas)
def test_rdp_agrees_with_opacus(sigma: float, rate: float, steps: int, delta: float):
    """Within 1% at rates that one would train with; above them never lower by more.

    There dp_accounting's sum for fractional orders may not converge, and it leaves those orders out.
    """
    expected = max(opacus_epsilon(sigma, rate, steps, delta), 0.0)  # Opacus does not stop at zero
    spent = epsilon_spent(noise_multiplier=sigma, sampling_rate=rate, steps=steps, delta=delta)
    if rate <= 0.1 and expected < 20:
        assert spent == pytest.approx(expected, rel=0.01, abs=1e-6)
    else:
        assert spent >= expected * 0.99


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_opacus_agrees_with_the_calibration(epsilon: int):
    sigma = calibrate_noise_multiplier(epsilon=epsilon, steps=T, **QNLI)
    assert opacus_epsilon(sigma, QNLI["sampling_rate"], T, QNLI["delta"]) == pytest.approx(epsilon, rel=0.01)


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta"),
    [
        (0.75, B / N, T, 1 / N),
        (1.2, 0.01, 3000, 1e-5),
        (5.0, 0.5, 100, 1e-6),
        (20.0, 1.0, 50, 1e-5),
        (30, 0.01, 100, 1e-5),
    ],
)
def test_rdp_is_never_below_pld(sigma: float, rate: float, steps: int, delta: float):
    run = {"noise_multiplier": sigma, "sampling_rate": rate, "steps": steps, "delta": delta}
    exact, bound = epsilon_spent(**run, accountant="pld"), epsilon_spent(**run)
    assert 0.5 * bound < exact <= bound
    assert exact <= epsilon_spent(**run, accountant="pld", grid_scale=10) <= bound * 1.01


def test_unsampled_gaussian_agrees_with_its_closed_form():
    """Balle & Wang's exact δ(ε) of the Gaussian mechanism."""
    sigma, steps, delta = 20.0, 100, 1e-5
    epsilon = epsilon_spent(noise_multiplier=sigma, sampling_rate=1.0, steps=steps, delta=delta, accountant="pld")
    mu = math.sqrt(steps) / sigma
    exact = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
    assert exact == pytest.approx(delta, rel=1e-3)


# --- shape of ε and of the calibration -------------------------------------------------------------------------------


@FEW
@given(sigma=sigmas, rate=training_rates, steps=step_counts, delta=deltas, factor=st.floats(1.05, 3.0))
def test_epsilon_is_monotone(sigma: float, rate: float, steps: int, delta: float, factor: float):
    """At rates that one would train with; near 1 the bound is loose, since orders are left out, and need not be."""
    run = {"noise_multiplier": sigma, "sampling_rate": rate, "steps": steps, "delta": delta}
    spent = epsilon_spent(**run)
    assert epsilon_spent(**{**run, "noise_multiplier": sigma * factor}) <= spent
    assert epsilon_spent(**{**run, "sampling_rate": min(rate * factor, 1.0)}) >= spent
    assert epsilon_spent(**{**run, "steps": math.ceil(steps * factor)}) >= spent
    assert epsilon_spent(**{**run, "delta": min(delta * factor, 0.5)}) <= spent


@FEW
@given(epsilon=st.floats(0.1, 30.0), delta=deltas, rate=rates, steps=step_counts)
def test_calibration_is_safe_and_tight(epsilon: float, delta: float, rate: float, steps: int):
    budget = {"sampling_rate": rate, "steps": steps, "delta": delta}
    sigma = calibrate_noise_multiplier(epsilon=epsilon, **budget)
    assert epsilon_spent(noise_multiplier=sigma, **budget) <= epsilon
    assert epsilon_spent(noise_multiplier=sigma * (1 - 1e-5), **budget) > epsilon


@pytest.mark.parametrize(
    ("epsilon", "delta", "rate", "steps"),
    [
        (1, 1e-5, 1.0, 10),
        pytest.param(3, 1e-6, 0.05, 500, marks=pytest.mark.slow),
        pytest.param(0.1, 1e-5, 0.01, 20, marks=pytest.mark.slow),
    ],
)
def test_pld_calibration_is_safe_and_tight(epsilon: float, delta: float, rate: float, steps: int):
    budget = {"sampling_rate": rate, "steps": steps, "delta": delta, "accountant": "pld"}
    sigma = calibrate_noise_multiplier(epsilon=epsilon, **budget)
    assert epsilon_spent(noise_multiplier=sigma, **budget) <= epsilon
    assert epsilon_spent(noise_multiplier=sigma * (1 - 1e-4), **budget) > epsilon


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_edges_of_epsilon(accountant: str):
    run = {"sampling_rate": 0.1, "delta": 1e-5, "accountant": accountant}
    assert epsilon_spent(noise_multiplier=1.0, steps=0, **run) == 0.0
    assert epsilon_spent(noise_multiplier=0.0, steps=0, **run) == 0.0
    assert epsilon_spent(noise_multiplier=0.0, steps=1, **run) == math.inf


# --- several runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_composed_runs_cost_what_dp_accounting_says(accountant: str):
    runs = [AccountedRun(2.0, 0.1, 300), AccountedRun(3.0, 0.2, 100), AccountedRun(1.0, 0.1, 0)]
    reference = rdp.RdpAccountant(RDP_ORDERS) if accountant == "rdp" else pld.PLDAccountant()
    for run in runs[:2]:
        reference.compose(step_event(run.sampling_rate, [run.noise_multiplier]), run.steps)
    assert composed_epsilon(runs, 1e-5, accountant) == pytest.approx(reference.get_epsilon(1e-5), rel=1e-3)
    both = epsilon_spent(noise_multiplier=2.0, sampling_rate=0.1, steps=600, delta=1e-5, accountant=accountant)
    assert composed_epsilon([runs[0], runs[0]], 1e-5, accountant) == pytest.approx(both, rel=1e-3)


def test_edges_of_composition():
    assert composed_epsilon([], 1e-5) == 0.0
    assert composed_epsilon([AccountedRun(0.0, 0.1, 0)], 1e-5) == 0.0
    assert composed_epsilon([AccountedRun(0.0, 0.1, 1), AccountedRun(1.0, 0.1, 1)], 1e-5) == math.inf


# --- steps and wrong arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "batch", "epochs", "expected"),
    [(N, B, 5, 2045), (100, 100, 3, 3), (100, 30, 1, 3), (100, 30, 0.5, 2), (100, 30, 1.5, 5), (100, 100, 0.1, 1)],
)
def test_planned_steps(size: int, batch: int, epochs: float, expected: int):
    assert planned_steps(size, batch, epochs) == expected


SPENT = {"noise_multiplier": 1.0, "sampling_rate": 0.1, "steps": 10, "delta": 1e-5}
BUDGET = {"epsilon": 2.0, "sampling_rate": 0.1, "steps": 10, "delta": 1e-5}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"delta": 1.0}, "delta.*got 1.0"),
        ({"delta": 0.0}, "delta.*got 0.0"),
        ({"sampling_rate": 0.0}, "sampling_rate.*got 0.0"),
        ({"sampling_rate": 1.5}, "sampling_rate.*got 1.5"),
        ({"accountant": "prv"}, "accountant.*rdp, pld.*got 'prv'"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict, message: str):
    with pytest.raises(ValueError, match=message):
        epsilon_spent(**{**SPENT, **wrong})
    with pytest.raises(ValueError, match=message):
        calibrate_noise_multiplier(**{**BUDGET, **wrong})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: epsilon_spent(**{**SPENT, "noise_multiplier": -1.0}), "noise_multiplier.*got -1.0"),
        (lambda: epsilon_spent(**{**SPENT, "noise_multiplier": math.nan}), "noise_multiplier.*got nan"),
        (lambda: epsilon_spent(**{**SPENT, "steps": -1}), "steps >= 0, got -1"),
        (lambda: calibrate_noise_multiplier(**{**BUDGET, "steps": 0}), "steps >= 1, got 0"),
        (lambda: calibrate_noise_multiplier(**{**BUDGET, "steps": 2.5}), "steps >= 1, got 2.5"),
        (lambda: calibrate_noise_multiplier(**{**BUDGET, "epsilon": 0.0}), "epsilon > 0, got 0.0"),
        (lambda: calibrate_noise_multiplier(**{**BUDGET, "epsilon": -2.0}), "epsilon > 0, got -2.0"),
        (lambda: planned_steps(100, 256, 1), "dataset_size >= expected_batch_size, got 100 and 256"),
        (lambda: planned_steps(100, 0, 1), "expected_batch_size >= 1, got 0"),
        (lambda: planned_steps(100, 10, 0), "epochs > 0, got 0"),
        (lambda: combined_noise_multiplier([]), "at least one of multipliers"),
        (lambda: combined_noise_multiplier([1.0, -1.0]), "multipliers >= 0, got .*-1.0"),
        (
            lambda: grad_noise_multiplier(0.75, {"histogram_noise_multiplier": 0.5}),
            "expected histogram_noise_multiplier > noise_multiplier, got 0.5 and 0.75",
        ),
        (
            lambda: grad_noise_multiplier(5.0, {"histogram_noise_multiplier": 5.0}),
            "expected histogram_noise_multiplier > noise_multiplier, got 5 and 5",
        ),
        (
            lambda: grad_noise_multiplier(1.0, {"histogram_noise_multiplier": 1.2, "loss_noise_multiplier": 1.3}),
            "histogram_noise_multiplier and loss_noise_multiplier combined.*"
            "histogram_noise_multiplier=1.2, loss_noise_multiplier=1.3.* and 1",
        ),
    ],
)
def test_wrong_values_are_named_and_shown(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_budget_out_of_reach_is_an_error_that_shows_it():
    with pytest.raises(ValueError, match=r"meets epsilon=2 at delta=1e-17 .*sampling_rate=0.1, steps=10 .*'pld'"):
        calibrate_noise_multiplier(**{**BUDGET, "delta": 1e-17, "accountant": "pld"})
