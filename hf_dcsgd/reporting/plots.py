"""Plots of released values: the threshold, the noisy histogram of norms, ε. Needs matplotlib (extra `report`).

Figures are made without pyplot, so that neither a display nor the user's matplotlib settings play a part. They are
sized to be legible when a phone scales them down.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Trace = Sequence[dict[str, Any]]

_SIZE = (5.6, 3.1)
_INK, _MUTED, _BLUE, _RUST = "#26323d", "#8895a1", "#1f6391", "#c4552d"
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "axes.edgecolor": "#b6c0c9",
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "svg.fonttype": "path",
    "svg.hashsalt": "hf_dcsgd",
}
_HEAT = LinearSegmentedColormap.from_list("heat", ["#ffffff", "#d7e6f1", "#7fb0d0", "#1f6391", "#0b2c45"])
_COLUMNS, _ROWS = 320, 96
# Beyond this ratio of the largest to the smallest value an axis is logarithmic.
_LOG_RATIO = 12.0


def threshold_figure(trace: Trace) -> Figure | None:
    """Draw C_t, and R_t where the strategy has a histogram; None for a strategy without a threshold."""
    steps, threshold = _series(trace, "clip_threshold")
    if not len(steps):
        return None
    range_steps, histogram_range = _series(trace, "histogram_range")
    with rc_context(_STYLE):
        figure, axes = _figure("step", "gradient norm")
        if len(range_steps):
            _line(axes, range_steps, histogram_range, _MUTED, "histogram range R", 1.2)
        _line(axes, steps, threshold, _BLUE, "clipping threshold C", 1.8)
        _scale(axes, np.concatenate([threshold, histogram_range]))
        _legend(axes)
    return figure


def histogram_figure(trace: Trace) -> Figure | None:
    """Draw a heat map over time of the noisy histogram, by the norm, with C_t on top; None without a histogram.

    Darker: a larger share of the noisy batch in that strip of the axis. Negative noisy counts are shown as zero. The
    last bin, just below R, holds everything beyond it.
    """
    lines = [line for line in trace if line.get("noisy_histogram") and sum(line["noisy_histogram"]) > 0]
    if not lines:
        return None
    steps = np.array([line["step"] for line in lines], dtype=float)
    ranges = np.array([line["histogram_range"] for line in lines], dtype=float)
    edges = np.array(lines[0]["histogram_edges"], dtype=float)
    # A range that was left behind within the first few steps would squeeze the rest of the picture.
    top, bottom = np.quantile(ranges, 0.98), min(line["histogram_edges"][1] for line in lines) / 2
    grows = edges[2] - edges[1] > 1.01 * edges[1]
    logarithmic = grows or top > _LOG_RATIO / 2 * ranges.min()
    rows = np.geomspace(bottom, top, _ROWS + 1) if logarithmic else np.linspace(0, top, _ROWS + 1)
    columns = np.array_split(np.arange(len(lines)), min(len(lines), _COLUMNS))
    shares = np.array([np.mean([_shares(lines[i], rows) for i in column], axis=0) for column in columns]).T
    edges = np.array([steps[column[0]] - 0.5 for column in columns] + [steps[-1] + 0.5])
    with rc_context(_STYLE):
        figure, axes = _figure("step", "gradient norm")
        axes.pcolormesh(edges, rows, shares, cmap=_HEAT, vmin=0, vmax=np.quantile(shares, 0.98) or 1, rasterized=True)
        threshold_steps, threshold = _series(lines, "clip_threshold")
        _line(axes, threshold_steps, threshold, _RUST, "clipping threshold C", 1.4)
        if logarithmic:
            _logarithmic(axes)
        axes.set_ylim(rows[0], rows[-1])
        axes.set_xlim(edges[0], edges[-1])
        axes.grid(False)
        _legend(axes)
    return figure


def epsilon_figure(
    steps: Sequence[int], epsilon: Sequence[float | None], *, planned_steps: int, target_epsilon: float | None
) -> Figure | None:
    """Draw ε of the steps charged so far, and the target where there is one; None where no ε is finite."""
    known = [(step, value) for step, value in zip(steps, epsilon, strict=True) if value is not None]
    if len(known) < 2:
        return None
    with rc_context(_STYLE):
        figure, axes = _figure("charged steps", "ε")
        if target_epsilon is not None:
            axes.axhline(target_epsilon, color=_MUTED, linewidth=1.2, linestyle=(0, (4, 3)), label="target ε")
        axes.plot(*zip(*known, strict=True), color=_BLUE, linewidth=1.8, label="ε spent")
        axes.plot(*known[-1], color=_BLUE, marker="o", markersize=5)
        axes.set_xlim(0, max(planned_steps, known[-1][0]) * 1.02)
        axes.set_ylim(0, 1.12 * max(known[-1][1], target_epsilon or 0.0))
        axes.legend(loc="lower right", frameon=False)
    return figure


def png(figure: Figure, dpi: int = 200) -> bytes:
    return _saved(figure, "png", dpi, {"Software": None})


def svg(figure: Figure) -> bytes:
    return _saved(figure, "svg", 200, {"Date": None, "Creator": None, "Format": None, "Type": None})


def _saved(figure: Figure, kind: str, dpi: int, metadata: dict[str, None]) -> bytes:
    buffer = io.BytesIO()
    with rc_context(_STYLE):
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=metadata)
    return buffer.getvalue()


def _shares(line: dict[str, Any], rows: np.ndarray) -> np.ndarray:
    """Return the share of one noisy histogram that lies between consecutive values of `rows`."""
    counts = np.maximum(np.asarray(line["noisy_histogram"], dtype=float), 0.0)
    edges = np.asarray(line["histogram_edges"], dtype=float)
    below = np.concatenate([[0.0], np.cumsum(counts)]) / max(counts.sum(), 1e-300)
    return np.diff(np.interp(rows, edges, below))


def _series(trace: Trace, name: str) -> tuple[np.ndarray, np.ndarray]:
    found = [(line["step"], line[name]) for line in trace if line.get(name) is not None]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.array(steps, dtype=float), np.array(values, dtype=float)


def _figure(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color="#e4e9ee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure, axes


def _line(axes: Axes, steps: np.ndarray, values: np.ndarray, color: str, label: str, width: float) -> None:
    few: Any = {"marker": "o", "markersize": 4} if len(steps) < 12 else {}
    # The value of a step holds until the next one: a line between them would show thresholds that never were.
    axes.plot(steps, values, color=color, linewidth=width, label=label, drawstyle="steps-post", **few)


def _scale(axes: Axes, values: np.ndarray) -> None:
    if values.max() > _LOG_RATIO * values.min():
        _logarithmic(axes)
    else:
        axes.set_ylim(0, 1.18 * values.max())


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, borderaxespad=0.1, handlelength=1.4)
