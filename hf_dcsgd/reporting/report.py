"""The statement that a run leaves behind: `privacy_report.json` and `privacy_report.html`, made from files on disk.

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

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hf_dcsgd.privacy import accounting
from hf_dcsgd.privacy.ledger import LedgerError, LedgerRun, PrivacyLedger
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.reporting.plan_table import opt_out_text
from hf_dcsgd.reporting.run_record import (
    RUN_FILENAME,
    as_json,
    read_run_record,
    read_trace,
    software_versions,
    write_run_record,
    write_whole,
)
from hf_dcsgd.runs.search_cost import COST_FILENAME

__all__ = ["build_report", "read_trace", "try_to_write_report", "write_report", "write_run_record"]

logger = logging.getLogger(__name__)

JSON_FILENAME = "privacy_report.json"
HTML_FILENAME = "privacy_report.html"

NOTES = (
    "The evaluation data are not protected: metrics are computed from them without noise.",
    "Gaussian noise is drawn in floating point. Attacks on its finite precision are not covered by the guarantee.",
    "The guarantee is for this one run. Choosing among several runs on the same data costs more.",
)
_MODEL_DETAILS = ("total_parameters", "class", "base_model", "trainable_layers", "groups")
# Second opinions by PLD use a grid ten times coarser: half a second instead of five, and still an upper bound.
_GRID_SCALE = 10.0


# -- the report ------------------------------------------------------------------------------------------------------


def build_report(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """The report of the last run in `run_dir`, JSON-able. `LedgerError` when the ledger is missing or was changed."""
    ledger = PrivacyLedger.read(run_dir)
    run = ledger.runs[-1]
    record = read_run_record(run_dir)
    plan, notes = _plan_of(run), list(NOTES)
    if record is not None:
        recorded = PrivacyPlan.from_dict(record["plan"])
        if _differs(recorded, plan):
            notes.append(
                f"{RUN_FILENAME} describes another run than the ledger, so details of the model are left out."
            )
            record = None
        else:
            plan = recorded
    if plan.delta * plan.dataset_size >= 1:
        notes.append("δ is no smaller than 1/N, as in the paper; a smaller one is better practice.")
    notes += _search_notes(Path(run_dir))
    trace = read_trace(run_dir)
    if len(trace) > run.charged:
        raise LedgerError(
            f"{PrivacyLedger.FILENAME} holds {run.charged} charges, but {len(trace)} steps were released: lines of "
            "the ledger are missing, and what was spent is unknown"
        )
    return {
        "format": 1,
        "guarantee": _guarantee(plan, run.charged),
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
        "earlier_runs": _earlier_runs(ledger.runs),
        "software": software_versions() if record is None else record["software"],
        "trajectory": _trajectory(trace),
        "epsilon_over_steps": _epsilon_over_steps(plan, run.charged),
        "notes": notes,
    }


def spent_in_words(report: Mapping[str, Any]) -> str:
    """One line for a terminal: what the run spent, and with it all runs in its directory."""
    if not report["guarantee"]["holds"]:
        return str(report["guarantee"]["sentence"])
    budget, earlier = report["budget"], report["earlier_runs"]
    line = f"spent: ε = {rounded_up(budget['epsilon'])} at δ = {rounded_up(budget['delta'])}"
    if not earlier:
        return line
    if earlier["composed_epsilon"] is None:
        return f"{line}; an earlier run in this directory has no guarantee"
    return (
        f"{line}; together with the earlier runs in this directory, if they used the same data: "
        f"ε = {rounded_up(earlier['composed_epsilon'])} at δ = {rounded_up(earlier['composed_delta'])}"
    )


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Writes both reports; returns the page, or the JSON file where the extra `report` is not installed."""
    report = build_report(run_dir)
    path = write_whole(Path(run_dir) / JSON_FILENAME, as_json(report))
    try:
        from hf_dcsgd.reporting.page import render_page

        page = render_page(report, read_trace(run_dir))
    except ImportError as error:
        logger.warning(
            "%s is written, but no page: %s is missing (pip install 'hf-dcsgd[report]', then hf-dcsgd report %s)",
            path,
            error.name,
            run_dir,
        )
        (Path(run_dir) / HTML_FILENAME).unlink(missing_ok=True)
        return path
    return write_whole(Path(run_dir) / HTML_FILENAME, page)


