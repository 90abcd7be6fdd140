"""Redraws Figures 4 and 5 of the paper with the library's own histogram, noise and thresholds.

    python examples/paper/figures.py --output-dir outputs/paper_figures

Figure 4: the threshold that DC-SGD-P picks for each percentile. Figure 5: the expected squared error that DC-SGD-E
minimizes, and the threshold that it reaches from C = 1. Both on 256 norms drawn from N(100, 20²), one set per
subfigure. The paper does not say which bin counts and noise levels it drew; 10, 20, 40 bins and σ_H of 1, 5, 10
surround its defaults of 20 and 5. The data are synthetic, so a fixed seed gives nothing away.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes

from hf_dcsgd.clipping.dc_sgd import ExpectedErrorThreshold, PercentileThreshold, expected_squared_error
from hf_dcsgd.clipping.histogram import NoisyHistogram, norm_histogram
from hf_dcsgd.privacy.noise import NoiseSource, SensitiveSum

BINS = (10, 20, 40)
HISTOGRAM_NOISE_MULTIPLIERS = (1.0, 5.0, 10.0)
COLORS = ("#0072b2", "#d55e00", "#009e73")
EXACT = {"color": "black", "linewidth": 2.2}
# As in the caption of Figure 5.
EXPECTED_BATCH_SIZE, GRAD_NOISE_MULTIPLIER, NUM_PARAMETERS = 256, 1.0, 100_000
UNIT_VARIANCE = GRAD_NOISE_MULTIPLIER**2 * NUM_PARAMETERS / EXPECTED_BATCH_SIZE**2


def sample_norms(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(100, 20, 256)


def noisy_counts(
    noise: NoiseSource, norms: np.ndarray, histogram_range: float, bins: int, multiplier: float
) -> np.ndarray:
    counts = norm_histogram(torch.tensor(norms), histogram_range, bins)
    return noise.add_noise(SensitiveSum(counts, 1.0), multiplier).double().numpy()


def draw_percentiles(axes: Axes, bins: int, seed: int) -> None:
    """One subfigure of Figure 4: R = 150 covers nearly all of the norms."""
    norms, histogram_range, noise = sample_norms(seed), 150.0, NoiseSource(unsafe_seed=seed)
    percentiles = np.arange(0.02, 0.99, 0.02)
    axes.plot(percentiles, np.quantile(norms, percentiles, method="inverted_cdf"), label="exact", **EXACT)
    for multiplier, color in zip(HISTOGRAM_NOISE_MULTIPLIERS, COLORS, strict=True):
        counts = noisy_counts(noise, norms, histogram_range, bins, multiplier)
        estimates = []
        for percentile in percentiles:
            threshold = PercentileThreshold(
                1.0,
                percentile=float(percentile),
                histogram_bins=bins,
                histogram_range=histogram_range,
                histogram_rule="paper",
                histogram_noise_multiplier=multiplier,
                expected_batch_size=EXPECTED_BATCH_SIZE,
            )
            threshold.update(counts)
            estimates.append(threshold.clip_threshold)
        axes.step(
            percentiles, estimates, where="mid", color=color, linewidth=1.4, label=f"$\\sigma_H$ = {multiplier:g}"
        )
    axes.set(xlabel="percentile $p$", title=f"$b$ = {bins}", xlim=(0, 1), ylim=(0, 150))


def draw_errors(axes: Axes, bins: int, seed: int) -> None:
    """One subfigure of Figure 5: R = 120 leaves a sixth of the norms beyond the range."""
    norms, histogram_range, noise = sample_norms(seed), 120.0, NoiseSource(unsafe_seed=seed)
    candidates = np.linspace(5, 80, 301)
    exact = expected_squared_error(candidates, norms, np.ones(len(norms)), UNIT_VARIANCE)
    axes.plot(candidates, exact, label="exact", **EXACT)
    axes.plot(candidates[exact.argmin()], exact.min(), "o", color="black", markersize=7)
    for multiplier, color in zip(HISTOGRAM_NOISE_MULTIPLIERS, COLORS, strict=True):
        histogram = NoisyHistogram(noisy_counts(noise, norms, histogram_range, bins, multiplier), histogram_range)
        threshold = ExpectedErrorThreshold(
            1.0,
            grad_noise_multiplier=GRAD_NOISE_MULTIPLIER,
            num_parameters=NUM_PARAMETERS,
            expected_batch_size=EXPECTED_BATCH_SIZE,
            histogram_bins=bins,
            histogram_range=histogram_range,
            histogram_rule="paper",
            histogram_noise_multiplier=multiplier,
        )
        threshold.update(histogram.noisy_counts)
        where = np.append(candidates, threshold.clip_threshold)
        estimate = expected_squared_error(where, histogram.bin_centers, histogram.projected(), UNIT_VARIANCE)
        label = f"$\\sigma_H$ = {multiplier:g}: $C$ = {threshold.clip_threshold:.1f}"
        axes.plot(candidates, estimate[:-1], color=color, linewidth=1.4, label=label)
        axes.plot(where[-1], estimate[-1], "D", color=color, markersize=5)
    optimum = candidates[exact.argmin()]
    axes.set(xlabel="clipping threshold $C$", title=f"$b$ = {bins}, best $C$ = {optimum:.1f}", xlim=(5, 80))


def draw_figure(
    draw: Callable[[Axes, int, int], None], ylabel: str, title: str, legend: str, path: Path, seed: int
) -> None:
    figure, columns = plt.subplots(1, len(BINS), figsize=(12.5, 4.2), sharey=True, layout="constrained")
    for column, (axes, bins) in enumerate(zip(columns, BINS, strict=True)):
        draw(axes, bins, seed + column)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9, framealpha=0.9, loc=legend)
    columns[0].set_ylabel(ylabel)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/paper_figures"))
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic norms and of the noise on them")
    arguments = parser.parse_args()
    # Some of the settings drawn here are ones that the library rightly warns of.
    logging.getLogger("hf_dcsgd").setLevel(logging.ERROR)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    draw_figure(
        draw_percentiles,
        "threshold $C$",
        "Figure 4: threshold of DC-SGD-P, 256 norms from N(100, 20²), R = 150",
        "lower right",
        arguments.output_dir / "figure_4.png",
        arguments.seed,
    )
    draw_figure(
        draw_errors,
        "expected squared error $E(C)$",
        "Figure 5: error minimized by DC-SGD-E, 256 norms from N(100, 20²), R = 120, $\\sigma_T$ = 1, B = 256, "
        "d = 100000\ndot: the exact minimum; diamonds: the threshold that DC-SGD-E reaches from C = 1 in one step",
        "upper center",
        arguments.output_dir / "figure_5.png",
        arguments.seed,
    )


if __name__ == "__main__":
    main()
