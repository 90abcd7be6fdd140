"""The search of `test_trainer_leaks.py` over a run of TRL's trainer: losses, norms, numbers of tokens, entropies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import randomized
from test_trainer_leaks import TALKATIVE, Listener, N, Watched, all_files, found_in, tensors_of, watched_training
from tiny_chats import conversations, sft_trainer, tiny_llama
from trl import SFTTrainer

from hf_dcsgd.data.rows import Batch
from hf_dcsgd.step import PrivateStep

# What TRL gathers from training batches, under names of its own.
THEIRS = re.compile(r"\b(train/)?(entropy|mean_token_accuracy|num_tokens|aux_loss)\b")


class WatchedChats(Watched):
    """Writes down the numbers of tokens of every logical batch, too, and what TRL would have logged of it."""

    def __init__(self, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(trainer, monkeypatch)
        self._stacks: list[Batch] = []

    def accumulate(self, step: PrivateStep, stack: Batch) -> None:
        self._is_new_stack = True
        self._stacks.append(stack)

    def release(self, step: PrivateStep) -> None:
        tokens = sum(int(stack["attention_mask"].sum()) for stack in self._stacks)
        counted = sum(int((stack["labels"] != -100).sum()) for stack in self._stacks)
        self.aggregates[f"batch size in tokens, step {len(self.sums)}"] = tokens
        self.aggregates[f"batch size in counted tokens, step {len(self.sums)}"] = counted
        self._note_theirs()
        self._stacks = []
        super().release(step)

    def _note_theirs(self) -> None:
        """Run TRL's loss over what was drawn, on the side."""
        trainer = self.trainer
        trainer.model.eval()
        with torch.no_grad():
            for stack in self._stacks:
                SFTTrainer.compute_loss(trainer, trainer.model, dict(stack))
        trainer.model.train()
        for name in ("entropy", "mean_token_accuracy"):
            self.note(f"TRL's {name}", np.mean(trainer._metrics["eval"][name]))
        trainer._metrics["eval"].clear()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[WatchedChats, dict[str, str], Path]:
    directory, listener = tmp_path_factory.mktemp("run"), Listener()
    trainer = sft_trainer(
        directory,
        conversations(N),
        randomized(tiny_llama),  # far from uniform: entropies tell batches apart
        options={"callbacks": [listener], "eval_dataset": conversations(40, start=2000)},
        learning_rate=0.02,
        **TALKATIVE,
    )
    watched, said = watched_training(trainer, listener, directory, WatchedChats)
    return watched, {place: text for place, text in said.items() if not place.endswith("tokenizer.json")}, directory


def test_nothing_private_is_written_or_told(run: tuple) -> None:
    watched, said, _ = run
    assert len(watched.sums) == 8
    assert len([name for name in watched.batch_sizes if "in tokens" in name]) == 8
    assert {"callbacks", "returned", "train_results.json", "README.md"} <= set(said)
    assert any("tfevents" in place for place in said)
    assert "checkpoint-3/trainer_state.json" in said
    assert found_in(said, watched) == set()
    # The search would find them.
    for name, value in watched.aggregates.items():
        if "TRL's" in name or "tokens" in name:
            assert found_in({"log": str(value)}, watched), name


def test_trl_metrics_are_told_of_evaluations_alone(run: tuple) -> None:
    watched, said, _ = run
    keys = {key for line in watched.trainer.state.log_history for key in line}
    assert {"eval_entropy", "eval_mean_token_accuracy", "eval_loss", "epsilon", "clip_threshold"} <= keys
    assert not keys & {"loss", "train_loss", "entropy", "mean_token_accuracy", "num_tokens", "eval_num_tokens"}
    # The card and tensorboard write the name of an evaluation's metric without the prefix.
    told = {place: text.replace("eval/", "eval_") for place, text in said.items() if place != "README.md"}
    assert [place for place, text in told.items() if THEIRS.search(text)] == []
    assert THEIRS.search('{"entropy": 1}')


def test_no_text_of_the_training_data_is_written(run: tuple) -> None:
    _, said, directory = run
    assert not [place for place, text in said.items() if "count " in text and "count bb of 1" in text]
    assert len([tensor for path in all_files(directory) for tensor in tensors_of(path)]) > 20
