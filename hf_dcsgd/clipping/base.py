"""The contract of every clipping strategy.

One step, seen from a strategy:

1. ``clip_factors(norms)`` for each micro-batch of the logical batch, all with the same threshold;
   ``side_contribution(norms)`` likewise, summed by the caller;
2. the caller releases ``Σ fᵢ·gᵢ`` with noise scaled to ``sensitivity``, and the side sum with noise scaled to
   ``side_query.sensitivity``;
3. ``update(noisy_side)`` exactly once, with the released side value: this is post-processing and costs no privacy.

Guarantee. ``‖fᵢ·gᵢ‖₂ ≤ sensitivity`` for every example, whatever its norm (an example whose norm is not finite gets
the factor 0), and one example moves the side sum by at most ``side_query.sensitivity`` in L2. The state is a function
of settings and released values only. The threshold is finite and positive in fp32 whatever is released.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hf_dcsgd.validation import require, require_count, require_positive

# Below, squares of coordinates vanish in fp32 and a gradient would pass for smaller than it is; above, threshold ×
# noise multiplier would leave it.
MIN_THRESHOLD = 1e-12
MAX_THRESHOLD = 1e30

Released = dict[str, float | list[float]]


def bounded(value: float) -> float:
    """``value`` cut to the range in which a threshold or a histogram range is kept."""
    return float(min(max(value, MIN_THRESHOLD), MAX_THRESHOLD))


def require_threshold(name: str, value: float) -> float:
    """``value`` as a float, which must be usable as a threshold or a histogram range."""
    require_positive(name, value)
    require(
        MIN_THRESHOLD <= value <= MAX_THRESHOLD,
        f"expected {MIN_THRESHOLD:g} <= {name} <= {MAX_THRESHOLD:g}, got {value}",
    )
    return float(value)


@dataclass(frozen=True)
class SideQuery:
    """A second value released with each gradient: a vector of ``size`` numbers, Gaussian noise of std
    ``noise_multiplier × sensitivity`` on each."""

    size: int
    sensitivity: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        require_count("size", self.size)
        require_positive("sensitivity", self.sensitivity)
        require_positive("noise_multiplier", self.noise_multiplier)


class ClippingThreshold(ABC):
    """See the module: the contract of every clipping strategy."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self._released: Released = {}

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """L2 bound of one example's contribution ``fᵢ·gᵢ`` at the current step."""

    @abstractmethod
    def clip_factors(self, per_example_norms: torch.Tensor) -> torch.Tensor:
        """fp32 factors ``fᵢ`` in [0, …) with ``fᵢ·nᵢ ≤ sensitivity``; 0 where the norm is not finite."""

    @property
    def side_query(self) -> SideQuery | None:
        """What is released beside the gradient, if anything."""
        return None

    def side_contribution(self, per_example_norms: torch.Tensor) -> torch.Tensor | None:
        """Private fp32 sum over these examples of what the side query asks, shape ``(side_query.size,)``."""
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
        self._released = self._release(side)

    def released_values(self) -> Released:
        """What the step just released, safe to log; empty before the first release."""
        return dict(self._released)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state: released values only."""
        return {"name": self.name, **self._state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; refuses the state of another strategy and unusable values."""
        require(state.get("name") == self.name, f"expected the state of {self.name!r}, got {state.get('name')!r}")
        missing = self._state().keys() - state.keys()
        require(not missing, f"expected a state with {', '.join(sorted(missing))}, got {dict(state)}")
        self._load(state)

    @abstractmethod
    def _release(self, noisy_side: np.ndarray) -> Released:
        """Set the next step's threshold and return the values of the step that this side value belongs to."""

    @abstractmethod
    def _state(self) -> dict[str, Any]: ...

    @abstractmethod
    def _load(self, state: Mapping[str, Any]) -> None: ...


class NormClipping(ClippingThreshold):
    """Strategies that clip norms at a threshold C: ``fᵢ = min(1, C/nᵢ)``, sensitivity C."""

    def __init__(self, clip_threshold: float) -> None:
        super().__init__()
        self._clip_threshold = require_threshold("clip_threshold", clip_threshold)

    @property
    def clip_threshold(self) -> float:
        """C of the current step: public, as it is a function of released values."""
        return self._clip_threshold

    @property
    def sensitivity(self) -> float:
        return self._clip_threshold

    def clip_factors(self, per_example_norms: torch.Tensor) -> torch.Tensor:
        norms = per_example_norms.detach().float()
        factors = (self._clip_threshold / norms).clamp(max=1.0)
        return torch.where(torch.isfinite(norms), factors, 0.0)

    def _release(self, noisy_side: np.ndarray) -> Released:
        return {"clip_threshold": self._clip_threshold}

    def _state(self) -> dict[str, Any]:
        return {"clip_threshold": self._clip_threshold}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._clip_threshold = require_threshold("clip_threshold", state["clip_threshold"])
