"""`ShardingTrainer`: the part of the trainer that shards, where `fsdp` asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

from hf_dcsgd.checks.sharding_options import accelerate_without_fsdp
from hf_dcsgd.data.rows import Batch
from hf_dcsgd.sharding.step import ShardedStep
from hf_dcsgd.sharding.trunk import ShardedTrunk
from hf_dcsgd.sharding.weights import whole_on_main_process
from hf_dcsgd.step import PrivateStep
from hf_dcsgd.training_args import DCSGDTrainingArguments
from hf_dcsgd.trunk.cut import FrozenTrunk


class ShardingTrainer(Trainer):
    """`Trainer` whose model may have its frozen part in pieces; without `fsdp`, nothing here does anything.

    A part of `DCSGDTrainer`, in a file of its own, which calls `shard` when the layers to train are selected.
    """

    args: DCSGDTrainingArguments
    model: nn.Module
    sharded: ShardedTrunk | None = None
    _has_whole_weights = False

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator as transformers does, for plain data parallelism: what fsdp asks for is done here."""
        with accelerate_without_fsdp():
            super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled:
            raise ValueError("expected no Accelerator with an fsdp_plugin before the trainer, which makes its own")

    def shard(self, model: nn.Module) -> None:
        """Cut the frozen part into pieces, one per rank, where `fsdp` asks for it."""
        if self.args.fsdp and (self.sharded is None or self.sharded.model is not model):
            config: Any = self.args.fsdp_config
            classes = config.get("transformer_layer_cls_to_wrap") or ()
            self.sharded = ShardedTrunk(model, self.args.device, classes, self.args.ddp_timeout_delta)

    def prepare_sharded(self) -> None:
        """Have accelerate take a sharded model as it is, before transformers asks it to wrap it."""
        if self.sharded is not None:
            self.sharded.prepare(self.accelerator)

    def private_step(self, trunk: FrozenTrunk | None, **options: Any) -> PrivateStep:
        """Make the step for the present model; in lockstep with the other ranks where it is sharded."""
        if self.sharded is not None:
            return ShardedStep(self.sharded, examples_per_stack=self.args.per_device_train_batch_size, **options)
        return PrivateStep(self.model, trunk=trunk, **options)

    def evened_out(self, micro_batches: list[list[Batch]]) -> list[list[Batch]]:
        """Add empty stacks, until all ranks have as many; a collective call where the model is sharded."""
        return micro_batches if self.sharded is None else self.sharded.lockstep.even_out(micro_batches)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train as transformers does; meanwhile a sharded model runs where all ranks run it, and nowhere else."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.sharded is not None:
                self.sharded.gate.is_closed = False

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch as transformers does, which gives all ranks as many of them."""
        with nullcontext() if self.sharded is None else self.sharded.gate.opened():
            return super().prediction_step(*args, **kwargs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Search as transformers does; refused where the model is sharded."""
        if self.args.fsdp:
            raise ValueError(f"fsdp={self.args.fsdp} cannot be used with a search: train each trial in its own run")
        return super().hyperparameter_search(*args, **kwargs)

    def check_before_saving(self) -> None:
        """Refuse to save what must not leave; nothing here."""

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Hold weights that are sharded whole on the main process; all processes must enter, and some may do nothing.

        `check_before_saving` is called first, on every process.
        """
        if self._has_whole_weights:
            yield
            return
        self.check_before_saving()
        with whole_on_main_process(self.model):
            self._has_whole_weights = True
            try:
                yield
            finally:
                self._has_whole_weights = False
