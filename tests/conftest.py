"""Fixtures that several test files share."""

import gc
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from worker_pool import WorkerPool

# The same examples on every machine: a failure can be repeated, and a passing suite stays so.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

Count = Callable[[str, int], None]

# Files whose tests start processes from the pool `workers`: one worker runs them all, so that there is one pool.
POOLED = (
    *("test_distributed", "test_sharding", "test_synthesis", "test_audit", "test_spending", "test_trunk_cache"),
    *("test_plugins", "test_train_command", "test_trainer_resume", "test_noise", "test_paper_figures"),
    *("test_results_page", "test_transformers_surface"),
)
# Files that take more than five seconds, to be started before the others, so that the workers end together.
LONGEST = (
    *(*POOLED, "test_hub", "test_trainer"),
    *("test_trainer_features", "test_cli", "test_accounting", "test_run_glue", "test_trl_leaks"),
    *("test_recipe", "test_privacy_unit", "test_trainer_leaks", "test_tasks", "test_clients", "test_run_sft"),
    *("test_invariance", "test_accountants", "test_trunk_evaluation", "test_thresholds"),
    *("test_mechanism", "test_losses", "test_attacks", "test_ghost_models", "test_doctor", "test_bad_input"),
    *("test_faults", "test_trl_sft", "test_group_accounting", "test_one_run"),
)

# What the package remembers of ledgers and weights must not outlive the tests; processes that they start inherit it.
REGISTRY = tempfile.TemporaryDirectory(prefix="hf_dcsgd-")
REGISTRY_NUMBERS = itertools.count()
os.environ["HF_DCSGD_HOME"] = REGISTRY.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longer files first: workers take files in this order."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole files, as `--dist loadfile` does, and those of the pool together."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OnePool(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "pool" if os.path.basename(file).removesuffix(".py") in POOLED else file

    return OnePool(config, log)


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Every training run starts with a full garbage collection: let it skip what is there already and stays."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def new_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a user who has trained nothing before: copies of a shared run do not know of each other."""
    monkeypatch.setenv("HF_DCSGD_HOME", os.path.join(REGISTRY.name, str(next(REGISTRY_NUMBERS))))


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Count:
    """`count("kills", 3)` adds to the table that ends the output; only tests that pass are counted."""
    return lambda what, number: record_property("count", [what, number])


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """Runs scripts on several processes that need not import anything anew."""
    jobs = ("hf_dcsgd.jobs.text_classification", "hf_dcsgd.jobs.metrics", "hf_dcsgd.audit.processes")
    pool = WorkerPool("distributed_worker", "sharded_models", *jobs, "hf_dcsgd.reporting.plots", "optuna")
    yield pool
    pool.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "count" and report.when == "call":
                counts[value[0]] += value[1]
            if name == "release" and report.when == "call":
                terminalreporter.line(f"imported, here and in processes that tests start: {value}")
    if counts:
        terminalreporter.section("what was tried, and held")
        for what, number in sorted(counts.items()):
            terminalreporter.line(f"{number:7,}  {what}")


@pytest.fixture(scope="module")
def quick_statements() -> Iterator[None]:
    """For files that are not about ε and the report's pictures: quick accounting, empty pictures."""
    from quick_accounting import forget_accounting, quicken_accounting

    from hf_dcsgd.reporting import plots

    with pytest.MonkeyPatch.context() as patch:
        quicken_accounting(patch.setattr)
        patch.setattr(plots, "_saved", lambda figure, kind, *options: f"<{kind}/>".encode())
        yield
    forget_accounting()


@pytest.fixture
def fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1 of the audit on 10⁵ numbers of a gradient and 2,500 of a side value; slow tests take all that it takes."""
    from hf_dcsgd.audit.noise_scale import noise_findings

    monkeypatch.setattr("hf_dcsgd.audit.noise_findings", partial(noise_findings, draws=2_500))


@pytest.fixture
def no_report_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training without the page and its figures, which take longer to draw than a tiny model to train."""
    monkeypatch.setattr("hf_dcsgd.reporting.report.try_to_write_report", lambda run_dir: None)
