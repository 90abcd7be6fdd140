"""Arguments: what they accept, refuse and default to, also from the command line."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tasks import private_args
from transformers import HfArgumentParser, TrainingArguments

from hf_dcsgd import DCSGDTrainingArguments
from hf_dcsgd.clipping import STRATEGIES


def parse(*words: str) -> DCSGDTrainingArguments:
    (args,) = HfArgumentParser(DCSGDTrainingArguments).parse_args_into_dataclasses(
        list(words), look_for_args_file=False
    )
    return args


# --- defaults --------------------------------------------------------------------------------------------------------


def test_defaults(tmp_path: Path) -> None:
    args = DCSGDTrainingArguments(str(tmp_path))
    assert (args.recipe, args.learning_rate, args.lr_scheduler_type, args.max_grad_norm) == ("auto", None, "linear", 0)
    assert (args.target_epsilon, args.noise_multiplier, args.target_delta) == (8.0, None, None)
    assert (args.clipping, args.clip_threshold, args.histogram_bins, args.accountant) == ("dc_sgd_e", 1.0, 20, "pld")
    assert (args.log_train_loss, args.unsafe_noise_seed, args.trainable_layers) == ("off", None, None)
    assert DCSGDTrainingArguments(str(tmp_path), noise_multiplier=1.0).target_epsilon is None


def test_delta_defaults_to_one_over_n(tmp_path: Path) -> None:
    plan = private_args(tmp_path).privacy_plan(dataset_size=200, num_parameters=10)
    assert plan.delta == 1 / 200
    assert private_args(tmp_path, target_delta=1e-6).privacy_plan(dataset_size=200, num_parameters=10).delta == 1e-6


def test_from_the_command_line(tmp_path: Path) -> None:
    words = f"--output_dir {tmp_path} --target_epsilon 3 --clipping andrew --percentile 0.7 --trainable_layers head"
    args = parse(*words.split(), "--andrew_learning_rate", "0.1", "--log_train_loss", "private", "--loss_clip", "4")
    assert (args.target_epsilon, args.clipping, args.percentile, args.trainable_layers) == (3.0, "andrew", 0.7, "head")
    assert (args.andrew_learning_rate, args.log_train_loss, args.loss_clip) == (0.1, "private", 4.0)
    assert args.learning_rate is None


def test_unknown_choices_on_the_command_line_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--output_dir", str(tmp_path), "--clipping", "best")
    assert "invalid choice: 'best'" in capsys.readouterr().err


def test_options_of_a_strategy_are_as_it_declares_them() -> None:
    fields = {field.name: field for field in dataclasses.fields(DCSGDTrainingArguments)}
    for known in STRATEGIES.values():
        for option in known.options:
            assert fields[option.name].default == option.default
            assert fields[option.name].metadata["help"].endswith(option.help)
            kind = {float: "float", int: "int", str: "str"}[option.kind]
            optional = " | None" if option.default is None else ""
            assert DCSGDTrainingArguments.__annotations__[option.name] == kind + optional


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"clip_threshold": 2.0}, ValueError, "clip_threshold as an argument of its own"),
        ({"steepness": 2.0}, ValueError, r"clipping_options of clipping=dc_sgd_e, got steepness=2\.0"),
        ('{"steepness": 2', ValueError, "clipping_options as JSON text, got"),
        ("[1]", TypeError, r"clipping_options to be a mapping, got \[1\]"),
    ],
)
def test_clipping_options_that_fit_nothing(tmp_path: Path, options: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        private_args(tmp_path, clipping_options=options)


def test_arguments_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("hf_dcsgd.training_args.refuse_incompatible_arguments", calls.append)
    args = private_args(tmp_path)
    assert calls == [args]
    args.check()
    assert len(calls) == 2


def test_arguments_survive_json(tmp_path: Path) -> None:
    args = private_args(tmp_path, clipping="du", du_decay=0.25)
    kept = args.to_dict()
    assert (kept["clipping"], kept["du_decay"], kept["noise_multiplier"]) == ("du", 0.25, 1.0)
    assert "du_decay" in args.to_json_string()


def test_layers_may_be_a_list(tmp_path: Path) -> None:
    assert private_args(tmp_path, trainable_layers=["head", "bias"]).trainable_layers == "head,bias"


# --- the plan they make ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "batch", "steps"),
    [
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "num_train_epochs": 3}, 32, 18),
        ({"per_device_train_batch_size": 32, "num_train_epochs": 0.4}, 32, 3),
        ({"per_device_train_batch_size": 32, "max_steps": 5, "num_train_epochs": 9}, 32, 5),
    ],
)
def test_batch_size_and_steps(tmp_path: Path, changes: dict, batch: int, steps: int) -> None:
    plan = private_args(tmp_path, **changes).privacy_plan(dataset_size=200, num_parameters=10)
    assert (plan.expected_batch_size, plan.steps) == (batch, steps)


def test_only_settings_of_the_strategy_reach_the_plan(tmp_path: Path) -> None:
    plan = private_args(tmp_path, clipping="andrew", percentile=0.9, histogram_bins=7).privacy_plan(
        dataset_size=200, num_parameters=10
    )
    assert plan.settings["percentile"] == 0.9
    assert "histogram_bins" not in plan.settings
    assert plan.loss_noise_multiplier is None


def test_the_loss_takes_its_share_of_sigma(tmp_path: Path) -> None:
    plan = private_args(
        tmp_path, log_train_loss="private", loss_noise_multiplier=7.0, loss_clip=3.0, histogram_noise_multiplier=6.0
    ).privacy_plan(dataset_size=200, num_parameters=10)
    assert plan.loss_clip == 3.0
    assert plan.noise_multiplier**-2 == pytest.approx(plan.grad_noise_multiplier**-2 + 6.0**-2 + 7.0**-2)


def test_raw_losses_are_an_opt_out_of_the_plan(tmp_path: Path) -> None:
    plan = private_args(tmp_path, log_train_loss="raw").privacy_plan(dataset_size=200, num_parameters=10)
    assert plan.opt_outs == ("raw_train_loss",)
    assert plan.loss_noise_multiplier is None
    assert private_args(tmp_path).privacy_plan(dataset_size=200, num_parameters=10).opt_outs == ()


def test_more_expected_than_there_are(tmp_path: Path) -> None:
    args = private_args(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match=r"got 31 examples and 32 = per_device_train_batch_size 8 × gradient_acc.* 4"):
        args.privacy_plan(dataset_size=31, num_parameters=10)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_epsilon": 3.0, "noise_multiplier": 0.5},
            "target_epsilon and noise_multiplier, got both: 3.0 and 0.5",
        ),
        ({"target_epsilon": 0.0}, "target_epsilon > 0, got 0"),
        ({"target_epsilon": float("inf")}, "target_epsilon > 0, got inf"),
        ({"target_epsilon": float("nan")}, "target_epsilon > 0, got nan"),
        ({"noise_multiplier": -1.0}, "noise_multiplier > 0, got -1"),
        ({"noise_multiplier": 0.0}, "noise_multiplier > 0, got 0"),
        ({"target_delta": 1.0}, "target_delta < 1, got 1"),
        ({"accountant": "moments"}, "accountant to be one of rdp, pld, got 'moments'"),
        ({"clipping": "best"}, "clipping to be one of .*fixed, got 'best'"),
        ({"log_train_loss": "yes"}, "log_train_loss to be one of off, private, raw, got 'yes'"),
        ({"clip_threshold": 0.0}, "clip_threshold > 0, got 0"),
        ({"percentile": 50.0}, "percentile < 1, got 50"),
        ({"du_decay": 1.5}, "du_decay < 1, got 1.5"),
        ({"histogram_bins": 1}, "histogram_bins >= 2, got 1"),
        ({"histogram_range": -2.0}, "histogram_range > 0, got -2"),
        ({"andrew_count_noise_std": 0.0}, "andrew_count_noise_std > 0, got 0"),
        ({"auto_clip_gamma": 0.0}, "auto_clip_gamma > 0, got 0"),
        ({"loss_clip": 0.0}, "loss_clip > 0, got 0"),
    ],
)
def test_contradictions_are_refused_with_names_and_values(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DCSGDTrainingArguments(str(tmp_path), use_cpu=True, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"noise_multiplier": 0.75, "histogram_noise_multiplier": 0.5},
            "histogram_noise_multiplier > noise_multiplier, got 0.5 and 0.75",
        ),
        (
            {"noise_multiplier": 2.0, "log_train_loss": "private", "loss_noise_multiplier": 1.5},
            "loss_noise_multiplier combined > noise_multiplier, got .*loss_noise_multiplier=1.5.* and 2",
        ),
    ],
)
def test_side_releases_that_leave_nothing_for_the_gradient(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        private_args(tmp_path, **changes).privacy_plan(dataset_size=200, num_parameters=10)


def test_options_of_other_strategies_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    DCSGDTrainingArguments(str(tmp_path), use_cpu=True, percentile=0.7, du_decay=0.3, histogram_bins=10)
    assert caplog.messages == ["clipping=dc_sgd_e does not use du_decay=0.3, percentile=0.7"]
    caplog.clear()
    DCSGDTrainingArguments(str(tmp_path), use_cpu=True, clipping="fixed", histogram_noise_multiplier=7.0)
    assert caplog.messages == ["clipping=fixed does not use histogram_noise_multiplier=7.0"]
    caplog.clear()
    DCSGDTrainingArguments(str(tmp_path), use_cpu=True, clipping="dc_sgd_p", percentile=0.7, clip_threshold=2.0)
    assert not caplog.messages


def test_a_target_that_leaves_nothing_for_the_gradient_is_named(tmp_path: Path) -> None:
    args = private_args(tmp_path, target_epsilon=0.01)
    with pytest.raises(ValueError, match=r"target_epsilon = 0\.01 needs noise_multiplier = .*Raise target_epsilon"):
        args.privacy_plan(dataset_size=1000, num_parameters=10)


def test_side_releases_that_together_leave_nothing_for_the_gradient(tmp_path: Path) -> None:
    args = private_args(
        tmp_path,
        noise_multiplier=1.0,
        histogram_noise_multiplier=1.3,
        log_train_loss="private",
        loss_noise_multiplier=1.3,
    )
    with pytest.raises(
        ValueError, match=r"histogram_noise_multiplier and loss_noise_multiplier .* noise_multiplier, got"
    ):
        args.privacy_plan(dataset_size=200, num_parameters=10)


def test_the_budget_that_no_noise_meets(tmp_path: Path) -> None:
    args = private_args(tmp_path, target_epsilon=1e-9, target_delta=1e-12)
    with pytest.raises(ValueError, match="epsilon=1e-09"):
        args.privacy_plan(dataset_size=200, num_parameters=10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp16": True}, "fp16=True .* scaler skips steps depending on private data; use bf16"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True .* batch size sets the sampling rate"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "deepspeed=.* noise cannot enter exactly once"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, "version=1 cannot be honored.*fsdp_version: 2"),
        ({"fsdp": True, "fsdp_config": {"cpu_offload": True}}, "cpu_offload=True cannot be honored"),
        ({"fsdp": "shard_grad_op"}, "reshard_after_forward=False cannot be honored"),
        ({"fsdp": True, "fsdp_config": {"activation_checkpointing": True}}, "use gradient_checkpointing=True"),
        ({"fsdp": True, "trunk_cache": "auto"}, "trunk_cache=auto cannot be used with fsdp"),
        ({"fsdp": True, "bf16_full_eval": True}, "bf16_full_eval=True cannot be used with fsdp"),
        ({"include_num_input_tokens_seen": True}, "include_num_input_tokens_seen=.* tokens drawn is private"),
        ({"include_num_input_tokens_seen": "non_padding"}, "include_num_input_tokens_seen=.* tokens drawn is private"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy=sequential .* Poisson"),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy=batch_rebalance .* Poisson"),
        ({"optim": "lomo"}, "optim=.*lomo.* inside the backward pass, before the noise"),
        ({"optim": "adalomo"}, "optim=.*adalomo.* inside the backward pass"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 .* padded length of the batch"),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "gradient_checkpointing_kwargs=.* reentrant checkpointing hides",
        ),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": '{"use_reentrant": true}'},
            "gradient_checkpointing_kwargs=.* reentrant checkpointing hides",
        ),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": 1}},
            "gradient_checkpointing_kwargs=.* reentrant checkpointing hides",
        ),
        ({"debug": "underflow_overflow"}, "debug=.* prints activations of private examples"),
        ({"debug": "underflow_overflow tpu_metrics_debug"}, "debug=.* prints activations of private examples"),
        ({"skip_memory_metrics": False}, "skip_memory_metrics=False .* sizes of the private batches"),
    ],
)
def test_what_cannot_be_private_is_refused_with_the_reason(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DCSGDTrainingArguments(str(tmp_path), use_cpu=True, **changes)


def test_bf16_and_plain_checkpointing_are_accepted(tmp_path: Path) -> None:
    args = private_args(tmp_path, bf16=True, gradient_checkpointing=True)
    assert args.bf16
    assert args.gradient_checkpointing


def test_everything_else_is_as_in_transformers(tmp_path: Path) -> None:
    ours, theirs = DCSGDTrainingArguments(str(tmp_path)), TrainingArguments(str(tmp_path))
    differing = {name for name in theirs.to_dict() if theirs.to_dict()[name] != ours.to_dict()[name]}
    unset = {"per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "learning_rate"}
    assert differing - {"logging_dir"} == {*unset, "max_grad_norm"}
    assert torch.device(ours.device) == torch.device(theirs.device)
