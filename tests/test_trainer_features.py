"""Features of transformers that keep working, and what is refused with a reason."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import optuna
import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_tasks import (
    N,
    accuracy,
    feature_classifier,
    feature_rows,
    feature_trainer,
    flat_parameters,
    force_draws,
    pad,
    private_args,
    text_rows,
    text_trainer,
    tiny_bert,
)
from torch import nn

from hf_dcsgd import DCSGDTrainer
from hf_dcsgd.ghost import BatchCouplingError, GhostClipper, UnsupportedModelError
from hf_dcsgd.privacy.accounting import AccountedRun, composed_epsilon, epsilon_spent
from hf_dcsgd.privacy.ledger import PrivacyLedger

pytestmark = pytest.mark.usefixtures("no_report_page", "quick_statements")


def logged(trainer: DCSGDTrainer, name: str) -> list[Any]:
    return [line[name] for line in trainer.state.log_history if name in line]


# --- evaluation, stopping, callbacks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "evaluations"),
    [
        pytest.param({"eval_strategy": "no"}, 0, marks=pytest.mark.slow),
        pytest.param({"eval_strategy": "epoch"}, 2, marks=pytest.mark.slow),
        ({"eval_strategy": "steps", "eval_steps": 4}, 2),
        ({"eval_strategy": "epoch", "eval_on_start": True}, 3),
    ],
)
def test_evaluation_strategies(tmp_path: Path, changes: dict, evaluations: int) -> None:
    options = {"compute_metrics": accuracy}
    trainer = feature_trainer(tmp_path, num_train_epochs=2, trainer_options=options, **changes)
    trainer.train()
    assert len(logged(trainer, "eval_accuracy")) == len(logged(trainer, "eval_loss")) == evaluations
    assert trainer.state.global_step == PrivacyLedger.read(tmp_path).charged == 8


def test_early_stopping_leaves_the_rest_of_the_budget_unspent(tmp_path: Path) -> None:
    trainer = feature_trainer(
        tmp_path,
        num_train_epochs=3,
        learning_rate=0.0,  # no evaluation is better than the first
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        trainer_options={"callbacks": [hf.EarlyStoppingCallback(early_stopping_patience=2)]},
    )
    trainer.train()
    assert trainer.state.global_step == PrivacyLedger.read(tmp_path).charged == 6
    assert trainer.epsilon() == trainer.plan.epsilon(6) < trainer.plan.epsilon()


def test_callbacks_see_noised_gradients_before_each_optimizer_step(tmp_path: Path) -> None:
    events, norms = [], []

    class Listener(hf.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            events.append("begin")

        def on_substep_end(self, args, state, control, model=None, **kwargs):  # type: ignore[no-untyped-def]
            assert all(p.grad is None for p in model.parameters())
            events.append("substep")

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):  # type: ignore[no-untyped-def]
            norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))
            events.append("step")

    trainer = feature_trainer(
        tmp_path,
        trainer_options={"callbacks": [Listener]},
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        clipping="fixed",
        clip_threshold=0.5,
    )
    force_draws(trainer, lambda: np.array([], dtype=int))
    trainer.train()
    assert events == ["begin", "substep", "step"] * 4
    assert logged(trainer, "grad_norm") == pytest.approx(norms)
    # Nobody was drawn: what callbacks see is noise of std σ·C/B on 83 coordinates, not nothing.
    assert norms == pytest.approx([0.5 / 16 * 83**0.5] * 4, rel=0.5)


def test_prediction(tmp_path: Path) -> None:
    trainer = feature_trainer(tmp_path, trainer_options={"compute_metrics": accuracy})
    trainer.train()
    found = trainer.predict(feature_rows(20, seed=4))
    assert found.predictions.shape == (20, 3)
    assert set(found.metrics) >= {"test_loss", "test_accuracy"}


def test_a_trainer_without_training_data_evaluates(tmp_path: Path) -> None:
    trainer = DCSGDTrainer(tiny_bert(), private_args(tmp_path), eval_dataset=text_rows(), data_collator=pad)
    assert trainer.plan is None
    assert trainer.evaluate()["eval_loss"] > 0
    with pytest.raises(ValueError, match="requires a train_dataset"):
        trainer.train()


# --- optimizers and schedules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"optim": "sgd", "optim_args": "momentum=0.9"}, torch.optim.SGD),
        ({"optim": "adamw_torch"}, torch.optim.AdamW),
        pytest.param({"optim": "adafactor"}, hf.Adafactor, marks=pytest.mark.slow),
        pytest.param({"optim": "rmsprop"}, torch.optim.RMSprop, marks=pytest.mark.slow),
    ],
)
def test_optimizers(tmp_path: Path, changes: dict, kind: type) -> None:
    """Each sees the trainable parameters only; frozen ones do not move, whatever the weight decay."""
    trainer = text_trainer(tmp_path, trainable_layers="classifier", weight_decay=0.5, learning_rate=0.05, **changes)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, kind)
    if "optim_args" in changes:
        assert {group["momentum"] for group in optimizer.param_groups} == {0.9}
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in trainer.model.classifier.parameters()}
    assert trainer.plan.num_parameters == sum(p.numel() for p in trainer.model.classifier.parameters())
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]) != name.startswith("classifier")


def test_an_optimizer_made_by_the_user(tmp_path: Path) -> None:
    """Made before the layers were selected, so over all parameters: frozen ones still do not move."""
    model = tiny_bert()
    before = flat_parameters(model.bert)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    trainer = text_trainer(
        tmp_path, model=model, trainable_layers="classifier", trainer_options={"optimizers": (optimizer, schedule)}
    )
    trainer.train()
    assert torch.equal(flat_parameters(model.bert), before)
    assert logged(trainer, "learning_rate") == pytest.approx([0.5, 0.25, 0.125, 0.0625])
    assert optimizer.state[model.classifier.weight]["momentum_buffer"].norm() > 0


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        pytest.param({}, [0.1] * 4, marks=pytest.mark.slow),
        pytest.param({"lr_scheduler_type": "linear"}, [0.1, 0.075, 0.05, 0.025], marks=pytest.mark.slow),
        ({"lr_scheduler_type": "cosine"}, [0.1, 0.0853553, 0.05, 0.0146447]),
        ({"lr_scheduler_type": "linear", "warmup_steps": 2}, [0.0, 0.05, 0.1, 0.05]),
    ],
)
def test_schedules(tmp_path: Path, changes: dict, rates: list[float]) -> None:
    trainer = feature_trainer(tmp_path, learning_rate=0.1, **changes)
    trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx(rates, abs=1e-6)


def test_a_schedule_that_follows_the_evaluation(tmp_path: Path) -> None:
    trainer = feature_trainer(
        tmp_path,
        num_train_epochs=3,
        learning_rate=0.01,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5, "threshold": 0.9},  # nothing is ever good enough
        eval_strategy="epoch",
        metric_for_best_model="loss",
        max_grad_norm=1.0,
    )
    trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx([0.01] * 8 + [0.005] * 4)


# --- precision, memory, speed ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bf16(tmp_path: Path) -> None:
    """Autocast around the forward; parameters, norms and noise in fp32, near the result in fp32."""
    settings = {"unsafe_noise_seed": 3, "optim": "sgd", "learning_rate": 0.5, "clipping": "fixed"}
    seen = []
    full = text_trainer(tmp_path / "fp32", **settings)
    half = text_trainer(tmp_path / "bf16", bf16=True, **settings)
    hook = half.model.classifier.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    full.train()
    half.train()
    hook.remove()
    assert torch.bfloat16 in seen
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}
    start = flat_parameters(tiny_bert())
    moved = (flat_parameters(full.model) - start).norm()
    difference = (flat_parameters(full.model) - flat_parameters(half.model)).norm()
    assert 0 < difference < 0.05 * moved


@pytest.mark.slow
def test_gradient_checkpointing(tmp_path: Path) -> None:
    settings = {"unsafe_noise_seed": 3, "optim": "sgd", "learning_rate": 0.5}
    plain = text_trainer(tmp_path / "plain", **settings)
    checkpointed = text_trainer(tmp_path / "checkpointed", gradient_checkpointing=True, **settings)
    plain.train()
    checkpointed.train()
    assert checkpointed.model.is_gradient_checkpointing
    torch.testing.assert_close(flat_parameters(checkpointed.model), flat_parameters(plain.model), atol=1e-5, rtol=1e-4)


def test_compilation_is_accepted_for_evaluation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training runs uncompiled and gives the same weights; the backend here needs no C compiler."""
    settings = {"max_steps": 2, "unsafe_noise_seed": 3}
    plain = feature_trainer(tmp_path / "plain", **settings)
    plain.train()
    compiled = feature_trainer(tmp_path, torch_compile=True, torch_compile_backend="eager", **settings)
    compiled.train()
    assert "torch_compile=True compiles evaluation alone" in caplog.text
    assert torch.equal(flat_parameters(compiled.model), flat_parameters(plain.model))
    assert compiled.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"])
    assert PrivacyLedger.read(tmp_path).charged == 2


