"""A vocabulary of byte pairs cut to its first tokens: the same ids, and texts that come back whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "synthetic_text"))

# isort: split
import from_gguf

TEXT = "the quick brown fox jumps over the lazy dog, and the dog over the quick fox"


def byte_pairs() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def test_first_tokens_keep_their_numbers_and_write_every_text() -> None:
    whole = byte_pairs()
    cut = Tokenizer.from_str(json.dumps(from_gguf.cut_tokenizer(json.loads(whole.to_str()), 265)))
    assert cut.get_vocab_size() == 265
    assert cut.get_vocab().items() <= whole.get_vocab().items()
    ids, all_ids = cut.encode(TEXT).ids, whole.encode(TEXT).ids
    assert len(ids) > len(all_ids)
    assert max(ids) < 265 <= max(all_ids)
    assert cut.decode(ids) == TEXT


def test_special_tokens_are_not_cut_off() -> None:
    tokenizer = json.loads(byte_pairs().to_str())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 299, "content": "<end>"})
    with pytest.raises(ValueError, match="<end>, got 265"):
        from_gguf.cut_tokenizer(tokenizer, 265)
