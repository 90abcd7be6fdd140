"""Makes docs/benchmarks.md and its bar chart of the results under `benchmarks/results/`, and of nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rows import ROWS

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PAGE, PICTURE = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "benchmarks.png"
Results = Mapping[str, Mapping[str, Any]]

MODELS = {"mini": "BERT 6 × 384", "base": "BERT 12 × 768", "causal": "GPT-NeoX 6 × 384, V = 32,000",
          "choices": "BERT 6 × 384, four choices", "llama_32": "Llama 8 × 512, V = 32,000",
          "thin_32": "Llama 2 × 128, V = 32,000", "thin_32_tied": "Llama 2 × 128, V = 32,000, tied",
          "thin_150": "Llama 2 × 128, V = 150,000"}  # fmt: skip
VARIANTS = {
    "plain": ("plain", "#8895a1"),
    "fixed": ("`fixed`", "#7fb0d0"),
    "dc_sgd_e": ("`dc_sgd_e`", "#1f6391"),
    "opacus_ghost": ("Opacus ghost", "#c4552d"),
    "opacus_hooks": ("Opacus hooks", "#e3a587"),
}
INTRODUCTION = """# What it costs

This page is made by `python benchmarks/run_all.py --page` of the files in `benchmarks/results/`; `make bench` measures
what is missing there. Ratios to plain training: variants take turns within one run, a ratio is taken within a round,
and the median over rounds is shown. On the CPU: one thread, fp32, CPU seconds of the process. Memory is the most bytes
of tensors alive at one time in a step, beyond weights and optimizer state. Models have random weights. The machine has
two cores, which were shared with other work in part of the rows: differences below 7% between two figures are noise.
"""


def load() -> dict[str, dict[str, Any]]:
    """Read all results; those of a GPU have names that end in _gpu."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}


def render(results: Results) -> str:
    """Write the page."""
    sections = [INTRODUCTION, *_epochs(results), *_steps(results), *_growth(results), *_parts(results)]
    sections += [*_strategies(results), *_forms(results), *_noise(results), *_collectives(results)]
    sections += _missing(results)
    return "\n".join(sections)