def test_compiled_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"as it was before torch\.compile"):
        DCSGDTrainer(
            torch.compile(feature_classifier(), backend="eager"), private_args(tmp_path), None, feature_rows()
        )
    in_place = feature_classifier()
    in_place.hidden.compile(backend="eager")
    with pytest.raises(UnsupportedModelError, match=r"hidden \(Linear\): was compiled"):
        DCSGDTrainer(in_place, private_args(tmp_path), None, feature_rows()).train()
    with pytest.raises(UnsupportedModelError, match="was compiled"):
        GhostClipper(torch.compile(feature_classifier(), backend="eager"))


# --- data ------------------------------------------------------------------------------------------------------------


class Points(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.rows = feature_rows()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return {**self.rows[index], "unused": "text"}


@pytest.mark.parametrize(
    "kind", ["datasets", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("torch", "list"))]
)
def test_datasets_of_all_kinds_and_unused_columns(tmp_path: Path, kind: str) -> None:
    data: Any = Points()
    if kind == "list":
        data = [data[i] for i in range(N)]
    elif kind == "datasets":
        data = datasets.Dataset.from_list([{**data[i], "labels": int(data[i]["labels"])} for i in range(N)])
        data = data.with_format("torch", columns=["features", "labels"], output_all_columns=True)
    trainer = feature_trainer(tmp_path, rows=data, num_train_epochs=5, learning_rate=0.05, noise_multiplier=0.3)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(feature_rows())


