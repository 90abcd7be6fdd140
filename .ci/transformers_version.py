"""Print the lowest or highest transformers on the package index that pyproject.toml allows."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def end_of_range(end: str, versions: Iterable[str]) -> str:
    """Return the lowest or highest of these versions that are allowed."""
    allowed = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "transformers").specifier
    return {"lowest": min, "highest": max}[end](allowed.filter(versions), key=Version)


if __name__ == "__main__":
    command = [sys.executable, "-m", "pip", "index", "versions", "transformers"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print(end_of_range(sys.argv[1], re.search("Available versions: (.*)", shown)[1].split(", ")))
