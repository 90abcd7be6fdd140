"""What a forward draws, on tape: a row alone gets its own share of it, and masks take a byte per number."""

import pytest
import torch
from torch import nn

from hf_dcsgd.checks.random_tape import RandomTape


class Noisy(nn.Module):
    def forward(self, x):
        dropped = nn.functional.dropout(x, 0.4)
        return dropped + torch.rand_like(x) + torch.bernoulli(torch.full_like(x, 0.3))


@pytest.mark.parametrize("row", range(4))
def test_a_row_alone_gets_its_own_share(row):
    x, tape = torch.randn(4, 5, 6), RandomTape(4)
    with tape.record():
        together = Noisy()(x)
    with tape.play([row]):
        alone = Noisy()(x[row : row + 1])
    assert torch.equal(alone[0], together[row])
    with tape.play():
        assert torch.equal(Noisy()(x), together)


def test_masks_take_a_byte_per_number():
    x, tape = torch.randn(4, 5, 6), RandomTape(4)
    with tape.record():
        Noisy()(x)
    kept = dict(tape.draws)
    masks = [values for name, values in kept.items() if "bernoulli" in name or "dropout" in name]
    assert masks
    assert all(values.element_size() == 1 for values in masks)
    assert any(values.dtype == torch.float32 for values in kept.values())
