"""What users see: the exports, the help of every option, and a docstring that tells the truth about defaults."""

import dataclasses
import re
import subprocess
import sys

import pytest
from transformers import HfArgumentParser, Trainer, TrainingArguments

import hf_dcsgd
from hf_dcsgd import DCSGDTrainer, DCSGDTrainingArguments
from hf_dcsgd.clipping import STRATEGIES

PROMISED = """DCSGDTrainer DCSGDTrainingArguments DCSGDSeq2SeqTrainer DCSGDSeq2SeqTrainingArguments GhostClipper
    PrivacyPlan ClippingThreshold NormClipping
    StrategyOption PublicNumbers SideQuery register_rule register_strategy register_accountant BudgetExhausted
    LedgerError Dense Outer OneHotRows BatchCouplingError UnsupportedModelError ParityError __version__"""


def own_fields() -> list[dataclasses.Field]:
    theirs = {field.name for field in dataclasses.fields(TrainingArguments)}
    ours = [field for field in dataclasses.fields(DCSGDTrainingArguments) if field.init]
    return [field for field in ours if field.name not in theirs]


def test_exports() -> None:
    assert set(hf_dcsgd.__all__) >= set(PROMISED.split())
    assert all(hasattr(hf_dcsgd, name) for name in hf_dcsgd.__all__)
    assert dir(hf_dcsgd) == sorted(hf_dcsgd.__all__)
    assert issubclass(DCSGDTrainer, Trainer)
    assert issubclass(DCSGDTrainingArguments, TrainingArguments)
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", hf_dcsgd.__version__)
    with pytest.raises(AttributeError, match="no attribute 'DPTrainer'"):
        _ = hf_dcsgd.DPTrainer


def test_importing_the_package_alone_loads_nothing_heavy() -> None:
    code = "import sys, hf_dcsgd; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_options_are_those_that_were_promised() -> None:
    promised = """recipe scale_free_gradient histogram_rule
        target_epsilon target_delta noise_multiplier accountant clipping clip_threshold percentile
        histogram_bins histogram_range histogram_noise_multiplier andrew_learning_rate andrew_count_noise_std du_decay
        auto_clip_gamma clipping_options trainable_layers trunk_cache
        trunk_cache_dir trunk_cache_dtype earlier_spending log_train_loss loss_clip
        loss_noise_multiplier unsafe_noise_seed privacy_unit max_rows_per_unit privacy_unit_clipping"""
    assert {field.name for field in own_fields()} == set(promised.split())
    clipping = next(field for field in own_fields() if field.name == "clipping")
    assert list(clipping.metadata["choices"]) == list(STRATEGIES)
    assert set(STRATEGIES) == {"fixed", "dc_sgd_p", "dc_sgd_e", "andrew", "du", "auto_clip"}


def test_the_help_of_every_option_is_rendered() -> None:
    shown = HfArgumentParser(DCSGDTrainingArguments).format_help()
    words = "".join(shown.split())  # argparse breaks lines, also at hyphens
    for field in [
        *own_fields(),
        *(f for f in dataclasses.fields(DCSGDTrainingArguments) if f.name == "max_grad_norm"),
    ]:
        assert f"--{field.name}" in shown
        text = field.metadata["help"]
        assert len(text) > 20
        assert text.endswith(".")
        assert "".join(text.split()).replace("%%", "%") in words, f"the help of {field.name} is not shown whole"


def test_every_strategy_is_explained() -> None:
    help_text = next(field for field in own_fields() if field.name == "clipping").metadata["help"]
    assert all(strategy in help_text for strategy in STRATEGIES)


def test_the_docstring_lists_every_changed_default_truly() -> None:
    rows = re.findall(r"^\s*\| `(\w+)`\s*\| (.+?)\s*\| (.+?)\s*\|", DCSGDTrainingArguments.__doc__ or "", re.MULTILINE)
    told = {name: (here, there) for name, here, there in rows}
    theirs = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    changed = {}
    for field in dataclasses.fields(DCSGDTrainingArguments):
        if field.name in theirs and field.default != theirs[field.name].default:
            changed[field.name] = (field.default, theirs[field.name].default)
    assert set(told) == set(changed)
    for name, defaults in changed.items():
        for text, default in zip(told[name], defaults, strict=True):
            if isinstance(default, float):
                assert float(text) == default, name
            else:
                assert text.strip('"') == str(getattr(default, "value", default)), name


def test_the_trainer_says_what_it_guarantees() -> None:
    text = DCSGDTrainer.__doc__ or ""
    assert "adding or removing one training example" in text
    assert "per_example_loss_func" in text
