"""Differentially private fine-tuning with the Hugging Face Trainer, without tuning a clipping threshold."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hf_dcsgd.checks.parity import ParityError as ParityError
    from hf_dcsgd.clipping import ClippingThreshold as ClippingThreshold
    from hf_dcsgd.clipping import NormClipping as NormClipping
    from hf_dcsgd.clipping import PublicNumbers as PublicNumbers
    from hf_dcsgd.clipping import SideQuery as SideQuery
    from hf_dcsgd.clipping import StrategyOption as StrategyOption
    from hf_dcsgd.clipping import register_strategy as register_strategy
    from hf_dcsgd.ghost import BatchCouplingError as BatchCouplingError
    from hf_dcsgd.ghost import Dense as Dense
    from hf_dcsgd.ghost import GhostClipper as GhostClipper
    from hf_dcsgd.ghost import OneHotRows as OneHotRows
    from hf_dcsgd.ghost import Outer as Outer
    from hf_dcsgd.ghost import UnsupportedModelError as UnsupportedModelError
    from hf_dcsgd.ghost import register_rule as register_rule
    from hf_dcsgd.own_loop import PrivateRun as PrivateRun
    from hf_dcsgd.privacy.accountants import register_accountant as register_accountant
    from hf_dcsgd.privacy.ledger import LedgerError as LedgerError
    from hf_dcsgd.privacy.mechanism import BudgetExhausted as BudgetExhausted
    from hf_dcsgd.privacy.plan import PrivacyPlan as PrivacyPlan
    from hf_dcsgd.seq2seq import DCSGDSeq2SeqTrainer as DCSGDSeq2SeqTrainer
    from hf_dcsgd.seq2seq import DCSGDSeq2SeqTrainingArguments as DCSGDSeq2SeqTrainingArguments
    from hf_dcsgd.step import PrivateStep as PrivateStep
    from hf_dcsgd.trainer import DCSGDTrainer as DCSGDTrainer
    from hf_dcsgd.training_args import DCSGDTrainingArguments as DCSGDTrainingArguments

_EXPORTS = {
    "checks.parity": "ParityError",
    "clipping": "ClippingThreshold NormClipping PublicNumbers SideQuery StrategyOption register_strategy",
    "ghost": "BatchCouplingError Dense GhostClipper OneHotRows Outer UnsupportedModelError register_rule",
    "own_loop": "PrivateRun",
    "privacy.accountants": "register_accountant",
    "privacy.ledger": "LedgerError",
    "privacy.mechanism": "BudgetExhausted",
    "privacy.plan": "PrivacyPlan",
    "seq2seq": "DCSGDSeq2SeqTrainer DCSGDSeq2SeqTrainingArguments",
    "step": "PrivateStep",
    "trainer": "DCSGDTrainer",
    "training_args": "DCSGDTrainingArguments",
}
_HOMES = {name: module for module, names in _EXPORTS.items() for name in names.split()}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Load torch and transformers only when something is asked for: the command line stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hf_dcsgd' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"hf_dcsgd.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
