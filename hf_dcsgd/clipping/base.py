"""The contract of every clipping strategy.

One step, seen from a strategy:

1. `clip_factors(norms)` for each micro-batch of the logical batch, all with the same threshold;
   `side_contribution(norms)` likewise, summed by the caller;
2. the caller releases `Σ fᵢ·gᵢ` with noise scaled to `sensitivity`, and the side sum with noise scaled to
   `side_query.sensitivity`;
3. `update(noisy_side)` exactly once, with the released side value: this is post-processing and costs no privacy.

Guarantee. `‖fᵢ·gᵢ‖₂ ≤ sensitivity` for every example, whatever its norm (an example whose norm is not finite gets
the factor 0), and one example moves the side sum by at most `side_query.sensitivity` in L2. The state is a function
of settings and released values only. The threshold is finite and positive in fp32 whatever is released.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np

from hf_dcsgd.clipping.options import CLIP_THRESHOLD, MAX_THRESHOLD, MIN_THRESHOLD, StrategyOption
from hf_dcsgd.validation import require, require_count, require_positive

if TYPE_CHECKING:  # the command line calibrates without loading torch
    import torch

Released = dict[str, float | list[float]]


def bounded(value: float) -> float:
    """Return `value` cut to the range in which a threshold or a histogram range is kept."""
    return float(min(max(value, MIN_THRESHOLD), MAX_THRESHOLD))


class PublicNumbers(NamedTuple):
    """What the defaults of a strategy may depend on: σ (accounted), B, and the number of steps."""

    noise_multiplier: float
    expected_batch_size: int
    steps: int


@dataclass(frozen=True)
class SideQuery:
    """A second value released with each gradient: a vector of `size` numbers, Gaussian noise of std
    `noise_multiplier × sensitivity` on each."""

    size: int
    sensitivity: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        require_count("size", self.size)
        require_positive("sensitivity", self.sensitivity)
        require_positive("noise_multiplier", self.noise_multiplier)


class ClippingThreshold(ABC):
    """A clipping strategy: see the module for its contract. `register_strategy` makes it known by its name.

    Class attributes:
        name: What `clipping=` calls it.
        title: What a model card calls it.
        summary: Half a sentence for the command line.
        options: Its options. The constructor takes each by its name, and checks what it is given.
        public_numbers: Attributes of the privacy plan that the constructor takes besides (`"steps"`,
            `"expected_batch_size"`, `"num_parameters"`, `"grad_noise_multiplier"`, ...).
    """

    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]
    options: ClassVar[tuple[StrategyOption, ...]] = ()
    public_numbers: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._released: Released = {}

    # -- before a run ------------------------------------------------------------------------------------------------

    @classmethod
    def resolve(cls, given: Mapping[str, Any], numbers: PublicNumbers) -> dict[str, Any]:
        """Return every setting, checked: as given, else its default. None stands for the default."""
        options = {option.name: option for option in cls.options}
        unknown = ", ".join(sorted(given.keys() - options.keys()))
        require(not unknown, f"expected options of {cls.name} ({', '.join(options) or 'it has none'}), got {unknown}")
        settings = {name: option.default for name, option in options.items()}
        settings |= {name: options[name].checked(value) for name, value in given.items() if value is not None}
        derived = cls.default_settings(settings, numbers)
        return cls.checked(
            {name: derived[name] if value is None and name in derived else value for name, value in settings.items()}
        )

    @classmethod
    def checked(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return complete settings in the form to use; `ValueError` or `TypeError` names what is wrong."""
        names = [option.name for option in cls.options]
        require(
            set(settings) == set(names),
            f"expected the settings {', '.join(names)} for {cls.name}, got {', '.join(settings) or 'none'}",
        )
        return {option.name: option.checked(settings[option.name]) for option in cls.options}

    @classmethod
    def default_settings(cls, settings: Mapping[str, Any], numbers: PublicNumbers) -> dict[str, Any]:
        """Return values for options whose default is None, from the other settings and public numbers."""
        return {}

    @classmethod
    def side_noise_multipliers(cls, settings: Mapping[str, Any]) -> dict[str, float]:
        """Return the noise multiplier of the side query under a name that says which option sets it, or nothing."""
        return {}

    @classmethod
    def side_noise_options(cls, noise_multiplier: float) -> dict[str, Any]:
        """Return options that give the side query this noise multiplier, or nothing without one. For audits."""
        return {}

    @classmethod
    def from_plan(cls, plan: Any) -> Self:
        """Return the strategy at its first step, with the settings and numbers that the privacy plan accounts for."""
        return cls(**plan.settings, **{name: getattr(plan, name) for name in cls.public_numbers})

    # -- the steps of a run ------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """L2 bound of one example's contribution `fᵢ·gᵢ` at the current step."""

    @abstractmethod
    def clip_factors(self, per_example_norms: torch.Tensor) -> torch.Tensor:
        """Return fp32 factors `fᵢ` in [0, …) with `fᵢ·nᵢ ≤ sensitivity`; 0 where the norm is not finite."""

    @property
    def side_query(self) -> SideQuery | None:
        """What is released beside the gradient, if anything; its noise is the plan's (`side_noise_multipliers`)."""
        return None

    def side_contribution(self, per_example_norms: torch.Tensor) -> torch.Tensor | None:
        """Return the private fp32 sum over these examples of what the side query asks, shape `(side_query.size,)`."""
        return None

    def update(self, noisy_side: np.ndarray | None) -> None:
        """Move to the next step's threshold. Sees released values only. Never fails on their content."""
        query = self.side_query
        if query is None:
            require(noisy_side is None, f"expected no side value for {self.name}, got {noisy_side}")
            side = np.empty(0)
        else:
            side = np.asarray(noisy_side, dtype=np.float64)
            require(side.shape == (query.size,), f"expected a side value of shape ({query.size},), got {side.shape}")
        self._released = self.advance(side)

    def released_values(self) -> Released:
        """Return what the step just released, safe to log; empty before the first release."""
        return dict(self._released)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able: released values only."""
        return {"name": self.name, **self.own_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave; refuses the state of another strategy and unusable values."""
        require(state.get("name") == self.name, f"expected the state of {self.name!r}, got {state.get('name')!r}")
        missing = self.own_state().keys() - state.keys()
        require(not missing, f"expected a state with {', '.join(sorted(missing))}, got {dict(state)}")
        self.load_own_state(state)

    # -- what a strategy writes itself -------------------------------------------------------------------------------

    @abstractmethod
    def advance(self, noisy_side: np.ndarray) -> Released:
        """Set the next step's threshold and return the values of the step that this side value belongs to."""

    @abstractmethod
    def own_state(self) -> dict[str, Any]:
        """Return what `load_own_state` needs to go on from this step, JSON-able."""

    @abstractmethod
    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that has the keys of `own_state`; raises before it changes anything."""


class NormClipping(ClippingThreshold):
    """Strategies that clip norms at a threshold C: `fᵢ = min(1, C/nᵢ)`, sensitivity C."""

    options: ClassVar[tuple[StrategyOption, ...]] = (CLIP_THRESHOLD,)

    def __init__(self, clip_threshold: float) -> None:
        super().__init__()
        self._clip_threshold = CLIP_THRESHOLD.checked(clip_threshold)

    @property
    def clip_threshold(self) -> float:
        """C of the current step: public, as it is a function of released values."""
        return self._clip_threshold

    def move_to(self, clip_threshold: float) -> None:
        """Set C of the next step, cut to what fp32 can work with."""
        self._clip_threshold = bounded(clip_threshold)

    @property
    def sensitivity(self) -> float:
        return self._clip_threshold

    def clip_factors(self, per_example_norms: torch.Tensor) -> torch.Tensor:
        norms = per_example_norms.detach().float()
        factors = (self._clip_threshold / norms).clamp(max=1.0)
        return factors.where(norms.isfinite(), 0.0)

    def advance(self, noisy_side: np.ndarray) -> Released:
        return {"clip_threshold": self._clip_threshold}

    def own_state(self) -> dict[str, Any]:
        return {"clip_threshold": self._clip_threshold}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self._clip_threshold = CLIP_THRESHOLD.checked(state["clip_threshold"])
