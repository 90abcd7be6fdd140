"""The audit passes on every strategy, refutes what is broken, and its statistics are what they claim to be."""

from __future__ import annotations

import json
import math
from functools import cache

import numpy as np
import pytest
from conftest import Count
from scipy import stats
from worker_pool import WorkerPool

from hf_dcsgd.audit import AuditReport, Finding, audit_strategy, audit_trainer
from hf_dcsgd.audit.distinguishing import Distinguisher, fit_and_judge
from hf_dcsgd.audit.one_run import epsilon_lower_bound, judge_one_run
from hf_dcsgd.audit.probe import probe_trainer
from hf_dcsgd.audit.processes import audit_processes
from hf_dcsgd.clipping import STRATEGIES
from hf_dcsgd.privacy.noise import NoiseSource

pytestmark = pytest.mark.proof


def assert_passed(reports: list[AuditReport]) -> None:
    failures = [f"{report.level} {report.subject}: {finding}" for report in reports for finding in report.failures]
    assert reports
    assert not failures


@pytest.mark.parametrize("clipping", STRATEGIES)
def test_replay_and_noise_levels_pass(clipping: str, fewer_draws: None) -> None:
    assert_passed(audit_strategy(clipping, levels=(0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("clipping", STRATEGIES)
def test_replay_and_noise_levels_at_full_strength(clipping: str, count: Count) -> None:
    assert_passed(audit_strategy(clipping, levels=(0, 1)))
    count("audit passed by a strategy: L0", 1)
    count("audit passed by a strategy: L1", 1)


def test_distinguishing_level_refutes_a_twentieth_of_the_noise_and_not_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By so few trials a right implementation is refuted once in ten million runs, and hardly anything is shown."""
    (report,) = audit_strategy("dc_sgd_e", levels=(2,), trials=60)
    assert report.findings[0].passed, str(report)
    add_noise = NoiseSource.add_noise
    monkeypatch.setattr(NoiseSource, "add_noise", lambda self, total, sigma: add_noise(self, total, sigma / 20))
    (report,) = audit_strategy("dc_sgd_e", levels=(2,), trials=60)
    assert not report.findings[0].passed, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("clipping", STRATEGIES)
def test_distinguishing_level_at_full_strength(clipping: str, count: Count) -> None:
    (report,) = audit_strategy(clipping, levels=(2,), trials=20_000 if clipping == "dc_sgd_e" else 4_000)
    assert_passed([report])
    # 0.91 ± 0.018 of the claim is what a right implementation gives at 20,000 trials, 0.79 ± 0.04 at 4,000.
    assert report.findings[0].measured > (0.81 if clipping == "dc_sgd_e" else 0.58)
    count("audit passed by a strategy: L2", 1)


@pytest.mark.slow
@pytest.mark.parametrize("clipping", STRATEGIES)
def test_levels_0_and_1_over_two_processes(clipping: str, count: Count) -> None:
    report = audit_processes(clipping)
    assert_passed([report])
    assert {finding.detail for finding in report.findings} == {"rank 0", "rank 1"}
    count("audit passed by a strategy: L3", 1)


@pytest.mark.slow
def test_two_processes_with_the_default_strategy(workers: WorkerPool) -> None:
    ended = workers.run(2, ["-m", "hf_dcsgd.audit.processes", "--clipping", "dc_sgd_e"])
    (line,) = [line for line in ended.output.splitlines() if line.startswith("[[")]
    assert len(json.loads(line)) == 2
    for finding in [finding for of_rank in json.loads(line) for finding in of_rank]:
        assert finding["measured"] <= finding["allowed"], finding


def test_a_report_in_one_line_names_what_fails() -> None:
    report = AuditReport("L0", "a trainer", [Finding("this", 1.0, 2.0), Finding("that", 3.0, 2.0)])
    assert report.summary().splitlines() == ["L0 on a trainer: FAILED", "  FAIL that: 3 (allowed 2)"]
    assert AuditReport("L0", "a trainer", [Finding("this", 1.0, 2.0)]).summary() == "L0 on a trainer: passed, 1 checks"
    assert "ok   this" in str(report)


def test_a_trainer_of_ones_own(tmp_path) -> None:
    trainer = probe_trainer(str(tmp_path), "dc_sgd_p")
    before = (trainer.plan, trainer.mechanism, trainer.step)
    reports = audit_trainer(trainer, draws=10_000)
    assert_passed(reports)
    assert [report.level for report in reports] == ["L0", "L1"]
    assert (trainer.plan, trainer.mechanism, trainer.step) == before
    assert not list(tmp_path.glob("privacy_ledger*"))


def test_a_released_loss_is_audited_too(tmp_path) -> None:
    trainer = probe_trainer(str(tmp_path), "dc_sgd_e", log_train_loss="private", loss_noise_multiplier=3.0)
    assert_passed(audit_trainer(trainer, draws=10_000))


def test_findings_compare_with_what_is_allowed() -> None:
    assert Finding("x", 1.0, 1.0).passed
    assert not Finding("x", 1.1, 1.0).passed
    assert not Finding("x", math.nan, 1.0).passed
    assert not AuditReport("L0", "nothing was looked at").passed
    report = AuditReport("L0", "s", [Finding("good", 0.0, 1.0), Finding("bad", 2.0, 1.0, "why")])
    assert "FAIL bad: 2 (allowed 1)  why" in str(report)
    assert report.to_dict()["passed"] is False


def test_the_bound_on_mu_holds_for_a_true_gaussian_and_is_tight() -> None:
    generator = np.random.default_rng(0)
    trials, bounds = 4_000, []
    for _ in range(40):
        without = generator.normal(size=(trials, 3))
        with_canary = generator.normal(size=(trials, 3)) + np.array([0.6, 0.0, 0.8])
        bounds.append(fit_and_judge(without, with_canary).mu_lower_bound())
    assert max(bounds) <= 1.0
    assert np.mean(bounds) > 0.75


def test_clopper_pearson_against_its_definition() -> None:
    judged = Distinguisher(false_positives=30, false_negatives=40, negatives=100, positives=100)
    alpha = 0.01
    fpr = stats.binomtest(30, 100).proportion_ci(confidence_level=1 - alpha, method="exact").high
    fnr = stats.binomtest(40, 100).proportion_ci(confidence_level=1 - alpha, method="exact").high
    assert judged.mu_lower_bound(alpha) == pytest.approx(stats.norm.isf(fpr) - stats.norm.ppf(fnr))
    assert Distinguisher(0, 100, 100, 100).mu_lower_bound() == -math.inf


def test_one_run_bound_never_exceeds_randomized_response() -> None:
    """Guesses that are right with probability e^ε/(1 + e^ε) exactly: the bound fails with probability ≤ α."""
    generator = np.random.default_rng(1)
    epsilon, guesses, alpha = 1.0, 200, 0.05
    right = 1 / (1 + math.exp(-epsilon))
    bound = cache(lambda correct: epsilon_lower_bound(correct, guesses, guesses, 0.0, alpha))
    bounds = [bound(int(generator.binomial(guesses, right))) for _ in range(500)]
    assert np.mean(np.array(bounds) > epsilon) <= alpha + 3 * math.sqrt(alpha / 500)
    assert np.mean(bounds) > 0.5


def test_one_run_bound_weakens_with_delta_and_needs_evidence() -> None:
    assert epsilon_lower_bound(50, 100, 1000, 1e-5, 0.05) == 0.0
    strong, weak = (epsilon_lower_bound(90, 100, 1000, delta, 0.05) for delta in (0.0, 1e-4))
    assert strong > weak > 0
    assert epsilon_lower_bound(0, 0, 10, 0.0, 0.05) == 0.0


def test_judging_one_run() -> None:
    included = [True] * 50 + [False] * 50
    telling = judge_one_run(list(range(100, 0, -1)), included, claimed_epsilon=0.5, delta=1e-6)
    assert (telling.correct, telling.guesses) == (32, 32)
    assert not telling.passed
    assert "REFUTES" in str(telling)
    mute = judge_one_run([(7 * k) % 100 for k in range(100)], included, claimed_epsilon=0.5, delta=1e-6)
    assert mute.passed
    with pytest.raises(ValueError, match="one score per canary, got 3 scores and 2"):
        judge_one_run([1.0, 2.0, 3.0], [True, False], claimed_epsilon=1.0, delta=0.0)
