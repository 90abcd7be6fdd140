"""The page and the README's row are what the script makes of the results; the tables know which runs are missing."""

import json
import subprocess
import sys
from pathlib import Path

PAPER = Path(__file__).parents[1] / "examples" / "paper"


def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PAPER / script), *words], capture_output=True, text=True, check=False)


def test_the_page_and_the_readme_are_made_of_the_results():
    assert run("results_page.py", "--check").returncode == 0, "run python examples/paper/results_page.py"


def test_every_result_lies_where_its_setting_says():
    listed = set()
    for table, rows in (("sst2", ["--rows", "20000"]), ("sst2", []), ("pairs", []), ("held_out", []), ("scratch", []),
                        ("scale", []), ("insensitivity", [])):  # fmt: skip
        shown = run("tables.py", table, "--data", "nowhere", "--list", *rows)
        assert shown.returncode == 0, shown.stderr
        listed |= {line.split(maxsplit=1)[1] for line in shown.stdout.splitlines()}
    found = {path.stem for path in (PAPER / "results").glob("*.json")} - {"range_rules"}
    assert found <= listed
    for name in found:
        result = json.loads((PAPER / "results" / f"{name}.json").read_text(encoding="utf-8"))
        assert 0 < result["accuracy"] <= 1
        if "plan" in result:
            assert result["epsilon"] <= result["setting"]["epsilon"] * 1.0001
