"""The search of `test_trainer_leaks.py` over runs on pairs: rewards, margins, log-probabilities, entropies."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from architectures import randomized
from test_trainer_leaks import BATCH, SIZES, Listener, N, Watched, everything_said, found_in
from test_trl_preference import KINDS, pairs, preference_trainer, tiny_rewards
from tiny_chats import tiny_llama
from tiny_tasks import force_draws
from torch import Tensor

from hf_dcsgd.data.rows import Batch
from hf_dcsgd.step import PrivateStep
from hf_dcsgd.trl.preference import REFERENCE

pytestmark = pytest.mark.slow  # `test_trl_preference.py` looks at the log of such runs

# What TRL gathers from training batches, under names of its own.
THEIRS = re.compile(
    r"""(["']|train/)((min|mean|max)_reward|margin|accuracy|entropy|num_tokens|(rewards|logps|logits)/\w+)\b"""
)


def as_trl_has_it(stack: Batch) -> dict[str, Tensor]:
    """The pairs of a stack in TRL's order, chosen texts first."""
    flat = {name: torch.cat(stack[name].unbind(1)) for name in ("input_ids", "attention_mask")}
    if REFERENCE not in stack:
        return {**flat, "margin": stack["margin"]}
    chosen, rejected = stack[REFERENCE].unbind(1)
    mask = (torch.cat(stack["labels"].unbind(1)) != -100).long()
    return {**flat, "completion_mask": mask, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}


class WatchedPairs(Watched):
    """Writes down what TRL would have logged of every logical batch, too."""

    def __init__(self, trainer: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(trainer, monkeypatch)
        self._theirs, self._stacks = KINDS[kind][2], []

    def accumulate(self, step: PrivateStep, stack: Batch) -> None:
        self._is_new_stack = True
        self._stacks.append(stack)

    def release(self, step: PrivateStep) -> None:
        tokens = sum(int(stack["attention_mask"].sum()) for stack in self._stacks)
        self.aggregates[f"batch size in tokens, step {len(self.sums)}"] = tokens
        trainer = self.trainer
        trainer.model.eval()
        with torch.no_grad():
            for stack in self._stacks:
                self._theirs.compute_loss(trainer, trainer.model, as_trl_has_it(stack))
        trainer.model.train()
        for name, values in trainer._metrics["eval"].items():
            if "accurac" not in name and name != "num_tokens":
                self.note(f"TRL's {name}", np.mean(values))
        trainer._metrics["eval"].clear()
        self._stacks = []
        super().release(step)


@pytest.fixture(scope="module", params=KINDS)
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[WatchedPairs, dict[str, str]]:
    """A run that saves, evaluates, reports to tensorboard and writes whatever a script would have it write."""
    directory = tmp_path_factory.mktemp(request.param)
    listener, sizes = Listener(), iter(SIZES)
    trainer = preference_trainer(
        request.param,
        directory,
        pairs(N),
        randomized(tiny_rewards if request.param == "reward" else tiny_llama),
        options={"callbacks": [listener], "eval_dataset": pairs(24, start=2000)},
        per_device_train_batch_size=BATCH // 2,
        gradient_accumulation_steps=2,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=3,
        report_to="tensorboard",
        learning_rate=0.02,
        unsafe_noise_seed=77001,
    )
    force_draws(trainer, lambda: np.random.default_rng(0).permutation(N)[: next(sizes)])
    with pytest.MonkeyPatch.context() as monkeypatch:
        watched = WatchedPairs(trainer, request.param, monkeypatch)
        output = trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", output.metrics)
    trainer.save_metrics("train", output.metrics)
    trainer.create_model_card()
    returned = [output.metrics, output.training_loss, trainer.privacy_report(), trainer.state.log_history]
    said = everything_said(directory, listener, returned)
    return watched, {place: text for place, text in said.items() if not place.endswith("tokenizer.json")}


def test_nothing_private_is_written_or_told(run: tuple) -> None:
    watched, said = run
    assert len(watched.sums) == 4
    assert {"callbacks", "returned", "train_results.json", "README.md"} <= set(said)
    assert any("tfevents" in place for place in said)
    assert "checkpoint-3/trainer_state.json" in said
    assert found_in(said, watched) == set()
    # The search would find them.
    theirs = {name: value for name, value in watched.aggregates.items() if "TRL's" in name and not value.is_integer()}
    assert len({name.partition(" of step")[0] for name in theirs}) >= 4
    for name, value in theirs.items():
        assert found_in({"log": str(value)}, watched), name


def test_trl_metrics_are_told_of_evaluations_alone(run: tuple) -> None:
    watched, said = run
    keys = {key for line in watched.trainer.state.log_history for key in line}
    assert any("reward" in key for key in keys)
    assert all(key.startswith("eval_") for key in keys if re.search("reward|logps|logits|margin|accurac|entropy", key))
    told = {place: text for place, text in said.items() if place != "README.md"}
    assert [place for place, text in told.items() if THEIRS.search(text)] == []
    assert THEIRS.search('{"rewards/chosen": 1}')
    assert THEIRS.search('{"margin": 1}')
    assert not THEIRS.search('{"eval_margin": 1, "eval_rewards/chosen": 1}')
