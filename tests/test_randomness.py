"""The global random states move on by the same amount, whatever is drawn inside."""

import random

import numpy as np
import pytest
import torch

from hf_dcsgd.privacy.randomness import private_randomness

CPU = torch.device("cpu")


def states() -> tuple:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def seed_all() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


def draw(amount: int) -> list[float]:
    return [*torch.rand(amount).tolist(), *np.random.random(amount), *(random.random() for _ in range(amount))]


def test_the_states_afterwards_do_not_depend_on_what_was_drawn() -> None:
    seen = []
    for amount in (0, 1, 5000):
        seed_all()
        with private_randomness(CPU):
            draw(amount)
        seen.append(states())
    assert seen[0] == seen[1] == seen[2]


def test_the_states_are_put_back_when_the_block_fails() -> None:
    seed_all()
    with private_randomness(CPU):
        pass
    expected = states()
    seed_all()
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


def test_random_numbers_inside_follow_the_public_seed_when_that_is_asked_for() -> None:
    seed_all()
    blocks = []
    for _ in range(2):
        with private_randomness(CPU, reproducible=True):
            blocks.append(draw(3))
    seed_all()
    with private_randomness(CPU, reproducible=True):
        assert draw(3) == blocks[0]
    assert not set(blocks[0]) & set(blocks[1])