@pytest.mark.parametrize("stream", [Stream(), datasets.Dataset.from_list(text_rows()).to_iterable_dataset()])
def test_iterable_datasets_are_refused(tmp_path: Path, stream: Any) -> None:
    with pytest.raises(TypeError, match="map-style train_dataset with a length, because every record must be drawn"):
        feature_trainer(tmp_path, rows=stream, max_steps=3)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["compute_loss", "get_train_dataloader", "_get_train_sampler", "get_batch_samples", "training_step"]
)
def test_overrides_that_the_guarantee_rests_on_are_refused(tmp_path: Path, method: str) -> None:
    own = type("MyTrainer", (DCSGDTrainer,), {method: lambda self, *args, **kwargs: None})
    with pytest.raises(TypeError, match=f"MyTrainer overrides {method}, on which the guarantee rests"):
        feature_trainer(tmp_path, trainer_class=own)


def test_overrides_on_the_trainer_itself_are_refused(tmp_path: Path) -> None:
    trainer = feature_trainer(tmp_path)
    trainer.training_step = lambda *args: None
    with pytest.raises(TypeError, match="overrides training_step"):
        trainer.train()
    assert not (tmp_path / PrivacyLedger.FILENAME).exists()


def test_other_overrides_are_welcome(tmp_path: Path) -> None:
    class Louder(DCSGDTrainer):
        def log(self, logs, start_time=None):  # type: ignore[no-untyped-def]
            super().log({**logs, "louder": 1.0}, start_time)

    trainer = feature_trainer(tmp_path, trainer_class=Louder)
    trainer.train()
    assert len(logged(trainer, "louder")) == 5


