"""The script that redraws the paper's synthetic figures runs and writes them."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

SCRIPT = Path(__file__).parents[1] / "examples" / "paper" / "figures.py"


def test_figures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--output-dir", str(tmp_path / "new" / "folder")],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    paths = [tmp_path / "new" / "folder" / name for name in ("figure_4.png", "figure_5.png")]
    assert result.stdout.split() == [str(path) for path in paths]
    for path in paths:
        with Image.open(path) as image:
            assert image.size == (1875, 630)
            assert len(image.convert("RGB").getcolors(maxcolors=2**24)) > 100, "an empty picture"
