"""Renders the report as one page that needs no network: pictures and style are inside it, all text is escaped."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from hf_dcsgd.reporting.format import rounded_up, shown_number
from hf_dcsgd.reporting.schema import PrivacyReport, Steps

if TYPE_CHECKING:
    from jinja2 import Template


def render_page(report: PrivacyReport, trace: Sequence[dict[str, Any]]) -> str:
    """Render `privacy_report.html`; ImportError where jinja2 or matplotlib is missing."""
    return _template().render(report=report, figures=_figures(report, trace), status=_status(report["steps"]))


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(bound=rounded_up, number=shown_number)
    return environment.from_string(files("hf_dcsgd.reporting").joinpath("report.html").read_text(encoding="utf-8"))


def _status(steps: Steps) -> str:
    if steps["released"] >= steps["planned"]:
        return "complete"
    return "ended by its budget" if steps["charged"] >= steps["planned"] else "interrupted, or still running"


def _figures(report: PrivacyReport, trace: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    from hf_dcsgd.reporting import plots

    curve, budget = report["epsilon_over_steps"], report["budget"]
    has_range = "histogram_range" in report["trajectory"]
    threshold = "The threshold C of each step" + (" and the range R of the histogram." if has_range else ".")
    norms = (
        "The noisy histogram of per-example gradient norms over time, as released: darker is more examples. Norms "
        "beyond the range count in its last bin."
    )
    spent = f"ε at δ = {rounded_up(budget['delta'])} by the {budget['accountant'].upper()} accountant."
    planned, target = report["steps"]["planned"], budget["target_epsilon"]
    curves = plots.epsilon_figure(curve["steps"], curve["epsilon"], planned_steps=planned, target_epsilon=target)
    drawn = (
        ("Clipping threshold", threshold, plots.threshold_figure(trace)),
        ("Gradient norms", norms, plots.histogram_figure(trace)),
        ("Privacy spent", spent, curves),
    )
    return [
        {
            "title": title,
            "caption": caption,
            "source": "data:image/svg+xml;base64," + b64encode(plots.svg(figure)).decode(),
        }
        for title, caption, figure in drawn
        if figure is not None
    ]
