"""Write a synthetic table with the card that says what it cost and what that rests on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from datasets import Dataset
from huggingface_hub import DatasetCardData

from hf_dcsgd.jobs.synthesis.arguments import NOISED
from hf_dcsgd.jobs.synthesis.control import Controls, Shares
from hf_dcsgd.jobs.synthesis.sampling import Sampled
from hf_dcsgd.reporting.format import rounded_up
from hf_dcsgd.reporting.model_card import CARD_FILENAME
from hf_dcsgd.reporting.report import JSON_FILENAME
from hf_dcsgd.reporting.schema import PrivacyReport
from hf_dcsgd.runs.files import as_json, write_atomically

DATASET_FOLDER = "synthetic"


def write_dataset(
    sampled: Sampled, controls: Controls, shares: Shares, report: PrivacyReport, folder: Path, file_format: str
) -> Path:
    """Write table, card and report into a folder of their own, which may be given to anybody; return the table."""
    folder.mkdir(parents=True, exist_ok=True)
    for other in folder.glob("data.*"):
        other.unlink()
    path = folder / f"data.{file_format}"
    columns = (*controls.columns, controls.text)
    table = Dataset.from_dict({name: [row[name] for row in sampled.rows] for name in columns})
    writers: dict[str, Any] = {"jsonl": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}
    options = {"jsonl": {"force_ascii": False}, "csv": {"index": False}}.get(file_format, {})
    writers[file_format](str(path), **options)
    write_atomically(folder / JSON_FILENAME, as_json(report))
    write_atomically(folder / CARD_FILENAME, dataset_card(sampled, controls, shares, report, path.name))
    return path


def dataset_card(sampled: Sampled, controls: Controls, shares: Shares, report: PrivacyReport, file_name: str) -> str:
    """Return the card as Markdown with its YAML header. Nothing in it comes from the private rows but by releases."""
    guarantee = report["guarantee"]
    metadata = DatasetCardData(
        task_categories=["text-classification", "text-generation"],
        size_categories=[_size_category(len(sampled.rows))],
        tags=["synthetic", "hf-dcsgd", *(["differential-privacy"] if guarantee["holds"] else [])],
        configs=[{"config_name": "default", "data_files": file_name}],
        privacy=_privacy_block(report),
    )
    warning = "" if guarantee["holds"] else "> ### ⚠️ THIS DATASET HAS NO PRIVACY GUARANTEE\n>\n> "
    left_out = ", ".join(f"{count} {fault}" for fault, count in sorted(sampled.left_out.items())) or "none"
    lines = [
        f"---\n{metadata.to_yaml()}\n---\n",
        "# Synthetic labeled texts\n",
        f"{len(sampled.rows):,} rows in `{file_name}`, written by a language model that was fine-tuned on private "
        f"rows; columns {', '.join(f'`{name}`' for name in (*controls.columns, controls.text))}. None is "
        "meant to be a row of the private data; how much can be learned about a single one is bounded below.\n",
        f"## Privacy\n\n{warning}**{_sentence(report)}**\n",
        *_figures(report),
        f"\n{_rests_on(shares, report)}\n",
        "The rows are post-processing of what was released: they can be used, filtered and published without limit "
        "and at no further cost. More rows from the same model cost nothing either.\n",
        f"## Rows\n\n| {' | '.join(controls.columns)} | rows |\n|{'---|' * (len(controls.columns) + 1)}",
        *_counts(sampled, controls),
        f"\nLeft out as malformed: {left_out}.",
        *([f"Wanted and not found: {sampled.missing}."] if sampled.missing else []),
    ]
    return "\n".join(lines) + "\n"


def _sentence(report: PrivacyReport) -> str:
    guarantee = report["guarantee"]
    if not guarantee["holds"]:
        return guarantee["sentence"]
    return (
        f"This dataset is (ε = {rounded_up(guarantee['epsilon'])}, δ = {rounded_up(guarantee['delta'])})-"
        "differentially private in the rows that the model was trained on: for "
        f"{guarantee['neighboring'].replace('add or remove one', 'adding or removing any one')}."
    )


def _figures(report: PrivacyReport) -> list[str]:
    if not report["guarantee"]["holds"]:
        return []
    guarantee, sampling = report["guarantee"], report["sampling"]
    return [
        "| | |\n|---|---|",
        f"| ε, in all | {rounded_up(guarantee['epsilon'])} |",
        f"| δ | {rounded_up(guarantee['delta'])} |",
        f"| unit of privacy | {guarantee['unit']} |",
        f"| accountant | {guarantee['accountant'].upper()} |",
        f"| training | {report['steps']['charged']:,} charged steps, Poisson sampling at "
        f"q = {sampling['sampling_rate']:.4g}, noise multiplier σ = {report['noise']['noise_multiplier']:.4g} |",
    ]


def _rests_on(shares: Shares, report: PrivacyReport) -> str:
    opening = "It rests on the training run, whose statement is in `privacy_report.json`, "
    values = "the values that labels and metadata can take are taken as public."
    if shares.source == NOISED and shares.spent is not None:
        return (
            f"{opening}and on one count of the labels with Gaussian noise (standard deviation "
            f"{shares.spent.noise_multiplier:g}, where one {report['guarantee']['unit']} counts 1), which is part of "
            f"ε and stands in the same ledger. How many rows have which label follows from that count; {values}"
        )
    return f"{opening}alone: how many rows have which label was {shares.source}, not counted; {values}"


def _counts(sampled: Sampled, controls: Controls) -> list[str]:
    counts = Counter(tuple(row[name] for name in controls.columns) for row in sampled.rows)
    return [f"| {' | '.join(_cell(value) for value in cell)} | {counts[cell]:,} |" for cell in controls.cells]


def _cell(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")


def _privacy_block(report: PrivacyReport) -> dict[str, Any]:
    guarantee = report["guarantee"]
    if not guarantee["holds"]:
        return {"guarantee": "none", "opt_outs": [opt_out["name"] for opt_out in guarantee["opt_outs"]]}
    return {
        "guarantee": "differential-privacy",
        "epsilon": None if guarantee["epsilon"] is None else float(rounded_up(guarantee["epsilon"])),
        "delta": float(rounded_up(guarantee["delta"])),
        "unit": guarantee["unit"],
        "neighboring": "add-remove",
        "accountant": guarantee["accountant"],
    }


def _size_category(rows: int) -> str:
    bounds = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))
    return next((name for bound, name in bounds if rows < bound), "1M<n<10M")
