"""The report against dp_accounting and against what is in the files; the page read by a parser."""

from __future__ import annotations

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import dp_accounting
import pytest
import torch
from dp_accounting import pld, rdp
from hypothesis import given
from hypothesis import strategies as st
from simulated_runs import STEPS, plan_of, simulate, write_trace
from tiny_tasks import BATCH, SIGMA, N, feature_classifier, feature_trainer
from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput

from hf_dcsgd.cli import main
from hf_dcsgd.clipping import STRATEGIES
from hf_dcsgd.privacy.ledger import LedgerError, PrivacyLedger
from hf_dcsgd.reporting import report
from hf_dcsgd.reporting.format import parameter_groups, rounded_up
from hf_dcsgd.runs.trace import read_trace

STRATEGIES_WITH_HISTOGRAM = ("dc_sgd_e", "dc_sgd_p")


def write(run_dir: Path) -> Path:
    return report.write_report(report.build_report(run_dir), read_trace(run_dir), run_dir)


def rdp_epsilon(runs: list[tuple[float, float, int]], delta: float) -> float:
    accountant = rdp.RdpAccountant()
    for sigma, rate, steps in runs:
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        accountant.compose(event, steps)
    return accountant.get_epsilon(delta)


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_numbers_of_a_whole_run(tmp_path: Path):
    plan = simulate(tmp_path)
    found = report.build_report(tmp_path)
    expected = rdp_epsilon([(SIGMA, BATCH / N, STEPS)], 1 / N)
    assert found["guarantee"]["epsilon"] == pytest.approx(expected, rel=1e-3)
    assert found["guarantee"]["delta"] == 1 / N
    assert found["guarantee"]["holds"]
    tighter = pld.PLDAccountant(value_discretization_interval=1e-3)
    tighter.compose(dp_accounting.PoissonSampledDpEvent(BATCH / N, dp_accounting.GaussianDpEvent(SIGMA)), STEPS)
    assert found["budget"]["other_accountant"] == "pld"
    assert found["budget"]["other_epsilon"] == pytest.approx(tighter.get_epsilon(1 / N), rel=1e-3)
    assert found["steps"] == {"planned": 6, "charged": 6, "released": 6, "lost": 0, "torn_ledger_lines": 0}
    assert found["sampling"]["sampling_rate"] == 0.25
    side = found["noise"]["side_noise_multipliers"]
    precision = found["noise"]["grad_noise_multiplier"] ** -2 + sum(value**-2 for value in side.values())
    assert precision == pytest.approx(SIGMA**-2)
    assert found["noise"]["side_noise_multipliers"] == {"histogram_noise_multiplier": 5.0}
    assert found["clipping"] == {"strategy": "dc_sgd_e", "settings": dict(plan.settings)}
    assert found["model"]["class"] == "FeatureClassifier"
    assert found["model"]["num_parameters"] == 83
    assert found["model"]["groups"] == [
        {"name": "hidden", "tensors": 2, "parameters": 56},
        {"name": "classifier", "tensors": 2, "parameters": 27},
    ]
    assert found["model"]["modules_by_rule"] == {"linear_rule": 1, "fallback": 1}
    assert found["software"]["torch"] == torch.__version__
    assert found["earlier_runs"] is None
    assert any("floating point" in note for note in found["notes"])


def test_the_sentence_says_everything_that_a_guarantee_needs(tmp_path: Path):
    simulate(tmp_path)
    sentence = report.build_report(tmp_path)["guarantee"]["sentence"]
    for needed in (
        "ε = ",
        "δ = 0.01563",
        "single training examples",
        "adding or removing",
        "Poisson",
        "RDP",
        "6 charged",
    ):
        assert needed in sentence


def test_epsilon_is_that_of_the_charged_steps(tmp_path: Path):
    plan = simulate(tmp_path, take=4)
    with (tmp_path / "privacy_trace.jsonl").open("a") as trace:
        trace.write('{"step": 5, "clip_thr')  # torn by a crash, after its step was charged
    PrivacyLedger.open(tmp_path, plan.privacy_dict(), resume=True).charge(4)
    found = report.build_report(tmp_path)
    assert found["steps"] == {"planned": 6, "charged": 5, "released": 4, "lost": 1, "torn_ledger_lines": 0}
    assert found["guarantee"]["epsilon"] == plan.epsilon(5) < plan.epsilon() == found["budget"]["planned_epsilon"]
    curve = found["epsilon_over_steps"]
    assert curve["steps"] == [0, 1, 2, 3, 4, 5]
    assert curve["epsilon"] == [plan.epsilon(steps) for steps in range(6)]


