"""Fixtures that several test files share."""

import gc

import pytest
from hypothesis import settings

# The same examples on every machine: a failure can be repeated, and a passing suite stays so.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture
def no_report_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training without the page and its figures, which take longer to draw than a tiny model to train."""
    monkeypatch.setattr("hf_dcsgd.report.try_to_write_report", lambda run_dir: None)
    # Every training run starts with a full garbage collection: let it skip what is there to stay.
    gc.freeze()
