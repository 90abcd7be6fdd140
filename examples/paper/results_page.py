"""Make docs/results.md, and the README's row of accuracies, from the JSON files under `results`.

    python examples/paper/results_page.py            # writes both
    python examples/paper/results_page.py --check    # fails if they are not what the files say

Cells without a run stay empty; every table says how many rows of the training data it used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from claims import FROM_SCRATCH, claims
from reading import (
    CONTROL,
    EMPTY,
    EPSILONS,
    METHOD_TITLES,
    RESULTS,
    TASK_TITLES,
    Result,
    best,
    chosen,
    mean_and_error,
    read_results,
    spread,
    table,
)
from readme_row import README, with_row

from hf_dcsgd import PrivacyPlan
from hf_dcsgd.recipe import Travel, epochs

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "results.md"


OTHER_MODEL = "gte-small"


def accuracy_tables(results: list[Result]) -> list[str]:
    """Return a table for each task and number of rows: methods down, ε across."""
    lines: list[str] = []
    for task, title in TASK_TITLES.items():
        for rows in sorted({r["setting"]["rows"] or 0 for r in chosen(results, task=task)}):
            here = [r for r in chosen(results, task=task) if (r["setting"]["rows"] or 0) == rows]
            here = [r for r in here if set(r["setting"]["options"]) <= _GRIDS.get(r["setting"]["method"], set())]
            size = next(r["plan"]["dataset_size"] for r in here if "plan" in r)
            lines += [f"### {title}, {size:,} training rows", ""]
            across = [epsilon for epsilon in EPSILONS if chosen(here, epsilon=epsilon)]
            body = [
                [name, *(best(chosen(here, method=method, epsilon=epsilon)) for epsilon in across)]
                for method, name in METHOD_TITLES.items()
            ]
            ceiling = best(chosen(here, method="non_private"))
            body.append(["without privacy, best rate of those run", *([ceiling] * len(across))])
            lines += table(["accuracy, %", *(f"ε = {epsilon:g}" for epsilon in across)], body)
            model, some = here[0]["setting"].get("model"), f" --rows {rows}" if rows else ""
            command = f"python examples/paper/tables.py {'models' if model else task} --data DATA_FOLDER{some}"
            lines += [f"Runs: {len(here)}, by `{command}`.", ""]
    return lines


_GRIDS = {
    "fixed": {"clip_threshold"},
    "dc_sgd_p": {"percentile"},
    "non_private": {"learning_rate", "num_train_epochs", "per_device_train_batch_size", "warmup_steps"},
}


def _pair(results: list[Result]) -> list[list[Result]]:
    """Return the runs of the recipe, and those of the paper's setting."""
    return [chosen(results, method=m, options={}) for m in ("recipe", "dc_sgd_e")]


def held_out_table(results: list[Result]) -> list[str]:
    """Return the recipe, as it is and with 5 epochs, beside the paper's setting where it was not derived."""
    body = []
    for task, title in (("sms", "SMS spam"), ("cola", "CoLA"), ("mnist", "MNIST (CNN from scratch)")):
        for epsilon in EPSILONS:
            here = chosen(results, task=task, epsilon=epsilon)
            recipe, paper = _pair(here)
            earlier = [r for r in chosen(here, method="recipe") if set(r["setting"]["options"]) == set(CONTROL)]
            if recipe and paper:
                size, ways = f"{recipe[0]['plan']['dataset_size']:,}", (recipe, earlier, paper)
                cells = [
                    mean_and_error([r[what] for r in runs]) for what in ("accuracy", "correlation") for runs in ways
                ]
                body.append([title, size, f"{epsilon:g}", *cells])
    ways_titles = ("recipe", "with 5 epochs", "paper's setting")
    header = ["task", "rows", "ε", *ways_titles, *(f"correlation: {title}" for title in ways_titles)]
    return table(header, body)


MODELS = {
    "mnist": "MNIST, a CNN of 26,010 parameters (the paper's: 28,058), 10 epochs",
    "names": "NAMES, two LSTM layers, 20 epochs",
    "cifar10": "CIFAR-10, a ResNet of 8 layers, 2 epochs (the paper's: ResNet34, 20 epochs)",
}


