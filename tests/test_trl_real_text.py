"""A real model on real text by TRL's trainer with the private step. Needs the folder of data beside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_tasks import quiet
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dcsgd.trl import DCSGDSFTConfig, DCSGDSFTTrainer

DATA = Path(__file__).parents[1].parent / "shared" / "data"
MODEL = DATA / "weights" / "stories15M"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_report_page"),
    pytest.mark.skipif(not MODEL.exists(), reason=f"needs {MODEL}"),
]


def texts() -> list[str]:
    (path,) = (DATA / "sms-spam").iterdir()
    return [line.split("\t", 1)[1] for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_loss_falls_on_real_text_within_a_budget(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token, tokenizer.eos_token = "</s>", "<s>"  # stories15M ends a text by the start of the next
    rows = Dataset.from_dict({"text": texts()})
    args = DCSGDSFTConfig(
        str(tmp_path),
        **quiet(target_epsilon=8, per_device_train_batch_size=96, gradient_accumulation_steps=1, max_steps=10),
        learning_rate=0.01,
        max_length=32,
    )
    trainer = DCSGDSFTTrainer(
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        args,
        train_dataset=rows.select(range(5000)),
        eval_dataset=rows.select(range(5000, 5128)),
        processing_class=tokenizer,
        peft_config=LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    report = trainer.privacy_report()
    print(f"loss {before:.3f} before, {after:.3f} after, at ε = {report['guarantee']['epsilon']:.3f}")
    assert after < before - 0.5
    assert report["guarantee"]["holds"]
    assert report["guarantee"]["epsilon"] <= 8
    assert report["steps"]["charged"] == 10
    logged = {key for line in trainer.state.log_history for key in line}
    assert not logged & {"loss", "train_loss", "entropy", "mean_token_accuracy", "num_tokens", "eval_num_tokens"}
