"""`DCSGDTrainer`: the Hugging Face `Trainer` with one private step.

Transformers keeps the loop, accelerate the devices and the accumulation. This file replaces three things: where
batches come from (`get_train_dataloader`, `get_batch_samples`: Poisson draws), what a step does (`training_step`: clip
each example, then release one noised sum), and what may be logged (`log`: released values only).
What is written to disk or pushed is in `publishing.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.trainer_utils import HPSearchBackend, TrainOutput

from hf_dcsgd.checks.forward_writes import refuse_forward_writes
from hf_dcsgd.checks.preflight import check_before_training, require_kinds
from hf_dcsgd.data.loading import Batch, batch_length, cut, poisson_dataloader
from hf_dcsgd.ghost import GhostClipper
from hf_dcsgd.privacy.mechanism import BudgetExhausted, DPMechanism, PrivacyPlan
from hf_dcsgd.privacy.plan import RAW_TRAIN_LOSS
from hf_dcsgd.privacy.randomness import private_randomness
from hf_dcsgd.privacy.sampling import PoissonBatchSampler, map_style_length
from hf_dcsgd.reporting.publishing import PublishingTrainer
from hf_dcsgd.runs.callbacks import TRACE_FILENAME, PrivacyCallback, saved_privacy_state
from hf_dcsgd.runs.checkpoints import last_complete_checkpoint, require_complete
from hf_dcsgd.runs.processes import (
    public_numbers,
    quiet_replica,
    refuse_lone_processes,
    refuse_sharding_environment,
    refuse_split_model,
    require_agreement,
)
from hf_dcsgd.runs.search_cost import SearchCost, search_cost
from hf_dcsgd.runs.start import public_checkpoint_numbers, require_continuation, start_mechanism
from hf_dcsgd.tasks.layer_selection import hold_in_fp32, select_trainable_layers, train_mode
from hf_dcsgd.tasks.losses import checked_user_losses, per_example_losses, split_labels
from hf_dcsgd.training_args import DCSGDTrainingArguments

logger = logging.getLogger(__name__)

LossFunction = Callable[[Any, Any], Tensor]


class DCSGDTrainer(PublishingTrainer):
    """Drop-in for `Trainer` whose model is differentially private in its training examples.

    Takes what `Trainer` takes, with `args` a `DCSGDTrainingArguments`, and

    - `per_example_loss_func(outputs, labels)`: one loss per example, shape (n,), for models whose loss is not known by
      their class. Each loss may depend on its own example only.

    **Guarantee.** The trained weights, the checkpoints and everything logged during a run are (ε, δ)-differentially
    private with respect to adding or removing one training example, for the ε and δ of `privacy_report()`; unless the
    report names an opt-out. The evaluation data are not protected.
    """

    args: DCSGDTrainingArguments
    model: nn.Module

    def __init__(self, *args: Any, per_example_loss_func: LossFunction | None = None, **kwargs: Any) -> None:
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError(
                "compute_loss_func returns one loss for a whole batch (normalised by num_items_in_batch), which "
                "cannot be clipped per example; pass per_example_loss_func(outputs, labels), which returns a "
                "tensor of shape (n,), instead"
            )
        for method in (
            "compute_loss",
            "get_train_dataloader",
            "_get_train_sampler",
            "get_batch_samples",
            "training_step",
        ):
            if getattr(type(self), method) is not getattr(DCSGDTrainer, method):
                raise TypeError(
                    f"{type(self).__name__} overrides {method}, on which the guarantee rests; use "
                    "per_example_loss_func for another loss. The sampler is Poisson and cannot be replaced"
                )
        require_kinds(args, kwargs, per_example_loss_func)
        self.per_example_loss_func = per_example_loss_func
        self.plan: PrivacyPlan | None = None
        self.mechanism: DPMechanism | None = None
        self.clipper: GhostClipper | None = None
        self.search_cost: SearchCost | None = None
        self._trials: list[tuple[str, DPMechanism]] = []
        self._clipped_sum: Tensor | None = None
        super().__init__(*args, **kwargs)
        self._refuse_incompatible()
        if not self.is_world_process_zero():
            quiet_replica()
        # A module whose forward takes no labels has names for none, and transformers would drop them from the data.
        self.label_names = self.label_names or ["labels"]
        self.add_callback(PrivacyCallback())
        self._select_layers(self.model)
        if self.train_dataset is not None:
            self.plan = self._make_plan()

    # -- set-up ------------------------------------------------------------------------------------------------------

    def _require_private_args(self) -> None:
        if not isinstance(self.args, DCSGDTrainingArguments):
            raise TypeError(
                f"expected args to be DCSGDTrainingArguments, got {type(self.args).__name__}: nothing would be private"
            )

    def _refuse_incompatible(self) -> None:
        self._require_private_args()
        if self.args.n_gpu > 1:
            raise ValueError(
                f"{self.args.n_gpu} GPUs in one process (nn.DataParallel) split batches behind the clipping; start "
                "one process per GPU with `accelerate launch` or `torchrun`, or set CUDA_VISIBLE_DEVICES to one GPU"
            )
        refuse_sharding_environment()
        refuse_lone_processes(self.args.world_size)
        refuse_split_model(self.model, is_model_parallel=self.is_model_parallel)
        if self.train_dataset is not None:
            map_style_length(self.train_dataset)
        self._refuse_training_data(self.eval_dataset)

    def _refuse_training_data(self, eval_dataset: Any) -> None:
        """Not even by mistake: metrics are published as they are."""
        several = list(eval_dataset.values()) if isinstance(eval_dataset, dict) else [eval_dataset]
        if self.train_dataset is not None and any(dataset is self.train_dataset for dataset in several):
            raise ValueError(
                "eval_dataset is the training data, whose metrics would be logged without noise; pass other data. "
                "predict() logs nothing, for a look of your own"
            )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """As transformers does; the training data are refused."""
        self._refuse_training_data(eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        self._require_private_args()
        model = super().call_model_init(trial)
        self._select_layers(model)
        return model

    def _select_layers(self, model: nn.Module) -> None:
        expression = self.args.trainable_layers
        if expression is None:
            has_presets = isinstance(model, PreTrainedModel) and not getattr(model, "_hf_peft_config_loaded", False)
            expression = "last_encoder_pooler_classifier" if has_presets else "as_is"
        select_trainable_layers(model, expression)
        self._layers = expression
        hold_in_fp32(model, autocast=self.args.bf16)

    def _make_plan(self) -> PrivacyPlan:
        return self.args.privacy_plan(
            dataset_size=map_style_length(self.train_dataset),
            num_parameters=sum(p.numel() for p in self.model.parameters() if p.requires_grad),
        )

    # -- batches -----------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """Poisson logical batches; `accelerator.prepare` is left out, because it would shard the draws once more."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        self.plan = plan = self._make_plan()
        rows, collate = self._rows_and_collator()
        sampler = PoissonBatchSampler(
            plan.dataset_size,
            plan.expected_batch_size,
            steps=plan.dataset_size // plan.expected_batch_size,
            gradient_accumulation_steps=plan.gradient_accumulation_steps,
            rank=self.args.process_index,
            world_size=plan.world_size,
            unsafe_seed=plan.unsafe_noise_seed,
        )
        return poisson_dataloader(rows, sampler, collate, self.args)

    def _rows_and_collator(self) -> tuple[Any, Callable[[list[Any]], Batch]]:
        if hasattr(self.train_dataset, "column_names"):
            return self._remove_unused_columns(self.train_dataset, description="training"), self.data_collator
        return self.train_dataset, self._get_collator_with_removed_columns(self.data_collator, description="training")

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], None]:
        """The micro-batches of one logical batch; their items are not counted, since no loss is divided by them."""
        self._forget_unfinished_batch()
        with self._private_randomness():
            return list(islice(epoch_iterator, num_batches)), None

    def _private_randomness(self) -> AbstractContextManager[None]:
        seed = None if self.plan is None else self.plan.unsafe_noise_seed
        return private_randomness(self.args.device, reproducible=seed is not None)

    def _forget_unfinished_batch(self) -> None:
        """A callback may end an epoch within a logical batch, whose records could be drawn again for the next one."""
        if self.mechanism is not None:
            self.mechanism.discard()
        self._clipped_sum = None
        self.model.zero_grad()

    # -- the start of a run ------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As transformers does; a checkpoint that was not written to its end is never resumed from."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(str(self.args.output_dir))
        elif resume_from_checkpoint:
            resume_from_checkpoint = require_complete(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> Any:
        if resume_from_checkpoint is None:
            self._refuse_second_run()
        hold_in_fp32(self.model, autocast=self.args.bf16)  # evaluation may have left it in half precision
        assert self.plan is not None
        saved = None if resume_from_checkpoint is None else saved_privacy_state(self.state)
        # First of all: a rank that fails alone leaves the others waiting in whatever collective call comes next.
        require_agreement(
            public_numbers(self.plan, self.args, self.model)
            | {"max_steps": max_steps}
            | {"checkpoint": public_checkpoint_numbers(self.state.global_step, saved)}
        )
        if max_steps != self.plan.steps:
            raise RuntimeError(f"the plan has {self.plan.steps} steps, but the training loop would run {max_steps}")
        if resume_from_checkpoint is not None:
            require_continuation(saved, self.plan, resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._train_mode()
        self.clipper = GhostClipper(self.model)
        self._check_parity()
        self._start_mechanism(self.plan, saved)
        if self.is_world_process_zero():
            print(self.plan.describe())
        return prepared

    def _refuse_second_run(self) -> None:
        """The weights carry what was spent on them: training them once more would pass the budget unseen."""
        if self.mechanism is None or self.clipper is None or self.clipper.model is not self.model:
            return
        if self.mechanism.charged:
            raise BudgetExhausted(
                f"this model was trained for {self.mechanism.charged} charged steps already (ε = {self.epsilon():.4g})"
                ", and a second run on top would add to them. To go on with an interrupted run use "
                "resume_from_checkpoint; to start over pass a fresh model, or a model_init"
            )

    def _start_mechanism(self, plan: PrivacyPlan, saved: dict[str, Any] | None) -> None:
        trial = getattr(self, "_trial", None)
        run_dir, is_main = Path(self._get_output_dir(trial)), self.is_world_process_zero()
        self.mechanism = start_mechanism(plan, run_dir, saved, is_main_process=is_main, device=self.args.device)
        if trial is not None:
            self._trials.append((str(run_dir), self.mechanism))
        trace = run_dir / TRACE_FILENAME if is_main else None
        if trace is not None and saved is None:
            trace.unlink(missing_ok=True)
        self._privacy_callback().attach(self.mechanism, trace)
        self._record_run(run_dir)

    def _privacy_callback(self) -> PrivacyCallback:
        return next(cb for cb in self.callback_handler.callbacks if isinstance(cb, PrivacyCallback))

    def _check_parity(self) -> None:
        check_before_training(self)

    # -- the private step --------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """One micro-batch: clip and add up. At the end of the logical batch: one noised release into `param.grad`."""
        assert self.mechanism is not None
        assert self.plan is not None
        self._train_mode()
        optimizer_mode = getattr(self.optimizer, "train", None)
        if callable(optimizer_mode):
            optimizer_mode()
        shown_loss = torch.zeros((), device=self.args.device)
        # Transformers refuses an empty batch, which here is a draw like any other.
        with self._private_randomness():
            for piece in cut(self._prepare_inputs(inputs) if inputs else {}, self.args.per_device_train_batch_size):
                loss_sum = self._clip_and_accumulate(piece)
                if RAW_TRAIN_LOSS in self.plan.opt_outs:
                    shown_loss += loss_sum * self.plan.world_size / self.plan.expected_batch_size
        if self.accelerator.sync_gradients:
            noisy_loss = self._release()
            if noisy_loss is not None:
                shown_loss += noisy_loss
        return shown_loss

    def _clip_and_accumulate(self, inputs: Batch) -> Tensor:
        """Adds Σ fᵢ·gᵢ over these examples to the sums; returns the (private) sum of their losses."""
        assert self.clipper is not None
        assert self.mechanism is not None
        with self.compute_loss_context_manager(), self.clipper:
            with refuse_forward_writes(self.model):
                losses, _ = self._losses(inputs)
            norms = self.clipper.norms(losses)
            # A gradient that the forward or a loss of the user's left there was not clipped.
            self.model.zero_grad()
            factors = self.mechanism.clip_factors(norms, losses.detach())
            if self._clipped_sum is None:
                self._clipped_sum = self.clipper.zeros()
            self.clipper.accumulate(factors, into=self._clipped_sum)
        return losses.detach().sum()

    def _release(self) -> float | None:
        """Writes the noised mean of the clipped sums into `param.grad`; returns the noised loss, if there is one."""
        assert self.mechanism is not None
        assert self.clipper is not None
        clipped_sum = self.clipper.zeros() if self._clipped_sum is None else self._clipped_sum
        self._clipped_sum = None
        release = self.mechanism.release(clipped_sum.float())
        for name, part in self.clipper.unflatten(release.noisy_gradient).items():
            parameter = self.clipper.parameters[name]
            parameter.grad = part.to(parameter.dtype)
        return release.noisy_loss

    def _losses(self, inputs: Batch) -> tuple[Tensor, Any]:
        """Per-example losses of a batch, and the model's outputs; labels are kept out of the forward."""
        model_inputs, labels = self._split(inputs)
        outputs = self._forward(model_inputs)
        if self.per_example_loss_func is not None:
            return checked_user_losses(self.per_example_loss_func, outputs, labels, batch_length(inputs)), outputs
        smoothing, mask = self.args.label_smoothing_factor, inputs.get("attention_mask")
        losses = per_example_losses(self.model, outputs, labels, label_smoothing=smoothing, attention_mask=mask)
        return losses, outputs

    def _forward(self, model_inputs: Batch) -> Any:
        """The model's outputs; a failure inside of it is told with the inputs that it was given."""
        try:
            return self.model(**model_inputs)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            if type(error) not in _FROM_WITHIN:
                raise  # out of memory, and errors of ours, say what they are
            shapes = [
                f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
                for name, value in model_inputs.items()
                if isinstance(value, Tensor)
            ]
            raise RuntimeError(
                f"{type(self.model).__name__} fails on a batch with {', '.join(shapes) or 'no tensors'}: do columns, "
                "types and lengths fit the model, and token ids its vocabulary? "
                f"{type(error).__name__}: {error}"
            ) from error

    def _split(self, inputs: Batch) -> tuple[Batch, Any]:
        return split_labels(self.model, inputs, self.label_names if self.args.label_names else None)

    def _train_mode(self) -> None:
        train_mode(self.model)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """For evaluation only. Where transformers knows no loss, the mean of the per-example losses.

        The number of items is not passed on: with it, transformers multiplies the loss by the number of processes.
        """
        bare = self.accelerator.unwrap_model(model)
        knows_a_loss = isinstance(bare, PreTrainedModel) or hasattr(bare, "get_base_model")
        if self.per_example_loss_func is None and knows_a_loss:
            return super().compute_loss(model, inputs, return_outputs)
        losses, outputs = self._losses(inputs)
        loss = losses.mean()
        if not isinstance(outputs, Mapping):
            outputs = {"logits": outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "logits", outputs)}
        return (loss, {"loss": loss, **outputs}) if return_outputs else loss

    # -- what is written down ----------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds what the step released; takes out the private training loss, unless it was paid or opted for."""
        if self.mechanism is not None and "loss" in logs:
            values = self.mechanism.threshold.released_values()
            logs.update({name: value for name, value in values.items() if isinstance(value, float)})
            # An upper bound that does not hold up the loop: PLD's fine grid takes seconds.
            logs["epsilon"] = self.mechanism.plan.epsilon(self.mechanism.charged, coarser=10)
        for name in ("loss", "train_loss"):
            if name in logs and self.args.log_train_loss != "raw":
                value = logs.pop(name)
                if self.args.log_train_loss == "private":
                    logs[f"noisy_{name}"] = value
        logs.pop("total_flos", None)
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Batch) -> int:
        """Zero: the true count follows the sizes of the private draws."""
        return 0

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> TrainOutput:
        output = super()._finalize_training(trial, num_train_samples, start_time)
        shown = {"raw": "train_loss", "private": "noisy_train_loss"}.get(self.args.log_train_loss)
        loss = output.metrics[shown] if shown is not None else float("nan")
        return TrainOutput(output.global_step, loss, output.metrics)

    # -- hyperparameter search ---------------------------------------------------------------------------------------

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers does. Every trial is charged in its own directory; `search_cost` then holds the total.

        The total is logged and written to `hyperparameter_search_cost.json`, also when a trial fails.
        """
        backend = kwargs.get("backend")
        if backend is not None and HPSearchBackend(backend) is HPSearchBackend.RAY:
            raise ValueError(f"backend={backend} runs trials in other processes, whose cost is lost; use optuna")
        self._trials = []
        try:
            return super().hyperparameter_search(*args, **kwargs)
        finally:
            if self._trials:
                self.search_cost = search_cost(self._trials)
                logger.warning(self.search_cost.describe())
                if self.is_world_process_zero():
                    self.search_cost.write(self._get_output_dir(None))

    def _hp_search_setup(self, trial: Any) -> None:
        super()._hp_search_setup(trial)
        if trial is not None:
            # A trial sets arguments one by one, past their checks, and after the layers were selected.
            self.args.check()
            self._select_layers(self.model)

    # -- the statement -----------------------------------------------------------------------------------------------

    def epsilon(self) -> float:
        """ε of the steps charged so far, at the plan's δ."""
        return 0.0 if self.mechanism is None else self.mechanism.epsilon()


# What torch and models raise themselves; exact types, as subclasses (out of memory) have a meaning of their own.
_FROM_WITHIN = (AttributeError, IndexError, KeyError, RuntimeError, TypeError)
