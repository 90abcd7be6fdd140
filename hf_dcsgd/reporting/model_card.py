"""Renders the model card: the guarantee in words and as metadata, the plan, the threshold, how to reproduce it.

Guarantee. A card is rendered from a privacy report (`report.py`), from metrics of the last evaluation, and from
arguments on a list of names that tell how a model was trained. So there is no way for a training example, a seed, the
state of a random generator or a training loss to get into it. A run with an opt-out gets a card that says so first.
"""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedTokenizerBase
from transformers.modelcard import TASK_MAPPING, TrainingSummary

from hf_dcsgd.clipping import strategy
from hf_dcsgd.reporting.format import rounded_up, shown_number
from hf_dcsgd.reporting.schema import PrivacyReport
from hf_dcsgd.reporting.snippets import fenced, literal, model_code, plain_value, usage
from hf_dcsgd.tasks.loss_kind import unwrapped_model
from hf_dcsgd.training_args import DCSGDTrainingArguments

if TYPE_CHECKING:
    from jinja2 import Template

    from hf_dcsgd.reporting.publishing import PublishingTrainer

CARD_FILENAME = "README.md"
TRAJECTORY_FILENAME = "clip_threshold.png"
PAPER = {
    "title": "DC-SGD: Differentially Private SGD with Dynamic Clipping through Gradient Norm Distribution Estimation",
    "authors": "Chengkun Wei and Weixian Li and Chen Gong and Wenzhi Chen",
}
# How a model was trained, beside the privacy options. Nothing that could hold a seed, a token or a path is here.
_TRAINING_ARGUMENTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "optim",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "label_smoothing_factor",
    "max_grad_norm",
    "bf16",
)
_TRL_ARGUMENTS = (
    "max_length",
    "truncation_mode",
    "completion_only_loss",
    "assistant_only_loss",
    "loss_type",
    "dataset_text_field",
    "eos_token",
)
_ALWAYS_SHOWN = ("per_device_train_batch_size", "learning_rate", "clipping")
_WITHHELD = ("unsafe_noise_seed",)
_NO_METRICS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


@dataclass(frozen=True)
class CardFacts:
    """What a card says beside the report: names, metrics of the evaluation, arguments of the training."""

    model_name: str
    usage: str
    arguments: Mapping[str, Any]
    home: str = "hf_dcsgd"
    trainer: str = "DCSGDTrainer"
    arguments_class: str = "DCSGDTrainingArguments"
    model_code: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    task: str | None = None
    base_model: str | None = None
    library_name: str = "transformers"
    adapter: bool = False
    language: str | Sequence[str] | None = None
    license: str | None = None
    tags: Sequence[str] = ()
    dataset_ids: Sequence[str] = ()
    dataset_names: Sequence[str] = ()
    report_files: Sequence[str] = ()
    trajectory: str | None = None


def render_card(report: PrivacyReport, facts: CardFacts) -> str:
    """Render the card as Markdown with its YAML header."""
    return _template().render(
        **report,
        facts=facts,
        metadata=card_metadata(report, facts).to_yaml(),
        strategy=strategy(report["clipping"]["strategy"]).title,
        alone=", this run alone" if report["earlier_spending"] else "",
        nominal="" if report["guarantee"]["holds"] else ", nominal, NOT a guarantee",
        paper=PAPER,
    )


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=False, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters.update(bound=rounded_up, number=shown_number, literal=literal, text=_text, code=fenced)
    return environment.from_string(files("hf_dcsgd.reporting").joinpath("model_card.md").read_text(encoding="utf-8"))


def card_metadata(report: PrivacyReport, facts: CardFacts) -> ModelCardData:
    """Make the YAML header, with a `privacy` block; under an opt-out it has no ε that a machine could take for one."""
    results = None
    if facts.task is not None and facts.metrics:
        results = [
            EvalResult(
                task_type=facts.task,
                dataset_type=(facts.dataset_ids or ["unknown"])[0],
                dataset_name=(facts.dataset_names or ["evaluation data"])[0],
                metric_type=name,
                metric_value=value,
            )
            for name, value in facts.metrics.items()
        ]
    private = ["differential-privacy"] if report["guarantee"]["holds"] else []
    return ModelCardData(
        language=_listed(facts.language) or None,
        license=facts.license,
        library_name=facts.library_name,
        base_model=facts.base_model,
        datasets=list(facts.dataset_ids) or None,
        tags=[*private, "dc-sgd", "hf-dcsgd", *facts.tags],
        metrics=[name for name in facts.metrics if name != "loss"] or None,
        pipeline_tag=facts.task,
        model_name=facts.model_name if results else None,
        eval_results=results,
        privacy=_privacy_block(report),
    )


