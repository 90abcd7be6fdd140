"""What a hyperparameter search has cost: every trial looked at the private data, whichever of them is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hf_dcsgd.privacy.accounting import AccountedRun, composed_epsilon
from hf_dcsgd.privacy.mechanism import DPMechanism

COST_FILENAME = "hyperparameter_search_cost.json"


@dataclass(frozen=True)
class TrialCost:
    """One trial as it was charged, finished or not."""

    directory: str
    charged_steps: int
    noise_multiplier: float
    sampling_rate: float
    epsilon: float


@dataclass(frozen=True)
class SearchCost:
    """The whole search: releasing, or choosing by, any of its trials is (`epsilon`, `delta`)-DP.

    The bound is composition: it holds however later trials were chosen by the results of earlier ones. `opt_outs` are
    those of all trials; if there are any, the guarantee is void.
    """

    epsilon: float
    delta: float
    accountant: str
    trials: tuple[TrialCost, ...]
    opt_outs: tuple[str, ...]

    def describe(self) -> str:
        steps = sum(trial.charged_steps for trial in self.trials)
        void = f"; VOID by opt-outs: {', '.join(self.opt_outs)}" if self.opt_outs else ""
        return (
            f"the hyperparameter search ({len(self.trials)} trials, {steps} charged steps) cost "
            f"ε = {self.epsilon:.4g} at δ = {self.delta:.4g} in total, by {self.accountant} composition{void}. "
            "A run that follows comes on top"
        )

    def write(self, directory: str | Path) -> Path:
        path = Path(directory) / COST_FILENAME
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        return path


def search_cost(trials: Sequence[tuple[str, DPMechanism]]) -> SearchCost:
    """The cost of trials, each given by its directory and its mechanism; at the smallest of their δ."""
    plans = [mechanism.plan for _, mechanism in trials]
    runs = [AccountedRun(m.plan.noise_multiplier, m.plan.sampling_rate, m.charged) for _, m in trials]
    delta, accountant = min(plan.delta for plan in plans), plans[-1].accountant
    return SearchCost(
        epsilon=composed_epsilon(runs, delta, accountant),
        delta=delta,
        accountant=accountant,
        trials=tuple(
            TrialCost(directory, run.steps, run.noise_multiplier, run.sampling_rate, mechanism.epsilon())
            for (directory, mechanism), run in zip(trials, runs, strict=True)
        ),
        opt_outs=tuple(dict.fromkeys(name for plan in plans for name in plan.opt_outs)),
    )
