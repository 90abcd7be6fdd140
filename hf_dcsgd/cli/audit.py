"""`hf-dcsgd audit`: try to refute the guarantee."""

import argparse
import json

from hf_dcsgd.cli.shared import Subparsers, add_json_argument, add_subcommand
from hf_dcsgd.clipping import STRATEGIES


def add_parser(subparsers: Subparsers) -> None:
    parser = add_subcommand(
        subparsers,
        "audit",
        run,
        help="try to refute the guarantee of this installation",
        description="Tries to refute the guarantee, by running the trainer on a linear model with canaries.\n\n"
        "  level 0  replays a step with and without a canary, noise taken out: sensitivities\n"
        "  level 1  measures the noise: scale, distribution, repetition\n"
        "  level 2  plays the adversary: a lower bound on μ, against the claimed 1/σ\n"
        "  level 3  levels 0 and 1 over two processes\n"
        "  level 4  lets an adversary write the dataset, the collator and one record\n\n"
        "All of it takes about five minutes on two cores, most of them level 2 (--level 0 1 4: seconds).\n"
        "Exit code 1 when a level fails. For a trainer of your own see hf_dcsgd.audit.audit_trainer.",
    )
    parser.add_argument(
        "--clipping", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), help="strategies (default: all)"
    )
    parser.add_argument(
        "--level", nargs="+", type=int, choices=range(5), default=[0, 1, 2, 3, 4], help="levels (default: all)"
    )
    parser.add_argument(
        "--trials", type=int, default=4000, metavar="N", help="level 2: trials with and without the canary (4000)"
    )
    parser.add_argument("--verbose", action="store_true", help="show every check, not only those that fail")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    from hf_dcsgd.audit import audit_strategy
    from hf_dcsgd.audit.processes import audit_processes
    from hf_dcsgd.validation import require

    require(arguments.trials >= 100, f"expected --trials >= 100, got {arguments.trials}")
    reports = []
    for clipping in arguments.clipping:
        found = audit_strategy(clipping, [level for level in arguments.level if level != 3], arguments.trials)
        if 3 in arguments.level:
            found.append(audit_processes(clipping))
        reports += found
        if not arguments.json:
            print("\n".join(str(report) if arguments.verbose else report.summary() for report in found), flush=True)
    if arguments.json:
        print(json.dumps([report.to_dict() for report in reports], indent=2))
    failed = sum(not report.passed for report in reports)
    if not arguments.json:
        print(f"{len(reports) - failed} of {len(reports)} audits passed")
    return 1 if failed else 0
