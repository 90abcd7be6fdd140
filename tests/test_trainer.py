"""The private step inside transformers' loop: what it computes, what it costs, and what it refuses to start."""

import json
import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES
from tiny_tasks import (
    BATCH,
    FEATURES,
    SIGMA,
    N,
    accuracy,
    feature_classifier,
    feature_rows,
    feature_trainer,
    flat_parameters,
    force_draws,
    pad,
    private_args,
    quiet,
    text_rows,
    text_trainer,
    tiny_bert,
    watch_steps,
)
from torch import nn

from hf_dcsgd import DCSGDTrainer
from hf_dcsgd.checks.parity import ParityError
from hf_dcsgd.data.rows import Batch
from hf_dcsgd.ghost import UnsupportedModelError, registry
from hf_dcsgd.privacy.accounting import epsilon_spent
from hf_dcsgd.privacy.ledger import PrivacyLedger
from hf_dcsgd.privacy.mechanism import BudgetExhausted, DPMechanism
from hf_dcsgd.privacy.noise import NoiseSource, SensitiveSum
from hf_dcsgd.step import PrivateStep

pytestmark = pytest.mark.usefixtures("no_report_page", "quick_statements")

NO_NOISE = {"noise_multiplier": 1e-20, "clipping": "fixed", "clip_threshold": 1e6}


def trained_parameters(trainer: hf.Trainer) -> torch.Tensor:
    trainer.train()
    return flat_parameters(trainer.model)


# --- it learns -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_dc_sgd_e_learns_at_epsilon_8(tmp_path: Path, record_property) -> None:
    train, evaluation = text_rows(1200), text_rows(400, seed=1)
    settings = {"per_device_train_batch_size": 300, "num_train_epochs": 8, "learning_rate": 0.01, "logging_steps": 50}
    options = {"eval_dataset": evaluation, "compute_metrics": accuracy}
    private = text_trainer(tmp_path / "dp", rows=train, target_epsilon=8.0, **settings, trainer_options=options)
    untrained = private.evaluate()["eval_accuracy"]
    private.train()
    smaller = {"per_device_train_batch_size": 60, "num_train_epochs": 2}  # about as many steps
    reference = hf.Trainer(
        tiny_bert(),
        hf.TrainingArguments(str(tmp_path / "plain"), **quiet(**settings | smaller)),
        train_dataset=train,
        data_collator=pad,
        **options,
    )
    reference.train()
    reached = {
        "untrained": untrained,
        "private at epsilon 8": private.evaluate()["eval_accuracy"],
        "non-private": reference.evaluate()["eval_accuracy"],
    }
    print("accuracy:", reached)
    record_property("accuracy", reached)
    assert private.plan.clipping == "dc_sgd_e"
    assert private.epsilon() <= 8.0
    assert reached["untrained"] < 0.45
    assert reached["private at epsilon 8"] > 0.85
    assert reached["non-private"] > 0.95


