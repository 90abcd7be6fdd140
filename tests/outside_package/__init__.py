"""What another package may add: a clipping strategy, an accountant and a ghost rule. Imports `hf_dcsgd` alone."""

from collections.abc import Mapping
from typing import Any

import dp_accounting
import numpy as np
import torch
from torch import Tensor, nn

from hf_dcsgd import Dense, NormClipping, StrategyOption, register_accountant, register_rule, register_strategy


def require_share(name: str, value: float) -> float:
    if not 0 < value <= 1:
        raise ValueError(f"expected 0 < {name} <= 1, got {value}")
    return float(value)


FINAL_SHARE = StrategyOption("final_share", 0.5, "The threshold falls to this share of clip_threshold.", require_share)


@register_strategy
class LinearDecay(NormClipping):
    """C_t = C_0·(1 − (1 − share)·t/T)."""

    name = "linear_decay"
    title = "DP-SGD and a linearly decaying threshold"
    summary = "a line set beforehand"
    options = (*NormClipping.options, FINAL_SHARE)
    public_numbers = ("steps",)

    def __init__(self, clip_threshold: float, *, final_share: float, steps: int) -> None:
        super().__init__(clip_threshold)
        self.initial, self.steps, self.step = self.clip_threshold, steps, 0
        self.final_share = FINAL_SHARE.checked(final_share)

    def go_to(self, step: int) -> None:
        self.step = step
        self.move_to(self.initial * (1 - (1 - self.final_share) * step / self.steps))

    def advance(self, noisy_side: np.ndarray) -> dict[str, Any]:
        values = super().advance(noisy_side)
        self.go_to(self.step + 1)
        return values

    def own_state(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.go_to(int(state["step"]))


def few_orders(event: dp_accounting.DpEvent, delta: float) -> float:
    """RDP at few orders: an upper bound, as every one is."""
    return float(dp_accounting.rdp.RdpAccountant([2, 3, 4, 6, 8, 12, 16, 24]).compose(event).get_epsilon(delta))


register_accountant("few_orders", few_orders)


class Scale(nn.Module):
    """y = w ⊙ x."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


@register_rule(Scale)
def scale_rule(module: nn.Module, inputs: Tensor, output_grad: Tensor) -> dict[str, Any]:
    return {"weight": Dense(inputs * output_grad)}