def test_a_loss_for_whole_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"compute_loss_func returns one loss .* per_example_loss_func"):
        feature_trainer(tmp_path, trainer_options={"compute_loss_func": lambda *args, **kwargs: None})


@pytest.mark.parametrize("with_init", [False, True])
def test_plain_training_arguments_are_refused(tmp_path: Path, with_init: bool) -> None:
    args = hf.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    source = {"model_init": lambda: feature_classifier()} if with_init else {"model": feature_classifier()}
    with pytest.raises(TypeError, match="DCSGDTrainingArguments, got TrainingArguments: nothing would be private"):
        DCSGDTrainer(args=args, train_dataset=feature_rows(), **source)


# --- losses of one's own ---------------------------------------------------------------------------------------------


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def centered(losses: torch.Tensor) -> torch.Tensor:
    return losses - losses.mean()


def test_a_per_example_loss_of_ones_own(tmp_path: Path) -> None:
    """The built-in loss, given by the user, trains the same model; another one, another."""

    def train(name: str, loss: Any) -> torch.Tensor:
        trainer = feature_trainer(
            tmp_path / name, trainer_options={"per_example_loss_func": loss}, unsafe_noise_seed=5, optim="sgd"
        )
        trainer.train()
        assert trainer.evaluate()["eval_loss"] > 0
        return flat_parameters(trainer.model)

    def brier(logits, labels):  # type: ignore[no-untyped-def]
        return (logits.softmax(-1) - nn.functional.one_hot(labels, 3)).square().sum(-1)

    built_in = train("built_in", None)
    torch.testing.assert_close(train("same", cross_entropy), built_in)
    assert not torch.allclose(train("other", brier), built_in)


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda logits, labels: nn.functional.cross_entropy(logits, labels), ValueError, "returned a scalar"),
        (lambda logits, labels: logits.square(), ValueError, "one loss per example"),
        (
            lambda logits, labels: cross_entropy(logits, labels) / len(labels),
            BatchCouplingError,
            "batched with others",
        ),
        (lambda logits, labels: centered(cross_entropy(logits, labels)), BatchCouplingError, "other examples|others"),
        (lambda logits, labels: cross_entropy(logits, labels).flip(0), BatchCouplingError, "other examples|others"),
        (
            lambda logits, labels: cross_entropy(logits, labels) / (labels != -100).sum(),
            BatchCouplingError,
            "batched with others",
        ),
        (
            lambda logits, labels: (logits - logits.mean(0, keepdim=True)).square().sum(-1),
            BatchCouplingError,
            "depends on other examples",
        ),
    ],
)
def test_losses_that_are_not_per_example_are_refused_before_anything_is_charged(
    tmp_path: Path, loss: Any, error: Any, message: str
) -> None:
    trainer = feature_trainer(tmp_path, trainer_options={"per_example_loss_func": loss})
    with pytest.raises(error, match=message):
        trainer.train()
    assert not (tmp_path / PrivacyLedger.FILENAME).exists()


# --- models ----------------------------------------------------------------------------------------------------------


def test_plain_modules_are_evaluated_with_loss_and_metrics(tmp_path: Path) -> None:
    trainer = feature_trainer(tmp_path, trainer_options={"compute_metrics": accuracy})
    metrics = trainer.evaluate()
    rows = feature_rows(seed=1)
    logits = trainer.model(torch.stack([row["features"] for row in rows]))
    expected = nn.functional.cross_entropy(logits, torch.stack([row["labels"] for row in rows]))
    assert metrics["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert "eval_accuracy" in metrics


def test_the_default_layers_are_the_papers(tmp_path: Path) -> None:
    trainer = text_trainer(tmp_path, trainable_layers=None)
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"bert", "classifier"}
    assert {name for name in trained if "encoder.layer" in name} == {
        name for name, _ in trainer.model.named_parameters() if "encoder.layer.1." in name
    }
    assert not any("embeddings" in name for name in trained)


