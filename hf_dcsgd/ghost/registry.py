"""Which rule computes the contributions of which module type.

A rule is a function `(module, inputs, output_grad) -> {parameter name: contribution}`, registered by exact type. Both
tensors have the batch first; parameters that are not trainable are left out. A subclass is another type: it may
compute something else, so it goes to the fallback unless it is registered itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from hf_dcsgd.ghost.contributions import Contribution

Rule = Callable[[nn.Module, Tensor, Tensor], dict[str, Contribution]]
Recognizer = Callable[[nn.Module], bool]

_RULES: dict[type[nn.Module], Rule] = {}
_INPUTS_FOR: dict[Rule, frozenset[str]] = {}
_RECOGNIZED: list[tuple[Recognizer, Rule]] = []


def register_rule(*module_types: type[nn.Module], inputs_for: Iterable[str] | None = None) -> Callable[[Rule], Rule]:
    """Register the decorated rule as exact for these types, and for none of their subclasses.

    `inputs_for` names the parameters whose contributions need the input. Where all of them are frozen, the rule gets
    an input without values (on the `meta` device), and its memory is not held. All parameters need it by default.
    """

    def register(rule: Rule) -> Rule:
        if inputs_for is not None:
            _INPUTS_FOR[rule] = frozenset(inputs_for)
        for module_type in module_types:
            _RULES[module_type] = rule
        return rule

    return register


def register_recognized(recognizer: Recognizer, rule: Rule) -> None:
    """Register a rule for a family of many small classes: `recognizer(module)` proves it exact for a type."""
    _RECOGNIZED.append((recognizer, rule))


def rule_for(module: nn.Module) -> Rule | None:
    """Return the exact rule for this module, or None: the fallback takes it."""
    module_type = type(module)
    if module_type not in _RULES:
        for recognizer, rule in _RECOGNIZED:
            if recognizer(module):
                _RULES[module_type] = rule
                break
    return _RULES.get(module_type)


def needs_input(rule: Rule, attributes: Iterable[str]) -> bool:
    """Tell whether contributions to these parameters of a module need its input."""
    return rule not in _INPUTS_FOR or not _INPUTS_FOR[rule].isdisjoint(attributes)


def is_built_in(rule: Rule) -> bool:
    return rule.__module__.partition(".")[0] == __name__.partition(".")[0]


def trainable(module: nn.Module, name: str) -> bool:
    """Tell whether a module has this parameter of its own and it requires grad."""
    parameter = module._parameters.get(name)
    return parameter is not None and parameter.requires_grad
