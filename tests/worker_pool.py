"""Groups of processes as torchrun starts them, without a new interpreter for each: imports take longer than the tests.

`WorkerPool` starts one server (this file as a script) that imports the given modules, and is forked for every rank of
every job. A job is a line of JSON to the server's stdin; its answer is a line with the exit code of each rank.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
# A rank that is left alone must notice by itself; torchrun would end it after as many seconds.
GRACE_SECONDS = 30


@dataclass(frozen=True)
class Ended:
    """Exit codes by rank (negative: the signal) and what all ranks printed."""

    exit_codes: list[int]
    output: str


def clean_environment(**more: str) -> dict[str, str]:
    """This environment without what a launcher of these tests, or the user's account on the Hub, may have set."""
    unwanted = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_CACHE")
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    folders = (str(REPOSITORY), str(Path(__file__).parent), os.environ.get("PYTHONPATH"))
    paths = {"PYTHONPATH": os.pathsep.join(folder for folder in folders if folder)}
    return {name: value for name, value in os.environ.items() if name not in unwanted} | quiet | paths | more


class WorkerPool:
    """Starts its server with the first job, and ends it with all it started when closed."""

    def __init__(self, *modules: str, **environment: str) -> None:
        self._command, self._environment = (sys.executable, __file__, *modules), clean_environment(**environment)
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, processes: int, command: Sequence[str | Path], *, timeout: float = 300, check: bool = True, **env: str
    ) -> Ended:
        """Runs a script, or a module after "-m", on so many ranks to its end."""
        if self._server is None:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            # A session of its own, so that all of it can be ended together.
            self._server = subprocess.Popen(
                self._command, **pipes, cwd=REPOSITORY, env=self._environment, start_new_session=True
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.NamedTemporaryFile(prefix="ranks") as output:
            job = {"processes": processes, "command": list(map(str, command)), "output": output.name, "env": env}
            self._server.stdin.write(json.dumps(job) + "\n")
            self._server.stdin.flush()
            if not select.select([self._server.stdout], [], [], timeout)[0]:
                self.close()
                raise TimeoutError(f"{command} did not end within {timeout} s:\n{Path(output.name).read_text()}")
            ended = Ended(json.loads(self._server.stdout.readline()), Path(output.name).read_text())
        if check:
            assert not any(ended.exit_codes), ended.output
        return ended

    def close(self) -> None:
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.communicate()
            self._server = None


# --- the server ------------------------------------------------------------------------------------------------------


def serve() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    importlib.import_module("quick_accounting").quicken_accounting()  # in all jobs: none of them is about ε
    gc.collect()
    gc.freeze()  # the workers share what was imported as long as nobody writes to it
    for line in sys.stdin:
        job = json.loads(line)
        with socket.create_server(("127.0.0.1", 0)) as free:
            job["env"] |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        print(json.dumps(exit_codes([forked(job, rank) for rank in range(job["processes"])])), flush=True)


def forked(job: dict[str, Any], rank: int) -> int:
    """Starts one rank; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ |= job["env"]
        if job["processes"] > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["processes"])}
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream in (1, 2):
            os.dup2(os.open(job["output"], os.O_WRONLY | os.O_APPEND), stream)
        if job["command"][0] == "-m":
            sys.argv = job["command"][1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = job["command"]
            sys.path.insert(0, str(Path(sys.argv[0]).parent))
            runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def exit_codes(pids: list[int]) -> list[int]:
    """Waits for all; when one has failed, the others have `GRACE_SECONDS` to follow."""
    codes: dict[int, int] = {}
    deadline = float("inf")
    while len(codes) < len(pids):
        for pid in [pid for pid in pids if pid not in codes]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS) if codes[pid] else deadline
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    serve()
