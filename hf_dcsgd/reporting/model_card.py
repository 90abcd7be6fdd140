"""The model card: the guarantee in words and as metadata, the plan, the threshold's picture, how to reproduce it.

Guarantee. A card is rendered from a privacy report (`report.py`), from metrics of the last evaluation, and from
arguments on a list of names that tell how a model was trained. So there is no way for a training example, a seed, the
state of a random generator or a training loss to get into it. A run with an opt-out gets a card that says so first.
"""

from __future__ import annotations

import dataclasses
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modelcard import TASK_MAPPING, TrainingSummary

from hf_dcsgd.clipping import strategy
from hf_dcsgd.reporting.report import rounded_up, shown_number
from hf_dcsgd.tasks.losses import unwrapped_model
from hf_dcsgd.training_args import DCSGDTrainingArguments

if TYPE_CHECKING:
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
_ALWAYS_SHOWN = ("per_device_train_batch_size", "learning_rate", "clipping")
_WITHHELD = ("unsafe_noise_seed",)
_MADE_BY_PEFT = ("peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode")
_NO_METRICS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


@dataclass(frozen=True)
class CardFacts:
    """What a card says beside the report: names, metrics of the evaluation, arguments of the training."""

    model_name: str
    usage: str
    arguments: Mapping[str, Any]
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


def render_card(report: Mapping[str, Any], facts: CardFacts) -> str:
    """The card as Markdown with its YAML header."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=False, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters.update(bound=rounded_up, number=shown_number, literal=_literal, text=_text, code=_code)
    template = environment.from_string(
        files("hf_dcsgd.reporting").joinpath("model_card.md").read_text(encoding="utf-8")
    )
    return template.render(
        **report,
        facts=facts,
        metadata=card_metadata(report, facts).to_yaml(),
        strategy=strategy(report["clipping"]["strategy"]).title,
        nominal="" if report["guarantee"]["holds"] else ", nominal, NOT a guarantee",
        paper=PAPER,
    )


def card_metadata(report: Mapping[str, Any], facts: CardFacts) -> ModelCardData:
    """The YAML header, with a `privacy` block. Under an opt-out it holds no ε that a machine could take for one."""
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


def _privacy_block(report: Mapping[str, Any]) -> dict[str, Any]:
    guarantee, budget, noise = report["guarantee"], report["budget"], report["noise"]
    names = [opt_out["name"] for opt_out in guarantee["opt_outs"]]
    if not guarantee["holds"]:
        return {"guarantee": "none", "opt_outs": names}
    return {
        "guarantee": "differential-privacy",
        "epsilon": float(rounded_up(guarantee["epsilon"])),
        "delta": float(rounded_up(guarantee["delta"])),
        "unit": guarantee["unit"],
        "neighbouring": "add-remove",
        "sampling": guarantee["sampling"],
        "accountant": guarantee["accountant"],
        f"epsilon_{budget['other_accountant']}": float(rounded_up(budget["other_epsilon"])),
        "noise_multiplier": noise["noise_multiplier"],
        "grad_noise_multiplier": noise["grad_noise_multiplier"],
        "sampling_rate": report["sampling"]["sampling_rate"],
        "dataset_size": report["sampling"]["dataset_size"],
        "steps": report["steps"]["charged"],
        "clipping": report["clipping"]["strategy"],
        "opt_outs": names,
    }


# -- the facts of a trainer -------------------------------------------------------------------------------------------


def card_facts(trainer: PublishingTrainer, *, repo_id: str | None = None, **given: Any) -> CardFacts:
    """What a trainer knows. `given` are the arguments of transformers' `create_model_card`, which it would infer."""
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


def task_of(class_name: str) -> str | None:
    """The Hub's name for what a transformers class does, as transformers itself infers it."""
    mappings: Mapping[str, Any] = TASK_MAPPING
    for task, mapping in mappings.items():
        for names in mapping.values():
            if class_name in ([names] if isinstance(names, str) else names):
                return task
    return None


