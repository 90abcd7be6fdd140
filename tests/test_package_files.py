"""What is said of the package in several places is the same: version, pythons, transformers."""

from __future__ import annotations

import re
import runpy
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
    place = ROOT / ".ci" / "transformers_version.py"
    script = runpy.run_path(str(place))
    (allowed,) = (text for text in PROJECT["dependencies"] if text.startswith("transformers"))
    lowest, beyond = re.findall(r"[\d.]+", allowed)
    versions = [f"{beyond}.0.1", f"{lowest}.1", f"{lowest}.0", "5.100.0", "5.99.0", "4.0.0"]
    assert script["end_of_range"]("lowest", versions) == f"{lowest}.0"
    assert script["end_of_range"]("highest", versions) == "5.100.0"
