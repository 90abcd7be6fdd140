"""Figures: that they show the released values, for every strategy and at the edges; pixels where pixels matter."""

from __future__ import annotations

import io
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from matplotlib.image import imread

from hf_dcsgd.reporting import plots


def trace_of(steps: int, *, histogram_range=4.0, counts=None, threshold=1.0) -> list[dict]:
    counts = [1.0, 6.0, 2.0, 1.0] if counts is None else counts
    return [
        {
            "step": step,
            "clip_threshold": threshold * step,
            "histogram_range": histogram_range,
            "histogram_edges": np.linspace(0, histogram_range, len(counts) + 1).tolist(),
            "noisy_histogram": counts,
        }
        for step in range(1, steps + 1)
    ]


def curves(figure) -> dict[str, tuple[list[float], list[float]]]:
    lines = figure.axes[0].get_lines()
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}


def test_the_threshold_is_drawn_as_released():
    found = curves(plots.threshold_figure(trace_of(3)))
    assert found["clipping threshold C"] == ([1, 2, 3], [1, 2, 3])
    assert found["histogram range R"] == ([1, 2, 3], [4, 4, 4])


def test_strategies_without_a_histogram_or_a_threshold():
    without_range = [{"step": 1, "clip_threshold": 1.0}, {"step": 2, "clip_threshold": 0.5}]
    assert list(curves(plots.threshold_figure(without_range))) == ["clipping threshold C"]
    assert plots.histogram_figure(without_range) is None
    assert plots.threshold_figure([{"step": 1}]) is None
    assert plots.threshold_figure([]) is plots.histogram_figure([]) is None


@pytest.mark.parametrize(("last", "scale"), [(3.0, "linear"), (3000.0, "log")])
def test_the_axis_is_logarithmic_only_where_it_must_be(last: float, scale: str):
    trace = [{"step": 1, "clip_threshold": 1.0}, {"step": 2, "clip_threshold": last}]
    assert plots.threshold_figure(trace).axes[0].get_yscale() == scale


@given(
    hnp.arrays(float, 8, elements=st.floats(-5, 50)),
    st.floats(0.01, 100),
    hnp.arrays(float, 12, elements=st.floats(1e-3, 200), unique=True),
)
def test_the_heat_map_moves_no_mass(counts, histogram_range, rows):
    """What lies between two values of the axis is what a histogram evenly filled within each bin has there."""
    rows = np.sort(rows)
    kept, width = np.maximum(counts, 0), histogram_range / len(counts)
    edges = width * np.arange(len(counts) + 1)
    found = plots._shares({"noisy_histogram": counts.tolist(), "histogram_edges": edges.tolist()}, rows)
    overlap = np.minimum(edges[1:, None], rows[None, 1:]) - np.maximum(edges[:-1, None], rows[None, :-1])
    expected = (kept[:, None] * np.maximum(overlap, 0) / width).sum(axis=0) / max(kept.sum(), 1e-300)
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_the_darkest_strip_is_where_the_norms_are():
    figure = plots.histogram_figure(trace_of(40, counts=[0.0, 0.0, 30.0, 0.0], threshold=0.01))
    axes = figure.axes[0]
    figure.canvas.draw()
    pixels = imread(io.BytesIO(plots.png(figure, dpi=100)))[..., :3].mean(axis=-1)
    height = pixels.shape[0]

    def brightness(norm: float) -> float:
        x, y = axes.transData.transform((20.0, norm)) * 100 / figure.dpi
        return float(pixels[height - int(y), int(x)])

    assert brightness(2.5) < 0.4
    assert brightness(1.5) > 0.95
    assert brightness(3.5) > 0.95


def test_a_range_left_behind_at_once_does_not_squeeze_the_picture():
    trace = trace_of(1, histogram_range=4000.0) + [{**line, "step": line["step"] + 1} for line in trace_of(200)]
    bottom, top = plots.histogram_figure(trace).axes[0].get_ylim()
    assert top < 5
    assert bottom == 0


@pytest.mark.parametrize("steps", [1, 2, 700])
def test_any_number_of_steps(steps: int):
    trace = trace_of(steps)
    for figure in (plots.threshold_figure(trace), plots.histogram_figure(trace)):
        assert imread(io.BytesIO(plots.png(figure, dpi=60))).std() > 0.01


def test_histograms_that_are_all_noise_are_left_out():
    bad = trace_of(2, counts=[-1.0, -2.0, 0.5, 0.1])
    assert plots.histogram_figure(bad) is None
    assert plots.histogram_figure([*bad, {**trace_of(1)[0], "step": 3}]) is not None


def test_epsilon_and_its_target():
    figure = plots.epsilon_figure([0, 1, 2], [0.0, 1.5, 2.0], planned_steps=8, target_epsilon=4.0)
    found = curves(figure)
    assert found["ε spent"] == ([0, 1, 2], [0.0, 1.5, 2.0])
    assert set(found["target ε"][1]) == {4.0}
    low, high = figure.axes[0].get_xlim()
    assert low == 0
    assert high >= 8
    assert plots.epsilon_figure([0, 1], [0.0, None], planned_steps=1, target_epsilon=None) is None


def test_pictures_name_no_time_no_place_and_no_other_site():
    figure = plots.threshold_figure(trace_of(3))
    picture = plots.svg(figure)
    root = ElementTree.fromstring(picture)
    for element in root.iter():
        for name, value in element.attrib.items():
            if name.endswith("href"):
                assert value.startswith(("#", "data:"))
    assert b"<dc:date" not in picture
    assert picture == plots.svg(plots.threshold_figure(trace_of(3)))
