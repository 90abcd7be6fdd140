"""`DCSGDSeq2SeqTrainer`: private training of encoder-decoder models, with generation in evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_dcsgd.trainer import DCSGDTrainer
from hf_dcsgd.training_args import DCSGDTrainingArguments


@dataclass
class DCSGDSeq2SeqTrainingArguments(DCSGDTrainingArguments, Seq2SeqTrainingArguments):
    """Arguments of `DCSGDSeq2SeqTrainer`: those of `DCSGDTrainingArguments`, and those of `Seq2SeqTrainingArguments`.

    The latter say how texts are generated in evaluation (`predict_with_generate`, `generation_max_length`,
    `generation_num_beams`, `generation_config`); they have no part in training.
    """


class DCSGDSeq2SeqTrainer(Seq2SeqTrainer, DCSGDTrainer):
    """Drop-in for `Seq2SeqTrainer` whose model is differentially private in its training examples.

    **Guarantee.** That of `DCSGDTrainer`, which trains: transformers' class adds `evaluate`, `predict` and
    `prediction_step`, which generate texts for the evaluation data if `predict_with_generate` is set.

    Args:
        args (`DCSGDSeq2SeqTrainingArguments`):
            The arguments of the run.
        settings:
            The other arguments are those of `DCSGDTrainer`.
    """

    args: DCSGDSeq2SeqTrainingArguments

    def __init__(
        self, model: Any = None, args: DCSGDSeq2SeqTrainingArguments | None = None, *others: Any, **settings: Any
    ) -> None:
        if isinstance(args, DCSGDTrainingArguments) and not isinstance(args, DCSGDSeq2SeqTrainingArguments):
            raise TypeError(
                f"expected args to be DCSGDSeq2SeqTrainingArguments, got {type(args).__name__}: it does not say how "
                "to generate (predict_with_generate and others)"
            )
        # Not by way of Seq2SeqTrainer, which does not take all of the arguments.
        DCSGDTrainer.__init__(self, model, args, *others, **settings)
        wanted: Any = self.args.generation_config
        if wanted is not None:
            generating: Any = self.model
            generating.generation_config = self.load_generation_config(wanted)
