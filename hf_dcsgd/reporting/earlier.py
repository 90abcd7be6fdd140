"""The parts of a report that look back: runs that trained the same weights, and runs in the same directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_dcsgd.privacy.ledger import LedgerRun
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.reporting.format import finite
from hf_dcsgd.reporting.schema import EarlierRun, EarlierRuns, EarlierSpending
from hf_dcsgd.runs.spending import Spending, SpentRun


@dataclass(frozen=True)
class Past:
    """What led to the last run in a ledger.

    `inherited` are the runs that trained its weights before, `dismissed` the opt-out that leaves them out of account;
    `beside` are further runs in the same directory.
    """

    this: SpentRun
    inherited: Spending
    dismissed: str | None
    beside: Spending

    @classmethod
    def of(cls, runs: Sequence[tuple[LedgerRun, PrivacyPlan]]) -> Past:
        """Read it from the runs of a ledger with their plans, the last of which is the one to report on."""
        # Where a ledger names no run, its place in the file does.
        here = [SpentRun.of(plan, run.charged, run.run_id or f"run {i}") for i, (run, plan) in enumerate(runs)]
        statement = runs[-1][0].earlier or {"runs": [], "dismissed": None}
        inherited = Spending.from_list(statement["runs"])
        names = {run.run_id for run in inherited.runs}
        again = Spending(tuple(run for run in here[:-1] if run.run_id in names))
        beside = Spending(tuple(run for run in here[:-1] if run.charged and run.run_id not in names))
        return cls(here[-1], inherited | again, statement["dismissed"], beside)

    @property
    def of_the_weights(self) -> Spending:
        """This run, and those that trained its weights before, unless they are left out."""
        return (Spending() if self.dismissed else self.inherited) | Spending((self.this,))

    def earlier_spending(self) -> EarlierSpending | None:
        """Return the report's part on the weights; None when no private run had trained them."""
        if not self.inherited.runs:
            return None
        return {"runs": _shown(self.inherited), "dismissed": self.dismissed}

    def earlier_runs(self) -> EarlierRuns | None:
        """Return the report's part on the directory; None when it holds no other run that was charged."""
        if not self.beside.runs:
            return None
        together = (self.beside | self.of_the_weights).epsilon(self.this.delta)
        return {
            "runs": _shown(self.beside),
            "composed_epsilon": finite(together),
            "composed_delta": self.this.delta,
        }


def _shown(spending: Spending) -> list[EarlierRun]:
    return [
        {
            "clipping": run.clipping,
            "charged": run.charged,
            "epsilon": finite(Spending((run,)).epsilon(run.delta)),
            "delta": run.delta,
            "accountant": "rdp",
            "opt_outs": list(run.opt_outs),
        }
        for run in spending.runs
    ]
