"""Do what every training job does: set up, find a checkpoint, make the trainer, train, publish."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets.utils.logging import disable_progress_bar
from huggingface_hub.errors import HTTPError
from transformers import PreTrainedModel, Trainer

from hf_dcsgd.jobs.arguments import FileArguments
from hf_dcsgd.jobs.errors import UserError, explained
from hf_dcsgd.privacy.ledger import PrivacyLedger
from hf_dcsgd.reporting.plan_table import describe_plan, describe_recipe
from hf_dcsgd.reporting.report import format_spending
from hf_dcsgd.runs.checkpoints import last_complete_checkpoint, require_complete
from hf_dcsgd.tasks.layer_selection import DEFAULT_LAYERS, select_trainable_layers
from hf_dcsgd.trainer import DCSGDTrainer
from hf_dcsgd.training_args import DCSGDTrainingArguments


def set_up(args: DCSGDTrainingArguments) -> None:
    if not (args.do_train or args.do_eval or args.do_predict):
        raise UserError("nothing to do: give --do_train, --do_eval or --do_predict")
    transformers.utils.logging.set_verbosity(args.get_process_log_level())
    transformers.utils.logging.enable_default_handler()
    if args.disable_tqdm:
        disable_progress_bar()
    if not torch.accelerator.is_available():
        args.dataloader_pin_memory = False  # it would only warn
    # Initializes the head and dropout. Noise and sampling do not use this seed.
    transformers.set_seed(args.seed)


def checkpoint_to_resume(args: DCSGDTrainingArguments, *, new_run: bool) -> str | None:
    """Return the checkpoint that was asked for; never repeat or overwrite a run that is there already."""
    output_dir = Path(args.output_dir or ".")
    wanted = args.resume_from_checkpoint
    if not args.do_train:
        return None
    if wanted is not None:
        is_last = str(wanted).lower() in ("last", "true")
        return last_complete_checkpoint(output_dir) if is_last else require_complete(wanted)
    if not new_run and (output_dir / PrivacyLedger.FILENAME).is_file():
        earlier = PrivacyLedger.read(output_dir)
        can_go_on = earlier.charged < earlier.plan["steps"] and any(output_dir.glob("checkpoint-*"))
        go_on = "to go on with it: --resume_from_checkpoint last; " if can_go_on else ""
        raise UserError(
            f"{output_dir} already holds a run ({earlier.charged} of {earlier.plan['steps']} steps charged); "
            f"{go_on}to start afresh: another --output_dir, or --new_run, which adds to what was spent"
        )
    return None


def make_trainer(
    model: torch.nn.Module, args: DCSGDTrainingArguments, *, non_private: bool = False, **settings: Any
) -> Trainer:
    """Make the trainer; without privacy, as a reference, if asked for. `settings` are further arguments of it."""
    trainer_class: type[Trainer] = DCSGDTrainer
    if non_private:
        trainer_class = Trainer
        args.settle(None)
        if isinstance(model, PreTrainedModel):
            select_trainable_layers(model, args.trainable_layers or DEFAULT_LAYERS)
        print("NOTHING IS PRIVATE in this run (--non_private): it is a reference only")
    folder_errors = (NotADirectoryError, PermissionError, FileExistsError)
    unwritable = explained(
        lambda error: f"--output_dir {args.output_dir} cannot be written to: {error}", *folder_errors
    )
    with unwritable, explained(_cannot_reach_hub, ConnectionError, HTTPError):
        return trainer_class(model=model, args=args, **settings)


def _cannot_reach_hub(error: Exception) -> str:
    return (
        "--push_to_hub: the repository cannot be made on the Hub, and nothing was trained. Check the network "
        f"(HF_HUB_OFFLINE must not be set), and log in by `hf auth login`. {' '.join(str(error).split())[:200]}"
    )


def look_ahead(trainer: Trainer, data_args: FileArguments) -> bool:
    """Say what training will take in time and memory; return whether that is all that was asked for (`--dry_run`)."""
    if not isinstance(trainer, DCSGDTrainer) or trainer.train_dataset is None:
        if data_args.dry_run:
            raise UserError("--dry_run: there is no private training to plan; give training data, not --non_private")
        return False
    if data_args.dry_run:
        plan = trainer.make_plan()
        print(describe_plan(plan))
        print(describe_recipe(trainer.args, plan))
    # A sharded model runs on all processes or on none.
    is_wanted = data_args.estimate and trainer.is_world_process_zero() and trainer.sharded is None
    if data_args.dry_run or is_wanted:
        print(trainer.estimate(data_args.max_seq_length), flush=True)
    if data_args.dry_run:
        print("Dry run: nothing was spent, nothing was written.")
    return data_args.dry_run


def carry_out(
    trainer: Trainer,
    checkpoint: str | None,
    data_args: FileArguments,
    evaluate: Callable[[], dict[str, float]],
    predict: Callable[[], dict[str, float]],
    **facts: Any,
) -> dict[str, float]:
    """Train, evaluate, predict and publish, as asked; return all metrics. `facts` are those of `create_model_card`."""
    if look_ahead(trainer, data_args):
        return {}
    args: Any = trainer.args
    results = train(trainer, checkpoint) if args.do_train else {}
    if args.do_eval:
        results |= kept(trainer, "eval", evaluate())
    if args.do_predict:
        results |= predict()
    if args.do_train:
        publish(trainer, **facts)
    return results


def kept(trainer: Trainer, name: str, metrics: dict[str, float]) -> dict[str, float]:
    """Show metrics, write them to `<name>_results.json`, and return them."""
    trainer.log_metrics(name, metrics)
    trainer.save_metrics(name, metrics)
    return metrics


def train(trainer: Trainer, checkpoint: str | None) -> dict[str, float]:
    outcome = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    metrics = dict(outcome.metrics)
    if isinstance(trainer, DCSGDTrainer) and trainer.plan is not None:
        metrics |= {"epsilon": trainer.epsilon(), "delta": trainer.plan.delta}
    trainer.save_state()
    return kept(trainer, "train", metrics)


def publish(trainer: Trainer, **facts: Any) -> None:
    """Write the model card, and push it with the model if asked for. `facts` are those of `create_model_card`."""
    (trainer.push_to_hub if trainer.args.push_to_hub else trainer.create_model_card)(**facts)
    if isinstance(trainer, DCSGDTrainer) and trainer.plan is not None and trainer.is_world_process_zero():
        print(format_spending(trainer.privacy_report()))
