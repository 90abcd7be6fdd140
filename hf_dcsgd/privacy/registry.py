"""Files of this user outside any output directory: they remember what a directory alone cannot.

A directory can be copied, or put back to an earlier state, and weights can be loaded without what was saved beside
them. So the last line of each run's ledger (`ledger.py`) and digests of trained weights (`runs/spending.py`) are also
kept here: `$HF_DCSGD_HOME`, by default `hf_dcsgd` in the Hugging Face home (`$HF_HOME`, `~/.cache/huggingface`). The
files hold hashes and public numbers alone, and only their owner can read them.

They are a second witness, not the first: on another machine, or once they are deleted, nothing is found here.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_CACHE = "~/.cache"
_RUN_ID = re.compile("[0-9a-f]{32}")


def registry_path(*parts: str) -> Path:
    """Return the path of one file of the registry; its folder is made, readable by its owner alone."""
    hub_home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or _CACHE, "huggingface")
    home = Path(os.environ.get("HF_DCSGD_HOME") or os.path.join(hub_home, "hf_dcsgd"))
    path = Path(os.path.expandvars(home)).expanduser().joinpath(*parts)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def open_private(path: Path, flags: int) -> int:
    """Open a file of the registry for its owner alone; returns the descriptor."""
    return os.open(path, flags | os.O_CREAT, 0o600)


def hold(file: int) -> None:
    """Lock an open file until it is closed or the process ends; BlockingIOError where somebody else holds it.

    A file system without locks, and Windows, leave it unlocked.
    """
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            return


def last_known_line(run_id: str | None) -> tuple[int, str] | None:
    """Return the charged steps and the hash of a run's last line, as far as the registry remembers them."""
    try:
        charged, head = _witness_path(run_id).read_text(encoding="ascii").split()
        return int(charged), head
    except (OSError, ValueError):
        return None


class LedgerWitness:
    """Remembers the last line of one run's ledger; does nothing where the registry cannot be written.

    `BlockingIOError` while another copy of that ledger is open.
    """

    def __init__(self, run_id: str | None) -> None:
        self._file = -1
        with contextlib.suppress(OSError, ValueError):
            self._file = open_private(_witness_path(run_id), os.O_WRONLY)
        if self._file >= 0:
            hold(self._file)

    def __del__(self) -> None:
        self.close()

    def write(self, charged: int, head: str) -> None:
        """Remember a line that the ledger holds already; after a crash in between it is an earlier one.

        One write of constant length and no sync, as it comes with every step.
        """
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._file, f"{charged:012d} {head}".encode(), 0)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _witness_path(run_id: str | None) -> Path:
    if run_id is None or not _RUN_ID.fullmatch(run_id):  # it comes from a file and becomes the name of another
        raise ValueError(f"expected the id of a run, got {run_id!r}")
    return registry_path("ledgers", run_id)
