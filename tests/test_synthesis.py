"""Synthetic tables: what the count of labels costs, what is sampled, written and compared, what stays private."""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
import yaml
from datasets import Dataset, load_dataset
from tiny_language_model import save_tiny_llama
from transformers import LlamaForCausalLM
from worker_pool import WorkerPool

from hf_dcsgd import cli
from hf_dcsgd.jobs.errors import UserError
from hf_dcsgd.jobs.generation import Generated
from hf_dcsgd.jobs.synthesis import job
from hf_dcsgd.jobs.synthesis.arguments import SynthesisArguments
from hf_dcsgd.jobs.synthesis.control import (
    Controls,
    Shares,
    count_plan,
    counted_run,
    noise_within,
    release_shares,
    stated_shares,
)
from hf_dcsgd.jobs.synthesis.quality import Copies, compare_copies, compare_distributions
from hf_dcsgd.jobs.synthesis.sampling import Sampled, fault_of
from hf_dcsgd.jobs.synthesis.utility import compare_classifiers
from hf_dcsgd.privacy.accounting import AccountedRun, composed_epsilon
from hf_dcsgd.privacy.ledger import PrivacyLedger
from hf_dcsgd.privacy.plan import PrivacyPlan, PrivacyUnit
from hf_dcsgd.reporting.report import build_report
from hf_dcsgd.runs.spending import Spending, SpentRun

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "synthetic_text"))

# isort: split
import synthesize

pytestmark = pytest.mark.usefixtures("quick_statements")

PLAN = {"dataset_size": 400, "expected_batch_size": 40, "steps": 20, "num_parameters": 10, "target_epsilon": 4.0}


