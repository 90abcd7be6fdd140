#!/usr/bin/env python
"""Train a language model to put restaurant descriptions of the E2E NLG challenge into words, at several budgets.

    python e2e.py --data_dir e2e-nlg --model_name_or_path gpt2 --train_file trainset.csv --budgets none,8,3 -- \\
        --recipe auto --max_seq_length 128

Each result (loss per token, BLEU against all references, samples) is one JSON file under --results; what is there is
not run again. Options after `--` are those of run_sft.py.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from hf_dcsgd.jobs import language_modeling
from hf_dcsgd.jobs.errors import exit_code_of

RESULTS = Path(__file__).parent / "results"
NON_PRIVATE = "none"
# How the values of an attribute are introduced; the others speak for themselves.
WORDS = {"near": "near ", "familyFriendly": "family ", "customer rating": "rating ", "priceRange": "price "}


def as_prompt(meaning: str) -> str:
    """Write a description such as `name[Blue Spice], near[Cotto]` in few tokens: `Blue Spice; near Cotto`."""
    found = re.findall(r"([^,\[]+)\[([^\]]*)\]", meaning)
    return "; ".join(f"{WORDS.get(name.strip(), '')}{value}" for name, value in found)


def write_rows(source: Path, target: Path, every: int = 1) -> Path:
    """Write E2E's file as prompts with completions: every so many of its descriptions, with all references."""
    with source.open(encoding="utf-8-sig", newline="") as file:
        rows = [(as_prompt(row["mr"]), row["ref"]) for row in csv.DictReader(file)]
    chosen = set(list(dict.fromkeys(prompt for prompt, _ in rows))[::every])
    lines = [json.dumps({"prompt": p, "completion": c}, ensure_ascii=False) for p, c in rows if p in chosen]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return target


def run_budget(budget: str, options: argparse.Namespace, extra: list[str]) -> dict[str, Any]:
    """Train, evaluate and generate at one budget; return what is kept of it."""
    output = Path(options.output_dir) / f"{options.name}_{budget}_seed={options.seed}"
    data, source = output / "data", Path(options.data_dir)
    train = write_rows(source / options.train_file, data / "train.jsonl")
    test = write_rows(source / options.test_file, data / "test.jsonl", options.every)
    start, cpu = time.perf_counter(), time.process_time()
    metrics = language_modeling.run(
        [
            *("--model_name_or_path", options.model_name_or_path, "--output_dir", str(output)),
            *("--seed", str(options.seed)),
            *("--train_file", str(train), "--validation_file", str(test), "--test_file", str(test)),
            *("--do_train", "--do_eval", "--do_predict", "--save_strategy", "no", "--report_to", "none", "--new_run"),
            *(["--non_private"] if budget == NON_PRIVATE else ["--target_epsilon", budget]),
            *extra,
        ],
        prog="e2e.py",
    )  # fmt: skip
    predictions = (output / language_modeling.PREDICTIONS_FILENAME).read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in predictions[:: max(1, len(predictions) // options.samples)]]
    return {
        "model": Path(options.model_name_or_path).name,
        "budget": budget,
        "seed": options.seed,
        "options": extra,
        "metrics": metrics,
        "seconds": round(time.perf_counter() - start),
        "cpu_seconds": round(time.process_time() - cpu),
        "samples": [{**sample, "references": sample["references"][:2]} for sample in samples[: options.samples]],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", required=True, help="folder with E2E's csv files (columns mr, ref)")
    parser.add_argument("--model_name_or_path", required=True, help="a causal language model")
    parser.add_argument("--name", help="what results are called (default: the model's name)")
    parser.add_argument("--train_file", default="devset.csv", help="training file (default: %(default)s)")
    parser.add_argument("--test_file", default="testset_w_refs.csv", help="test file (default: %(default)s)")
    parser.add_argument(
        "--budgets", default="none,8,3", help="values of ε; none is not private (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of initialization (default: %(default)s)")
    parser.add_argument("--every", type=int, default=1, help="test on every so many descriptions (default: all)")
    parser.add_argument(
        "--samples", type=int, default=8, help="how many generated texts are kept (default: %(default)s)"
    )
    parser.add_argument("--output_dir", default="outputs/e2e", help="where models go (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results go")
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, extra = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    options.name = options.name or Path(options.model_name_or_path).name

    def run_all() -> None:
        for budget in options.budgets.split(","):
            path = options.results / f"e2e_{options.name}_eps={budget}_seed={options.seed}.json"
            if not path.exists():
                result = run_budget(budget, options, extra)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(path)

    return exit_code_of(run_all)


if __name__ == "__main__":
    sys.exit(main())
