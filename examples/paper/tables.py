"""Run the tables of docs/results.md, one run after another; what is there already is not repeated.

    python examples/paper/tables.py sst2 --data DATA_FOLDER                  # (a)
    python examples/paper/tables.py pairs --data DATA_FOLDER                 # (b)
    python examples/paper/tables.py sst2 --data DATA_FOLDER --rows 20000     # the same on fewer rows
    python examples/paper/tables.py charged --data DATA_FOLDER               # (c) DP-SGD with its grid charged
    python examples/paper/tables.py insensitivity --data DATA_FOLDER         # (d) bins, σ_H and C_0
    python examples/paper/tables.py travel --data DATA_FOLDER                # the recipe at other learning rates
    python examples/paper/tables.py scale --data DATA_FOLDER                 # the release divided by C, or not
    python examples/paper/tables.py thresholds --data DATA_FOLDER            # the recipe with other thresholds
    python examples/paper/tables.py held_out --data DATA_FOLDER              # the recipe where it was not derived
    python examples/paper/tables.py scratch --data DATA_FOLDER               # (f) MNIST, NAMES and CIFAR-10
    python examples/paper/tables.py models --data DATA_FOLDER                # another model than all-MiniLM-L6-v2
    python examples/paper/tables.py sst2 --data DATA_FOLDER --list           # what there is, and what is missing
    python examples/paper/tables.py sst2 --data DATA_FOLDER --only sst2_all_recipe_eps=2 --results MINE   # run again

Each result is a JSON file under `results`, written when its run ends; interrupted, the script goes on where it
stopped. The rows that matter most come first, so that a table that is not finished can be read. `--only` takes the
runs whose names begin like these, and another folder of results has none of them yet. The best threshold of a grid is
run with further seeds first, when the script is called again. `results_page.py` makes the page.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from reading import CONTROL, by_options, chosen, read_results, winner
from runs import RESULTS, Setting, carry_out, write

EPSILONS = (2.0, 8.0, 4.0)
# The candidates of the paper, the most telling ones first.
THRESHOLDS = (1.0, 0.1, 10.0, 0.5, 4.0, 0.2, 2.0, 0.8, 6.0, 8.0)
PERCENTILES = (0.5, 0.1, 0.9, 0.3, 0.7, 0.2, 0.4, 0.6, 0.8)
NON_PRIVATE = [
    {"learning_rate": rate, "num_train_epochs": 3, "per_device_train_batch_size": 64, "warmup_steps": 0.1}
    for rate in (3e-4, 1e-4, 1e-3)
]
SEEDS = 3


def by_method(task: str, rows: int | None) -> Iterator[Setting]:
    """Yield every method at every ε: (a) and (b)."""

    def at(method: str, epsilon: float | None, seed: int = 0, **options: Any) -> Setting:
        return Setting(task, method, epsilon, options, rows, seed)

    for epsilon in EPSILONS:
        yield at("recipe", epsilon)
        yield at("dc_sgd_e", epsilon)
        yield from (at("fixed", epsilon, clip_threshold=value) for value in THRESHOLDS[:3])
        yield at("auto_clip", epsilon)
        for seed in range(1, SEEDS):
            for method in ("recipe", "dc_sgd_e", "auto_clip"):
                yield at(method, epsilon, seed)
        if epsilon == EPSILONS[0]:
            yield from (at("non_private", None, **options) for options in NON_PRIVATE)
    for epsilon in EPSILONS:
        yield from (at("fixed", epsilon, clip_threshold=value) for value in THRESHOLDS[3:])
        yield at("dc_sgd_p", epsilon, percentile=PERCENTILES[0])
        yield at("andrew", epsilon)
        yield at("du", epsilon)
        for value in further_seeds(task, rows, epsilon):
            yield from (at("fixed", epsilon, seed, clip_threshold=value) for seed in range(1, SEEDS))
    for epsilon in EPSILONS:
        yield from (at("dc_sgd_p", epsilon, percentile=value) for value in PERCENTILES[1:])


def further_seeds(task: str, rows: int | None, epsilon: float) -> list[float]:
    """Return the C of DP-SGD that more than one seed is for: those that have more, and the best of the whole grid."""
    runs = chosen(read_results(), task=task, rows=rows, method="fixed", epsilon=epsilon)
    tried = by_options([r for r in runs if set(r["setting"]["options"]) == {"clip_threshold"}])
    found = {json.loads(options)["clip_threshold"] for options, group in tried.items() if len(group) > 1}
    if len(tried) == len(THRESHOLDS):
        found.add(json.loads(winner(tried))["clip_threshold"])
    return sorted(found)


def charged(rows: int | None) -> Iterator[Setting]:
    """Yield DP-SGD at thresholds that did well, with the noise of one run of a grid that costs ε as a whole: (c)."""
    sizes = [("sst2", 20_000), ("sst2", None), ("pairs", None)] if rows is None else [("sst2", rows), ("pairs", rows)]
    for task, some in sizes:
        for way in ("rdp_composition", "papernot_steinke_tnb", "lt"):
            for value in THRESHOLDS[:2]:
                yield Setting(task, "fixed", 2.0, {"clip_threshold": value, "tuned_by": way}, some)
    for seed in range(1, SEEDS):
        for task, some in sizes:
            for way in ("rdp_composition", "papernot_steinke_tnb"):
                for value in THRESHOLDS[:2]:
                    yield Setting(task, "fixed", 2.0, {"clip_threshold": value, "tuned_by": way}, some, seed)


def insensitivity(rows: int | None) -> Iterator[Setting]:
    """Yield DC-SGD-E with other bins, σ_H and C_0 than the defaults: (d)."""
    yield from (Setting("sst2", "recipe", 2.0, CONTROL, rows or 20_000, seed) for seed in range(SEEDS))
    for name, values in (
        ("clip_threshold", (0.01, 100.0)),
        ("histogram_bins", (10, 40)),
        ("histogram_noise_multiplier", (3.0, 10.0)),
    ):
        for value in values:
            yield Setting("sst2", "recipe", 2.0, {name: value, **CONTROL}, rows or 20_000)


def scale(rows: int | None) -> Iterator[Setting]:
    """Yield the release as it is and divided by its threshold, from good and bad first thresholds; and `AdamBC`."""
    for first in (100.0, 0.01, 1.0):
        for divided in (False, True):
            options = {"clip_threshold": first, "scale_free_gradient": divided, **CONTROL}
            yield Setting("sst2", "recipe", 2.0, options, rows or 20_000)
    for share in (0.3, 0.1, 1.0):
        yield Setting("sst2", "recipe", 2.0, {"adam_bc_rate": share, **CONTROL}, rows or 20_000)
    for percentile in PERCENTILES:
        options = {"percentile": percentile, "scale_free_gradient": True}
        yield Setting("sst2", "dc_sgd_p", 2.0, options, rows or 20_000)
    yield Setting("sst2", "andrew", 2.0, {"scale_free_gradient": True}, rows or 20_000)
    for seed in range(SEEDS):
        yield Setting("sst2", "dc_sgd_e", 2.0, {"scale_free_gradient": True}, rows or 20_000, seed)


def thresholds(rows: int | None) -> Iterator[Setting]:
    """Yield the recipe with other thresholds than that of DC-SGD-E: how much of what it gives is theirs."""
    others: list[dict[str, Any]] = [{"clipping": "fixed", "clip_threshold": value} for value in THRESHOLDS[:3]]
    for seed in range(SEEDS):
        for task, some in (("sst2", 20_000), ("pairs", None)):
            for options in (*others, {"clipping": "auto_clip"}):
                yield Setting(task, "recipe", 2.0, options, rows or some, seed)


# The rates that the recipe was settled by. In 5 epochs: for a travel of 300, its first aim, for 600 and for more.
# In 15 epochs: for 600, for the largest drift, and for more.
PACES: list[tuple[str, int | None, float, int, float, int]] = [
    *(("sst2", 20_000, 8.0, 5, rate, 1) for rate in (0.0041, 0.0081, 0.0082, 0.0164)),
    *(("pairs", None, 8.0, 5, rate, seeds) for rate, seeds in ((0.0034, 1), (0.0068, SEEDS))),
    *(("sst2", None, 2.0, 5, rate, seeds) for rate, seeds in ((0.0024, 1), (0.0048, 1), (0.0049, SEEDS))),
    *(("sst2", 20_000, 4.0, 5, rate, 1) for rate in (0.0055, 0.0088)),
    *(("pairs", None, 2.0, 5, rate, SEEDS) for rate in (0.0066, 0.0086)),
    *(("sst2", 20_000, 2.0, 5, rate, SEEDS) for rate in (0.0079, 0.0088)),
    ("pairs", None, 4.0, 5, 0.0086, 1),
    ("sst2", None, 4.0, 5, 0.0033, 1),
    ("sst2", None, 8.0, 5, 0.0025, 1),
    *(("pairs", None, 8.0, 15, rate, 1) for rate in (0.0068, 0.0028)),
    ("sst2", 20_000, 8.0, 15, 0.0081, 1),
    ("sst2", None, 2.0, 15, 0.0046, 1),
]


def travel(rows: int | None) -> Iterator[Setting]:
    """Yield the recipe at other learning rates and numbers of epochs, and with smaller batches."""
    for task, some, epsilon, epochs, rate, seeds in PACES:
        for seed in range(seeds):
            options = {"num_train_epochs": epochs, "learning_rate": rate}
            yield Setting(task, "recipe", epsilon, options, rows or some, seed)
    smaller = {"per_device_train_batch_size": 128, "gradient_accumulation_steps": 3}
    yield Setting("pairs", "recipe", 2.0, smaller, rows)


def held_out(rows: int | None) -> Iterator[Setting]:
    """Yield the recipe, the paper's setting and the recipe of 5 epochs on tasks that it was not derived on."""
    for task, epsilon in (("sms", 8.0), ("cola", 8.0), ("sms", 2.0), ("mnist", 2.0)):
        for method in ("recipe", "dc_sgd_e"):
            yield Setting(task, method, epsilon, rows=rows)
    yield Setting("cola", "non_private", None, NON_PRIVATE[0], rows)
    for task, epsilon, rate in (("sms", 8.0, 0.0093), ("cola", 8.0, 0.0082), ("mnist", 2.0, 0.0054)):
        yield Setting(task, "recipe", epsilon, {"num_train_epochs": 5, "learning_rate": rate}, rows)


