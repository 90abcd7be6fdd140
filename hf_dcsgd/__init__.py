"""Differentially private fine-tuning with the Hugging Face Trainer, without tuning a clipping threshold."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hf_dcsgd.checks.parity import ParityError
    from hf_dcsgd.clipping import (
        ClippingThreshold,
        NormClipping,
        PublicNumbers,
        SideQuery,
        StrategyOption,
        register_strategy,
    )
    from hf_dcsgd.ghost import BatchCouplingError, GhostClipper, UnsupportedModelError, register_rule
    from hf_dcsgd.ghost.contributions import Dense, OneHotRows, Outer
    from hf_dcsgd.own_loop import PrivateRun
    from hf_dcsgd.privacy.accounting import register_accountant
    from hf_dcsgd.privacy.ledger import LedgerError
    from hf_dcsgd.privacy.mechanism import BudgetExhausted
    from hf_dcsgd.privacy.plan import PrivacyPlan
    from hf_dcsgd.step import PrivateStep
    from hf_dcsgd.trainer import DCSGDTrainer
    from hf_dcsgd.training_args import DCSGDTrainingArguments

_HOMES = {
    "BatchCouplingError": "ghost",
    "BudgetExhausted": "privacy.mechanism",
    "ClippingThreshold": "clipping",
    "DCSGDTrainer": "trainer",
    "DCSGDTrainingArguments": "training_args",
    "Dense": "ghost.contributions",
    "GhostClipper": "ghost",
    "LedgerError": "privacy.ledger",
    "NormClipping": "clipping",
    "OneHotRows": "ghost.contributions",
    "Outer": "ghost.contributions",
    "ParityError": "checks.parity",
    "PrivacyPlan": "privacy.plan",
    "PrivateRun": "own_loop",
    "PrivateStep": "step",
    "PublicNumbers": "clipping",
    "SideQuery": "clipping",
    "StrategyOption": "clipping",
    "UnsupportedModelError": "ghost",
    "register_accountant": "privacy.accounting",
    "register_rule": "ghost",
    "register_strategy": "clipping",
}

__all__ = [
    "BatchCouplingError",
    "BudgetExhausted",
    "ClippingThreshold",
    "DCSGDTrainer",
    "DCSGDTrainingArguments",
    "Dense",
    "GhostClipper",
    "LedgerError",
    "NormClipping",
    "OneHotRows",
    "Outer",
    "ParityError",
    "PrivacyPlan",
    "PrivateRun",
    "PrivateStep",
    "PublicNumbers",
    "SideQuery",
    "StrategyOption",
    "UnsupportedModelError",
    "__version__",
    "register_accountant",
    "register_rule",
    "register_strategy",
]


def __getattr__(name: str) -> Any:
    """Load torch and transformers only when something is asked for: the command line stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hf_dcsgd' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"hf_dcsgd.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