SCHEDULE = {"lr_scheduler_type": "linear", "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5}


@pytest.mark.parametrize(
    ("optim", "schedule"),
    [
        ("sgd", {}),
        ("adamw_torch", SCHEDULE),
        pytest.param("sgd", SCHEDULE, marks=pytest.mark.slow),
        pytest.param("adamw_torch", {}, marks=pytest.mark.slow),
    ],
)
def test_without_noise_and_clipping_it_takes_the_steps_of_a_plain_trainer(
    tmp_path: Path, optim: str, schedule: dict
) -> None:
    """Full batches (q = 1), σ → 0, C → ∞: after five steps the parameters agree within fp32 error."""
    # Equally long: transformers averages the loss over a batch, and padding does not matter here.
    rows = text_rows(32)
    settings = {
        "per_device_train_batch_size": 32,
        "num_train_epochs": 5,
        "learning_rate": 0.3 if optim == "sgd" else 0.01,
        "optim": optim,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        **schedule,
    }
    private = text_trainer(tmp_path / "dp", rows=rows, **settings, **NO_NOISE)
    plain = hf.Trainer(
        tiny_bert(),
        hf.TrainingArguments(str(tmp_path / "plain"), **quiet(**settings)),
        train_dataset=rows,
        data_collator=pad,
    )
    start = flat_parameters(tiny_bert())
    expected, found = trained_parameters(plain), trained_parameters(private)
    moved = (expected - start).norm()
    assert moved > 0.1
    # Adam divides by the root of tiny squares: rounding there is larger.
    assert (found - expected).norm() < (1e-5 if optim == "sgd" else 1e-3) * moved


@pytest.mark.parametrize("split", [(16, 1), (4, 4)])
def test_one_step_is_the_noised_mean_of_clipped_gradients(tmp_path: Path, split: tuple[int, int]) -> None:
    """Against a loop over examples with autograd: clipping by hand, the same noise, divided by the public B."""
    rows, drawn, threshold = feature_rows(), [0, 3, 5, 7, 20, 21, 40, 63, 11], 0.5
    model = feature_classifier()
    clipped_sum = torch.zeros(sum(p.numel() for p in model.parameters()))
    for index in drawn:
        loss = nn.functional.cross_entropy(model(rows[index]["features"][None]), rows[index]["labels"][None])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        clipped_sum += gradient * min(1.0, threshold / float(gradient.norm()))
    noise = NoiseSource(unsafe_seed=3).add_noise(SensitiveSum(torch.zeros_like(clipped_sum), 1.0), 1.0)
    expected = flat_parameters(model) - 0.7 * (clipped_sum + SIGMA * threshold * noise) / BATCH

    trainer = feature_trainer(
        tmp_path,
        clipping="fixed",
        clip_threshold=threshold,
        optim="sgd",
        learning_rate=0.7,
        max_steps=1,
        unsafe_noise_seed=3,
        per_device_train_batch_size=split[0],
        gradient_accumulation_steps=split[1],
    )
    force_draws(trainer, lambda: np.array(drawn))
    torch.testing.assert_close(trained_parameters(trainer), expected, atol=1e-6, rtol=1e-5)


# --- noise and draws -------------------------------------------------------------------------------------------------


class CountingNoise(NoiseSource):
    """Keeps the size, multiplier and sensitivity of everything that was noised."""

    calls: list[tuple[int, float, float]]

    def add_noise(self, total, noise_multiplier):  # type: ignore[no-untyped-def]
        CountingNoise.calls.append((total.value.numel(), noise_multiplier, total.sensitivity))
        return super().add_noise(total, noise_multiplier)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_noise_enters_once_per_logical_batch_at_the_threshold_in_use(
    tmp_path: Path, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    CountingNoise.calls = []
    monkeypatch.setattr("hf_dcsgd.privacy.mechanism.NoiseSource", CountingNoise)
    trainer = feature_trainer(
        tmp_path,
        per_device_train_batch_size=BATCH // accumulation,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=2,
        # Far off, and a histogram clear enough to see it: the threshold is sure to move.
        clip_threshold=5.0,
        histogram_bins=5,
        histogram_noise_multiplier=1.5,
    )
    trainer.train()
    plan = trainer.plan
    thresholds = [line["clip_threshold"] for line in trainer.state.log_history if "clip_threshold" in line]
    assert len(set(thresholds)) > 1
    gradients = [call for call in CountingNoise.calls if call[0] == plan.num_parameters]
    histograms = [call for call in CountingNoise.calls if call[0] == plan.settings["histogram_bins"]]
    assert len(CountingNoise.calls) == 2 * plan.steps == 16
    assert gradients == [(plan.num_parameters, plan.grad_noise_multiplier, c) for c in thresholds]
    assert histograms == [(5, 1.5, 1.0)] * plan.steps
    assert plan.grad_noise_multiplier == pytest.approx((SIGMA**-2 - 1.5**-2) ** -0.5)


@pytest.fixture
def recorded_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the dataset indices of every stack (rows carry their index) in `step.seen`, one list per logical batch."""

    def accumulate(step: PrivateStep, stack: Batch) -> None:
        step.__dict__.setdefault("seen", [[]])[-1].append(stack.pop("index").tolist())

    def release(step: PrivateStep) -> None:
        step.__dict__.setdefault("seen", [[]]).append([])

    watch_steps(monkeypatch, accumulate=accumulate, release=release)
    # It would run the model on the index, too.
    monkeypatch.setattr("hf_dcsgd.runs.start.check_before_training", lambda *args: None)


def recording_trainer(output_dir: Path, n: int = N, **changes) -> DCSGDTrainer:  # type: ignore[no-untyped-def]
    rows = [{**row, "index": i} for i, row in enumerate(feature_rows(n))]
    return feature_trainer(output_dir, rows=rows, remove_unused_columns=False, clipping="fixed", **changes)


@pytest.mark.usefixtures("recorded_draws")
def test_batches_are_poisson_draws_and_no_record_comes_twice_in_a_step(tmp_path: Path) -> None:
    steps = 200
    trainer = recording_trainer(
        tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=steps, logging_steps=1000
    )
    trainer.train()
    batches = [[index for micro in logical for index in micro] for logical in trainer.step.seen[:-1]]
    assert len(batches) == steps
    assert all(len(batch) == len(set(batch)) for batch in batches)
    sizes = np.array([len(batch) for batch in batches])
    expected_variance = N * 0.25 * 0.75
    # Five standard errors: a false alarm once in a million.
    assert abs(sizes.mean() - BATCH) < 5 * math.sqrt(expected_variance / steps)
    # A shuffled or fixed-size sampler has no variance; n = 200, so its standard error is a tenth of itself.
    assert 0.5 < sizes.var() / expected_variance < 1.7
    counts = np.bincount([index for batch in batches for index in batch], minlength=N)
    assert abs(counts - steps / 4).max() < 6 * math.sqrt(steps * 0.25 * 0.75)
    # The draws of two steps are independent: a record drawn now is no likelier, nor less likely, to be drawn next.
    both = sum(len(set(a) & set(b)) for a, b in pairwise(batches)) / (steps - 1)
    # A pair of steps has the variance q²(1 − q²) for each record, and the covariance q³(1 − q) with the pair after it.
    variance = N * (15 / 256 + 2 * 3 / 256) / (steps - 1)
    assert abs(both - N / 16) < 5.5 * math.sqrt(variance)


@pytest.mark.usefixtures("recorded_draws")
def test_oversized_micro_batches_are_cut_and_all_examples_kept(tmp_path: Path) -> None:
    trainer = recording_trainer(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=2)
    force_draws(trainer, lambda: np.arange(N))
    trainer.train()
    for logical in trainer.step.seen[:2]:
        assert max(len(piece) for piece in logical) <= 4
        assert sorted(index for piece in logical for index in piece) == list(range(N))


@pytest.mark.usefixtures("recorded_draws")
def test_fresh_noise_and_fresh_draws_under_one_public_seed(tmp_path: Path) -> None:
    runs = [recording_trainer(tmp_path / str(i), seed=42, max_steps=2) for i in range(2)]
    first, second = (trained_parameters(run) for run in runs)
    assert runs[0].step.seen != runs[1].step.seen
    assert not torch.equal(first, second)
    force = [recording_trainer(tmp_path / f"f{i}", seed=42, max_steps=1) for i in range(2)]
    for trainer in force:
        force_draws(trainer, lambda: np.arange(5))
    assert not torch.equal(*(trained_parameters(trainer) for trainer in force))


def test_empty_logical_batches_are_noise_only_steps(tmp_path: Path) -> None:
    trainer = feature_trainer(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=8, max_steps=3)
    force_draws(trainer, lambda: np.array([], dtype=int))
    before = flat_parameters(trainer.model)
    result = trainer.train()
    assert result.global_step == PrivacyLedger.read(tmp_path).charged == 3
    assert not torch.equal(flat_parameters(trainer.model), before)


@pytest.mark.usefixtures("recorded_draws")
def test_a_tiny_rate_leaves_most_batches_empty_and_the_run_goes_on(tmp_path: Path) -> None:
    trainer = recording_trainer(tmp_path, n=400, per_device_train_batch_size=1, max_steps=40)
    result = trainer.train()
    assert result.global_step == 40
    assert len(trainer.step.seen) == 41
    assert any(not logical for logical in trainer.step.seen[:-1])  # P(no empty one of 40) = (1 - 1/e)^40 = 1e-8


@pytest.mark.parametrize("clipping", ["fixed", "dc_sgd_e"])
def test_an_epoch_stopped_within_a_logical_batch_carries_nothing_over(
    tmp_path: Path, clipping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of the abandoned half may be drawn again: they must not count twice in one noisy step."""
    sums, counts = [], []

    class StopOnce(hf.TrainerCallback):
        stopped = False

        def on_substep_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            control.should_epoch_stop = not self.stopped
            self.stopped = True

    def release(step: PrivateStep) -> None:
        sums.append(step._clipped_sum.clone())
        counts.append(step.mechanism._sums.get("side"))

    watch_steps(monkeypatch, release=release)
    trainer = feature_trainer(
        tmp_path,
        trainer_options={"callbacks": [StopOnce()]},
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=0.0,
        num_train_epochs=2,
        clipping=clipping,
    )
    force_draws(trainer, lambda: np.arange(10))
    assert trainer.train().global_step == 4
    if clipping == "fixed":
        assert sums[1].norm() > 0
        torch.testing.assert_close(sums[0], sums[1])
    else:
        assert [int(count.sum()) for count in counts] == [10] * 4


# --- accounting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "batch", "accumulation", "schedule"),
    [
        (70, 4, 4, {"num_train_epochs": 2}),  # N is no multiple of B
        (64, 8, 2, {"num_train_epochs": 1.6}),  # an epoch cut short
        (64, 16, 1, {"max_steps": 7}),  # more than one epoch, not a whole number of them
        (50, 1, 50, {"num_train_epochs": 2}),  # q = 1
        pytest.param(64, 16, 1, {"num_train_epochs": 3}, marks=pytest.mark.slow),
        pytest.param(64, 4, 4, {"num_train_epochs": 2}, marks=pytest.mark.slow),
        pytest.param(64, 2, 8, {"max_steps": 3}, marks=pytest.mark.slow),  # less than one epoch
    ],
)
def test_planned_and_spent_agree(tmp_path: Path, n: int, batch: int, accumulation: int, schedule: dict) -> None:
    trainer = feature_trainer(
        tmp_path,
        rows=feature_rows(n),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        target_epsilon=4.0,
        **schedule,
    )
    expected_batch = batch * accumulation
    planned = schedule.get("max_steps") or math.ceil(schedule["num_train_epochs"] * (n // expected_batch))
    result = trainer.train()
    ledger = PrivacyLedger.read(tmp_path)
    assert trainer.plan.steps == result.global_step == ledger.charged == trainer.state.max_steps == planned
    assert trainer.plan.expected_batch_size == expected_batch
    assert trainer.plan.sampling_rate == expected_batch / n
    assert trainer.plan.delta == 1 / n
    spent = epsilon_spent(
        noise_multiplier=trainer.plan.noise_multiplier,
        sampling_rate=expected_batch / n,
        steps=ledger.charged,
        delta=1 / n,
    )
    assert trainer.epsilon() == spent == trainer.plan.epsilon() == trainer.state.log_history[-2]["epsilon"]
    assert 3.99 < spent <= 4.0


def test_epsilon_grows_from_zero_step_by_step(tmp_path: Path) -> None:
    trainer = feature_trainer(tmp_path)
    assert trainer.epsilon() == 0.0
    trainer.train()
    logged = [line["epsilon"] for line in trainer.state.log_history if "epsilon" in line]
    expected = [
        epsilon_spent(noise_multiplier=SIGMA, sampling_rate=BATCH / N, steps=k, delta=1 / N) for k in (1, 2, 3, 4)
    ]
    assert logged == pytest.approx(expected)


def test_the_last_line_of_the_log_says_what_the_plan_says(tmp_path: Path) -> None:
    """The log takes PLD's coarse grid for its lines, which overstates ε; the plan has the fine one for the last."""
    trainer = feature_trainer(tmp_path, accountant="pld", max_steps=30, logging_steps=15)
    trainer.train()
    logged = [line["epsilon"] for line in trainer.state.log_history if "epsilon" in line]
    assert logged == sorted(logged)
    assert logged[-1] == trainer.epsilon() == trainer.plan.epsilon() < trainer.plan.epsilon(grid_scale=10)


def test_a_loop_of_another_length_than_the_plan_is_refused(tmp_path: Path) -> None:
    class Longer(DCSGDTrainer):
        def set_initial_training_values(self, args, dataloader):  # type: ignore[no-untyped-def]
            return (*super().set_initial_training_values(args, dataloader)[:-1], 9)

    with pytest.raises(RuntimeError, match="plan has 4 steps, but the training loop would run 9"):
        feature_trainer(tmp_path, trainer_class=Longer).train()


def test_no_step_is_taken_beyond_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hard stop under everything else: when all steps are charged, a release raises before it charges."""
    trainer = feature_trainer(tmp_path)
    monkeypatch.setattr(DPMechanism, "exhausted", property(lambda self: self.charged >= 2))
    trainer.train()
    assert trainer.state.global_step == PrivacyLedger.read(tmp_path).charged == 2
    with pytest.raises(BudgetExhausted):
        trainer.mechanism.release(torch.zeros(trainer.plan.num_parameters))
    assert PrivacyLedger.read(tmp_path).charged == 2


def test_training_the_same_model_again_is_refused(tmp_path: Path) -> None:
    trainer = feature_trainer(tmp_path)
    trainer.train()
    with pytest.raises(BudgetExhausted, match="trained for 4 charged steps already"):
        trainer.train()
    assert [run.charged for run in PrivacyLedger.read(tmp_path).runs] == [4]


def test_model_init_starts_over_and_both_runs_stay_in_the_ledger(tmp_path: Path) -> None:
    trainer = feature_trainer(tmp_path, trainer_options={"model_init": lambda: feature_classifier()})
    first = trained_parameters(trainer)
    assert not torch.equal(first, trained_parameters(trainer))
    assert [run.charged for run in PrivacyLedger.read(tmp_path).runs] == [4, 4]


# --- awkward examples ------------------------------------------------------------------------------------------------


def test_broken_examples_leave_no_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys) -> None:
    """NaN and infinite examples: the run goes on, and with the same noise it ends where it would without them."""
    rows = feature_rows()
    broken = [dict(row) for row in rows]
    for index, value in ((2, math.nan), (17, math.inf), (40, -math.inf)):
        broken[index]["features"] = torch.full((FEATURES,), value)
    settings = {"clipping": "fixed", "unsafe_noise_seed": 5, "optim": "sgd", "log_train_loss": "off"}
    trainer = feature_trainer(tmp_path / "broken", rows=broken, **settings)
    force_draws(trainer, lambda: np.array([2, 3, 4, 17, 40, 50]))
    clean = feature_trainer(tmp_path / "clean", rows=rows, **settings)
    force_draws(clean, lambda: np.array([3, 4, 50]))
    found, expected = trained_parameters(trainer), trained_parameters(clean)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected)
    text = "".join(capsys.readouterr()) + caplog.text + json.dumps(trainer.state.log_history)
    assert "grad_norm" in text
    assert not re.search(r"\b(nan|inf|infinity|non-?finite)\b", text, re.IGNORECASE)


def test_broken_examples_in_a_transformer(tmp_path: Path) -> None:
    arch = ARCHITECTURES["vit"]
    model = arch.build()
    inputs, labels = arch.batch(model, n=16)
    inputs["pixel_values"][3] = math.nan
    rows = [{"pixel_values": inputs["pixel_values"][i], "labels": labels[i]} for i in range(16)]
    trainer = DCSGDTrainer(
        model,
        private_args(tmp_path, per_device_train_batch_size=8, max_steps=3, trainable_layers="all"),
        train_dataset=rows,
    )
    force_draws(trainer, lambda: np.arange(16))
    before = flat_parameters(model)
    after = trained_parameters(trainer)
    assert after.isfinite().all()
    assert not torch.equal(before, after)


# --- before the start ------------------------------------------------------------------------------------------------


def test_the_plan_is_printed_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    feature_trainer(tmp_path).train()
    printed = capsys.readouterr().out
    for number in ("q = 16/64", "4 steps", "σ = 1.00000", "σ_T = 1.02062", "dc_sgd_e", "δ = 0.01562", "83 parameters"):
        assert number in printed
    assert printed.index("Privacy plan") < printed.index("grad_norm")


def test_a_wrong_rule_is_found_before_anything_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_of_it(module, inputs, output_grad):  # type: ignore[no-untyped-def]
        return registry_rule(module, inputs, output_grad / 2)

    registry_rule = registry._RULES[nn.Linear]
    monkeypatch.setitem(registry._RULES, nn.Linear, half_of_it)
    # The clipper's own check would move such a parameter to the slow path: switched off, the parity check is alone.
    monkeypatch.setattr("hf_dcsgd.ghost.engine.unexplained_parameters", lambda *args: [])
    trainer = feature_trainer(tmp_path)
    with pytest.raises(ParityError, match="do not agree with autograd"):
        trainer.train()
    assert not (tmp_path / PrivacyLedger.FILENAME).exists()


def test_a_wrong_rule_is_named_before_anything_is_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = registry._RULES[nn.Linear]

    def half_of_it(module, inputs, grad):  # type: ignore[no-untyped-def]
        return rule(module, inputs, grad / 2)

    monkeypatch.setitem(registry._RULES, nn.Linear, half_of_it)
    with pytest.raises(UnsupportedModelError, match=r"half_of_it for hidden \(Linear\) is wrong"):
        feature_trainer(tmp_path, clipping="fixed").train()
    assert not (tmp_path / PrivacyLedger.FILENAME).exists()


def test_the_check_leaves_no_gradients_and_no_mode_behind(tmp_path: Path) -> None:
    trainer = feature_trainer(tmp_path, model=feature_classifier(dropout=0.5))
    seen = []

    class Look(hf.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):  # type: ignore[no-untyped-def]
            seen.append((model.training, [p.grad for p in model.parameters() if p.grad is not None]))

    trainer.add_callback(Look())
    trainer.train()
    assert seen == [(True, [])]


def test_a_model_with_nothing_to_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        feature_trainer(tmp_path, model=feature_classifier().requires_grad_(False))
    trainer = feature_trainer(tmp_path / "later")
    trainer.model.requires_grad_(False)
    with pytest.raises((ValueError, UnsupportedModelError)):
        trainer.train()
    assert not (tmp_path / "later" / PrivacyLedger.FILENAME).exists()


def test_batch_norm_is_refused_unless_frozen(tmp_path: Path) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(FEATURES)
            self.classifier = nn.Linear(FEATURES, 3)

        def forward(self, features):  # type: ignore[no-untyped-def]
            return self.classifier(self.norm(features))

    with pytest.raises(UnsupportedModelError, match="norm"):
        feature_trainer(tmp_path / "trained", model=Normed()).train()
    frozen = Normed()
    frozen.norm.requires_grad_(False)
    trainer = feature_trainer(tmp_path / "frozen", model=frozen)
    statistics = frozen.norm.running_mean.clone()
    trainer.train()
    assert torch.equal(frozen.norm.running_mean, statistics)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16])
def test_models_in_half_precision_are_trained_in_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    trainer = text_trainer(tmp_path, model=tiny_bert().to(dtype), max_steps=2)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    before = flat_parameters(trainer.model)
    assert not torch.equal(trained_parameters(trainer), before)


def test_evaluation_in_half_precision_does_not_stay_for_training(tmp_path: Path) -> None:
    trainer = text_trainer(tmp_path, bf16_full_eval=True, max_steps=1)
    trainer.evaluate()
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_label_smoothing_changes_the_gradient_as_it_does_in_a_plain_trainer(tmp_path: Path) -> None:
    rows = text_rows(32)
    settings = {
        "per_device_train_batch_size": 32,
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.3,
        "label_smoothing_factor": 0.4,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }
    private = text_trainer(tmp_path / "dp", rows=rows, **settings, **NO_NOISE)
    plain = hf.Trainer(
        tiny_bert(),
        hf.TrainingArguments(str(tmp_path / "plain"), **quiet(**settings)),
        train_dataset=rows,
        data_collator=pad,
    )
    expected = trained_parameters(plain)
    moved = (expected - flat_parameters(tiny_bert())).norm()
    assert (trained_parameters(private) - expected).norm() < 1e-5 * moved
