"""Code in a model card: how to load the model, and how to make it as it was before training."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from transformers import PreTrainedModel

_SET_BY_PEFT = ("peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode")


def usage(base: Any, name: str, base_model: str | None, *, adapter: bool, tokenizer: bool = False) -> str:
    """Return code that loads the model, and its tokenizer where it has one."""
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
    """Return code that makes the model as it was before training; empty where that is not known."""
    if not isinstance(base, PreTrainedModel):
        return ""
    lines = [f"from transformers import {type(base).__name__}", "", f"model = {_loaded(base, base_model)}"]
    if adapter is not None:
        defaults = type(adapter)()
        given = {
            option.name: getattr(adapter, option.name)
            for option in dataclasses.fields(adapter)
            if option.init and option.name not in _SET_BY_PEFT
        }
        changed = {name: value for name, value in given.items() if value != getattr(defaults, name)}
        shown = ", ".join(f"{name}={literal(value)}" for name, value in changed.items())
        kind = type(adapter).__name__
        lines.insert(0, f"from peft import {kind}, get_peft_model")
        lines.append(f"model = get_peft_model(model, {kind}({shown}))")
    return "\n".join(lines)


def literal(value: Any) -> str:
    """Write a value as Python code; enumerations as their values, sets in order."""
    value = plain_value(value)
    value = sorted(value) if isinstance(value, set) else value
    return fenced(json.dumps(value) if isinstance(value, str) else repr(value))


def fenced(text: str) -> str:
    """Make text safe for a fenced block, which only a fence can end."""
    return text.replace("```", "'''")


def plain_value(value: Any) -> Any:
    """Return the value of an enumeration's member, anything else as it is."""
    return getattr(value, "value", value)


def _loaded(base: Any, base_model: str | None) -> str:
    labels = getattr(base.config, "num_labels", 2)
    head = f", num_labels={labels}" if labels != 2 and "Classification" in type(base).__name__ else ""
    return f"{type(base).__name__}.from_pretrained({json.dumps(base_model or 'BASE MODEL')}{head})"