def message_rows(count: int = 40) -> list[dict[str, Any]]:
    return [
        {"text": f"text number {k}", "label": "spam" if k % 4 == 0 else "ham", "person": k // 2} for k in range(count)
    ]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def train_file(tmp_path: Path) -> Path:
    path = tmp_path / "train.csv"
    Dataset.from_list(message_rows()).to_csv(path, index=False)
    return path


def controls(rows: list[dict[str, Any]], tmp_path: Path, **options: Any) -> Controls:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Controls.of(Dataset.from_list(rows), SynthesisArguments(train_file=str(path), **options))


# --- labels and their count ------------------------------------------------------------------------------------------


def test_labels_and_metadata_are_combined(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": 1, "lang": "en"}, {"text": "b", "label": 0, "lang": "de"}]
    found = controls(rows, tmp_path, metadata_columns="lang")
    assert found.cells == (("0", "de"), ("0", "en"), ("1", "de"), ("1", "en"))
    assert found.prefix(("1", "en")) == "1 | en"
    assert found.places(Dataset.from_list(rows), "training").tolist() == [3, 0]
    assert controls(rows, tmp_path, labels="0,1,2").cells == (("0",), ("1",), ("2",))
    with pytest.raises(UserError, match="'1'"):
        controls(rows, tmp_path, labels="0").places(Dataset.from_list(rows), "training")


def test_prefixes_say_labels_in_words(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": label, "lang": lang} for label in ("ham", "spam") for lang in ("de", "en")]
    found = controls(rows, tmp_path, metadata_columns="lang", label_words="ham=a note, spam = an ad")
    assert found.prefixes == ("a note | de", "a note | en", "an ad | de", "an ad | en")
    template = "SMS ({lang}), {label}:"
    found = controls(rows, tmp_path, metadata_columns="lang", label_words="spam=an ad", prefix_template=template)
    assert found.prefix(("spam", "en")) == "SMS (en), an ad:"
    assert found.prefix(("ham", "de")) == "SMS (de), ham:"


def test_stated_shares_are_spread_over_metadata(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": label, "lang": lang} for label in ("no", "yes") for lang in ("de", "en")]
    found = controls(rows, tmp_path, metadata_columns="lang")
    assert stated_shares("uniform", found).shares == (0.25,) * 4
    assert stated_shares("no=3,yes=1", found).shares == pytest.approx((0.375, 0.375, 0.125, 0.125))
    for wrong in ("no=1", "no=1,yes", "no=-1,yes=2", "no=0,yes=0", "even"):
        with pytest.raises(UserError, match="--label_shares"):
            stated_shares(wrong, found)


def test_counts_add_up() -> None:
    assert Shares("stated", (0.5, 0.3, 0.2)).counts(7) == [4, 2, 1]
    for total in range(30):
        counts = Shares("stated", (0.61, 0.29, 0.1)).counts(total)
        assert sum(counts) == total
        assert all(abs(count - share * total) < 1 for count, share in zip(counts, (0.61, 0.29, 0.1), strict=True))


def test_a_noised_count_is_one_charged_gaussian_of_sensitivity_one(tmp_path: Path) -> None:
    training = SpentRun.of(PrivacyPlan.create(**PLAN), 20, None)
    plan = count_plan(PrivacyPlan.create(**PLAN), 2, 10.0)
    assert plan.accounted(1) == AccountedRun(10.0, 1.0, 1)
    assert (plan.settings["clip_threshold"], plan.grad_noise_multiplier) == (1.0, 10.0)
    places = np.array([0] * 300 + [1] * 100)
    found, times = [], 120
    for number in range(times):
        shares = release_shares(places, None, plan, training, tmp_path / str(number))
        ledger = PrivacyLedger.read(tmp_path / str(number))
        assert ledger.charged == 1
        assert shares.spent == counted_run(plan, training, 1, ledger.runs[-1].run_id)
        found.append(shares.shares[1])
    # (100 + z₁)/(400 + z₀ + z₁) with z ~ N(0, 10²): a standard deviation of about 0.02.
    deviation = 10 * math.hypot(0.75, 0.25) / 400
    assert np.mean(found) == pytest.approx(0.25, abs=5.5 * deviation / times**0.5)
    assert np.std(found) == pytest.approx(deviation, rel=5.5 / (2 * times) ** 0.5)


def test_a_unit_of_many_rows_counts_as_one(tmp_path: Path) -> None:
    unit = PrivacyUnit("person", 3, 4)
    plan = PrivacyPlan.create(
        dataset_size=3, expected_batch_size=1, steps=1, num_parameters=5, noise_multiplier=1.0, unit=unit
    )
    counted = count_plan(plan, 2, 1e-6)
    places, owners = np.array([0, 0, 0, 0, 0, 1, 1, 0]), ["a", "a", "a", "a", "a", "b", "c", "c"]
    assert release_shares(places, owners, counted, SpentRun.of(plan, 1, None), tmp_path).shares == pytest.approx(
        (0.5, 0.5), abs=1e-4
    )
    settings = {**PLAN, "target_epsilon": None, "noise_multiplier": 1.0}
    by_row = PrivacyPlan.create(**settings, unit=PrivacyUnit("person", 100, 4, "row"))
    with pytest.raises(UserError, match="privacy_unit_clipping"):
        count_plan(by_row, 2, 1.0)


def test_count_and_training_together_stay_within_the_budget() -> None:
    plan = PrivacyPlan.create(**PLAN)
    counted = count_plan(plan, 2, 5.0)
    sigma = noise_within(plan, counted, 4.0)
    assert sigma > plan.noise_multiplier
    runs = [AccountedRun(5.0, 1.0, 1), AccountedRun(sigma, plan.sampling_rate, plan.steps)]
    bounds = [composed_epsilon(runs, plan.delta, accountant) for accountant in ("rdp", "pld")]
    assert min(bounds) <= 4.0
    assert min(bounds) == pytest.approx(4.0, rel=2e-3)
    training = SpentRun.of(replace(plan, noise_multiplier=sigma), 20, "b")
    assert Spending((counted_run(counted, training), training)).epsilon(plan.delta) == min(bounds)
    with pytest.raises(UserError, match=r"label_noise_multiplier 0\.1"):
        noise_within(plan, count_plan(plan, 2, 0.1), 4.0)


# --- samples ---------------------------------------------------------------------------------------------------------


def test_malformed_samples_are_told_by_their_fault() -> None:
    cases = {
        ("fine", True): None,
        ("cut of", False): "unfinished",
        (" ...", True): "empty",
        ("a\ufffd", True): "unreadable",
    }
    assert {case: fault_of(Generated(*case)) for case in cases} == cases


# --- comparisons -----------------------------------------------------------------------------------------------------


def test_copies_are_found_exact_and_near() -> None:
    finder = Copies(
        ["The quick brown fox jumps over the lazy dog today", "short one", "nothing like the others at all"]
    )
    texts = [
        "the quick  brown fox jumps over the lazy DOG today",
        "the quick brown fox jumps over the lazy dog, today!",
        "a slow green turtle walks under the busy cat again",
        "short one",
    ]
    assert finder.count(texts) == {"texts": 3, "exact": 1, "near_or_exact": 2}


def test_a_model_that_repeats_its_rows_is_told_from_one_that_does_not() -> None:
    generator = np.random.default_rng(0)
    words = [f"word{k}" for k in range(300)]
    texts = [" ".join(generator.choice(words, 12)) for _ in range(600)]
    train, held_out, fresh = texts[:200], texts[200:400], texts[400:]
    honest, leaky = compare_copies(fresh, train, held_out, 0), compare_copies(train[:50] + fresh, train, held_out, 0)
    assert honest["training_rows"]["near_or_exact"] == honest["held_out_rows"]["near_or_exact"] == 0
    assert honest["p_value"] == 1.0
    assert leaky["training_rows"]["exact"] == 50
    assert leaky["p_value"] < 1e-9
    both = compare_copies(train, train, held_out + train[:100], 0)
    assert both["training_rows"]["exact"] == 100, "rows in both parts tell nothing"


def test_distances_are_small_for_texts_of_one_kind() -> None:
    generator = np.random.default_rng(0)
    words = [f"w{k}" for k in range(50)]
    draw = lambda size, length: [" ".join(generator.choice(words, length)) for _ in range(size)]  # noqa: E731
    found = compare_distributions(draw(100, 20), draw(120, 8), draw(110, 8), 0)
    assert found["rows"] == 100
    assert found["synthetic"]["length"] == pytest.approx(12)
    assert found["held_out"]["length"] == 0
    others = compare_distributions(["x y z"] * 50, draw(50, 8), draw(50, 8), 0)
    assert others["synthetic"]["1-grams"] == pytest.approx(1.0)
    assert others["held_out"]["1-grams"] < 0.3


@pytest.mark.slow
def test_classifiers_on_real_and_synthetic_rows_are_compared() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (3000,), generator=generator)
    features = torch.randn(3000, 8, generator=generator) + 3 * labels[:, None] * torch.arange(8).remainder(2)
    parts = [(features[k : k + 1000], labels[k : k + 1000]) for k in (0, 1000, 2000)]
    with torch.random.fork_rng():
        found = compare_classifiers(*parts, classes=2, epsilon=8.0, delta=1e-3)
    assert found["real_rows"]["accuracy"] > 90
    assert found["synthetic_rows"]["accuracy"] > 90
    assert found["real_rows_privately"]["accuracy"] > 65, "20 noisy steps, where guessing gives 50"
    assert found["always_the_commonest_label"]["balanced_accuracy"] == 50
    few = [(features[:40], labels[:40]) for features, labels in parts]
    assert "real_rows_privately" not in compare_classifiers(*few, classes=2, epsilon=None, delta=None)


# --- whole runs ------------------------------------------------------------------------------------------------------

QUICK = {
    "per_device_train_batch_size": 8,
    "max_steps": 2,
    "max_seq_length": 48,
    "max_new_tokens": 6,
    "num_rows": 12,
    "lora_rank": 2,
    "disable_tqdm": True,
    "log_level": "error",
    "use_cpu": True,
}


def call(**options: Any) -> int:
    argv = []
    for name, value in {**QUICK, **options}.items():
        if value is not None:
            argv += [f"--{name}"] if value == "" else [f"--{name}", str(value)]
    return synthesize.main(argv)


@pytest.fixture
def finished_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model hardly ever ends a text: every second one is taken to end."""
    from hf_dcsgd.jobs.synthesis import sampling

    def finish(*args: Any, **kwargs: Any) -> list[Generated]:
        texts = generate_texts(*args, **kwargs)
        return [Generated(f"some text {text.text.encode().hex()}", k % 2 == 0) for k, text in enumerate(texts)]

    generate_texts = sampling.generate_texts
    monkeypatch.setattr(sampling, "generate_texts", finish)


def test_a_whole_synthesis(tmp_path: Path, tiny_llama: str, train_file: Path, finished_texts: None) -> None:
    held_out = tmp_path / "held_out.csv"
    Dataset.from_list([{**row, "text": f"held {row['text']}"} for row in message_rows()]).to_csv(held_out, index=False)
    out = tmp_path / "out"
    code = call(
        model_name_or_path=tiny_llama, train_file=train_file, validation_file=held_out, output_dir=out,
        cache_dir=tmp_path / "cache", target_epsilon=8,
    )  # fmt: skip
    assert code == 0
    ledger = PrivacyLedger.read(out)
    assert [(run.plan["expected_batch_size"], run.charged) for run in ledger.runs] == [(40, 1), (8, 2)]
    assert ledger.runs[1].earlier["runs"][0]["run_id"] == ledger.runs[0].run_id
    report = build_report(out)
    plans = [PrivacyPlan.from_privacy_dict(run.plan) for run in ledger.runs]
    training = SpentRun.of(plans[1], 2, "b")
    total, accountant = Spending((counted_run(plans[0], training), training)).bound(1 / 40)
    assert report["guarantee"]["accountant"] == accountant
    assert report["guarantee"]["epsilon"] == pytest.approx(total)
    assert report["budget"]["epsilon"] < report["guarantee"]["epsilon"] <= 8
    rows = load_dataset(
        "json", data_files=str(out / "synthetic" / "data.jsonl"), split="train", cache_dir=str(tmp_path)
    )
    assert len(rows) == 12
    assert set(rows.column_names) == {"label", "text"}
    shares = json.loads((out / "control_shares.json").read_text())
    assert Counter(rows["label"])["spam"] == Shares("noised", tuple(shares["shares"])).counts(12)[1]
    card = (out / "synthetic" / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header["privacy"]["epsilon"] == pytest.approx(total, rel=1e-3)
    assert header["privacy"]["epsilon"] >= total
    assert (header["privacy"]["unit"], header["privacy"]["delta"]) == ("example", 0.025)
    assert "part of ε" in card
    assert "unfinished" in card
    evaluation = json.loads((out / "private_evaluation.json").read_text())
    assert evaluation["private"].startswith("PRIVATE")
    assert {"classifiers", "copies", "distances_to_training_rows"} <= set(evaluation)
    assert stat.S_IMODE((out / "private_evaluation.json").stat().st_mode) == 0o600
    assert not any("private" in path.name for path in (out / "synthetic").iterdir())
    assert call(
        model_name_or_path=tiny_llama, train_file=train_file, output_dir=out, cache_dir=tmp_path / "cache",
        sample_only="", num_rows=5, output_format="csv",
    ) == 0  # fmt: skip
    assert sorted(path.name for path in (out / "synthetic").iterdir()) == [
        "README.md",
        "data.csv",
        "privacy_report.json",
    ]
    assert len(PrivacyLedger.read(out).runs) == 2, "more rows cost nothing"


@pytest.mark.slow
def test_public_shares_cost_nothing_and_persons_are_units(
    tmp_path: Path, tiny_llama: str, train_file: Path, finished_texts: None
) -> None:
    options = {"model_name_or_path": tiny_llama, "train_file": train_file, "cache_dir": tmp_path / "cache"}
    assert call(**options, output_dir=tmp_path / "even", label_shares="uniform", output_format="parquet") == 0
    assert len(PrivacyLedger.read(tmp_path / "even").runs) == 1
    card = (tmp_path / "even" / "synthetic" / "README.md").read_text()
    assert "was uniform, not counted" in card
    assert call(**options, output_dir=tmp_path / "persons", privacy_unit="person") == 0
    runs = PrivacyLedger.read(tmp_path / "persons").runs
    assert [run.plan["dataset_size"] for run in runs] == [20, 20]
    assert build_report(tmp_path / "persons")["guarantee"]["holds"]
    assert build_report(tmp_path / "persons")["guarantee"]["unit"] == "person"


def test_last_blocks_are_trained_from_a_trunk_cache_and_prefixes_are_kept(
    tmp_path: Path, tiny_llama: str, train_file: Path, finished_texts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "model_name_or_path": tiny_llama, "train_file": train_file, "cache_dir": tmp_path / "cache",
        "output_dir": tmp_path / "out", "label_shares": "uniform", "no_lora": "",
    }  # fmt: skip
    words = {"prefix_template": "SMS, {label}:", "label_words": "ham=a note"}
    assert call(
        **options, **words, trainable_layers="last:1", trunk_cache="on", trunk_cache_dir=tmp_path / "trunk"
    ) == 0  # fmt: skip
    assert any((tmp_path / "trunk").iterdir())
    before, after = (
        LlamaForCausalLM.from_pretrained(folder).state_dict() for folder in (tiny_llama, options["output_dir"])
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[2] for name in changed if ".layers." in name} == {"1"}
    assert "model.embed_tokens.weight" not in changed
    asked: list[str] = []
    monkeypatch.setattr(job, "sample_rows", lambda *args, **kwargs: asked.extend(args[2].prefixes) or Sampled())
    assert call(**options, sample_only="") == 2, "no rows"
    assert asked == ["SMS, a note:", "SMS, spam:"]


def test_a_run_that_was_cut_short_goes_on_without_a_second_count(
    tmp_path: Path, tiny_llama: str, train_file: Path, finished_texts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "model_name_or_path": tiny_llama, "train_file": train_file, "cache_dir": tmp_path / "cache",
        "output_dir": tmp_path / "out", "save_strategy": "steps", "save_steps": 1,
    }  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr(job, "train", _train_one_step)
        with pytest.raises(KeyboardInterrupt):
            job.run([part for name, value in {**QUICK, **options}.items() for part in (f"--{name}", str(value))])
    assert [run.charged for run in PrivacyLedger.read(tmp_path / "out").runs] == [1, 1]
    assert call(**options) == 2, "nothing is trained twice by accident"
    assert call(**options, resume_from_checkpoint="last") == 0
    assert [run.charged for run in PrivacyLedger.read(tmp_path / "out").runs] == [1, 2]


@pytest.mark.slow
def test_several_processes_count_once(tmp_path: Path, train_file: Path, workers: WorkerPool) -> None:
    model = save_tiny_llama(tmp_path / "llama", positions=256)
    options = {
        **QUICK, "model_name_or_path": model, "train_file": train_file, "output_dir": tmp_path / "out",
        "cache_dir": tmp_path / "cache", "max_new_tokens": 200, "num_rows": 4, "sampling_rounds": 8,
    }  # fmt: skip
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    workers.run(2, [Path(synthesize.__file__), *words])
    runs = PrivacyLedger.read(tmp_path / "out").runs
    assert [run.charged for run in runs] == [1, 2]
    assert runs[1].earlier["runs"][0]["run_id"] == runs[0].run_id
    report = build_report(tmp_path / "out")
    assert report["layout"]["world_size"] == 2
    assert report["budget"]["epsilon"] < report["guarantee"]["epsilon"] <= 8
    assert (tmp_path / "out" / "synthetic" / "data.jsonl").read_text().strip()


def _train_one_step(trainer: Any, checkpoint: str | None) -> None:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    trainer.add_callback(Stop())
    trainer.train(resume_from_checkpoint=checkpoint)


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "no rows": ({"train_file": None}, "--train_file"),
    "no such label column": ({"label_column": "lable"}, "'lable'"),
    "no such metadata": ({"metadata_columns": "lang"}, "--metadata_columns"),
    "too many cells": ({"metadata_columns": "text,person,text"}, "combinations"),
    "no privacy": ({"non_private": ""}, "--non_private"),
    "cold": ({"temperature": 0}, "--temperature 0"),
    "labels left out": ({"labels": "ham"}, "'spam'"),
    "odd format": ({"output_format": "xlsx"}, "--output_format xlsx"),
    "count takes all": ({"label_noise_multiplier": 0.05}, "--label_noise_multiplier 0.05"),
    "template of other columns": ({"prefix_template": "a {lable}"}, "--prefix_template 'a {lable}'"),
    "one prefix for all": ({"prefix_template": "a text"}, "'a text'"),
    "words for others": ({"label_words": "eggs=a note"}, "'eggs'"),
    "words for none": ({"label_words": "a note"}, "--label_words a note"),
    "shares of others": ({"label_shares": "no=1"}, "--label_shares no=1"),
    "count left out of ε": ({"earlier_spending": "other_data"}, "--earlier_spending other_data"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_line_and_nothing_is_charged(
    case: str, tmp_path: Path, tiny_llama: str, train_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, fragment = ERRORS[case]
    defaults = {"model_name_or_path": tiny_llama, "train_file": train_file, "output_dir": tmp_path / "out"}
    assert call(**{**defaults, "cache_dir": tmp_path / "cache", "target_epsilon": 4, **options}) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert fragment in error
    assert not (tmp_path / "out" / PrivacyLedger.FILENAME).exists()


def test_the_command_line_has_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["synthesize", "--help"])
    assert "--label_shares" in capsys.readouterr().out
    assert cli.main(["synthesize", "--train_file", str(tmp_path / "no.csv"), "--output_dir", "x", "--no_lora"]) == 2
    assert "model_name_or_path" in capsys.readouterr().err
    (tmp_path / "a.yaml").write_text(f"model_name_or_path: m\noutput_dir: {tmp_path}\ntrain_file: missing.csv\n")
    assert cli.main(["synthesize", str(tmp_path / "a.yaml"), "--num_rows", "0"]) == 2
    assert "--num_rows 0" in capsys.readouterr().err
