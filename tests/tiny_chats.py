"""A tiny Llama with a tokenizer and a chat template in a folder, and conversations to tune it on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from datasets import Dataset
from tiny_tasks import quiet
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

from hf_dcsgd.trl import DCSGDSFTConfig, DCSGDSFTTrainer

SPECIAL = ("<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>")
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% else %}<|assistant|>{% generation %}{{ message['content'] }}</s>{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> hf.PreTrainedTokenizerFast:
    """One token per byte, and the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=list(SPECIAL[3:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
    )


def tiny_llama(tokenizer: Any = None, seed: int = 0, **settings: Any) -> hf.LlamaForCausalLM:
    tokenizer = tokenizer or byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        names = ("pad_token_id", "bos_token_id", "eos_token_id")
        tokens = {name: getattr(tokenizer, name) for name in names}
        return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=len(tokenizer), **LLAMA, **tokens, **settings))


def model_folder(folder: Path) -> str:
    """Save the model and its tokenizer, as a script would load them by name."""
    tokenizer = byte_tokenizer()
    tiny_llama(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def turns(number: int) -> tuple[str, str]:
    """A question, of which no two are alike, and its answer."""
    return f"count {'abcdefg'[number % 7] * (1 + number % 5)} of {number}", f"{1 + number % 5}{'!' * (number % 3)}"


def conversations(n: int = 64, start: int = 0) -> Dataset:
    """Conversations of unequal length."""
    rows = [turns(number) for number in range(start, start + n)]
    return Dataset.from_list(
        [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in rows]
    )


def completions(n: int = 64, start: int = 0) -> Dataset:
    """Prompts and completions, as plain text."""
    rows = [turns(number) for number in range(start, start + n)]
    return Dataset.from_list([{"prompt": q + "? ", "completion": a} for q, a in rows])


def sft_args(output_dir: Path | str, **changes: Any) -> DCSGDSFTConfig:
    """B = 16, σ = 1 and one epoch of four steps on 64 rows, unless changed."""
    defaults = quiet(recipe="none", accountant="rdp", per_device_train_batch_size=16, num_train_epochs=1)
    budget = {} if "target_epsilon" in changes else {"noise_multiplier": 1.0}
    return DCSGDSFTConfig(str(output_dir), **{**defaults, **budget, "max_length": 64, **changes})


def sft_trainer(output_dir: Path | str, data: Dataset | None = None, model: Any = None, **changes: Any) -> Any:
    """Make a trainer; `options` are those of the trainer, other changes those of the arguments."""
    options = {"processing_class": byte_tokenizer(), **changes.pop("options", {})}
    model = tiny_llama() if model is None else model
    return DCSGDSFTTrainer(
        model, sft_args(output_dir, **changes), train_dataset=conversations() if data is None else data, **options
    )
