"""What was spent travels with the weights: no way back to ε = 0 by a second trainer, a saved model or an adapter."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import peft
import pytest
import torch
import transformers as hf
from dp_accounting import pld, rdp
from simulated_runs import plan_of, simulate
from tiny_tasks import (
    BATCH,
    SIGMA,
    FeatureClassifier,
    N,
    feature_classifier,
    feature_trainer,
    text_trainer,
    tiny_bert,
)
from torch import nn
from worker_pool import WorkerPool

from hf_dcsgd import DCSGDTrainer
from hf_dcsgd.privacy.accounting import AccountedRun, composed_epsilon
from hf_dcsgd.privacy.ledger import LedgerError, PrivacyLedger
from hf_dcsgd.reporting.report import build_report, format_spending, write_report
from hf_dcsgd.runs.spending import Spending, SpendingRecorder, SpentRun, earlier_spending, earlier_statement
from hf_dcsgd.runs.trace import read_trace

pytestmark = pytest.mark.usefixtures("no_report_page")

STEPS = 4  # of one run of a tiny trainer
TWICE = composed_epsilon([AccountedRun(SIGMA, BATCH / N, STEPS)] * 2, 1 / N)


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has trained nothing yet."""
    monkeypatch.setenv("HF_DCSGD_HOME", str(tmp_path / "registry"))
    return tmp_path / "registry"


def on_another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_DCSGD_HOME", str(tmp_path / "another registry"))


def trained(trainer: DCSGDTrainer) -> DCSGDTrainer:
    trainer.train()
    return trainer


def charged(model: nn.Module) -> list[int]:
    found = earlier_spending(model)
    return [] if found is None else [run.charged for run in found.runs]


def with_adapter(base: nn.Module) -> Any:
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))


# --- a second run on the same weights --------------------------------------------------------------------------------


