"""Accountants: what their shortcuts leave out changes nothing, nothing is printed, and others may be registered."""

import logging
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from absl import logging as absl_logging
from dp_accounting import pld, rdp

from hf_dcsgd import PrivacyPlan
from hf_dcsgd.privacy import accountants
from hf_dcsgd.privacy.accountants import (
    RDP_ORDERS,
    common_interval,
    pld_epsilon,
    pld_interval,
    rdp_epsilon,
    rdp_of_one_step,
    register_accountant,
)
from hf_dcsgd.privacy.accounting import (
    AccountedRun,
    calibrate_noise_multiplier,
    composed_epsilon,
    epsilon_spent,
    smallest_noise_multiplier,
)

# At such a rate dp_accounting's fractional orders do not converge, and it says so order by order.
LOUD = {"noise_multiplier": 3.0, "sampling_rate": 0.5}


def step(noise_multiplier: float, sampling_rate: float) -> dp_accounting.DpEvent:
    return AccountedRun(noise_multiplier, sampling_rate, 1).event.event


def plain_accountant(noise_multiplier: float, sampling_rate: float, steps: int) -> rdp.RdpAccountant:
    event = dp_accounting.PoissonSampledDpEvent(sampling_rate, dp_accounting.GaussianDpEvent(noise_multiplier))
    return rdp.RdpAccountant(RDP_ORDERS).compose(event, steps)


@pytest.fixture
def absl_messages():
    """What reaches absl's handlers while the test runs."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    ear = Ear()
    logger = absl_logging.get_absl_logger()
    logger.addHandler(ear)
    yield heard
    logger.removeHandler(ear)


def test_orders_reach_1024_without_wide_gaps():
    orders = np.array(RDP_ORDERS)
    assert orders[0] == 1.1
    assert orders[-1] == 1024
    assert np.all(np.diff(orders) > 0)
    assert np.all(orders[1:] / orders[:-1] < 1.1)


def test_orders_that_do_not_converge_are_left_out_in_silence(absl_messages: list[str]):
    rdp_of_one_step.cache_clear()
    epsilon = rdp_epsilon(AccountedRun(**LOUD, steps=50).event, 1e-5)
    assert absl_messages == []
    plain = plain_accountant(**LOUD, steps=50)
    assert any("failed to converge" in message for message in absl_messages), "the library no longer complains"
    assert epsilon == pytest.approx(plain.get_epsilon(1e-5), rel=1e-10)


def test_other_absl_messages_still_come_through(absl_messages: list[str]):
    with accountants.suppress_order_warnings():
        absl_logging.warning("something else")
    assert absl_messages == ["something else"]


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta"),
    [
        (0.75, 0.0025, 2045, 1e-5),
        (2.4, 0.0025, 2045, 1e-19),
        (50.0, 0.01, 500, 1e-5),
        (1.0, 0.2, 1000, 1e-6),
        (9, 1, 3, 0.4),
    ],
)
def test_skipping_high_orders_changes_nothing(sigma: float, rate: float, steps: int, delta: float):
    expected = plain_accountant(sigma, rate, steps).get_epsilon(delta)
    assert rdp_epsilon(AccountedRun(sigma, rate, steps).event, delta) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("rate", [1e-9, 1e-6, 1e-3])
@pytest.mark.parametrize("sigma", [1.0, 1000.0])
def test_divergence_is_not_below_the_exact_one(rate: float, sigma: float):
    """Against sixty digits: rounding alone may make the library's divergence negative, which it takes for ε = 0."""
    divergences = rdp_of_one_step(step(sigma, rate))
    with mpmath.workdps(60):
        for order in (2, 17, 63):
            q, s = mpmath.mpf(rate), mpmath.mpf(sigma)
            terms = (
                mpmath.binomial(order, k) * (1 - q) ** (order - k) * q**k * mpmath.exp((k * k - k) / (2 * s * s))
                for k in range(order + 1)
            )
            exact = mpmath.log(mpmath.fsum(terms)) / (order - 1)
            computed = divergences[RDP_ORDERS.index(float(order))]
            assert 0 <= float(computed - exact) < 1e-13 + 1e-9 * float(exact)


def test_a_divergence_rounded_below_zero_is_not_perfect_privacy():
    run = {"noise_multiplier": 1000.0, "sampling_rate": 1e-9}
    assert plain_accountant(**run, steps=1).rdp.min() < 0, "pick another run: this one no longer rounds below zero"
    assert np.all(rdp_of_one_step(step(**run)) > 0)


