"""The global random states are afterwards what they were, whatever is drawn inside."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from hf_dcsgd.privacy.randomness import private_randomness
from hf_dcsgd.step import PrivateStep

CPU = torch.device("cpu")


def states() -> tuple:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def seed_all() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


def draw(amount: int) -> list[float]:
    return [*torch.rand(amount).tolist(), *np.random.random(amount), *(random.random() for _ in range(amount))]


@pytest.mark.parametrize("amount", [0, 1, 5000])
def test_the_states_are_put_back_whatever_was_drawn(amount: int) -> None:
    seed_all()
    expected = states()
    with private_randomness(CPU):
        draw(amount)
    assert states() == expected


def test_the_states_are_put_back_when_the_block_fails() -> None:
    seed_all()
    expected = states()
    with pytest.raises(KeyError), private_randomness(CPU):
        raise KeyError(draw(3))
    assert states() == expected


def test_random_numbers_inside_are_secret_and_fresh_in_every_block() -> None:
    blocks = []
    for _ in range(2):
        seed_all()
        with private_randomness(CPU):
            blocks.append(draw(3))
    assert not set(blocks[0]) & set(blocks[1])


def test_random_numbers_inside_follow_a_seed_when_one_is_given() -> None:
    blocks = []
    for seed in (5, 6, 5, -1, 2**70):
        with private_randomness(CPU, seed):
            blocks.append(draw(3))
    assert blocks[2] == blocks[0]
    assert len({number for block in blocks for number in block}) == 4 * 9


def blocks_of(step: PrivateStep) -> list[list[float]]:
    blocks = []
    for _ in range(3):
        with step.randomness():
            blocks.append(draw(2))
    return blocks


def test_the_blocks_of_a_step_differ_and_repeat_in_a_run_with_the_same_seed() -> None:
    first, again, other, secret = (
        blocks_of(PrivateStep(nn.Linear(2, 2), reproducible_from=seed)) for seed in (3, 3, 4, None)
    )
    assert first == again
    assert len({number for block in [*first, *other, *secret] for number in block}) == 3 * 3 * 6
