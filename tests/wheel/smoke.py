"""Try the installed package from outside: `python smoke.py FOLDER`, in an environment with its base dependencies.

Plans, trains a tiny model on made-up rows through the `Trainer` and reads the report;
what needs an extra must say which.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

import hf_dcsgd
from hf_dcsgd import DCSGDTrainer, DCSGDTrainingArguments, PrivacyPlan

BIN = Path(sys.executable).parent
SIZE = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


def main(folder: Path) -> None:
    home = Path(hf_dcsgd.__file__).resolve().parent
    print(f"hf_dcsgd {hf_dcsgd.__version__} from {home.parent.name}, python {sys.version.split()[0]}")
    assert home.parent.name == "site-packages", f"expected the installed package, got {home}"
    plan()
    train(folder)
    command_line(folder)
    command_that_trains(folder)
    print("the wheel works")


def plan() -> None:
    planned = PrivacyPlan.create(
        dataset_size=1000, expected_batch_size=100, steps=10, num_parameters=3, target_epsilon=4
    )
    assert 3.9 < planned.epsilon() <= 4


def train(folder: Path) -> None:
    model = BertForSequenceClassification(BertConfig(vocab_size=64, **SIZE))
    rows = [{"input_ids": [i % 60, i % 7, 3], "attention_mask": [1, 1, 1], "labels": i % 2} for i in range(300)]
    args = DCSGDTrainingArguments(
        str(folder), target_epsilon=8, max_steps=3, use_cpu=True, report_to="none", trainable_layers="all"
    )
    trainer = DCSGDTrainer(model, args, train_dataset=Dataset.from_list(rows))
    trainer.train()
    trainer.save_model()
    report = json.loads((folder / "privacy_report.json").read_text(encoding="utf-8"))
    assert report["guarantee"]["holds"]
    assert 0 < report["budget"]["epsilon"] <= 8
    assert (folder / "privacy_report.html").exists() == (importlib.util.find_spec("matplotlib") is not None)


def command_line(folder: Path) -> None:
    assert "σ" in hf_dcsgd_says(0, "calibrate --epsilon 2 --dataset-size 10000 --batch-size 256 --epochs 3")
    told = hf_dcsgd_says(0, f"report {folder}")
    assert "differentially private" in told
    if importlib.util.find_spec("matplotlib") is None:
        assert "pip install 'hf-dcsgd[report]'" in told


def command_that_trains(folder: Path) -> None:
    """A CSV file and a model in a folder become a private model; what the extra `demo` brings is asked for by name."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    BertForSequenceClassification(BertConfig(vocab_size=len(vocabulary), **SIZE)).save_pretrained(folder / "bert")
    rows = [f"{'good' if i % 2 else 'bad'} {i},{i % 2}" for i in range(200)]
    (folder / "rows.csv").write_text("text,label\n" + "\n".join(rows) + "\n", encoding="utf-8")
    common = (
        f"train --task text-classification --model {folder / 'bert'} --train_file {folder / 'rows.csv'} --epsilon 8"
    )
    common += " --max_steps 2 --use_cpu --report_to none"
    hf_dcsgd_says(0, f"{common} --output_dir {folder / 'trained'}")
    assert json.loads((folder / "trained" / "privacy_report.json").read_text(encoding="utf-8"))["guarantee"]["holds"]
    if importlib.util.find_spec("peft") is None:
        assert "pip install 'hf-dcsgd[demo]'" in hf_dcsgd_says(2, f"{common} --lora --output_dir {folder / 'lora'}")


def hf_dcsgd_says(code: int, arguments: str) -> str:
    done = subprocess.run([BIN / "hf-dcsgd", *arguments.split()], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


if __name__ == "__main__":
    main(Path(sys.argv[1]))
