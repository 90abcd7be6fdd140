"""The ledger: charged ≥ released after any crash, and no line can be changed unseen."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_dcsgd.privacy.ledger import LedgerError, PrivacyLedger

PLAN = {"noise_multiplier": 0.75, "clipping": "dc_sgd_e", "steps": 100, "settings": {"bins": 20}}

# Charges and then "releases" step after step: one byte on the pipe per release. With pieces > 0 every write to the
# ledger is made in that many bytes at a time, with pauses, so that a kill tears lines, as a power cut may.
CHILD = """
import os, sys, time
from hf_dcsgd.privacy import ledger
assert "torch" not in sys.modules and "transformers" not in sys.modules
directory, pieces, resume = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "resume"
if pieces:
    def write(handle, data):
        written = 0
        while written < len(data):
            written += os.write(handle, data[written : written + pieces])
            time.sleep(0.0005)
        return written
    ledger.os = type("os", (), {**vars(os), "write": staticmethod(write)})
book = ledger.PrivacyLedger.open(directory, {"steps": 10**6}, resume=resume)
os.write(1, b"o")
step = 0
while True:
    book.charge(step)
    os.write(1, b"r")
    step += 1
"""


def lines_of(directory):
    return (Path(directory) / PrivacyLedger.FILENAME).read_bytes().splitlines(keepends=True)


def without_registry(monkeypatch, tmp_path):
    """As on another machine."""
    monkeypatch.setenv("HF_DCSGD_HOME", str(tmp_path / "another registry"))


def filled(directory, charges, plan=PLAN):
    ledger = PrivacyLedger.open(directory, plan, resume=False)
    for step in range(charges):
        ledger.charge(step)
    return ledger


def run_until_killed(directory, pieces, resume, delay):
    """Start the child and kill it; the number of releases it made. A delay below 0 counts from the child's start
    (it may be killed while it opens the ledger), any other from the moment when the ledger is open."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory), str(pieces), "resume" if resume else "new"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    if delay >= 0:
        assert os.read(child.stdout.fileno(), 1) == b"o", child.stderr.read().decode()
    received = []
    # The pipe must be emptied meanwhile: a child that waits for it would not be charging.
    reader = threading.Thread(target=lambda: received.append(child.stdout.read()))
    reader.start()
    time.sleep(abs(delay))
    child.send_signal(signal.SIGKILL)
    reader.join()
    assert child.wait() == -signal.SIGKILL, child.stderr.read().decode()
    child.stderr.close()
    return received[0].count(b"r")


