"""`DCSGDTrainer`: an adapter between the loop of the Hugging Face `Trainer` and one private step.

Transformers keeps the loop, accelerate the devices and the accumulation. This file replaces three things: where
batches come from (`get_train_dataloader`, `get_batch_samples`: Poisson draws), what a step does (`training_step`, see
`step.py`), and what may be logged (`log`: released values only). What is written to disk or pushed is in
`reporting/publishing.py`.

What is assumed of transformers beyond its public interface is listed in `tests/test_transformers_surface.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.trainer_utils import HPSearchBackend, TrainOutput

from hf_dcsgd.checks.environment import (
    refuse_lone_processes,
    refuse_several_devices,
    refuse_sharding_environment,
    refuse_split_model,
)
from hf_dcsgd.checks.evaluation_data import refuse_training_data
from hf_dcsgd.checks.preflight import check_before_training
from hf_dcsgd.checks.trainer_inputs import refuse_overrides, validate_inputs
from hf_dcsgd.data.loading import poisson_dataloader, restack
from hf_dcsgd.data.rows import (
    Batch,
    Collator,
    RowCollator,
    fetch_row,
    longest_row,
    take_only_row,
    with_rounded_lengths,
)
from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.privacy.plan import RAW_TRAIN_LOSS, PrivacyPlan
from hf_dcsgd.privacy.randomness import private_randomness
from hf_dcsgd.privacy.sampling import PoissonBatchSampler, map_style_length
from hf_dcsgd.reporting.plan_table import describe_plan
from hf_dcsgd.reporting.publishing import PublishingTrainer
from hf_dcsgd.runs.callbacks import TRACE_FILENAME, PrivacyCallback, RunStart
from hf_dcsgd.runs.checkpoints import last_complete_checkpoint, require_complete
from hf_dcsgd.runs.processes import public_settings, quiet_replica, require_agreement
from hf_dcsgd.runs.search_cost import SearchCost, search_cost
from hf_dcsgd.runs.spending import describe_earlier, earlier_statement
from hf_dcsgd.runs.start import (
    public_checkpoint_numbers,
    read_saved_state,
    refuse_second_run,
    require_continuation,
    start_mechanism,
)
from hf_dcsgd.step import ExampleLosses, PrivateStep
from hf_dcsgd.tasks.layer_selection import default_layers, hold_in_fp32, select_trainable_layers, train_mode
from hf_dcsgd.tasks.losses import LossFunction
from hf_dcsgd.training_args import DCSGDTrainingArguments
from hf_dcsgd.trunk.build import TrunkCache, open_cache
from hf_dcsgd.trunk.check import fill_and_check
from hf_dcsgd.trunk.cut import TrunkCacheError

logger = logging.getLogger(__name__)


class DCSGDTrainer(PublishingTrainer):
    """Drop-in for `Trainer` whose model is differentially private in its training examples.

    **Guarantee.** The trained weights, the checkpoints and everything logged during a run are (ε, δ)-differentially
    private with respect to adding or removing one training example, for the ε and δ of `privacy_report()`; unless the
    report names an opt-out. The evaluation data are not protected.

    Args:
        model (`PreTrainedModel` or `torch.nn.Module`, *optional*):
            The model, loaded; or give `model_init`.
        args (`DCSGDTrainingArguments`):
            The arguments of the run.
        data_collator (`Callable`, *optional*):
            As for `Trainer`; it is handed one row at a time.
        train_dataset (`Dataset`, *optional*):
            A map-style dataset whose rows are the protected examples.
        per_example_loss_func (`Callable`, *optional*):
            `per_example_loss_func(outputs, labels)` returns one loss per example, shape (n,), for models whose loss is
            not known by their class. Each loss may depend on its own example only.
        kwargs:
            The other arguments are those of `Trainer`.
    """

    args: DCSGDTrainingArguments
    model: nn.Module

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | None = None,
        args: DCSGDTrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., PreTrainedModel] | None = None,
        compute_loss_func: None = None,
        compute_metrics: Callable[[Any], dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        *,
        per_example_loss_func: LossFunction | None = None,
    ) -> None:
        refuse_overrides(self, DCSGDTrainer)
        refuse_sharding_environment()
        validate_inputs(
            model=model,
            data_collator=data_collator,
            train_dataset=train_dataset,
            compute_loss_func=compute_loss_func,
            per_example_loss_func=per_example_loss_func,
            label_smoothing=getattr(args, "label_smoothing_factor", 0.0),
        )
        if not isinstance(args, DCSGDTrainingArguments):
            raise TypeError(
                f"expected args to be DCSGDTrainingArguments, got {type(args).__name__}: nothing would be private"
            )
        self.per_example_loss_func = per_example_loss_func
        self.plan: PrivacyPlan | None = None
        self.step: PrivateStep | None = None
        self.search_cost: SearchCost | None = None
        self._layers = "as_is"
        self._current_trial: Any = None
        self._trials: list[tuple[str, DPMechanism]] = []
        self._checkpoint: str | None = None
        self._cache: TrunkCache | None = None
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            model_init,
            None,
            compute_metrics,
            callbacks,
            optimizers,
            optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics,
        )
        refuse_several_devices(self.args.n_gpu)
        refuse_lone_processes(self.args.world_size)
        refuse_split_model(self.model, is_model_parallel=self.is_model_parallel)
        refuse_training_data(self.train_dataset, self.eval_dataset)
        if not self.is_world_process_zero():
            quiet_replica()
        # A module whose forward takes no labels has names for none, and transformers would drop them from the data.
        self.label_names = self.label_names or ["labels"]
        self.add_callback(PrivacyCallback())
        self.add_callback(RunStart(self._start_run))
        self._select_layers(self.model)
        if self.train_dataset is not None:
            self.plan = self.make_plan()

    @property
    def mechanism(self) -> DPMechanism | None:
        """The mechanism of the last run, if there was one."""
        return None if self.step is None else self.step.mechanism

    # -- set-up ------------------------------------------------------------------------------------------------------

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return what transformers does; the training data are refused."""
        refuse_training_data(self.train_dataset, eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Make the model as transformers does, and select its trainable layers."""
        model = super().call_model_init(trial)
        self._select_layers(model)
        return model

    def _select_layers(self, model: nn.Module) -> None:
        self._layers = self.args.trainable_layers or default_layers(model)
        select_trainable_layers(model, self._layers)
        hold_in_fp32(model, autocast=self.args.bf16)

    def make_plan(self) -> PrivacyPlan:
        """Make the plan for the present arguments, data and model."""
        return self.args.privacy_plan(
            dataset_size=map_style_length(self.train_dataset),
            num_parameters=sum(p.numel() for p in self.model.parameters() if p.requires_grad),
        )

    def make_step(self, *, spot_checks: bool = True) -> PrivateStep:
        """Make the private step for the present model, without a mechanism yet; audits switch its spot checks off."""
        loss, label_names, label_smoothing = self._loss_settings()
        return PrivateStep(
            self.model,
            loss=loss,
            label_names=label_names,
            label_smoothing=label_smoothing,
            device=self.args.device,
            forward_context=self.compute_loss_context_manager,
            reproducible_from=self.args.unsafe_noise_seed,
            trunk=None if self._cache is None else self._cache.trunk,
            spot_checks=spot_checks,
        )

    def _loss_settings(self) -> tuple[LossFunction | None, list[str] | None, float]:
        label_names = self.label_names if self.args.label_names else None
        return self.per_example_loss_func, label_names, self.args.label_smoothing_factor

    # -- batches -----------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """Load Poisson draws; `accelerator.prepare` is left out, because it would shard the draws once more."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        if self.is_in_train:
            self._agree_on_run()
        plan = self.plan = self.plan or self.make_plan()
        rows, collate = self._cached_rows() if self.is_in_train else self.rows_and_collator()
        sampler = PoissonBatchSampler(
            plan.dataset_size,
            plan.expected_batch_size,
            steps=plan.dataset_size // plan.expected_batch_size,
            gradient_accumulation_steps=plan.gradient_accumulation_steps,
            rank=self.args.process_index,
            world_size=plan.world_size,
            unsafe_seed=plan.unsafe_noise_seed,
        )
        return poisson_dataloader(
            rows,
            sampler,
            collate,
            rank=self.args.process_index,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            multiprocessing_context=getattr(self.args, "dataloader_multiprocessing_context", None),
        )

    def rows_and_collator(self) -> tuple[Any, Collator]:
        """Return the training rows and their collator, both without the columns that the model does not take."""
        collate = with_rounded_lengths(self.data_collator, longest_row(self.processing_class, self.model))
        if hasattr(self.train_dataset, "column_names"):
            return self._remove_unused_columns(self.train_dataset, description="training"), collate
        return self.train_dataset, self._get_collator_with_removed_columns(collate, description="training")

    def _cached_rows(self) -> tuple[Any, Collator]:
        """Return rows that carry the hidden states of the frozen trunk, where that was asked for and can be done."""
        rows, collate = self.rows_and_collator()
        self._cache = None
        if self.args.trunk_cache == "off":
            return rows, collate
        try:
            with private_randomness(self.args.device), self.compute_loss_context_manager():
                self._cache = open_cache(
                    self.model,
                    rows,
                    collate,
                    label_names=self._loss_settings()[1],
                    device=self.args.device,
                    cache_dir=self.args.trunk_cache_dir,
                    dtype=self.args.trunk_cache_dtype,
                    largest=self.args.per_device_train_batch_size,
                )
                train_mode(self.model)
                fill_and_check(
                    self._cache,
                    self.make_step(),
                    rank=self.args.process_index,
                    world_size=self.args.world_size,
                    show_progress=not self.args.disable_tqdm,
                )
        except TrunkCacheError as error:
            if self.args.trunk_cache == "on":
                error.add_note('trunk_cache="auto" trains such a model without a cache.')
                raise
            logger.warning("training goes on without a trunk cache: %s", error)
            self._cache = None
        return (rows, collate) if self._cache is None else (self._cache.store, take_only_row)

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[Batch]], num_batches: int, device: torch.device
    ) -> tuple[list[list[Batch]], None]:
        """Take the stacks of one logical batch; their items are not counted, since no loss is divided by them."""
        assert self.step is not None
        # A callback may end an epoch within a logical batch, whose records could be drawn again for the next one.
        self.step.discard()
        with self.step.randomness():
            micro_batches = list(islice(epoch_iterator, num_batches))
        return restack(micro_batches, self.args.per_device_train_batch_size), None

    # -- the start of a run ------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as transformers does; an incomplete checkpoint is never resumed from.

        The training loss is private: NaN is returned for it, unless `log_train_loss` asks for it.
        """
        refuse_overrides(self, DCSGDTrainer)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(str(self.args.output_dir))
        elif resume_from_checkpoint:
            resume_from_checkpoint = require_complete(resume_from_checkpoint)
        self._checkpoint, self._current_trial = resume_from_checkpoint or None, trial
        output = super().train(self._checkpoint, trial, ignore_keys_for_eval)
        shown = {"raw": "train_loss", "private": "noisy_train_loss"}.get(self.args.log_train_loss)
        loss = output.metrics[shown] if shown is not None else float("nan")
        return TrainOutput(output.global_step, loss, output.metrics)

    def _agree_on_run(self) -> None:
        """Settle what all ranks must have in common, before the model is wrapped.

        A rank that fails alone would leave the others waiting in whatever collective call comes next.
        """
        if self._checkpoint is None and self.step is not None and self.step.model is self.model:
            refuse_second_run(self.mechanism)
        if self.hp_search_backend is not None:
            # A trial sets arguments one by one, past their checks, and after the layers were selected.
            self.args.check()
            self._select_layers(self.model)
        hold_in_fp32(self.model, autocast=self.args.bf16)  # evaluation may have left it in half precision
        self.plan = self.make_plan()
        step, saved = (0, None) if self._checkpoint is None else read_saved_state(self._checkpoint)
        require_agreement(
            public_settings(self.plan, self.args, self.model) | {"checkpoint": public_checkpoint_numbers(step, saved)}
        )
        if self._checkpoint is not None:
            require_continuation(saved, self.plan, self._checkpoint)

    def _start_run(self, max_steps: int) -> None:
        """Check model and data, open the ledger and attach the mechanism; called when the loop begins."""
        assert self.plan is not None
        if max_steps != self.plan.steps:
            raise RuntimeError(f"the plan has {self.plan.steps} steps, but the training loop would run {max_steps}")
        run_dir, is_main = Path(self._get_output_dir(self._current_trial)), self.is_world_process_zero()
        if is_main:
            print("Checking model and data on synthetic rows, before anything is spent")
        train_mode(self.model)
        step = self.make_step()
        special = tuple(getattr(self.processing_class, "all_special_ids", None) or ())
        rows, collate = self.rows_and_collator()
        with step.randomness():
            row = RowCollator(collate).alone(fetch_row(rows, 0))
        with step.forward_context():
            check_before_training(step, row, special)
        saved = None if self._checkpoint is None else read_saved_state(self._checkpoint)[1]
        earlier = earlier_statement(self.model, self.args.earlier_spending) if saved is None else None
        step.mechanism = start_mechanism(
            self.plan, run_dir, saved, is_main_process=is_main, device=self.args.device, earlier=earlier
        )
        self.step = step
        if self._current_trial is not None:
            self._trials.append((str(run_dir), step.mechanism))
        trace = run_dir / TRACE_FILENAME if is_main else None
        if trace is not None and saved is None:
            trace.unlink(missing_ok=True)
        self._privacy_callback().attach(step.mechanism, trace)
        self.record_run(
            run_dir,
            step.mechanism,
            trainable_layers=self._layers,
            rules=step.clipper.rules(),
            slow_parameters=step.clipper.slow_parameters,
        )
        if is_main:
            print(describe_plan(self.plan) + describe_earlier(earlier, self.plan))

    def _privacy_callback(self) -> PrivacyCallback:
        return next(cb for cb in self.callback_handler.callbacks if isinstance(cb, PrivacyCallback))

    # -- the private step --------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Clip and add up one micro-batch, a list of stacks; release the logical batch when it is complete."""
        assert self.step is not None
        assert self.plan is not None
        self.step.train()
        optimizer_mode = getattr(self.optimizer, "train", None)
        if callable(optimizer_mode):
            optimizer_mode()
        shown_loss = torch.zeros((), device=self.args.device)
        for stack in inputs:
            loss_sum = self.step.accumulate(stack)
            if RAW_TRAIN_LOSS in self.plan.opt_outs:
                shown_loss += loss_sum * self.plan.world_size / self.plan.expected_batch_size
        if self.accelerator.sync_gradients:
            noisy_loss = self.step.release().noisy_loss
            if noisy_loss is not None:
                shown_loss += noisy_loss
        return shown_loss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of an evaluation batch: transformers' own or, where it knows none, the mean over examples.

        The number of items is not passed on: with it, transformers multiplies the loss by the number of processes.
        """
        bare = self.accelerator.unwrap_model(model)
        knows_a_loss = isinstance(bare, PreTrainedModel) or hasattr(bare, "get_base_model")
        if self.per_example_loss_func is None and knows_a_loss:
            return super().compute_loss(model, inputs, return_outputs)
        losses, outputs = ExampleLosses(bare, *self._loss_settings())(inputs)
        loss = losses.mean()
        if not isinstance(outputs, Mapping):
            outputs = {"logits": outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "logits", outputs)}
        return (loss, {"loss": loss, **outputs}) if return_outputs else loss

    # -- what is written down ----------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what the step released; take out the private training loss, unless it was paid or opted for."""
        if self.mechanism is not None and "loss" in logs:
            values = self.mechanism.threshold.released_values()
            logs.update({name: value for name, value in values.items() if isinstance(value, float)})
            # An upper bound that does not hold up the loop: PLD's fine grid takes seconds.
            logs["epsilon"] = self.mechanism.plan.epsilon(self.mechanism.charged, grid_scale=10)
        for name in ("loss", "train_loss"):
            if name in logs and self.args.log_train_loss != "raw":
                value = logs.pop(name)
                if self.args.log_train_loss == "private":
                    logs[f"noisy_{name}"] = value
        logs.pop("total_flos", None)
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return zero: the true count follows the sizes of the private draws."""
        return 0

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as transformers does, unless something wrote private values into the frozen part of the model."""
        if self.step is not None and self.step.model is self.model:
            self.step.require_frozen_unchanged()
        super().save_model(output_dir, _internal_call)

    # -- hyperparameter search ---------------------------------------------------------------------------------------

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Search as transformers does. Every trial is charged in its own directory; `search_cost` holds the total.

        The total is logged and written to `hyperparameter_search_cost.json`, also when a trial fails.
        """
        backend = kwargs.get("backend")
        if backend is not None and HPSearchBackend(backend) is HPSearchBackend.RAY:
            raise ValueError(f"backend={backend} runs trials in other processes, whose cost is lost; use optuna")
        output_dir = str(self.args.output_dir)
        earlier = self.search_cost or SearchCost.read(output_dir)
        self._trials = []
        try:
            return super().hyperparameter_search(*args, **kwargs)
        finally:
            if self._trials:
                self.search_cost = search_cost(self._trials, earlier)
                logger.warning(self.search_cost.describe())
                if self.is_world_process_zero():
                    self.search_cost.write(output_dir)

    # -- the statement -----------------------------------------------------------------------------------------------

    def epsilon(self) -> float:
        """Return ε of the steps charged so far, at the plan's δ."""
        return 0.0 if self.mechanism is None else self.mechanism.epsilon()
