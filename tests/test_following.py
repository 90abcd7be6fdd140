"""The histogram that follows the norms: what it estimates, where it goes, and what it may never do."""

import functools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize

from hf_dcsgd.clipping.dc_sgd import ExpectedErrorThreshold, PercentileThreshold
from hf_dcsgd.clipping.following import FollowingHistogram, NormDistribution, growth_for, weight_of_the_newest
from hf_dcsgd.clipping.histogram import bin_edges, norm_histogram

BINS, NOISE = 20, 5.0
GROWTH = growth_for(BINS)


def shares(numbers):
    array = np.array(numbers) + 1e-9
    return array / array.sum()


distributions = st.builds(
    lambda top, numbers: NormDistribution(bin_edges(top, len(numbers), GROWTH), shares(numbers)),
    st.floats(1e-6, 1e6),
    st.lists(st.floats(0, 1), min_size=2, max_size=12),
)


def density(distribution, norm):
    """The density that a distribution stands for, written down once more."""
    index = int(np.searchsorted(distribution.edges, norm, side="right")) - 1
    index = min(max(index, 0), len(distribution.shares) - 1)
    lower, upper = distribution.edges[index], distribution.edges[index + 1]
    return distribution.shares[index] * (1 / upper if lower == 0 else 1 / (norm * math.log(upper / lower)))


def mean_of(distribution, function, start=0.0):
    parts = zip(distribution.edges[:-1], distribution.edges[1:], strict=True)
    return sum(
        integrate.quad(lambda n: density(distribution, n) * function(n), max(low, start), high)[0]
        for low, high in parts
        if high > start
    )


@given(distributions, st.floats(0.001, 1.2))
@settings(deadline=None, max_examples=60)
def test_mean_excess_is_the_integral(distribution, position):
    threshold = position * float(distribution.edges[-1])
    expected = mean_of(distribution, lambda n: max(n - threshold, 0.0), threshold)
    assert distribution.mean_excess(threshold) == pytest.approx(expected, rel=1e-6, abs=1e-9 * distribution.edges[-1])


@given(distributions, st.floats(1e-4, 1e3))
@settings(deadline=None, max_examples=40)
def test_the_threshold_has_the_least_expected_error(distribution, unit_variance):
    found = distribution.least_error_threshold(unit_variance)
    scale = float(distribution.edges[-1])

    def error(logarithm):
        threshold = math.exp(logarithm)
        squares = mean_of(distribution, lambda n: max(n - threshold, 0.0) ** 2, threshold)
        return (unit_variance * threshold**2 + squares) / scale**2

    best = optimize.minimize_scalar(error, bounds=(math.log(scale) - 20, math.log(scale)), method="bounded")
    assert error(math.log(found)) <= best.fun * (1 + 1e-6) + 1e-12


@given(distributions, st.floats(0.01, 0.99))
@settings(deadline=None, max_examples=60)
def test_a_quantile_has_its_share_below_it(distribution, fraction):
    found = distribution.quantile(fraction)
    below = mean_of(distribution, lambda n: 1.0) - mean_of(distribution, lambda n: 1.0, found)
    first = float(distribution.shares[0])
    assert 0 < found <= distribution.edges[-1] * (1 + 1e-12)
    if fraction > first:  # within the first bin, which begins at zero, it keeps away from zero
        assert below == pytest.approx(fraction, abs=1e-6)


# --- one example, one count ------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32).map(abs), max_size=20),
    st.floats(allow_nan=True, allow_infinity=True, width=32).map(abs),
    st.floats(1e-10, 1e10),
)
def test_an_example_adds_one_to_one_growing_bin(norms, extra, histogram_range):
    without = norm_histogram(torch.tensor(norms), histogram_range, BINS, GROWTH)
    with_extra = norm_histogram(torch.tensor([*norms, extra]), histogram_range, BINS, GROWTH)
    difference = with_extra - without
    assert difference.sum() == 1
    assert (difference >= 0).all()
    assert difference.max() == 1


@given(st.floats(1e-3, 1e3))
def test_growing_bins_hold_what_lies_between_their_edges(norm):
    edges = bin_edges(100.0, BINS, GROWTH)
    (index,) = norm_histogram(torch.tensor([norm]), 100.0, BINS, GROWTH).nonzero().flatten().tolist()
    assert norm >= edges[index] * (1 - 1e-5)
    assert norm <= edges[index + 1] * (1 + 1e-5) or index == BINS - 1


