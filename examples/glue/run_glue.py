#!/usr/bin/env python
"""Fine-tune a text classifier with differential privacy, on a GLUE task or on files of your own.

    python run_glue.py --model_name_or_path bert-base-uncased --task_name qnli --do_train --do_eval \\
        --target_epsilon 8 --per_device_train_batch_size 32 --gradient_accumulation_steps 8 \\
        --num_train_epochs 5 --output_dir outputs/qnli

All options can also stand in one JSON or YAML file: python run_glue.py qnli.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hf_dcsgd.jobs import text_classification


def main(argv: Sequence[str] | None = None) -> int:
    return text_classification.main(argv, prog="run_glue.py", description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
