"""A privacy plan as a table, to be shown before training, and what is said of opt-outs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_dcsgd.clipping import strategy
from hf_dcsgd.privacy.plan import RAW_TRAIN_LOSS, UNSAFE_NOISE_SEED, ZERO_NOISE, PrivacyPlan, PrivacyUnit
from hf_dcsgd.recipe import AUTO, GOOD_TRAVEL, TRAVEL, USEFUL_TRAVEL

if TYPE_CHECKING:
    from hf_dcsgd.training_args import DCSGDTrainingArguments

OPT_OUT_TEXTS = {
    RAW_TRAIN_LOSS: "The raw training loss is logged. It is computed from private examples without noise.",
    UNSAFE_NOISE_SEED: "Noise and sampling come from a fixed seed. Whoever knows it can subtract the noise.",
    ZERO_NOISE: "No noise is added.",
}


def opt_out_text(name: str) -> str:
    """Return a sentence on why this opt-out voids the guarantee."""
    return OPT_OUT_TEXTS.get(name, "An option outside the guarantee is used.")


def describe_plan(plan: PrivacyPlan) -> str:
    """Return the plan as a readable table."""
    sides = plan.side_noise_multipliers
    settings = [f"{name} {_shown(value)}" for name, value in plan.settings.items() if name not in sides]
    rows = [
        ("guarantee", _guarantee(plan)),
        ("accountant", f"{plan.accountant}, {plan.steps} steps"),
        (
            "sampling",
            f"Poisson, q = {plan.expected_batch_size}/{plan.dataset_size} = {plan.sampling_rate:.4g} "
            f"(expected batch size {plan.expected_batch_size}{' units' if plan.draws_units else ''})",
        ),
        *(() if plan.unit is None else [("unit of privacy", describe_unit(plan.unit))]),
        ("noise multiplier", f"σ = {plan.noise_multiplier:.5f} (accounted)"),
        ("gradient", f"σ_T = {plan.grad_noise_multiplier:.5f}, {plan.num_parameters:,} parameters"),
        *((name, f"{value:g}") for name, value in sides.items()),
        ("clipping", ", ".join([plan.clipping, *settings])),
    ]
    if plan.loss_clip is not None:
        rows.append(("loss", f"noisy mean released, each loss cut to [0, {plan.loss_clip:g}]"))
    if plan.delta * plan.num_units >= 1:
        rows.append(("note", "δ is no smaller than 1/N, as in the paper; a smaller one is better practice"))
    rows += [("WARNING", f"no guarantee, because of {name}: {opt_out_text(name)}") for name in plan.opt_outs]
    return _table("Privacy plan", rows)


def plan_settings(plan: PrivacyPlan) -> dict[str, Any]:
    """Return the plan for trackers of experiments: its numbers, all of them public, and what it protects."""
    return {
        "guarantee": f"none, because of {', '.join(plan.opt_outs)}" if plan.opt_outs else _guarantee(plan),
        "epsilon": plan.epsilon(),
        "sampling_rate": plan.sampling_rate,
        "grad_noise_multiplier": plan.grad_noise_multiplier,
        **plan.to_dict(),
        "unsafe_noise_seed": None,
    }


def describe_recipe(args: DCSGDTrainingArguments, plan: PrivacyPlan) -> str:
    """Return what was derived for whom left it unset, with the reasons, and how far training can get by it."""
    rows = [
        (name, f"{_shown(getattr(value := getattr(args, name), 'value', value))}: {reason}")
        for name, reason in args.derived.items()
        if name != "num_train_epochs" or args.max_steps <= 0
    ]
    distance = _travel(args, plan)
    if distance is not None:
        rows.append(("travel", f"D = {distance:,.0f}, the sum of learning rate × B/σ_T over all steps"))
    if _optimizer_remembers_thresholds(args, plan):
        rows.append(
            (
                "note",
                f"the threshold of {plan.clipping} moves with the norms, and Adam remembers the scale of earlier "
                "gradients: scale_free_gradient=True divides it out",
            )
        )
    warning = little_to_expect(args, plan)
    if warning is not None:
        rows.append(("WARNING", warning))
    return _table(f"Recipe ({args.recipe})", rows) if rows else ""


def _guarantee(plan: PrivacyPlan) -> str:
    return f"ε ≤ {plan.epsilon():.4g} at δ = {plan.delta:.4g}, adding or removing one {plan.protected}"


def little_to_expect(args: DCSGDTrainingArguments, plan: PrivacyPlan) -> str | None:
    """Say that a run is likely to learn little, and what helps; None where that is not so, or not known."""
    distance = _travel(args, plan)
    if distance is None or distance >= GOOD_TRAVEL:
        return None
    expected = "little" if distance < USEFUL_TRAVEL else "less than such data could give"
    return (
        f"expect {expected}: {plan.dataset_size:,} examples at ε = {plan.epsilon():.3g} mean much noise for so few "
        f"steps (D = {distance:,.0f}; the recipe aims at {TRAVEL:g}, and below {USEFUL_TRAVEL:g} models have ended "
        f"close to untrained). What helps: more examples, a larger target_epsilon, {_left_to_recipe(args)}"
    )


def _left_to_recipe(args: DCSGDTrainingArguments) -> str:
    names = ("per_device_train_batch_size", "num_train_epochs", "learning_rate")
    given = [name for name in names if name not in args.derived]
    if args.recipe != AUTO:
        return "recipe=auto"
    return f"leaving {', '.join(given)} to the recipe" if given else "a model that was trained on similar public data"


def _travel(args: DCSGDTrainingArguments, plan: PrivacyPlan) -> float | None:
    """Return how far training goes; None for optimizers of which that is not known."""
    return args.travel(plan).per_rate * args.learning_rate if _uses_adam(args) else None


def _optimizer_remembers_thresholds(args: DCSGDTrainingArguments, plan: PrivacyPlan) -> bool:
    follows = bool(strategy(plan.clipping).side_noise_multipliers(plan.settings))
    return follows and _uses_adam(args) and not args.scale_free_gradient


def _uses_adam(args: DCSGDTrainingArguments) -> bool:
    return "adam" in str(getattr(args.optim, "value", args.optim))


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows)])


def describe_unit(unit: PrivacyUnit) -> str:
    """Say in a line what is protected, and what of it is used."""
    if unit.by_row:
        use = f"the first {unit.max_rows} rows of each are used, drawn and clipped one by one"
    else:
        use = f"drawn and clipped as a whole, with at most {unit.max_rows} rows in a step"
    return f"{unit.column}, {unit.count:,} of them (a public number); {use}"


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, str | bool) else f"{value:g}"
