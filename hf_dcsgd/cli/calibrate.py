"""`hf-dcsgd calibrate`: the noise that a run needs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from hf_dcsgd.cli.shared import Subparsers, add_planning_arguments, add_subcommand, training_figures
from hf_dcsgd.clipping import STRATEGIES
from hf_dcsgd.reporting.format import rounded_up
from hf_dcsgd.validation import require

if TYPE_CHECKING:
    from hf_dcsgd.privacy.plan import PrivacyUnit


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
        "  hf-dcsgd calibrate --epsilon 2 --dataset-size 104743 --batch-size 256 --epochs 5\n"
        "persons with several rows, clipped as a whole or row by row:\n"
        "  hf-dcsgd calibrate --epsilon 8 --dataset-size 60000 --units 20000 --rows-per-unit 3 \\\n"
        "      --batch-size 256 --epochs 5",
    )
    add_planning_arguments(parser)
    parser.add_argument(
        "--accountant",
        default="rdp",
        help="which accountant to calibrate with; another is shown beside it (default: rdp, as in the paper; pld is "
        "tighter: less noise for the same guarantee)",
    )
    parser.add_argument(
        "--clipping",
        choices=STRATEGIES,
        default="dc_sgd_e",
        help="the strategy for the clipping threshold; σ_T = σ for those without a side release (default: dc_sgd_e)",
    )
    parser.add_argument(
        "--clipping-options",
        type=_mapping,
        default={},
        metavar="JSON",
        help="options of that strategy, such as '{\"histogram_noise_multiplier\": 6}'",
    )
    parser.add_argument(
        "--units",
        type=int,
        metavar="U",
        help="number of units of privacy that the rows belong to (privacy_unit): their noise, by PLD, for clipping "
        "units as a whole and for clipping row by row, at the same B and T; epochs and δ count units",
    )
    parser.add_argument(
        "--rows-per-unit",
        type=int,
        metavar="K",
        help="max_rows_per_unit; K rows of each unit are used with row clipping",
    )


def _mapping(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except json.JSONDecodeError:
        options = None
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON mapping, got {text!r}")
    return options


def run(arguments: argparse.Namespace) -> int:
    from hf_dcsgd.privacy.accountants import ACCOUNTANTS

    require(
        (arguments.units is None) == (arguments.rows_per_unit is None),
        "expected both or neither of --units and --rows-per-unit, got "
        f"{arguments.units} and {arguments.rows_per_unit}",
    )
    if arguments.units is not None:
        return _run_for_units(arguments)
    _, steps, delta = training_figures(arguments)
    result = _calibrated(arguments, arguments.accountant, steps, delta)
    other = next(name for name in ACCOUNTANTS if name != arguments.accountant)
    try:
        result["other"] = _calibrated(arguments, other, steps, delta)
    except ValueError as error:  # the figures asked for stand without the second opinion
        unknown = dict.fromkeys(("noise_multiplier", "grad_noise_multiplier"))
        result["other"] = {**result, **unknown, "side_noise_multipliers": {}, "accountant": other}
        print(f"note: nothing by {other}: {error}", file=sys.stderr)
    print(json.dumps(result, indent=2) if arguments.json else _calibrate_table(arguments, result))
    return 0


def _run_for_units(arguments: argparse.Namespace) -> int:
    """Calibrate both ways to protect a unit of several rows, and say which needs less noise."""
    from hf_dcsgd.privacy.plan import UNIT_CLIPPINGS, PrivacyUnit

    rows, most = arguments.dataset_size, arguments.rows_per_unit
    require(arguments.units <= rows, f"expected --units <= --dataset-size, got {arguments.units} and {rows}")
    arguments.dataset_size = arguments.units
    _, steps, delta = training_figures(arguments)
    result: dict[str, Any] = {}
    for clipping in UNIT_CLIPPINGS:
        unit = PrivacyUnit("unit", arguments.units, most, clipping)
        arguments.dataset_size = min(rows, arguments.units * most) if unit.by_row else arguments.units
        result[clipping] = _calibrated(arguments, "pld", steps, delta, unit)
    sigmas = {clipping: found["noise_multiplier"] for clipping, found in result.items()}
    result["smaller"] = min(sigmas, key=sigmas.__getitem__)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    print(
        f"(ε = {arguments.epsilon:g}, δ = {delta:.4g})-DP for adding or removing one of {arguments.units} units with "
        f"all of its rows\nT = {steps} steps, B = {arguments.batch_size}, at most {most} rows of a unit, by PLD\n"
    )
    for clipping, found in result.items():
        if clipping in UNIT_CLIPPINGS:
            shown = f"privacy_unit_clipping={clipping}"
            print(f"{shown:28}q = {found['sampling_rate']:<12.6g}σ = {_figure(found['noise_multiplier'])}")
    left = f"if the cap leaves {arguments.dataset_size} rows to be drawn one by one"
    print(f"\nprivacy_unit_clipping={result['smaller']} needs less noise, {left}")
    return 0


def _calibrated(
    arguments: argparse.Namespace, accountant: str, steps: int, delta: float, unit: PrivacyUnit | None = None
) -> dict[str, Any]:
    from hf_dcsgd.privacy.plan import PrivacyPlan

    try:
        plan = PrivacyPlan.create(
            dataset_size=arguments.dataset_size,
            expected_batch_size=arguments.batch_size,
            steps=steps,
            num_parameters=1,  # σ does not depend on it
            target_epsilon=arguments.epsilon,
            target_delta=delta,
            accountant=accountant,
            clipping=arguments.clipping,
            settings=arguments.clipping_options,
            unit=unit,
        )
    except TypeError as error:  # an option of the wrong kind
        raise ValueError(str(error)) from error
    return {
        "noise_multiplier": plan.noise_multiplier,
        "grad_noise_multiplier": plan.grad_noise_multiplier,
        "side_noise_multipliers": plan.side_noise_multipliers,
        "steps": steps,
        "sampling_rate": plan.sampling_rate,
        "epsilon": arguments.epsilon,
        "delta": delta,
        "accountant": accountant,
    }


def _calibrate_table(arguments: argparse.Namespace, result: dict[str, Any]) -> str:
    columns = (result, result["other"])
    lines = [
        f"(ε = {arguments.epsilon:g}, δ = {result['delta']:.4g})-DP with clipping {arguments.clipping}",
        f"T = {result['steps']} steps at q = {arguments.batch_size}/{arguments.dataset_size} "
        f"= {result['sampling_rate']:.6g}",
        "",
        f"{'':50}" + "".join(f"{column['accountant']:>12}" for column in columns),
    ]
    for key, meaning in (("noise_multiplier", "σ, accounted"), ("grad_noise_multiplier", "σ_T, on the gradient")):
        lines.append(f"{key:28}{meaning:22}" + "".join(f"{_figure(column[key]):>12}" for column in columns))
    for key in result["side_noise_multipliers"]:
        sides = (column["side_noise_multipliers"].get(key) for column in columns)
        lines.append(f"{key:28}{'on the side release':22}" + "".join(f"{_figure(side):>12}" for side in sides))
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "-" if value is None else rounded_up(value, decimals=6)
