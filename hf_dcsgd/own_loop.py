"""`PrivateRun`: plan, ledger, sampler and private step for a training loop of your own; it leaves the same report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from hf_dcsgd.checks.preflight import check_before_training
from hf_dcsgd.data.loading import poisson_dataloader, restack
from hf_dcsgd.data.rows import Batch, Collator, RowCollator, fetch_row
from hf_dcsgd.privacy.ledger import PrivacyLedger
from hf_dcsgd.privacy.mechanism import NoisyRelease
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.privacy.sampling import PoissonBatchSampler, map_style_length
from hf_dcsgd.reporting.report import try_to_write_report
from hf_dcsgd.reporting.run_record import write_run_record
from hf_dcsgd.runs.callbacks import TRACE_FILENAME
from hf_dcsgd.runs.spending import SpendingRecorder, earlier_statement
from hf_dcsgd.runs.start import start_mechanism
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
            plan.dataset_size == map_style_length(rows),
            f"expected a plan for {len(rows)} rows, got one for {plan.dataset_size}",
        )
        self.plan = plan
        self.report: Path | None = None
        self._model, self._rows, self._collate = model, rows, collate
        self._directory, self._largest = Path(output_dir), largest_stack
        self._step = PrivateStep(model, loss=loss, device=device, reproducible_from=plan.unsafe_noise_seed)
        self._device = torch.device(device)
        require(
            plan.num_parameters == self._step.clipper.num_parameters,
            f"expected a plan for {self._step.clipper.num_parameters} parameters, got {plan.num_parameters}",
        )
        self._released = 0

    def __enter__(self) -> PrivateRun:
        step = self._step
        step.train()
        with step.randomness():
            row = RowCollator(self._collate).alone(fetch_row(self._rows, 0))
        check_before_training(step, row)
        earlier = earlier_statement(self._model, "count")
        step.mechanism = start_mechanism(
            self.plan, self._directory, None, is_main_process=True, device=self._device, earlier=earlier
        )
        (self._directory / TRACE_FILENAME).unlink(missing_ok=True)
        write_run_record(
            self._directory,
            plan=self.plan,
            model=self._model,
            trainable_layers="as_is",
            rules=step.clipper.rules(),
            slow_parameters=step.clipper.slow_parameters,
        )
        run = PrivacyLedger.read(self._directory).runs[-1]
        self._spending = SpendingRecorder(self._model, self.plan, run.run_id, run.earlier)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._step.mechanism is not None
        self._step.mechanism.close()
        self._spending.record(self._step.mechanism.charged)
        self.report = try_to_write_report(self._directory)

    def batches(self) -> Iterator[list[Batch]]:
        """Yield one logical batch per planned step: a list of stacks, which may be empty."""
        plan = self.plan
        sampler = PoissonBatchSampler(
            plan.dataset_size, plan.expected_batch_size, steps=plan.steps, unsafe_seed=plan.unsafe_noise_seed
        )
        loader = iter(poisson_dataloader(self._rows, sampler, self._collate))
        for _ in range(plan.steps):
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
        with (self._directory / TRACE_FILENAME).open("a", encoding="utf-8") as trace:
            trace.write(json.dumps({"step": self._released, **release.values}) + "\n")
        return release
