"""TRL's supervised fine-tuning with the private step: its data, its evaluation, our gradients; what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from ghost_checks import assert_sum
from oracles import clipped_sum_of, gradients_of, norms_of
from peft import LoraConfig
from safetensors.torch import load_file
from tiny_chats import byte_tokenizer, completions, conversations, model_folder, sft_args, sft_trainer, tiny_llama
from tiny_tasks import flat_parameters, quiet
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from hf_dcsgd import DCSGDTrainer, DCSGDTrainingArguments
from hf_dcsgd.data.rows import RowCollator, batch_length, fetch_row, take_row
from hf_dcsgd.trl import DCSGDSFTTrainer
from hf_dcsgd.trl.bridge import prompts_unquoted

pytestmark = pytest.mark.usefixtures("no_report_page", "quick_statements")

LORA = {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}
TEXTS = Dataset.from_dict({"text": [f"story {'x' * (number % 9)} {number}" for number in range(64)]})


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "changes"),
    [
        (conversations(), {}),
        (conversations(), {"assistant_only_loss": True}),
        (completions(), {}),
        pytest.param(completions(), {"completion_only_loss": False}, marks=pytest.mark.slow),
        (completions(), {"max_length": 18}),  # some completions are cut away, and their rows dropped
        pytest.param(TEXTS, {"max_length": 10}, marks=pytest.mark.slow),
    ],
    ids=["chats", "answers", "completions", "whole", "truncated", "texts"],
)
def test_the_rows_are_those_that_trl_makes(tmp_path: Path, data: Dataset, changes: dict[str, Any]) -> None:
    options = {"max_length": 64, **quiet(), **changes}
    theirs = SFTTrainer(
        tiny_llama(), SFTConfig(str(tmp_path), **options), train_dataset=data, processing_class=byte_tokenizer()
    ).train_dataset
    trainer = sft_trainer(tmp_path, data, **changes)
    assert trainer.plan.dataset_size == len(theirs) <= 64
    rows, collate = trainer.rows_and_collator()
    for index in (0, 7, len(theirs) - 1):
        row = RowCollator(collate).alone(fetch_row(rows, index))
        real = row["attention_mask"][0].bool()
        assert row["input_ids"][0][real].tolist() == theirs[index]["input_ids"]
        assert row["labels"][0][real].tolist() == theirs[index]["labels"]
        assert (row["labels"][0][~real] == -100).all()
        assert row["input_ids"].shape[1] % 8 == 0
    if "max_length" in changes and "text" not in data.column_names:
        assert len(theirs) < 64


def test_units_may_have_several_conversations(tmp_path: Path) -> None:
    data = conversations().add_column("user", [number % 20 for number in range(64)])
    trainer = sft_trainer(
        tmp_path, data, privacy_unit="user", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=2
    )
    trainer.train()
    assert trainer.plan.unit.count == 20


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "changes", "options"),
    [
        (conversations(), {"trainable_layers": "all"}, {}),
        pytest.param(completions(), {"trainable_layers": "all", "loss_type": "dft"}, {}, marks=pytest.mark.slow),
        (completions(), {}, LORA),
    ],
    ids=["chats", "dft", "lora"],
)
def test_each_row_is_clipped_with_the_loss_that_trl_gives_it(
    tmp_path: Path, data: Dataset, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    trainer = sft_trainer(tmp_path, data, options=options, **changes)
    rows, collate = trainer.rows_and_collator()
    step = trainer.make_step()
    step.model.eval()
    stacks = RowCollator(collate)([fetch_row(rows, index) for index in range(12)])
    batch = max(stacks, key=batch_length)
    count = batch_length(batch)
    assert count > 2
    gradients = []
    for index in range(count):
        alone = take_row(batch, index)
        theirs = SFTTrainer.compute_loss(trainer, trainer.model, dict(alone))
        torch.testing.assert_close(step.losses(alone)[0], theirs, rtol=1e-5, atol=1e-6)
        gradients.append(gradients_of(step.losses(alone)[0], step.model))
    clipped_sum = step.clipper.zeros()
    with step.clipper:
        norms = step.clipper.norms(step.losses(batch))
        step.clipper.accumulate(torch.full((count,), 0.5), clipped_sum)
    torch.testing.assert_close(norms.double(), norms_of(gradients), rtol=1e-4, atol=1e-6)
    assert_sum(step.clipper, clipped_sum, clipped_sum_of(gradients, torch.full((count,), 0.5)))
    assert not step.clipper.slow_parameters


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.slow),
        {"bf16": True, "trainable_layers": "all"},
        pytest.param({"loss_type": "chunked_nll"}, marks=pytest.mark.slow),
    ],
    ids=["lora", "checkpointing", "bf16", "chunked"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # the older name of the loss
def test_a_model_given_by_name_trains(tmp_path: Path, changes: dict[str, Any]) -> None:
    options = {"processing_class": None, **({} if "trainable_layers" in changes else LORA)}
    trainer = sft_trainer(tmp_path / "run", model=model_folder(tmp_path / "model"), options=options, **changes)
    before = flat_parameters(trainer.model)
    trainer.train()
    assert trainer.epsilon() == pytest.approx(1.98, abs=0.01)
    assert not torch.equal(before, flat_parameters(trainer.model))
    trainer.save_model()
    weights = load_file(next((tmp_path / "run").glob("*.safetensors")))
    assert any("lora" in name for name in weights) == ("peft_config" in options)


@pytest.mark.slow
def test_the_loss_falls(tmp_path: Path) -> None:
    trainer = sft_trainer(
        tmp_path,
        conversations(512),
        options={"eval_dataset": conversations(64, start=600)},
        per_device_train_batch_size=128,
        noise_multiplier=0.5,
        trainable_layers="all",
        max_steps=30,
        learning_rate=0.01,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 1


# --- evaluation and log ----------------------------------------------------------------------------------------------


def test_an_evaluation_is_that_of_trl(tmp_path: Path) -> None:
    held_out = completions(24, start=100)
    theirs = SFTTrainer(
        tiny_llama(),
        SFTConfig(str(tmp_path), **quiet(bf16=False, max_length=64)),
        train_dataset=completions(),
        eval_dataset=held_out,
        processing_class=byte_tokenizer(),
    )
    ours = sft_trainer(tmp_path, completions(), options={"eval_dataset": held_out})
    wanted, found = theirs.evaluate(), ours.evaluate()
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        logged = ours.state.log_history[-1][name]
        assert logged == pytest.approx(theirs.state.log_history[-1][name], rel=1e-5), name
    assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-5)
    assert "eval_num_tokens" not in ours.state.log_history[-1]
    again = ours.evaluate(completions(24, start=100), metric_key_prefix="eval_again")
    assert again["eval_again_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-5)


def test_training_data_are_no_evaluation_data(tmp_path: Path) -> None:
    trainer = sft_trainer(tmp_path)
    with pytest.raises(ValueError, match="in common with train_dataset"):
        trainer.evaluate(conversations())
    with pytest.raises(ValueError, match="in common with train_dataset"):
        sft_trainer(tmp_path, options={"eval_dataset": conversations()})


@pytest.mark.filterwarnings("ignore::FutureWarning")  # predictions have logits, for which TRL has plans
def test_metrics_of_training_rows_never_reach_the_log(tmp_path: Path) -> None:
    """TRL would gather them in any forward of its loss, and log them with whatever is logged next."""
    held_out = conversations(16, start=100)
    trainer = sft_trainer(tmp_path, options={"eval_dataset": held_out})
    trainer.evaluate()
    alone = dict(trainer.state.log_history[-1])
    trainer.predict(trainer.train_dataset)
    trainer.evaluate()
    after = trainer.state.log_history[-1]
    assert {k: v for k, v in after.items() if "_per_" not in k and "time" not in k} == {
        k: v for k, v in alone.items() if "_per_" not in k and "time" not in k
    }
    rows, collate = trainer.rows_and_collator()
    trainer.model.train()
    SFTTrainer.compute_loss(trainer, trainer.model, dict(collate([rows[0]])))
    trainer.log({"learning_rate": 0.1})
    assert set(trainer.state.log_history[-1]) <= {"learning_rate", "step", "epoch"}


def test_trl_quotes_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    """One of its warnings would quote what it cuts from a prompt."""
    logger = logging.getLogger("trl.trainer.sft_trainer")
    text = "this end of the prompt is left out of the training sequence: 'my diagnosis'. The model is trained on"
    with prompts_unquoted(), caplog.at_level("WARNING"):
        logger.warning(text)
        logger.warning("something else")
    assert "diagnosis" not in caplog.text
    assert "left out of the training sequence" in caplog.text
    assert "something else" in caplog.text
    logger.warning(text)
    assert "diagnosis" in caplog.text


def test_saved_arguments_hold_no_token(tmp_path: Path) -> None:
    trainer = sft_trainer(tmp_path, model_init_kwargs={"token": "hf_secret", "dtype": "float32"})
    trainer.save_model()
    saved = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert saved.model_init_kwargs == {"dtype": "float32"}
    assert trainer.args.model_init_kwargs["token"] == "hf_secret"


# --- resuming --------------------------------------------------------------------------------------------------------


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = state.global_step == self.step
        return control


@pytest.mark.slow
def test_a_resumed_run_ends_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    def trainer(**options: Any) -> DCSGDSFTTrainer:
        return sft_trainer(tmp_path, options={**LORA, **options}, save_strategy="steps", save_steps=2)

    first = trainer(callbacks=[StopAt(2)])
    first.train()
    assert first.mechanism.charged == 2
    second = trainer()
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 4
    assert second.mechanism.charged == 4
    assert second.epsilon() == pytest.approx(1.98, abs=0.01)
    card = (tmp_path / "README.md").read_text()
    assert "DCSGDSFTTrainer" in card
    assert "from hf_dcsgd.trl import DCSGDSFTTrainer, DCSGDSFTConfig" in card
    assert "max_length=64" in card
    assert "- sft" in card
    trainer(callbacks=[]).create_model_card(dataset_name="someone/chats", tags=["mine"])
    card = (tmp_path / "README.md").read_text()
    assert "- someone/chats" in card
    assert "- mine" in card


# --- what is refused -------------------------------------------------------------------------------------------------

REFUSED = {
    "packing": True,
    "padding_free": True,
    "activation_offloading": True,
    "router_aux_loss_coef": 0.01,
    "use_liger_kernel": True,
    "neftune_noise_alpha": 5.0,
    "include_num_input_tokens_seen": "all",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_private_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}={REFUSED[name]} cannot be used for private training: \w+"):
        sft_args(tmp_path, **{name: REFUSED[name]})
    args = sft_args(tmp_path)
    setattr(args, name, REFUSED[name])
    with pytest.raises(ValueError, match=f"^{name}="):
        DCSGDSFTTrainer(tiny_llama(), args, train_dataset=conversations(), processing_class=byte_tokenizer())


def test_other_arguments_and_data_are_refused(tmp_path: Path) -> None:
    data, tokenizer = conversations(), byte_tokenizer()
    for args in (None, SFTConfig(str(tmp_path), use_cpu=True), DCSGDTrainingArguments(str(tmp_path), use_cpu=True)):
        with pytest.raises(TypeError, match="expected args to be DCSGDSFTConfig"):
            DCSGDSFTTrainer(tiny_llama(), args, train_dataset=data, processing_class=tokenizer)
    endless = IterableDataset.from_generator(lambda: iter(data))
    with pytest.raises((TypeError, ValueError), match="train_dataset"):
        sft_trainer(tmp_path, endless, max_steps=2)
    with pytest.raises(ValueError, match="per_example_loss_func"):
        sft_trainer(tmp_path, options={"compute_loss_func": lambda *a, **k: 0})


@pytest.mark.parametrize("method", ["compute_loss", "training_step", "get_train_dataloader", "get_batch_samples"])
def test_a_subclass_that_overrides_what_the_guarantee_rests_on_is_refused(tmp_path: Path, method: str) -> None:
    own = type("Own", (DCSGDSFTTrainer,), {method: lambda self, *args, **kwargs: None})
    with pytest.raises(TypeError, match=f"Own overrides {method}, on which the guarantee rests"):
        own(tiny_llama(), sft_args(tmp_path), train_dataset=conversations(), processing_class=byte_tokenizer())


def test_both_trainers_without_the_bridge_are_refused(tmp_path: Path) -> None:
    class Both(SFTTrainer, DCSGDTrainer):
        pass

    with pytest.raises(TypeError, match="Both overrides compute_loss"):
        Both(tiny_llama(), sft_args(tmp_path), train_dataset=conversations(), processing_class=byte_tokenizer())


def test_the_help_of_the_arguments_is_rendered() -> None:
    from trl import TrlParser

    from hf_dcsgd.trl import DCSGDSFTConfig

    shown = TrlParser((DCSGDSFTConfig,)).format_help()
    assert "--target_epsilon" in shown
    assert "--completion_only_loss" in shown
