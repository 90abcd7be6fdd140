"""Histogram: counts against a loop, sensitivity one by brute force, the projection against a general optimizer."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import optimize

from hf_dcsgd.clipping.histogram import NoisyHistogram, norm_histogram

any_norm = st.floats(width=32, allow_nan=True, allow_infinity=True, min_value=None).map(abs)
ranges = st.floats(1e-30, 1e30)
counts_arrays = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40).map(np.array)


def oracle(norms, histogram_range, bins):
    counts = [0] * bins
    for norm in norms:
        index = bins - 1
        if math.isfinite(norm):
            index = min(bins - 1, math.floor(bins * norm / histogram_range))
        counts[index] += 1
    return counts


@pytest.mark.parametrize(("histogram_range", "bins"), [(20.0, 20), (1.0, 20), (120.0, 7), (1e-3, 2), (5e8, 33)])
def test_counts_agree_with_the_algorithm(histogram_range, bins):
    rng = np.random.default_rng(0)
    # Away from the edges, where fp32 and fp64 may round to different sides.
    norms = (rng.integers(0, 2 * bins, 500) + rng.uniform(0.01, 0.99, 500)) * histogram_range / bins
    counts = norm_histogram(torch.tensor(norms), histogram_range, bins)
    assert counts.dtype == torch.float32
    assert counts.tolist() == oracle(norms, histogram_range, bins)


def test_edges_belong_to_the_bin_on_their_right():
    norms = torch.tensor([0.0, 1.0, 1.999, 19.0, 20.0, 1e30])
    assert norm_histogram(norms, 20.0, 20).nonzero().flatten().tolist() == [0, 1, 19]
    assert norm_histogram(norms, 20.0, 20)[[0, 1, 19]].tolist() == [1, 2, 3]


def test_norms_that_are_not_finite_go_to_the_last_bin():
    norms = torch.tensor([float("nan"), float("inf"), 3e38, 0.5])
    assert norm_histogram(norms, 4.0, 4).tolist() == [1, 0, 0, 3]


def test_no_example_gives_zeros():
    assert norm_histogram(torch.empty(0), 1.0, 5).tolist() == [0] * 5


def test_half_precision_norms_are_counted_in_fp32():
    norms = torch.full((4096,), 0.5, dtype=torch.bfloat16)
    assert norm_histogram(norms, 1.0, 2).tolist() == [0, 4096]


@given(norms=st.lists(any_norm, max_size=30), extra=any_norm, histogram_range=ranges, bins=st.integers(2, 30))
@settings(deadline=None)
def test_one_example_adds_one_to_one_bin(norms, extra, histogram_range, bins):
    without = norm_histogram(torch.tensor(norms), histogram_range, bins)
    with_extra = norm_histogram(torch.tensor([*norms, extra]), histogram_range, bins)
    change = with_extra - without
    assert sorted(change.tolist()) == [0.0] * (bins - 1) + [1.0]
    assert without.sum() == len(norms)


def test_geometry():
    histogram = NoisyHistogram(np.zeros(4), 2.0)
    assert histogram.bins == 4
    assert histogram.edges.tolist() == [0, 0.5, 1, 1.5, 2]
    assert histogram.bin_centers.tolist() == [0.25, 0.75, 1.25, 1.75]
    assert not histogram.usable


@given(counts=counts_arrays)
@settings(deadline=None)
def test_projection_is_the_nearest_point_of_the_simplex(counts):
    histogram = NoisyHistogram(counts, 1.0)
    scale = np.abs(counts).max()
    assume(histogram.total > 1e-6 * scale)
    projected = histogram.projected()
    assert (projected >= 0).all()
    assert projected.sum() == pytest.approx(histogram.total, abs=1e-9 * scale)
    # Optimality: every kept count moved by the same amount, every dropped one would have gone below zero.
    shift = (counts - projected)[projected > 0]
    assert np.ptp(shift) <= 1e-9 * scale
    assert (counts[projected == 0] <= shift.mean() + 1e-9 * scale).all()


def test_projection_agrees_with_a_general_optimizer():
    counts = np.random.default_rng(0).normal(5, 10, 12)
    histogram = NoisyHistogram(counts, 1.0)
    found = optimize.minimize(
        lambda x: np.sum((x - counts) ** 2),
        np.full(12, histogram.total / 12),
        jac=lambda x: 2 * (x - counts),
        bounds=[(0, None)] * 12,
        constraints={"type": "eq", "fun": lambda x: x.sum() - histogram.total},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    np.testing.assert_allclose(histogram.projected(), found.x, atol=1e-5)


def test_projection_keeps_counts_that_are_already_there():
    counts = np.array([3.0, 0.0, 7.0])
    np.testing.assert_allclose(NoisyHistogram(counts, 1.0).projected(), counts, atol=1e-12)


@pytest.mark.parametrize(
    "counts", [[-1.0, 0.5], [0.0, 0.0], [np.nan, 5.0], [np.inf, 5.0], [-np.inf, np.inf], [1e308, 1e308]]
)
def test_counts_without_a_finite_positive_total_are_not_usable(counts):
    histogram = NoisyHistogram(np.array(counts), 1.0)
    assert not histogram.usable
    with pytest.raises(ValueError, match="positive total"):
        histogram.projected()


def test_fraction_above():
    histogram = NoisyHistogram(np.array([1.0, 1.0, 2.0, 0.0]), 4.0)
    thresholds = [0.0, 0.5, 1.0, 2.5, 3.0, 4.0, 100.0]
    assert [histogram.fraction_above(c) for c in thresholds] == pytest.approx([1, 0.875, 0.75, 0.25, 0, 0, 0])


@given(counts=counts_arrays, threshold=st.floats(1e-30, 1e30), histogram_range=ranges)
@settings(deadline=None)
def test_fraction_above_is_a_fraction(counts, threshold, histogram_range):
    histogram = NoisyHistogram(counts, histogram_range)
    assume(histogram.usable)
    assert 0 <= histogram.fraction_above(threshold) <= 1


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="at least 2 bins, got 1"):
        NoisyHistogram(np.zeros(1), 1.0)
    with pytest.raises(ValueError, match="one-dimensional"):
        NoisyHistogram(np.zeros((2, 2)), 1.0)
    with pytest.raises(ValueError, match="histogram_range > 0, got 0"):
        NoisyHistogram(np.zeros(2), 0)
