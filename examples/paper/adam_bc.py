"""Adam whose second moment is freed of the noise that it is known to hold (DP-AdamBC, Tang, Shpilevskiy & Lécuyer).

The released gradient is g + N(0, Φ) per coordinate, with Φ public, so that v estimates E[g²] + Φ. Here Φ is taken off
again. Where noise dominates, what is left is mostly chance, and `floor` decides how large a step may become. It is
post-processing of what was released, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class AdamBC(torch.optim.Optimizer):
    """Adam with v̂ − Φ in place of v̂.

    Args:
        params: What is trained.
        lr: The learning rate.
        noise_variance: Φ, of each coordinate of the gradient.
        floor: The least that v̂ − Φ is taken for, as a share of Φ.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        noise_variance: float,
        floor: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})
        self._noise_variance, self._least = noise_variance, floor * noise_variance

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move the parameters by one step."""
        for group in self.param_groups:
            fast, slow = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"steps": 0, "m": torch.zeros_like(parameter), "v": torch.zeros_like(parameter)}
                state["steps"] += 1
                state["m"].lerp_(parameter.grad, 1 - fast)
                state["v"].mul_(slow).addcmul_(parameter.grad, parameter.grad, value=1 - slow)
                unbiased_m = state["m"] / (1 - fast ** state["steps"])
                unbiased_v = state["v"] / (1 - slow ** state["steps"]) - self._noise_variance
                parameter.sub_(group["lr"] * unbiased_m / unbiased_v.clamp(min=self._least).sqrt())
