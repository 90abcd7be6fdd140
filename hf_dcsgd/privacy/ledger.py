"""Write-ahead ledger: every step is charged, durably, before anything of it is released.

Guarantee. When `PrivacyLedger.charge` returns, the charge has reached the disk; a release follows it, never precedes
it. So after a crash at any point the ledger holds at least as many charges as there were releases. A step that is
replayed after a crash is charged again: the first try may have been released.

The file `privacy_ledger.jsonl` in the output directory holds one JSON object per line, each with a SHA-256 hash over
itself and the hash of the line before, so that a changed, inserted or removed line is found. Removed lines at the end
are found by two witnesses: the line that a checkpoint saw (`PrivacyLedger.verify_contains`), and the last line of each
run as this user's registry remembers it (`registry.py`).

| edge case | behavior |
|---|---|
| a line torn by a crash | one charge to the run before it; the file goes on, and a `torn` line vouches for it |
| a line changed, inserted or removed | `LedgerError` that names the line |
| a second run opens the file while one has it open | `LedgerError`; the lock ends with the process that holds it |
| another process writes to the file past the lock | `LedgerError` at the next charge |
| a copy, or put back to an earlier state, after the run went on | `LedgerError` (same user, same machine) |
| disk full or a failed write | the error is raised before the release, and this object charges nothing more |
| resumed under another plan | `LedgerError` with each differing key and both values |

This module imports nothing heavy: it must be usable to inspect a ledger without torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hf_dcsgd.privacy.registry import LedgerWitness, hold, last_known_line

_GENESIS = hashlib.sha256(b"hf_dcsgd privacy ledger").hexdigest()


class LedgerError(RuntimeError):
    """The ledger is missing, in use, was changed, or does not belong to this run."""


@dataclass
class LedgerRun:
    """One run in the ledger: its plan, and the steps charged to it (torn lines included).

    `earlier` is what its header says of earlier spending (see `runs/spending.py`).
    """

    plan: dict[str, Any]
    run_id: str | None = None
    earlier: dict[str, Any] | None = None
    charged: int = 0
    torn_lines: int = 0
    # Hash of each line of this run → steps charged up to and including it.
    charged_at: dict[str, int] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class LedgerSummary:
    """What a ledger says: its runs, oldest first; the plan of the last one, and the steps charged to it."""

    runs: tuple[LedgerRun, ...]

    @property
    def plan(self) -> dict[str, Any]:
        return self.runs[-1].plan

    @property
    def charged(self) -> int:
        return self.runs[-1].charged


class PrivacyLedger:
    """Charges the steps of one run. Make it with `open`; the file is locked until `close`."""

    FILENAME: ClassVar[str] = "privacy_ledger.jsonl"

    def __init__(self, path: Path, file: int, replay: _Replay, witness: LedgerWitness) -> None:
        self._path = path
        self._file = file
        self._witness = witness
        self._head = replay.head
        self._size = replay.size
        self._separator = "" if replay.ends_with_newline else "\n"
        self._runs = replay.runs
        self._usable = True
        _open_ledgers.add(self)

    @classmethod
    def open(
        cls,
        output_dir: str | os.PathLike[str],
        plan_dict: Mapping[str, Any],
        *,
        resume: bool,
        earlier: dict[str, Any] | None = None,
    ) -> PrivacyLedger:
        """Start a new run in `output_dir` (earlier runs' lines stay), or continue the last run under the same plan.

        `earlier` goes into the header of a new run: what the weights had spent before it.
        """
        plan = json.loads(json.dumps(dict(plan_dict)))
        path = Path(output_dir) / cls.FILENAME
        exists = path.exists()
        nothing = f"expected a run to resume in {path}, found none: steps spent so far are unknown"
        if resume and not exists:
            raise LedgerError(nothing)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            hold(file)
            replay = _Replay(path.read_bytes())
            for run in replay.runs:
                _require_witnessed(run, path)
            if resume:
                if not replay.runs:
                    raise LedgerError(nothing)
                differences = plan_differences(replay.runs[-1].plan, plan, "the ledger")
                if differences:
                    raise LedgerError(f"the run cannot be resumed under other settings: {differences}")
            # The random id makes the lines of two runs under one plan differ, so that no witness fits both.
            run = replay.runs[-1] if resume else LedgerRun(plan, secrets.token_hex(16), earlier)
            witness = LedgerWitness(run.run_id)
        except BaseException as error:
            os.close(file)
            if isinstance(error, BlockingIOError):
                raise LedgerError(
                    f"{path}, or a copy of it, is in use by another run, in this process or another: wait for it to "
                    "end, or use another output_dir"
                ) from None
            raise
        ledger = cls(path, file, replay, witness)
        if not exists:
            _sync_directory(path.parent)
        if replay.fragments:
            ledger._append({"kind": "torn", "lines": len(replay.fragments), "digest": replay.fragment_digest})
        if not resume:
            ledger._runs.append(run)
            header = {"kind": "run", "plan": plan, "id": run.run_id}
            ledger._append(header if earlier is None else {**header, "earlier": earlier})
        return ledger

    @property
    def charged(self) -> int:
        """Steps charged to this run so far."""
        return self._runs[-1].charged

    @property
    def run_id(self) -> str | None:
        """The random name of this run."""
        return self._runs[-1].run_id

    @property
    def head(self) -> str:
        """Hash of the last line: with `charged`, the witness to put into a checkpoint."""
        return self._head

    def charge(self, step: int) -> int:
        """Charge one step durably; only after this returns may anything of the step be released."""
        self._append({"kind": "charge", "step": int(step), "charged": self.charged + 1})
        return self.charged

    def verify_contains(self, charged: int, head: str) -> None:
        """Raise `LedgerError` unless this run's lines include the one that a checkpoint witnessed."""
        found = self._runs[-1].charged_at.get(head)
        if found is None:
            raise LedgerError(
                f"expected {self._path} to hold the line that the checkpoint saw after {charged} charged steps, it is "
                f"not there ({self.charged} charged): lines were removed, or the ledger belongs to another run"
            )
        if found != charged:
            raise LedgerError(
                f"expected {charged} charged steps at the checkpoint's line of {self._path}, got {found}"
            )

    def close(self) -> None:
        """Unlock the file and give it back; nothing can be charged any more."""
        if self._file >= 0:
            self._usable = False
            self._witness.close()
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        # While the interpreter ends, modules are gone before objects are: no helper of contextlib can be used.
        try:  # noqa: SIM105
            self.close()
        except (AttributeError, OSError, TypeError):
            pass

    @classmethod
    def read(cls, output_dir: str | os.PathLike[str]) -> LedgerSummary:
        """Check the whole ledger of `output_dir` and sum it up; changes nothing."""
        path = Path(output_dir) / cls.FILENAME
        if not path.exists():
            raise LedgerError(f"expected a ledger at {path}, found none")
        replay = _Replay(path.read_bytes())
        if not replay.runs:
            raise LedgerError(f"expected a run in {path}, found none")
        replay.count_fragments()
        return LedgerSummary(tuple(replay.runs))

    def _append(self, record: dict[str, Any]) -> None:
        if not self._usable:
            raise LedgerError(
                f"{self._path} can no longer be written by this object: it was closed, or a write failed"
            )
        line = _chained(self._head, record)
        data = (self._separator + json.dumps(line, sort_keys=True) + "\n").encode()
        # Until the write is known to be whole and durable, this object must not charge again.
        self._usable = False
        if os.fstat(self._file).st_size != self._size:
            raise LedgerError(f"{self._path} was written to by another process: two runs may not share a ledger")
        written = os.write(self._file, data)
        if written != len(data):
            raise LedgerError(f"wrote {written} of {len(data)} bytes to {self._path}: is the disk full?")
        os.fsync(self._file)
        self._usable = True
        self._separator = ""
        self._size += written
        self._head = line["hash"]
        if self._runs:
            _apply(self._runs[-1], line)
            self._witness.write(self.charged, self._head)


# A forked worker keeps the files, and with them the lock, of a parent that dies: it gives back its copies at once.
_open_ledgers: weakref.WeakSet[PrivacyLedger] = weakref.WeakSet()


def _close_all() -> None:
    for ledger in list(_open_ledgers):
        ledger.close()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_all)


