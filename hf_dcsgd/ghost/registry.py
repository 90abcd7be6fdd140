"""Which rule computes the contributions of which module type.

A rule is a function `(module, inputs, output_grad) -> {parameter name: contribution}`, registered by exact type. Both
tensors have the batch first; parameters that are not trainable are left out. A subclass is another type: it may
compute something else, so it goes to the fallback unless it is registered itself.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from hf_dcsgd.ghost.contributions import Contribution

Rule = Callable[[nn.Module, Tensor, Tensor], dict[str, Contribution]]
Recogniser = Callable[[nn.Module], bool]

_RULES: dict[type[nn.Module], Rule] = {}
_RECOGNISED: list[tuple[Recogniser, Rule]] = []


def register_rule(*module_types: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Decorator: this rule is exact for these types (and for none of their subclasses)."""

    def register(rule: Rule) -> Rule:
        for module_type in module_types:
            _RULES[module_type] = rule
        return rule

    return register


def register_recognised(recogniser: Recogniser, rule: Rule) -> None:
    """For families with many small classes: `recogniser(module)` proves that the rule is exact for this type."""
    _RECOGNISED.append((recogniser, rule))


def rule_for(module: nn.Module) -> Rule | None:
    """The exact rule for this module, or None: the fallback takes it."""
    module_type = type(module)
    if module_type not in _RULES:
        for recogniser, rule in _RECOGNISED:
            if recogniser(module):
                _RULES[module_type] = rule
                break
    return _RULES.get(module_type)


def trainable(module: nn.Module, name: str) -> bool:
    parameter = module._parameters.get(name)
    return parameter is not None and parameter.requires_grad
