"""Runs every benchmark of this folder; figures are printed and kept under `benchmarks/results/`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMANDS = (
    ["step_cost.py", "--size", "mini"],
    ["step_cost.py", "--size", "mini", "--layers", "last:6"],
    ["step_cost.py", "--size", "mini", "--layers", "lora"],
    ["step_cost.py", "--size", "mini", "--tail"],
    ["step_cost.py", "--size", "base", "--rounds", "5"],
    ["epochs.py", "--size", "mini", "--lengths", "mixed"],
    ["epochs.py", "--size", "base", "--rows", "96", "--rounds", "1"],
    ["epochs.py", "--size", "base", "--rows", "96", "--rounds", "1", "--lengths", "mixed"],
    ["collectives.py"],
)


def main() -> int:
    folder = Path(__file__).parent
    return max(subprocess.run([sys.executable, str(folder / name), *rest]).returncode for name, *rest in COMMANDS)


if __name__ == "__main__":
    sys.exit(main())