def _privacy_block(report: PrivacyReport) -> dict[str, Any]:
    guarantee, budget, noise = report["guarantee"], report["budget"], report["noise"]
    names = [opt_out["name"] for opt_out in guarantee["opt_outs"]]
    if not guarantee["holds"]:
        return {"guarantee": "none", "opt_outs": names}
    spending = report["earlier_spending"]
    # The other accountant's ε is of this run alone: beside a total it would be taken for a better one.
    others = {f"epsilon_{budget['other_accountant']}": _upper(budget["other_epsilon"])} if spending is None else {}
    earlier = {} if spending is None else {"earlier_spending": spending["dismissed"] or "counted"}
    return {
        "guarantee": "differential-privacy",
        "epsilon": _upper(guarantee["epsilon"]),
        "delta": _upper(guarantee["delta"]),
        "unit": guarantee["unit"],
        "neighboring": "add-remove",
        "sampling": guarantee["sampling"],
        "accountant": guarantee["accountant"],
        **others,
        "noise_multiplier": noise["noise_multiplier"],
        "grad_noise_multiplier": noise["grad_noise_multiplier"],
        "sampling_rate": report["sampling"]["sampling_rate"],
        "dataset_size": report["sampling"]["dataset_size"],
        "steps": report["steps"]["charged"],
        "clipping": report["clipping"]["strategy"],
        "opt_outs": names,
        **earlier,
    }


def _upper(value: float | None) -> float | None:
    return None if value is None else float(rounded_up(value))


# -- the facts of a trainer -------------------------------------------------------------------------------------------


def card_facts(trainer: PublishingTrainer, *, repo_id: str | None = None, **given: Any) -> CardFacts:
    """Collect what a trainer knows. `given` are arguments of `create_model_card`, which transformers would infer."""
    base = unwrapped_model(trainer.model)
    adapters: Any = getattr(trainer.model, "peft_config", None) or {}
    adapter = bool(adapters)
    given["tasks"] = given.get("tasks") or task_of(type(base).__name__)
    if not hasattr(trainer.model, "config"):
        given["finetuned_from"] = given.get("finetuned_from") or ""
    summary = TrainingSummary.from_trainer(trainer, **given)
    task = summary.tasks if isinstance(summary.tasks, str) else next(iter(summary.tasks or ()), None)
    model_name = summary.model_name or "model"
    has_tokenizer = isinstance(trainer.processing_class, PreTrainedTokenizerBase)
    base_model = summary.finetuned_from if _is_repo_id(summary.finetuned_from) else None
    return CardFacts(
        model_name=model_name,
        usage=usage(base, repo_id or model_name, base_model, adapter=adapter, tokenizer=has_tokenizer),
        model_code=model_code(base, base_model, next(iter(adapters.values()), None)),
        arguments=training_arguments(trainer.args),
        home=_home(type(trainer))[0],
        trainer=_home(type(trainer))[1],
        arguments_class=_home(type(trainer.args))[1],
        metrics=last_metrics(trainer.state.log_history),
        task=task,
        base_model=base_model,
        library_name="peft" if adapter else "transformers",
        adapter=adapter,
        language=summary.language,
        license=summary.license,
        tags=_listed(summary.tags),
        dataset_ids=_listed(summary.dataset_tags),
        dataset_names=_listed(summary.dataset),
    )


def _home(kind: type) -> tuple[str, str]:
    """Return where the nearest class of this package is imported from, and its name: users subclass."""
    known = next(parent for parent in kind.__mro__ if parent.__module__.startswith("hf_dcsgd."))
    return "hf_dcsgd.trl" if known.__module__.startswith("hf_dcsgd.trl.") else "hf_dcsgd", known.__name__


def task_of(class_name: str) -> str | None:
    """Return the Hub's name for what a transformers class does, as transformers itself infers it."""
    mappings: Mapping[str, Any] = TASK_MAPPING
    classes = ((task, _listed(names)) for task, mapping in mappings.items() for names in mapping.values())
    return next((task for task, names in classes if class_name in names), None)


def last_metrics(log_history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of the last evaluation, without their prefix: nothing computed from training data."""
    for entry in reversed(log_history):
        found = {
            name.removeprefix("eval_"): value
            for name, value in entry.items()
            if name.startswith("eval_") and isinstance(value, int | float)
        }
        metrics = {name: float(value) for name, value in found.items() if name not in _NO_METRICS}
        if metrics:
            return metrics
    return {}


def training_arguments(args: DCSGDTrainingArguments) -> dict[str, Any]:
    """Return the arguments that tell how to train such a model again, where they differ from their defaults."""
    defaults = {option.name: option.default for option in dataclasses.fields(args)}
    names = [name for name in args.privacy_options() if name not in _WITHHELD]
    names += [name for name in (*_TRAINING_ARGUMENTS, *_TRL_ARGUMENTS) if name in defaults]
    values = {name: getattr(args, name) for name in names}
    return {
        name: plain_value(value)
        for name, value in values.items()
        if name in _ALWAYS_SHOWN or plain_value(value) != plain_value(defaults[name])
    }


def write_trajectory(directory: Path, trace: Sequence[dict[str, Any]]) -> str | None:
    """Draw the threshold's picture beside the card; None where there is no threshold, or no matplotlib."""
    path = directory / TRAJECTORY_FILENAME
    path.unlink(missing_ok=True)
    try:
        from hf_dcsgd.reporting import plots
    except ImportError:
        return None
    figure = plots.threshold_figure(trace)
    if figure is None:
        return None
    path.write_bytes(plots.png(figure))
    return path.name


def _text(value: Any) -> str:
    """Escape names, which come from anyone's files and arguments: no HTML, no Markdown, no second line is left."""
    one_line = html.escape(" ".join(str(value).split()), quote=False)
    return re.sub(r"([\\`*\[\]|!~#])", r"\\\1", one_line)


def _listed(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else [item for item in value or () if item]


def _is_repo_id(name: str | None) -> bool:
    """Tell whether it can only be a model on the Hub: a folder of that name is on this machine alone."""
    if not name or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
