"""One frozen plan: sampling rate, sigmas, threshold and privacy event all follow from it, so they cannot disagree.

Guarantee. A run of at most ``steps`` steps of the mechanism built from a plan is (``epsilon()``, ``delta``)-DP for
adding or removing one example, unless ``opt_outs`` says otherwise. Three sigmas, never reassigned:
``noise_multiplier`` (σ, the one accounted), ``grad_noise_multiplier`` (σ_T, what is left for the gradient) and
``histogram_noise_multiplier`` (σ_H). Everything in a plan is public.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import dp_accounting

from hf_dcsgd.clipping import STRATEGIES
from hf_dcsgd.privacy import accounting
from hf_dcsgd.validation import require, require_count, require_non_negative, require_positive

# What a plan may say against itself; each voids the guarantee, and the report repeats it.
ZERO_NOISE = "zero_noise"
UNSAFE_NOISE_SEED = "unsafe_noise_seed"
RAW_TRAIN_LOSS = "raw_train_loss"

STRATEGY_OPTIONS: dict[str, tuple[str, ...]] = {
    "fixed": ("clip_threshold",),
    "dc_sgd_p": ("clip_threshold", "percentile", "histogram_bins", "histogram_range"),
    "dc_sgd_e": ("clip_threshold", "histogram_bins", "histogram_range"),
    "andrew": ("clip_threshold", "percentile", "andrew_learning_rate", "andrew_noise_multiplier"),
    "du": ("clip_threshold", "du_decay"),
    "auto_clip": ("auto_clip_gamma",),
}
_HISTOGRAM_STRATEGIES = ("dc_sgd_p", "dc_sgd_e")
# How the work is spread over processes; the mechanism is the same for any of them.
_LAYOUT_FIELDS = ("world_size", "gradient_accumulation_steps")


@dataclass(frozen=True)
class PrivacyPlan:
    """The public numbers of one run. Make it with :meth:`create`."""

    dataset_size: int
    expected_batch_size: int
    steps: int
    num_parameters: int
    delta: float
    noise_multiplier: float
    accountant: str
    clipping: str
    settings: Mapping[str, Any]
    histogram_noise_multiplier: float | None = None
    loss_noise_multiplier: float | None = None
    loss_clip: float | None = None
    target_epsilon: float | None = None
    world_size: int = 1
    gradient_accumulation_steps: int = 1
    unsafe_noise_seed: int | None = None
    opt_outs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", dict(self.settings))
        object.__setattr__(self, "opt_outs", tuple(self.opt_outs))
        _require_public_numbers(self)
        _require_strategy(self)
        if self.noise_multiplier == 0:
            require(ZERO_NOISE in self.opt_outs, f"expected {ZERO_NOISE!r} in opt_outs with noise_multiplier 0")
        if self.unsafe_noise_seed is not None:
            require(
                UNSAFE_NOISE_SEED in self.opt_outs,
                f"expected {UNSAFE_NOISE_SEED!r} in opt_outs with unsafe_noise_seed {self.unsafe_noise_seed}",
            )
        # Raises when the side releases leave nothing for the gradient.
        _ = self.grad_noise_multiplier

    @classmethod
    def create(
        cls,
        *,
        dataset_size: int,
        expected_batch_size: int,
        steps: int,
        num_parameters: int,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        target_delta: float | None = None,
        accountant: str = "rdp",
        clipping: str = "dc_sgd_e",
        clip_threshold: float = 1.0,
        percentile: float = 0.5,
        histogram_bins: int = 20,
        histogram_range: float | None = None,
        histogram_noise_multiplier: float | None = None,
        andrew_learning_rate: float = 0.2,
        andrew_noise_multiplier: float | None = None,
        du_decay: float = 0.5,
        auto_clip_gamma: float = 0.01,
        loss_clip: float | None = None,
        loss_noise_multiplier: float | None = None,
        world_size: int = 1,
        gradient_accumulation_steps: int = 1,
        unsafe_noise_seed: int | None = None,
        opt_outs: Sequence[str] = (),
    ) -> PrivacyPlan:
        """Resolve every default. σ comes from ``target_epsilon`` or is given as ``noise_multiplier``, not both.

        Settings of other strategies are ignored. ``target_delta`` defaults to 1/N. ``andrew_noise_multiplier`` is the
        std of the noise on the count of unclipped examples (σ_b, default B/20). ``loss_clip`` adds a noisy mean of the
        losses, each cut to [0, ``loss_clip``], to what is released; its multiplier defaults to the histogram's rule.
        """
        _require_sizes(dataset_size, expected_batch_size, steps)
        require(clipping in STRATEGIES, f"expected clipping to be one of {', '.join(STRATEGIES)}, got {clipping!r}")
        delta = 1 / dataset_size if target_delta is None else target_delta
        sigma = _resolve_noise_multiplier(
            target_epsilon, noise_multiplier, delta, expected_batch_size / dataset_size, steps, accountant
        )
        default_side = accounting.default_histogram_noise_multiplier(sigma)
        if histogram_range is None:
            histogram_range = 1.0 if clipping == "dc_sgd_p" else float(histogram_bins)
        if andrew_noise_multiplier is None:
            andrew_noise_multiplier = expected_batch_size / 20
        if clipping not in _HISTOGRAM_STRATEGIES:
            histogram_noise_multiplier = None
        elif histogram_noise_multiplier is None:
            histogram_noise_multiplier = default_side
        resolved = {
            "clip_threshold": clip_threshold,
            "percentile": percentile,
            "histogram_bins": histogram_bins,
            "histogram_range": histogram_range,
            "andrew_learning_rate": andrew_learning_rate,
            "andrew_noise_multiplier": andrew_noise_multiplier,
            "du_decay": du_decay,
            "auto_clip_gamma": auto_clip_gamma,
        }
        if loss_clip is not None and loss_noise_multiplier is None:
            loss_noise_multiplier = default_side
        voided = [ZERO_NOISE] * (sigma == 0) + [UNSAFE_NOISE_SEED] * (unsafe_noise_seed is not None)
        try:
            return cls(
                dataset_size=dataset_size,
                expected_batch_size=expected_batch_size,
                steps=steps,
                num_parameters=num_parameters,
                delta=delta,
                noise_multiplier=sigma,
                accountant=accountant,
                clipping=clipping,
                settings={name: resolved[name] for name in STRATEGY_OPTIONS[clipping]},
                histogram_noise_multiplier=histogram_noise_multiplier,
                loss_noise_multiplier=loss_noise_multiplier,
                loss_clip=loss_clip,
                target_epsilon=target_epsilon,
                world_size=world_size,
                gradient_accumulation_steps=gradient_accumulation_steps,
                unsafe_noise_seed=unsafe_noise_seed,
                opt_outs=tuple(dict.fromkeys([*opt_outs, *voided])),
            )
        except accounting.NothingLeftForGradientError as error:
            if target_epsilon is None:
                raise
            raise ValueError(
                f"target_epsilon = {target_epsilon:g} needs noise_multiplier = {sigma:.4g}, which leaves nothing for "
                f"the gradient: {error}. Raise target_epsilon, train on more examples or for fewer steps, or set a "
                "larger multiplier"
            ) from error

    @property
    def sampling_rate(self) -> float:
        """q = B/N."""
        return self.expected_batch_size / self.dataset_size

    @property
    def side_noise_multipliers(self) -> dict[str, float]:
        """Noise multipliers of what is released beside the gradient, by the names of the arguments that set them."""
        sides: dict[str, float] = {}
        if self.histogram_noise_multiplier is not None:
            sides["histogram_noise_multiplier"] = self.histogram_noise_multiplier
        if self.clipping == "andrew":
            # A centred bit moves the count by ½, so std σ_b on it is a multiplier of 2σ_b.
            sides["2*andrew_noise_multiplier"] = 2 * self.settings["andrew_noise_multiplier"]
        if self.loss_noise_multiplier is not None:
            sides["loss_noise_multiplier"] = self.loss_noise_multiplier
        return sides

    @property
    def grad_noise_multiplier(self) -> float:
        """σ_T (Theorem 1): what σ leaves for the gradient after the side releases."""
        return accounting.grad_noise_multiplier(self.noise_multiplier, self.side_noise_multipliers)

    @property
    def step_event(self) -> dp_accounting.DpEvent:
        """One step as ``dp_accounting`` sees it: all releases on the same Poisson sample."""
        return accounting.step_event(
            self.sampling_rate, [self.grad_noise_multiplier, *self.side_noise_multipliers.values()]
        )

    def epsilon(self, steps: int | None = None, accountant: str | None = None, coarser: float = 1.0) -> float:
        """ε spent after ``steps`` charged steps (all of them when not given), at this plan's δ.

        ``coarser`` > 1 makes the PLD accountant quicker and its upper bound a little looser, for curves and logs.
        """
        return accounting.epsilon_spent(
            noise_multiplier=self.noise_multiplier,
            sampling_rate=self.sampling_rate,
            steps=self.steps if steps is None else steps,
            delta=self.delta,
            accountant=accountant or self.accountant,
            coarser=coarser,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; :meth:`from_dict` gives the same plan back."""
        return {**asdict(self), "opt_outs": list(self.opt_outs)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyPlan:
        """The plan that :meth:`to_dict` described; unknown keys are refused."""
        unknown = values.keys() - {field.name for field in fields(cls)}
        require(not unknown, f"expected the keys of a privacy plan, got also {', '.join(sorted(unknown))}")
        return cls(**values)

    def privacy_dict(self) -> dict[str, Any]:
        """Flat and JSON-able: what must not change when a run is resumed, hence what the ledger's header holds."""
        values = self.to_dict()
        settings = values.pop("settings")
        return {key: value for key, value in {**values, **settings}.items() if key not in _LAYOUT_FIELDS}

    def differences(self, other: PrivacyPlan) -> dict[str, tuple[Any, Any]]:
        """Privacy-relevant values that differ, as (own, other's). The number of processes is not one of them."""
        own, others = self.privacy_dict(), other.privacy_dict()
        return {
            key: (own.get(key), others.get(key))
            for key in (own | others)
            if (key in own, own.get(key)) != (key in others, others.get(key))
        }

    def describe(self) -> str:
        """A readable table, to be shown before training."""
        rows = [
            ("guarantee", f"ε ≤ {self.epsilon():.4g} at δ = {self.delta:.4g}, adding or removing one example"),
            ("accountant", f"{self.accountant}, {self.steps} steps"),
            (
                "sampling",
                f"Poisson, q = {self.expected_batch_size}/{self.dataset_size} = {self.sampling_rate:.4g} "
                f"(expected batch size {self.expected_batch_size})",
            ),
            ("noise multiplier", f"σ = {self.noise_multiplier:.5f} (accounted)"),
            ("gradient", f"σ_T = {self.grad_noise_multiplier:.5f}, {self.num_parameters:,} parameters"),
            *((name, f"{value:g}") for name, value in self.side_noise_multipliers.items()),
            ("clipping", ", ".join([self.clipping, *(f"{key} {value:g}" for key, value in self.settings.items())])),
        ]
        if self.loss_clip is not None:
            rows.append(("loss", f"noisy mean released, each loss cut to [0, {self.loss_clip:g}]"))
        if self.delta * self.dataset_size >= 1:
            rows.append(("note", "δ is no smaller than 1/N, as in the paper; a smaller one is better practice"))
        rows += [("WARNING", _OPT_OUT_TEXT.get(name, f"opt-out: {name}")) for name in self.opt_outs]
        width = max(len(name) for name, _ in rows)
        return "\n".join(["Privacy plan", *(f"  {name:<{width}}  {text}" for name, text in rows)])


_OPT_OUT_TEXT = {
    ZERO_NOISE: "noise_multiplier is 0: nothing is private in this run",
    UNSAFE_NOISE_SEED: "unsafe_noise_seed is set: who knows the seed can subtract the noise; nothing is private",
    RAW_TRAIN_LOSS: "log_train_loss is raw: what is logged of the training loss is not private",
}


def _resolve_noise_multiplier(
    target_epsilon: float | None,
    noise_multiplier: float | None,
    delta: float,
    sampling_rate: float,
    steps: int,
    accountant: str,
) -> float:
    require(
        (target_epsilon is None) != (noise_multiplier is None),
        f"expected either target_epsilon or noise_multiplier, got {target_epsilon} and {noise_multiplier}",
    )
    if noise_multiplier is not None:
        return require_non_negative("noise_multiplier", noise_multiplier)
    assert target_epsilon is not None
    return accounting.calibrate_noise_multiplier(
        epsilon=target_epsilon, delta=delta, sampling_rate=sampling_rate, steps=steps, accountant=accountant
    )


def _require_sizes(dataset_size: int, expected_batch_size: int, steps: int) -> None:
    require_count("dataset_size", dataset_size)
    require_count("expected_batch_size", expected_batch_size)
    require_count("steps", steps)
    require(
        expected_batch_size <= dataset_size,
        f"expected expected_batch_size <= dataset_size, got {expected_batch_size} and {dataset_size}",
    )


def _require_public_numbers(plan: PrivacyPlan) -> None:
    _require_sizes(plan.dataset_size, plan.expected_batch_size, plan.steps)
    require_count("num_parameters", plan.num_parameters)
    require_count("world_size", plan.world_size)
    require_count("gradient_accumulation_steps", plan.gradient_accumulation_steps)
    require(0 < plan.delta < 1, f"expected 0 < delta < 1, got {plan.delta}")
    require_non_negative("noise_multiplier", plan.noise_multiplier)
    require(
        plan.accountant in accounting.ACCOUNTANTS,
        f"expected accountant to be one of {', '.join(accounting.ACCOUNTANTS)}, got {plan.accountant!r}",
    )
    if plan.target_epsilon is not None:
        require_positive("target_epsilon", plan.target_epsilon)


def _require_strategy(plan: PrivacyPlan) -> None:
    require(
        plan.clipping in STRATEGIES, f"expected clipping to be one of {', '.join(STRATEGIES)}, got {plan.clipping!r}"
    )
    needed = STRATEGY_OPTIONS[plan.clipping]
    require(
        set(plan.settings) == set(needed),
        f"expected the settings {', '.join(needed)} for {plan.clipping}, got {', '.join(plan.settings)}",
    )
    for name, value in plan.settings.items():
        require(isinstance(value, int | float) and math.isfinite(value), f"expected a finite {name}, got {value}")
    histogram = plan.histogram_noise_multiplier
    if plan.clipping in _HISTOGRAM_STRATEGIES:
        require(histogram is not None, f"expected a histogram_noise_multiplier for {plan.clipping}, got None")
    else:
        require(histogram is None, f"expected no histogram_noise_multiplier for {plan.clipping}, got {histogram}")
    require(
        (plan.loss_clip is None) == (plan.loss_noise_multiplier is None),
        f"expected both or neither of loss_clip and loss_noise_multiplier, got {plan.loss_clip} and "
        f"{plan.loss_noise_multiplier}",
    )
    if plan.loss_clip is not None:
        require_positive("loss_clip", plan.loss_clip)
    for name, value in plan.side_noise_multipliers.items():
        require_positive(name, value)
