"""What is said of the package in several places is the same: version, pythons, transformers."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

import hf_dcsgd

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))


def test_one_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert PROJECT["version"] == citation["version"] == hf_dcsgd.__version__
    assert re.search(rf"^## {re.escape(PROJECT['version'])}\b", changelog, re.MULTILINE)


def test_the_workflow_runs_every_python_and_both_ends_of_transformers() -> None:
    classified = [text.split(" :: ")[-1] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)]
    matrix = WORKFLOW["jobs"]["tests"]["strategy"]["matrix"]
    assert matrix["python"] == classified
    assert PROJECT["requires-python"] == f">={classified[0]}"
    assert {entry["transformers"] for entry in matrix["include"]} == {"lowest", "highest"}
    assert ".ci/run" in [step.get("run") for step in WORKFLOW["jobs"]["tests"]["steps"]]


def test_both_ends_are_read_from_the_project() -> None:
    command = [sys.executable, ROOT / ".ci" / "transformers_version.py"]
    lowest, highest = (
        subprocess.run([*command, end], capture_output=True, text=True, check=True).stdout.strip()
        for end in ("lowest", "highest")
    )
    (allowed,) = (text for text in PROJECT["dependencies"] if text.startswith("transformers"))
    (first,) = re.findall(r">=([\d.]+)", allowed)
    assert lowest.startswith(f"transformers~={first}")
    assert set(highest.removeprefix("transformers").split(",")) == set(allowed.removeprefix("transformers").split(","))
