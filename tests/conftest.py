"""Fixtures that several test files share."""

import gc

import pytest


@pytest.fixture
def no_report_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training without the page and its figures, which take longer to draw than a tiny model to train."""
    monkeypatch.setattr("hf_dcsgd.report.try_to_write_report", lambda run_dir: None)
    # Every training run starts with a full garbage collection: let it skip what is there to stay.
    gc.freeze()