def scratch_table(results: list[Result]) -> list[str]:
    """Return models trained from scratch beside the paper's figures."""
    body = []
    for task, (figures, _) in FROM_SCRATCH.items():
        for epsilon, figure in figures.items():
            here = chosen(results, task=task, epsilon=epsilon)
            if here:
                recipe, ours = _pair(here)
                divided = chosen(here, method="dc_sgd_e", options={"scale_free_gradient": True})
                automatic, fixed = chosen(here, method="auto_clip"), chosen(here, method="fixed")
                charged = [r for r in fixed if "tuned_by" in r["setting"]["options"]]
                grids = [best([r for r in fixed if r not in charged]), best(charged)]
                means = [mean_and_error([r["accuracy"] for r in runs]) for runs in (ours, divided, automatic, recipe)]
                cells = [means[0], f"{figure:.1f}", *means[1:3], *grids, means[3]]
                body.append([MODELS[task], f"{epsilon:g}", *cells])
    titles = ["DC-SGD-E", "in the paper", "DC-SGD-E, divided", "AUTO-S"]
    titles += ["DP-SGD, best C of those run", "the same, grid charged by RDP", "recipe"]
    return table(["task", "ε", *titles], body)


def travel_table(results: list[Result]) -> list[str]:
    """Return the recipe and other rates, epochs and batches: how far each travels, how far noise carries a weight."""
    groups: dict[tuple[str, int, float, float, int, float], list[Result]] = defaultdict(list)
    for r in chosen(results, method="recipe"):
        setting, plan = r["setting"], r["plan"]
        if setting["task"] in TASK_TITLES and set(setting["options"]) <= _PACE:
            size, batch = plan["dataset_size"], plan["expected_batch_size"]
            passes = setting["options"].get("num_train_epochs", epochs(size, batch)[0])
            groups[setting["task"], size, setting["epsilon"], passes, batch, r["learning_rate"]].append(r)
    body = []
    for (task, size, epsilon, passes, batch, rate), runs in sorted(groups.items()):
        way = Travel.of(PrivacyPlan.from_dict(runs[0]["plan"]), "linear")
        far, drift = f"{rate * way.per_rate:.0f}", f"{rate * way.drift_per_rate:.3f}"
        name, cell = TASK_TITLES[task].partition(",")[0], mean_and_error([r["accuracy"] for r in runs])
        cells = [name, f"{size:,}", f"{epsilon:g}", f"{passes:g}", f"{batch:,}", f"{rate:g}", far, drift, cell]
        is_recipe = not all(r["setting"]["options"] for r in runs)
        body.append([f"**{text}**" if is_recipe else text for text in cells])
    return table(["task", "rows", "ε", "epochs", "B", "rate", "travel", "drift", "accuracy, %"], body)


