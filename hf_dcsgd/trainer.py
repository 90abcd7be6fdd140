"""`DCSGDTrainer`: an adapter between the loop of the Hugging Face `Trainer` and one private step.

Transformers keeps the loop, accelerate the devices and the accumulation. This file replaces two things: where batches
come from (`get_train_dataloader`, `get_batch_samples`: Poisson draws), and what a step does (`training_step`, see
`step.py`). What is logged, written to disk or pushed is in `reporting/publishing.py`.

What is assumed of transformers beyond its public interface is listed in `tests/test_transformers_surface.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.trainer_utils import TrainOutput

from hf_dcsgd.checks.environment import refuse_parallelism, refuse_sharding_environment, refuse_tracker_settings
from hf_dcsgd.checks.evaluation_data import refuse_training_data
from hf_dcsgd.checks.sharding_options import reads_weights
from hf_dcsgd.checks.trainer_inputs import refuse_overrides, require_arguments, validate_inputs
from hf_dcsgd.data.loading import restack
from hf_dcsgd.data.rows import Batch, Collator, longest_row, with_rounded_lengths
from hf_dcsgd.example_losses import ExampleLosses
from hf_dcsgd.privacy.plan import RAW_TRAIN_LOSS, PrivacyPlan
from hf_dcsgd.reporting.plan_table import plan_settings
from hf_dcsgd.reporting.publishing import PublishingTrainer
from hf_dcsgd.runs.callbacks import PrivacyCallback, RunStart
from hf_dcsgd.runs.checkpoints import checkpoint_to_resume
from hf_dcsgd.runs.estimate import RunEstimate, estimate_run
from hf_dcsgd.runs.processes import quiet_replica
from hf_dcsgd.runs.rows import CachedRows, TrainingRows, cached_rows, train_dataloader
from hf_dcsgd.runs.search_cost import HyperparameterSearch, SearchCost
from hf_dcsgd.runs.start import agree_on_run, refuse_second_run, start_run
from hf_dcsgd.step import PrivateStep
from hf_dcsgd.tasks.layer_selection import hold_in_fp32, prepare_layers, train_mode
from hf_dcsgd.tasks.losses import LossFunction
from hf_dcsgd.training_args import DCSGDTrainingArguments
from hf_dcsgd.trunk.cut import FrozenTrunk


class DCSGDTrainer(PublishingTrainer):
    """Drop-in for `Trainer` whose model is differentially private in its training examples.

    **Guarantee.** The trained weights, the checkpoints and everything logged during a run are (ε, δ)-differentially
    private with respect to adding or removing one training example, for the ε and δ of `privacy_report()`; unless the
    report names an opt-out. The evaluation data are not protected.

    Arguments that are not listed here are those of `Trainer`.

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
        rows_per_example (`int`, *optional*, defaults to 1):
            How many rows k of the model's input are one example, such as both texts of a preference pair: inputs of
            shape (n, k, …) are run as n·k rows, and `per_example_loss_func` sees outputs of shape (n, k, …).
    """

    args: DCSGDTrainingArguments
    model: nn.Module
    plan: PrivacyPlan | None = None
    _layers = "as_is"
    _search: HyperparameterSearch | None = None
    _current_trial: Any = None
    _checkpoint: str | None = None
    train_label_names: tuple[str, ...] | None = None  # where they are others than those of evaluation batches
    _cached: CachedRows | None = None

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
        rows_per_example: int = 1,
    ) -> None:
        args = require_arguments(args, DCSGDTrainingArguments)
        refuse_overrides(self, DCSGDTrainer)
        refuse_sharding_environment()
        validate_inputs(
            model, args.label_smoothing_factor, data_collator, train_dataset,
            compute_loss_func, per_example_loss_func, rows_per_example, needs_weights=reads_weights(args),
        )  # fmt: skip
        self.per_example_loss_func, self.rows_per_example = per_example_loss_func, rows_per_example
        self._rows = TrainingRows(args, train_dataset)
        args.settle(**self._rows.sizes())  # first, as transformers asks for the batch size
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class, model_init, None,
            compute_metrics, callbacks, optimizers, optimizer_cls_and_kwargs, preprocess_logits_for_metrics,
        )  # fmt: skip
        refuse_parallelism(self.args, self.model, is_model_parallel=self.is_model_parallel)
        refuse_training_data(self.train_dataset, self.eval_dataset)
        if not self.is_world_process_zero():
            quiet_replica()
        # A module whose forward takes no labels has names for none, and transformers would drop them from the data.
        self.label_names = self.label_names or ["labels"]
        self.add_callback(PrivacyCallback())
        self.add_callback(RunStart(self._start_run))
        self._select_layers(self.model)
        self.shard(self.model)
        if self.train_dataset is not None:
            self.plan = self.make_plan()

    @property
    def search_cost(self) -> SearchCost | None:
        """What hyperparameter searches have cost, if there was one."""
        return None if self._search is None else self._search.cost

    # -- set-up ------------------------------------------------------------------------------------------------------

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return what transformers does; the training data are refused."""
        refuse_training_data(self.train_dataset, eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Make the model as transformers does, and select its trainable layers."""
        model = super().call_model_init(trial)
        self._select_layers(model)
        self.shard(model)
        return model

    def _select_layers(self, model: nn.Module) -> None:
        self._layers = prepare_layers(model, self.args.trainable_layers, autocast=self.args.bf16)

    def make_plan(self) -> PrivacyPlan:
        """Make the plan for the present arguments, data and model."""
        num_parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        return self.args.privacy_plan(**self.training_rows().sizes(), num_parameters=num_parameters)

    def training_rows(self) -> TrainingRows:
        """Return the training data as they are drawn; units of privacy are found once per dataset."""
        if not self._rows.are_of(self.args, self.train_dataset):
            self._rows = TrainingRows(self.args, self.train_dataset)
        return self._rows

    def make_step(self, trunk: FrozenTrunk | None = None, *, spot_checks: bool = True) -> PrivateStep:
        """Make the private step for the present model, without a mechanism yet; audits switch its spot checks off."""
        return self.private_step(
            trunk,
            **self._loss_settings(),
            device=self.args.device,
            forward_context=self.compute_loss_context_manager,
            reproducible_from=self.args.unsafe_noise_seed,
            spot_checks=spot_checks,
            scale_free=self.args.scale_free_gradient,
        )

    def estimate(self, sequence_length: int = 128) -> RunEstimate:
        """Estimate time and memory of the run, as a table, by a few steps on made-up texts of this many tokens.

        Nothing is spent or written, and of the training data only their number enters.
        """
        if self.sharded is not None:
            raise ValueError(f"fsdp={self.args.fsdp}: no estimate by trial; use hf-dcsgd doctor --devices")
        train_mode(self.model)
        plan = self.plan = self.make_plan()
        cached = None if self.args.trunk_cache == "off" else len(self.training_rows().usable())
        sizes = {"at_a_time": self.args.per_device_train_batch_size, "sequence_length": sequence_length}
        return estimate_run(self.model, self.make_step, plan, **sizes, cached_rows=cached)

    def _loss_settings(self) -> dict[str, Any]:
        return {
            "loss": self.per_example_loss_func,
            "label_names": self.train_label_names or (self.label_names if self.args.label_names else None),
            "label_smoothing": self.args.label_smoothing_factor,
            "rows_per_example": self.rows_per_example,
        }

    # -- batches -----------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """Load Poisson draws; `accelerator.prepare` is left out, because it would shard the draws once more."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        if self.is_in_train:
            self._agree_on_run()
        plan = self.plan = self.plan or self.make_plan()
        units, self._cached = self.training_rows().units, None
        rows, collate = self.rows_and_collator()
        if self.is_in_train and self.args.trunk_cache != "off":
            names, context = self._loss_settings()["label_names"], self.compute_loss_context_manager
            self._cached = cached_rows(
                self.args, plan, self.model, rows, collate, units, names, self.make_step, context
            )
        if self._cached is not None:
            return train_dataloader(self.args, plan, self._cached.rows, self._cached.collate, units)
        return train_dataloader(self.args, plan, rows, collate, units)

    def rows_and_collator(self) -> tuple[Any, Collator]:
        """Return the training rows and their collator, both without the columns that the model does not take."""
        collate = with_rounded_lengths(self.data_collator, longest_row(self.processing_class, self.model))
        rows = self.training_rows().usable()
        if hasattr(rows, "column_names"):
            return self._remove_unused_columns(rows, description="training"), collate
        return rows, self._get_collator_with_removed_columns(collate, description="training")

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[Batch]], num_batches: int, device: torch.device
    ) -> tuple[list[list[Batch]], None]:
        """Take the stacks of one logical batch; their items are not counted, since no loss is divided by them."""
        assert self.step is not None
        # A callback may end an epoch within a logical batch, whose records could be drawn again for the next one.
        self.step.discard()
        with self.step.randomness():
            micro_batches = list(islice(epoch_iterator, num_batches))
        return self.evened_out(restack(micro_batches, self.args.per_device_train_batch_size)), None

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
        self._checkpoint = checkpoint_to_resume(resume_from_checkpoint, str(self.args.output_dir))
        self._current_trial = trial
        return super().train(self._checkpoint, trial, ignore_keys_for_eval)

    def _agree_on_run(self) -> None:
        """Settle plan and layers, and that all ranks have them in common, before the model is wrapped."""
        if self._checkpoint is None and self.step is not None and self.step.model is self.model:
            refuse_second_run(self.mechanism)
        if self.hp_search_backend is not None:
            # A trial sets arguments one by one, past their checks, and after the layers were selected.
            self.args.check()
            self._select_layers(self.model)
        hold_in_fp32(self.model, autocast=self.args.bf16)  # evaluation may have left it in half precision
        refuse_tracker_settings(self.callback_handler.callbacks)
        self.prepare_sharded()
        self.plan = self.make_plan()
        agree_on_run(self.plan, self.args, self.model, self._checkpoint)
        self.args.planned = plan_settings(self.plan)

    def _start_run(self, max_steps: int) -> None:
        """Check model and data, open the ledger and attach the mechanism; called when the loop begins."""
        assert self.plan is not None
        if max_steps != self.plan.steps:
            raise RuntimeError(f"the plan has {self.plan.steps} steps, but the training loop would run {max_steps}")
        run_dir, is_main = Path(self._get_output_dir(self._current_trial)), self.is_world_process_zero()
        if is_main:
            print("Checking model and data on synthetic rows, before anything is spent")
        train_mode(self.model)  # a step looks at it
        step = self.make_step(None if self._cached is None else self._cached.trunk)
        earlier = start_run(
            step,
            self.plan,
            *self.rows_and_collator(),
            run_dir,
            checkpoint=self._checkpoint,
            earlier_spending=self.args.earlier_spending,
            keep_tokens=tuple(getattr(self.processing_class, "all_special_ids", None) or ()),
            is_main_process=is_main,
        )
        assert step.mechanism is not None
        if self._search is not None and self._current_trial is not None:
            self._search.add(run_dir, step.mechanism)
        callback = next(cb for cb in self.callback_handler.callbacks if isinstance(cb, PrivacyCallback))
        callback.attach(step.mechanism, run_dir if is_main else None)
        self.record_run(run_dir, step, self._layers, earlier)

    # -- the private step --------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Clip and add up one micro-batch, a list of stacks; release the logical batch when it is complete."""
        assert self.step is not None
        assert self.plan is not None
        self.step.train()
        if callable(optimizer_mode := getattr(self.optimizer, "train", None)):
            optimizer_mode()
        shown_loss = torch.zeros((), device=self.args.device)
        for stack in inputs:
            loss_sum = self.step.accumulate(stack)
            if RAW_TRAIN_LOSS in self.plan.opt_outs:
                shown_loss += loss_sum * self.plan.world_size / self.plan.expected_batch_size
        if self.accelerator.sync_gradients:
            shown_loss += self.step.release().noisy_loss or 0.0
        return shown_loss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of an evaluation batch.

        The number of items is not passed on: with it, transformers multiplies the loss by the number of processes.
        """
        return self.evaluation_loss(model, inputs, return_outputs)

    def evaluation_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Compute transformers' own loss of an evaluation batch or, where it knows none, the mean over examples."""
        bare = self.accelerator.unwrap_model(model)
        knows_a_loss = isinstance(bare, PreTrainedModel) or hasattr(bare, "get_base_model")
        if self.per_example_loss_func is None and knows_a_loss:
            return super().compute_loss(model, inputs, return_outputs)
        loss, outputs = ExampleLosses(bare, **self._loss_settings()).mean(inputs)
        return (loss, {"loss": loss, **outputs}) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Evaluate a batch as transformers does; during training with a trunk cache, from cached hidden states."""
        evaluate = partial(super().prediction_step, model, inputs, prediction_loss_only, ignore_keys)
        if self._cached is None or self._cached.evaluation is None or self.step is None or not self.is_in_train:
            return evaluate()
        return self._cached.evaluation.run(inputs, evaluate, self.step.narrowed)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Search as transformers does. Every trial is charged in its own directory; `search_cost` holds the total.

        The total is logged and written to `hyperparameter_search_cost.json`, also when a trial fails.
        """
        is_main, backend = self.is_world_process_zero(), kwargs.get("backend")
        self._search = HyperparameterSearch(str(self.args.output_dir), self.search_cost, backend, writes=is_main)
        with self._search:
            return super().hyperparameter_search(*args, **kwargs)
