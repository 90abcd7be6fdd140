"""`hf-dcsgd synthesize`: a synthetic table of labeled texts from a private one, with its card."""

import argparse

from hf_dcsgd.cli.shared import Subparsers, add_subcommand

# The options that most runs need; their values are checked by the job.
_OPTIONS = (
    ("model_name_or_path", "MODEL", "a causal language model on the Hub, or a folder"),
    ("train_file", "FILE", "the private rows: csv, tsv, json, jsonl or parquet"),
    ("output_dir", "DIR", "where model, report and the folder synthetic/ go"),
    ("target_epsilon", "EPS", "ε of everything together (default: 8)"),
    ("num_rows", "N", "how many synthetic rows are wanted (default: 1000)"),
    ("label_shares", "SHARES", "noised (counted, and charged; default), uniform, or ham=0.8,spam=0.2"),
    ("metadata_columns", "COLUMNS", "columns of few values that texts are sampled for, beside the label"),
    ("validation_file", "FILE", "real rows to compare with, in private_evaluation.json"),
    ("output_format", "FORMAT", "jsonl (default), csv or parquet"),
)


def add_parser(subparsers: Subparsers) -> None:
    parser = add_subcommand(
        subparsers,
        "synthesize",
        run,
        help="make a synthetic table of labeled texts from a private one",
        usage="hf-dcsgd synthesize --model_name_or_path MODEL --train_file FILE --output_dir DIR … | FILE.yaml",
        description="Trains a language model privately on labeled texts, samples others for each label, and writes\n"
        "them with a dataset card that says what they cost. Options may stand in a YAML or JSON file.",
        epilog="example:\n  hf-dcsgd synthesize --model_name_or_path HuggingFaceTB/SmolLM2-135M \\\n"
        "      --train_file messages.csv --num_rows 1000 --target_epsilon 8 --output_dir out",
    )
    for name, metavar, text in _OPTIONS:
        parser.add_argument(f"--{name}", metavar=metavar, default=argparse.SUPPRESS, help=text)
    parser.add_argument("--help_all", action="store_true", help="show all options, those of the training as well")
    parser.allow_abbrev = False  # a shortened name may be another option of the job
    parser.set_defaults(takes_others=True)


def run(arguments: argparse.Namespace) -> int:
    from hf_dcsgd.jobs.synthesis import job

    names = [name for name, _, _ in _OPTIONS if hasattr(arguments, name)]
    given = [part for name in names for part in (f"--{name}", getattr(arguments, name))]
    # A file of options stays in front, so that those of the command line have the last word.
    file = [entry for entry in arguments.others[:1] if not entry.startswith("-")]
    argv = ["--help"] if arguments.help_all else [*file, *given, *arguments.others[len(file) :]]
    return job.main(argv, prog=arguments.prog)
