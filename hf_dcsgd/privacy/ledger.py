"""Write-ahead ledger: every step is charged, durably, before anything of it is released.

Guarantee. When :meth:`PrivacyLedger.charge` returns, the charge has reached the disk; a release follows it, never
precedes it. So after a crash at any point the ledger holds at least as many charges as there were releases. A step
that is replayed after a crash is charged again: the first try may have been released.

The file ``privacy_ledger.jsonl`` in the output directory holds one JSON object per line, each with a SHA-256 hash over
itself and the hash of the line before, so that a changed, inserted or removed line is found. Removed lines at the end
are found by the witness that checkpoints carry (:meth:`PrivacyLedger.verify_contains`).

| edge case | behaviour |
|---|---|
| a line torn by a crash | one charge to the run before it; the file goes on, and a ``torn`` line vouches for it |
| a line changed, inserted or removed | ``LedgerError`` that names the line |
| another process writes to the same file | ``LedgerError`` at the next charge |
| disk full or a failed write | the error is raised before the release, and this object charges nothing more |
| resumed under another plan | ``LedgerError`` with each differing key and both values |

This module imports nothing heavy: it must be usable to inspect a ledger without torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

_GENESIS = hashlib.sha256(b"hf_dcsgd privacy ledger").hexdigest()


class LedgerError(RuntimeError):
    """The ledger is missing, was changed, or does not belong to this run."""


@dataclass
class LedgerRun:
    """One run in the ledger: its plan, and the steps charged to it (torn lines included)."""

    plan: dict[str, Any]
    charged: int = 0
    torn_lines: int = 0
    # Hash of each line of this run → steps charged up to and including it.
    charged_at: dict[str, int] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class LedgerSummary:
    """What a ledger says: its runs, oldest first."""

    runs: tuple[LedgerRun, ...]

    @property
    def plan(self) -> dict[str, Any]:
        """The plan of the last run."""
        return self.runs[-1].plan

    @property
    def charged(self) -> int:
        """Steps charged to the last run."""
        return self.runs[-1].charged

    @property
    def total_charged(self) -> int:
        """Steps charged to all runs in this directory."""
        return sum(run.charged for run in self.runs)

    @property
    def torn_lines(self) -> int:
        return sum(run.torn_lines for run in self.runs)


class PrivacyLedger:
    """Charges the steps of one run. Make it with :meth:`open`."""

    FILENAME: ClassVar[str] = "privacy_ledger.jsonl"

    def __init__(self, path: Path, replay: _Replay) -> None:
        self._path = path
        self._head = replay.head
        self._size = replay.size
        self._separator = "" if replay.ends_with_newline else "\n"
        self._runs = replay.runs
        self._usable = True
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    @classmethod
    def open(cls, output_dir: str | os.PathLike[str], plan_dict: Mapping[str, Any], *, resume: bool) -> PrivacyLedger:
        """Start a new run in ``output_dir`` (earlier runs' lines stay), or continue the last run, same plan."""
        plan = json.loads(json.dumps(dict(plan_dict)))
        path = Path(output_dir) / cls.FILENAME
        exists = path.exists()
        replay = _Replay(path.read_bytes() if exists else b"")
        if resume:
            if not replay.runs:
                raise LedgerError(f"expected a run to resume in {path}, found none: steps spent so far are unknown")
            _require_same_plan(replay.runs[-1].plan, plan)
        path.parent.mkdir(parents=True, exist_ok=True)
        ledger = cls(path, replay)
        if not exists:
            _sync_directory(path.parent)
        if replay.fragments:
            ledger._append({"kind": "torn", "lines": len(replay.fragments), "digest": replay.fragment_digest})
        if not resume:
            ledger._runs.append(LedgerRun(plan))
            ledger._append({"kind": "run", "plan": plan})
        return ledger

    @property
    def charged(self) -> int:
        """Steps charged to this run so far."""
        return self._runs[-1].charged

    @property
    def head(self) -> str:
        """Hash of the last line: with ``charged``, the witness to put into a checkpoint."""
        return self._head

    def charge(self, step: int) -> int:
        """Charge one step durably; only after this returns may anything of the step be released."""
        self._append({"kind": "charge", "step": int(step), "charged": self.charged + 1})
        return self.charged

    def verify_contains(self, charged: int, head: str) -> None:
        """Raise :class:`LedgerError` unless this run's lines include the one that a checkpoint witnessed."""
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
        """Give the file back; nothing can be charged any more."""
        if self._file >= 0:
            self._usable = False
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
        """Check the whole ledger of ``output_dir`` and sum it up; changes nothing."""
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
        if self.fragments and self.runs:
            self.runs[-1].charged += len(self.fragments)
            self.runs[-1].torn_lines += len(self.fragments)

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
                    f"line {number - 1} of the ledger is not a ledger line and no torn line vouches for it"
                )
            self.fragments = []
        self.head = line["hash"]
        if line["kind"] == "run":
            self.runs.append(LedgerRun(line["plan"]))
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
    """The object on a line, or ``None`` when the line is not one that was written whole."""
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "hash" in line and "kind" in line else None


def _require_same_plan(recorded: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    differing = [
        f"{key}: {recorded.get(key)!r} in the ledger, {plan.get(key)!r} now"
        for key in sorted(recorded.keys() | plan.keys())
        if recorded.get(key) != plan.get(key)
    ]
    if differing:
        raise LedgerError("the run cannot be resumed under other settings: " + "; ".join(differing))


def _sync_directory(directory: Path) -> None:
    """Make a new file's name durable (not every system lets a directory be opened)."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
