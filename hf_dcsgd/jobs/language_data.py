"""Turn conversations, prompts with completions, or plain texts into tokens, and say which of these are learned.

One row becomes one example: rows are never packed together, since a packed row would be several people's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from hf_dcsgd.jobs.errors import UserError, explained
from hf_dcsgd.jobs.language_arguments import GenerationArguments, LanguageDataArguments
from hf_dcsgd.jobs.text_data import TEXTS, first_present, load_splits, require_owners
from hf_dcsgd.tasks.losses import IGNORE_INDEX

MESSAGES, PROMPT, TEXT = "messages", "prompt", "text"
Span = tuple[int, int]


@dataclass(frozen=True)
class Columns:
    """Which columns hold the text: of conversations, of prompts and completions, or of plain texts."""

    kind: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Example:
    """One row as text, and the parts of it that are learned, as spans of characters."""

    text: str
    learned: tuple[Span, ...]


def load_language_data(
    args: LanguageDataArguments, cache_dir: str | None = None, privacy_unit: str | None = None
) -> tuple[dict[str, Dataset], Columns]:
    """Read the files; return the splits by name, and which of their columns hold the text."""
    splits = load_splits(args, cache_dir)
    columns = find_columns(args, next(iter(splits.values())).column_names)
    for name, rows in splits.items():
        wanted = columns.names[:1] if name == "test" else columns.names
        missing = [column for column in wanted if column not in rows.column_names]
        if missing:
            raise UserError(
                f"no column {missing[0]!r} in the {name} data (columns: {', '.join(rows.column_names)}); name the "
                "right one by --messages_column, --prompt_column, --completion_column or --text_column"
            )
        splits[name] = args.limited(rows, name)
    if privacy_unit is not None and "train" in splits:
        require_owners(splits["train"], privacy_unit)
    return splits, columns


def find_columns(args: LanguageDataArguments, available: Sequence[str]) -> Columns:
    """Take the columns that were named, or else those whose names tell."""
    if args.messages_column is not None:
        return Columns(MESSAGES, (args.messages_column,))
    if args.prompt_column is not None or args.completion_column is not None:
        return Columns(PROMPT, (args.prompt_column or "prompt", args.completion_column or "completion"))
    if args.text_column is not None:
        return Columns(TEXT, (args.text_column,))
    if "messages" in available:
        return Columns(MESSAGES, ("messages",))
    if "prompt" in available:
        return Columns(PROMPT, ("prompt", "completion"))
    text = first_present(TEXTS, available)
    if text is None:
        raise UserError(
            f"cannot tell which columns hold the text (columns: {', '.join(available)}); give --messages_column, "
            "--prompt_column with --completion_column, or --text_column"
        )
    return Columns(TEXT, (text,))


# --- rows as text ----------------------------------------------------------------------------------------------------


class RowFormat:
    """Writes rows as text, for training and as prompts to generate from."""

    def __init__(self, tokenizer: Any, columns: Columns, separator: str = "\n") -> None:
        self.tokenizer = tokenizer
        self.columns = columns
        self.separator = separator
        self._start, self._end = tokenizer.bos_token or "", tokenizer.eos_token or ""

    def example(self, row: Mapping[str, Any]) -> Example:
        """Return a row as it is trained on: whole texts, completions, or all that the assistant says is learned."""
        values = [row[name] for name in self.columns.names]
        if self.columns.kind == MESSAGES:
            return self._conversation(values[0])
        if self.columns.kind == PROMPT:
            prompt, completion = values
            if isinstance(prompt, list) or isinstance(completion, list):
                said = _as_messages(completion, "assistant")
                return self._conversation(
                    [*_as_messages(prompt, "user"), *said], first=len(_as_messages(prompt, "user"))
                )
            head = f"{self._start}{_shown(prompt)}{self.separator}"
            text = f"{head}{_shown(completion)}{self._end}"
            return Example(text, ((len(head), len(text)),))
        text = f"{self._start}{_shown(values[0])}{self._end}"
        return Example(text, ((len(self._start), len(text)),))

    def prompt(self, row: Mapping[str, Any]) -> str:
        """Return what the model is to go on from; of a conversation, all before the assistant's last turn."""
        value = row[self.columns.names[0]]
        if self.columns.kind == MESSAGES or isinstance(value, list):
            messages = _as_messages(value, "user")
            last = messages[-1:] if self.columns.kind == MESSAGES else []
            before = messages[:-1] if last and last[0]["role"] == "assistant" else messages
            return self._rendered(before, to_go_on=True)
        # A space belongs to the word that follows it.
        return f"{self._start}{_shown(value)}{self.separator}".rstrip(" ")

    def reference(self, row: Mapping[str, Any]) -> str | None:
        """Return what the data say after that prompt; None where they do not."""
        if self.columns.kind == MESSAGES:
            last = row[self.columns.names[0]][-1]
            return last["content"] if last["role"] == "assistant" else None
        value = row.get(self.columns.names[1])
        return value[-1]["content"] if isinstance(value, list) else value

    def _conversation(self, messages: list[dict[str, Any]], first: int = 0) -> Example:
        """Render a conversation; turns of the assistant from the `first` message on are learned."""
        text, learned = self._rendered(messages), []
        for turn, message in enumerate(messages):
            if message["role"] == "assistant" and turn >= first:
                before = self._rendered(messages[:turn], to_go_on=True)
                until = self._rendered(messages[: turn + 1])
                if not (text.startswith(until) and until.startswith(before)):
                    raise UserError(
                        "the chat template writes a turn differently once others follow it, so that it cannot be told "
                        "what the assistant says; give another by --chat_template"
                    )
                learned.append((len(before), len(until)))
        return Example(text, tuple(learned))

    def _rendered(self, messages: list[dict[str, Any]], *, to_go_on: bool = False) -> str:
        if not self.tokenizer.chat_template:
            raise UserError("the tokenizer has no chat template; give one by --chat_template FILE")
        with explained(lambda error: f"the chat template cannot write a conversation: {error}", Exception):
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=to_go_on)


