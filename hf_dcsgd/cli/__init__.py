"""The command `hf-dcsgd`: figures to decide by before a run, and checks after it.

A subcommand is a file here, with a function that declares its arguments and one that carries it out. A wrong argument
or a budget that cannot be met is one line on stderr and exit code 2. What is heavy to import is imported by the
function that needs it, so that `--help` stays quick.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from hf_dcsgd.cli import audit, cache, calibrate, doctor, report, synthesize, train, tuning_cost


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one subcommand and return the exit code; like argparse, exit by itself on wrong usage."""
    parser = _OneLineErrorParser(
        prog="hf-dcsgd",
        description="Differentially private fine-tuning with the Hugging Face Trainer.",
        epilog="`hf-dcsgd COMMAND --help` explains a command.",
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for subcommand in (train, synthesize, calibrate, tuning_cost, doctor, report, audit, cache):
        subcommand.add_parser(subparsers)
    arguments, others = parser.parse_known_args(argv)
    if others and not hasattr(arguments, "takes_others"):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    arguments.others = others
    try:
        return int(arguments.run(arguments))
    except ValueError as error:
        print(f"{arguments.prog}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader (`head`, say) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _OneLineErrorParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")
