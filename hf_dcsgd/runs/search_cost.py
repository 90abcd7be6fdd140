"""Adds up what hyperparameter searches cost: every trial looked at the private data, whichever of them is kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers.trainer_utils import HPSearchBackend

from hf_dcsgd.privacy.accounting import AccountedRun, composed_epsilon
from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.runs.files import write_atomically

logger = logging.getLogger(__name__)

COST_FILENAME = "hyperparameter_search_cost.json"


@dataclass(frozen=True)
class TrialCost:
    """One trial as it was charged, finished or not."""

    directory: str
    charged_steps: int
    noise_multiplier: float
    sampling_rate: float
    epsilon: float
    group_size: int = 1


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
        """Write it into the output directory of the search."""
        return write_atomically(Path(directory) / COST_FILENAME, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, directory: str | Path) -> SearchCost | None:
        """Return what searches in this directory have cost so far; None when there was none."""
        path = Path(directory) / COST_FILENAME
        if not path.exists():
            return None
        values = json.loads(path.read_text(encoding="utf-8"))
        trials = tuple(TrialCost(**trial) for trial in values["trials"])
        return cls(**{**values, "trials": trials, "opt_outs": tuple(values["opt_outs"])})


def search_cost(trials: Sequence[tuple[str, DPMechanism]], earlier: SearchCost | None = None) -> SearchCost:
    """Add up the cost of trials, each given by its directory and its mechanism; at the smallest of their δ.

    `earlier` is what searches before this one have cost on the same data: it counts in full.
    """
    before = earlier or SearchCost(0.0, 1.0, "", (), ())
    charged = list(before.trials)
    for directory, mechanism in trials:
        plan = mechanism.plan
        numbers = plan.noise_multiplier, plan.sampling_rate, mechanism.epsilon(), plan.group_size
        charged.append(TrialCost(directory, mechanism.charged, *numbers))
    plans = [mechanism.plan for _, mechanism in trials]
    runs = [AccountedRun(t.noise_multiplier, t.sampling_rate, t.charged_steps, t.group_size) for t in charged]
    delta, accountant = min(before.delta, *(plan.delta for plan in plans)), plans[-1].accountant
    opt_outs = dict.fromkeys([*before.opt_outs, *(name for plan in plans for name in plan.opt_outs)])
    return SearchCost(composed_epsilon(runs, delta, accountant), delta, accountant, tuple(charged), tuple(opt_outs))


class HyperparameterSearch:
    """Adds up the trials of one search when its block ends, also by an error; `cost` is then the total so far.

    Args:
        output_dir: Where the total is written, and where that of earlier searches is read.
        earlier: What searches of the same trainer have cost before this one.
        backend: As for `Trainer.hyperparameter_search`.
        writes: Whether this process writes the total.
    """

    def __init__(self, output_dir: str, earlier: SearchCost | None, backend: Any, *, writes: bool) -> None:
        if backend is not None and HPSearchBackend(backend) is HPSearchBackend.RAY:
            raise ValueError(f"backend={backend} runs trials in other processes, whose cost is lost; use optuna")
        self.cost = earlier
        self._output_dir = output_dir
        self._writes = writes
        self._trials: list[tuple[str, DPMechanism]] = []

    def add(self, run_dir: str | Path, mechanism: DPMechanism) -> None:
        """Note a trial when it starts."""
        self._trials.append((str(run_dir), mechanism))

    def __enter__(self) -> HyperparameterSearch:
        # Now: when the block ends, another process may have written the total of this search already.
        self._before = self.cost or SearchCost.read(self._output_dir)
        return self

    def __exit__(self, *error: object) -> None:
        if self._trials:
            self.cost = search_cost(self._trials, self._before)
            logger.warning(self.cost.describe())
            if self._writes:
                self.cost.write(self._output_dir)
