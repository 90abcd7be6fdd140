"""Sample rows for each cell from a trained model, and leave out malformed ones.

All of it is post-processing of released weights and shares: it costs nothing, however often it is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_dcsgd.jobs.generation import Generated, generate_texts
from hf_dcsgd.jobs.synthesis.arguments import SynthesisArguments
from hf_dcsgd.jobs.synthesis.control import Controls

_REPLACEMENT = "�"


@dataclass
class Sampled:
    """Synthetic rows, and how many samples were left out for which reason."""

    rows: list[dict[str, str]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    missing: int = 0


def fault_of(generated: Generated) -> str | None:
    """Return what is wrong with a sample; None where nothing is."""
    if not generated.finished:
        return "unfinished"
    if _REPLACEMENT in generated.text:
        return "unreadable"
    return None if any(character.isalnum() for character in generated.text) else "empty"


def sample_rows(
    model: Any,
    tokenizer: Any,
    controls: Controls,
    counts: Sequence[int],
    prompt_of: Callable[[str], str],
    args: SynthesisArguments,
    *,
    show_progress: bool = True,
) -> Sampled:
    """Sample until every cell has its rows, or the rounds are over. `prompt_of` writes a prefix as a prompt.

    The first token is never an end: what comes out is what would be left of many more samples without the empty ones.
    """
    texts: list[list[str]] = [[] for _ in controls.cells]
    sampled = Sampled()
    for number in range(args.sampling_rounds):
        wanted = [place for place, count in enumerate(counts) for _ in range(count - len(texts[place]))]
        prompts = [prompt_of(controls.prefix(controls.cells[place])) for place in wanted]
        description = "sampling rows" if number == 0 else f"sampling rows, round {number + 1}"
        found = generate_texts(
            model, tokenizer, prompts, args,
            may_be_empty=False, description=description, show_progress=show_progress,
        )  # fmt: skip
        for place, generated in zip(wanted, found, strict=True):
            fault = fault_of(generated)
            if fault is None:
                texts[place].append(generated.text)
            else:
                sampled.left_out[fault] += 1
    for place, cell in enumerate(controls.cells):
        values = dict(zip(controls.columns, cell, strict=True))
        sampled.rows += [{**values, controls.text: text} for text in texts[place]]
        sampled.missing += counts[place] - len(texts[place])
    return sampled
