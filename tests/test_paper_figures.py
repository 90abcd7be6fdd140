"""The script that redraws the paper's synthetic figures runs and writes them."""

from pathlib import Path

import pytest
from PIL import Image
from worker_pool import WorkerPool

SCRIPT = Path(__file__).parents[1] / "examples" / "paper" / "figures.py"


@pytest.mark.slow
def test_figures_are_drawn(tmp_path: Path, workers: WorkerPool) -> None:
    pytest.importorskip("matplotlib")
    ended = workers.run(1, [SCRIPT, "--output-dir", tmp_path / "new" / "folder"])
    paths = [tmp_path / "new" / "folder" / name for name in ("figure_4.png", "figure_5.png")]
    assert ended.output.split() == [str(path) for path in paths]
    for path in paths:
        with Image.open(path) as image:
            assert image.size == (1875, 630)
            assert len(image.convert("RGB").getcolors(maxcolors=2**24)) > 100, "an empty picture"
