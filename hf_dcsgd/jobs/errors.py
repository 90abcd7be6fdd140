"""Report mistakes that a user can correct in one line instead of a traceback."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from hf_dcsgd.checks.parity import ParityError
from hf_dcsgd.ghost import BatchCouplingError, UnsupportedModelError
from hf_dcsgd.privacy.ledger import LedgerError
from hf_dcsgd.privacy.mechanism import BudgetExhausted

# Exit codes; 1 is Python's own, for a fault with a traceback.
USAGE_ERROR, REFUSED, SPENT, INTERRUPTED = 2, 3, 4, 130
_CODES = {UnsupportedModelError: REFUSED, BatchCouplingError: REFUSED, ParityError: REFUSED} | {
    BudgetExhausted: SPENT,
    LedgerError: SPENT,
}
_JOBS = Path(__file__).resolve().parent


class UserError(Exception):
    """Something that the user can put right; the message says what and how."""


@contextmanager
def explained(message: Callable[[Exception], str], *errors: type[Exception]) -> Iterator[None]:
    """Turn the given errors into a UserError with this message."""
    try:
        yield
    except errors as error:
        raise UserError(message(error)) from error


def needs_extra(feature: str, extra: str = "demo") -> AbstractContextManager[None]:
    """Explain which extra to install where an import fails."""
    return explained(
        lambda error: f"{feature} needs more packages ({error}): pip install 'hf-dcsgd[{extra}]'", ImportError
    )


def exit_code_of(job: Callable[[], object]) -> int:
    """Run a job; print an error meant for the user as one line on stderr. Anything else keeps its traceback.

    Meant for the user are UserError and what the rest of hf_dcsgd raises: its messages name the argument and its
    value. HF_DCSGD_TRACEBACK=1 shows the traceback of these, too.

    | code | meaning                                                                        |
    |------|--------------------------------------------------------------------------------|
    | 0    | done                                                                           |
    | 1    | a fault, with its traceback                                                    |
    | 2    | an option, a file or a budget that must be put right; nothing was spent        |
    | 3    | model, loss or data cannot be trained privately                                |
    | 4    | the budget is spent, or the ledger of what was spent cannot be relied upon     |
    | 130  | interrupted                                                                    |
    """
    try:
        job()
    except KeyboardInterrupt:
        print("interrupted; if a checkpoint was saved, --resume_from_checkpoint last goes on from it", file=sys.stderr)
        return INTERRUPTED
    except (UserError, ValueError, TypeError, RuntimeError) as error:
        wants_traceback = os.environ.get("HF_DCSGD_TRACEBACK", "0") not in ("", "0")
        if wants_traceback or not (isinstance(error, UserError) or _raised_by_hf_dcsgd(error)):
            raise
        print(f"error: {'; '.join(part.strip() for part in str(error).splitlines() if part.strip())}", file=sys.stderr)
        return next((code for kind, code in _CODES.items() if isinstance(error, kind)), USAGE_ERROR)
    return 0


def _raised_by_hf_dcsgd(error: Exception) -> bool:
    origin = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    return _JOBS.parent in origin.parents and _JOBS not in origin.parents
