"""The command `hf-dcsgd`: figures to decide by before a run, and checks after it.

A subcommand is one function that declares its arguments and one that carries it out; `_SUBCOMMANDS` lists them. A
wrong argument or a budget that cannot be met is one line on stderr and exit code 2. What is heavy to import is
imported by the function that needs it, so that `--help` stays quick.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

Subparsers = Any  # argparse keeps the type of add_subparsers() to itself

_HISTOGRAM_STRATEGIES = ("dc_sgd_e", "dc_sgd_p")
_STRATEGIES = (*_HISTOGRAM_STRATEGIES, "fixed", "andrew", "du", "auto_clip")
_DOCTOR_TASKS = (
    *("text-classification", "token-classification", "question-answering", "fill-mask", "text-generation"),
    *("text2text-generation", "image-classification"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Carries out one subcommand and returns the exit code; like argparse, exits by itself on wrong usage."""
    parser = _OneLineErrorParser(
        prog="hf-dcsgd",
        description="Differentially private fine-tuning with the Hugging Face Trainer: its arithmetic and its checks.",
        epilog="`hf-dcsgd COMMAND --help` explains a command.",
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for declare in _SUBCOMMANDS:
        declare(subparsers)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.carry_out(arguments))
    except ValueError as error:
        print(f"{arguments.prog}: error: {error}", file=sys.stderr)
        return 2


class _OneLineErrorParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _add_subcommand(
    subparsers: Subparsers, name: str, carry_out: Callable[[argparse.Namespace], int], **texts: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, formatter_class=argparse.RawDescriptionHelpFormatter, **texts
    )
    parser.set_defaults(carry_out=carry_out, prog=parser.prog)
    return parser


def _add_budget_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epsilon", type=float, required=True, metavar="EPS", help="the total ε to stay within")
    parser.add_argument("--delta", type=float, metavar="DELTA", help="the total δ (default: 1 / dataset size)")


def _add_training_arguments(parser: argparse.ArgumentParser) -> None:
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


def _add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _training_figures(arguments: argparse.Namespace) -> tuple[float, int, float]:
    """(q, T, δ) from the arguments of `_add_training_arguments` and `_add_budget_arguments`."""
    from .accounting import planned_steps
    from .validation import require, require_count, require_fraction

    size, batch = arguments.dataset_size, arguments.batch_size
    require(batch >= 1, f"expected --batch-size >= 1, got {batch}")
    require(size >= batch, f"expected --dataset-size >= --batch-size, got {size} and {batch}")
    if arguments.steps is None:
        steps = planned_steps(size, batch, arguments.epochs)
    else:
        steps = require_count("steps", arguments.steps)
    delta = 1 / size if arguments.delta is None else arguments.delta
    return batch / size, steps, require_fraction("delta", delta)


def _note_default_delta(arguments: argparse.Namespace) -> None:
    if arguments.delta is None:
        shown = f"1/N = {1 / arguments.dataset_size:.4g}"
        print(f"note: delta is {shown} by default; a smaller one is better practice", file=sys.stderr)


def _rounded_up(value: float | None) -> str:
    """Six decimals, never less than the value: a σ copied from the screen must not spend more than its budget."""
    return "-" if value is None else f"{math.ceil(value * 1e6) / 1e6:.6f}"


# --- calibrate -------------------------------------------------------------------------------------------------------


