"""The recipe: batch size, epochs, learning rate and schedule for whoever leaves them unset, from public numbers alone.

Under noise Adam moves a weight by about lr·g/(σ_T·C/B) a step, so that what training reaches follows the *travel*

    D = Σ_t lr_t · B/σ_T

far more than it follows batch size, rate and number of steps by themselves: too little of it leaves a model
under-trained, whatever its threshold. Noise alone meanwhile carries a weight by about lr·√(Σ_t s_t²) (`drift`, where
s_t is the schedule), which must stay small beside the weights. The rate is the one that gives `TRAVEL`, or less where
the drift would become too large: N and ε then leave no room for more, and the plan says so where that is too little.

Within the same drift, more steps travel further: σ_T grows by less than their root. So there are `STEPS` of them, as
far as `MOST_EPOCHS` over the data allow; more rows than the largest batch has use for get by with fewer epochs.

Everything here is a function of N, ε, δ, the strategy's noise and the number of processes: nothing is looked up in the
data, and nothing is spent. docs/results.md has the runs that the numbers were chosen by, and those they were tried on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from hf_dcsgd.privacy.plan import PrivacyPlan

AUTO, PAPER, NONE = "auto", "paper", "none"
RECIPES = (AUTO, PAPER, NONE)

TRAVEL = 1200.0
GOOD_TRAVEL, USEFUL_TRAVEL = 150.0, 100.0
LARGEST_DRIFT = 0.05
SMALLEST_RATE, LARGEST_RATE = 2e-4, 2e-2
STEPS_PER_EPOCH = 20
STEPS = 300
LEAST_EPOCHS, MOST_EPOCHS = 5, 15
SMALLEST_BATCH, LARGEST_BATCH = 256, 4096
_BATCH_MULTIPLE = 128  # so that two, four or eight processes have the same logical batch as one
_LARGEST_MICRO_BATCH = 64
_LARGEST_CACHED_MICRO_BATCH = 128  # where only the trained blocks run: less memory a row, and fuller stacks
_MOST_LOOKS = 1000  # at a schedule

_PAPER_BATCH = 256
# What a recipe says before the data are known, and why.
_FIXED: dict[str, dict[str, tuple[Any, str]]] = {
    AUTO: {
        "num_train_epochs": (float(MOST_EPOCHS), "before the number of examples is known"),
        "lr_scheduler_type": ("linear", "noise of the last steps stays in the weights"),
        "accountant": ("pld", "the tightest"),
        "scale_free_gradient": (True, "moves of the threshold stay out of the optimizer's state"),
    },
    PAPER: {
        "num_train_epochs": (5.0, "as in the paper"),
        "lr_scheduler_type": ("constant", "as in the paper"),
        "learning_rate": (1e-3, "as in the paper"),
        "accountant": ("rdp", "as in the paper"),
        "histogram_rule": ("paper", "as in the paper"),
        "scale_free_gradient": (False, "as in the paper"),
    },
    NONE: {
        "num_train_epochs": (3.0, "the default of transformers"),
        "lr_scheduler_type": ("constant", "the default without a recipe"),
        "learning_rate": (1e-3, "the default without a recipe"),
        "accountant": ("pld", "the tightest"),
        "per_device_train_batch_size": (8, "the default of transformers"),
        "gradient_accumulation_steps": (1, "the default of transformers"),
        "scale_free_gradient": (False, "the default without a recipe"),
    },
}


def fixed_values(recipe: str) -> dict[str, tuple[Any, str]]:
    """Return what a recipe says before the data are known, with the reason of each value."""
    return _FIXED[recipe]


def expected_batch_size(recipe: str, dataset_size: int) -> tuple[int, str]:
    """Return the expected size of a logical batch, and the reason in a few words."""
    if recipe == PAPER:
        return min(_PAPER_BATCH, dataset_size), "as in the paper"
    wanted = min(max(dataset_size / STEPS_PER_EPOCH, SMALLEST_BATCH), LARGEST_BATCH)
    if wanted > dataset_size / 4:
        return max(1, dataset_size // 4), "a quarter of so few examples"
    rounded = max(_BATCH_MULTIPLE, _BATCH_MULTIPLE * round(wanted / _BATCH_MULTIPLE))
    reason = f"N/{STEPS_PER_EPOCH} within {SMALLEST_BATCH} and {LARGEST_BATCH}"
    return min(rounded, dataset_size), reason


def epochs(dataset_size: int, batch_size: int) -> tuple[float, str]:
    """Return for how many epochs to train with a batch size, and the reason in a few words."""
    wanted = math.ceil(STEPS * batch_size / dataset_size)
    reason = f"for {STEPS} steps, within {LEAST_EPOCHS} and {MOST_EPOCHS} epochs"
    return float(min(max(wanted, LEAST_EPOCHS), MOST_EPOCHS)), reason


def split_batch(
    batch_size: int,
    world_size: int,
    per_device: int | None = None,
    accumulation: int | None = None,
    *,
    trunk_is_cached: bool = False,
) -> tuple[int, int]:
    """Return per_device_train_batch_size and gradient_accumulation_steps whose product comes nearest."""
    largest = _LARGEST_CACHED_MICRO_BATCH if trunk_is_cached else _LARGEST_MICRO_BATCH
    share = max(1, round(batch_size / world_size))
    if per_device is not None:
        return per_device, accumulation if accumulation is not None else max(1, round(share / per_device))
    if accumulation is not None:
        return max(1, round(share / accumulation)), accumulation
    micro = max(size for size in range(1, min(share, largest) + 1) if share % size == 0)
    if micro < min(share, largest) / 2:  # a share with no good divisor is rounded up
        accumulation = math.ceil(share / largest)
        return math.ceil(share / accumulation), accumulation
    return micro, share // micro


@dataclass(frozen=True)
class Travel:
    """How far a schedule of this many steps goes at rate 1, and what noise adds to it."""

    per_rate: float
    drift_per_rate: float

    @classmethod
    def of(cls, plan: PrivacyPlan, schedule: Any, warmup: float = 0, options: Any = None) -> Travel:
        """Add up a schedule of transformers."""
        factors = schedule_factors(schedule, plan.steps, warmup, options)
        weight, noise = plan.steps / len(factors), plan.grad_noise_multiplier
        per_rate = weight * sum(factors) * plan.expected_batch_size / noise if noise > 0 else math.inf
        return cls(per_rate, math.sqrt(weight * sum(factor**2 for factor in factors)))

    def rate(self) -> tuple[float, str]:
        """Return the learning rate, to two digits, and the reason in a few words."""
        wanted, most = TRAVEL / self.per_rate, min(LARGEST_DRIFT / self.drift_per_rate, LARGEST_RATE)
        if wanted > most:
            return _two_digits(most), "as large as noise allows: more would drown the weights"
        if wanted < SMALLEST_RATE:
            return SMALLEST_RATE, "there is little noise: a usual rate"
        return _two_digits(wanted), f"for a travel of {TRAVEL:g}"


def schedule_factors(schedule: Any, steps: int, warmup: float = 0, options: Any = None) -> list[float]:
    """Return the factor on the learning rate at some thousand steps, spread evenly over a schedule of transformers.

    Schedules that go by what is evaluated are taken for constant.
    """
    scheduler = get_scheduler(
        SchedulerType(schedule),
        torch.optim.SGD([torch.zeros(1)], lr=1.0),
        num_warmup_steps=math.ceil(warmup * steps) if warmup < 1 else int(warmup),
        num_training_steps=steps,
        scheduler_specific_kwargs=dict(options or {}),
    )
    (factor,) = getattr(scheduler, "lr_lambdas", None) or [lambda step: 1.0]
    looks = min(steps, _MOST_LOOKS)
    return [float(factor(steps * look // looks)) for look in range(looks)]


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")