def table(header: list[str], lines: list[list[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _trained(row: Mapping[str, Any]) -> str:
    if row["tail"]:
        return "last layer, pooler, classifier; frozen layers given"
    layers = row["layers"]
    if layers.startswith("last:"):
        return f"last {layers[5:]} layers and head"
    names = {"lora": "LoRA, r = 8, all layers", "all": "everything", "lm_head": "head"}
    return names.get(layers, "last layer, pooler, classifier")


def _steps(results: Results) -> Iterator[str]:
    chosen = {name: r for name, r in results.items() if name.startswith("step_")}
    if not chosen:
        return
    names = list(VARIANTS)
    times, memory, errors = [], [], []
    for name in sorted(chosen, key=_order):
        row, found = chosen[name], chosen[name]["variants"]
        on = " (GPU)" if name.endswith("_gpu") else ""
        size = f"{row['batch']} × {row['length']}" + (f", by {row['micro']}" if row["micro"] != row["batch"] else "")
        head = [MODELS[row["model"]] + on, _trained(row), size, str(row["rounds"])]
        times.append(head + [_cell(found, variant, "ratio") for variant in names])
        memory.append(head[:3] + [_cell(found, variant, "memory_ratio") for variant in names])
        errors += [f"- {head[0]}, {head[1]}, {size}: {VARIANTS[v][0]}: `{found[v]['error']}`" for v in names
                   if "error" in found.get(v, {})]  # fmt: skip
    titles = [VARIANTS[variant][0] for variant in names]
    yield "## One step, time\n\n![One step against plain training](benchmarks.png)\n"
    yield table(["model", "trained", "examples × tokens", "rounds", *titles], times)
    yield "## One step, memory\n"
    yield table(["model", "trained", "examples × tokens", *titles], memory)
    if errors:
        yield "Where a peer cannot run:\n\n" + "\n".join(errors) + "\n"


def _order(name: str) -> int:
    return list(ROWS).index(name.removesuffix("_gpu")) if name.removesuffix("_gpu") in ROWS else len(ROWS)


def _cell(found: Mapping[str, Any], variant: str, value: str) -> str:
    if variant not in found:
        return "not run"
    return "fails" if "error" in found[variant] else f"{found[variant][value]:.2f}"


def _epochs(results: Results) -> Iterator[str]:
    for row in results.values():
        if row["kind"] != "epochs":
            continue
        lengths = "all of 128 tokens" if row["lengths"] == "fixed" else "of lengths as QNLI's, at most 128 tokens"
        yield (
            f"## Whole epochs through `Trainer.train()`, {MODELS[row['model']]}, rows {lengths}\n\n"
            f"Last layer, pooler and classifier trained; {row['rows']} rows, micro-batches of {row['batch']}, one "
            f"step per epoch, {row['rounds']} round(s). One epoch of the plain `Trainer` is 1. The cache is filled "
            "within the first epoch. Start-up (plan, checks on synthetic rows) is the same for any number of rows and "
            f"not part of the epochs; a plain step on {row['batch']} rows takes {row['plain_step']:.1f} s.\n"
        )
        lines = [
            [variant, f"{v['start_up']:.1f} s", f"{v['first_epoch']:.2f}", f"{v['later_epoch']:.3f}",
             f"{1 / v['later_epoch']:.1f} ×", f"{v['five_epochs']:.2f}", f"{1 / v['five_epochs']:.1f} ×"]
            for variant, v in row["variants"].items()
        ]  # fmt: skip
        header = ["", "start-up", "first epoch", "later epoch", "faster", "five epochs", "faster"]
        yield table(header, lines)
        filled, there = (row["variants"][f"dc_sgd_e, cache {state}"] for state in ("filled", "there"))
        later = (filled["later_epoch"] + there["later_epoch"]) / 2
        filling = filled["first_epoch"] - there["first_epoch"] + later
        yield (
            "Some of the first epoch is done once per run, whatever the number of rows: the first batch is compared "
            "with autograd, the cache with the model on some rows. It shows as the first epoch with a cache that "
            f"is there. Without it, the epoch that fills the cache takes {filling:.2f} of a plain one, five epochs "
            f"are {5 / (filling + 4 * later):.1f} times faster.\n"
        )


def _growth(results: Results) -> Iterator[str]:
    for prefix, title in (("growth_batch_", "logical batch"), ("growth_layers_", "trained layers")):
        chosen = {int(n.removeprefix(prefix)): r for n, r in results.items() if n.startswith(prefix)
                  and not n.endswith("_gpu")}  # fmt: skip
        if chosen:
            first = next(iter(chosen.values()))
            trained = _trained(first) if title == "logical batch" else "last layers and head"
            micro = max(r["micro"] for r in chosen.values())
            what = f"{MODELS[first['model']]}, {first['length']} tokens, {trained}, micro-batches of at most {micro}"
            yield f"## Growth with {title}\n\n{what}.\n"
            yield table(
                [title, "d", "`dc_sgd_e`, ms per example", "peak memory, MB"],
                [
                    [f"{k:,}", f"{r['trained']:,}", f"{1000 * ours['seconds'] / r['batch']:.2f}",
                     f"{ours['peak_bytes'] / 1e6:.1f}"]
                    for k, r in sorted(chosen.items())
                    for ours in [r["variants"]["dc_sgd_e"]]
                ],
            )  # fmt: skip


def _parts(results: Results) -> Iterator[str]:
    chosen = {name: r for name, r in results.items() if r["kind"] == "parts"}
    if chosen:
        parts = list(next(iter(chosen.values()))["shares"])
        yield "## Where the time of a private step goes\n"
        yield table(
            ["model", "trained", *parts],
            [
                [MODELS[r["model"]], _trained(r), *(f"{100 * r['shares'][part]:.1f}%" for part in parts)]
                for r in chosen.values()
            ],
        )


def _strategies(results: Results) -> Iterator[str]:
    if "strategies" in results:
        found = results["strategies"]["variants"]
        yield "## Strategies, one step against `fixed`\n"
        yield table(list(found), [[f"{v['ratio']:.3f}" for v in found.values()]])


def _forms(results: Results) -> Iterator[str]:
    if "forms" in results:
        yield (
            "## Norms by Gram products or of written gradients\n\nNorms and clipped sum of one matrix p × d over T "
            "positions. The written form is taken where it needs at most 1.5 times the memory of the factors.\n"
        )
        lines = [
            [str(r["positions"]), f"{r['p']:,} × {r['d']}", f"{1000 * r['gram']:.1f}", f"{1000 * r['written']:.1f}",
             f"{r['memory']:.2f}", r["taken"]]
            for r in results["forms"]["shapes"]
        ]  # fmt: skip
        yield table(["T", "p × d", "Gram, ms", "written, ms", "memory, written / Gram", "taken"], lines)


def _noise(results: Results) -> Iterator[str]:
    if "noise" in results:
        found = results["noise"]
        times = ", ".join(f"{seconds:.2f} s with {count} thread(s)" for count, seconds in found["threads"].items())
        yield f"## Noise\n\n{found['parameters']:,} parameters, once per logical batch: {times}.\n"


def _collectives(results: Results) -> Iterator[str]:
    if "collectives" in results:
        found = results["collectives"]
        yield f"## Between two processes, per logical batch; (d + b) × 4 = {found['expected_bytes']:,} bytes\n"
        lines = [[n, f"{r['calls_per_step']:g}", f"{r['bytes_per_step']:,.0f}"] for n, r in found["rows"].items()]
        yield table(["", "calls", "bytes"], lines)


def _missing(results: Results) -> Iterator[str]:
    names = [name for name in ROWS if name not in results]
    if names:
        yield f"## Not measured yet\n\n{', '.join(f'`{name}`' for name in names)}\n"


def draw(results: Results) -> Figure:
    """Draw the ratios of the steps that peers were measured on as bars, one group per row of the table."""
    steps = (n for n in results if n.startswith("step_") and not n.endswith("_gpu"))
    chosen = sorted((n for n in steps if "opacus_ghost" in results[n]["variants"]), key=_order)
    figure = Figure(figsize=(9.0, 1.4 + 0.75 * len(chosen)), layout="constrained")
    axes = figure.subplots()
    for k, (variant, (label, color)) in enumerate(VARIANTS.items()):
        for place, name in enumerate(chosen):
            found = results[name]["variants"].get(variant, {})
            y = place + 0.16 * (k - 2)
            if "ratio" in found:
                axes.barh(y, found["ratio"], 0.15, color=color, label=label.strip("`") if place == 0 else None)
            elif "error" in found:
                axes.text(0.02, y, f"{label}: fails", va="center", fontsize=6.5, color=color)
    axes.axvline(1.0, color="#26323d", linewidth=0.8)
    axes.set_yticks(range(len(chosen)), [_label(results[name]) for name in chosen], fontsize=7)
    axes.set_ylim(len(chosen) - 0.4, -0.6)
    axes.set_xlabel("time of one step, plain training = 1")
    axes.spines[["top", "right"]].set_visible(False)
    if chosen:
        figure.legend(loc="outside upper center", ncols=len(VARIANTS), fontsize=8, frameon=False)
    return figure


def _label(row: Mapping[str, Any]) -> str:
    return f"{MODELS[row['model']]}\n{_trained(row).replace('; ', chr(10))}\n{row['batch']} × {row['length']}"


def write_page() -> None:
    """Write page and picture."""
    results = load()
    PAGE.write_text(render(results), encoding="utf-8")
    draw(results).savefig(PICTURE, dpi=110, metadata={"Software": None})
