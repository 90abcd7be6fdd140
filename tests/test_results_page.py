"""The page and the README's row are what the script makes of the results; the tables know which runs are missing."""

import json
from pathlib import Path

from worker_pool import WorkerPool

PAPER = Path(__file__).parents[1] / "examples" / "paper"


def test_the_page_and_the_readme_are_made_of_the_results(workers: WorkerPool) -> None:
    ended = workers.run(1, [PAPER / "results_page.py", "--check"], check=False)
    assert ended.exit_codes == [0], "run python examples/paper/results_page.py"


def test_every_result_lies_where_its_setting_says(workers: WorkerPool) -> None:
    listed = set()
    tables = ["sst2", "pairs", "held_out", "scratch", "scale", "thresholds", "travel", "insensitivity", "charged"]
    for table in ["sst2 --rows 20000", *tables, "models"]:
        shown = workers.run(1, [PAPER / "tables.py", *table.split(), "--data", "nowhere", "--list"])
        listed |= {line.split(maxsplit=1)[1] for line in shown.output.splitlines()}
    found = {path.stem for path in (PAPER / "results").glob("*.json")} - {"range_rules"}
    assert found <= listed
    for name in found:
        result = json.loads((PAPER / "results" / f"{name}.json").read_text(encoding="utf-8"))
        assert 0 < result["accuracy"] <= 1
        if "plan" in result:
            assert result["epsilon"] <= result["setting"]["epsilon"] * 1.0001
