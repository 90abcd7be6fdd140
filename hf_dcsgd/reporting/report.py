"""States what a run spent: `privacy_report.json` and `privacy_report.html`, made from its files on disk.

| file                   | written                        | holds                                                     |
|------------------------|--------------------------------|-----------------------------------------------------------|
| `privacy_run.json`     | at the start (`run_record.py`) | the plan, what is trained and by which rules, versions    |
| `privacy_ledger.jsonl` | before a step (`ledger.py`)    | charges: the authority on what was spent, and on the plan |
| `privacy_trace.jsonl`  | after a step (`callbacks.py`)  | released values: threshold, range, noisy histogram        |

Guarantee. A report is computed from public numbers and released values alone, so it costs no privacy and may be shown
to anybody. ε is that of the *charged* steps, lost ones included, and is rounded up wherever it is shown. A run with an
opt-out has no guarantee, and the report then states no ε as one. A seed is never repeated.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_dcsgd.privacy.accountants import ACCOUNTANTS
from hf_dcsgd.privacy.ledger import LedgerError, PrivacyLedger
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.reporting.earlier import Past
from hf_dcsgd.reporting.format import finite, parameter_groups, rounded_up
from hf_dcsgd.reporting.plan_table import describe_unit, opt_out_text
from hf_dcsgd.reporting.run_record import RUN_FILENAME, read_run_record, software_versions
from hf_dcsgd.reporting.schema import Budget, Guarantee, Model, OptOut, PrivacyReport
from hf_dcsgd.runs.files import as_json, write_atomically
from hf_dcsgd.runs.search_cost import SearchCost
from hf_dcsgd.runs.trace import read_trace

logger = logging.getLogger(__name__)

JSON_FILENAME = "privacy_report.json"
HTML_FILENAME = "privacy_report.html"

NOTES = (
    "The evaluation data are not protected: metrics are computed from them without noise.",
    "Gaussian noise is drawn in floating point. Attacks on its finite precision are not covered by the guarantee.",
    "The guarantee is for this one run. Choosing among several runs on the same data costs more.",
)
# Second opinions by PLD use a grid ten times coarser: half a second instead of five, and still an upper bound.
_GRID_SCALE = 10.0


# -- the report ------------------------------------------------------------------------------------------------------


def build_report(run_dir: str | os.PathLike[str]) -> PrivacyReport:
    """Build the report of the last run in `run_dir`. `LedgerError` when its ledger is missing or was changed."""
    ledger = PrivacyLedger.read(run_dir)
    run = ledger.runs[-1]
    record = read_run_record(run_dir)
    plan, notes = PrivacyPlan.from_privacy_dict(run.plan), list(NOTES)
    if record is not None:
        recorded = PrivacyPlan.from_dict(record["plan"])
        # The record withholds the seed.
        if {**recorded.privacy_dict(), "unsafe_noise_seed": plan.unsafe_noise_seed} != plan.privacy_dict():
            notes.append(f"{RUN_FILENAME} describes another run than the ledger, so the model is left out.")
            record = None
        else:
            plan = recorded
    if plan.unit is not None:
        notes.append(f"Unit of privacy: {describe_unit(plan.unit)}.")
    if plan.delta * plan.num_units >= 1:
        notes.append("δ is no smaller than 1/N, as in the paper; a smaller one is better practice.")
    notes += _search_notes(Path(run_dir))
    trace = read_trace(run_dir)
    if len(trace) > run.charged:
        raise LedgerError(
            f"{PrivacyLedger.FILENAME} holds {run.charged} charges, but {len(trace)} steps were released: lines of "
            "the ledger are missing, and what was spent is unknown"
        )
    past = Past.of([(run, PrivacyPlan.from_privacy_dict(run.plan)) for run in ledger.runs])
    return {
        "format": 1,
        "guarantee": _guarantee(plan, run.charged, past),
        "budget": _budget(plan, run.charged),
        "steps": {
            "planned": plan.steps,
            "charged": run.charged,
            "released": len(trace),
            "lost": max(run.charged - len(trace), 0),
            "torn_ledger_lines": run.torn_lines,
        },
        "sampling": {
            "method": "poisson",
            "dataset_size": plan.dataset_size,
            "expected_batch_size": plan.expected_batch_size,
            "sampling_rate": plan.sampling_rate,
            "privacy_unit": None if plan.unit is None else asdict(plan.unit),
        },
        "noise": {
            "noise_multiplier": plan.noise_multiplier,
            "grad_noise_multiplier": plan.grad_noise_multiplier,
            "side_noise_multipliers": plan.side_noise_multipliers,
            "loss_clip": plan.loss_clip,
        },
        "clipping": {"strategy": plan.clipping, "settings": dict(plan.settings)},
        "layout": {"world_size": plan.world_size, "gradient_accumulation_steps": plan.gradient_accumulation_steps},
        "model": _model(plan, record),
        "earlier_spending": past.earlier_spending(),
        "earlier_runs": past.earlier_runs(),
        "software": software_versions() if record is None else record["software"],
        "trajectory": _trajectory(trace),
        "epsilon_over_steps": _epsilon_over_steps(plan, run.charged),
        "notes": notes,
    }


def format_spending(report: PrivacyReport) -> str:
    """Say in one line what the run spent, and with it all runs before it that may have used the same data."""
    guarantee, budget, earlier = report["guarantee"], report["budget"], report["earlier_runs"]
    if not guarantee["holds"]:
        return guarantee["sentence"]
    parts = [f"spent: {_bound(budget['epsilon'], budget['delta'])}"]
    if report["sampling"]["privacy_unit"] is not None:
        parts[0] += f" to {guarantee['neighboring']}"
    spending = report["earlier_spending"]
    if spending is not None:
        parts.append(
            "what these weights had spent before is left out, as their data are said to be others "
            f"(earlier_spending={spending['dismissed']})"
            if spending["dismissed"]
            else "together with what these weights had spent before, if the data are the same: "
            + _bound(guarantee["epsilon"], guarantee["delta"])
        )
    if earlier is not None:
        parts.append(
            "an earlier run in this directory has no guarantee"
            if earlier["composed_epsilon"] is None
            else "together with the earlier runs in this directory, if they used the same data: "
            + _bound(earlier["composed_epsilon"], earlier["composed_delta"])
        )
    return "; ".join(parts)


def write_report(report: PrivacyReport, trace: Sequence[dict[str, Any]], directory: str | os.PathLike[str]) -> Path:
    """Write both files; returns the page, or the JSON file where the extra `report` is not installed."""
    path = write_atomically(Path(directory) / JSON_FILENAME, as_json(report))
    try:
        from hf_dcsgd.reporting.page import render_page

        page = render_page(report, trace)
    except ImportError as error:
        logger.warning(
            "%s is written, but no page: %s is missing (pip install 'hf-dcsgd[report]', then hf-dcsgd report %s)",
            path,
            error.name,
            directory,
        )
        (Path(directory) / HTML_FILENAME).unlink(missing_ok=True)
        return path
    return write_atomically(Path(directory) / HTML_FILENAME, page)


def is_written(report: PrivacyReport, directory: Path) -> bool:
    """Tell whether this very report, and its page, are in the directory."""
    path = directory / JSON_FILENAME
    return (directory / HTML_FILENAME).exists() and path.exists() and path.read_text("utf-8") == as_json(report)


def try_to_write_report(run_dir: str | os.PathLike[str]) -> Path | None:
    """Build and write the report of a run; a failure is logged, so that it does not take a finished training down."""
    try:
        return write_report(build_report(run_dir), read_trace(run_dir), run_dir)
    except Exception:
        logger.warning("no privacy report was written; `hf-dcsgd report %s` tries again", run_dir, exc_info=True)
        return None


# -- its parts --------------------------------------------------------------------------------------------------------


def _guarantee(plan: PrivacyPlan, charged: int, past: Past) -> Guarantee:
    opt_outs: list[OptOut] = [{"name": name, "text": opt_out_text(name)} for name in plan.opt_outs]
    inherited = past.inherited.runs if past.dismissed is None else ()
    voided = sorted({name for run in inherited for name in run.opt_outs})
    others = sorted({run.unit or "example" for run in inherited if run.unit != past.this.unit})
    for kind, names in (("that protects another unit", others), ("without a guarantee", voided)):
        if names:
            text = f"These weights come from a run {kind} ({', '.join(names)}), maybe on the same data."
            opt_outs.append({"name": "earlier_spending", "text": text})
    epsilon, accountant = (
        past.of_the_weights.bound(plan.delta) if inherited else (plan.epsilon(charged), plan.accountant)
    )
    if opt_outs:
        named = " and ".join(opt_out["name"] for opt_out in opt_outs)
        sentence = f"There is no privacy guarantee for this run, because of {named}."
    else:
        level = "single training examples" if plan.unit is None else f"whole {plan.unit.column} values"
        steps = sum(run.charged for run in inherited) + charged
        sentence = (
            f"The trained model and all that the run logged are (ε = {rounded_up(epsilon)}, δ = "
            f"{rounded_up(plan.delta)})-differentially private at the level of {level}: for adding or removing "
            f"any one {plan.protected}, with batches drawn by Poisson sampling, as computed by the "
            f"{accountant.upper()} accountant over {steps:,} charged step{'' if steps == 1 else 's'}."
        )
        if inherited:
            sentence += (
                f" This run was charged {charged:,} of them (ε = {rounded_up(plan.epsilon(charged))}); the others "
                "were spent on these weights before, on data that may be the same."
            )
        elif past.dismissed:
            sentence += (
                " What these weights had spent before is left out, as their data are said to be others "
                f"(earlier_spending={past.dismissed})."
            )
    return {
        "holds": not opt_outs,
        "sentence": sentence,
        "epsilon": None if opt_outs else finite(epsilon),
        "delta": None if opt_outs else plan.delta,
        "unit": "example" if plan.unit is None else plan.unit.column,
        "neighboring": f"add or remove one {plan.protected}",
        "sampling": "poisson",
        "accountant": accountant,
        "opt_outs": opt_outs,
    }


def _budget(plan: PrivacyPlan, charged: int) -> Budget:
    other = next(name for name in ACCOUNTANTS if name != plan.accountant)
    return {
        "accountant": plan.accountant,
        "epsilon": finite(plan.epsilon(charged)),
        "delta": plan.delta,
        "target_epsilon": plan.target_epsilon,
        "planned_epsilon": finite(plan.epsilon()),
        "other_accountant": other,
        # Of a group of rows, only PLD knows the cost.
        "other_epsilon": None if plan.group_size > 1 else finite(plan.epsilon(charged, other, _GRID_SCALE)),
    }


def _epsilon_over_steps(plan: PrivacyPlan, charged: int) -> dict[str, list[Any]]:
    """Compute ε at steps that lie closer together at the start, where it rises fast; few by PLD, which is slow."""
    points = 60 if plan.accountant == "rdp" else 6
    steps = sorted({math.ceil(charged * (k / points) ** 2) for k in range(points + 1)})
    values = [plan.epsilon(s, grid_scale=1.0 if s == charged else _GRID_SCALE) for s in steps]
    return {"steps": steps, "epsilon": [finite(value) for value in values]}


def _search_notes(run_dir: Path) -> list[str]:
    """Tell of a hyperparameter search in this directory, or around this trial, which has a price of its own."""
    around = SearchCost.read(run_dir.parent) if run_dir.name.startswith("run-") else None
    cost = SearchCost.read(run_dir) or around
    if cost is None:
        return []
    price = _bound(cost.epsilon, cost.delta)
    if cost.opt_outs:
        price = f"an unbounded ε, because of {' and '.join(cost.opt_outs)}"
    return [
        f"A hyperparameter search of {len(cost.trials)} trials on the same data cost {price} by composition. "
        "A model chosen by it, or trained with what it found, costs that on top."
    ]


def _model(plan: PrivacyPlan, record: Mapping[str, Any] | None) -> Model:
    known: Mapping[str, Any] = record or {}
    parameters = known.get("parameters", {})
    return {
        "num_parameters": plan.num_parameters,
        "total_parameters": known.get("total_parameters"),
        "sharded_parameters": known.get("sharded_parameters", 0),
        "class": known.get("model_class"),
        "base_model": known.get("base_model"),
        "peft": known.get("peft", False),
        "trainable_layers": known.get("trainable_layers"),
        "groups": parameter_groups(parameters) or None,
        "parameters": list(parameters),
        "modules_by_rule": dict(Counter(known.get("rules", {}).values())),
        "slow_parameters": known.get("slow_parameters", []),
    }


def _trajectory(trace: list[dict[str, Any]]) -> dict[str, list[Any]]:
    known = {name for line in trace for name in line}
    names = [name for name in ("clip_threshold", "histogram_range", "noisy_clip_fraction") if name in known]
    return {name: [line.get(name) for line in trace] for name in ("step", *names)} if names else {}


def _bound(epsilon: float | None, delta: float | None) -> str:
    return f"ε = {rounded_up(epsilon)} at δ = {rounded_up(delta)}"
