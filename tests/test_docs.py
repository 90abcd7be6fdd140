"""What the documents point at exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRIVACY = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")


def functions_of(path: Path) -> set[str]:
    return {
        node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)
    }


def guarded_points() -> dict[int, list[tuple[str, str]]]:
    """The rows of the table: number → the tests that it names."""
    section = PRIVACY.split("## Twenty-five ways to break it", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", section, flags=re.MULTILINE)
    return {int(number): re.findall(r"`(tests/\w+\.py)::(test_\w+)`", row) for number, row in rows}


def test_every_point_has_tests_and_every_test_exists() -> None:
    points = guarded_points()
    assert list(points) == list(range(1, 26))
    named = [pair for pairs in points.values() for pair in pairs]
    assert all(points.values())
    missing = [f"{file}::{test}" for file, test in named if test not in functions_of(ROOT / file)]
    assert not missing


def test_every_test_that_any_document_names_exists() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    named = {pair for path in documents for pair in re.findall(r"(tests/\w+\.py)(?:::(test_\w+))?", path.read_text())}
    missing = [
        (file, test)
        for file, test in sorted(named)
        if not (ROOT / file).exists() or (test and test not in functions_of(ROOT / file))
    ]
    assert not missing