_PACE = {"learning_rate", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps"}


def option_table(results: list[Result], names: Sequence[str]) -> list[str]:
    """Return what runs at the rate of the controls reach with options that the recipe would not choose."""
    here = chosen(results, task="sst2", method="recipe", epsilon=2.0)
    groups: dict[str, list[Result]] = defaultdict(list)
    for r in here:
        if CONTROL.items() <= r["setting"]["options"].items():
            others = dict(r["setting"]["options"].items() - (CONTROL | _AS_THE_RECIPE_HAS_IT).items())
            if set(others) <= set(names):
                shown = ", ".join(f"`{name}={value}`" for name, value in sorted(others.items()))
                groups[shown or "as the recipe has it"].append(r)
    body = [
        [shown, f"{runs[0]['plan']['dataset_size']:,}", mean_and_error([r["accuracy"] for r in runs])]
        for shown, runs in sorted(groups.items())
    ]
    return table(["option", "rows", "accuracy, %"], body)


_AS_THE_RECIPE_HAS_IT = {"clip_threshold": 1.0, "scale_free_gradient": True}


def percentile_table(results: list[Result]) -> list[str]:
    """Return thresholds that follow the norms, at ε = 2: with the release as it is, and divided by the threshold."""
    here = chosen(results, task="sst2", rows=20_000, epsilon=2.0)
    tried = sorted({r["setting"]["options"]["percentile"] for r in chosen(here, method="dc_sgd_p")})
    ways = [(f"DC-SGD-P, p = {p:g}", chosen(here, method="dc_sgd_p"), {"percentile": p}) for p in tried]
    ways += [(METHOD_TITLES[method], chosen(here, method=method), {}) for method in ("andrew", "dc_sgd_e")]
    body = []
    for name, runs, options in ways:
        both = (options, {**options, "scale_free_gradient": True})
        body.append([name, *(mean_and_error([r["accuracy"] for r in chosen(runs, options=o)]) for o in both)])
    return table(["threshold", "as it is", "divided by the threshold"], body)


def threshold_table(results: list[Result]) -> list[str]:
    """Return the recipe with other thresholds than its own, at ε = 2: thresholds down, tasks across."""
    places = {"SST-2": ("sst2", 20_000), "pairs": ("pairs", None)}
    here = [chosen(results, task=task, rows=rows, method="recipe", epsilon=2.0) for task, rows in places.values()]
    titles = [f"{name}, {runs[0]['plan']['dataset_size']:,} rows" for name, runs in zip(places, here, strict=True)]
    body = [
        [name, *(mean_and_error([r["accuracy"] for r in chosen(runs, options=options)]) for runs in here)]
        for name, options in _THRESHOLDS.items()
    ]
    return table(["threshold", *titles], body)


_THRESHOLDS: dict[str, dict[str, Any]] = {
    "DC-SGD-E, the default": {},
    **{f"fixed at C = {value:g}": {"clipping": "fixed", "clip_threshold": value} for value in (0.1, 1.0, 10.0)},
    "AUTO-S": {"clipping": "auto_clip"},
}


def spread_table(results: list[Result]) -> list[str]:
    """Return how far apart the values of a grid are: the lowest and the highest mean, and where these are."""
    body = []
    for task, title in TASK_TITLES.items():
        for rows in sorted({r["setting"]["rows"] or 0 for r in chosen(results, task=task)}):
            for method, name in (("fixed", "DP-SGD over C"), ("dc_sgd_p", "DC-SGD-P over p")):
                runs = chosen(results, task=task, rows=rows or None, method=method)
                runs = [r for r in runs if set(r["setting"]["options"]) == _GRIDS[method]]
                cells = [spread(chosen(runs, epsilon=epsilon)) for epsilon in EPSILONS]
                size = f"{runs[0]['plan']['dataset_size']:,} rows"
                body.append([f"{title.partition(',')[0]}, {size}", name, *cells])
    return table(["task", "grid", *(f"ε = {epsilon:g}" for epsilon in EPSILONS)], body)


CHARGED = {
    "rdp_composition": "ten runs, composed by RDP",
    "papernot_steinke_tnb": "Papernot & Steinke, geometric of mean ten",
    "lt": "Liu & Talwar",
}


def charged_table(results: list[Result]) -> list[str]:
    """Return DP-SGD with the noise that its grid asks for, beside what needs no grid, at ε = 2."""
    body = []
    for task, title in TASK_TITLES.items():
        here = [r for r in chosen(results, task=task, epsilon=2.0) if r["setting"]["method"] in ("fixed", *_NO_GRID)]
        for rows in sorted({r["setting"]["rows"] or 0 for r in here}):
            some = [r for r in here if (r["setting"]["rows"] or 0) == rows]
            if not any("tuned_by" in r["setting"]["options"] for r in some):
                continue
            size, name = f"{some[0]['plan']['dataset_size']:,}", title.partition(",")[0]
            for method in _NO_GRID:
                runs = chosen(some, method=method, options={})
                sigma = f"{runs[0]['plan']['noise_multiplier']:.3f}" if runs else EMPTY
                body.append([name, size, METHOD_TITLES[method], sigma, mean_and_error([r["accuracy"] for r in runs])])
            for way, words in CHARGED.items():
                runs = [r for r in some if r["setting"]["options"].get("tuned_by") == way]
                if runs:
                    sigma = f"{runs[0]['plan']['noise_multiplier']:.3f}"
                    body.append([name, size, f"DP-SGD, {words}", sigma, best(runs)])
    if not body:
        return ["Not run yet.", ""]
    return table(["task", "rows", "what is run", "σ of each run", "accuracy, %"], body)


_NO_GRID = ("recipe", "dc_sgd_e")


def range_rules() -> list[str]:
    """Return how near thresholds stay to the least error on recorded norms."""
    path = RESULTS / "range_rules.json"
    if not path.is_file():
        return ["Not run yet.", ""]
    rows = json.loads(path.read_text(encoding="utf-8"))
    lines = []
    for strategy, what in (("dc_sgd_e", "E(C_t) / min E"), ("dc_sgd_p", "factor between C_t and the true median")):
        found = [row for row in rows if row["strategy"] == strategy]
        body = []
        for trace in dict.fromkeys(row["trace"] for row in found):
            for batch_size in sorted({row["batch_size"] for row in found}):
                here = [row for row in found if (row["trace"], row["batch_size"]) == (trace, batch_size)]
                if here:
                    body.append([trace, str(batch_size), *(_largest(here, *cell) for cell in _RULE_CELLS)])
        header = ["norms of", "B", *(f"{rule}: {name}" for rule, name, _ in _RULE_CELLS)]
        lines += [f"`{strategy}`: {what}, the largest over {_budgets(found)}.", "", *table(header, body)]
    return lines


def _budgets(rows: list[dict[str, Any]]) -> str:
    """Say which ε all traces were looked at for."""
    looked_at = [{row["epsilon"] for row in rows if row["trace"] == trace} for trace in {row["trace"] for row in rows}]
    common = ", ".join(f"{epsilon:g}" for epsilon in sorted(set.intersection(*looked_at)))
    return f"ε = {common}" + ("" if all(found == looked_at[0] for found in looked_at) else " at least")


_RULE_CELLS = [
    (rule, name, digits)
    for rule in ("paper", "following", "known")
    for name, digits in (("median", 3), ("worst", 2), ("around", 2))
] + [("hindsight", "worst", 2)]


def _largest(rows: list[dict[str, Any]], rule: str, name: str, digits: int) -> str:
    """Say the largest figure of a rule over all budgets."""
    values = [row[name] for row in rows if row["rule"] == rule]
    return f"{max(values):.{digits}f}" if values else EMPTY


def time_table(results: list[Result]) -> list[str]:
    """Return what the quickest runs took: others filled a cache, or are older than what made steps quicker."""
    took: dict[tuple[str, int, str, int], list[float]] = defaultdict(list)
    for r in results:
        setting, method = r["setting"], r["setting"]["method"]
        if method != "recipe" or not setting["options"]:
            what = {"recipe": "recipe", "non_private": "without privacy"}.get(method, "paper's setting")
            took[setting["task"], setting["rows"] or 0, what, r["steps"]].append(r["cpu_seconds"])
    body = [
        [task, f"{rows:,}" if rows else "all", what, f"{steps:,}", f"{min(seconds):.0f}", str(len(seconds))]
        for (task, rows, what, steps), seconds in sorted(took.items())
    ]
    return table(["task", "rows", "what is run", "steps", "CPU seconds of the quickest", "runs"], body)


SECTIONS: list[tuple[str, Callable[[list[Result]], list[str]]]] = [
    ("accuracy", accuracy_tables),
    ("other_model", lambda results: accuracy_tables(read_results(OTHER_MODEL)) or ["Not run yet.", ""]),
    ("charged", charged_table),
    ("travel", travel_table),
    ("percentiles", percentile_table),
    ("thresholds", threshold_table),
    ("spread", spread_table),
    ("held_out", held_out_table),
    ("scratch", scratch_table),
    ("times", time_table),
    ("claims", lambda results: table(["claim", "verdict", "figures here"], claims(results))),
    ("scale", lambda results: option_table(results, ["clip_threshold", "scale_free_gradient", "adam_bc_rate"])),
    (
        "insensitivity",
        lambda results: option_table(
            results, ["clip_threshold", "histogram_bins", "histogram_noise_multiplier", "histogram_rule"]
        ),
    ),
    ("range_rules", lambda results: range_rules()),
]


def page() -> str:
    """Return the page: its text is in `results_page.md`, with a mark where each table goes."""
    results, text = read_results(), (HERE / "results_page.md").read_text(encoding="utf-8")
    for name, section in SECTIONS:
        text = text.replace(f"<!-- {name} -->\n", "\n".join(section(results)))
    versions = sorted(
        {f"torch {r['versions']['torch']}, transformers {r['versions']['transformers']}" for r in results}
    )
    count = len(results) + len(read_results(OTHER_MODEL))
    return text.replace("<!-- versions -->", f"Runs: {count}; {'; '.join(versions)}.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    wants_check = parser.parse_args().check
    made = {PAGE: page(), README: with_row(README.read_text(encoding="utf-8"), read_results())}
    if wants_check:
        return 0 if all(path.read_text(encoding="utf-8") == text for path, text in made.items()) else 1
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
