"""What is derived for a user who leaves batch size, epochs and learning rate unset, and what is left alone."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tasks import feature_classifier, feature_rows, quiet
from torch import nn
from transformers import get_scheduler

from hf_dcsgd import DCSGDTrainer, DCSGDTrainingArguments, PrivacyPlan, PrivateStep, recipe
from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.reporting.plan_table import describe_recipe, little_to_expect

pytestmark = pytest.mark.usefixtures("no_report_page")


def cross_entropy(logits, labels):
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def arguments(tmp_path, **given):
    return DCSGDTrainingArguments(str(tmp_path), accountant="rdp", **{**quiet(), **given})


def plan_of(args, dataset_size):
    return args.privacy_plan(dataset_size=dataset_size, num_parameters=1000)


# --- what is derived -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset_size", "batch_size"),
    [
        (20_000, 1024),
        (600, 150),
        (3, 1),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in ((67_349, 3328), (8_551, 384), (2_490, 256))),
        pytest.param(10**6, 4096, marks=pytest.mark.slow),
    ],
)
def test_batches_are_a_twentieth_of_the_data_within_limits(tmp_path, dataset_size, batch_size):
    args = arguments(tmp_path, target_epsilon=8)
    assert plan_of(args, dataset_size).expected_batch_size == batch_size
    assert args.per_device_train_batch_size <= 64


@pytest.mark.parametrize(
    ("dataset_size", "batch_size", "wanted"),
    [
        (20_000, 1024, 15),  # 19 steps an epoch: as many epochs as there may be
        (200_000, 4096, 7),
        (10**6, 4096, 5),  # 244 steps an epoch: as few as there may be
        (20_000, 256, 5),
        (100, 100, 15),
    ],
)
def test_epochs_are_those_of_three_hundred_steps_within_limits(dataset_size, batch_size, wanted):
    assert recipe.epochs(dataset_size, batch_size)[0] == wanted


@given(st.integers(1, 10**7), st.data())
@settings(deadline=None)
def test_epochs_are_whole_and_within_limits(dataset_size, data):
    batch_size = data.draw(st.integers(1, dataset_size))
    found, reason = recipe.epochs(dataset_size, batch_size)
    assert found == int(found)
    assert recipe.LEAST_EPOCHS <= found <= recipe.MOST_EPOCHS
    if found < recipe.MOST_EPOCHS:
        assert found * dataset_size / batch_size >= recipe.STEPS
    assert str(recipe.STEPS) in reason


def test_epochs_go_by_the_batch_that_is_given(tmp_path):
    large = arguments(tmp_path)
    small = arguments(tmp_path, per_device_train_batch_size=32, gradient_accumulation_steps=8)
    assert (plan_of(large, 20_000).steps, large.num_train_epochs) == (285, 15)
    assert (plan_of(small, 20_000).steps, small.num_train_epochs) == (390, 5)
    assert "300 steps" in large.derived["num_train_epochs"]
    plan_of(large, 10**6)  # what was derived is derived anew
    assert large.num_train_epochs == 5


@pytest.mark.parametrize("epsilon", [2.0, 8.0])
def test_the_rate_gives_the_travel(tmp_path, epsilon):
    args = arguments(tmp_path, target_epsilon=epsilon)
    plan = plan_of(args, 67_349)
    rates = [args.learning_rate * (1 - step / plan.steps) for step in range(plan.steps)]
    travel = sum(rates) * plan.expected_batch_size / plan.grad_noise_multiplier
    assert travel == pytest.approx(recipe.TRAVEL, rel=0.05)  # the rate has two digits
    assert travel == pytest.approx(args.travel(plan).per_rate * args.learning_rate)


def test_few_examples_get_a_rate_that_noise_allows_and_a_warning(tmp_path):
    args = arguments(tmp_path, target_epsilon=2)
    plan = plan_of(args, 2_490)
    travel = args.travel(plan)
    assert travel.drift_per_rate * args.learning_rate == pytest.approx(recipe.LARGEST_DRIFT, rel=0.05)
    assert travel.per_rate * args.learning_rate < recipe.USEFUL_TRAVEL
    assert "WARNING" in describe_recipe(args, plan)
    assert "expect little: 2,490 examples at ε = 2 " in describe_recipe(args, plan)
    warning = little_to_expect(args, plan)
    assert warning is not None
    assert warning.endswith("a model that was trained on similar public data")
    larger = arguments(tmp_path, target_epsilon=8)
    assert "expect less than such data could give: 2,490" in (little_to_expect(larger, plan_of(larger, 2_490)) or "")
    enough = arguments(tmp_path, target_epsilon=8)
    assert little_to_expect(enough, plan_of(enough, 10_000)) is None
    given = arguments(tmp_path, target_epsilon=2, learning_rate=1e-4)
    assert (little_to_expect(given, plan_of(given, 2_490)) or "").endswith("leaving learning_rate to the recipe")
    assert little_to_expect(arguments(tmp_path, target_epsilon=8, optim="sgd"), plan) is None


def test_little_noise_gets_a_usual_rate(tmp_path):
    args = arguments(tmp_path, noise_multiplier=0.01, clipping="fixed")
    plan_of(args, 10**6)
    assert args.learning_rate == recipe.SMALLEST_RATE
    assert "WARNING" not in describe_recipe(args, plan_of(args, 10**6))


@pytest.mark.parametrize(
    ("options", "is_said"),
    [
        ({"clipping": "dc_sgd_p", "recipe": "paper"}, True),
        ({"clipping": "andrew", "recipe": "none"}, True),
        ({"clipping": "dc_sgd_p", "recipe": "paper", "scale_free_gradient": True}, False),
        ({"clipping": "dc_sgd_p"}, False),
        ({"clipping": "dc_sgd_p", "recipe": "paper", "optim": "sgd"}, False),
        ({"clipping": "fixed", "recipe": "paper"}, False),
    ],
)
def test_an_optimizer_that_remembers_earlier_thresholds_is_spoken_of(tmp_path, options, is_said):
    args = arguments(tmp_path, target_epsilon=8, **options)
    said = f"the threshold of {args.clipping} moves with the norms" in describe_recipe(args, plan_of(args, 20_000))
    assert said == is_said


def test_every_derived_value_is_shown_with_its_reason(tmp_path):
    args = arguments(tmp_path, target_epsilon=8)
    plan = plan_of(args, 20_000)
    text = describe_recipe(args, plan)
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "learning_rate"):
        assert name in text
        assert args.derived[name] in text
    assert f"D = {args.learning_rate * args.travel(plan).per_rate:,.0f}," in text


# --- what is left alone ----------------------------------------------------------------------------------------------


def test_what_is_given_wins(tmp_path):
    given = {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 2.0,
        "learning_rate": 7e-4,
        "lr_scheduler_type": "cosine",
        "scale_free_gradient": False,
    }
    args = arguments(tmp_path, **given)
    assert plan_of(args, 20_000).expected_batch_size == 48
    assert {name: getattr(args, name) for name in given} == given
    assert not args.derived


def test_a_given_micro_batch_is_kept_and_accumulated(tmp_path):
    args = arguments(tmp_path, per_device_train_batch_size=16)
    assert plan_of(args, 20_000).expected_batch_size == 1024
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (16, 64)
    assert "per_device_train_batch_size" not in args.derived


def test_the_papers_setting_is_one_word(tmp_path):
    args = DCSGDTrainingArguments(str(tmp_path), recipe="paper", target_epsilon=8, **quiet())
    plan = plan_of(args, 104_743)
    assert (plan.expected_batch_size, plan.steps, plan.accountant) == (256, 2045, "rdp")
    assert (args.learning_rate, args.lr_scheduler_type, args.scale_free_gradient) == (1e-3, "constant", False)
    assert plan.settings["histogram_rule"] == "paper"
    assert plan.settings["histogram_range"] == 20


def test_no_recipe_is_one_word_too(tmp_path):
    args = arguments(tmp_path, recipe="none", noise_multiplier=1.0)
    plan = plan_of(args, 1000)
    assert (plan.expected_batch_size, args.num_train_epochs, args.learning_rate) == (8, 3, 1e-3)


def test_an_unknown_recipe_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected recipe to be one of auto, paper, none, got 'best'"):
        arguments(tmp_path, recipe="best")


# --- the same values everywhere --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset_size", [5_000, 20_000, 67_349, 10**6])
def test_several_processes_have_the_same_logical_batch(dataset_size):
    wanted, _ = recipe.expected_batch_size("auto", dataset_size)
    for world_size in (1, 2, 4, 8):
        per_device, accumulation = recipe.split_batch(wanted, world_size)
        assert per_device * accumulation * world_size == wanted


@given(st.integers(1, 10_000), st.integers(1, 16), st.booleans())
@settings(deadline=None)
def test_micro_batches_make_up_about_the_logical_batch(batch_size, world_size, trunk_is_cached):
    per_device, accumulation = recipe.split_batch(batch_size, world_size, trunk_is_cached=trunk_is_cached)
    assert 1 <= per_device <= (128 if trunk_is_cached else 64)
    assert abs(per_device * accumulation * world_size - batch_size) <= max(world_size, 0.1 * batch_size)


@pytest.mark.parametrize(("trunk_cache", "at_a_time"), [("off", 64), ("auto", 64), ("on", 128)])
def test_more_rows_run_at_a_time_where_the_trunk_is_cached(tmp_path, trunk_cache, at_a_time):
    args = arguments(tmp_path, trunk_cache=trunk_cache)
    plan_of(args, 20_000)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (at_a_time, 1024 // at_a_time)


def test_values_follow_changes_but_not_over_what_was_set_since(tmp_path):
    args = arguments(tmp_path, target_epsilon=8)
    plan_of(args, 67_349)
    first = args.learning_rate
    args.target_epsilon = 2.0
    plan_of(args, 67_349)
    assert args.learning_rate > first
    args.learning_rate = 0.123
    args.target_epsilon = 8.0
    plan_of(args, 67_349)
    assert args.learning_rate == 0.123


def test_saved_arguments_tell_what_was_derived(tmp_path):
    args = arguments(tmp_path, target_epsilon=8)
    plan_of(args, 20_000)
    again = pickle.loads(pickle.dumps(args))
    assert again.derived == args.derived
    assert copy.deepcopy(args).learning_rate == args.learning_rate


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "constant_with_warmup", "polynomial"])
def test_schedules_are_added_up_as_transformers_runs_them(schedule):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = get_scheduler(schedule, optimizer, num_warmup_steps=5, num_training_steps=50)
    expected = []
    for _ in range(50):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert recipe.schedule_factors(schedule, 50, 5) == pytest.approx(expected)
    assert recipe.schedule_factors(schedule, 50, 0.1) == pytest.approx(expected)


def test_long_schedules_are_looked_at_in_places(tmp_path):
    assert len(recipe.schedule_factors("linear", 10**7)) == 1000
    args = arguments(tmp_path, noise_multiplier=1.0, clipping="fixed", max_steps=10**6, per_device_train_batch_size=16,
                     gradient_accumulation_steps=1)  # fmt: skip
    assert args.travel(plan_of(args, 1000)).per_rate == pytest.approx(16 * 10**6 / 2, rel=0.01)


def test_a_run_with_nothing_given_but_epsilon(tmp_path, capsys):
    args = arguments(tmp_path, target_epsilon=8)
    trainer = DCSGDTrainer(feature_classifier(), args, train_dataset=feature_rows(400))
    trainer.train()
    assert trainer.plan.expected_batch_size == 100
    assert trainer.state.global_step == trainer.plan.steps == 60
    assert "Recipe (auto)" in capsys.readouterr().out


def test_a_scale_free_release_is_divided_by_the_threshold_of_its_own_step():
    rows = feature_rows(8)
    stack = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    gradients = []
    for scale_free in (False, True):
        model = feature_classifier()
        plan = PrivacyPlan.create(
            dataset_size=64,
            expected_batch_size=8,
            steps=2,
            num_parameters=sum(p.numel() for p in model.parameters()),
            noise_multiplier=0.0,
            clipping="du",  # which moves at every step
            settings={"clip_threshold": 0.25, "du_decay": 0.1},
        )
        step = PrivateStep(model, DPMechanism(plan), loss=cross_entropy, scale_free=scale_free)
        step.accumulate(stack)
        release = step.release()
        assert release.sensitivity == 0.25
        assert step.mechanism.threshold.clip_threshold < 0.25
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(gradients[1], gradients[0] / 0.25)
