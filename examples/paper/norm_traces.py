"""NOT PRIVATE: record the gradient norms of real runs, and see how well thresholds follow them.

The norms that this script writes down are raw values of the training examples. It is for public data only.

    python examples/paper/norm_traces.py record sst2 --data DATA_FOLDER --rows 20000 --epsilon 2 --traces TRACES
    python examples/paper/norm_traces.py compare --traces TRACES

`record` is a run of `tables.py`, with the recipe or (`--method dc_sgd_e`) the paper's setting, that keeps the norms of
every step beside its result.
`compare` lets the paper's rule and the following one run over recorded norms, with fresh histogram noise, at other
batch sizes and budgets (norms of neighboring steps are pooled for larger batches), beside two controls without noise:
`known` knows the norms of the last five steps, `hindsight` those of the five steps around, the step itself among them.
It writes E(C_t) / min E after the first 20 steps, of the norms of the step alone and of the five steps around it, to
`results/range_rules.json`, where what is not run now keeps its rows; and, if the traces of MNIST at the paper's and of
SST-2 at the recipe's setting are there, a picture of C_t, R_t and the true quantiles to `docs/norms.png`.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runs import RESULTS, Setting, carry_out, write
from transformers import TrainerCallback

from hf_dcsgd import DCSGDTrainer, PrivacyPlan
from hf_dcsgd.clipping import PublicNumbers
from hf_dcsgd.clipping.dc_sgd import ExpectedErrorThreshold, PercentileThreshold
from hf_dcsgd.privacy.accounting import planned_steps

BATCH_SIZES = (128, 256, 512, 1024, 2048)
EPSILONS = (1.0, 2.0, 4.0, 8.0)
CONTROLS = ("known", "hindsight")
RULES = ("paper", "following", *CONTROLS)
KNOWN_STEPS = 5  # that `known` looks back
AROUND = 2  # steps on either side whose norms are taken for what a step's norms are drawn from
WARM_UP, ROUNDS = 20, 3
TITLES = {"mnist": "MNIST", "names": "NAMES", "pairs": "pairs", "sst2": "SST-2"}
RULES_FILE = RESULTS / "range_rules.json"
PICTURED = ("MNIST, paper's setting", "SST-2, recipe's setting")
QUANTILES = (0.1, 0.5, 0.9, 0.99)
PICTURE = Path(__file__).parents[2] / "docs" / "norms.png"


class NormRecorder(TrainerCallback):
    """Keeps the norms of every logical batch before they are clipped, with the threshold and range of its step."""

    def __init__(self) -> None:
        self.batches: list[list[np.ndarray]] = []
        self.released: list[dict[str, Any]] = []

    def watch(self, trainer: DCSGDTrainer) -> None:
        """Record the run of this trainer."""
        self.trainer = trainer
        trainer.add_callback(self)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        mechanism = self.trainer.mechanism
        assert mechanism is not None
        if not self.batches:
            clip_factors = mechanism.clip_factors

            def recorded(norms: torch.Tensor, losses: torch.Tensor | None = None) -> torch.Tensor:
                self.batches[-1].append(norms.detach().cpu().numpy().copy())
                return clip_factors(norms, losses)

            mechanism.clip_factors = recorded
        self.batches.append([])

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        mechanism = self.trainer.mechanism
        assert mechanism is not None
        self.released.append(mechanism.threshold.released_values())

    def save(self, path: Path) -> None:
        """Write the file that `compare` reads."""
        plan = self.trainer.plan
        assert plan is not None
        batches = [np.concatenate(batch) if batch else np.zeros(0) for batch in self.batches]
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(
            path,
            norms=np.concatenate(batches),
            sizes=[len(batch) for batch in batches],
            thresholds=[values["clip_threshold"] for values in self.released],
            ranges=[values.get("histogram_range", np.nan) for values in self.released],
            batch_size=plan.expected_batch_size,
            parameters=plan.num_parameters,
            rows=plan.dataset_size,
            epochs=self.trainer.state.num_train_epochs,
        )


def title_of(setting: Setting) -> str:
    """Name the trace of a run."""
    whose = "recipe's" if setting.method == "recipe" else "paper's"
    return f"{TITLES.get(setting.task, setting.task)}, {whose} setting"


def record(setting: Setting, data_folder: Path, traces: Path) -> dict[str, Any]:
    """Train once, keep the norms of all steps in a file under `traces`, and return the result of the run."""
    recorder = NormRecorder()
    result = carry_out(setting, data_folder, recorder.watch)
    recorder.save(traces / f"{title_of(setting)}.npz")
    return result


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


def follow(kind: str, rule: str, batches: list[Any], plan: PrivacyPlan, seed: int) -> tuple[list[float], list[float]]:
    """Return how far a rule is off at each step: E(C)/min E of its norms, and of the norms around it.

    For percentiles it is the factor to the true one.
    """
    generator = np.random.default_rng(seed)
    threshold = None if rule in CONTROLS else make_threshold(kind, rule, plan)
    unit_variance = plan.grad_noise_multiplier**2 * plan.num_parameters / plan.expected_batch_size**2

    def best(norms: np.ndarray) -> float:
        return best_threshold(norms, unit_variance) if kind == "dc_sgd_e" else float(np.median(norms))

    def off(current: float, norms: np.ndarray) -> float:
        if kind == "dc_sgd_e":
            return squared_error(current, norms, unit_variance) / squared_error(best(norms), norms, unit_variance)
        ratio = current / max(best(norms), 1e-30)
        return max(ratio, 1 / ratio)

    own, around = [], []
    for step, norms in enumerate(batches):
        if step >= WARM_UP and len(norms):
            neighbors = np.concatenate(batches[step - AROUND : step + AROUND + 1])
            seen = np.concatenate(batches[step - KNOWN_STEPS : step]) if rule == "known" else neighbors
            current = best(seen) if threshold is None else threshold.clip_threshold
            own.append(off(current, norms))
            around.append(off(current, neighbors))
        if threshold is not None:
            counts = threshold.side_contribution(torch.from_numpy(norms)).double().numpy()
            threshold.update(counts + generator.normal(0, threshold.side_query.noise_multiplier, len(counts)))
    return own, around


def compare(
    paths: list[Path], batch_sizes: Sequence[int] = BATCH_SIZES, epsilons: Sequence[float] = EPSILONS
) -> list[dict[str, Any]]:
    """Return a row for every trace, batch size, budget, strategy and rule."""
    rows = []
    for path in paths:
        trace = np.load(path)
        batches = np.split(trace["norms"], np.cumsum(trace["sizes"])[:-1])
        recorded_size, dataset_size = int(trace["batch_size"]), int(trace["rows"])
        for batch_size in batch_sizes:
            drawn = pooled(batches, recorded_size, batch_size, np.random.default_rng(0))
            for epsilon in epsilons:
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
                        rounds = range(1 if rule in CONTROLS else ROUNDS)
                        found = [follow(kind, rule, drawn, plan, seed) for seed in rounds]
                        own, around = ([x for part in parts for x in part] for parts in zip(*found, strict=True))
                        if not own:
                            continue
                        rows.append(
                            {
                                "trace": path.stem,
                                "batch_size": batch_size,
                                "epsilon": epsilon,
                                "strategy": kind,
                                "rule": rule,
                                "median": float(np.median(own)),
                                "worst": float(np.max(own)),
                                "around": float(np.max(around)),
                                "steps": len(own),
                            }
                        )
                        print(rows[-1], flush=True)
    return rows


def draw(paths: list[Path], picture: Path) -> None:
    """Draw thresholds, ranges and true quantiles of recorded runs beside each other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, row = plt.subplots(1, len(paths), figsize=(6 * len(paths), 4.2), layout="constrained", squeeze=False)
    for axes, path in zip(row[0], paths, strict=True):
        trace = np.load(path)
        batches = np.split(trace["norms"], np.cumsum(trace["sizes"])[:-1])
        steps = np.arange(1, len(batches) + 1)
        quantiles = np.array([np.quantile(batch, QUANTILES) for batch in batches])
        for column, quantile, shade in zip(quantiles.T, QUANTILES, (0.75, 0.55, 0.35, 0.15), strict=True):
            axes.plot(steps, column, color=str(shade), linewidth=1.2, label=f"true norms, {quantile:.0%}")
        axes.plot(steps, trace["ranges"], color="#7a8791", linestyle="--", label="range R")
        axes.plot(steps, trace["thresholds"], color="#0072b2", linewidth=2, label="threshold C")
        axes.set(xlabel="step", ylabel="gradient norm", yscale="log", title=f"{path.stem} (not private: true norms)")
    row[0][0].legend(frameon=False, ncols=2, fontsize=8)
    figure.savefig(picture, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="train and keep the norms")
    recording.add_argument("task")
    recording.add_argument("--data", type=Path, required=True)
    recording.add_argument("--rows", type=int)
    recording.add_argument("--epsilon", type=float, default=2.0)
    recording.add_argument("--method", default="recipe")
    recording.add_argument("--seed", type=int, default=0)
    comparing = commands.add_parser("compare", help="let rules run over recorded norms")
    comparing.add_argument("--batch_sizes", type=int, nargs="+", default=BATCH_SIZES)
    comparing.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    for command in (recording, comparing):
        command.add_argument("--traces", type=Path, required=True, help="the folder of recorded norms")
    options = parser.parse_args()
    logging.getLogger("hf_dcsgd").setLevel(logging.ERROR)
    if options.command == "record":
        setting = Setting(options.task, options.method, options.epsilon, rows=options.rows, seed=options.seed)
        write(record(setting, options.data, options.traces), setting.path())
        return
    paths = sorted(options.traces.glob("*.npz"))
    found = compare(paths, options.batch_sizes, options.epsilons)
    run = {(row["trace"], row["batch_size"], row["epsilon"]) for row in found}
    kept = json.loads(RULES_FILE.read_text(encoding="utf-8")) if RULES_FILE.exists() else []
    kept = [row for row in kept if (row["trace"], row["batch_size"], row["epsilon"]) not in run]
    RULES_FILE.write_text(json.dumps(kept + found, indent=1) + "\n", encoding="utf-8")
    pictured = [options.traces / f"{title}.npz" for title in PICTURED]
    if all(path.exists() for path in pictured):
        draw(pictured, PICTURE)


if __name__ == "__main__":
    main()
