"""Types of peft: exact where they train, no labels on virtual tokens, ranks allocated by released gradients alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from architectures import randomized
from ghost_checks import check_exact
from peft_table import FAMILIES, adapted_model, base_model, batch, look_at, look_at_all, section
from tiny_chats import conversations, sft_trainer

from hf_dcsgd import GhostClipper
from hf_dcsgd.tasks.layer_selection import prepare_layers, select_trainable_layers
from hf_dcsgd.tasks.losses import per_example_losses

pytestmark = pytest.mark.usefixtures("no_report_page")

PAGE = Path(__file__).parents[1] / "docs" / "supported_models.md"
COMMON = ("LORA", "IA3", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param(name, family, marks=() if k == i % 2 else pytest.mark.slow)
        for i, name in enumerate(COMMON)
        for k, family in enumerate(FAMILIES)
    ],
)
def test_common_types_are_exact(name: str, family: str) -> None:
    assert look_at(name, family).verdict in ("exact", "slow")


@pytest.mark.slow
def test_the_table_is_that_of_the_page() -> None:
    """Every type is exact or refused with its reason, as the page says."""
    found = look_at_all()
    assert not {key: value for key, value in found.items() if value.verdict == "failed"}
    assert section(found) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"])
def test_the_loss_of_a_row_is_that_of_peft(name: str, tmp_path: Path) -> None:
    model = adapted_model(name, "Llama", str(tmp_path)).eval()
    inputs, labels = batch("Llama")
    losses = per_example_losses(model, model(**inputs), labels)
    for index, loss in enumerate(losses):
        alone = {key: value[index : index + 1] for key, value in inputs.items()}
        theirs = model(**alone, labels=labels[index : index + 1]).loss
        torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-6)


def test_labels_of_a_wrong_length_are_still_refused(tmp_path: Path) -> None:
    model = adapted_model("PROMPT_TUNING", "Llama", str(tmp_path)).eval()
    inputs, labels = batch("Llama")
    with pytest.raises(ValueError, match="expected labels of shape"):
        per_example_losses(model, model(**inputs), labels[:, :-1])


# --- FFA-LoRA --------------------------------------------------------------------------------------------------------


def test_ffa_lora_trains_all_but_the_first_factor(tmp_path: Path) -> None:
    model = adapted_model("LORA", "BERT", str(tmp_path))
    as_it_was = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for _ in range(2):  # a search selects them again
        chosen = select_trainable_layers(model, "ffa_lora")
        assert set(chosen) == {name for name in as_it_was if "lora_A" not in name}
        assert any("lora_B" in name for name in chosen)
        assert any("classifier" in name for name in chosen)
    inputs, labels = batch("BERT")
    assert not check_exact(model.eval(), inputs, labels, per_example_losses).slow_parameters


def test_ffa_lora_needs_adapters() -> None:
    with pytest.raises(ValueError, match="trainable_layers='ffa_lora' needs a model with LoRA adapters"):
        select_trainable_layers(base_model("BERT"), "ffa_lora")


def test_ffa_lora_leaves_the_first_factor_as_it_was_drawn(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = sft_trainer(tmp_path, options={"peft_config": config}, trainable_layers="ffa_lora", max_steps=2)
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "lora_B" in name}


# --- AdaLoRA ---------------------------------------------------------------------------------------------------------


class Allocation(hf.TrainerCallback):
    """As peft's own loop has it: after the step of the optimizer, before gradients are cleared."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        model.base_model.update_and_allocate(state.global_step + 1)


def test_ranks_are_allocated_by_released_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = peft.AdaLoraConfig(
        init_r=3, target_r=1, total_step=4, tinit=1, tfinal=1, target_modules=["q_proj"], task_type="CAUSAL_LM"
    )
    allocation = Allocation()
    trainer = sft_trainer(tmp_path, conversations(), options={"peft_config": config, "callbacks": [allocation]})
    released: list[dict[str, torch.Tensor]] = []
    release = type(trainer.make_step()).release

    def watched(step: Any) -> Any:
        found = release(step)
        parts = step.clipper.unflatten(found.noisy_gradient)
        released.append({name: part.clone() for name, part in parts.items()})
        return found

    monkeypatch.setattr("hf_dcsgd.step.PrivateStep.release", watched)
    trainer.train()
    assert len(allocation.seen) == len(released) == 4
    for seen, noisy in zip(allocation.seen, released, strict=True):
        assert set(seen) == set(noisy)
        assert all(torch.equal(seen[name], noisy[name]) for name in seen)
    pattern = trainer.model.peft_config["default"].rank_pattern
    assert pattern
    assert sum(sum(ranks) for ranks in pattern.values()) < 3 * len(pattern)


# --- half precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_a_half_precision_trunk_are_exact(family: str) -> None:
    """The trunk stays bf16, adapters are fp32, and norms are those of autograd on the same graph."""
    targets = ["q_proj", "v_proj"] if family == "Llama" else ["query", "value"]
    config = peft.LoraConfig(r=2, target_modules=targets)
    model = randomized(lambda: peft.get_peft_model(base_model(family).to(torch.bfloat16), config)).eval()
    prepare_layers(model, None)
    kinds = {parameter.requires_grad: parameter.dtype for parameter in model.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    inputs, labels = batch(family)
    clipper = check_exact(GhostClipper(model), inputs, labels, per_example_losses, alone=False, rtol=1e-2)
    assert not clipper.slow_parameters