def scratch(rows: int | None) -> Iterator[Setting]:
    """Yield models trained from scratch: (f)."""
    for seed in range(SEEDS):
        for epsilon in (1.0, 2.0, 4.0):
            for method in ("dc_sgd_e", "recipe"):
                yield Setting("mnist", method, epsilon, rows=rows, seed=seed)
    for value in THRESHOLDS[:3]:  # what this model gives with any threshold, and what the range and Adam's memory take
        yield Setting("mnist", "fixed", 1.0, {"clip_threshold": value}, rows)
    yield Setting("mnist", "dc_sgd_e", 1.0, {"scale_free_gradient": True}, rows)
    yield Setting("mnist", "dc_sgd_e", 1.0, {"scale_free_gradient": True, "histogram_rule": "following"}, rows)
    yield from (Setting("names", method, 4.0, rows=rows) for method in ("dc_sgd_e", "auto_clip", "recipe"))
    yield from (Setting("names", "dc_sgd_e", epsilon, rows=rows) for epsilon in (2.0, 8.0))
    yield Setting("cifar10", "dc_sgd_e", 2.0, rows=rows)
    for value in THRESHOLDS[:2]:
        options = {"clip_threshold": value, "tuned_by": "rdp_composition"}
        yield Setting("cifar10", "fixed", 2.0, options, rows)
    yield Setting("cifar10", "recipe", 2.0, rows=rows)