def test_cached_divergences_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        rdp_of_one_step(step(1.0, 0.01))[0] = 0.0


def test_small_budgets_do_not_jump_to_endless_noise():
    """Low orders alone would meet this budget only where noise drowns everything (σ over 30,000)."""
    sigma = calibrate_noise_multiplier(epsilon=0.01, delta=1e-5, sampling_rate=0.01, steps=1000)
    assert sigma == pytest.approx(87.474, abs=1e-3)


# --- the search ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guess", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("target", [1e-3, 1.0, 1e5])
def test_search_ends_on_the_safe_side(guess: float, target: float):
    sigma = smallest_noise_multiplier(lambda sigma: sigma**-2, target, guess=guess)
    assert sigma**-2 <= target
    assert sigma == pytest.approx(target**-0.5, rel=2e-8)


def test_search_bears_jumps_and_infinities():
    def jumpy(sigma: float) -> float:
        return math.inf if sigma < 0.3 else 5.0 if sigma < 2.7 else 0.0

    sigma = smallest_noise_multiplier(jumpy, 1.0)
    assert sigma == pytest.approx(2.7, rel=1e-7)
    assert sigma >= 2.7


def test_search_bears_wobbles():
    sigma = smallest_noise_multiplier(lambda sigma: 1 / sigma + 1e-9 * math.sin(1e12 * sigma), 0.5)
    assert 1 / sigma + 1e-9 * math.sin(1e12 * sigma) <= 0.5
    assert sigma == pytest.approx(2.0, rel=1e-6)


def test_search_gives_up_on_what_noise_cannot_meet():
    assert smallest_noise_multiplier(lambda sigma: 2.0, 1.0) is None
    assert smallest_noise_multiplier(lambda sigma: math.inf, 1.0) is None
    assert smallest_noise_multiplier(lambda sigma: 0.0, 1.0) < 1e-4


def test_search_starts_exactly_at_the_answer():
    assert smallest_noise_multiplier(lambda sigma: 1 / sigma, 1 / 3.0, guess=3.0) == pytest.approx(3.0, rel=2e-8)


# --- the grid of privacy losses --------------------------------------------------------------------------------------


def test_grid_follows_the_losses():
    assert pld_interval(step(0.67, 256 / 104743), 2045) == 2e-4
    assert pld_interval(step(100.0, 0.01), 1000) < 2e-5
    assert pld_interval(step(0.05, 0.01), 10) > 1e-3
    assert pld_interval(step(1.0, 1.0), 10_000) == pytest.approx(pld_interval(step(0.01, 1.0), 1))


def test_a_coarser_grid_only_adds():
    event = AccountedRun(2.0, 0.05, 200).event
    fine, coarse = (pld_epsilon(event, 1e-5, grid_scale=scale) for scale in (1, 10))
    assert fine <= coarse <= fine * 1.01


MIXES = {
    "one huge loss beside tiny ones": [AccountedRun(0.1, 1.0, 1), AccountedRun(3000.0, 0.01, 1000)],
    "many huge losses": [AccountedRun(0.05, 0.1, 10_000), AccountedRun(2000.0, 0.5, 10)],
}


@pytest.mark.parametrize("runs", MIXES.values(), ids=MIXES)
def test_a_mix_of_huge_and_tiny_losses_fits_into_memory(runs, monkeypatch):
    """With the finest grid of all parts, the first would have 4e8 points for one step."""
    sizes, original = [], pld.PLDAccountant.get_epsilon

    def get_epsilon(self, delta):
        sizes.extend(pmf.size for pmf in (self._pld._pmf_remove, self._pld._pmf_add))
        return original(self, delta)

    monkeypatch.setattr(pld.PLDAccountant, "get_epsilon", get_epsilon)
    whole = pld_epsilon(accountants.composed(*(run.event for run in runs)), 1e-5)
    assert max(sizes) < 2e7
    huge = pld_epsilon(runs[0].event, 1e-5)
    assert huge <= whole <= huge * 1.001
    assert whole <= rdp_epsilon(accountants.composed(*(run.event for run in runs)), 1e-5)


