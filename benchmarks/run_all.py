"""Run the rows of `rows.py`; each result is kept under `results/` as it comes.

python benchmarks/run_all.py                     # what is missing for this version of the package
python benchmarks/run_all.py --again step_mini   # rows whose name begins so, once more
python benchmarks/run_all.py --page              # docs/benchmarks.md and its picture from what is there
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import logging
import platform
import sys
import time
import traceback
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from page import write_page
from rows import ROWS
from timing import DEVICE, RESULTS

PACKAGE = Path(__file__).parents[1] / "hf_dcsgd"


def version() -> str:
    """Tell versions of the package apart by its sources."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def measure(name: str) -> dict[str, Any]:
    row = ROWS[name]
    if row["kind"] == "epochs":
        from epochs import run_epochs as run
    elif row["kind"] == "parts":
        from step_cost import run_parts as run
    elif row["kind"] == "step":
        from step_cost import run_steps as run
    elif row["kind"] in ("forms", "noise"):
        import kernels

        run = {"forms": kernels.run_forms, "noise": kernels.run_noise}[row["kind"]]
    else:
        from collectives import run_collectives as run
    start = time.perf_counter()
    result = run(row)
    machine = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"{platform.machine()} CPU, one thread"
    return {**row, **result, "version": version(), "machine": machine, "took": round(time.perf_counter() - start)}


def path_of(name: str) -> Path:
    return RESULTS / f"{name}{'_gpu' if DEVICE.type == 'cuda' else ''}.json"


def is_done(name: str) -> bool:
    return path_of(name).exists() and json.loads(path_of(name).read_text()).get("version") == version()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows whose names begin so (default: all)")
    parser.add_argument("--again", action="store_true", help="measure rows that are there, too")
    parser.add_argument(
        "--page", action="store_true", help="measure nothing, write docs/benchmarks.md and its picture"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    RESULTS.mkdir(exist_ok=True)
    failed = []
    for name in [] if options.page else ROWS:
        if options.names and not name.startswith(tuple(options.names)):
            continue
        if is_done(name) and not options.again:
            continue
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
        try:
            with redirect_stdout(io.StringIO()):
                result = measure(name)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        else:
            path_of(name).write_text(json.dumps(result, indent=1) + "\n")
    write_page()
    print(f"failed: {', '.join(failed)}" if failed else "docs/benchmarks.md and its picture are written")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