@pytest.mark.parametrize("kills", [16, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pieces", [0, 16])
def test_killed_at_random_points_charged_is_never_less_than_released(tmp_path, pieces, kills):
    rng = random.Random(pieces)
    released, torn = 0, 0
    for kill in range(kills):
        delay = rng.uniform(0, 0.05) if kill % 4 < 3 else -rng.uniform(0.03, 0.12)
        released += run_until_killed(tmp_path, pieces, resume=kill > 0, delay=delay)
        summary = PrivacyLedger.read(tmp_path)
        assert summary.charged >= released, f"{released} released, {summary.charged} charged after kill {kill}"
        # Against us, but not by more than the step under way at each kill, and the line that vouches for its fragment.
        assert summary.charged <= released + 3 * (kill + 1)
        torn = sum(run.torn_lines for run in summary.runs)
    assert released > 0, "the children were killed before they did anything"
    assert pieces == 0 or torn > 0, "no line was torn"


@pytest.fixture
def no_registry(monkeypatch):
    """Nobody remembers what a file held before it was cut."""
    monkeypatch.setenv("HF_DCSGD_HOME", os.devnull)


@given(data=st.data())
@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("no_registry")
def test_cut_at_any_byte_counts_against_us(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("ledger")
    path = directory / PrivacyLedger.FILENAME
    filled(directory, 4).close()
    whole = path.read_bytes()
    header = whole.index(b"\n") + 1
    # A charge is on disk as soon as its write begins, at the latest when its last byte is there.
    cut = data.draw(st.integers(header, len(whole)))
    path.write_bytes(whole[:cut])
    begun = whole[:cut].count(b"\n") - 1 + (not whole[:cut].endswith(b"\n"))
    assert PrivacyLedger.read(directory).charged == begun
    ledger = PrivacyLedger.open(directory, PLAN, resume=True)
    assert ledger.charged == begun
    assert ledger.charge(9) == begun + 1
    ledger.verify_contains(begun + 1, ledger.head)
    ledger.close()
    assert PrivacyLedger.read(directory).charged == begun + 1

    # And cut again, within what was written after the first cut.
    again = path.read_bytes()
    second_cut = data.draw(st.integers(cut, len(again)))
    path.write_bytes(again[:second_cut])
    read = PrivacyLedger.read(directory).charged
    assert begun <= read <= begun + 2
    reopened = PrivacyLedger.open(directory, PLAN, resume=True)
    assert reopened.charged == read
    assert reopened.charge(10) == read + 1
    assert PrivacyLedger.read(directory).charged == read + 1


def test_a_torn_header_is_no_run(tmp_path):
    path = tmp_path / PrivacyLedger.FILENAME
    filled(tmp_path, 0).close()
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(LedgerError, match="found none"):
        PrivacyLedger.read(tmp_path)
    with pytest.raises(LedgerError, match="expected a run to resume"):
        PrivacyLedger.open(tmp_path, PLAN, resume=True)
    ledger = filled(tmp_path, 2)
    assert ledger.charged == 2
    assert PrivacyLedger.read(tmp_path).charged == 2


def test_a_tail_of_zero_bytes_is_a_torn_line(tmp_path):
    filled(tmp_path, 3).close()
    with open(tmp_path / PrivacyLedger.FILENAME, "ab") as file:
        file.write(b"\0" * 512)
    assert PrivacyLedger.read(tmp_path).charged == 4
    assert PrivacyLedger.open(tmp_path, PLAN, resume=True).charged == 4


def test_replayed_steps_are_charged_again(tmp_path):
    filled(tmp_path, 5).close()
    ledger = PrivacyLedger.open(tmp_path, PLAN, resume=True)
    for step in (3, 4, 5):
        ledger.charge(step)
    assert ledger.charged == 8
    steps = [json.loads(line).get("step") for line in lines_of(tmp_path)[1:]]
    assert steps == [0, 1, 2, 3, 4, 3, 4, 5]


def test_a_charge_is_on_disk_before_it_returns(tmp_path, monkeypatch):
    ledger = PrivacyLedger.open(tmp_path, PLAN, resume=False)
    events = []
    write, sync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda *arguments: (events.append("write"), write(*arguments))[1])
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("fsync"), sync(handle))[1])
    ledger.charge(0)
    assert events == ["write", "fsync"]


def test_the_directory_is_synced_when_the_file_is_new(tmp_path, monkeypatch):
    synced = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_ino), sync(handle))[1])
    PrivacyLedger.open(tmp_path / "a" / "b", PLAN, resume=False)
    assert (tmp_path / "a" / "b").stat().st_ino in synced


def test_a_failed_write_stops_the_ledger(tmp_path, monkeypatch):
    ledger = filled(tmp_path, 2)
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:10]))
    with pytest.raises(LedgerError, match="wrote 10 of"):
        ledger.charge(2)
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="can no longer be written"):
        ledger.charge(2)
    ledger.close()
    assert PrivacyLedger.open(tmp_path, PLAN, resume=True).charged == 3


def test_a_failed_sync_stops_the_ledger(tmp_path, monkeypatch):
    ledger = filled(tmp_path, 2)

    def fail(handle):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        ledger.charge(2)
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="can no longer be written"):
        ledger.charge(2)


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_in_one_directory_at_once_are_refused(tmp_path, resume):
    first = filled(tmp_path, 1)
    with pytest.raises(LedgerError, match=str(tmp_path)):
        PrivacyLedger.open(tmp_path, PLAN, resume=resume)
    assert first.charge(1) == 2
    first.close()
    assert PrivacyLedger.open(tmp_path, PLAN, resume=True).charged == 2