@pytest.mark.parametrize("sigmas", [(0.1, 3000.0), (0.3, 0.4), (0.2, 40.0)])
def test_gaussians_of_any_sizes_cost_what_one_gaussian_does(sigmas):
    """Exact: the analytic Gaussian mechanism of dp_accounting, for which the order of magnitude plays no role."""
    runs = [AccountedRun(sigmas[0], 1.0, 1), AccountedRun(sigmas[1], 1.0, 50)]
    together = (sigmas[0] ** -2 + 50 * sigmas[1] ** -2) ** -0.5
    exact = dp_accounting.get_epsilon_gaussian(together, 1e-5)
    found = pld_epsilon(accountants.composed(*(run.event for run in runs)), 1e-5)
    assert exact <= found <= exact * 1.001


def test_sampled_mixes_agree_with_a_finer_grid_of_dp_accounting():
    runs = [AccountedRun(0.25, 0.02, 3), AccountedRun(40.0, 0.2, 500)]
    finer = pld.PLDAccountant(value_discretization_interval=2 * common_interval(_steps(runs)))
    for event, count in _steps(runs):
        finer.compose(event, count)
    found = pld_epsilon(accountants.composed(*(run.event for run in runs)), 1e-5, grid_scale=8)
    assert finer.get_epsilon(1e-5) <= found <= finer.get_epsilon(1e-5) * 1.001


def _steps(runs):
    return [(run.event.event, run.steps) for run in runs]


# --- accountants of one's own ----------------------------------------------------------------------------------------


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch):
    """Registers accountants for one test."""
    monkeypatch.setattr(accountants.ACCOUNTANTS, "_values", dict(accountants.ACCOUNTANTS._values))
    return register_accountant


def test_a_registered_accountant_is_asked_about_events(registered):
    asked = []

    def gaussian(event: dp_accounting.DpEvent, delta: float) -> float:
        asked.append(event)
        return rdp.RdpAccountant([2.0, 8.0]).compose(event).get_epsilon(delta)

    registered("two_orders", gaussian)
    runs = [AccountedRun(2.0, 0.1, 30), AccountedRun(3.0, 1.0, 2)]
    both = composed_epsilon(runs, 1e-5, "two_orders")
    assert both == rdp.RdpAccountant([2.0, 8.0]).compose(runs[0].event).compose(runs[1].event).get_epsilon(1e-5)
    run = {"sampling_rate": 0.1, "steps": 30, "delta": 1e-5, "accountant": "two_orders"}
    sigma = calibrate_noise_multiplier(epsilon=3.0, **run)
    assert 3 * (1 - 5e-6) <= epsilon_spent(noise_multiplier=sigma, **run) <= 3
    assert dp_accounting.SelfComposedDpEvent(step(2.0, 0.1), 30) in list(asked[0].events)
    assert epsilon_spent(**{**run, "steps": 0}, noise_multiplier=1.0) == 0
    assert epsilon_spent(**run, noise_multiplier=0.0) == math.inf


def test_what_is_no_epsilon_is_refused(registered):
    registered("broken", lambda event, delta: math.nan)
    with pytest.raises(ValueError, match="epsilon >= 0, got nan"):
        epsilon_spent(noise_multiplier=1.0, sampling_rate=0.1, steps=3, delta=1e-5, accountant="broken")
    with pytest.raises(ValueError, match="expected a function for accountant 'none', got None"):
        registered("none", None)


def test_a_name_is_taken_once(registered):
    with pytest.raises(ValueError, match=r"new name for accountant, got 'rdp', which is .*\.rdp_epsilon"):
        registered("rdp", lambda event, delta: 0.0)
    assert epsilon_spent(noise_multiplier=1.0, sampling_rate=0.1, steps=3, delta=1e-5) > 0


def test_pld_says_infinity_where_there_is_hardly_any_noise():
    """dp_accounting takes the exponential of the grid's spacing, which overflows there."""
    assert pld_epsilon(dp_accounting.SelfComposedDpEvent(step(1e-6, 0.01), 100), 1e-5) == math.inf
    assert 1e3 < pld_epsilon(dp_accounting.SelfComposedDpEvent(step(1e-2, 0.01), 100), 1e-5) < math.inf
    plan = PrivacyPlan.create(
        dataset_size=1000, expected_batch_size=10, steps=5, num_parameters=1, noise_multiplier=1e-6, clipping="fixed"
    )
    assert plan.epsilon() == math.inf