class _Replay:
    """A ledger file read from the start: its runs, and torn fragments at the end that no line vouches for yet."""

    def __init__(self, data: bytes) -> None:
        self.runs: list[LedgerRun] = []
        self.head = _GENESIS
        self.size = len(data)
        self.fragments: list[bytes] = []
        self.ends_with_newline = not data or data.endswith(b"\n")
        lines = data.split(b"\n")
        tail = lines.pop()
        for number, raw in enumerate(lines, start=1):
            self._read_line(number, raw)
        # A tail without its newline is a line like any other when only the newline is missing, else a fragment.
        if tail:
            self._read_line(len(lines) + 1, tail)

    @property
    def fragment_digest(self) -> str:
        return hashlib.sha256(b"\n".join(self.fragments)).hexdigest()

    def count_fragments(self) -> None:
        """Count fragments at the end as charges of the last run."""
        _apply(self.runs[-1], {"kind": "torn", "lines": len(self.fragments), "hash": self.head})

    def _read_line(self, number: int, raw: bytes) -> None:
        line = _parse(raw)
        if line is None:
            self.fragments.append(raw)
            return
        if line != _chained(self.head, {key: value for key, value in line.items() if key != "hash"}):
            raise LedgerError(f"line {number} of the ledger does not follow from the lines before it: it was changed")
        if self.fragments:
            if (line.get("kind"), line.get("digest")) != ("torn", self.fragment_digest):
                raise LedgerError(
                    f"line {number - 1} of the ledger is not an entry, and no later entry accounts for it"
                )
            self.fragments = []
        self.head = line["hash"]
        if line["kind"] == "run":
            self.runs.append(LedgerRun(line["plan"], line.get("id"), line.get("earlier")))
        if self.runs:
            _apply(self.runs[-1], line)


