"""Tiny models with random weights, of every class that transformers lists for a task; nothing is downloaded.

The default configuration of a class is walked and shrunk by the names of its settings; what that leaves standing is
named in `zoo_sizes.OVERRIDES`. Everything else, dropout above all, stays as the default configuration has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from zoo_sizes import CLASS_OVERRIDES, LAYERS, LISTS, OVERRIDES, REQUIRED, SIZES, SPECIAL_TOKENS, VOCABULARY

NUM_LABELS = 3

TASKS = {
    "SequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "TokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "MaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "CausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "ImageClassification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}


class Species(NamedTuple):
    """A class to look at: the task in whose list it is, the type of its configuration, and its name."""

    task: str
    model_type: str
    class_name: str


def species() -> Iterator[Species]:
    """Go through all classes of the auto classes; each once per task, under the first configuration that it has."""
    for task, classes in TASKS.items():
        seen = set()
        for model_type, names in classes.items():
            for class_name in (names,) if isinstance(names, str) else names:
                if class_name not in seen:
                    seen.add(class_name)
                    yield Species(task, model_type, class_name)


def tiny_config(kind: Species, settings: dict[str, Any] | None = None, *, part: bool = True) -> Any:
    """Return a small configuration for a class, with further settings on top; or the one of which it is a part."""
    config_class: Any = CONFIG_MAPPING[kind.model_type]
    overrides = _merged(OVERRIDES.get(kind.model_type, {}), CLASS_OVERRIDES.get(kind.class_name, {}))
    try:
        default = config_class()
    except Exception:
        default = config_class(**overrides)
    overrides = _merged({"num_labels": NUM_LABELS, **overrides}, settings or {})
    config = config_class(**_merged(_small_settings(default), overrides))
    if not part:
        return config
    wanted: Any = getattr(hf, kind.class_name).config_class
    parts = [config, *(part for part in vars(config).values() if isinstance(part, hf.PreTrainedConfig))]
    return next(part for part in parts if wanted is None or isinstance(part, wanted))


def build(kind: Species, settings: dict[str, Any] | None = None) -> nn.Module:
    """Make a tiny model with random weights, so that no gradient vanishes by accident of initialization."""
    config = tiny_config(kind, settings)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = getattr(hf, kind.class_name)(config)
        for parameter in model.parameters():
            if not parameter.isfinite().all() or parameter.abs().max() > 1e3:  # left unset by its class
                parameter.zero_()
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _small_settings(config: Any) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, hf.PreTrainedConfig):
            made[name] = {"model_type": value.model_type, **_small_settings(value)}
        elif name in (REQUIRED if value is None else SPECIAL_TOKENS):
            made[name] = SIZES[name]
        elif isinstance(value, int) and not isinstance(value, bool) and name in SIZES:
            made[name] = VOCABULARY if name == "vocab_size" else min(value, SIZES[name])
        elif isinstance(value, int) and name.endswith(("_token_id", "_token_index")):
            made[name] = value if value < VOCABULARY else VOCABULARY - 1
        elif isinstance(value, list | tuple) and name in LISTS and len(value) <= len(LISTS[name]):
            made[name] = list(LISTS[name][-len(value) :])
    return _with_layer_types(made, config)


def _with_layer_types(made: dict[str, Any], config: Any) -> dict[str, Any]:
    """Keep one layer of each type, where types are a setting."""
    if not made.get("num_hidden_layers"):
        return made
    settings = vars(config)
    for name in ("layer_types", "layers_block_type"):
        if types := settings.get(name):
            kinds = list(dict.fromkeys(types))
            kinds = kinds * LAYERS if len(kinds) == 1 else kinds
            made |= {name: kinds, "num_hidden_layers": len(kinds)}
    if types := settings.get("mlp_layer_types"):
        kinds = list(dict.fromkeys(types))
        made["mlp_layer_types"] = [kinds[i % len(kinds)] for i in range(made["num_hidden_layers"])]
    return made


def _merged(settings: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = {**settings}
    for name, value in overrides.items():
        inner = merged.get(name)
        merged[name] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged
