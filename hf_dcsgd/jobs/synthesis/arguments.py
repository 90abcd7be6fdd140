"""Say what can be asked of a synthesis."""

from __future__ import annotations

from dataclasses import dataclass

from hf_dcsgd.jobs.arguments import FileArguments, option
from hf_dcsgd.jobs.errors import UserError
from hf_dcsgd.jobs.language_arguments import GenerationArguments

NOISED, UNIFORM = "noised", "uniform"
FORMATS = ("jsonl", "csv", "parquet")


@dataclass
class SynthesisArguments(GenerationArguments, FileArguments):
    """Which rows are private, and what synthetic ones are wanted."""

    _argument_group_name = "data"

    text_column: str | None = option(None, "Column of the text. Default: found by its name.")
    label_column: str | None = option(None, "Column of the label. Default: found by its name.")
    metadata_columns: str | None = option(
        None, "Further columns with few different values, separated by commas; texts are sampled for them, too."
    )
    labels: str | None = option(
        None, "The labels, such as ham,spam. Default: those in the training file, which are then taken as public."
    )
    prefix_template: str | None = option(
        None,
        "What stands before a text, with columns in braces, such as 'A {label} text message:'; a public choice. "
        "Default: the values, separated by bars.",
    )
    label_words: str | None = option(
        None,
        "How prefixes call the labels, such as 'ham=a note to a friend,spam=an advertisement', where a model that has "
        "read a lot would not understand their names.",
    )
    num_rows: int = option(1000, "How many synthetic rows are wanted.")
    label_shares: str = option(
        NOISED,
        "How they are spread over labels (and metadata). noised: as in the training rows, counted with noise, which "
        "is charged. uniform: evenly. ham=0.8,spam=0.2: as stated, which is public knowledge or a wish.",
    )
    label_noise_multiplier: float = option(
        10.0, "label_shares=noised: the standard deviation of the noise on each count, where a row counts 1."
    )
    output_format: str = option("jsonl", f"Format of the synthetic table: {', '.join(FORMATS)}.")
    sampling_rounds: int = option(4, "Malformed rows are left out and sampled anew, in at most so many rounds.")
    sample_only: bool = option(False, "Train nothing: sample from the model that output_dir holds.")
    evaluation_model: str | None = option(
        None, "With --validation_file: the model whose features classifiers use. Default: the public language model."
    )

    max_new_tokens: int = option(64, "Rows that do not end within so many tokens are malformed.")
    temperature: float = option(1.0, "Sample at this temperature.")
    top_p: float = option(0.95, "Sample from the likeliest tokens that have so much probability together.")
    generation_batch_size: int = option(128, "Sample so many rows at a time.")

    def __post_init__(self) -> None:
        if self.train_file is None:
            raise UserError("give the private rows by --train_file")
        for name in ("num_rows", "sampling_rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: expected at least 1")
        if self.label_noise_multiplier <= 0:
            raise UserError(f"--label_noise_multiplier {self.label_noise_multiplier}: expected more than 0")
        if self.output_format not in FORMATS:
            raise UserError(f"--output_format {self.output_format}: expected one of {', '.join(FORMATS)}")
        if self.temperature == 0:
            raise UserError("--temperature 0: every row of a label would be the same; expected more than 0")
        self.check_generation()
        super().__post_init__()