def lora_bert(**changes: Any) -> PeftModel:
    config = LoraConfig(r=3, lora_alpha=6, task_type="SEQ_CLS", target_modules=["query", "value"], **changes)
    return get_peft_model(tiny_bert(), config)


def test_peft_models_are_trained_as_their_adapter_says(tmp_path: Path) -> None:
    model = lora_bert()
    selected = {name for name, p in model.named_parameters() if p.requires_grad}
    trainer = text_trainer(tmp_path / "run", model=model, trainable_layers=None, learning_rate=0.05)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == selected
    trainer.train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    # LoRA's A moves only once B is not zero, which is after the first step.
    assert moved == selected
    assert trainer.plan.num_parameters == sum(before[name].numel() for name in selected)

    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(tiny_bert(), tmp_path / "adapter").eval()
    batch = {key: value for key, value in pad(text_rows(8, seed=3)).items() if key != "labels"}
    logits = model.eval()(**batch).logits
    torch.testing.assert_close(loaded(**batch).logits, logits)
    torch.testing.assert_close(loaded.merge_and_unload()(**batch).logits, logits, atol=1e-5, rtol=1e-4)


def test_peft_models_resume(tmp_path: Path) -> None:
    settings = {"trainable_layers": None, "save_strategy": "steps", "save_steps": 2}
    stopped = text_trainer(tmp_path, model=lora_bert(), **settings)
    stopped.add_callback(type("Stop", (hf.TrainerCallback,), {"on_step_end": _stop_at_two})())
    stopped.train()
    trainer = text_trainer(tmp_path, model=lora_bert(), **settings)
    assert trainer.train(resume_from_checkpoint=True).global_step == 4


def _stop_at_two(self, args, state, control, **kwargs) -> None:  # type: ignore[no-untyped-def]
    control.should_training_stop = state.global_step >= 2


def test_adapters_added_to_a_transformers_model_are_trained_alone(tmp_path: Path) -> None:
    model = tiny_bert()
    model.add_adapter(LoraConfig(r=2, target_modules=["query"]))
    trainer = text_trainer(tmp_path, model=model, trainable_layers=None)
    assert {name.rsplit(".", 3)[1] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    trainer.train()
    assert PrivacyLedger.read(tmp_path).charged == 4


def test_presets_would_undo_an_adapter_and_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be applied to a model with peft adapters.*as_is"):
        text_trainer(tmp_path, model=lora_bert(), trainable_layers="head")


def test_a_model_with_its_own_special_tokens_passes_the_check(tmp_path: Path) -> None:
    """BART classifies at its end-of-sequence token: synthetic rows must keep it, with and without a tokenizer."""
    base = ARCHITECTURES["bart"].build().config
    model = hf.BartForSequenceClassification(
        hf.BartConfig(**{**base.to_dict(), "num_labels": 3, "eos_token_id": 2, "forced_eos_token_id": 2})
    )
    rows = [{**row, "input_ids": [*row["input_ids"], 2]} for row in text_rows()]
    trainer = text_trainer(tmp_path, model=model, rows=rows, trainable_layers="classification_head", max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2


# --- hyperparameter search -------------------------------------------------------------------------------------------


def searcher(output_dir: Path, **changes: Any) -> DCSGDTrainer:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return feature_trainer(
        output_dir,
        trainer_options={"model_init": lambda: feature_classifier(), "compute_metrics": accuracy},
        eval_strategy="epoch",
        **changes,
    )


def rate_space(trial: optuna.Trial) -> dict[str, float]:
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1, log=True)}