def _declare_calibrate(subparsers: Subparsers) -> None:
    parser = _add_subcommand(
        subparsers,
        "calibrate",
        _calibrate,
        help="the noise that a run needs to stay within (ε, δ)",
        description="The noise that a run needs to stay within (ε, δ), by both accountants.\n\n"
        "σ is what the accountant sees. The side release of a strategy (its histogram, say)\n"
        "takes a share of it, and the gradient gets noise of multiplier σ_T for the rest:\n"
        "1/σ² = 1/σ_T² + 1/σ_H². Both together cost what σ alone would cost.",
        epilog="example (QNLI, as in the paper):\n"
        "  hf-dcsgd calibrate --epsilon 2 --dataset-size 104743 --batch-size 256 --epochs 5",
    )
    _add_budget_arguments(parser)
    _add_training_arguments(parser)
    parser.add_argument(
        "--accountant",
        choices=("rdp", "pld"),
        default="rdp",
        help="which accountant to calibrate with; the other is shown beside it (default: rdp, as in the paper; "
        "pld is tighter: less noise for the same guarantee)",
    )
    parser.add_argument(
        "--clipping",
        choices=_STRATEGIES,
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
    _add_json_argument(parser)


def _calibrate(arguments: argparse.Namespace) -> int:
    from .validation import require

    side = arguments.histogram_noise_multiplier
    require(
        side is None or arguments.clipping in _HISTOGRAM_STRATEGIES,
        f"--clipping {arguments.clipping} releases no histogram, got --histogram-noise-multiplier {side}",
    )
    sampling_rate, steps, delta = _training_figures(arguments)
    result = _calibrated(arguments, arguments.accountant, sampling_rate, steps, delta)
    other = "pld" if arguments.accountant == "rdp" else "rdp"
    try:
        result["other"] = _calibrated(arguments, other, sampling_rate, steps, delta)
    except ValueError as error:  # the figures asked for stand without the second opinion
        multipliers = ("noise_multiplier", "grad_noise_multiplier", "histogram_noise_multiplier")
        result["other"] = {**result, **dict.fromkeys(multipliers), "accountant": other}
        print(f"note: nothing by {other}: {error}", file=sys.stderr)
    _note_default_delta(arguments)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print(_calibrate_table(arguments, result))
    return 0


def _calibrated(
    arguments: argparse.Namespace, accountant: str, sampling_rate: float, steps: int, delta: float
) -> dict[str, Any]:
    from . import accounting

    sigma = accounting.calibrate_noise_multiplier(
        epsilon=arguments.epsilon, delta=delta, sampling_rate=sampling_rate, steps=steps, accountant=accountant
    )
    histogram = None
    sides = {}
    if arguments.clipping in _HISTOGRAM_STRATEGIES:
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
    if arguments.clipping in _HISTOGRAM_STRATEGIES:
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
        lines.append(f"{key:28}{meaning:22}" + "".join(f"{_rounded_up(column[key]):>12}" for column in columns))
    return "\n".join(lines)


# --- tuning-cost -----------------------------------------------------------------------------------------------------


def _declare_tuning_cost(subparsers: Subparsers) -> None:
    parser = _add_subcommand(
        subparsers,
        "tuning-cost",
        _tuning_cost,
        help="the noise that each of several tuning runs needs to stay within one (ε, δ)",
        description="The noise that each of several tuning runs needs, so that choosing the best of\n"
        "them stays within one (ε, δ), by four methods. Every method is a guarantee about its\n"
        "own procedure, which the output names; the figures hold only if it is followed.",
        epilog="example (ten clipping thresholds on QNLI, as in the paper):\n"
        "  hf-dcsgd tuning-cost --epsilon 2 --runs 10 --dataset-size 104743 --batch-size 256 --epochs 5",
    )
    _add_budget_arguments(parser)
    parser.add_argument(
        "--runs", type=int, required=True, metavar="G", help="number of runs; the mean where it is drawn at random"
    )
    _add_training_arguments(parser)
    parser.add_argument(
        "--tnb-shape",
        type=float,
        default=1.0,
        metavar="ETA",
        help="shape of the truncated negative binomial: 0 logarithmic, 1 geometric; smaller is cheaper but makes few "
        "runs likelier (default: 1)",
    )
    _add_json_argument(parser)


def _tuning_cost(arguments: argparse.Namespace) -> int:
    from .tuning_cost import tuning_costs
    from .validation import require_count

    require_count("runs", arguments.runs)
    sampling_rate, steps, delta = _training_figures(arguments)
    costs = tuning_costs(
        epsilon=arguments.epsilon,
        delta=delta,
        runs=arguments.runs,
        sampling_rate=sampling_rate,
        steps=steps,
        tnb_shape=arguments.tnb_shape,
    )
    _note_default_delta(arguments)
    if arguments.json:
        keys = ("method", "noise_multiplier", "per_run_epsilon", "per_run_delta")
        print(json.dumps([{key: getattr(cost, key) for key in keys} for cost in costs], indent=2))
        return 0
    print(f"(ε = {arguments.epsilon:g}, δ = {delta:.4g})-DP in total for {arguments.runs} runs of {steps} steps")
    print(f"\n{'method':26}{'σ of a run':>12}{'ε of a run':>12}{'at δ':>12}")
    for cost in costs:
        figures = f"{_rounded_up(cost.noise_multiplier):>12}"
        if cost.noise_multiplier is not None:
            figures += f"{cost.per_run_epsilon:12.4f}{cost.per_run_delta:12.3g}"
        print(f"{cost.method:26}{figures}\n  {cost.note}")
    met = [cost for cost in costs if cost.noise_multiplier is not None]
    if met:
        print(f"\nleast noise: {min(met, key=lambda cost: cost.noise_multiplier or math.inf).method}")
    return 0


# --- report ----------------------------------------------------------------------------------------------------------


def _declare_report(subparsers: Subparsers) -> None:
    parser = _add_subcommand(
        subparsers,
        "report",
        _report,
        help="the privacy report of a run, finished or not",
        description="Writes privacy_report.json and privacy_report.html into the output directory of a run,\n"
        "from its ledger and the values it released. A run that was killed has one too.",
        epilog="example:\n  hf-dcsgd report out/",
    )
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", help="where the run keeps privacy_ledger.jsonl")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, and write nothing")


