"""The start of a run: what processes and checkpoint agree on, the checks, the mechanism with its ledger opened.

`saved` is what `callbacks.saved_privacy_state` found in the checkpoint that is resumed from, None for a new run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from hf_dcsgd.checks.preflight import check_before_training
from hf_dcsgd.data.rows import Collator, RowCollator, fetch_row
from hf_dcsgd.data.units import UNIT_ENTRY
from hf_dcsgd.privacy.ledger import PrivacyLedger
from hf_dcsgd.privacy.mechanism import BudgetExhausted, DPMechanism
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.runs.callbacks import saved_privacy_state
from hf_dcsgd.runs.checkpoints import require_same_plan, require_traced_charges
from hf_dcsgd.runs.processes import on_main_process, public_settings, require_agreement
from hf_dcsgd.runs.spending import earlier_statement
from hf_dcsgd.runs.trace import TRACE_FILENAME
from hf_dcsgd.step import PrivateStep

Saved = dict[str, Any]


def agree_on_run(plan: PrivacyPlan, args: TrainingArguments, model: nn.Module, checkpoint: str | None) -> None:
    """Settle what all ranks must have in common, before the model is wrapped: plan, arguments and checkpoint.

    A rank that fails alone would leave the others waiting in whatever collective call comes next.
    """
    global_step, saved = (0, None) if checkpoint is None else read_saved_state(checkpoint)
    # Not the ledger's head: with disks of their own, only one process has it.
    state = (saved or {}).get("mechanism", {})
    numbers = {"global_step": global_step, **{name: state.get(name) for name in ("charged", "threshold")}}
    require_agreement(public_settings(plan, args, model) | {"checkpoint": numbers})
    if checkpoint is not None:
        if saved is None:
            raise ValueError(f"{checkpoint} was not written by DCSGDTrainer: its cost is unknown")
        require_same_plan(PrivacyPlan.from_dict(saved["plan"]), plan)


def start_run(
    step: PrivateStep,
    plan: PrivacyPlan,
    rows: Any,
    collate: Collator,
    run_dir: Path,
    *,
    checkpoint: str | None = None,
    earlier_spending: str = "count",
    keep_tokens: tuple[int, ...] = (),
    is_main_process: bool = True,
) -> dict[str, Any] | None:
    """Check model and data, open the ledger and give the step its mechanism; return what was spent earlier, if it was.

    `keep_tokens` are special tokens, which synthetic rows have where the first of `rows` has them.
    """
    step.train()
    with step.randomness():
        row = RowCollator(collate).alone(fetch_row(rows, 0))
    if plan.draws_units:
        row[UNIT_ENTRY] = torch.zeros(1, dtype=torch.long)
    with step.forward_context():
        made_up = check_before_training(step, row, keep_tokens)
    step.settle(made_up)
    saved = None if checkpoint is None else read_saved_state(checkpoint)[1]
    earlier = earlier_statement(step.model, earlier_spending) if saved is None else None
    step.mechanism = start_mechanism(
        plan, run_dir, saved, is_main_process=is_main_process, device=step.device, earlier=earlier
    )
    if is_main_process and saved is None:
        (run_dir / TRACE_FILENAME).unlink(missing_ok=True)
    return earlier


def read_saved_state(checkpoint: str) -> tuple[int, Saved | None]:
    """Read the step of a checkpoint, and the privacy state in it."""
    state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
    return state.global_step, saved_privacy_state(state)


def refuse_second_run(mechanism: DPMechanism | None) -> None:
    """Refuse to train a model once more that this mechanism has trained: the budget would be passed unseen."""
    if mechanism is not None and mechanism.charged:
        raise BudgetExhausted(
            f"this model was trained for {mechanism.charged} charged steps already (ε = {mechanism.epsilon():.4g}), "
            "and a second run on top would add to them. To go on with an interrupted run use resume_from_checkpoint; "
            "to start over pass a fresh model, or a model_init"
        )


def start_mechanism(
    plan: PrivacyPlan,
    run_dir: Path,
    saved: Saved | None,
    *,
    is_main_process: bool,
    device: torch.device,
    earlier: dict[str, Any] | None = None,
) -> DPMechanism:
    """Build the mechanism of a run, as its ledger and checkpoint say it stands; refused when nothing is left to spend.

    `earlier` is what `spending.earlier_statement` found before a new run; it goes into the ledger.
    """

    def open_ledger() -> PrivacyLedger:
        run_dir.mkdir(parents=True, exist_ok=True)
        return PrivacyLedger.open(run_dir, plan.privacy_dict(), resume=saved is not None, earlier=earlier)

    mechanism = DPMechanism(
        plan,
        ledger=on_main_process(open_ledger),
        all_reduce=torch.distributed.all_reduce if plan.world_size > 1 else None,
        is_main_process=is_main_process,
    )
    try:
        if saved is not None:
            on_main_process(lambda: mechanism.load_state_dict(saved["mechanism"]))
            on_main_process(lambda: require_traced_charges(run_dir, mechanism.charged))
            if not is_main_process:
                mechanism.load_state_dict(saved["mechanism"])
        mechanism.agree_on_charges(device)
        if mechanism.exhausted:
            raise BudgetExhausted(
                f"all {plan.steps} planned steps are charged already ({mechanism.charged}), so not one more can be "
                f"taken within ε = {plan.epsilon():.4g}"
            )
    except BaseException:
        mechanism.close()  # or the traceback would hold its lock
        raise
    return mechanism