def test_every_trial_of_a_search_is_charged_and_the_total_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = searcher(tmp_path)
    best = trainer.hyperparameter_search(hp_space=rate_space, n_trials=3, direction="maximize", backend="optuna")
    assert set(best.hyperparameters) == {"learning_rate"}
    for run in range(3):
        assert PrivacyLedger.read(tmp_path / f"run-{run}").charged == 4
    total = epsilon_spent(noise_multiplier=1.0, sampling_rate=0.25, steps=12, delta=1 / N)
    assert trainer.search_cost.epsilon == pytest.approx(total)
    assert trainer.search_cost.epsilon > trainer.epsilon()
    written = json.loads((tmp_path / "hyperparameter_search_cost.json").read_text())
    assert written["epsilon"] == trainer.search_cost.epsilon
    assert [trial["charged_steps"] for trial in written["trials"]] == [4, 4, 4]
    record = next(record for record in caplog.records if "hyperparameter search (3 trials" in record.message)
    assert record.levelname == "WARNING"
    assert f"{total:.4g}" in record.message


def test_trials_of_other_rates_and_other_layers_are_composed_as_they_were_run(tmp_path: Path) -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {
            "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [8, 16]),
            "trainable_layers": trial.suggest_categorical("trainable_layers", ["classifier", "all"]),
        }

    trainer = searcher(tmp_path)
    sampler = optuna.samplers.GridSampler(
        {"per_device_train_batch_size": [8, 16], "trainable_layers": ["classifier", "all"]}, seed=0
    )
    trainer.hyperparameter_search(hp_space=space, n_trials=4, backend="optuna", sampler=sampler)
    plans = [PrivacyLedger.read(tmp_path / f"run-{run}").plan for run in range(4)]
    assert sorted((plan["expected_batch_size"], plan["num_parameters"]) for plan in plans) == [
        (8, 27),
        (8, 83),
        (16, 27),
        (16, 83),
    ]
    runs = [AccountedRun(1.0, 8 / N, 8)] * 2 + [AccountedRun(1.0, 16 / N, 4)] * 2
    assert trainer.search_cost.epsilon == pytest.approx(composed_epsilon(runs, 1 / N))


def test_pruned_and_failed_trials_are_part_of_the_cost(tmp_path: Path) -> None:
    class Trouble(hf.TrainerCallback):
        runs = 0

        def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            if state.global_step == 2:
                self.runs += 1
                if self.runs == 1:
                    raise optuna.TrialPruned
                if self.runs == 2:
                    raise FloatingPointError

    trainer = searcher(tmp_path)
    trainer.add_callback(Trouble())
    trainer.hyperparameter_search(hp_space=rate_space, n_trials=3, backend="optuna", catch=(FloatingPointError,))
    assert [trial.charged_steps for trial in trainer.search_cost.trials] == [2, 2, 4]


def test_a_search_that_breaks_off_reports_what_it_cost(tmp_path: Path) -> None:
    trainer = searcher(tmp_path)
    trainer.add_callback(type("Fail", (hf.TrainerCallback,), {"on_step_end": _fail})())
    with pytest.raises(FloatingPointError):
        trainer.hyperparameter_search(hp_space=rate_space, n_trials=3, backend="optuna")
    assert [trial.charged_steps for trial in trainer.search_cost.trials] == [1]
    assert (tmp_path / "hyperparameter_search_cost.json").exists()


def _fail(self, args, state, control, **kwargs) -> None:  # type: ignore[no-untyped-def]
    raise FloatingPointError


def test_trials_cannot_set_what_the_arguments_refuse(tmp_path: Path) -> None:
    trainer = searcher(tmp_path)
    with pytest.raises(ValueError, match="percentile"):
        trainer.hyperparameter_search(hp_space=lambda trial: {"percentile": 2.0}, n_trials=1, backend="optuna")
    assert trainer.search_cost is None


def test_backends_that_lose_the_cost_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="backend=ray runs trials in other processes"):
        searcher(tmp_path).hyperparameter_search(backend="ray")
