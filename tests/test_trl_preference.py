"""Pairs of texts, one preferred: TRL's reward and DPO trainers with the private step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from datasets import Dataset
from ghost_checks import assert_sum
from oracles import clipped_sum_of, gradients_of, norms_of
from peft import LoraConfig
from tiny_chats import byte_tokenizer, model_folder, tiny_llama, turns
from tiny_tasks import flat_parameters, quiet
from trl import DPOTrainer, RewardTrainer

from hf_dcsgd.data.rows import RowCollator, batch_length, fetch_row, take_row
from hf_dcsgd.trl import DCSGDDPOConfig, DCSGDDPOTrainer, DCSGDRewardConfig, DCSGDRewardTrainer

pytestmark = pytest.mark.usefixtures("no_report_page", "quick_statements")

KINDS: dict[str, tuple[Any, Any, Any]] = {
    "reward": (DCSGDRewardTrainer, DCSGDRewardConfig, RewardTrainer),
    "dpo": (DCSGDDPOTrainer, DCSGDDPOConfig, DPOTrainer),
}


def pairs(n: int = 64, start: int = 0, **columns: Any) -> Dataset:
    rows = [turns(number) for number in range(start, start + n)]
    data = Dataset.from_list([{"prompt": q + "? ", "chosen": a, "rejected": a[::-1] + "no"} for q, a in rows])
    for name, make in columns.items():
        data = data.add_column(name, [make(number) for number in range(n)])
    return data


def tiny_rewards() -> hf.LlamaForSequenceClassification:
    config = tiny_llama().config
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return hf.LlamaForSequenceClassification(config)


def preference_trainer(
    kind: str, directory: Path, data: Dataset | None = None, model: Any = None, **changes: Any
) -> Any:
    trainer_class, config_class, _ = KINDS[kind]
    defaults = quiet(recipe="none", accountant="rdp", per_device_train_batch_size=16, max_steps=2)
    options = {"processing_class": byte_tokenizer(), **changes.pop("options", {})}
    args = config_class(str(directory), **{**defaults, "noise_multiplier": 1.0, "max_length": 64, **changes})
    if model is None:
        model = tiny_rewards() if kind == "reward" else model_folder(directory / "model")
    return trainer_class(model, args=args, train_dataset=pairs() if data is None else data, **options)


@pytest.mark.parametrize(
    ("kind", "data", "changes"),
    [
        pytest.param("reward", pairs(), {}, marks=pytest.mark.slow),
        ("reward", pairs(margin=lambda number: number / 10), {"center_rewards_coefficient": 0.1}),
        ("dpo", pairs(), {}),
        pytest.param("dpo", pairs(), {"loss_type": ["hinge"], "beta": 0.3}, marks=pytest.mark.slow),
        pytest.param("dpo", pairs(), {"loss_type": ["ipo"]}, marks=pytest.mark.slow),
    ],
    ids=["reward", "margin", "sigmoid", "hinge", "ipo"],
)
def test_each_pair_is_clipped_as_one_with_the_loss_that_trl_gives_it(
    tmp_path: Path, kind: str, data: Dataset, changes: dict[str, Any]
) -> None:
    trainer = preference_trainer(kind, tmp_path, data, trainable_layers="all", **changes)
    with torch.no_grad():  # away from the reference, where all pairs have the same loss
        for parameter in trainer.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    rows, collate = trainer.rows_and_collator()
    step = trainer.make_step()
    step.model.eval()
    fetched = [fetch_row(rows, index) for index in range(16)]
    batch = max(RowCollator(collate)(fetched), key=batch_length)
    count = batch_length(batch)
    assert count > 2
    assert batch["input_ids"].shape[:2] == (count, 2)
    for row in fetched[:4]:
        theirs = KINDS[kind][2].compute_loss(trainer, trainer.model, dict(trainer.data_collator([row])))
        torch.testing.assert_close(step.losses(RowCollator(collate).alone(row))[0], theirs, rtol=1e-4, atol=1e-5)
    alone = [take_row(batch, index) for index in range(count)]
    gradients = [gradients_of(step.losses(pair)[0], step.model) for pair in alone]
    clipped_sum = step.clipper.zeros()
    with step.clipper.over(step.units(batch)):
        norms = step.clipper.norms(step.losses(batch))
        step.clipper.accumulate(torch.full((count,), 0.5), clipped_sum)
    torch.testing.assert_close(norms.double(), norms_of(gradients), rtol=1e-3, atol=1e-6)
    assert_sum(step.clipper, clipped_sum, clipped_sum_of(gradients, torch.full((count,), 0.5)), rtol=1e-3)


@pytest.mark.parametrize(
    ("kind", "adapted"),
    [
        ("reward", False),
        ("dpo", True),
        pytest.param("reward", True, marks=pytest.mark.slow),
        pytest.param("dpo", False, marks=pytest.mark.slow),
    ],
    ids=["reward-layers", "dpo-lora", "reward-lora", "dpo-layers"],
)
def test_they_train_and_evaluate_and_tell_nothing_of_training(tmp_path: Path, kind: str, adapted: bool) -> None:
    task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type=task)
    options = {"eval_dataset": pairs(16, start=200), **({"peft_config": lora} if adapted else {})}
    trainer = preference_trainer(kind, tmp_path, eval_strategy="epoch", max_steps=4, options=options)
    before = flat_parameters(trainer.model)
    trainer.train()
    assert not torch.equal(before, flat_parameters(trainer.model))
    assert trainer.mechanism.charged == 4
    keys = {key for line in trainer.state.log_history for key in line}
    assert {"epsilon", "clip_threshold", "eval_loss"} <= keys
    assert any(key.startswith("eval_") and ("accurac" in key or "margin" in key) for key in keys)
    theirs = {key for key in keys if "reward" in key or "logps" in key or "tokens" in key or "margin" in key}
    assert all(key.startswith("eval_") for key in theirs)
    assert not keys & {"loss", "train_loss", "accuracy", "entropy", "mean_token_accuracy", "eval_num_tokens"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("precompute_ref_log_probs", False),
        ("precompute_ref_batch_size", 8),
        ("sync_ref_model", True),
        ("loss_type", ["aot"]),
        ("loss_type", ["sigmoid", "ipo"]),
        ("f_divergence_type", "js_divergence"),
        ("loss_weights", [2.0]),
        ("use_weighting", True),
        ("ld_alpha", 0.5),
        ("padding_free", True),
        ("activation_offloading", True),
    ],
)
def test_what_cannot_be_private_is_refused_with_the_reason(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}=.* cannot be used for private training: \w+"):
        DCSGDDPOConfig(str(tmp_path), use_cpu=True, **{name: value})


@pytest.mark.parametrize("kind", KINDS)
def test_a_subclass_that_overrides_the_loss_is_refused(tmp_path: Path, kind: str) -> None:
    trainer_class, config_class, _ = KINDS[kind]
    own = type("Own", (trainer_class,), {"compute_loss": lambda self, *args, **kwargs: None})
    with pytest.raises(TypeError, match="Own overrides compute_loss"):
        own(
            tiny_rewards() if kind == "reward" else model_folder(tmp_path / "model"),
            args=config_class(str(tmp_path), **quiet(max_length=64)),
            train_dataset=pairs(),
            processing_class=byte_tokenizer(),
        )


@pytest.mark.parametrize("kind", ["sigmoid", "hinge"])
def test_a_loss_that_is_set_by_its_name_later_is_taken(tmp_path: Path, kind: str) -> None:
    args = DCSGDDPOConfig(str(tmp_path), target_epsilon=8, report_to="none", use_cpu=True)
    args.loss_type = kind
    args.check()
    assert args.loss_type == [kind]
