#!/usr/bin/env python
"""Make a synthetic table of labeled texts from a private one, with differential privacy.

    python synthesize.py --model_name_or_path HuggingFaceTB/SmolLM2-135M --train_file messages.csv \\
        --validation_file held_out.csv --num_rows 1000 --target_epsilon 8 --output_dir outputs/messages

A language model learns the private texts, with their labels as a prefix. Texts are then sampled for each label, as
often as a noised count of the labels says (its cost is part of ε), and written with a card to output_dir/synthetic.
With --validation_file the rows are compared with the private ones: private_evaluation.json, for their owner alone.
All options can also stand in one JSON or YAML file: python synthesize.py messages.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hf_dcsgd.jobs.synthesis import job


def main(argv: Sequence[str] | None = None) -> int:
    return job.main(argv, prog="synthesize.py", description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
