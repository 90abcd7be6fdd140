"""`hf-dcsgd report`: the privacy report of a run, finished or not."""

import argparse
import json

from hf_dcsgd.cli.shared import Subparsers, add_subcommand


def add_parser(subparsers: Subparsers) -> None:
    parser = add_subcommand(
        subparsers,
        "report",
        run,
        help="the privacy report of a run, finished or not",
        description="Writes privacy_report.json and privacy_report.html into the output directory of a run,\n"
        "from its ledger and the values it released. A run that was killed has one too.",
        epilog="example:\n  hf-dcsgd report out/",
    )
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", help="where the run keeps privacy_ledger.jsonl")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, and write nothing")


def run(arguments: argparse.Namespace) -> int:
    from hf_dcsgd.privacy.ledger import LedgerError
    from hf_dcsgd.reporting.report import build_report, format_spending, write_report
    from hf_dcsgd.runs.trace import read_trace

    try:
        report = build_report(arguments.output_dir)
        path = None
        if not arguments.json:
            path = write_report(report, read_trace(arguments.output_dir), arguments.output_dir)
    except (LedgerError, OSError) as error:
        raise ValueError(str(error)) from error
    if arguments.json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
        return 0
    print(report["guarantee"]["sentence"])
    if report["earlier_runs"]:
        print(format_spending(report))
    print(path)
    return 0
