#!/usr/bin/env python
"""Fine-tune a causal language model with differential privacy, on files of your own.

    python run_sft.py --model_name_or_path HuggingFaceTB/SmolLM2-135M --train_file chats.jsonl \\
        --validation_file held_out.jsonl --do_train --do_eval --target_epsilon 8 --output_dir outputs/chats

Rows are conversations (a column `messages`), prompts with completions (`prompt` and `completion`), or plain texts
(`text`). Low-rank adapters are trained, unless --no_lora. All options can also stand in one JSON or YAML file:
python run_sft.py chats.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hf_dcsgd.jobs import language_modeling


def main(argv: Sequence[str] | None = None) -> int:
    return language_modeling.main(argv, prog="run_sft.py", description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
