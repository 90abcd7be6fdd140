"""Generate texts from prompts, in batches of similar length, with a progress bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_dcsgd.jobs.errors import UserError
from hf_dcsgd.jobs.language_arguments import GenerationArguments


@dataclass(frozen=True)
class Generated:
    """What a model wrote after a prompt, and whether it came to an end by itself."""

    text: str
    finished: bool


@torch.no_grad()
def generate_texts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    args: GenerationArguments,
    *,
    may_be_empty: bool = True,
    description: str = "generating",
    show_progress: bool = True,
) -> list[Generated]:
    """Generate one text per prompt, in their order. Prompts are texts with special tokens written out."""
    if not prompts:
        return []
    encoded = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    longest = max(map(len, encoded)) + args.max_new_tokens
    if longest > tokenizer.model_max_length:
        raise UserError(
            f"a prompt with --max_new_tokens {args.max_new_tokens} has up to {longest} tokens, and the model takes "
            f"{tokenizer.model_max_length}"
        )
    order = sorted(range(len(prompts)), key=lambda index: len(encoded[index]))
    results: dict[int, Generated] = {}
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        with tqdm(total=len(prompts), desc=description, unit="text", disable=not show_progress) as progress:
            for start in range(0, len(order), args.generation_batch_size):
                chosen = order[start : start + args.generation_batch_size]
                texts = _generate(model, tokenizer, [encoded[index] for index in chosen], args, device, may_be_empty)
                results |= dict(zip(chosen, texts, strict=True))
                progress.update(len(chosen))
    finally:
        model.train(was_training)
    return [results[index] for index in range(len(prompts))]


def _generate(
    model: Any,
    tokenizer: Any,
    prompts: list[list[int]],
    args: GenerationArguments,
    device: torch.device,
    may_be_empty: bool,
) -> list[Generated]:
    width, padding = max(map(len, prompts)), tokenizer.pad_token_id
    ids = torch.tensor([[padding] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    sampling: dict[str, Any] = {"do_sample": False}
    if args.temperature > 0:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    ends = model.generation_config.eos_token_id
    ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    outputs = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=args.max_new_tokens,
        min_new_tokens=None if may_be_empty else 1,
        num_beams=args.num_beams,
        pad_token_id=padding,
        eos_token_id=sorted(ends),
        **sampling,
    )
    found = []
    for row in outputs[:, width:].tolist():
        stop = next((place for place, token in enumerate(row) if token in ends), None)
        found.append(Generated(tokenizer.decode(row[:stop], skip_special_tokens=True).strip(), stop is not None))
    return found
