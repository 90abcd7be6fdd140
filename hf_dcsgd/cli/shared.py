"""Arguments and figures that several subcommands share."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

Subparsers = Any  # argparse keeps the type of add_subparsers() to itself


def add_subcommand(
    subparsers: Subparsers, name: str, run: Callable[[argparse.Namespace], int], **texts: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, formatter_class=argparse.RawDescriptionHelpFormatter, **texts
    )
    parser.set_defaults(run=run, prog=parser.prog)
    return parser


def add_planning_arguments(parser: argparse.ArgumentParser) -> None:
    """Ask for the budget, the training that it is for, and whether the answer is wanted as JSON."""
    parser.add_argument("--epsilon", type=float, required=True, metavar="EPS", help="the total ε to stay within")
    parser.add_argument("--delta", type=float, metavar="DELTA", help="the total δ (default: 1 / dataset size)")
    parser.add_argument("--dataset-size", type=int, required=True, metavar="N", help="number of training examples")
    parser.add_argument(
        "--batch-size",
        type=int,
        required=True,
        metavar="B",
        help="expected size of a logical batch: per-device batch size × gradient accumulation steps × processes",
    )
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--epochs", type=float, metavar="E", help="length of a run; T = ceil(E × floor(N / B)) steps")
    length.add_argument(
        "--steps", type=int, metavar="T", help="length of a run in optimizer steps, instead of --epochs"
    )
    add_json_argument(parser)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def training_figures(arguments: argparse.Namespace) -> tuple[float, int, float]:
    """Return (q, T, δ) from the arguments of `add_planning_arguments`; a δ that nobody asked for is noted."""
    from hf_dcsgd.privacy.accounting import planned_steps
    from hf_dcsgd.validation import require, require_count, require_fraction

    size, batch = arguments.dataset_size, arguments.batch_size
    require(batch >= 1, f"expected --batch-size >= 1, got {batch}")
    require(size >= batch, f"expected --dataset-size >= --batch-size, got {size} and {batch}")
    if arguments.steps is None:
        steps = planned_steps(size, batch, arguments.epochs)
    else:
        steps = require_count("steps", arguments.steps)
    if arguments.delta is None:
        print(f"note: delta is 1/N = {1 / size:.4g} by default; a smaller one is better practice", file=sys.stderr)
        return batch / size, steps, require_fraction("delta", 1 / size)
    return batch / size, steps, require_fraction("delta", arguments.delta)
