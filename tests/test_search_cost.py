"""The price of several runs on one dataset, against dp_accounting composed by hand."""

import json
import math
from pathlib import Path

import dp_accounting
import optuna
import pytest
from dp_accounting import pld, rdp
from simulated_runs import plan_of
from tiny_tasks import BATCH, SIGMA, N, feature_classifier, feature_trainer

from hf_dcsgd import DCSGDTrainer
from hf_dcsgd.privacy.accounting import AccountedRun, composed_epsilon, epsilon_spent
from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.runs.search_cost import COST_FILENAME, HyperparameterSearch, SearchCost, search_cost

DELTA = 1e-4
RUNS = [AccountedRun(1.0, 0.02, 100), AccountedRun(0.8, 0.01, 250), AccountedRun(2.5, 1.0, 3)]


def by_hand(accountant: dp_accounting.PrivacyAccountant, runs: list[AccountedRun]) -> float:
    for run in runs:
        step: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(run.noise_multiplier)
        if run.sampling_rate < 1:
            step = dp_accounting.PoissonSampledDpEvent(run.sampling_rate, step)
        accountant.compose(step, run.steps)
    return accountant.get_epsilon(DELTA)


@pytest.fixture(autouse=True)
def coarse_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The PLD accountant on few points: quick, and good to three digits."""
    monkeypatch.setattr("hf_dcsgd.privacy.accountants.pld_interval", lambda *run: 2e-3)


def test_rdp_composition() -> None:
    assert composed_epsilon(RUNS, DELTA) == pytest.approx(by_hand(rdp.RdpAccountant(), RUNS), rel=2e-3)


def test_pld_composition() -> None:
    expected = by_hand(pld.PLDAccountant(value_discretization_interval=2e-3), RUNS)
    assert composed_epsilon(RUNS, DELTA, "pld") == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_equal_runs_cost_as_one_long_run(accountant: str) -> None:
    run = AccountedRun(1.0, 0.1, 4)
    long = epsilon_spent(noise_multiplier=1.0, sampling_rate=0.1, steps=12, delta=DELTA, accountant=accountant)
    assert composed_epsilon([run] * 3, DELTA, accountant) == pytest.approx(long, rel=1e-3)
    assert composed_epsilon([run], DELTA, accountant) < 0.9 * long


def test_edges() -> None:
    assert composed_epsilon([], DELTA) == 0.0
    assert composed_epsilon([AccountedRun(1.0, 0.1, 0)], DELTA) == 0.0
    assert composed_epsilon([*RUNS, AccountedRun(0.0, 0.1, 1)], DELTA) == math.inf
    assert composed_epsilon([*RUNS, AccountedRun(0.0, 0.1, 0)], DELTA) == composed_epsilon(RUNS, DELTA)
    with pytest.raises(ValueError, match="accountant"):
        composed_epsilon(RUNS, DELTA, "moments")
    with pytest.raises(ValueError, match="sampling_rate"):
        composed_epsilon([AccountedRun(1.0, 1.5, 3)], DELTA)


def test_the_cost_of_a_search_is_that_of_what_was_charged(tmp_path: Path) -> None:
    plans = [
        PrivacyPlan.create(
            dataset_size=100,
            expected_batch_size=batch,
            steps=5,
            num_parameters=3,
            accountant="rdp",
            noise_multiplier=sigma,
            target_delta=delta,
            unsafe_noise_seed=seed,
        )
        for batch, sigma, delta, seed in ((10, 1.0, 1e-3, None), (20, 2.0, 1e-4, 7))
    ]
    mechanisms = [DPMechanism(plan) for plan in plans]
    mechanisms[0]._charged, mechanisms[1]._charged = 5, 2
    cost = search_cost([("run-0", mechanisms[0]), ("run-1", mechanisms[1])])
    assert cost.delta == 1e-4
    assert cost.epsilon == composed_epsilon([AccountedRun(1.0, 0.1, 5), AccountedRun(2.0, 0.2, 2)], 1e-4)
    assert [trial.charged_steps for trial in cost.trials] == [5, 2]
    assert cost.opt_outs == ("unsafe_noise_seed",)
    assert "2 trials, 7 charged steps" in cost.describe()
    assert "VOID" in cost.describe()
    written = json.loads(cost.write(tmp_path).read_text())
    assert written["epsilon"] == cost.epsilon
    assert [trial["directory"] for trial in written["trials"]] == ["run-0", "run-1"]
    assert (tmp_path / COST_FILENAME).exists()


def charged(plan: PrivacyPlan, steps: int) -> DPMechanism:
    mechanism = DPMechanism(plan)
    mechanism._charged = steps
    return mechanism


def test_a_second_search_adds_to_the_first(tmp_path: Path) -> None:
    plan, seeded = plan_of(target_delta=1e-3), plan_of(noise_multiplier=2.0, target_delta=1e-2, unsafe_noise_seed=1)
    assert SearchCost.read(tmp_path) is None
    first = search_cost([("run-0", charged(seeded, 3))])
    first.write(tmp_path)
    assert SearchCost.read(tmp_path) == first
    both = search_cost([("run-0", charged(plan, 5))], SearchCost.read(tmp_path))
    assert [trial.charged_steps for trial in both.trials] == [3, 5]
    assert both.delta == 1e-3
    assert both.epsilon == composed_epsilon([AccountedRun(2.0, 0.25, 3), AccountedRun(1.0, 0.25, 5)], 1e-3)
    assert both.opt_outs == ("unsafe_noise_seed",)
    assert search_cost([("run-1", charged(plan, 1))], both).delta == 1e-3


@pytest.mark.parametrize("first", ["main process", "other process"])
def test_whichever_process_ends_a_search_first_it_counts_once(tmp_path: Path, first: str) -> None:
    """Two processes search side by side; the total that one of them writes is not an earlier search of the other."""
    before = search_cost([("run-0", charged(plan_of(), 3))])
    before.write(tmp_path)
    processes = {
        name: HyperparameterSearch(str(tmp_path), None, "optuna", writes=name == "main process")
        for name in ("main process", "other process")
    }
    for search in processes.values():
        search.__enter__()
        search.add(tmp_path / "run-1", charged(plan_of(), 5))
    for search in sorted(processes.values(), key=lambda search: search is not processes[first]):
        search.__exit__()
    expected = search_cost([(str(tmp_path / "run-1"), charged(plan_of(), 5))], before)
    assert {name: search.cost for name, search in processes.items()} == dict.fromkeys(processes, expected)
    assert SearchCost.read(tmp_path) == expected


def test_two_searches_of_one_trainer_and_a_third_of_another(tmp_path: Path, no_report_page: None) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def search(trainer: DCSGDTrainer, trials: int) -> SearchCost:
        trainer.hyperparameter_search(hp_space=lambda trial: {}, n_trials=trials, backend="optuna")
        assert trainer.search_cost is not None
        return trainer.search_cost

    options = {"model_init": lambda: feature_classifier()}
    trainer = feature_trainer(tmp_path, trainer_options=options, eval_strategy="epoch")
    first, second = search(trainer, 1), search(trainer, 2)
    assert [len(cost.trials) for cost in (first, second)] == [1, 3]
    third = search(feature_trainer(tmp_path, trainer_options=options, eval_strategy="epoch"), 1)
    assert first.epsilon < second.epsilon < third.epsilon
    assert third.epsilon == pytest.approx(composed_epsilon([AccountedRun(SIGMA, BATCH / N, 4)] * 4, 1 / N))
    assert SearchCost.read(tmp_path) == third
