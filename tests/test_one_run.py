"""The example that audits one real run: it runs, its verdict follows from its numbers, and it can refute."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "audit"))

import one_run

from hf_dcsgd.audit.one_run import judge_one_run

pytestmark = pytest.mark.usefixtures("quick_statements")


def test_a_private_run_is_audited_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_report_page: None
) -> None:
    options = ["--canaries", "60", "--examples", "100", "--steps", "20", "--batch_size", "32", "--epsilon", "4"]
    code = one_run.main([*options, "--seed", "3", "--output_dir", str(tmp_path)])
    written = json.loads((tmp_path / "one_run_audit.json").read_text())
    verdict = written["audit"]
    assert (tmp_path / "one_run_audit.png").read_bytes().startswith(b"\x89PNG")
    assert len(written["scores"]) == len(written["included"]) == verdict["canaries"] == 60
    assert 15 < sum(written["included"]) < 45
    assert 3.5 < verdict["claimed_epsilon"] <= 4.0
    # Guesses that 20 steps at ε = 4 cannot make: a bound above the claim comes with a chance of one in twenty at most
    # for the worst of canaries, and with next to none for these.
    assert code == 0
    again = judge_one_run(
        written["scores"], written["included"], claimed_epsilon=verdict["claimed_epsilon"], delta=1e-6
    )
    assert again.correct == verdict["correct"]
    assert "of 20 guesses about 60 canaries were right: ε ≥" in capsys.readouterr().out


@pytest.mark.slow
def test_canaries_that_are_persons_with_several_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_report_page: None
) -> None:
    trained_on: list[dict] = []

    class Trainer(one_run.DCSGDTrainer):
        def __init__(self, *args: Any, train_dataset: list[dict], **kwargs: Any) -> None:
            trained_on.extend(train_dataset)
            super().__init__(*args, train_dataset=train_dataset, **kwargs)

    monkeypatch.setattr(one_run, "DCSGDTrainer", Trainer)
    options = ["--canaries", "60", "--examples", "100", "--steps", "10", "--batch_size", "32", "--epsilon", "4"]
    code = one_run.main([*options, "--rows_per_canary", "3", "--seed", "3", "--output_dir", str(tmp_path)])
    written = json.loads((tmp_path / "one_run_audit.json").read_text())
    included = sum(written["included"])
    rows_of = Counter(row["user_id"] for row in trained_on)
    assert Counter(rows_of.values()) == {1: 100, 3: included}
    for user in (user for user, count in rows_of.items() if count == 3):
        assert len({str(row["input_ids"]) for row in trained_on if row["user_id"] == user}) == 1, "equal rows"
    plan = json.loads((tmp_path / "privacy_run.json").read_text())["plan"]
    assert plan["dataset_size"] == plan["unit"]["count"] == 100 + included
    assert plan["unit"]["max_rows"] == 3
    assert code == 0
    assert 3.5 < written["audit"]["claimed_epsilon"] <= 4.0
    assert len(written["scores"]) == written["audit"]["canaries"] == 60


def test_canaries_follow_no_rule_and_the_background_does() -> None:
    generator = np.random.default_rng(0)
    background = one_run.generated_rows(500, 256, generator, canaries=False)
    canaries = one_run.generated_rows(500, 256, generator, canaries=True)

    bounds = np.linspace(5, 256, one_run.LABELS + 1).astype(int)

    def agreement(rows: list[dict]) -> float:
        """How often the label is the part of the vocabulary that most tokens come from."""
        return float(np.mean([np.histogram(r["input_ids"], bounds)[0].argmax() == r["labels"] for r in rows]))

    assert agreement(background) > 0.95
    assert agreement(canaries) < 0.25
    assert all(5 <= token < 256 for row in background + canaries for token in row["input_ids"])


@pytest.mark.slow
def test_coins_and_data_come_from_the_operating_system_unless_seeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_report_page: None
) -> None:
    options = {"canaries": 40, "examples": 60, "max_steps": 1, "per_device_train_batch_size": 16}
    coins = [
        one_run.audited_run(tmp_path / str(k), model=one_run.load_model(None), seed=seed, **options).included
        for k, seed in enumerate([None, None, 7, 7])
    ]
    assert coins[0] != coins[1]
    assert coins[2] == coins[3]


def test_a_folder_without_a_model_is_named() -> None:
    with pytest.raises(SystemExit, match=r"expected --model to be a folder .*, got nowhere"):
        one_run.load_model("nowhere")


@pytest.mark.slow
@pytest.mark.parametrize("rows_per_canary", [None, 4])
def test_the_audit_refutes_a_claim_that_has_no_noise_behind_it(
    tmp_path: Path, rows_per_canary: int | None, no_report_page: None
) -> None:
    """The control: next to no noise, and a small ε claimed all the same."""
    run = one_run.audited_run(
        tmp_path,
        model=one_run.load_model(None),
        canaries=150,
        examples=150,
        claim=0.5,
        seed=0,
        rows_per_canary=rows_per_canary,
        noise_multiplier=1e-3,
        target_delta=1e-6,
        clipping="fixed",
        trainable_layers="all",
        max_steps=400,
        per_device_train_batch_size=64,
        learning_rate=2e-3,
    )
    print(run.audit)
    assert run.audit.epsilon_lower_bound > 1.0
    assert not run.audit.passed