def test_the_lock_ends_with_its_process(tmp_path):
    command = [sys.executable, "-c", CHILD, str(tmp_path), "0", "new"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert os.read(child.stdout.fileno(), 1) == b"o"
        with pytest.raises(LedgerError, match="in use"):
            PrivacyLedger.open(tmp_path, {"steps": 10**6}, resume=True)
        child.kill()
    assert PrivacyLedger.open(tmp_path, {"steps": 10**6}, resume=True).charged >= 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_worker_does_not_keep_the_lock(tmp_path):
    """As workers of a dataloader would, for some seconds after their parent was killed."""
    ledger = filled(tmp_path, 1)
    go_on, stop = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(stop)
        os.read(go_on, 1)
        os._exit(0)
    try:
        time.sleep(0.05)
        ledger.close()
        assert PrivacyLedger.open(tmp_path, PLAN, resume=True).charged == 1
    finally:
        os.close(stop)
        os.waitpid(worker, 0)


def test_a_writer_past_the_lock_is_noticed(tmp_path):
    ledger = filled(tmp_path, 1)
    with open(tmp_path / PrivacyLedger.FILENAME, "ab") as file:
        file.write(b"{}\n")
    with pytest.raises(LedgerError, match="another process"):
        ledger.charge(1)


def test_closed_ledger_charges_nothing(tmp_path):
    ledger = filled(tmp_path, 1)
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        ledger.charge(1)


def test_runs_in_one_directory_are_kept_apart(tmp_path):
    filled(tmp_path, 3).close()
    other = PLAN | {"noise_multiplier": 1.5}
    ledger = filled(tmp_path, 2, other)
    assert ledger.charged == 2
    summary = PrivacyLedger.read(tmp_path)
    assert [run.charged for run in summary.runs] == [3, 2]
    assert [run.plan for run in summary.runs] == [PLAN, other]
    assert (summary.charged, summary.plan) == (2, other)
    ledger.close()
    assert PrivacyLedger.open(tmp_path, other, resume=True).charged == 2


def test_resume_under_another_plan_shows_both_values(tmp_path):
    filled(tmp_path, 3).close()
    changed = PLAN | {"noise_multiplier": 0.5, "settings": {"bins": 40}}
    with pytest.raises(LedgerError) as error:
        PrivacyLedger.open(tmp_path, changed, resume=True)
    message = str(error.value)
    assert "noise_multiplier: 0.75 in the ledger, 0.5 now" in message
    assert "settings: {'bins': 20} in the ledger, {'bins': 40} now" in message
    assert "clipping" not in message
    assert PrivacyLedger.read(tmp_path).charged == 3


def test_resume_without_a_ledger_is_refused(tmp_path):
    with pytest.raises(LedgerError, match="expected a run to resume"):
        PrivacyLedger.open(tmp_path, PLAN, resume=True)
    with pytest.raises(LedgerError, match="found none"):
        PrivacyLedger.read(tmp_path)
    assert not list(tmp_path.iterdir())


def test_tuples_and_numbers_survive_the_round_trip(tmp_path):
    plan = {"opt_outs": ("a", "b"), "sigma": 0.1 + 0.2, "seed": None}
    filled(tmp_path, 1, plan).close()
    assert PrivacyLedger.open(tmp_path, plan, resume=True).charged == 1


def edited(lines, how):
    if how == "removed":
        return [*lines[:3], *lines[4:]]
    if how == "repeated":
        return [*lines[:4], lines[3], *lines[4:]]
    if how == "swapped":
        return [*lines[:3], lines[4], lines[3], *lines[5:]]
    if how == "plan":
        return [lines[0].replace(b"0.75", b"7.50"), *lines[1:]]
    if how == "step":
        return [*lines[:3], lines[3].replace(b'"step": 2', b'"step": 9'), *lines[4:]]
    if how == "spoiled":
        return [*lines[:3], b"}" + lines[3], *lines[4:]]
    if how == "not an object":
        return [*lines[:3], b"[]\n", *lines[4:]]
    if how == "first line removed":
        return lines[1:]
    return [*lines[:3], b"\n", *lines[3:]]


@pytest.mark.parametrize(
    "how",
    [
        "removed",
        "repeated",
        "swapped",
        "plan",
        "step",
        "spoiled",
        "not an object",
        "blank line",
        "first line removed",
    ],
)
def test_every_edit_is_found(tmp_path, how):
    filled(tmp_path, 6).close()
    lines = lines_of(tmp_path)
    changed = edited(lines, how)
    assert changed != lines
    (tmp_path / PrivacyLedger.FILENAME).write_bytes(b"".join(changed))
    with pytest.raises(LedgerError, match="line"):
        PrivacyLedger.read(tmp_path)
    with pytest.raises(LedgerError, match="line"):
        PrivacyLedger.open(tmp_path, PLAN, resume=True)


def test_checkpoint_witness(tmp_path, monkeypatch):
    ledger = filled(tmp_path, 3)
    witness = ledger.charged, ledger.head
    ledger.charge(3)
    ledger.close()
    resumed = PrivacyLedger.open(tmp_path, PLAN, resume=True)
    resumed.verify_contains(*witness)
    resumed.close()
    with pytest.raises(LedgerError, match=r"expected 2 charged steps .* got 3"):
        resumed.verify_contains(2, witness[1])
    with pytest.raises(LedgerError, match="lines were removed"):
        resumed.verify_contains(3, "0" * 64)

    # Lines removed at the end leave a sound chain: only the witness tells.
    path = tmp_path / PrivacyLedger.FILENAME
    path.write_bytes(b"".join(lines_of(tmp_path)[:3]))
    assert PrivacyLedger.read(tmp_path).charged == 2
    without_registry(monkeypatch, tmp_path)
    with pytest.raises(LedgerError, match=r"after 3 charged steps.*2 charged"):
        PrivacyLedger.open(tmp_path, PLAN, resume=True).verify_contains(*witness)


def test_a_witness_of_an_earlier_run_does_not_count(tmp_path):
    first = filled(tmp_path, 3)
    witness = first.charged, first.head
    first.close()
    second = filled(tmp_path, 5)
    with pytest.raises(LedgerError, match="another run"):
        second.verify_contains(*witness)


# --- copies, and ledgers put back -----------------------------------------------------------------------------------


def test_a_ledger_that_was_put_back_is_refused(tmp_path):
    """Copied aside, trained on, copied back, resumed."""
    path = tmp_path / PrivacyLedger.FILENAME
    ledger = filled(tmp_path, 3)
    aside = path.read_bytes()
    ledger.charge(3)
    ledger.close()
    path.write_bytes(aside)
    for resume in (True, False):
        with pytest.raises(LedgerError, match="after 4 charged steps"):
            PrivacyLedger.open(tmp_path, PLAN, resume=resume)
    assert PrivacyLedger.read(tmp_path).charged == 3


def test_a_copy_may_go_on_until_the_run_does(tmp_path):
    first, copy = tmp_path / "first", tmp_path / "copy"
    filled(first, 3).close()
    shutil.copytree(first, copy)
    moved = PrivacyLedger.open(copy, PLAN, resume=True)
    with pytest.raises(LedgerError, match="in use"):
        PrivacyLedger.open(first, PLAN, resume=True)
    assert moved.charge(3) == 4
    moved.close()
    with pytest.raises(LedgerError, match="this is a copy"):
        PrivacyLedger.open(first, PLAN, resume=True)
    assert PrivacyLedger.open(copy, PLAN, resume=True).charge(4) == 5


def test_runs_under_one_plan_have_no_line_in_common(tmp_path):
    ledgers = [filled(tmp_path / name, 2) for name in "ab"]
    assert ledgers[0].head != ledgers[1].head
    assert ledgers[0].run_id != ledgers[1].run_id


def test_what_the_registry_holds_is_for_its_owner_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DCSGD_HOME", str(tmp_path / "registry"))
    ledger = filled(tmp_path, 2)
    (kept,) = [path for path in (tmp_path / "registry").rglob("*") if path.is_file()]
    assert kept.name == ledger.run_id
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.read_text().split() == ["000000000002", ledger.head]


def test_a_registry_that_cannot_be_written_stops_nobody(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("HF_DCSGD_HOME", str(tmp_path / "file"))
    filled(tmp_path, 2).close()
    assert PrivacyLedger.open(tmp_path, PLAN, resume=True).charge(2) == 3


def test_the_name_of_a_run_is_no_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DCSGD_HOME", str(tmp_path / "registry"))
    monkeypatch.setattr("hf_dcsgd.privacy.ledger.secrets.token_hex", lambda length: "../../evil")
    filled(tmp_path, 1).close()
    assert not list(tmp_path.rglob("evil"))
    assert PrivacyLedger.open(tmp_path, PLAN, resume=True).charged == 1


def test_earlier_spending_is_in_the_header(tmp_path):
    earlier = {"runs": [{"noise_multiplier": 1.0}], "dismissed": None}
    PrivacyLedger.open(tmp_path, PLAN, resume=False, earlier=earlier).close()
    assert PrivacyLedger.read(tmp_path).runs[-1].earlier == earlier
    path = tmp_path / PrivacyLedger.FILENAME
    path.write_bytes(path.read_bytes().replace(b"1.0", b"9.0"))
    with pytest.raises(LedgerError, match="changed"):
        PrivacyLedger.read(tmp_path)