def test_a_torn_ledger_line_is_a_charge(tmp_path: Path):
    plan = simulate(tmp_path, take=3)
    with (tmp_path / PrivacyLedger.FILENAME).open("a") as ledger:
        ledger.write('{"kind": "char')
    found = report.build_report(tmp_path)
    assert found["steps"]["charged"] == 4
    assert found["steps"]["torn_ledger_lines"] == 1
    assert found["guarantee"]["epsilon"] == plan.epsilon(4)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=5), st.booleans())
def test_trace_follows_the_steps_that_led_to_the_last_one(tmp_path_factory, resumptions, torn):
    """Each resumption goes back some steps, then takes some: only lines in the past of the last one count."""
    folder = tmp_path_factory.mktemp("trace")
    lines, kept = [], []
    for attempt, (back, ahead) in enumerate([(0, 3), *resumptions]):
        kept = kept[: max(len(kept) - back, 0)]
        for _ in range(ahead):
            kept.append((len(kept) + 1, float(attempt)))
            lines.append({"step": kept[-1][0], "clip_threshold": kept[-1][1]})
    write_trace(folder, lines)
    if torn:
        with (folder / "privacy_trace.jsonl").open("a") as trace:
            trace.write('{"step": 1')
    assert [(line["step"], line["clip_threshold"]) for line in read_trace(folder)] == kept


def test_earlier_runs_are_named_and_composed(tmp_path: Path):
    simulate(tmp_path, clipping="fixed", noise_multiplier=2.0, take=5)
    simulate(tmp_path, clipping="du", take=0)  # nothing was charged: nothing to tell
    simulate(tmp_path)
    earlier = report.build_report(tmp_path)["earlier_runs"]
    said = report.format_spending(report.build_report(tmp_path))
    assert f"same data: ε = {rounded_up(earlier['composed_epsilon'])} at" in said
    # Never less than what was spent.
    assert float(said.rsplit("ε = ")[-1].split()[0]) >= earlier["composed_epsilon"]
    assert [(run["clipping"], run["charged"]) for run in earlier["runs"]] == [("fixed", 5)]
    assert earlier["runs"][0]["epsilon"] == pytest.approx(rdp_epsilon([(2.0, 0.25, 5)], 1 / N), rel=1e-3)
    together = rdp_epsilon([(2.0, 0.25, 5), (SIGMA, 0.25, STEPS)], 1 / N)
    assert earlier["composed_epsilon"] == pytest.approx(together, rel=1e-3)
    simulate(tmp_path, clipping="fixed", unsafe_noise_seed=3)
    simulate(tmp_path)
    assert report.build_report(tmp_path)["earlier_runs"]["composed_epsilon"] is None


def test_a_hyperparameter_search_is_told_of(tmp_path: Path):
    simulate(tmp_path / "run-0")
    trial = {"directory": "/somewhere/private", "charged_steps": 6, "noise_multiplier": 1.0, "sampling_rate": 0.25}
    trial["epsilon"] = 2.0
    cost = {"epsilon": 3.14159, "delta": 0.015625, "accountant": "rdp", "trials": [trial] * 3, "opt_outs": []}
    (tmp_path / "hyperparameter_search_cost.json").write_text(json.dumps(cost))
    note = report.build_report(tmp_path / "run-0")["notes"][-1]
    assert "3 trials on the same data cost ε = 3.142 at δ = 0.01563" in note
    (tmp_path / "hyperparameter_search_cost.json").write_text(json.dumps({**cost, "opt_outs": ["raw_train_loss"]}))
    page = write(tmp_path / "run-0").read_text()
    assert "an unbounded ε, because of raw_train_loss" in page
    assert "/somewhere" not in page


@given(st.floats(1e-12, 1e12), st.integers(2, 6))
def test_bounds_are_rounded_up(value: float, digits: int):
    shown = float(rounded_up(value, digits))
    assert value * (1 - 1e-9) <= shown <= value * (1 + 10.0 ** (1 - digits)) + 1e-300


@given(st.floats(1e-9, 1e6))
def test_bounds_with_fixed_decimals_are_rounded_up(value: float):
    shown = rounded_up(value, decimals=6)
    assert value <= float(shown) <= value + 1.01e-6
    assert len(shown.split(".")[1]) == 6


def test_bounds_at_the_edges():
    assert rounded_up(7.999999999) == "8"
    assert rounded_up(6.5161) == "6.517"
    assert rounded_up(0.0) == "0"
    assert rounded_up(None) == rounded_up(math.inf) == "∞"


