"""Writes what leaves a run: its report, its card, and what is logged, saved or pushed.

Guarantee. A push holds what was made for it in an empty folder, and nothing else: weights and configuration as
`save_pretrained` writes them, the tokenizer or processor, `training_args.bin` without seeds and tokens, what was spent
(`privacy_spent.json`), the card, the report, the picture of the threshold. States of random generators and of the
optimizer, logs, `trainer_state.json` and checkpoint folders are never read for it. Everything pushed is a function of
released values and public settings.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, upload_folder
from torch import nn
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy, SaveStrategy, TrainOutput
from transformers.utils.hub import PushInProgress

from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.reporting import model_card, report
from hf_dcsgd.reporting.plan_table import describe_plan, describe_recipe, little_to_expect
from hf_dcsgd.reporting.run_record import RecordedRun
from hf_dcsgd.reporting.schema import PrivacyReport
from hf_dcsgd.runs.callbacks import released_logs
from hf_dcsgd.runs.spending import describe_earlier
from hf_dcsgd.runs.trace import read_trace
from hf_dcsgd.sharding.trainer import ShardingTrainer
from hf_dcsgd.step import PrivateStep
from hf_dcsgd.training_args import DCSGDTrainingArguments

logger = logging.getLogger(__name__)


class PublishingTrainer(ShardingTrainer):
    """`Trainer` whose runs leave a privacy report, and which logs, saves and pushes released values only.

    A part of `DCSGDTrainer`, in a file of its own; the trainer calls `record_run` when a run starts.

    Overrides of transformers, and what they assume:

    - `save_model` (public): checkpoints are saved by it too, and it writes `self.args` to `training_args.bin`.
    - `_push_from_checkpoint` (private; there is no other way): called on every process with the checkpoint's folder
      when `push_to_hub` is set, after it was saved. The original would push the whole output directory.
    - Called, private: `_finish_current_push`, which waits for `push_in_progress`, an object with `jobs`.
    """

    args: DCSGDTrainingArguments
    model: nn.Module
    _run: RecordedRun | None = None

    # -- the report --------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train as transformers does. A privacy report is written also when the run breaks off.

        The training loss is private: NaN is returned for it, unless `log_train_loss` asks for it.
        """
        before = self._run
        try:
            output = super().train(*args, **kwargs)
        finally:
            if self._run is not None and self._run is not before:
                self._end_run(self._run)
        shown = {"raw": "train_loss", "private": "noisy_train_loss"}.get(self.args.log_train_loss)
        loss = output.metrics[shown] if shown is not None else float("nan")
        return TrainOutput(output.global_step, loss, output.metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what the step released; take out the private training loss, unless it was paid or opted for."""
        super().log(released_logs(logs, self.mechanism, self.args.log_train_loss), start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return zero: the true count follows the sizes of the private draws."""
        return 0

    @property
    def step(self) -> PrivateStep | None:
        """The private step of the last run, if there was one."""
        return None if self._run is None else self._run.step

    @property
    def mechanism(self) -> DPMechanism | None:
        """The mechanism of the last run, if there was one."""
        return None if self._run is None else self._run.mechanism

    def epsilon(self) -> float:
        """Return ε of the steps charged so far, at the plan's δ."""
        return 0.0 if self.mechanism is None else self.mechanism.epsilon()

    def privacy_report(self) -> PrivacyReport:
        """Return the statement of the last run: ε, δ and all that they rest on. Read from its directory.

        `LedgerError`, a RuntimeError, where there was no run yet.
        """
        return report.build_report(self._report_dir())

    def record_run(
        self, run_dir: Path, step: PrivateStep, trainable_layers: str, earlier: Mapping[str, Any] | None = None
    ) -> None:
        """Write down what is trained, and say what is planned; called when a run starts.

        `earlier` is what `spending.earlier_statement` found.
        """
        is_main = self.is_world_process_zero()
        self._run = RecordedRun.start(run_dir, step, trainable_layers, is_main_process=is_main)
        if is_main:
            plan = self._run.mechanism.plan
            print(describe_plan(plan) + describe_earlier(earlier, plan))
            print(describe_recipe(self.args, plan))

    def _end_run(self, run: RecordedRun) -> None:
        run.end()
        if self.is_world_process_zero():
            path = report.try_to_write_report(run.directory)
            if path is not None:
                print(f"Privacy report: {path}")
            warning = little_to_expect(self.args, run.mechanism.plan)
            if warning is not None:
                print(f"WARNING: as the plan said, {warning}")

    def _report_dir(self) -> Path:
        return Path(str(self.args.output_dir)) if self._run is None else self._run.directory

    # -- what is saved -----------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as transformers does, with arguments that carry neither seeds nor tokens, and with what was spent.

        Refused where something wrote private values into the frozen part of the model.
        """
        args, folder = self.args, str(self.args.output_dir if output_dir is None else output_dir)
        with self.whole_weights():
            if self._run is not None:
                self._run.record_spending(folder)  # first, as it goes into the configuration that is saved
            self.args = without_secrets(args)
            try:
                super().save_model(folder, _internal_call=True)
            finally:
                self.args = args
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def check_before_saving(self) -> None:
        """Refuse a model into whose frozen part something wrote private values."""
        if self.step is not None and self.step.model is self.model:
            self.step.require_frozen_unchanged()

    # -- the card and the Hub ----------------------------------------------------------------------------------------

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write `README.md` into the output directory, with the guarantee, the plan and how to reproduce the run.

        Arguments as for transformers. Needs a run in this directory: there is no card without its statement.
        """
        if self.is_world_process_zero():
            given = {
                "language": language,
                "license": license,
                "tags": tags,
                "model_name": model_name,
                "finetuned_from": finetuned_from,
                "tasks": tasks,
                "dataset_tags": dataset_tags,
                "dataset": dataset,
                "dataset_args": dataset_args,
            }
            self._write_statement(Path(str(self.args.output_dir)), given)

    def _write_statement(self, directory: Path, card_arguments: Mapping[str, Any]) -> list[Path]:
        """Write report, picture and card of the run as it stands now; returns their paths.

        The report is also that of the run's own directory, so that it does not lag behind.
        """
        source = self._report_dir()
        statement, trace = report.build_report(source), read_trace(source)
        if not report.is_written(statement, source):
            report.write_report(statement, trace, source)
        names = [name for name in (report.JSON_FILENAME, report.HTML_FILENAME) if (source / name).exists()]
        if source != directory:
            for name in names:
                shutil.copy(source / name, directory / name)
        trajectory = model_card.write_trajectory(directory, trace)
        facts = dataclasses.replace(
            model_card.card_facts(self, repo_id=self.hub_model_id, **card_arguments),
            report_files=names,
            trajectory=trajectory,
        )
        card = model_card.render_card(statement, facts)
        (directory / model_card.CARD_FILENAME).write_text(card, encoding="utf-8")
        written = [*names, *([] if trajectory is None else [trajectory]), model_card.CARD_FILENAME]
        return [directory / name for name in written]

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Upload model, tokenizer, card and report, and nothing else (see the module). Arguments as for transformers.

        Returns the commit, its future when `blocking` is False, or None on other processes than the main one.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = token if token is not None else self.args.hub_token
        if self.hub_model_id is None:
            if private is not None:
                self.args.hub_private_repo = private  # not every release of transformers takes it by `init_hf_repo`
            self.init_hf_repo(token=token)
        with self.whole_weights():
            self.save_model(_internal_call=True)
            if not self.is_world_process_zero():
                return None
            tags = [kwargs.pop("tags", None) or [], getattr(self.model, "model_tags", None) or []]
            kwargs["tags"] = [tag for group in tags for tag in ([group] if isinstance(group, str) else group)]
            folder = self._staged_upload(**kwargs)
        self._finish_current_push()
        job = self._upload(folder, commit_message or "End of training", token=token, revision=revision)
        if not blocking:
            job.add_done_callback(lambda done: shutil.rmtree(folder, ignore_errors=True))
            return job
        try:
            return job.result()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the model as it is now. Under hub_strategy checkpoint and all_checkpoints, into a folder as well.

        Such a folder holds a model, not a checkpoint: without optimizer, random states and ledger there is nothing to
        resume. A model whose statement cannot be written is not pushed; the training goes on.
        """
        strategy = self.args.hub_strategy
        if strategy == HubStrategy.END:
            return
        with self.whole_weights():
            if self.is_world_process_zero():
                self._push_whole_weights(strategy, checkpoint_folder)

    def _push_whole_weights(self, strategy: str, checkpoint_folder: str) -> None:
        if not self.args.hub_always_push and self.push_in_progress is not None and not self.push_in_progress.is_done():
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        try:
            folder = self._staged_upload()
        except Exception:
            logger.warning("this checkpoint is not pushed, as its card could not be written", exc_info=True)
            return
        by_steps = self.args.save_strategy == SaveStrategy.STEPS
        progress = f"step {self.state.global_step}" if by_steps else f"epoch {int(self.state.epoch or 0)}"
        jobs = [self._upload(folder, f"Training in progress, {progress}")]
        if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            logger.info(
                "the pushed checkpoint is a model to use, not to resume from: that needs %s", checkpoint_folder
            )
            name = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else Path(checkpoint_folder).name
            jobs.append(self._upload(folder, f"Training in progress, {progress}, checkpoint", path_in_repo=name))
        # The client works them off in order.
        jobs[-1].add_done_callback(lambda done: shutil.rmtree(folder, ignore_errors=True))
        if self.push_in_progress is None or self.push_in_progress.is_done():
            self.push_in_progress: Any = PushInProgress(jobs)  # type: ignore[arg-type]
        else:
            self.push_in_progress.jobs.extend(jobs)

    def _staged_upload(self, **card_arguments: Any) -> Path:
        """Make a new folder in the output directory with all that is to be pushed."""
        output_dir = Path(str(self.args.output_dir))
        output_dir.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="_upload-", dir=output_dir))
        card_arguments.setdefault("model_name", str(self.hub_model_id).split("/")[-1])
        try:
            self.save_model(str(folder), _internal_call=True)
            # Last, as peft puts a card of its own beside the weights.
            for path in self._write_statement(output_dir, card_arguments):
                shutil.copy(path, folder / path.name)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def _upload(self, folder: Path, commit_message: str, **options: str | None) -> Future[CommitInfo]:
        """Upload a folder in the background; `options` are those of `upload_folder`, None for the arguments'."""
        given: Any = {name: value for name, value in options.items() if value is not None}
        return upload_folder(
            repo_id=str(self.hub_model_id),
            folder_path=folder,
            commit_message=commit_message,
            run_as_future=True,
            **({"token": self.args.hub_token, "revision": self.args.hub_revision} | given),
        )


def without_secrets(args: DCSGDTrainingArguments) -> DCSGDTrainingArguments:
    """Copy the arguments for `training_args.bin`: seeds at their defaults, no tokens."""
    public = copy.copy(args)
    public.seed, public.data_seed, public.unsafe_noise_seed = TrainingArguments.seed, None, None
    public.hub_token = None
    loading: Any = getattr(args, "model_init_kwargs", None)  # TRL's
    if isinstance(loading, Mapping):
        vars(public)["model_init_kwargs"] = {name: value for name, value in loading.items() if name != "token"}
    return public
