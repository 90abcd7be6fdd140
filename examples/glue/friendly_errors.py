"""Errors that a person meets first, in one line instead of a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hf_dcsgd

EXIT_CODE = 2
INTERRUPTED = 130
_OWN_PACKAGE = Path(hf_dcsgd.__file__).parent


class UserError(Exception):
    """Something that the user can put right; the message says what and how."""


@contextmanager
def explained(message: Callable[[Exception], str], *errors: type[Exception]) -> Iterator[None]:
    """Turns the given errors into a UserError with this message."""
    try:
        yield
    except errors as error:
        raise UserError(message(error)) from error


def exit_with_one_line(run: Callable[[], object]) -> int:
    """Runs; an error meant for the user becomes one line on stderr. Anything else keeps its traceback.

    Meant for the user are UserError and whatever hf_dcsgd itself raises: its messages name the argument and its value.
    HF_DCSGD_TRACEBACK=1 shows the traceback of these, too.
    """
    try:
        run()
    except KeyboardInterrupt:
        print("interrupted; if a checkpoint was saved, --resume_from_checkpoint last goes on from it", file=sys.stderr)
        return INTERRUPTED
    except UserError as error:
        return _say(error)
    except (ValueError, RuntimeError) as error:
        if not _raised_by_hf_dcsgd(error):
            raise
        return _say(error)
    return 0


def _say(error: Exception) -> int:
    if os.environ.get("HF_DCSGD_TRACEBACK", "0") not in ("", "0"):
        raise error
    line = "; ".join(part.strip() for part in str(error).splitlines() if part.strip())
    print(f"error: {line}", file=sys.stderr)
    return EXIT_CODE


def _raised_by_hf_dcsgd(error: Exception) -> bool:
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return _OWN_PACKAGE in Path(trace.tb_frame.f_code.co_filename).resolve().parents