# --- no guarantee ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("raw_train_loss", {"opt_outs": ("raw_train_loss",)}),
        ("unsafe_noise_seed", {"unsafe_noise_seed": 918273645}),
        ("zero_noise", {"noise_multiplier": 0.0}),
    ],
)
def test_an_opt_out_leaves_no_guarantee(tmp_path: Path, name: str, changes: dict):
    simulate(tmp_path, clipping="fixed", **changes)
    page = write(tmp_path).read_text()
    written = (tmp_path / "privacy_report.json").read_text()
    found = json.loads(written, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert not found["guarantee"]["holds"]
    assert found["guarantee"]["sentence"].startswith("There is no privacy guarantee")
    assert name in found["guarantee"]["sentence"]
    assert found["guarantee"]["epsilon"] is found["guarantee"]["delta"] is None
    assert "No privacy guarantee" in page
    assert f"<b>{name}</b>" in page
    assert "differentially private" not in page
    for text in (page, written, (tmp_path / "privacy_run.json").read_text()):
        assert "918273645" not in text


# --- files that are missing or do not fit ----------------------------------------------------------------------------


def test_without_its_record_the_ledger_still_speaks(tmp_path: Path):
    plan = simulate(tmp_path)
    (tmp_path / "privacy_run.json").unlink()
    found = report.build_report(tmp_path)
    assert found["guarantee"]["epsilon"] == plan.epsilon()
    assert found["model"]["num_parameters"] == 83
    assert found["model"]["class"] is None
    assert found["clipping"]["settings"] == dict(plan.settings)
    assert "None" not in PageReader(write(tmp_path).read_text()).text


def test_a_record_of_another_run_is_not_believed(tmp_path: Path):
    simulate(tmp_path)
    other = (tmp_path / "privacy_run.json").read_text()
    simulate(tmp_path, noise_multiplier=3.0, clipping="fixed")
    (tmp_path / "privacy_run.json").write_text(other)
    found = report.build_report(tmp_path)
    assert found["noise"]["noise_multiplier"] == 3.0
    assert found["model"]["class"] is None
    assert any("another run" in note for note in found["notes"])


def test_an_edited_ledger_gives_no_report(tmp_path: Path, capsys: pytest.CaptureFixture):
    simulate(tmp_path)
    path = tmp_path / PrivacyLedger.FILENAME
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3] + lines[4:]))
    with pytest.raises(LedgerError):
        report.build_report(tmp_path)
    assert report.try_to_write_report(tmp_path) is None
    assert main(["report", str(tmp_path)]) == 2
    assert "line 4 of the ledger" in capsys.readouterr().err


def test_missing_matplotlib_costs_the_page_only(tmp_path: Path, monkeypatch, caplog):
    simulate(tmp_path)
    (tmp_path / "privacy_report.html").write_text("of an earlier run")
    monkeypatch.delitem(sys.modules, "hf_dcsgd.reporting.plots", raising=False)
    monkeypatch.setattr("hf_dcsgd.reporting.plots", None, raising=False)
    monkeypatch.delattr("hf_dcsgd.reporting.plots")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert write(tmp_path) == tmp_path / "privacy_report.json"
    assert "pip install 'hf-dcsgd[report]'" in caplog.text
    assert not (tmp_path / "privacy_report.html").exists()


# --- the page --------------------------------------------------------------------------------------------------------


