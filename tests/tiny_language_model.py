"""A random Llama of a few thousand parameters with a tokenizer of bytes, as a folder, and rows of each kind for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '[' + message.role + ']' + message.content + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def tiny_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        **({"chat_template": CHAT_TEMPLATE} if chat else {}),
    )


def save_tiny_llama(folder: Path, *, chat: bool = True, positions: int = 128) -> str:
    tokenizer = tiny_tokenizer(chat=chat)
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=positions,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def chat_rows(count: int = 20) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"hi {k}"},
                {"role": "assistant", "content": f"yes {k}"},
                {"role": "user", "content": "more"},
                {"role": "assistant", "content": f"no {k}"},
            ]
        }
        for k in range(count)
    ]


def prompt_rows(count: int = 20) -> list[dict[str, Any]]:
    return [{"prompt": f"name[{k // 2}]", "completion": f"It is {k}."} for k in range(count)]


def text_rows(count: int = 20) -> list[dict[str, Any]]:
    return [{"text": f"a text {k}", "label": ("ham", "spam")[k % 2]} for k in range(count)]
