"""The wheel has what it needs, and type checkers of other projects see its types."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLIENT = ROOT / "tests" / "wheel" / "client.py"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own that holds the built wheel, and nothing else; returns its python."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "hf_dcsgd", source / "hf_dcsgd", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source]
    subprocess.run(command, check=True, capture_output=True)
    venv.create(folder / "environment", with_pip=False, symlinks=True)
    (packages,) = (folder / "environment").glob("lib/python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    return folder / "environment" / "bin" / "python"


def type_check(installed: Path, text: str, folder: Path) -> str:
    file = folder / "client.py"
    file.write_text(text, encoding="utf-8")
    options = ["--strict", "--python-executable", installed, "--cache-dir", installed.parents[2] / "types"]
    options += ["--config-file", ""]
    return subprocess.run(
        [sys.executable, "-m", "mypy", *options, file], cwd=folder, capture_output=True, text=True
    ).stdout


def test_it_holds_every_file_of_the_package(installed: Path) -> None:
    (package,) = installed.parents[1].glob("lib/python*/site-packages/hf_dcsgd")
    ours = {path.relative_to(ROOT / "hf_dcsgd") for path in (ROOT / "hf_dcsgd").rglob("*.*") if path.is_file()}
    theirs = {path.relative_to(package) for path in package.rglob("*.*")}
    assert {path for path in ours if path.suffix != ".pyc"} == theirs


@pytest.mark.slow
def test_a_client_type_checks_and_mistakes_are_found(installed: Path, tmp_path: Path) -> None:
    text = CLIENT.read_text(encoding="utf-8")
    assert type_check(installed, text, tmp_path).startswith("Success")
    wrong = text.replace("target_epsilon=4.0", 'target_epsilon="four"').replace(
        "DCSGDTrainer) -> float", "DCSGDTrainer) -> str"
    )
    found = type_check(installed, wrong, tmp_path)
    assert 'Argument "target_epsilon"' in found
    assert 'expected "str"' in found