def try_to_write_report(run_dir: str | os.PathLike[str]) -> Path | None:
    """As `write_report`, but a failure is logged: it must not take a finished training down with it."""
    try:
        return write_report(run_dir)
    except Exception:
        logger.warning("no privacy report was written; `hf-dcsgd report %s` tries again", run_dir, exc_info=True)
        return None


def rounded_up(value: float | None, digits: int = 4) -> str:
    """A bound as text, never smaller than it is: 7.99999 is shown as 8, infinity and nothing as ∞."""
    if value is None or not math.isfinite(value):
        return "∞"
    if value <= 0:
        return "0"
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return f"{math.ceil(value * scale * (1 - 1e-12)) / scale:.{digits}g}"


def shown_number(value: Any) -> str:
    """Counts with thousands separators, other numbers with five digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def parameter_groups(sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Parameters by the block or part of the model they belong to, in the model's order."""
    groups: dict[str, list[int]] = {}
    for name, size in sizes.items():
        groups.setdefault(_group_of(name), []).append(size)
    return [{"name": name, "tensors": len(group), "parameters": sum(group)} for name, group in groups.items()]


def _group_of(name: str) -> str:
    path = name.removeprefix("base_model.model.").split(".")[:-1] or [name]
    numbered = next((i for i, part in enumerate(path) if part.isdecimal()), None)
    return ".".join(path[: 2 if numbered is None else numbered + 1])


# -- its parts --------------------------------------------------------------------------------------------------------


def _guarantee(plan: PrivacyPlan, charged: int) -> dict[str, Any]:
    epsilon = plan.epsilon(charged)
    opt_outs = [{"name": name, "text": opt_out_text(name)} for name in plan.opt_outs]
    if opt_outs:
        named = " and ".join(plan.opt_outs)
        sentence = f"There is no privacy guarantee for this run, because of {named}."
    else:
        sentence = (
            f"The trained model and all that the run logged are (ε = {rounded_up(epsilon)}, δ = "
            f"{rounded_up(plan.delta)})-differentially private at the level of single training examples: for adding "
            "or removing any one example, with batches drawn by Poisson sampling, as computed by the "
            f"{plan.accountant.upper()} accountant over {charged:,} charged step{'' if charged == 1 else 's'}."
        )
    return {
        "holds": not opt_outs,
        "sentence": sentence,
        "epsilon": None if opt_outs else _finite(epsilon),
        "delta": None if opt_outs else plan.delta,
        "unit": "example",
        "neighbouring": "add or remove one example",
        "sampling": "poisson",
        "accountant": plan.accountant,
        "opt_outs": opt_outs,
    }


def _budget(plan: PrivacyPlan, charged: int) -> dict[str, Any]:
    """What the accountants say of the noise that was planned, whether or not an opt-out voids it."""
    other = next(name for name in accounting.ACCOUNTANTS if name != plan.accountant)
    return {
        "accountant": plan.accountant,
        "epsilon": _finite(plan.epsilon(charged)),
        "delta": plan.delta,
        "target_epsilon": plan.target_epsilon,
        "planned_epsilon": _finite(plan.epsilon()),
        "other_accountant": other,
        "other_epsilon": _finite(_quick_epsilon(plan, charged, other)),
    }


def _quick_epsilon(plan: PrivacyPlan, steps: int, accountant: str) -> float:
    return accounting.epsilon_spent(
        noise_multiplier=plan.noise_multiplier,
        sampling_rate=plan.sampling_rate,
        steps=steps,
        delta=plan.delta,
        accountant=accountant,
        grid_scale=_GRID_SCALE,
    )


def _epsilon_over_steps(plan: PrivacyPlan, charged: int) -> dict[str, list[Any]]:
    """ε at steps that lie closer together at the start, where it rises fast; few of them by PLD, which is slow."""
    points = 60 if plan.accountant == "rdp" else 6
    steps = sorted({math.ceil(charged * (k / points) ** 2) for k in range(points + 1)})
    values = [plan.epsilon(s) if s == charged else _quick_epsilon(plan, s, plan.accountant) for s in steps]
    return {"steps": steps, "epsilon": [_finite(value) for value in values]}


