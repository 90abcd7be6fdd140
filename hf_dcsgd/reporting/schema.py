"""The shape of `privacy_report.json`. None stands for an infinite number, or for what is not known."""

from __future__ import annotations

from typing import Any, TypedDict

from hf_dcsgd.reporting.format import ParameterGroup


class OptOut(TypedDict):
    """An option that voids the guarantee, and why."""

    name: str
    text: str


class Guarantee(TypedDict):
    """What may be claimed of the model. With an opt-out `holds` is False, and there is no ε.

    ε counts what earlier runs spent on the weights, unless that was dismissed.
    """

    holds: bool
    sentence: str
    epsilon: float | None
    delta: float | None
    unit: str
    neighboring: str
    sampling: str
    accountant: str
    opt_outs: list[OptOut]


class Budget(TypedDict):
    """What accountants say of the noise of this run alone, whether or not an opt-out voids it."""

    accountant: str
    epsilon: float | None
    delta: float
    target_epsilon: float | None
    planned_epsilon: float | None
    other_accountant: str
    other_epsilon: float | None


class Steps(TypedDict):
    """Planned, charged and released steps; `lost` ones were charged, but nothing of them was kept."""

    planned: int
    charged: int
    released: int
    lost: int
    torn_ledger_lines: int


class Sampling(TypedDict):
    """How batches were drawn; `privacy_unit` holds the fields of `PrivacyUnit` where more than a row is protected."""

    method: str
    dataset_size: int
    expected_batch_size: int
    sampling_rate: float
    privacy_unit: dict[str, Any] | None


class Noise(TypedDict):
    """Noise multipliers; `noise_multiplier` is the one accounted."""

    noise_multiplier: float
    grad_noise_multiplier: float
    side_noise_multipliers: dict[str, float]
    loss_clip: float | None


class Clipping(TypedDict):
    """The strategy and its settings."""

    strategy: str
    settings: dict[str, Any]


class Layout(TypedDict):
    """How the work was spread."""

    world_size: int
    gradient_accumulation_steps: int


# `class` is a keyword.
Model = TypedDict(
    "Model",
    {
        "num_parameters": int,
        "total_parameters": int | None,
        "sharded_parameters": int,
        "class": str | None,
        "base_model": str | None,
        "peft": bool,
        "trainable_layers": str | None,
        "groups": list[ParameterGroup] | None,
        "parameters": list[str],
        "modules_by_rule": dict[str, int],
        "slow_parameters": list[str],
    },
)


class EarlierRun(TypedDict):
    """One run before this one; ε is that of the run alone."""

    clipping: str
    charged: int
    epsilon: float | None
    delta: float
    accountant: str
    opt_outs: list[str]


class EarlierSpending(TypedDict):
    """Runs that trained these weights before. `dismissed` names the opt-out that leaves them out, if one does."""

    runs: list[EarlierRun]
    dismissed: str | None


class EarlierRuns(TypedDict):
    """Other runs in the same directory, and what all runs cost together if their data were the same."""

    runs: list[EarlierRun]
    composed_epsilon: float | None
    composed_delta: float


class PrivacyReport(TypedDict):
    """All that is known of one run and may be shown to anybody."""

    format: int
    guarantee: Guarantee
    budget: Budget
    steps: Steps
    sampling: Sampling
    noise: Noise
    clipping: Clipping
    layout: Layout
    model: Model
    earlier_spending: EarlierSpending | None
    earlier_runs: EarlierRuns | None
    software: dict[str, str]
    trajectory: dict[str, list[Any]]
    epsilon_over_steps: dict[str, list[Any]]
    notes: list[str]
