"""`hf-dcsgd doctor`: what private training would do with a model, before any private data are touched.

All inputs are made up. Nothing is downloaded beyond the model that is asked for, and nothing is written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from textwrap import indent
from typing import Any

import transformers
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import find_adapter_config_file

from hf_dcsgd.checks.parity import ParityError
from hf_dcsgd.checks.preflight import check_before_training
from hf_dcsgd.checks.step_cost import measure_step
from hf_dcsgd.cli.doctor import TASKS
from hf_dcsgd.data.synthetic import end_token, synthetic_batch
from hf_dcsgd.ghost import BatchCouplingError, GhostClipper, UnsupportedModelError
from hf_dcsgd.reporting.format import parameter_groups
from hf_dcsgd.reporting.model_card import task_of
from hf_dcsgd.sharding.memory import rank_memory
from hf_dcsgd.step import PrivateStep
from hf_dcsgd.tasks.layer_selection import default_layers, select_trainable_layers, train_mode
from hf_dcsgd.tasks.loss_kind import loss_kind

_ADAPTER_TASKS = {
    "SEQ_CLS": "text-classification",
    "TOKEN_CLS": "token-classification",
    "QUESTION_ANS": "question-answering",
    "CAUSAL_LM": "text-generation",
    "SEQ_2_SEQ_LM": "text2text-generation",
}
_MEASURED_EXAMPLES = 4


def diagnose(
    name: str,
    *,
    task: str | None = None,
    trainable_layers: str | None = None,
    batch_size: int = 32,
    sequence_length: int = 128,
    devices: int = 1,
) -> dict[str, Any]:
    """Find out what would be trained and how, what is refused and why, whether norms are right, and the cost.

    ValueError when the model cannot be loaded. A refusal is part of the answer, under `refused`; what comes after it
    is then left out.
    """
    model, task = load_model(name, task)
    found: dict[str, Any] = {"model": name, "class": type(model).__name__, "task": task, "refused": []}
    try:
        _look_at(model, found, trainable_layers or default_layers(model), batch_size, sequence_length)
        if devices > 1:
            found["devices"] = _memory_of_devices(model, devices, found["step"]["bytes"]["activations"])
    except (UnsupportedModelError, BatchCouplingError, ParityError, ValueError, NotImplementedError) as error:
        found["refused"].append(str(error))
    return found


def load_model(name: str, task: str | None) -> tuple[Any, str]:
    """Load the model with the head of the task, in fp32; the task is read off its configuration when not given.

    The name may be that of an adapter, whose base model is then loaded below it.
    """
    with _quiet_transformers():
        try:
            if find_adapter_config_file(name) is not None:
                return _load_adapter(name, task)
            config = AutoConfig.from_pretrained(name)
            task = task or _task_of(config)
            model = getattr(transformers, TASKS[task]).from_pretrained(name, config=config)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ValueError(
                f"cannot load {name!r}{'' if task is None else f' for {task}'}. Expected a folder written by "
                f"save_pretrained, or the name of a model on the Hub and a network to fetch it. {_first_line(error)}"
            ) from error
    return model.float(), task


def _load_adapter(name: str, task: str | None) -> tuple[Any, str]:
    try:
        from peft import PeftConfig, PeftModel
    except ImportError:
        raise ValueError("it is an adapter, and those need peft: pip install peft") from None
    config = PeftConfig.from_pretrained(name)
    task = task or _ADAPTER_TASKS.get(str(getattr(config.task_type, "value", config.task_type)))
    base, task = load_model(str(config.base_model_name_or_path), task)
    return PeftModel.from_pretrained(base, name, is_trainable=True).float(), task


def _task_of(config: Any) -> str:
    tasks = [task_of(architecture) for architecture in getattr(config, "architectures", None) or ()]
    return next((task for task in tasks if task in TASKS), "text-classification")


def _look_at(model: Any, found: dict[str, Any], expression: str, batch_size: int, length: int) -> None:
    """Fill `found` step by step, so that what was learned before a refusal is kept."""
    names = select_trainable_layers(model, expression)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if name in set(names)}
    found["trainable_layers"] = expression
    found["trained_parameters"] = sum(sizes.values())
    found["total_parameters"] = sum(parameter.numel() for parameter in model.parameters())
    found["groups"] = parameter_groups(sizes)
    found["loss"] = loss_kind(model)
    train_mode(model)
    _set_padding(model)
    step = PrivateStep(model)
    found["rules"] = _modules_by_rule(step.clipper)
    check_before_training(step, synthetic_batch(model, found["loss"], 1, length))
    measured = min(_MEASURED_EXAMPLES, batch_size)
    larger = synthetic_batch(model, found["loss"], measured, length)
    found["shape"] = next(list(value.shape[1:]) for value in larger.values() if isinstance(value, Tensor))
    found["step"] = measure_step(
        step.clipper,
        lambda: step.losses(larger),
        step.units(larger),
        measured_size=measured,
        batch_size=batch_size,
    )
    found["slow_parameters"] = sorted(step.clipper.slow_parameters)


def _memory_of_devices(model: Any, devices: int, activations: int) -> dict[str, Any]:
    """Estimate what each of so many devices would hold with fsdp; the trunk is in fp32 here, as it was loaded."""
    memory = rank_memory(model, devices)
    memory |= {"activations": activations, "total": memory["total"] + activations}
    return {"count": devices, "bytes": memory}


def _set_padding(model: Any) -> None:
    """Name a padding token where there is none: some classifiers look for the last token that is none."""
    config: Any = model.config.get_text_config()
    if model.main_input_name == "input_ids" and config.pad_token_id is None:
        model.config.pad_token_id = config.pad_token_id = end_token(config) or 0


def _modules_by_rule(clipper: GhostClipper) -> dict[str, list[str]]:
    modules: dict[str, list[str]] = {}
    for module, rule in clipper.rules().items():
        modules.setdefault(rule.removesuffix("_rule"), []).append(module)
    return modules


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Turn off progress bars and the table of missing heads: a fresh head is what doctor expects."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.utils.logging.enable_progress_bar()
        logger.setLevel(level)


# -- as text ----------------------------------------------------------------------------------------------------------


def describe(found: dict[str, Any]) -> str:
    """Write the diagnosis for a terminal."""
    lines = [f"{found['class']} from {found['model']}, for {found['task']}"]
    if "groups" in found:
        share = f"{found['trained_parameters']:,} of {found['total_parameters']:,} parameters"
        lines += ["", f"trained ({found['trainable_layers']}): {share}"]
        width = max(len(group["name"]) for group in found["groups"])
        lines += [
            f"  {group['name']:<{width}}  {group['tensors']:>4} tensors  {group['parameters']:>14,}"
            for group in found["groups"]
        ]
    if "rules" in found:
        lines += ["", "gradients of single examples:"]
        lines += [f"  {_rule_name(rule):<44} {_listed(modules)}" for rule, modules in found["rules"].items()]
        slow = found.get("slow_parameters")
        if slow:
            lines.append(f"  {'one backward per example (exact, slow)':<44} {_listed(slow, 'tensor')}")
    lines += [""]
    if found["refused"]:
        lines += ["REFUSED, training would not start:", *(indent(reason, "  ") for reason in found["refused"])]
    else:
        shape = " × ".join(map(str, found["shape"]))
        lines += [
            "refused: nothing",
            "checks before training passed: gradients agree with autograd, examples are independent, the forward "
            f"writes nothing (synthetic examples of shape {shape})",
        ]
        lines += _step_lines(found["step"])
        lines += _device_lines(found["devices"]) if "devices" in found else []
    return "\n".join(lines)


def _step_lines(step: dict[str, Any]) -> list[str]:
    size, memory = step["batch_size"], step["bytes"]
    ratio = step["seconds"] / step["plain_seconds"] if step["plain_seconds"] else float("nan")
    return [
        "",
        f"one step of {size} examples on {step['device']}, estimated from {step['measured_size']}:",
        f"  time    {step['seconds']:.3g} s ({ratio:.2f} × the same step without privacy)",
        f"  memory  {_megabytes(memory['total'])}: weights {_megabytes(memory['weights'])}, gradient, Adam and noise "
        f"{_megabytes(memory['gradient_optimizer_noise'])}, activations {_megabytes(memory['activations'])}",
    ]


def _device_lines(devices: dict[str, Any]) -> list[str]:
    memory = devices["bytes"]
    return [
        "",
        f"with fsdp each of {devices['count']} devices holds {_megabytes(memory['total'])}: its piece of the frozen "
        f"part {_megabytes(memory['frozen'])}, trained {_megabytes(memory['trained'])}, gradient, Adam and noise "
        f"{_megabytes(memory['gradient_optimizer_noise'])}, gathered {_megabytes(memory['gathered'])}, activations "
        f"{_megabytes(memory['activations'])} (fp32; a bf16 trunk takes half for pieces and gathered)",
    ]


def _rule_name(rule: str) -> str:
    return "fallback (that module alone, per example)" if rule == "fallback" else f"{rule.replace('_', ' ')} rule"


def _listed(names: Sequence[str], what: str = "module") -> str:
    shown = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'}: {shown}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size >= 1e7 else f"{size / 1e6:.2g} MB"