def last_metrics(log_history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of the last evaluation, without their prefix. Nothing that was computed from training data."""
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
    """The arguments that tell how to train such a model again, where they differ from their defaults."""
    defaults = {option.name: option.default for option in dataclasses.fields(DCSGDTrainingArguments)}
    names = [name for name in args.privacy_options() if name not in _WITHHELD]
    values = {name: getattr(args, name) for name in (*names, *_TRAINING_ARGUMENTS)}
    return {
        name: _plain(value)
        for name, value in values.items()
        if name in _ALWAYS_SHOWN or _plain(value) != _plain(defaults[name])
    }


def usage(base: Any, name: str, base_model: str | None, *, adapter: bool, tokenizer: bool = False) -> str:
    """Code that loads the model, and its tokenizer where it has one."""
    model_class, quoted = type(base).__name__, json.dumps(name, ensure_ascii=False)
    names = ", ".join(["AutoTokenizer", model_class] if tokenizer else [model_class])
    last = f"\ntokenizer = AutoTokenizer.from_pretrained({quoted})" if tokenizer else ""
    if adapter:
        return (
            f"from peft import PeftModel\nfrom transformers import {names}\n\n"
            f"base = {_loaded(base, base_model)}\n"
            f"model = PeftModel.from_pretrained(base, {quoted}){last}"
        )
    if isinstance(base, PreTrainedModel):
        return f"from transformers import {names}\n\nmodel = {model_class}.from_pretrained({quoted}){last}"
    return (
        "from huggingface_hub import hf_hub_download\n"
        "from safetensors.torch import load_file\n\n"
        f'weights = load_file(hf_hub_download({quoted}, "model.safetensors"))  # of your {model_class}'
    )


def model_code(base: Any, base_model: str | None, adapter: Any = None) -> str:
    """Code that makes the model as it was before training; empty where that is not known."""
    if not isinstance(base, PreTrainedModel):
        return ""
    lines = [f"from transformers import {type(base).__name__}", "", f"model = {_loaded(base, base_model)}"]
    if adapter is not None:
        defaults = type(adapter)()
        given = {
            option.name: getattr(adapter, option.name)
            for option in dataclasses.fields(adapter)
            if option.init and option.name not in _MADE_BY_PEFT
        }
        changed = {name: value for name, value in given.items() if value != getattr(defaults, name)}
        shown = ", ".join(f"{name}={_argument(value)}" for name, value in changed.items())
        kind = type(adapter).__name__
        lines.insert(0, f"from peft import {kind}, get_peft_model")
        lines.append(f"model = get_peft_model(model, {kind}({shown}))")
    return "\n".join(lines)


def _loaded(base: Any, base_model: str | None) -> str:
    labels = getattr(base.config, "num_labels", 2)
    head = f", num_labels={labels}" if labels != 2 and "Classification" in type(base).__name__ else ""
    return f'{type(base).__name__}.from_pretrained("{base_model or "BASE MODEL"}"{head})'


def _argument(value: Any) -> str:
    value = _plain(value)
    return _literal(sorted(value) if isinstance(value, set) else value)


def write_trajectory(directory: Path, trace: Sequence[dict[str, Any]]) -> str | None:
    """Draws the threshold's picture beside the card; None where there is no threshold, or no matplotlib."""
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


def _literal(value: Any) -> str:
    return _code(json.dumps(value) if isinstance(value, str) else repr(value))


def _text(value: Any) -> str:
    """Names come from files and arguments of anyone's: no HTML, no Markdown, no second line comes out of them."""
    one_line = html.escape(" ".join(str(value).split()), quote=False)
    return re.sub(r"([\\`*\[\]|!~#])", r"\\\1", one_line)


def _code(value: str) -> str:
    """For a fenced block, which only a fence can end."""
    return value.replace("```", "'''")


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _listed(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else [item for item in value or () if item]


def _is_repo_id(name: str | None) -> bool:
    """Whether it can only be a model on the Hub: a folder of that name is on this machine alone."""
    if not name or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