def _as_messages(value: Any, role: str) -> list[dict[str, Any]]:
    return list(value) if isinstance(value, list) else [{"role": role, "content": _shown(value)}]


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def use_chat_template(tokenizer: Any, args: LanguageDataArguments) -> None:
    """Give the tokenizer the template that was asked for; it is saved with the model."""
    if args.chat_template is not None:
        tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")


def use_end_token(tokenizer: Any, args: GenerationArguments) -> None:
    """Let texts end with the token that was asked for; it is saved with the tokenizer."""
    if args.end_token is None:
        return
    if args.end_token not in tokenizer.get_vocab():
        raise UserError(f"--end_token {args.end_token}: the tokenizer has no such token")
    tokenizer.eos_token = args.end_token


# --- rows as tokens --------------------------------------------------------------------------------------------------


def tokenized(
    rows: Dataset, split: str, row_format: RowFormat, args: LanguageDataArguments, privacy_unit: str | None = None
) -> Dataset:
    """Return the rows of a split as `input_ids` and `labels`; what is not learned has the label -100.

    Training rows keep the column that says whose they are.
    """
    tokenizer = row_format.tokenizer
    length = min(args.max_seq_length, tokenizer.model_max_length)

    def prepare(row: dict[str, Any]) -> dict[str, Any]:
        return encoded(tokenizer, row_format.example(row), length)

    return rows.map(
        prepare,
        remove_columns=[name for name in rows.column_names if split != "train" or name != privacy_unit],
        load_from_cache_file=not args.overwrite_cache,
        desc=f"tokenizing {split}",
    )


def encoded(tokenizer: Any, example: Example, length: int) -> dict[str, list[int]]:
    """Return the tokens of an example and their labels; a token counts as learned that ends in a learned span."""
    tokens = tokenizer(
        example.text, add_special_tokens=False, truncation=True, max_length=length, return_offsets_mapping=True
    )
    ids = tokens["input_ids"]
    learned = [any(start < end <= stop for start, stop in example.learned) for _, end in tokens["offset_mapping"]]
    labels = [token if wanted else IGNORE_INDEX for token, wanted in zip(ids, learned, strict=True)]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}