def _report(arguments: argparse.Namespace) -> int:
    from .ledger import LedgerError
    from .report import build_report, write_report

    try:
        if arguments.json:
            print(json.dumps(build_report(arguments.output_dir), indent=2, ensure_ascii=False))
            return 0
        path = write_report(arguments.output_dir)
    except (LedgerError, OSError) as error:
        raise ValueError(str(error)) from error
    print(build_report(arguments.output_dir)["guarantee"]["sentence"])
    print(path)
    return 0


# --- doctor ----------------------------------------------------------------------------------------------------------


def _declare_doctor(subparsers: Subparsers) -> None:
    parser = _add_subcommand(
        subparsers,
        "doctor",
        _doctor,
        help="what private training would do with a model: layers, refusals, a check, time and memory",
        description="What private training would do with a model: which parameters it would train, how the\n"
        "gradients of single examples are computed, what it would refuse and why, whether they agree\n"
        "with autograd on made-up input, and the time and memory of one step. Touches no data.\n"
        "Exit code 1 when training would be refused.",
        epilog="example:\n  hf-dcsgd doctor --model bert-base-uncased --trainable-layers last:2 --batch-size 16",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="PATH_OR_ID",
        help="a folder written by save_pretrained, or a model on the Hub",
    )
    parser.add_argument(
        "--task",
        choices=_DOCTOR_TASKS,
        help="which head the model gets (default: that of its configuration, else text-classification)",
    )
    parser.add_argument(
        "--trainable-layers",
        metavar="LAYERS",
        help="last_encoder_pooler_classifier (default), last:k, head, bias, all, or module names and globs "
        "separated by commas",
    )
    parser.add_argument(
        "--batch-size", type=int, default=32, metavar="B", help="examples per device and forward pass (default: 32)"
    )
    parser.add_argument(
        "--sequence-length", type=int, default=128, metavar="L", help="tokens of a made-up example (default: 128)"
    )
    _add_json_argument(parser)


def _doctor(arguments: argparse.Namespace) -> int:
    from .doctor import describe, diagnose
    from .validation import require

    require(arguments.batch_size >= 1, f"expected --batch-size >= 1, got {arguments.batch_size}")
    require(arguments.sequence_length >= 2, f"expected --sequence-length >= 2, got {arguments.sequence_length}")
    found = diagnose(
        arguments.model,
        task=arguments.task,
        trainable_layers=arguments.trainable_layers,
        batch_size=arguments.batch_size,
        sequence_length=arguments.sequence_length,
    )
    print(json.dumps(found, indent=2, ensure_ascii=False) if arguments.json else describe(found))
    return 1 if found["refused"] else 0


# --- audit -----------------------------------------------------------------------------------------------------------


def _declare_audit(subparsers: Subparsers) -> None:
    parser = _add_subcommand(
        subparsers,
        "audit",
        _audit,
        help="try to refute the guarantee of this installation",
        description="Tries to refute the guarantee, by running the trainer on a linear model with canaries.\n\n"
        "  level 0  replays a step with and without a canary, noise taken out: sensitivities\n"
        "  level 1  measures the noise: scale, distribution, repetition\n"
        "  level 2  plays the adversary: a lower bound on μ, against the claimed 1/σ\n"
        "  level 3  levels 0 and 1 over two processes\n\n"
        "Exit code 1 when a level fails. For a trainer of your own see hf_dcsgd.audit.audit_trainer.",
    )
    parser.add_argument(
        "--clipping", nargs="+", choices=_STRATEGIES, default=list(_STRATEGIES), help="strategies (default: all)"
    )
    parser.add_argument(
        "--level", nargs="+", type=int, choices=range(4), default=[0, 1, 2, 3], help="levels (default: all)"
    )
    parser.add_argument(
        "--trials", type=int, default=4000, metavar="N", help="level 2: trials with and without the canary (4000)"
    )
    _add_json_argument(parser)


def _audit(arguments: argparse.Namespace) -> int:
    from .audit import audit_strategy
    from .audit.processes import audit_processes
    from .validation import require

    require(arguments.trials >= 100, f"expected --trials >= 100, got {arguments.trials}")
    reports = []
    for clipping in arguments.clipping:
        found = audit_strategy(clipping, [level for level in arguments.level if level < 3], arguments.trials)
        if 3 in arguments.level:
            found.append(audit_processes(clipping))
        reports += found
        if not arguments.json:
            print("\n".join(map(str, found)), flush=True)
    if arguments.json:
        print(json.dumps([report.to_dict() for report in reports], indent=2))
    failed = sum(not report.passed for report in reports)
    if not arguments.json:
        print(f"{len(reports) - failed} of {len(reports)} audits passed")
    return 1 if failed else 0


_SUBCOMMANDS: tuple[Callable[[Subparsers], None], ...] = (
    _declare_calibrate,
    _declare_tuning_cost,
    _declare_doctor,
    _declare_report,
    _declare_audit,
)


if __name__ == "__main__":
    sys.exit(main())