def models(rows: int | None) -> Iterator[Setting]:
    """Yield another BERT, whose pooler is not trained."""

    def at(method: str, epsilon: float | None, seed: int = 0, **options: Any) -> Setting:
        return Setting("sst2", method, epsilon, options, rows or 20_000, seed, "gte-small")

    for seed in range(SEEDS):
        yield from (at(method, 2.0, seed) for method in ("recipe", "dc_sgd_e", "auto_clip"))
        yield from (at("fixed", 2.0, seed, clip_threshold=value) for value in THRESHOLDS[:3])
    yield from (at("non_private", None, **options) for options in NON_PRIVATE)


TABLES = {
    "sst2": lambda rows: by_method("sst2", rows),
    "pairs": lambda rows: by_method("pairs", rows),
    "charged": charged,
    "insensitivity": insensitivity,
    "scale": scale,
    "thresholds": thresholds,
    "travel": travel,
    "held_out": held_out,
    "scratch": scratch,
    "models": models,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the data of all tasks")
    parser.add_argument("--rows", type=int, help="take that many training rows (default: all)")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="NAME", help="take the runs whose names begin like these, in turn"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of results (default: the project's)")
    parser.add_argument("--most", type=int, help="stop after that many runs")
    parser.add_argument("--list", action="store_true", help="list the runs and their results, and stop")
    options = parser.parse_args()
    listed = list(TABLES[options.table](options.rows))
    settings: dict[str, Setting] = {}
    for name in options.only:
        named = {setting.key: setting for setting in listed if setting.key.startswith(name)}
        if not named:
            parser.error(f"--only {name}: the table {options.table} has no such run; --list shows those it has")
        settings |= named
    if options.list:
        for setting in settings.values():
            print(f"{'there  ' if setting.path(options.results).exists() else 'missing'}  {setting.key}")
        return
    missing = [setting for setting in settings.values() if not setting.path(options.results).exists()]
    for setting in missing[: options.most]:
        print(f"\n== {setting.key}", flush=True)
        result = carry_out(setting, options.data)
        write(result, setting.path(options.results))
        print(f"== {setting.key}: {result['accuracy']:.2%} after {result['cpu_seconds']:.0f} CPU s", flush=True)


if __name__ == "__main__":
    main()