# --- where it goes ---------------------------------------------------------------------------------------------------


def error_threshold(expected_batch_size, unit_variance, rule="following", first=1.0, bins=BINS):
    return ExpectedErrorThreshold(
        first,
        grad_noise_multiplier=1.0,
        num_parameters=max(1, round(unit_variance * expected_batch_size**2)),
        expected_batch_size=expected_batch_size,
        histogram_bins=bins,
        histogram_range=100.0 * first if rule == "following" else float(bins),
        histogram_rule=rule,
        histogram_noise_multiplier=NOISE,
    )


def release(threshold, norms, generator):
    counts = threshold.side_contribution(torch.tensor(norms)).double().numpy()
    threshold.update(counts + generator.normal(0, NOISE, len(counts)))


def true_error(threshold, norms, unit_variance):
    return unit_variance * threshold**2 + np.mean(np.maximum(norms - threshold, 0) ** 2)


def least_error(norms, unit_variance):
    """The error is convex in the threshold."""
    largest = norms.max()
    return optimize.minimize_scalar(
        true_error,
        args=(norms, unit_variance),
        bounds=(0, largest),
        method="bounded",
        options={"xatol": 1e-8 * largest},
    ).fun


def bimodal(step, size, generator):
    """Norms as those of real runs: most examples are learned, some have a hundred times the typical gradient."""
    share = min(1.0, step / 30)
    large = np.exp(generator.normal(np.log(3 + 57 * share), 0.5, size))
    small = np.exp(generator.normal(np.log(2.6 * (1 - share) + 0.02 * share), 1.0, size))
    return np.where(generator.random(size) < 0.15, large, small)


def ratios(rule, expected_batch_size, unit_variance, seed):
    generator = np.random.default_rng(seed)
    threshold, found = error_threshold(expected_batch_size, unit_variance, rule), []
    for step in range(120):
        norms = bimodal(step, expected_batch_size, generator)
        if step >= 20:
            found.append(
                true_error(threshold.clip_threshold, norms, unit_variance) / least_error(norms, unit_variance)
            )
        release(threshold, norms, generator)
    return np.array(found)


@pytest.mark.parametrize(("expected_batch_size", "unit_variance"), [(256, 7.3), (1024, 0.46), (2048, 0.11)])
def test_error_stays_near_its_minimum_on_bimodal_norms(expected_batch_size, unit_variance):
    found = ratios("following", expected_batch_size, unit_variance, seed=1)
    assert np.median(found) <= 1.02
    assert found.max() <= 1.1


def test_the_papers_rule_stalls_where_this_one_follows():
    paper, following = (ratios(rule, 2048, 0.11, seed=1) for rule in ("paper", "following"))
    assert np.median(paper) > 1.3
    assert np.median(following) < 1.02


@pytest.mark.parametrize("bins", [5, 10, 40, 100])
def test_any_number_of_bins_will_do(bins):
    generator = np.random.default_rng(0)
    threshold = error_threshold(512, 1.0, bins=bins)
    norms = 3 * np.exp(generator.normal(0, 1, 512))
    for _ in range(20):
        release(threshold, norms, generator)
    assert growth_for(bins) ** (bins - 1) == pytest.approx(growth_for(20) ** 19)
    assert true_error(threshold.clip_threshold, norms, 1.0) <= 1.1 * least_error(norms, 1.0)


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e4, 1e12])
def test_norms_of_any_scale_are_found_from_the_usual_start(scale):
    generator = np.random.default_rng(0)
    threshold = error_threshold(256, 1.0)
    for _ in range(40):
        release(threshold, scale * np.exp(generator.normal(0, 0.5, 256)), generator)
    norms = scale * np.exp(generator.normal(0, 0.5, 256))
    assert true_error(threshold.clip_threshold, norms, 1.0) <= 1.05 * least_error(norms, 1.0)