def test_a_cell_that_is_run_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A new trainer on the same object, in another directory."""
    model = tiny_bert()
    first = trained(text_trainer(tmp_path / "first", model))
    assert first.privacy_report()["earlier_spending"] is None
    capsys.readouterr()
    second = trained(text_trainer(tmp_path / "second", model))
    assert f"if the data are the same: ε ≤ {TWICE:.4g}" in capsys.readouterr().out
    report = second.privacy_report()
    assert report["guarantee"]["epsilon"] == pytest.approx(TWICE)
    assert report["budget"]["epsilon"] == second.epsilon() < TWICE
    assert report["earlier_spending"] is not None
    assert [run["charged"] for run in report["earlier_spending"]["runs"]] == [STEPS]
    assert "8 charged steps" in report["guarantee"]["sentence"]
    assert "together with what these weights had spent before" in format_spending(report)
    assert charged(model) == [STEPS, STEPS]
    third = trained(text_trainer(tmp_path / "third", model))
    assert third.privacy_report()["guarantee"]["epsilon"] > TWICE


def test_a_second_run_in_the_same_directory_is_counted_once(tmp_path: Path) -> None:
    model = feature_classifier()
    trained(feature_trainer(tmp_path, model))
    report = trained(feature_trainer(tmp_path, model)).privacy_report()
    assert report["guarantee"]["epsilon"] == pytest.approx(TWICE)
    assert report["earlier_runs"] is None
    # A fresh model there: the runs are neighbors, but not of its weights.
    report = trained(feature_trainer(tmp_path)).privacy_report()
    assert report["earlier_spending"] is None
    assert report["guarantee"]["epsilon"] == report["budget"]["epsilon"]
    assert report["earlier_runs"] is not None
    assert len(report["earlier_runs"]["runs"]) == 2


def test_it_is_dismissed_by_name_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = feature_classifier()
    trained(feature_trainer(tmp_path / "first", model))
    trainer = feature_trainer(tmp_path / "second", model, earlier_spending="other_data")
    trainer.train()
    assert "earlier_spending='other_data'" in capsys.readouterr().out
    report = trainer.privacy_report()
    assert report["guarantee"]["epsilon"] == report["budget"]["epsilon"]
    assert report["earlier_spending"] is not None
    assert report["earlier_spending"]["dismissed"] == "other_data"
    assert "earlier_spending=other_data" in report["guarantee"]["sentence"]
    assert "earlier_spending=other_data" in format_spending(report)
    trainer.create_model_card()
    card = (tmp_path / "second" / "README.md").read_text()
    assert "earlier_spending: other_data" in card
    assert 'earlier_spending="other_data"' in card
    # It was said of one run, and travels on: the next one may use the data of either.
    assert charged(model) == [STEPS, STEPS]
    with pytest.raises(ValueError, match="earlier_spending"):
        feature_trainer(tmp_path, model, earlier_spending="none")


def test_a_run_without_a_guarantee_leaves_none_to_the_next(tmp_path: Path) -> None:
    model = feature_classifier()
    trained(feature_trainer(tmp_path / "first", model, log_train_loss="raw"))
    trainer = trained(feature_trainer(tmp_path / "second", model))
    report = trainer.privacy_report()
    assert not report["guarantee"]["holds"]
    assert [opt_out["name"] for opt_out in report["guarantee"]["opt_outs"]] == ["earlier_spending"]
    assert "raw_train_loss" in report["guarantee"]["opt_outs"][0]["text"]
    dismissed = trained(feature_trainer(tmp_path / "third", model, earlier_spending="other_data"))
    assert dismissed.privacy_report()["guarantee"]["holds"]


def test_a_run_that_breaks_off_has_spent_too(tmp_path: Path) -> None:
    class Interrupt(hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            if state.global_step == 2:
                raise KeyboardInterrupt

    model = feature_classifier()
    with pytest.raises(KeyboardInterrupt):
        feature_trainer(tmp_path, model, trainer_options={"callbacks": [Interrupt()]}).train()
    assert charged(model) == [2]


def test_a_resumed_run_does_not_count_itself(tmp_path: Path) -> None:
    model = feature_classifier()
    trained(feature_trainer(tmp_path / "before", model))
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}

    class Stop(hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            control.should_training_stop = state.global_step == 2

    trained_half = feature_trainer(tmp_path / "run", model, trainer_options={"callbacks": [Stop()]}, **settings)
    trained_half.train()
    resumed = feature_trainer(tmp_path / "run", **settings)
    resumed.train(resume_from_checkpoint=True)
    report = resumed.privacy_report()
    assert report["steps"]["charged"] == STEPS
    assert report["guarantee"]["epsilon"] == pytest.approx(TWICE)
    assert charged(resumed.model) == [STEPS, STEPS]


# --- saved, loaded, copied -------------------------------------------------------------------------------------------


def test_a_saved_model_tells_on_any_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained(text_trainer(tmp_path / "run", save_strategy="steps", save_steps=3))
    trainer.save_model(str(tmp_path / "saved"))
    trainer.model.save_pretrained(tmp_path / "by hand")
    on_another_machine(monkeypatch, tmp_path)
    for folder, steps in (("saved", STEPS), ("by hand", STEPS), ("run/checkpoint-3", 3)):
        loaded = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / folder)
        assert charged(loaded) == [steps], folder
    assert charged(hf.AutoModel.from_pretrained(tmp_path / "saved")) == [STEPS]
    assert charged(tiny_bert()) == []
    beside = json.loads((tmp_path / "saved" / "privacy_spent.json").read_text())
    assert beside["runs"][0]["charged"] == STEPS
    run = PrivacyLedger.read(tmp_path / "run").runs[-1]
    assert beside["runs"][0]["run_id"] == run.run_id
    report = trained(
        text_trainer(tmp_path / "again", hf.BertForSequenceClassification.from_pretrained(tmp_path / "saved"))
    ).privacy_report()
    assert report["guarantee"]["epsilon"] == pytest.approx(TWICE)


def test_an_adapter_that_is_loaded_again(tmp_path: Path) -> None:
    tiny_bert().save_pretrained(tmp_path / "base")

    def base() -> Any:
        return hf.BertForSequenceClassification.from_pretrained(tmp_path / "base")

    trainer = trained(text_trainer(tmp_path / "run", with_adapter(base()), trainable_layers=None))
    trainer.save_model(str(tmp_path / "adapter"))
    assert charged(base()) == []
    assert charged(with_adapter(base())) == []
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter", is_trainable=True)
    assert charged(loaded) == [STEPS]
    renamed = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter", adapter_name="other")
    assert charged(renamed) == [STEPS]
    report = trained(text_trainer(tmp_path / "again", loaded, trainable_layers=None)).privacy_report()
    assert report["guarantee"]["epsilon"] == pytest.approx(TWICE)
    # Merged, the tensors are others, but the configuration has it.
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert charged(hf.BertForSequenceClassification.from_pretrained(tmp_path / "merged")) == [STEPS, STEPS]


def test_plain_modules_are_known_by_their_tensors(tmp_path: Path) -> None:
    model = feature_classifier()
    trained(feature_trainer(tmp_path / "run", model)).save_model(str(tmp_path / "saved"))
    loaded = FeatureClassifier()
    loaded.load_state_dict(model.state_dict())
    assert charged(loaded) == [STEPS]
    assert charged(copy.deepcopy(model)) == [STEPS]
    assert charged(nn.Sequential(nn.Linear(2, 6), model.hidden)) == [STEPS]
    assert charged(feature_classifier()) == []
    with torch.no_grad():
        loaded.hidden.weight += 1e-3
    assert charged(loaded) == [STEPS]  # by the other layer


def test_another_process_knows_too(tmp_path: Path, workers: WorkerPool) -> None:
    model = feature_classifier()
    trained(feature_trainer(tmp_path / "run", model)).save_model(str(tmp_path / "saved"))
    script = tmp_path / "another.py"
    script.write_text(
        "import sys; from safetensors.torch import load_file; from tiny_tasks import FeatureClassifier\n"
        "from hf_dcsgd.runs.spending import earlier_spending\n"
        "model = FeatureClassifier(); model.load_state_dict(load_file(sys.argv[1]))\n"
        "print([run.charged for run in earlier_spending(model).runs])"
    )
    weights = tmp_path / "saved" / "model.safetensors"
    ended = workers.run(1, [script, weights], HF_DCSGD_HOME=os.environ["HF_DCSGD_HOME"])
    assert ended.output.strip() == "[4]"


# --- what is not taken for spending ----------------------------------------------------------------------------------


def test_tensors_that_did_not_move_are_not_remembered(tmp_path: Path) -> None:
    """Or a warm-up whose first rate is 0 would brand a public model for good."""
    model = feature_classifier()
    recorder = SpendingRecorder(model, plan_of(), "a" * 32, None)
    recorder.record(1)
    assert charged(feature_classifier()) == []
    with torch.no_grad():
        model.hidden.weight += 1
    recorder.record(2)
    assert charged(model) == [2]
    assert charged(feature_classifier()) == []


def test_frozen_parts_are_not_remembered(tmp_path: Path) -> None:
    model = tiny_bert()
    before = copy.deepcopy(model.state_dict())
    trained(text_trainer(tmp_path, model, trainable_layers="head"))
    fresh = tiny_bert()
    fresh.load_state_dict(before)
    assert charged(fresh) == []


def test_nothing_is_recorded_before_the_first_step(tmp_path: Path, own_registry: Path) -> None:
    trainer = text_trainer(tmp_path / "run")
    trainer.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / "privacy_spent.json").exists()
    assert not hasattr(trainer.model.config, "privacy_spent")
    assert not (own_registry / "trained_weights.jsonl").exists()


# --- the registry ----------------------------------------------------------------------------------------------------


def test_the_registry_is_for_its_owner_alone_and_holds_no_data(tmp_path: Path, own_registry: Path) -> None:
    trained(feature_trainer(tmp_path / "run"))
    path = own_registry / "trained_weights.jsonl"
    assert path.stat().st_mode & 0o777 == 0o600
    (line,) = path.read_text().splitlines()
    entry = json.loads(line)
    assert entry.keys() == {"runs", "tensors"}
    assert all(len(digest) == 16 for digest in entry["tensors"])


def test_broken_lines_of_the_registry_are_passed_over(tmp_path: Path, own_registry: Path) -> None:
    model = feature_classifier()
    trained(feature_trainer(tmp_path / "run", model))
    path = own_registry / "trained_weights.jsonl"
    path.write_text('{"runs": 3}\n[]\nnot json\n{"runs": [{}], "tensors": []}\n' + path.read_text() + '{"runs": [')
    assert charged(copy.deepcopy(model)) == [STEPS]


def test_without_a_registry_the_process_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_DCSGD_HOME", os.devnull)
    monkeypatch.setattr("hf_dcsgd.runs.spending._remembered", {})
    model = feature_classifier()
    trained(feature_trainer(tmp_path / "run", model))
    assert "remembered in this process only" in caplog.text
    assert charged(copy.deepcopy(model)) == [STEPS]


@pytest.mark.parametrize(
    "values",
    [
        "yes",
        [3],
        [{"charged": 4}],
        [{**Spending((SpentRun.of(plan_of(), 4, "x"),)).to_list()[0], "noise_multiplier": -1}],
        [{**Spending((SpentRun.of(plan_of(), 4, "x"),)).to_list()[0], "charged": "4"}],
        [{**Spending((SpentRun.of(plan_of(), 4, "x"),)).to_list()[0], "run_id": ["x"]}],
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused(values: Any) -> None:
    model = tiny_bert()
    model.config.privacy_spent = values
    with pytest.raises(ValueError, match=r"model\.config\.privacy_spent"):
        earlier_spending(model)


# --- the sums --------------------------------------------------------------------------------------------------------


def test_of_a_run_in_both_the_later_state_counts() -> None:
    early, late = SpentRun.of(plan_of(), 2, "a"), SpentRun.of(plan_of(), 5, "a")
    other = SpentRun.of(plan_of(), 1, "b")
    merged = Spending((late,)) | Spending((early, other))
    assert merged == Spending((late, other)) == Spending((early,)) | merged
    assert merged.epsilon(1 / N) == composed_epsilon(
        [AccountedRun(SIGMA, BATCH / N, steps) for steps in (5, 1)], 1 / N
    )
    assert Spending.from_list(json.loads(json.dumps(merged.to_list()))) == merged
    # Runs without a name are never taken for one another.
    unnamed = SpentRun.of(plan_of(), 2, None)
    assert len((Spending((unnamed,)) | Spending((SpentRun.of(plan_of(), 2, None),))).runs) == 2


def settled_pair() -> tuple[SpentRun, SpentRun]:
    """A count of labels, and the training that was settled before it."""
    training = SpentRun("b", "dc_sgd_p", 0.8, 0.05, 7, 1e-4, "pld", planned=7)
    return SpentRun("a", "fixed", 10.0, 1.0, 1, 1e-4, "pld", planned=1, settles_next=training.whole), training


def test_runs_settled_at_the_start_cost_the_smaller_of_two_bounds() -> None:
    """RDP and PLD of dp_accounting itself, for a count of labels and the training after it."""
    count, training = settled_pair()
    accountants = {"rdp": rdp.RdpAccountant(), "pld": pld.PLDAccountant(value_discretization_interval=1e-4)}
    for accountant in accountants.values():
        accountant.compose(dp_accounting.GaussianDpEvent(10.0))
        accountant.compose(dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(0.8)), 7)
    expected = {name: accountant.get_epsilon(1e-4) for name, accountant in accountants.items()}
    assert expected["pld"] < 0.9 * expected["rdp"]
    epsilon, accountant = Spending((count, training)).bound(1e-4)
    assert (epsilon, accountant) == (pytest.approx(expected["pld"], rel=1e-3), "pld")
    read = Spending.from_list(json.loads(json.dumps(Spending((count, training)).to_list())))
    assert read.bound(1e-4) == (epsilon, accountant)
    # A run that may have been chosen by what the others have shown.
    for runs in (
        (training, count),
        (count, training, replace(training, run_id="c")),
        (replace(count, settles_next=None), training),
        # Going on for longer than was settled, or than is known.
        (count, replace(training, charged=8)),
        (count, replace(training, planned=None)),
        (replace(count, planned=None), training),
    ):
        assert Spending(runs).bound(1e-4)[1] == "rdp"
    assert Spending((training, count)).epsilon(1e-4) == pytest.approx(expected["rdp"], rel=1e-2)
    # Where PLD has no bound, as for a δ below what it cuts off, RDP has.
    assert Spending((count, training)).bound(1e-300)[1] == "rdp"


@pytest.mark.parametrize(
    "anew",
    [
        {"noise_multiplier": 0.9},
        {"noise_multiplier": 0.7},
        {"sampling_rate": 0.04},
        {"sampling_rate": 0.06},
        {"charged": 3, "planned": 3},
        {"charged": 3, "planned": 8},
    ],
)
def test_a_training_set_up_after_its_counts_were_read_is_added_by_rdp(anew: dict[str, Any]) -> None:
    """Also one of fewer steps, which looks like the settled one before its end."""
    count, training = settled_pair()
    other = replace(training, **anew)
    found = Spending((count, other)).bound(1e-4)
    assert found == (composed_epsilon([count.accounted, other.accounted], 1e-4, "rdp"), "rdp")


def test_a_settled_training_that_ends_early_costs_what_was_settled_by_pld() -> None:
    """The number of steps may follow from what was shown: PLD of fewer steps than were settled would be too small."""
    count, training = settled_pair()
    for charged in range(8):
        epsilon, accountant = Spending((count, replace(training, charged=charged))).bound(1e-4)
        taken = [count.accounted, training.accounted._replace(steps=charged)]
        expected = {
            "rdp": composed_epsilon(taken, 1e-4, "rdp"),
            "pld": composed_epsilon([count.accounted, training.accounted], 1e-4, "pld"),
        }
        assert (epsilon, accountant) == min((value, name) for name, value in expected.items())


def test_runs_on_groups_of_rows_are_added_up_one_by_one() -> None:
    """Of groups PLD alone knows the cost, and its distributions do not add up for runs that others have led to."""
    one = SpentRun("a", "fixed", 1.5, 0.1, 4, 1e-4, "pld", unit="who", group_size=2, planned=4)
    other = replace(one, run_id="b", group_size=1)
    runs, coarse = [one.accounted, other.accounted], 100.0
    added = sum(composed_epsilon([run], 1e-4 / 2, "pld", coarse) for run in runs)
    assert Spending((one, other)).bound(1e-4, coarse) == (added, "pld")
    assert added > composed_epsilon(runs, 1e-4, "pld", coarse)
    assert Spending((one,)).bound(1e-4, coarse) == (composed_epsilon(runs[:1], 1e-4, "pld", coarse), "pld")


def test_the_page_lists_what_was_spent_before(tmp_path: Path) -> None:
    simulate(tmp_path / "a")
    earlier = {"runs": Spending((SpentRun.of(plan_of(clipping="du"), 3, "b" * 32),)).to_list(), "dismissed": None}
    for dismissed in (None, "other_data"):
        simulate(tmp_path / str(dismissed), earlier={**earlier, "dismissed": dismissed})
        report = build_report(tmp_path / str(dismissed))
        page = write_report(report, read_trace(tmp_path / str(dismissed)), tmp_path / str(dismissed)).read_text()
        assert "Spent on these weights before" in page
        assert "du, 3 steps charged" in page
        assert ("earlier_spending=other_data" in page) == (dismissed is not None)
        assert ("this run alone" in page) == (dismissed is None)


# --- ledgers put back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("registry", ["same machine", "another machine"])
def test_a_ledger_put_back_is_refused_when_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: str
) -> None:
    """Copied aside at a checkpoint, trained on, copied back, resumed from that checkpoint."""
    run_dir = tmp_path / "run"

    class CopyAside(hf.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            if state.global_step == 2:
                (tmp_path / "aside").write_bytes((run_dir / PrivacyLedger.FILENAME).read_bytes())

    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    trained(feature_trainer(run_dir, trainer_options={"callbacks": [CopyAside()]}, **settings))
    (run_dir / PrivacyLedger.FILENAME).write_bytes((tmp_path / "aside").read_bytes())
    if registry == "another machine":
        on_another_machine(monkeypatch, tmp_path)
    with pytest.raises(LedgerError, match="put back"):
        feature_trainer(run_dir, **settings).train(resume_from_checkpoint=str(run_dir / "checkpoint-2"))


def test_a_statement_is_for_trained_weights_only() -> None:
    assert earlier_statement(tiny_bert(), "count") is None
