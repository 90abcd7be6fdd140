"""`PrivateRun`: plan, ledger, sampler and private step for a training loop of your own; it leaves the same report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dcsgd.checks.environment import refuse_split_model
from hf_dcsgd.data.loading import poisson_dataloader, restack
from hf_dcsgd.data.rows import Batch, Collator
from hf_dcsgd.privacy.mechanism import NoisyRelease
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.privacy.sampling import map_style_length
from hf_dcsgd.reporting.report import try_to_write_report
from hf_dcsgd.reporting.run_record import RecordedRun
from hf_dcsgd.runs.rows import poisson_sampler
from hf_dcsgd.runs.start import start_run
from hf_dcsgd.runs.trace import append_to_trace
from hf_dcsgd.step import PrivateStep
from hf_dcsgd.tasks.losses import LossFunction
from hf_dcsgd.validation import require


class PrivateRun:
    """A private run without the `Trainer`, on one device.

    ```python
    with PrivateRun(model, rows, collate, plan, "out", loss=loss) as run:
        for stacks in run.batches():     # one Poisson draw each, as many as the plan has steps
            run.step(stacks)             # clips, charges, adds noise: now `param.grad` is private
            optimizer.step()
            optimizer.zero_grad()
    print(run.report)                    # out/privacy_report.html
    ```

    Model and data pass the checks that training by `DCSGDTrainer` runs. The guarantee is that of the plan, for what
    the optimizer makes of `param.grad`; everything else in the loop that looks at the rows is yours to keep private.

    Args:
        model: The model; parameters that require a gradient are trained.
        rows: A map-style dataset whose rows are the protected examples.
        collate: A data collator; it is handed one row at a time.
        plan: What the run may spend: `PrivacyPlan.create(...)`.
        output_dir: Where ledger, trace and report are kept.
        loss: `loss(outputs, labels)` with one loss per example, where the model's class does not say it.
        largest_stack: How many rows go through the model at once.
        device: Where the model is.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: Any,
        collate: Collator,
        plan: PrivacyPlan,
        output_dir: str | Path,
        *,
        loss: LossFunction | None = None,
        largest_stack: int = 32,
        device: torch.device | str = "cpu",
    ) -> None:
        require(
            plan.unit is None,
            f"expected a plan that protects rows, because PrivateRun draws rows, got {plan.unit}; use DCSGDTrainer",
        )
        require(
            plan.dataset_size == map_style_length(rows),
            f"expected a plan for {len(rows)} rows, got one for {plan.dataset_size}",
        )
        refuse_split_model(model, is_model_parallel=False)
        self.plan = plan
        self.report: Path | None = None
        self._rows, self._collate = rows, collate
        self._directory, self._largest = Path(output_dir), largest_stack
        self._step = PrivateStep(model, loss=loss, device=device, reproducible_from=plan.unsafe_noise_seed)
        require(
            plan.num_parameters == self._step.clipper.num_parameters,
            f"expected a plan for {self._step.clipper.num_parameters} parameters, got {plan.num_parameters}",
        )
        self._released = 0

    def __enter__(self) -> PrivateRun:
        start_run(self._step, self.plan, self._rows, self._collate, self._directory)
        self._record = RecordedRun.start(self._directory, self._step, "as_is", is_main_process=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._record.end()
        self.report = try_to_write_report(self._directory)

    def batches(self) -> Iterator[list[Batch]]:
        """Yield one logical batch per planned step: a list of stacks, which may be empty."""
        sampler = poisson_sampler(self.plan, steps=self.plan.steps)
        loader = iter(poisson_dataloader(self._rows, sampler, self._collate))
        for _ in range(self.plan.steps):
            with self._step.randomness():
                drawn = next(loader)
            yield restack([drawn], self._largest)[0]

    def step(self, stacks: Sequence[Batch]) -> NoisyRelease:
        """Clip each example of a logical batch and release the noisy mean gradient into `param.grad`."""
        self._step.discard()
        for stack in stacks:
            self._step.accumulate(stack)
        release = self._step.release()
        self._released += 1
        append_to_trace(self._directory, self._released, release.values)
        return release