def _earlier_runs(runs: tuple[LedgerRun, ...]) -> dict[str, Any] | None:
    """Runs before the last one in this ledger, and what all of them cost together if their data were the same."""
    charged = [(run, _plan_of(run)) for run in runs if run.charged]
    earlier = [(run, plan) for run, plan in charged if run is not runs[-1]]
    if not earlier:
        return None
    last = _plan_of(runs[-1])
    return {
        "runs": [
            {
                "clipping": plan.clipping,
                "charged": run.charged,
                "epsilon": None if plan.opt_outs else _finite(plan.epsilon(run.charged)),
                "delta": plan.delta,
                "accountant": plan.accountant,
                "opt_outs": list(plan.opt_outs),
            }
            for run, plan in earlier
        ],
        "composed_epsilon": _finite(_composed_epsilon(charged, last.delta)),
        "composed_delta": last.delta,
    }


def _composed_epsilon(runs: list[tuple[LedgerRun, PrivacyPlan]], delta: float) -> float:
    """ε of all these runs on one dataset; infinite when one of them has no guarantee."""
    if any(plan.opt_outs for _, plan in runs):
        return math.inf
    accounted = [accounting.AccountedRun(plan.noise_multiplier, plan.sampling_rate, run.charged) for run, plan in runs]
    return accounting.composed_epsilon(accounted, delta)


def _search_notes(run_dir: Path) -> list[str]:
    """A hyperparameter search in this directory, or around this trial, has a price of its own."""
    folders = [run_dir, *([run_dir.parent] if run_dir.name.startswith("run-") else [])]
    path = next((folder / COST_FILENAME for folder in folders if (folder / COST_FILENAME).exists()), None)
    if path is None:
        return []
    cost = json.loads(path.read_text(encoding="utf-8"))
    price = f"ε = {rounded_up(cost['epsilon'])} at δ = {rounded_up(cost['delta'])}"
    if cost["opt_outs"]:
        price = f"an unbounded ε, because of {' and '.join(cost['opt_outs'])}"
    return [
        f"A hyperparameter search of {len(cost['trials'])} trials on the same data cost {price} by composition. "
        "A model chosen by it, or trained with what it found, costs that on top."
    ]


def _model(plan: PrivacyPlan, record: Mapping[str, Any] | None) -> dict[str, Any]:
    if record is None:
        return {"num_parameters": plan.num_parameters, **dict.fromkeys(_MODEL_DETAILS)}
    counts: dict[str, int] = {}
    for rule in record["rules"].values():
        counts[rule] = counts.get(rule, 0) + 1
    return {
        "num_parameters": plan.num_parameters,
        "total_parameters": record["total_parameters"],
        "class": record["model_class"],
        "base_model": record["base_model"],
        "peft": record["peft"],
        "trainable_layers": record["trainable_layers"],
        "groups": parameter_groups(record["parameters"]),
        "parameters": list(record["parameters"]),
        "modules_by_rule": counts,
        "slow_parameters": record["slow_parameters"],
    }


def _trajectory(trace: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = [
        name
        for name in ("clip_threshold", "histogram_range", "noisy_clip_fraction")
        if any(name in line for line in trace)
    ]
    return {name: [line.get(name) for line in trace] for name in ("step", *names)} if names else {}


def _plan_of(run: LedgerRun) -> PrivacyPlan:
    """The plan in a ledger's header, which is flat: what is no field of a plan is a setting of its strategy."""
    names = {field.name for field in fields(PrivacyPlan)}
    settings = {name: value for name, value in run.plan.items() if name not in names}
    return PrivacyPlan.from_dict({**{n: v for n, v in run.plan.items() if n in names}, "settings": settings})


def _differs(recorded: PrivacyPlan, charged: PrivacyPlan) -> bool:
    return bool(charged.differences(recorded).keys() - {"unsafe_noise_seed"})  # the record withholds the seed


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
