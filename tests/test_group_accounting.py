"""ε of a unit whose rows are drawn and clipped one by one, against computations of our own."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import optimize, stats

from hf_dcsgd.privacy.accounting import calibrate_noise_multiplier, epsilon_spent
from hf_dcsgd.privacy.plan import BY_ROW, PrivacyPlan, PrivacyUnit

DELTA = 1e-5


def mixture_density(x: np.ndarray, sigma: float, rate: float, group: int) -> np.ndarray:
    """Of the noisy sum with a group: i of its rows are drawn, each moves the sum by 1."""
    drawn = stats.binom.pmf(np.arange(group + 1), group, rate)
    return sum(p * stats.norm.pdf(x, i, sigma) for i, p in enumerate(drawn))


def one_step_epsilon(sigma: float, rate: float, group: int, delta: float) -> float:
    """The smallest ε with ∫ max(0, P − e^ε·Q) ≤ δ, for both orders of with and without the group."""
    x = np.linspace(-12 * sigma, group + 12 * sigma, 400_001)
    densities = mixture_density(x, sigma, rate, group), stats.norm.pdf(x, 0, sigma)

    def excess(epsilon: float) -> float:
        return (
            max(np.trapezoid(np.maximum(0.0, p - math.exp(epsilon) * q), x) for p, q in (densities, densities[::-1]))
            - delta
        )

    return optimize.brentq(excess, 1e-6, 60)


@pytest.mark.parametrize(
    ("sigma", "rate", "group"),
    [(1.5, 0.2, 1), (2.5, 0.05, 1), (2.5, 0.05, 2), pytest.param(1.5, 0.2, 2, marks=pytest.mark.slow)],
)
def test_one_step_agrees_with_integration(sigma: float, rate: float, group: int) -> None:
    found = epsilon_spent(
        noise_multiplier=sigma, sampling_rate=rate, steps=1, delta=DELTA, accountant="pld", group_size=group
    )
    expected = one_step_epsilon(sigma, rate, group, DELTA)
    assert expected - 1e-5 <= found <= expected + 1e-4


def composed_epsilon(sigma: float, rate: float, group: int, steps: int, delta: float) -> float:
    """By convolving the distribution of privacy losses on a grid of our own, losses rounded to the nearest."""
    x, step = np.linspace(-14 * sigma, group + 14 * sigma, 400_001, retstep=True)
    with_group, without = mixture_density(x, sigma, rate, group), stats.norm.pdf(x, 0, sigma)
    width, size = 5e-4, 1 << 18
    found = []
    for p, q in ((with_group, without), (without, with_group)):
        keep = (p > 1e-300) & (q > 1e-300)
        cells = np.round(np.log(p[keep] / q[keep]) / width).astype(int) + size // 2
        mass = np.bincount(cells, p[keep] * step, size)
        centered = np.roll(mass, -size // 2)
        total = np.roll(np.fft.irfft(np.fft.rfft(centered) ** steps, size), size // 2)
        losses = (np.arange(size) - size // 2) * width

        def excess(epsilon: float, losses: np.ndarray = losses, total: np.ndarray = total) -> float:
            above = losses > epsilon
            return float((total[above] * -np.expm1(epsilon - losses[above])).sum()) - delta

        found.append(optimize.brentq(excess, 1e-3, 60))
    return max(found)


@pytest.mark.parametrize("group", [1, 2])
def test_many_steps_agree_with_a_convolution(group: int) -> None:
    found = epsilon_spent(
        noise_multiplier=1.2, sampling_rate=0.02, steps=300, delta=DELTA, accountant="pld", group_size=group
    )
    assert found == pytest.approx(composed_epsilon(1.2, 0.02, group, 300, DELTA), rel=2e-4)


def test_a_group_of_one_is_the_row() -> None:
    common = {"sampling_rate": 0.01, "steps": 500, "delta": DELTA, "accountant": "pld", "grid_scale": 10}
    rows = epsilon_spent(noise_multiplier=1.0, **common)
    assert epsilon_spent(noise_multiplier=1.0, **common, group_size=1) == rows
    assert epsilon_spent(noise_multiplier=1.0, **common, group_size=2) > 1.5 * rows


def test_without_sampling_a_group_is_a_sensitivity() -> None:
    common = {"sampling_rate": 1.0, "steps": 5, "delta": DELTA, "accountant": "pld"}
    assert epsilon_spent(noise_multiplier=6.0, **common, group_size=3) == epsilon_spent(noise_multiplier=2.0, **common)


@pytest.mark.slow
def test_a_calibrated_plan_meets_its_budget_for_the_unit() -> None:
    unit = PrivacyUnit("user_id", 1000, 2, BY_ROW)
    plan = PrivacyPlan.create(
        dataset_size=2000, expected_batch_size=40, steps=20, num_parameters=1, target_epsilon=1.0, accountant="pld",
        clipping="fixed", unit=unit,
    )  # fmt: skip
    assert plan.delta == 1 / 1000
    assert plan.epsilon(grid_scale=10) <= 1.0, "and so on a finer grid, which is less pessimistic"
    assert plan.epsilon(grid_scale=10) == pytest.approx(1.0, rel=1e-2)
    per_row = calibrate_noise_multiplier(epsilon=1.0, delta=1 / 1000, sampling_rate=0.02, steps=20, accountant="pld")
    assert 1.2 * per_row < plan.noise_multiplier < 2 * per_row
    assert PrivacyPlan.from_dict(plan.to_dict()) == plan


def test_rdp_says_that_it_cannot() -> None:
    with pytest.raises(ValueError, match="rdp_epsilon cannot account for a group of rows; use accountant='pld'"):
        epsilon_spent(noise_multiplier=1.0, sampling_rate=0.1, steps=2, delta=DELTA, group_size=2)
