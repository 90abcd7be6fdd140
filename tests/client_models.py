"""Tiny models, a tokenizer and made-up texts for scripts that have the shape of transformers' examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"} | {
    "mask_token": "[MASK]",
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
}
WORDS = ["the", "a", "cat", "dog", "doctor", "tree", "sees", "likes", "helps", "in", "paris", "rome", "good", "bad"]
POSITIONS, HIDDEN = 48, 16
SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def tiny_tokenizer(end: str = "[SEP]") -> hf.PreTrainedTokenizerFast:
    """Return a tokenizer of whole words, which ends texts as encoders do, or as seq2seq models do ([EOS])."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    start = "[CLS] " if end == "[SEP]" else ""
    names = [(name, vocabulary[name]) for name in ("[CLS]", end)]
    single, pair = f"{start}$A {end}", f"{start}$A {end} $B:1 {end}:1"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=names)
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=POSITIONS, **SPECIAL)


def vocabulary_size() -> int:
    return len(SPECIAL) + len(WORDS)


def saved(folder: Path, model: hf.PreTrainedModel, processor: Any) -> str:
    """Save model and tokenizer (or another processor) as a folder that `from_pretrained` takes."""
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def seeded(make: Any, config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(config)


def bert_config(**settings: Any) -> hf.BertConfig:
    return hf.BertConfig(vocab_size=vocabulary_size(), max_position_embeddings=POSITIONS, **SIZES, **settings)


def sentence(number: int, length: int = 5) -> str:
    """Return a made-up sentence, always the same for a number."""
    generator = torch.Generator().manual_seed(number)
    return " ".join(WORDS[k] for k in torch.randint(len(WORDS), (length,), generator=generator).tolist())