def _apply(run: LedgerRun, line: Mapping[str, Any]) -> None:
    if line["kind"] == "charge":
        run.charged += 1
    elif line["kind"] == "torn":
        run.charged += line["lines"]
        run.torn_lines += line["lines"]
    run.charged_at[line["hash"]] = run.charged


def _chained(head: str, record: dict[str, Any]) -> dict[str, Any]:
    payload = json.dumps(record, sort_keys=True)
    return {**record, "hash": hashlib.sha256(f"{head}\n{payload}".encode()).hexdigest()}


def _parse(raw: bytes) -> dict[str, Any] | None:
    """Return the object on a line, or `None` when the line is not one that was written whole."""
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "hash" in line and "kind" in line else None


def plan_differences(recorded: Mapping[str, Any], now: Mapping[str, Any], where: str) -> str:
    """Name each setting that differs between the plan recorded `where` and the one now; empty when none does."""
    return "; ".join(
        f"{key}: {recorded.get(key)} in {where}, {now.get(key)} now"
        for key in sorted(recorded.keys() | now.keys())
        if recorded.get(key) != now.get(key)
    )


def _require_witnessed(run: LedgerRun, path: Path) -> None:
    """Raise `LedgerError` when this run went on elsewhere, or further than this file says."""
    known = last_known_line(run.run_id)
    if known is not None and known[1] not in run.charged_at:
        raise LedgerError(
            f"expected {path} to hold the last line of its run, after {known[0]} charged steps, but it is not there "
            f"({run.charged} charged): this is a copy, or was put back to an earlier state, and more was spent than "
            "it says. Go on in the directory that has the whole ledger, or start over in a new one"
        )


def _sync_directory(directory: Path) -> None:
    """Make a new file's name durable (not every system lets a directory be opened)."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
