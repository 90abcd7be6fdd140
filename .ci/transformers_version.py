"""Print the requirement for one end of the range of transformers that pyproject.toml allows: `lowest` or `highest`."""

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirement(end: str) -> str:
    """Return the lowest version with its patch releases, or the whole range, of which pip takes the highest."""
    allowed = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "transformers")
    if end == "highest":
        return f"{allowed.name}{allowed.specifier}"
    lowest = next(part.version for part in allowed.specifier if part.operator == ">=")
    return f"{allowed.name}~={'.'.join([*lowest.split('.'), '0'][:3])}"


if __name__ == "__main__":
    print(requirement(sys.argv[1]))
