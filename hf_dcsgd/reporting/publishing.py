"""What leaves a run: its report, its card, and what is saved or pushed. The part of `DCSGDTrainer` that writes.

Guarantee. A push holds what was made for it in an empty folder, and nothing else: weights and configuration as
`save_pretrained` writes them, the tokenizer or processor, `training_args.bin` without seeds and tokens, the card, the
report, the picture of the threshold. States of random generators and of the optimizer, logs, `trainer_state.json` and
checkpoint folders are never read for it. Everything pushed is a function of released values and public settings.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import HubStrategy, SaveStrategy, TrainOutput
from transformers.utils import hf_api
from transformers.utils.hub import PushInProgress

from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.reporting import model_card, report
from hf_dcsgd.training_args import DCSGDTrainingArguments

logger = logging.getLogger(__name__)


class PublishingTrainer(Trainer):
    """`Trainer` whose runs leave a privacy report, and which saves and pushes released values only."""

    args: DCSGDTrainingArguments
    model: nn.Module
    plan: PrivacyPlan | None
    step: Any
    _layers: str
    _run_dir: Path | None = None
    _run_started: bool = False

    # -- the report --------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As transformers does. A privacy report is written into the run's directory, also when the run breaks off."""
        self._run_started = False
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._run_started and self._run_dir is not None and self.is_world_process_zero():
                path = report.try_to_write_report(self._run_dir)
                if path is not None:
                    print(f"Privacy report: {path}")

    def privacy_report(self) -> dict[str, Any]:
        """The statement of the last run: ε, δ and all that they rest on (see `report.py`). Read from its directory.

        `LedgerError`, a RuntimeError, where there was no run yet.
        """
        return report.build_report(self._report_dir())

    def _record_run(self, run_dir: Path) -> None:
        """Writes down what is trained, at the start: which parameters turn out slow later follows from data."""
        self._run_dir, self._run_started = run_dir, True
        if self.is_world_process_zero():
            assert self.plan is not None
            assert self.step is not None
            report.write_run_record(
                run_dir,
                plan=self.plan,
                model=self.model,
                trainable_layers=self._layers,
                rules=self.step.clipper.rules(),
                slow_parameters=self.step.clipper.slow_parameters,
            )

    def _report_dir(self) -> Path:
        return self._run_dir or Path(str(self.args.output_dir))

    # -- what is saved -----------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As transformers does, with arguments that carry neither seeds nor tokens."""
        args = self.args
        self.args = without_secrets(args)
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.args = args

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
        """Writes `README.md` into the output directory, with the guarantee, the plan and how to reproduce the run.

        Arguments as for transformers. Needs a run in this directory: there is no card without its statement.
        """
        if self.is_world_process_zero():
            given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
            self._write_card(Path(str(self.args.output_dir)), **given)

    def _write_card(self, directory: Path, **given: Any) -> None:
        names = self._write_statement(directory)
        facts = dataclasses.replace(
            model_card.card_facts(self, repo_id=self.hub_model_id, **given),
            report_files=[name for name in names if name != model_card.TRAJECTORY_FILENAME],
            trajectory=model_card.TRAJECTORY_FILENAME if model_card.TRAJECTORY_FILENAME in names else None,
        )
        card = model_card.render_card(self.privacy_report(), facts)
        (directory / model_card.CARD_FILENAME).write_text(card, encoding="utf-8")

    def _write_statement(self, directory: Path) -> list[str]:
        """What a card points at, made afresh so that it tells of this very run: report and picture. Their names."""
        source = self._report_dir()
        report.write_report(source)
        names = [name for name in (report.JSON_FILENAME, report.HTML_FILENAME) if (source / name).exists()]
        if source != directory:
            for name in names:
                shutil.copy(source / name, directory / name)
        trajectory = model_card.write_trajectory(directory, report.read_trace(source))
        return names if trajectory is None else [*names, trajectory]

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Uploads model, tokenizer, card and report, and nothing else (see the module). Arguments as for transformers.

        Returns the commit, its future when `blocking` is False, or None on other processes than the main one.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = token if token is not None else self.args.hub_token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        tags = [kwargs.pop("tags", None) or [], getattr(self.model, "model_tags", None) or []]
        kwargs["tags"] = [tag for group in tags for tag in ([group] if isinstance(group, str) else group)]
        kwargs.setdefault("model_name", str(self.hub_model_id).split("/")[-1])
        folder = self._staged_upload(**kwargs)
        self._finish_current_push()
        job = self._upload(folder, commit_message or "End of training", token=token, revision=revision)
        if not blocking:
            _remove_when_done(folder, [job])
            return job
        try:
            return job.result()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes the model as it is now. Under hub_strategy checkpoint and all_checkpoints, into a folder as well.

        Such a folder holds a model, not a checkpoint: without optimizer, random states and ledger there is nothing to
        resume. A model whose statement cannot be written is not pushed; the training goes on.
        """
        strategy = self.args.hub_strategy
        if not self.is_world_process_zero() or strategy == HubStrategy.END:
            return
        if not self.args.hub_always_push and self.push_in_progress is not None and not self.push_in_progress.is_done():
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        try:
            folder = self._staged_upload(model_name=str(self.hub_model_id).split("/")[-1])
        except Exception:
            logger.warning("this checkpoint is not pushed, as its card could not be written", exc_info=True)
            return
        by_steps = self.args.save_strategy == SaveStrategy.STEPS
        progress = f"step {self.state.global_step}" if by_steps else f"epoch {int(self.state.epoch or 0)}"
        jobs = [self._upload(folder, f"Training in progress, {progress}")]
        if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            logger.info("the pushed checkpoint is a model to use, not to resume from: that needs %s", self._run_dir)
            name = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else Path(checkpoint_folder).name
            jobs.append(self._upload(folder, f"Training in progress, {progress}, checkpoint", path_in_repo=name))
        _remove_when_done(folder, jobs)
        if self.push_in_progress is None or self.push_in_progress.is_done():
            self.push_in_progress: Any = PushInProgress(jobs)  # type: ignore[arg-type]
        else:
            self.push_in_progress.jobs.extend(jobs)

    def _staged_upload(self, **card_arguments: Any) -> Path:
        """A new folder in the output directory with all that is to be pushed, made for this push."""
        output_dir = Path(str(self.args.output_dir))
        output_dir.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="_upload-", dir=output_dir))
        try:
            self.create_model_card(**card_arguments)
            self.save_model(str(folder), _internal_call=True)
            self._write_statement(folder)
            # Last, as peft puts a card of its own beside the weights.
            shutil.copy(output_dir / model_card.CARD_FILENAME, folder / model_card.CARD_FILENAME)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def _upload(
        self,
        folder: Path,
        commit_message: str,
        *,
        path_in_repo: str | None = None,
        token: str | None = None,
        revision: str | None = None,
    ) -> Future[CommitInfo]:
        return hf_api().upload_folder(
            repo_id=str(self.hub_model_id),
            folder_path=folder,
            path_in_repo=path_in_repo,
            commit_message=commit_message,
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
            run_as_future=True,
        )


def _remove_when_done(folder: Path, jobs: Iterable[Future[Any]]) -> None:
    unfinished = list(jobs)

    def finished(job: Future[Any]) -> None:
        unfinished.remove(job)
        if not unfinished:
            shutil.rmtree(folder, ignore_errors=True)

    for job in list(unfinished):
        job.add_done_callback(finished)


def without_secrets(args: DCSGDTrainingArguments) -> DCSGDTrainingArguments:
    """A copy for `training_args.bin`: seeds at their defaults, no tokens."""
    public = copy.copy(args)
    public.seed, public.data_seed, public.unsafe_noise_seed = TrainingArguments.seed, None, None
    public.hub_token = None
    return public
