"""A privacy plan as a table, to be shown before training, and what is said of opt-outs."""

from __future__ import annotations

from typing import Any

from hf_dcsgd.privacy.plan import RAW_TRAIN_LOSS, UNSAFE_NOISE_SEED, ZERO_NOISE, PrivacyPlan, PrivacyUnit

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
        ("guarantee", f"ε ≤ {plan.epsilon():.4g} at δ = {plan.delta:.4g}, adding or removing one {plan.protected}"),
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
    width = max(len(name) for name, _ in rows)
    return "\n".join(["Privacy plan", *(f"  {name:<{width}}  {text}" for name, text in rows)])


def describe_unit(unit: PrivacyUnit) -> str:
    """Say in a line what is protected, and what of it is used."""
    if unit.by_row:
        use = f"the first {unit.max_rows} rows of each are used, drawn and clipped one by one"
    else:
        use = f"drawn and clipped as a whole, with at most {unit.max_rows} rows in a step"
    return f"{unit.column}, {unit.count:,} of them (a public number); {use}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}"
