"""Memory of one device where the frozen part of a model is sharded: the table of docs/distributed.md.

Models are made on the meta device from their published sizes, so that nothing is downloaded and nothing is large:

    python benchmarks/sharded_memory.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_dcsgd.sharding.memory import rank_memory
from hf_dcsgd.tasks.layer_selection import select_trainable_layers

DEVICES = (1, 2, 4, 8, 16)
TOKENS = 1024
LLAMA: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}


def last_layer(config: hf.BertConfig) -> nn.Module:
    with torch.device("meta"):
        model = hf.BertForSequenceClassification(config)
    select_trainable_layers(model)
    return model


def with_lora(make: Callable[[], nn.Module]) -> nn.Module:
    """Adapters of rank 16 on all linear layers, in fp32; the trunk in bf16."""
    with torch.device("meta"):
        model = make().to(torch.bfloat16)
        return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def llama(hidden: int, inner: int, layers: int, heads: int, *, tied: bool = False) -> nn.Module:
    config = hf.LlamaConfig(
        **LLAMA,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        tie_word_embeddings=tied,
    )
    return with_lora(lambda: hf.LlamaForCausalLM(config))


def qwen3_06b() -> nn.Module:
    config = hf.Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    return with_lora(lambda: hf.Qwen3ForCausalLM(config))


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert-base, last layer, fp32": lambda: last_layer(hf.BertConfig()),
    "bert-large, last layer, fp32": lambda: last_layer(hf.BertConfig(**LARGE)),
    "Qwen3-0.6B, LoRA": qwen3_06b,
    "Llama 1B, LoRA": lambda: llama(2048, 8192, 16, 32, tied=True),
    "Llama 8B, LoRA": lambda: llama(4096, 14336, 32, 32),
    "Llama 70B, LoRA": lambda: llama(8192, 28672, 80, 64),
}


def activations(model: nn.Module, tokens: int = TOKENS) -> int:
    """Bytes that a pass over so many tokens keeps, with gradient checkpointing, about.

    Kept are the input of every block, what one block keeps while it runs again (some 10 vectors of the hidden and 4 of
    the inner size), and logits with their gradient in fp32.
    """
    config: Any = model.config
    width, inner = config.hidden_size, config.intermediate_size
    size = max(p.element_size() for p in model.parameters() if not p.requires_grad)
    outputs = config.vocab_size if "CausalLM" in type(model).__name__ else 0
    return tokens * (size * (config.num_hidden_layers * width + 10 * width + 4 * inner) + outputs * (size + 8))


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f}" if size >= 1e9 else f"{size / 1e9:.2f}"


def table() -> list[str]:
    columns = " | ".join(f"{count} device{'' if count == 1 else 's'}" for count in DEVICES)
    lines = [f"| model | parameters | trained | {columns} | activations |", "|---|" + "---|" * (len(DEVICES) + 3)]
    for name, make in MODELS.items():
        model = make()
        every = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        held = " | ".join(gigabytes(rank_memory(model, count)["total"]) for count in DEVICES)
        size = f"{every / 1e9:.2g} B" if every >= 1e9 else f"{every / 1e6:.0f} M"
        lines.append(f"| {name} | {size} | {trained / 1e6:.1f} M | {held} | {gigabytes(activations(model))} |")
    return lines


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    print("\n".join(table()))
