"""`hf-dcsgd tuning-cost`: the noise that each of several tuning runs needs."""

import argparse
import json
import math

from hf_dcsgd.cli.shared import Subparsers, add_planning_arguments, add_subcommand, training_figures
from hf_dcsgd.reporting.format import rounded_up


def add_parser(subparsers: Subparsers) -> None:
    parser = add_subcommand(
        subparsers,
        "tuning-cost",
        run,
        help="the noise that each of several tuning runs needs to stay within one (ε, δ)",
        description="The noise that each of several tuning runs needs, so that choosing the best of\n"
        "them stays within one (ε, δ), by four methods. Every method is a guarantee about its\n"
        "own procedure, which the output names; the figures hold only if it is followed.",
        epilog="example (ten clipping thresholds on QNLI, as in the paper):\n"
        "  hf-dcsgd tuning-cost --epsilon 2 --runs 10 --dataset-size 104743 --batch-size 256 --epochs 5",
    )
    add_planning_arguments(parser)
    parser.add_argument(
        "--runs", type=int, required=True, metavar="G", help="number of runs; the mean where it is drawn at random"
    )
    parser.add_argument(
        "--tnb-shape",
        type=float,
        default=1.0,
        metavar="ETA",
        help="shape of the truncated negative binomial: 0 logarithmic, 1 geometric; smaller is cheaper but makes few "
        "runs likelier (default: 1)",
    )


def run(arguments: argparse.Namespace) -> int:
    from hf_dcsgd.privacy.tuning_cost import tuning_costs
    from hf_dcsgd.validation import require_count

    require_count("runs", arguments.runs)
    sampling_rate, steps, delta = training_figures(arguments)
    costs = tuning_costs(
        epsilon=arguments.epsilon,
        delta=delta,
        runs=arguments.runs,
        sampling_rate=sampling_rate,
        steps=steps,
        tnb_shape=arguments.tnb_shape,
    )
    if arguments.json:
        keys = ("method", "noise_multiplier", "per_run_epsilon", "per_run_delta")
        print(json.dumps([{key: getattr(cost, key) for key in keys} for cost in costs], indent=2))
        return 0
    print(f"(ε = {arguments.epsilon:g}, δ = {delta:.4g})-DP in total for {arguments.runs} runs of {steps} steps")
    print(f"\n{'method':26}{'σ of a run':>12}{'ε of a run':>12}{'at δ':>12}")
    for cost in costs:
        figures = f"{'-':>12}"
        if cost.noise_multiplier is not None:
            figures = f"{rounded_up(cost.noise_multiplier, decimals=6):>12}"
            figures += f"{cost.per_run_epsilon:12.4f}{cost.per_run_delta:12.3g}"
        print(f"{cost.method:26}{figures}\n  {cost.note}")
    met = [cost for cost in costs if cost.noise_multiplier is not None]
    if met:
        print(f"\nleast noise: {min(met, key=lambda cost: cost.noise_multiplier or math.inf).method}")
    return 0
