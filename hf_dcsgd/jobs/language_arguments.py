"""Say what can be asked of a language model's training and generation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hf_dcsgd.jobs.arguments import FileArguments, ModelArguments, option
from hf_dcsgd.jobs.errors import UserError


@dataclass
class LanguageModelArguments(ModelArguments):
    """Which model, and how it is adapted: by low-rank adapters, unless `--no_lora` asks for layers of the model."""

    lora: bool = option(True, "Train low-rank adapters (peft). --no_lora: the layers that --trainable_layers names.")


@dataclass
class GenerationArguments:
    """How text is generated."""

    max_new_tokens: int = option(64, "Generated texts end after so many tokens at the latest.")
    num_beams: int = option(1, "Search with so many beams; 1 takes the likeliest token, or samples.")
    temperature: float = option(0.0, "Sample at this temperature; 0 takes the likeliest token.")
    top_p: float = option(1.0, "Sample from the likeliest tokens that have so much probability together.")
    generation_batch_size: int = option(32, "Generate so many texts at a time.")
    end_token: str | None = option(
        None, "The token that ends a text, where the model was pre-trained with another than its tokenizer says."
    )

    def check_generation(self) -> None:
        """Refuse settings that nothing can be generated with."""
        for name in ("max_new_tokens", "num_beams", "generation_batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: expected at least 1")
        if self.temperature < 0:
            raise UserError(f"--temperature {self.temperature}: expected 0 or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top_p {self.top_p}: expected more than 0 and at most 1")


@dataclass
class LanguageDataArguments(GenerationArguments, FileArguments):
    """Which texts, and how they become tokens."""

    _argument_group_name = "data"

    messages_column: str | None = option(
        None, "Column of conversations, lists of {role, content}. Default: messages, where there is such a column."
    )
    prompt_column: str | None = option(
        None, "Column of prompts (texts, or lists of messages), which are read and not learned. Default: prompt."
    )
    completion_column: str | None = option(
        None, "Column of what follows a prompt, and is learned. Default: completion."
    )
    text_column: str | None = option(None, "Column of plain texts, learned from start to end. Default: found by name.")
    separator: str = option("\n", "What stands between a prompt and its completion, where both are texts.")
    chat_template: str | None = option(
        None, "File with the Jinja template of conversations. Default: the tokenizer's."
    )
    max_seq_length: int = option(256, "Longer rows are cut to so many tokens.")

    def __post_init__(self) -> None:
        if not self.has_files:
            raise UserError("give the data by --train_file, --validation_file or --test_file, or by --dataset_name")
        if (self.prompt_column is None) != (self.completion_column is None) and self.test_file is None:
            raise UserError("--prompt_column and --completion_column belong together; give both")
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise UserError(f"--chat_template {self.chat_template}: there is no such file")
        self.check_generation()
        super().__post_init__()
