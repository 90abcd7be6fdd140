"""Say what each row is to be about: labels and metadata as a prefix, and how often each of them is asked for.

The values that labels and metadata can take are public. How often they occur is not: it is stated, taken as even, or
counted with noise. That count is one Gaussian release over all rows, made by the same mechanism as a training step
(rate 1, threshold 1) and charged to the same ledger before it is drawn; what is trained afterwards counts it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from hf_dcsgd.jobs.errors import UserError, explained
from hf_dcsgd.jobs.synthesis.arguments import NOISED, UNIFORM, SynthesisArguments
from hf_dcsgd.jobs.text_data import LABELS, TEXTS, first_present
from hf_dcsgd.privacy.accounting import smallest_noise_multiplier
from hf_dcsgd.privacy.ledger import PrivacyLedger
from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.runs.files import as_json, write_atomically
from hf_dcsgd.runs.spending import Spending, SpentRun

SHARES_FILENAME = "control_shares.json"
_MOST_CELLS = 1000
_GRID_SCALE = 10.0  # a wider grid than that of reports is quicker, and errs on the side of more noise
Cell = tuple[str, ...]


@dataclass(frozen=True)
class Controls:
    """The columns that a text is controlled by, label first, and all combinations of their values with a prefix."""

    text: str
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    prefixes: tuple[str, ...]

    @classmethod
    def of(cls, rows: Dataset, args: SynthesisArguments) -> Controls:
        """Find the columns and the values they can take."""
        available = rows.column_names
        text = args.text_column or first_present(TEXTS, available)
        label = args.label_column or first_present(LABELS, available)
        extra = [name.strip() for name in (args.metadata_columns or "").split(",") if name.strip()]
        wanted = [("text_column", text), ("label_column", label), *(("metadata_columns", name) for name in extra)]
        for option, column in wanted:
            if column not in available:
                shown = "such column" if column is None else f"column {column!r}"
                raise UserError(f"no {shown} in the training data (columns: {', '.join(available)}); give --{option}")
        assert text is not None
        assert label is not None
        values = [sorted({_shown(value) for value in rows.unique(column)}) for column in (label, *extra)]
        if args.labels is not None:
            values[0] = [name.strip() for name in args.labels.split(",")]
        cells = tuple(itertools.product(*values))
        if len(cells) > _MOST_CELLS:
            raise UserError(
                f"labels and metadata have {len(cells)} combinations, expected at most {_MOST_CELLS}: are "
                f"{', '.join((label, *extra))} columns of few values?"
            )
        columns = (label, *extra)
        return cls(text, columns, cells, _prefixes(columns, cells, args))

    def prefix(self, cell: Cell) -> str:
        """Return what stands before a text of this cell."""
        return self.prefixes[self.cells.index(cell)]

    def places(self, rows: Dataset, split: str) -> np.ndarray:
        """Return the number of each row's cell; refuse values that are not among the stated ones."""
        numbers = {cell: number for number, cell in enumerate(self.cells)}
        cells = list(zip(*(map(_shown, rows[column]) for column in self.columns), strict=True))
        unknown = next((cell for cell in cells if cell not in numbers), None)
        if unknown is not None:
            raise UserError(f"the {split} data have rows that are {_joined(unknown)!r}, which --labels leaves out")
        return np.array([numbers[cell] for cell in cells], dtype=np.int64)


def _prefixes(columns: Sequence[str], cells: Sequence[Cell], args: SynthesisArguments) -> tuple[str, ...]:
    """Write each cell in the words that the user chose; refuse those that do not tell cells apart."""
    words = {} if args.label_words is None else _assigned("label_words", args.label_words)
    labels = {cell[0] for cell in cells}
    strange = next((label for label in words if label not in labels), None)
    if strange is not None:
        raise UserError(f"--label_words {args.label_words}: {strange!r} is none of {', '.join(sorted(labels))}")
    worded = [(words.get(cell[0], cell[0]), *cell[1:]) for cell in cells]
    if args.prefix_template is None:
        found = tuple(map(_joined, worded))
    else:
        shown = f"--prefix_template {args.prefix_template!r}"
        known = ", ".join(f"{{{name}}}" for name in columns)
        with explained(
            lambda error: f"{shown}: expected columns in braces, of {known}", KeyError, ValueError, IndexError
        ):
            found = tuple(args.prefix_template.format(**dict(zip(columns, cell, strict=True))) for cell in worded)
    if len(set(found)) < len(cells):
        shown = "--label_words" if args.prefix_template is None else f"--prefix_template {args.prefix_template!r}"
        raise UserError(f"{shown}: two kinds of rows have the prefix {Counter(found).most_common(1)[0][0]!r}")
    return found


def _assigned(option: str, text: str) -> dict[str, str]:
    """Read name=value,name=value."""
    parts = [part.partition("=") for part in text.split(",")]
    if not all(sign for _, sign, _ in parts):
        raise UserError(f"--{option} {text}: expected label=words,label=words")
    return {name.strip(): value.strip() for name, _, value in parts}


