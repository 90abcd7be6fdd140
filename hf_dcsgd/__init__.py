"""Differentially private fine-tuning with the Hugging Face Trainer, without tuning a clipping threshold."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hf_dcsgd.trainer import DCSGDTrainer
    from hf_dcsgd.training_args import DCSGDTrainingArguments

__all__ = ["DCSGDTrainer", "DCSGDTrainingArguments", "__version__"]

_HOMES = {"DCSGDTrainer": "hf_dcsgd.trainer", "DCSGDTrainingArguments": "hf_dcsgd.training_args"}


def __getattr__(name: str) -> Any:
    """Loads torch and transformers only when a class is asked for: the command line stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hf_dcsgd' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