@pytest.mark.parametrize("expected_batch_size", [256, 1024])
@pytest.mark.parametrize("factor", [1e-5, 1e-2, 1e5])
def test_norms_that_fall_or_rise_at_once_are_found_again(expected_batch_size, factor):
    """Slowly where they fall, as a window that has held the norms comes down by one bin in some five to ten steps."""
    generator = np.random.default_rng(0)
    threshold = error_threshold(expected_batch_size, 1.0)
    for step in range(400):
        norms = 10 * np.exp(generator.normal(0, 0.7, expected_batch_size)) * (factor if step >= 40 else 1)
        release(threshold, norms, generator)
    assert true_error(threshold.clip_threshold, norms, 1.0) <= 1.05 * least_error(norms, 1.0)


@pytest.mark.parametrize(("expected_batch_size", "unit_variance"), [(384, 8.0), (1024, 0.46), (2048, 0.11)])
def test_a_threshold_does_not_vanish_with_the_norms_of_examples_that_are_learned(expected_batch_size, unit_variance):
    """In the end 99% of the examples have norms of almost nothing; one in a hundred is as hard as ever."""
    generator = np.random.default_rng(0)
    threshold, found = error_threshold(expected_batch_size, unit_variance), []
    for step in range(600):
        learned = generator.random(expected_batch_size) < 0.99 * min(1.0, step / 100)
        vanishing = generator.normal(1 - step / 5, 1, expected_batch_size)
        norms = np.exp(np.where(learned, vanishing, generator.normal(3, 0.5, expected_batch_size)))
        if step >= 200 and norms.max() > 1:
            error = true_error(threshold.clip_threshold, norms, unit_variance)
            found.append(error / least_error(norms, unit_variance))
        release(threshold, norms, generator)
    assert np.median(found) <= 1.1
    assert threshold.clip_threshold > 1e-5


def test_a_tail_that_is_lost_in_the_noise_now_and_then_hardly_moves_the_window():
    generator = np.random.default_rng(0)
    histogram, moved = FollowingHistogram(BINS, 100.0, NOISE, 256), 0.0
    for step in range(300):
        rare = generator.random(256) < 0.08
        norms = torch.from_numpy(
            np.exp(np.where(rare, generator.normal(3.4, 1.2, 256), generator.normal(-4.6, 2.0, 256)))
        )
        before = histogram.histogram_range
        counts = norm_histogram(norms, before, BINS, GROWTH).double().numpy()
        histogram.follow(counts + generator.normal(0, NOISE, BINS))
        moved += abs(math.log(histogram.histogram_range / before, GROWTH)) if step >= 20 else 0.0
    assert moved <= 0.3 * 280


@pytest.mark.parametrize("percentile", [0.2, 0.5, 0.9])
def test_percentiles_are_found(percentile):
    generator = np.random.default_rng(0)
    threshold = PercentileThreshold(
        1.0,
        percentile=percentile,
        histogram_bins=BINS,
        histogram_range=100.0,
        histogram_rule="following",
        histogram_noise_multiplier=NOISE,
        expected_batch_size=512,
    )
    norms = np.exp(generator.normal(2, 0.8, 512))
    for _ in range(30):
        release(threshold, norms, generator)
    assert threshold.clip_threshold == pytest.approx(np.quantile(norms, percentile), rel=0.15)


def test_noise_alone_moves_nothing():
    """Without examples, tails stand out of the noise so rarely that the threshold stays where it is."""
    generator = np.random.default_rng(0)
    moved = 0
    for _ in range(50):
        histogram = FollowingHistogram(BINS, 100.0, NOISE, 256)
        found = [histogram.follow(generator.normal(0, NOISE, BINS)) for _ in range(10)]
        moved += found[-1] is not None
    assert moved <= 5


def test_norms_that_are_not_there_are_seen_in_hardly_any_of_ten_thousand_steps():
    """One such step, at a large batch, is a threshold far above its optimum."""
    generator = np.random.default_rng(0)
    histogram = FollowingHistogram(BINS, 100.0, NOISE, 1024)
    largest = bin_edges(100.0, BINS, GROWTH)[15]
    norms = torch.from_numpy(largest * 0.99 * generator.uniform(0, 1, 1024) ** 2)
    counts_of = functools.cache(lambda top: norm_histogram(norms, top, BINS, GROWTH).double().numpy())
    noise = generator.normal(0, NOISE, (10_000, BINS))
    found = [histogram.follow(counts_of(histogram.histogram_range) + of_step) for of_step in noise]
    beyond = sum(distribution.edges[-1] > 1.01 * largest for distribution in found[20:] if distribution is not None)
    assert beyond <= 3


def test_noise_that_was_gathered_in_the_last_bin_does_not_lift_the_window():
    """A window that comes down joins the noise of many bins in its last one, which is no sign of large norms."""
    leaps = 0
    for seed in range(30):
        generator = np.random.default_rng(seed)
        histogram = FollowingHistogram(BINS, 100.0, NOISE, 384)
        norms = torch.from_numpy(0.003 * np.exp(generator.normal(0, 0.5, 384)))
        for _ in range(60):
            before = histogram.histogram_range
            counts = norm_histogram(norms, before, BINS, GROWTH).double().numpy()
            histogram.follow(counts + generator.normal(0, NOISE, BINS))
            leaps += histogram.histogram_range > before * GROWTH**1.5
    assert leaps <= 3


@given(st.integers(1, 10**6), st.floats(0, 1e4))
def test_small_batches_are_averaged_over_more_steps(batch_size, noise):
    weight = weight_of_the_newest(batch_size, noise)
    assert 0.05 <= weight <= 0.2
    assert weight <= weight_of_the_newest(2 * batch_size, noise)
    assert weight_of_the_newest(256, 5.0) == pytest.approx(0.101, abs=0.001)
    assert weight_of_the_newest(1024, 5.0) == 0.2


# --- what it may never do --------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.floats(-1e300, 1e300), min_size=BINS, max_size=BINS), min_size=1, max_size=6))
@example([[1e300, -1e300 * (1 - 1e-15), *[0.0] * (BINS - 2)]])
@settings(deadline=None)
def test_shares_and_moves_are_bounded_whatever_is_released(releases):
    histogram = FollowingHistogram(BINS, 100.0, NOISE, 256)
    for counts in releases:
        before = histogram.histogram_range
        distribution = histogram.follow(np.array(counts))
        assert GROWTH ** -(BINS // 2) * 0.99 <= histogram.histogram_range / before <= GROWTH ** (BINS // 2) * 1.01
        if distribution is not None:
            assert np.isfinite(distribution.shares).all()
            assert (distribution.shares >= 0).all()
            assert distribution.shares.sum() == pytest.approx(1)
            assert len(distribution.edges) == len(distribution.shares) + 1


def test_a_saved_state_goes_on_as_the_run_would_have():
    generator = np.random.default_rng(0)
    one, other = error_threshold(256, 1.0), error_threshold(256, 1.0)
    for _ in range(25):
        release(one, 0.5 * np.exp(generator.normal(0, 1, 256)), generator)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for _ in range(25):  # the window rests, and comes down
        counts = np.where(np.arange(BINS) < BINS // 2, 25.0, 0.0) + generator.normal(0, NOISE, BINS)
        one.update(counts)
        other.update(counts)
        assert one.state_dict() == other.state_dict()


@pytest.mark.parametrize(("peak", "bins_down"), [(0.0, BINS // 2), (100.0, 1), (1e6, 0)])
def test_a_window_that_has_held_the_norms_still_comes_down_slowly_after_a_resume(peak, bins_down):
    counts = np.where(np.arange(BINS) < BINS // 4, 60.0, 0.0)
    threshold = error_threshold(256, 1.0)
    threshold.load_state_dict({**threshold.state_dict(), "window_peak": peak})
    threshold.update(counts)
    assert threshold.state_dict()["window_peak"] == peak
    assert threshold.histogram_range == pytest.approx(100.0 * GROWTH**-bins_down)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("averaged_counts", [1.0], "expected averaged_counts to be 20 finite numbers"),
        ("averaged_counts", [math.nan] * BINS, "expected averaged_counts to be 20 finite numbers"),
        ("average_variances", [1.0], "expected average_variances to be 20 finite numbers"),
        ("average_variances", [-1.0] * BINS, "expected average_variances to be at least 0"),
        ("average_weight", 2.0, r"expected average_weight in \[0, 1\], got 2.0"),
        ("window_rest", -1, "expected a whole window_rest >= 0, got -1"),
        ("window_peak", math.nan, "expected a finite window_peak >= 0, got nan"),
    ],
)
def test_a_state_of_another_histogram_is_refused(name, value, message):
    threshold = error_threshold(256, 1.0)
    state = threshold.state_dict()
    with pytest.raises(ValueError, match=message):
        threshold.load_state_dict({**state, name: value})
    assert threshold.state_dict() == state