class PageReader(HTMLParser):
    """Collects what a page would fetch, its images, its text and its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.images: list[dict] = []
        self.tags: set[str] = set()
        self.metas: list[dict] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.add(tag)
        if tag == "img":
            self.images.append(found)
        if tag == "meta":
            self.metas.append(found)
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            if found.get(name) and not found[name].startswith("data:"):
                self.fetched.append(found[name])

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=() if name in ("dc_sgd_e", "auto_clip") else pytest.mark.slow) for name in STRATEGIES],
)
def test_the_page_of_every_strategy(tmp_path: Path, strategy: str):
    simulate(tmp_path, clipping=strategy)
    page = write(tmp_path).read_text()
    read = PageReader(page)
    with_histogram = strategy in STRATEGIES_WITH_HISTOGRAM
    assert len(read.images) == {True: 3, False: 1 if strategy == "auto_clip" else 2}[with_histogram]
    assert ("histogram noise multiplier" in read.text) == with_histogram
    assert ("no threshold to plot" in read.text) == (strategy == "auto_clip")
    assert not read.fetched
    assert not re.search(r"url\(|@import", page)
    assert not read.tags & {"script", "link", "iframe", "object", "embed", "form"}
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in read.metas
    assert all(image["alt"] and image["src"].startswith("data:image/svg+xml;base64,") for image in read.images)
    assert report.build_report(tmp_path)["guarantee"]["sentence"] in read.text
    assert "None" not in read.text


def test_text_is_escaped(tmp_path: Path):
    evil = "<script>alert('ε')</script>&amp;"
    model = feature_classifier()
    model.add_module("<b>head</b>", torch.nn.Linear(1, 1))
    simulate(tmp_path, trainable_layers=evil, model=model)
    page = write(tmp_path).read_text()
    assert evil not in page
    assert evil in PageReader(page).text
    assert not PageReader(page).tags & {"script"}
    assert "<b>head</b>" not in page


def test_a_run_that_released_nothing_has_a_page(tmp_path: Path):
    simulate(tmp_path, take=0)
    page = write(tmp_path).read_text()
    assert "ε = 0," in page
    assert "interrupted, or still running" in page


# --- the command and the trainer -------------------------------------------------------------------------------------


def test_the_command_writes_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture):
    simulate(tmp_path, take=2)
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report.build_report(tmp_path)
    assert not (tmp_path / "privacy_report.json").exists()
    assert main(["report", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert report.build_report(tmp_path)["guarantee"]["sentence"] in shown
    assert str(tmp_path / "privacy_report.html") in shown
    assert json.loads((tmp_path / "privacy_report.json").read_text()) == report.build_report(tmp_path)
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "expected a ledger at" in capsys.readouterr().err


class _Interrupt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_a_training_run_leaves_its_report(tmp_path: Path):
    trainer = feature_trainer(tmp_path)
    with pytest.raises(LedgerError):
        trainer.privacy_report()
    trainer.train()
    found = trainer.privacy_report()
    assert json.loads((tmp_path / "privacy_report.json").read_text()) == found
    assert (tmp_path / "privacy_report.html").exists()
    assert found["guarantee"]["epsilon"] == trainer.epsilon() == plan_of(steps=4).epsilon()
    assert found["model"]["trainable_layers"] == "as_is"
    assert found["trajectory"]["step"] == [1, 2, 3, 4]
    assert found["trajectory"]["clip_threshold"][0] == 1.0


def test_an_interrupted_run_leaves_its_report_too(tmp_path: Path):
    trainer = feature_trainer(tmp_path, trainer_options={"callbacks": [_Interrupt()]})
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    found = json.loads((tmp_path / "privacy_report.json").read_text())
    # The interruption came before the trace of the second step: charged, and not known to be kept.
    assert found["steps"]["charged"] == 2
    assert found["steps"]["released"] + found["steps"]["lost"] == 2


def test_a_run_that_was_refused_leaves_the_last_report_alone(tmp_path: Path, no_report_page: None):
    trainer = feature_trainer(tmp_path)
    trainer.train()
    before = (tmp_path / "privacy_run.json").read_text()
    trainer.args.noise_multiplier = 2.0
    with pytest.raises(RuntimeError, match="trained for 4 charged steps"):
        trainer.train()
    assert (tmp_path / "privacy_run.json").read_text() == before
    assert trainer.privacy_report()["noise"]["noise_multiplier"] == SIGMA


def test_only_the_main_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_report_page: None):
    trainer = feature_trainer(tmp_path)
    trainer.train()
    (tmp_path / "privacy_run.json").unlink()
    monkeypatch.setattr(
        "hf_dcsgd.reporting.report.try_to_write_report", lambda run_dir: pytest.fail("written elsewhere")
    )
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)

    def started(self, *args):  # type: ignore[no-untyped-def]
        self.record_run(tmp_path, self.step, "as_is")
        return TrainOutput(0, 0.0, {})

    monkeypatch.setattr("transformers.Trainer.train", started)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    trainer.create_model_card()
    assert not (tmp_path / "saved" / "privacy_spent.json").exists()
    assert not (tmp_path / "privacy_run.json").exists()
    assert not (tmp_path / "README.md").exists()


def test_a_report_that_fails_does_not_fail_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    def broken(*args):
        raise OSError("the disk is full")

    monkeypatch.setattr("hf_dcsgd.reporting.report.write_report", broken)
    assert feature_trainer(tmp_path).train().global_step == 4
    assert "no privacy report was written" in caplog.text


def test_parameters_are_grouped_by_block():
    sizes = {
        "base_model.model.bert.encoder.layer.3.attention.self.query.lora_A.default.weight": 1,
        "base_model.model.bert.encoder.layer.3.output.dense.lora_B.default.weight": 2,
        "base_model.model.classifier.modules_to_save.default.weight": 4,
        "bert.pooler.dense.weight": 8,
        "scale": 16,
    }
    names = {group["name"]: group["parameters"] for group in parameter_groups(sizes)}
    assert names == {"bert.encoder.layer.3": 3, "classifier.modules_to_save": 4, "bert.pooler": 8, "scale": 16}
