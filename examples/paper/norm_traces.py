"""NOT PRIVATE: record the gradient norms of real runs, and see how well thresholds follow them.

The norms that this script writes down are raw values of the training examples. It is for public data only.

    python examples/paper/norm_traces.py record sst2 --data DATA_FOLDER --rows 20000 --epsilon 2 --traces TRACES
    python examples/paper/norm_traces.py compare --traces TRACES

`record` trains with the recipe (or `--method dc_sgd_e` for the paper's setting) and keeps the norms of every step.
`compare` lets the paper's rule and the following one run over recorded norms, with fresh histogram noise, at other
batch sizes and budgets (norms of neighboring steps are pooled for larger batches), and writes E(C_t) / min E after the
first 20 steps to `results/range_rules.json`, and a picture of C_t, R_t and the true quantiles to `docs/norms.png`.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tasks
import torch
from runs import RESULTS, Setting, accuracy
from transformers import TrainerCallback, set_seed

from hf_dcsgd import DCSGDTrainer, PrivacyPlan
from hf_dcsgd.clipping import PublicNumbers
from hf_dcsgd.clipping.dc_sgd import ExpectedErrorThreshold, PercentileThreshold
from hf_dcsgd.privacy.accounting import planned_steps

BATCH_SIZES = (128, 256, 512, 1024, 2048)
EPSILONS = (1.0, 2.0, 4.0, 8.0)
RULES = ("paper", "following")
WARM_UP, ROUNDS = 20, 3
PICTURE = Path(__file__).parents[2] / "docs" / "norms.png"


class NormRecorder(TrainerCallback):
    """Keeps the norms of every logical batch, before they are clipped."""

    def __init__(self) -> None:
        self.batches: list[list[np.ndarray]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        mechanism = self.trainer.mechanism
        if not self.batches:
            clip_factors = mechanism.clip_factors

            def recorded(norms: torch.Tensor, losses: torch.Tensor | None = None) -> torch.Tensor:
                self.batches[-1].append(norms.detach().cpu().numpy().copy())
                return clip_factors(norms, losses)

            mechanism.clip_factors = recorded
        self.batches.append([])

    def watch(self, trainer: DCSGDTrainer) -> None:
        self.trainer = trainer


def record(setting: Setting, data_folder: Path, path: Path) -> None:
    """Train once and write norms, thresholds and ranges of all steps to a file."""
    set_seed(setting.seed)
    data, recorder = tasks.load(setting.task, data_folder, rows=setting.rows), NormRecorder()
    with tempfile.TemporaryDirectory() as folder:
        args = setting.arguments(folder, len(data.train))
        trainer = DCSGDTrainer(
            data.make_model(),
            args,
            data.collator,
            data.train,
            data.evaluation,
            callbacks=[recorder],
            compute_metrics=accuracy,
            per_example_loss_func=data.loss,
        )
        recorder.watch(trainer)
        trainer.train()
        lines = [json.loads(line) for line in (Path(folder) / "privacy_trace.jsonl").read_text().splitlines()]
    batches = [np.concatenate(batch) if batch else np.zeros(0) for batch in recorder.batches]
    assert trainer.plan is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        norms=np.concatenate(batches),
        sizes=[len(batch) for batch in batches],
        thresholds=[line["clip_threshold"] for line in lines],
        ranges=[line.get("histogram_range", np.nan) for line in lines],
        batch_size=trainer.plan.expected_batch_size,
        parameters=trainer.plan.num_parameters,
        rows=trainer.plan.dataset_size,
        epochs=trainer.state.num_train_epochs,
    )


# -- comparing --------------------------------------------------------------------------------------------------------


def squared_error(threshold: float, norms: np.ndarray, unit_variance: float) -> float:
    """Return E(C) for these very norms."""
    return float(unit_variance * threshold**2 + np.mean(np.maximum(norms - threshold, 0.0) ** 2))


def best_threshold(norms: np.ndarray, unit_variance: float) -> float:
    """Return the C with the least E: v·C = mean excess, solved for the norms above it, from the largest down."""
    descending = np.sort(norms)[::-1]
    above = np.arange(1, len(norms) + 1) / len(norms)
    candidates = np.cumsum(descending) / len(norms) / (unit_variance + above)
    fits = (candidates <= descending) & (candidates >= np.append(descending[1:], 0.0))
    return float(candidates[int(np.argmax(fits))])


def pooled(batches: list[np.ndarray], recorded_size: int, wanted: int, generator: np.random.Generator) -> list[Any]:
    """Return batches of another size: thinned out, or drawn from as many neighboring ones as it takes."""
    width = max(1, round(wanted / recorded_size))
    starts = range(0, len(batches) - width + 1, max(1, width // 2))
    groups = (np.concatenate(batches[start : start + width]) for start in starts)
    return [generator.choice(group, generator.poisson(wanted)) for group in groups if len(group)]


def make_threshold(kind: str, rule: str, plan: PrivacyPlan) -> Any:
    cls = {"dc_sgd_e": ExpectedErrorThreshold, "dc_sgd_p": PercentileThreshold}[kind]
    known = PublicNumbers(plan.noise_multiplier, plan.expected_batch_size, plan.steps)
    numbers = {name: getattr(plan, name) for name in cls.public_numbers}
    return cls(**cls.resolve({"histogram_rule": rule}, known), **numbers)


def follow(kind: str, rule: str, batches: list[Any], plan: PrivacyPlan, seed: int) -> list[float]:
    """Return how far a rule is off at each step: E(C)/min E, or for percentiles the factor to the true one."""
    generator = np.random.default_rng(seed)
    threshold = make_threshold(kind, rule, plan)
    unit_variance = plan.grad_noise_multiplier**2 * plan.num_parameters / plan.expected_batch_size**2
    found = []
    for step, norms in enumerate(batches):
        if step >= WARM_UP and len(norms):
            current = threshold.clip_threshold
            if kind == "dc_sgd_e":
                least = squared_error(best_threshold(norms, unit_variance), norms, unit_variance)
                found.append(squared_error(current, norms, unit_variance) / least)
            else:
                ratio = current / max(float(np.median(norms)), 1e-30)
                found.append(max(ratio, 1 / ratio))
        counts = threshold.side_contribution(torch.from_numpy(norms)).double().numpy()
        threshold.update(counts + generator.normal(0, threshold.side_query.noise_multiplier, len(counts)))
    return found


def compare(paths: list[Path]) -> list[dict[str, Any]]:
    """Return a row for every trace, batch size, budget, strategy and rule."""
    rows = []
    for path in paths:
        trace = np.load(path)
        batches = np.split(trace["norms"], np.cumsum(trace["sizes"])[:-1])
        recorded_size, dataset_size = int(trace["batch_size"]), int(trace["rows"])
        for batch_size in BATCH_SIZES:
            drawn = pooled(batches, recorded_size, batch_size, np.random.default_rng(0))
            for epsilon in EPSILONS:
                plan = PrivacyPlan.create(
                    dataset_size=dataset_size,
                    expected_batch_size=batch_size,
                    steps=planned_steps(dataset_size, batch_size, float(trace["epochs"])),
                    num_parameters=int(trace["parameters"]),
                    target_epsilon=epsilon,
                    accountant="rdp",
                )
                for kind in ("dc_sgd_e", "dc_sgd_p"):
                    for rule in RULES:
                        off = [x for seed in range(ROUNDS) for x in follow(kind, rule, drawn, plan, seed)]
                        if not off:
                            continue
                        rows.append(
                            {
                                "trace": path.stem,
                                "batch_size": batch_size,
                                "epsilon": epsilon,
                                "strategy": kind,
                                "rule": rule,
                                "median": float(np.median(off)),
                                "worst": float(np.max(off)),
                                "steps": len(off),
                            }
                        )
                        print(rows[-1], flush=True)
    return rows


def draw(path: Path, picture: Path) -> None:
    """Draw thresholds, ranges and true quantiles of a recorded run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    trace = np.load(path)
    batches = np.split(trace["norms"], np.cumsum(trace["sizes"])[:-1])
    steps = np.arange(1, len(batches) + 1)
    quantiles = np.array([np.quantile(batch, [0.1, 0.5, 0.9, 0.99]) for batch in batches])
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for column, name, shade in zip(quantiles.T, ("10%", "50%", "90%", "99%"), (0.75, 0.55, 0.35, 0.15), strict=True):
        axes.plot(steps, column, color=str(shade), linewidth=1.2, label=f"true norms, {name}")
    axes.plot(steps, trace["ranges"], color="#7a8791", linestyle="--", label="range R")
    axes.plot(steps, trace["thresholds"], color="#0072b2", linewidth=2, label="threshold C")
    axes.set(xlabel="step", ylabel="gradient norm", yscale="log", title=f"{path.stem} (not private: true norms)")
    axes.legend(frameon=False, ncols=2, fontsize=8)
    figure.savefig(picture, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="train and keep the norms")
    recording.add_argument("task")
    recording.add_argument("--data", type=Path, required=True)
    recording.add_argument("--rows", type=int)
    recording.add_argument("--epsilon", type=float, default=2.0)
    recording.add_argument("--method", default="recipe")
    comparing = commands.add_parser("compare", help="let rules run over recorded norms")
    for command in (recording, comparing):
        command.add_argument("--traces", type=Path, required=True, help="the folder of recorded norms")
    options = parser.parse_args()
    logging.getLogger("hf_dcsgd").setLevel(logging.ERROR)
    if options.command == "record":
        setting = Setting(options.task, options.method, options.epsilon, rows=options.rows)
        record(setting, options.data, options.traces / f"{setting.key}.npz")
        return
    paths = sorted(options.traces.glob("*.npz"))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "range_rules.json").write_text(json.dumps(compare(paths), indent=1) + "\n", encoding="utf-8")
    draw(paths[0], PICTURE)


if __name__ == "__main__":
    main()
