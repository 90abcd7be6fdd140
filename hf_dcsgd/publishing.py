"""What leaves a run: its report, and what is saved. `PublishingTrainer` is the part of `DCSGDTrainer` that writes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput

from hf_dcsgd import report
from hf_dcsgd.ghost import GhostClipper
from hf_dcsgd.plan import PrivacyPlan
from hf_dcsgd.training_args import DCSGDTrainingArguments


class PublishingTrainer(Trainer):
    """`Trainer` whose runs leave a privacy report, and which saves neither seeds nor tokens."""

    args: DCSGDTrainingArguments
    model: nn.Module
    plan: PrivacyPlan | None
    clipper: GhostClipper | None
    _layers: str | None = None
    _run_dir: Path | None = None

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As transformers does. A privacy report is written into the run's directory, also when the run breaks off."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._run_dir is not None and self.is_world_process_zero():
                self._record_run(self._run_dir)
                path = report.try_to_write_report(self._run_dir)
                if path is not None:
                    print(f"Privacy report: {path}")

    def privacy_report(self) -> dict[str, Any]:
        """The statement of the last run: ε, δ and all that they rest on (see `report.py`). Read from its directory.

        RuntimeError (`LedgerError`) where there was no run yet.
        """
        return report.build_report(self._run_dir or Path(str(self.args.output_dir)))

    def _record_run(self, run_dir: Path) -> None:
        """Writes down what is trained. At the start of a run; and at its end, when all slow parameters are known."""
        self._run_dir = run_dir
        if self.is_world_process_zero():
            assert self.plan is not None
            assert self.clipper is not None
            report.write_run_record(
                run_dir,
                plan=self.plan,
                model=self.model,
                trainable_layers=self._layers,
                rules=self.clipper.rules(),
                slow_parameters=self.clipper.slow_parameters,
            )

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As transformers does, with arguments that carry neither seeds nor tokens."""
        args = self.args
        self.args = without_secrets(args)
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.args = args


def without_secrets(args: DCSGDTrainingArguments) -> DCSGDTrainingArguments:
    """A copy for `training_args.bin`: seeds at their defaults, no tokens."""
    public = copy.copy(args)
    public.seed, public.data_seed, public.unsafe_noise_seed = TrainingArguments.seed, None, None
    public.hub_token = None
    return public