@dataclass(frozen=True)
class Shares:
    """How often each cell is asked for and by which prefix, and what was paid to know it, if a release was."""

    source: str
    shares: tuple[float, ...]
    spent: SpentRun | None = None
    prefixes: tuple[str, ...] = ()

    def counts(self, total: int) -> list[int]:
        """Spread so many rows over the cells, rounding by largest remainders."""
        exact = [share * total for share in self.shares]
        counts = [math.floor(value) for value in exact]
        order = sorted(range(len(exact)), key=lambda place: counts[place] - exact[place])
        for place in order[: total - sum(counts)]:
            counts[place] += 1
        return counts

    def save(self, folder: Path) -> None:
        """Keep them; everything in the file is public."""
        write_atomically(folder / SHARES_FILENAME, as_json(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Shares | None:
        """Read what `save` wrote, if it did."""
        path = folder / SHARES_FILENAME
        if not path.is_file():
            return None
        values = json.loads(path.read_text(encoding="utf-8"))
        spent = None if values["spent"] is None else SpentRun(**values["spent"])
        return cls(values["source"], tuple(values["shares"]), spent, tuple(values.get("prefixes", ())))


def stated_shares(text: str, controls: Controls) -> Shares:
    """Return even shares, or those that the user states for each label."""
    if text == UNIFORM:
        return Shares(UNIFORM, (1 / len(controls.cells),) * len(controls.cells))
    try:
        stated = {name.strip(): float(value) for name, value in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise UserError(f"--label_shares {text}: expected noised, uniform, or label=share,label=share") from None
    known = {cell[0] for cell in controls.cells}
    if set(stated) != known or min(stated.values()) < 0 or not sum(stated.values()) > 0:
        raise UserError(f"--label_shares {text}: expected a share of 0 or more for each of {', '.join(sorted(known))}")
    per_label = Counter(cell[0] for cell in controls.cells)
    weights = [stated[cell[0]] / per_label[cell[0]] for cell in controls.cells]
    return Shares("stated", tuple(weight / sum(weights) for weight in weights))


def count_plan(plan: PrivacyPlan, cells: int, noise_multiplier: float) -> PrivacyPlan:
    """Return the plan of the release of label counts, for the same data and units as a training plan's."""
    if plan.unit is not None and plan.unit.by_row:
        raise UserError(f"--label_shares {NOISED} needs --privacy_unit_clipping unit, got {plan.unit.clipping}")
    return PrivacyPlan.create(
        dataset_size=plan.dataset_size,
        expected_batch_size=plan.dataset_size,
        steps=1,
        num_parameters=cells,
        noise_multiplier=noise_multiplier,
        target_delta=plan.delta,
        accountant=plan.accountant,
        clipping="fixed",
        settings={"clip_threshold": 1.0},
        unsafe_noise_seed=plan.unsafe_noise_seed,
        unit=plan.unit,
    )


def release_shares(
    places: np.ndarray, owners: Sequence[Any] | None, plan: PrivacyPlan, training: SpentRun, folder: Path
) -> Shares:
    """Count the cells with noise, charged to the ledger in `folder`; a unit of several rows counts as one in all.

    `owners` are the units of the rows, where these are not units themselves. `training` is the run after it, with
    all of its steps: only if it is carried out so, ε of both is computed as for one plan.
    """
    units = np.arange(len(places)) if owners is None else np.unique(np.asarray(owners), return_inverse=True)[1]
    (unit_of, cell_of), rows = np.unique(np.stack([units, places]), axis=1, return_counts=True)
    votes = rows / np.bincount(units)[unit_of]
    norms = np.sqrt(np.bincount(unit_of, weights=votes**2, minlength=plan.dataset_size))
    folder.mkdir(parents=True, exist_ok=True)
    mechanism = DPMechanism(plan, ledger=(ledger := PrivacyLedger.open(folder, plan.privacy_dict(), resume=False)))
    try:
        factors = mechanism.clip_factors(torch.as_tensor(norms, dtype=torch.float32)).double().numpy()
        total = np.bincount(cell_of, weights=factors[unit_of] * votes, minlength=plan.num_parameters)
        released = mechanism.release(torch.as_tensor(total, dtype=torch.float32))
        noisy_counts = released.noisy_gradient * plan.dataset_size
    finally:
        mechanism.close()
    kept = noisy_counts.double().clamp(min=0).numpy()
    shares = kept / kept.sum() if kept.sum() > 0 else np.full(len(kept), 1 / len(kept))
    return Shares(NOISED, tuple(map(float, shares)), counted_run(plan, training, mechanism.charged, ledger.run_id))


def counted_run(plan: PrivacyPlan, training: SpentRun, charged: int = 1, run_id: str | None = None) -> SpentRun:
    """Describe a count of labels as a run, before which the training after it was settled."""
    return replace(SpentRun.of(plan, charged, run_id), settles_next=training.whole)


def noise_within(plan: PrivacyPlan, counted: PrivacyPlan, epsilon: float) -> float:
    """Return σ for a training run so that it costs at most ε together with the count of labels, as reports add up."""

    def total(sigma: float) -> float:
        training = replace(SpentRun.of(plan, plan.steps, None), noise_multiplier=sigma)
        return Spending((counted_run(counted, training), training)).bound(plan.delta, _GRID_SCALE)[0]

    alone = Spending((SpentRun.of(counted, 1, None),)).epsilon(plan.delta)
    sigma = None
    if alone < epsilon:
        sigma = smallest_noise_multiplier(total, epsilon, guess=plan.noise_multiplier, factor=1.1)
    if sigma is None:
        raise UserError(
            f"--label_noise_multiplier {counted.noise_multiplier:g}: the count of labels alone takes the whole of "
            f"--target_epsilon {epsilon:g}; raise it, or state the shares by --label_shares"
        )
    return sigma


def _joined(cell: Cell) -> str:
    return " | ".join(cell)


def _shown(value: Any) -> str:
    return "" if value is None else str(value)
