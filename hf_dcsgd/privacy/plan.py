"""One frozen plan: sampling rate, sigmas, threshold and privacy event all follow from it, so they cannot disagree.

Guarantee. A run of at most `steps` steps of the mechanism built from a plan is (`epsilon()`, `delta`)-DP for adding or
removing one example, unless `opt_outs` says otherwise. Two sigmas, never reassigned: `noise_multiplier` (σ, the one
accounted) and `grad_noise_multiplier` (σ_T, what the side releases leave for the gradient). Everything in a plan is
public.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from hf_dcsgd.clipping import PublicNumbers, strategy
from hf_dcsgd.clipping.dc_sgd import default_histogram_noise_multiplier
from hf_dcsgd.privacy import accounting
from hf_dcsgd.privacy.accountants import ACCOUNTANTS
from hf_dcsgd.validation import require, require_count, require_fraction, require_non_negative, require_positive

# What a plan may say against itself; each voids the guarantee, and the report repeats it.
ZERO_NOISE = "zero_noise"
UNSAFE_NOISE_SEED = "unsafe_noise_seed"
RAW_TRAIN_LOSS = "raw_train_loss"

# What is drawn and clipped where a unit of privacy has several rows: the unit as a whole, or each of its rows.
BY_UNIT, BY_ROW = "unit", "row"
UNIT_CLIPPINGS = (BY_UNIT, BY_ROW)

_UNIT_PREFIX = "privacy_unit_"  # of its numbers where a plan is flat

# How the work is spread over processes; the mechanism is the same for any of them.
_LAYOUT_FIELDS = ("world_size", "gradient_accumulation_steps")


@dataclass(frozen=True)
class PrivacyUnit:
    """What is protected where it is more than a row: all rows with one value in a column.

    Args:
        column: The name of that column.
        count: How many different values it has; public.
        max_rows: How many of its rows a unit takes part with at most: in each step, or with `by_row` at all.
        clipping: "unit" or "row".
    """

    column: str
    count: int
    max_rows: int
    clipping: str = BY_UNIT

    def __post_init__(self) -> None:
        require_count("num_units", self.count)
        require_count("max_rows_per_unit", self.max_rows)
        require(self.clipping in UNIT_CLIPPINGS, f"expected privacy_unit_clipping unit or row, got {self.clipping!r}")

    @property
    def by_row(self) -> bool:
        """Whether rows are drawn and clipped one by one, and a unit is a group of `max_rows` of them."""
        return self.clipping == BY_ROW

    @property
    def group_size(self) -> int:
        """How many examples that are drawn one by one belong to a unit, at most."""
        return self.max_rows if self.by_row else 1


@dataclass(frozen=True)
class PrivacyPlan:
    """The public numbers of one run. Make it with `create`."""

    dataset_size: int
    expected_batch_size: int
    steps: int
    num_parameters: int
    delta: float
    noise_multiplier: float
    accountant: str
    clipping: str
    settings: Mapping[str, Any]
    loss_noise_multiplier: float | None = None
    loss_clip: float | None = None
    target_epsilon: float | None = None
    world_size: int = 1
    gradient_accumulation_steps: int = 1
    unsafe_noise_seed: int | None = None
    opt_outs: tuple[str, ...] = ()
    unit: PrivacyUnit | None = None

    def __post_init__(self) -> None:
        _require_sizes(self.dataset_size, self.expected_batch_size, self.steps)
        for name in ("num_parameters", *_LAYOUT_FIELDS):
            require_count(name, getattr(self, name))
        require_fraction("delta", self.delta)
        require_non_negative("noise_multiplier", self.noise_multiplier)
        ACCOUNTANTS.find(self.accountant)
        for name in ("target_epsilon", "loss_clip", "loss_noise_multiplier"):
            if getattr(self, name) is not None:
                require_positive(name, getattr(self, name))
        clash = self.settings.keys() & {field.name for field in fields(self)}
        require(not clash, f"expected settings with other names than a plan's own, got {', '.join(sorted(clash))}")
        object.__setattr__(self, "settings", strategy(self.clipping).checked(self.settings))
        object.__setattr__(self, "opt_outs", tuple(self.opt_outs))
        if isinstance(self.unit, Mapping):
            object.__setattr__(self, "unit", PrivacyUnit(**self.unit))
        if self.unit is not None:
            fits = self.dataset_size >= self.unit.count if self.unit.by_row else self.dataset_size == self.unit.count
            require(fits, f"expected a dataset_size for {self.unit.count} units, got {self.dataset_size}")
        require(
            (self.loss_clip is None) == (self.loss_noise_multiplier is None),
            f"expected both or neither of loss_clip and loss_noise_multiplier, got {self.loss_clip} and "
            f"{self.loss_noise_multiplier}",
        )
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
        accountant: str = "pld",
        clipping: str = "dc_sgd_e",
        settings: Mapping[str, Any] | None = None,
        loss_clip: float | None = None,
        loss_noise_multiplier: float | None = None,
        world_size: int = 1,
        gradient_accumulation_steps: int = 1,
        unsafe_noise_seed: int | None = None,
        opt_outs: Sequence[str] = (),
        unit: PrivacyUnit | None = None,
    ) -> PrivacyPlan:
        """Make a plan with every default resolved.

        Args:
            dataset_size: N, the number of training examples: rows, or units that are clipped as a whole.
            expected_batch_size: B, the expected number of examples of a logical batch; q = B/N.
            steps: How many steps will be taken at most.
            num_parameters: How many numbers the gradient has.
            target_epsilon: ε of the whole run, to which σ is calibrated. Give this or `noise_multiplier`.
            noise_multiplier: σ itself.
            target_delta: δ; one over the number of units of privacy by default.
            accountant: Name of the accountant (`register_accountant`).
            clipping: Name of the clipping strategy (`register_strategy`).
            settings: Options of that strategy; those left out, or None, get their defaults.
            loss_clip: Adds a noisy mean of the losses, each cut to [0, `loss_clip`], to what is released.
            loss_noise_multiplier: The noise multiplier of that loss; by default that of a histogram.
            world_size: The number of processes.
            gradient_accumulation_steps: The number of micro-batches of a logical batch on each process.
            unsafe_noise_seed: Makes noise and sampling repeatable, which voids the guarantee.
            opt_outs: Names of what else voids it.
            unit: What is protected, where it is more than a row.
        """
        _require_sizes(dataset_size, expected_batch_size, steps)
        chosen = strategy(clipping)
        require(
            (target_epsilon is None) != (noise_multiplier is None),
            f"expected either target_epsilon or noise_multiplier, got {target_epsilon} and {noise_multiplier}",
        )
        protected = dataset_size if unit is None else unit.count
        delta = 1 / protected if target_delta is None else target_delta
        sigma = noise_multiplier
        if sigma is None:
            assert target_epsilon is not None
            sigma = accounting.calibrate_noise_multiplier(
                epsilon=target_epsilon,
                delta=delta,
                sampling_rate=expected_batch_size / dataset_size,
                steps=steps,
                accountant=accountant,
                group_size=1 if unit is None else unit.group_size,
            )
        require_non_negative("noise_multiplier", sigma)
        if loss_clip is not None and loss_noise_multiplier is None:
            loss_noise_multiplier = default_histogram_noise_multiplier(sigma)
        voided = [ZERO_NOISE] * (sigma == 0) + [UNSAFE_NOISE_SEED] * (unsafe_noise_seed is not None)
        try:
            return cls(
                dataset_size=dataset_size,
                expected_batch_size=expected_batch_size,
                steps=steps,
                num_parameters=num_parameters,
                delta=delta,
                noise_multiplier=float(sigma),
                accountant=accountant,
                clipping=clipping,
                settings=chosen.resolve(settings or {}, PublicNumbers(sigma, expected_batch_size, steps)),
                loss_noise_multiplier=loss_noise_multiplier,
                loss_clip=loss_clip,
                target_epsilon=target_epsilon,
                world_size=world_size,
                gradient_accumulation_steps=gradient_accumulation_steps,
                unsafe_noise_seed=unsafe_noise_seed,
                opt_outs=tuple(dict.fromkeys([*opt_outs, *voided])),
                unit=unit,
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
    def draws_units(self) -> bool:
        """Whether units of several rows are drawn and clipped as a whole."""
        return self.unit is not None and not self.unit.by_row

    @property
    def protected(self) -> str:
        """What is added or removed, in words."""
        return "example" if self.unit is None else f"{self.unit.column} with all of its rows"

    @property
    def group_size(self) -> int:
        """How many examples that are drawn one by one belong to a unit of privacy, at most."""
        return 1 if self.unit is None else self.unit.group_size

    @property
    def num_units(self) -> int:
        """How many units of privacy there are; public."""
        return self.dataset_size if self.unit is None else self.unit.count

    @property
    def sampling_rate(self) -> float:
        """q = B/N."""
        return self.expected_batch_size / self.dataset_size

    @property
    def side_noise_multipliers(self) -> dict[str, float]:
        """Noise multipliers of what is released beside the gradient, by the names of the arguments that set them."""
        sides = strategy(self.clipping).side_noise_multipliers(self.settings)
        if self.loss_noise_multiplier is not None:
            sides = {**sides, "loss_noise_multiplier": self.loss_noise_multiplier}
        return sides

    @property
    def grad_noise_multiplier(self) -> float:
        """σ_T (Theorem 1): what σ leaves for the gradient after the side releases."""
        return accounting.grad_noise_multiplier(self.noise_multiplier, self.side_noise_multipliers)

    def epsilon(self, steps: int | None = None, accountant: str | None = None, grid_scale: float = 1.0) -> float:
        """Return ε spent after `steps` charged steps (all of them when not given), at this plan's δ.

        `grid_scale` > 1 makes the PLD accountant quicker and its upper bound a little looser, for curves and logs.
        """
        run = self.accounted(self.steps if steps is None else steps)
        return accounting.composed_epsilon([run], self.delta, accountant or self.accountant, grid_scale)

    def accounted(self, steps: int) -> accounting.AccountedRun:
        """Return what an accountant needs to know of this many charged steps."""
        return accounting.AccountedRun(self.noise_multiplier, self.sampling_rate, steps, self.group_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan JSON-able; `from_dict` gives the same plan back."""
        return {**asdict(self), "opt_outs": list(self.opt_outs)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyPlan:
        """Return the plan that `to_dict` described; unknown keys are refused."""
        unknown = values.keys() - {field.name for field in fields(cls)}
        require(not unknown, f"expected the keys of a privacy plan, got also {', '.join(sorted(unknown))}")
        return cls(**values)

    def privacy_dict(self) -> dict[str, Any]:
        """Return, flat and JSON-able, what must not change when a run is resumed: the ledger's header."""
        values = self.to_dict()
        settings = values.pop("settings")
        unit = values.pop("unit") or {}
        values |= {f"{_UNIT_PREFIX}{name}": value for name, value in unit.items()}
        return {key: value for key, value in {**values, **settings}.items() if key not in _LAYOUT_FIELDS}

    @classmethod
    def from_privacy_dict(cls, values: Mapping[str, Any]) -> PrivacyPlan:
        """Return the plan that `privacy_dict` described: what is no field of a plan is a setting of its strategy."""
        names = {field.name for field in fields(cls)}
        unit = {key.removeprefix(_UNIT_PREFIX): value for key, value in values.items() if key.startswith(_UNIT_PREFIX)}
        own = {key: value for key, value in values.items() if key in names}
        settings = {k: v for k, v in values.items() if k not in names and not k.startswith(_UNIT_PREFIX)}
        return cls.from_dict({**own, "settings": settings, "unit": unit or None})


def _require_sizes(dataset_size: int, expected_batch_size: int, steps: int) -> None:
    require_count("dataset_size", dataset_size)
    require_count("expected_batch_size", expected_batch_size)
    require_count("steps", steps)
    require(
        expected_batch_size <= dataset_size,
        f"expected expected_batch_size <= dataset_size, got {expected_batch_size} and {dataset_size}",
    )
