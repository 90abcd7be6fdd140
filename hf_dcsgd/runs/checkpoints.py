"""Decides which checkpoints may be resumed from: those that are whole, and made under the same plan."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_dcsgd.privacy.ledger import LedgerError, PrivacyLedger, plan_differences
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.runs.trace import TRACE_FILENAME

logger = logging.getLogger(__name__)


def is_complete(checkpoint: Path) -> bool:
    """Tell whether a checkpoint was written to its end: the trainer's state comes after weights and optimizer."""
    try:
        return isinstance(json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8")), dict)
    except (OSError, ValueError):
        return False


def last_complete_checkpoint(output_dir: str | Path) -> str:
    """Return the newest checkpoint that is whole; ValueError where there is none."""
    by_step = {path.name.rsplit("-", 1)[1]: path for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    for step in sorted((step for step in by_step if step.isdigit()), key=int, reverse=True):
        if is_complete(by_step[step]):
            return str(by_step[step])
        logger.warning("%s is incomplete and is skipped", by_step[step])
    raise ValueError(f"expected a complete checkpoint in {output_dir} to resume from, found none")


def checkpoint_to_resume(wanted: str | Path | bool | None, output_dir: str | Path) -> str | None:
    """Return the checkpoint to resume from: the one that is named, or the newest for True; never an incomplete one."""
    if wanted is True:
        return last_complete_checkpoint(output_dir)
    return require_complete(wanted) if wanted else None


def require_complete(checkpoint: str | Path) -> str:
    """Return the checkpoint's path; ValueError unless it is whole."""
    if not is_complete(Path(checkpoint)):
        raise ValueError(
            f"expected a complete checkpoint at {checkpoint}, but its {TRAINER_STATE_NAME} is missing or broken; "
            "resume from an earlier one, or pass resume_from_checkpoint=True for the last that is whole"
        )
    return str(checkpoint)


def require_same_plan(saved: PrivacyPlan, now: PrivacyPlan) -> None:
    """Raise ValueError where the privacy settings differ; another number of processes is only logged."""
    differences = plan_differences(saved.privacy_dict(), now.privacy_dict(), "the checkpoint")
    if differences:
        raise ValueError(f"a run cannot be resumed under other privacy settings. {differences}{_layouts(saved, now)}")
    if _layouts(saved, now):
        logger.warning("the run goes on with the same expected batch size%s", _layouts(saved, now))


def require_traced_charges(run_dir: Path, charged: int) -> None:
    """Raise `LedgerError` when the trace of a run shows more releases than its ledger has charges.

    A step is traced after it was charged, so lines of the ledger are then missing. Finds a ledger that was put back to
    an earlier state where the registry of `privacy/registry.py` is not at hand.
    """
    trace = run_dir / TRACE_FILENAME
    released = trace.read_bytes().count(b"\n") if trace.exists() else 0
    if released > charged:
        raise LedgerError(
            f"expected at least {released} charged steps in {run_dir / PrivacyLedger.FILENAME}, as many as were "
            f"released by {TRACE_FILENAME}, got {charged}: it was put back to an earlier state, or lines were removed"
        )


def _layouts(saved: PrivacyPlan, now: PrivacyPlan) -> str:
    """Say how the work was spread over processes and is now, where that differs."""
    before, here = ((p.world_size, p.gradient_accumulation_steps) for p in (saved, now))
    if before == here:
        return ""
    return "; processes × gradient_accumulation_steps: {} × {} in the checkpoint, {} × {} now".format(*before, *here)
