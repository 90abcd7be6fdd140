"""Large vocabularies: a private step writes down no more of (examples, tokens, vocabulary) than a plain one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dcsgd.checks.step_cost import PeakMemory
from hf_dcsgd.ghost import GhostClipper
from hf_dcsgd.tasks.layer_selection import select_trainable_layers
from hf_dcsgd.tasks.losses import per_example_losses

EXAMPLES, VOCABULARY, WIDTH = 3, 2000, 32


class Shapes(TorchDispatchMode):
    """Collects the shapes of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen |= {tuple(leaf.shape) for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)}
        return result


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tokens", [8, 64])
def test_head_is_clipped_in_the_memory_of_a_plain_step(tied: bool, tokens: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    select_trainable_layers(model, "lm_head")
    ids = torch.randint(VOCABULARY, (EXAMPLES, tokens))
    clipper = GhostClipper(model)
    clipped_sum = clipper.zeros()

    def losses() -> Tensor:
        return per_example_losses(model, model(input_ids=ids), ids)

    def private() -> None:
        with clipper:
            norms = clipper.norms(losses())
            clipper.accumulate((1.0 / (norms + 1.0)).clamp(max=1.0), into=clipped_sum)

    def plain() -> None:
        torch.autograd.grad(losses().mean(), list(clipper.parameters.values()))

    private()  # the first batch is checked against autograd, example by example
    with Shapes() as shapes:
        private()
    assert (EXAMPLES, tokens, VOCABULARY) in shapes.seen
    written = tuple(sorted((EXAMPLES, VOCABULARY, WIDTH))) in {tuple(sorted(shape)) for shape in shapes.seen}
    assert written == (tokens > WIDTH), "a gradient per example is written only where it is smaller than its factors"
    peaks = []
    for step in (plain, private):
        with PeakMemory() as memory:
            step()
        peaks.append(memory.peak)
    assert peaks[1] <= 1.15 * peaks[0]
