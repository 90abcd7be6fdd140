"""Logits in front of what is learned: left out of private steps, where losses and norms stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny_chats import tiny_llama
from torch import Tensor, nn

from hf_dcsgd.example_losses import ExampleLosses
from hf_dcsgd.ghost import GhostClipper
from hf_dcsgd.step import PrivateStep
from hf_dcsgd.trunk.unread import can_leave_out_logits, without_unread_logits

LENGTH = 40


def batch(learned_from: list[int], vocabulary: int = 200) -> dict[str, Tensor]:
    """Rows whose tokens from these places on are learned; behind the last place of all, some are padding."""
    ids = torch.randint(3, vocabulary, (len(learned_from), LENGTH), generator=torch.Generator().manual_seed(0))
    labels = torch.stack(
        [row.masked_fill(torch.arange(LENGTH) < first, -100) for row, first in zip(ids, learned_from, strict=True)]
    )
    labels[:, -2:] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def models() -> dict[str, Any]:
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    sizes = {"vocab_size": 200, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return {
        "all": tiny_llama(),
        "lora": get_peft_model(tiny_llama(), lora),
        "prompts": get_peft_model(tiny_llama(), prompts),
        "gpt2": hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)),
    }


@pytest.mark.parametrize("name", models())
def test_losses_and_norms_stay_what_they_are(name: str) -> None:
    model = models()[name]
    assert can_leave_out_logits(model)
    rows, seen = batch([23, 30, LENGTH]), []
    model.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    results = []
    for only_read in (False, True):
        clipper = GhostClipper(model)
        with clipper:
            losses = ExampleLosses(model)(rows, only_read=only_read)[0]
            results.append((losses.detach(), clipper.norms(losses)))
    assert list(dict.fromkeys(seen)) == [LENGTH + (3 if name == "prompts" else 0), 24], (
        "from position 22 on, 18 of them, rounded up to 24"
    )
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert results[0][0][2] == 0, "a row without anything to learn"


@pytest.mark.parametrize(
    ("learned_from", "count"), [([0, 9], 40), ([1], 40), ([2], 40), ([33], 8), ([34], 8), ([40], 8)]
)
def test_what_is_kept_ends_with_the_row(learned_from: list[int], count: int) -> None:
    rows = batch(learned_from)
    labels = rows.pop("labels")
    inputs, kept = without_unread_logits(rows, labels)
    assert inputs["logits_to_keep"] == kept.shape[1] == count
    assert torch.equal(kept, labels[:, -count:])
    shifted, shifted_kept = (nn.functional.pad(part, (0, 1), value=-100)[:, 1:] for part in (labels, kept))
    assert (shifted[:, :-count] == -100).all()
    assert torch.equal(shifted[:, -count:], shifted_kept)


def test_labels_of_another_length_are_left_to_the_loss() -> None:
    rows = batch([30])
    longer = torch.cat([rows.pop("labels"), torch.zeros(1, 4, dtype=torch.long)], dim=1)
    assert without_unread_logits(rows, longer)[1] is longer
    with pytest.raises(ValueError, match="expected labels of shape"):
        PrivateStep(tiny_llama()).losses({**rows, "labels": longer})


def test_evaluations_and_other_models_have_all_logits() -> None:
    assert ExampleLosses(tiny_llama()).mean(batch([30]))[1]["logits"].shape[1] == LENGTH
    assert not can_leave_out_logits(nn.Linear(2, 2))
    config = hf.BertConfig(
        hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=20
    )
    assert not can_leave_out_logits(hf.BertForMaskedLM(config))
