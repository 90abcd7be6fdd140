"""`hf-dcsgd calibrate`: the noise that a run needs."""

import argparse
import json
import sys
from typing import Any

from hf_dcsgd.cli.shared import (
    HISTOGRAM_STRATEGIES,
    STRATEGIES,
    Subparsers,
    add_budget_arguments,
    add_json_argument,
    add_subcommand,
    add_training_arguments,
    note_default_delta,
    training_figures,
)
from hf_dcsgd.reporting.format import rounded_up


def add_parser(subparsers: Subparsers) -> None:
    parser = add_subcommand(
        subparsers,
        "calibrate",
        run,
        help="the noise that a run needs to stay within (ε, δ)",
        description="The noise that a run needs to stay within (ε, δ), by both accountants.\n\n"
        "σ is what the accountant sees. The side release of a strategy (its histogram, say)\n"
        "takes a share of it, and the gradient gets noise of multiplier σ_T for the rest:\n"
        "1/σ² = 1/σ_T² + 1/σ_H². Both together cost what σ alone would cost.",
        epilog="example (QNLI, as in the paper):\n"
        "  hf-dcsgd calibrate --epsilon 2 --dataset-size 104743 --batch-size 256 --epochs 5",
    )
    add_budget_arguments(parser)
    add_training_arguments(parser)
    parser.add_argument(
        "--accountant",
        choices=("rdp", "pld"),
        default="rdp",
        help="which accountant to calibrate with; the other is shown beside it (default: rdp, as in the paper; "
        "pld is tighter: less noise for the same guarantee)",
    )
    parser.add_argument(
        "--clipping",
        choices=STRATEGIES,
        default="dc_sgd_e",
        help="the strategy for the clipping threshold; fixed, du and auto_clip release no side value, so σ_T = σ "
        "(default: dc_sgd_e)",
    )
    parser.add_argument(
        "--histogram-noise-multiplier",
        type=float,
        metavar="SIGMA_H",
        help="σ_H of dc_sgd_e and dc_sgd_p, above σ (default: 5; 8 when 2 <= σ <= 3; 12 when σ > 3)",
    )
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    from hf_dcsgd.validation import require

    side = arguments.histogram_noise_multiplier
    require(
        side is None or arguments.clipping in HISTOGRAM_STRATEGIES,
        f"--clipping {arguments.clipping} releases no histogram, got --histogram-noise-multiplier {side}",
    )
    sampling_rate, steps, delta = training_figures(arguments)
    result = _calibrated(arguments, arguments.accountant, sampling_rate, steps, delta)
    other = "pld" if arguments.accountant == "rdp" else "rdp"
    try:
        result["other"] = _calibrated(arguments, other, sampling_rate, steps, delta)
    except ValueError as error:  # the figures asked for stand without the second opinion
        multipliers = ("noise_multiplier", "grad_noise_multiplier", "histogram_noise_multiplier")
        result["other"] = {**result, **dict.fromkeys(multipliers), "accountant": other}
        print(f"note: nothing by {other}: {error}", file=sys.stderr)
    note_default_delta(arguments)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print(_calibrate_table(arguments, result))
    return 0


def _calibrated(
    arguments: argparse.Namespace, accountant: str, sampling_rate: float, steps: int, delta: float
) -> dict[str, Any]:
    from hf_dcsgd.privacy import accounting

    sigma = accounting.calibrate_noise_multiplier(
        epsilon=arguments.epsilon, delta=delta, sampling_rate=sampling_rate, steps=steps, accountant=accountant
    )
    histogram = None
    sides = {}
    if arguments.clipping in HISTOGRAM_STRATEGIES:
        histogram, name = arguments.histogram_noise_multiplier, "--histogram-noise-multiplier"
        if histogram is None:
            histogram = accounting.default_histogram_noise_multiplier(sigma)
            name = "histogram_noise_multiplier (by default; see --histogram-noise-multiplier)"
        sides = {name: histogram}
    elif arguments.clipping == "andrew":
        # σ_b = B/20 on bits centred at ±½, whose sensitivity is ½: a multiplier of 2σ_b.
        sides = {"twice andrew's sigma_b (batch size / 10)": arguments.batch_size / 10}
    return {
        "noise_multiplier": sigma,
        "grad_noise_multiplier": accounting.grad_noise_multiplier(sigma, sides),
        "histogram_noise_multiplier": histogram,
        "steps": steps,
        "sampling_rate": sampling_rate,
        "epsilon": arguments.epsilon,
        "delta": delta,
        "accountant": accountant,
    }


def _calibrate_table(arguments: argparse.Namespace, result: dict[str, Any]) -> str:
    rows = [("noise_multiplier", "σ, accounted"), ("grad_noise_multiplier", "σ_T, on the gradient")]
    if arguments.clipping in HISTOGRAM_STRATEGIES:
        rows.append(("histogram_noise_multiplier", "σ_H, on the histogram"))
    columns = (result, result["other"])
    lines = [
        f"(ε = {arguments.epsilon:g}, δ = {result['delta']:.4g})-DP with clipping {arguments.clipping}",
        f"T = {result['steps']} steps at q = {arguments.batch_size}/{arguments.dataset_size} "
        f"= {result['sampling_rate']:.6g}",
        "",
        f"{'':50}" + "".join(f"{column['accountant']:>12}" for column in columns),
    ]
    for key, meaning in rows:
        figures = ("-" if column[key] is None else rounded_up(column[key], decimals=6) for column in columns)
        lines.append(f"{key:28}{meaning:22}" + "".join(f"{figure:>12}" for figure in figures))
    return "\n".join(lines)
