"""L1, noise scale: steps on empty batches release noise and nothing else. Is it the noise that was promised?"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from hf_dcsgd.audit.findings import Finding
from hf_dcsgd.audit.replay import fresh_mechanism, logical_step, prepared, released_gradient, watched_side
from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.trainer import DCSGDTrainer

DRAWS = 1_000_000
_SMALLEST_P = 1e-6
_MANY_BINS = 50_000


def noise_findings(trainer: DCSGDTrainer, draws: int = DRAWS) -> list[Finding]:
    """Standard deviation against σ_T·C and σ_H, Kolmogorov–Smirnov, and no number used twice."""
    with prepared(trainer):
        mechanism = fresh_mechanism(trainer)
        steps = [_noise_of_a_step(trainer, mechanism) for _ in range(_steps_for(trainer, draws))]
        findings = _normal_findings("gradient", torch.cat(steps))
        findings += _uniqueness_findings(trainer, steps)
        findings.append(_seed_finding("noise", lambda: _noise_of_a_step(trainer, fresh_mechanism(trainer))))
        findings.append(_seed_finding("dropout", lambda: _random_numbers_of_a_step(trainer)))
        if trainer.is_world_process_zero() and trainer.args.world_size == 1:
            findings += _side_findings(trainer, draws)
    return findings


def _steps_for(trainer: DCSGDTrainer, draws: int) -> int:
    assert trainer.plan is not None
    return max(2, math.ceil(draws / trainer.plan.num_parameters))


def _noise_of_a_step(trainer: DCSGDTrainer, mechanism: DPMechanism) -> Tensor:
    """The noise in the gradient of an empty step, in units of the promised standard deviation."""
    assert trainer.plan is not None
    scale = trainer.plan.grad_noise_multiplier * mechanism.threshold.sensitivity
    logical_step(trainer, [{} for _ in range(trainer.args.gradient_accumulation_steps)], mechanism)
    return released_gradient(trainer) / scale


def _normal_findings(name: str, values: Tensor) -> list[Finding]:
    sample = values.numpy()
    tolerance = max(5 / math.sqrt(2 * len(sample)), 1e-3)
    p_value = stats.kstest(sample, "norm").pvalue
    return [
        Finding(f"{name} noise: deviation of its scale from 1", abs(float(sample.std()) - 1), tolerance),
        Finding(f"{name} noise: mean", abs(float(sample.mean())), 5 / math.sqrt(len(sample))),
        Finding(
            f"{name} noise: Kolmogorov-Smirnov, −log p", -math.log10(max(p_value, 1e-300)), -math.log10(_SMALLEST_P)
        ),
    ]


def _uniqueness_findings(trainer: DCSGDTrainer, steps: list[Tensor]) -> list[Finding]:
    """Neither two steps nor two tensors of a step may share their noise."""
    repeated_steps = sum(torch.equal(a, b) for a, b in pairwise(steps))
    sizes = [p.numel() for p in trainer.model.parameters() if p.requires_grad]
    heads = [tuple(part[: min(sizes)].tolist()) for part in steps[0].split(sizes)]
    return [
        Finding("steps with the noise of the step before", float(repeated_steps), 0.0),
        Finding("tensors with the noise of another tensor", float(len(heads) - len(set(heads))), 0.0),
    ]


def _random_numbers_of_a_step(trainer: DCSGDTrainer) -> Tensor:
    """What a model would draw for dropout within a step."""
    seen = []

    def draw(inputs: Any) -> Tensor:
        seen.append(torch.rand(8))
        return torch.zeros(())

    trainer.__dict__["_clip_and_accumulate"] = draw
    try:
        one_example = {"input": torch.zeros(1, 1)}
        batches = [one_example for _ in range(trainer.args.gradient_accumulation_steps)]
        logical_step(trainer, batches, fresh_mechanism(trainer))
    finally:
        del trainer.__dict__["_clip_and_accumulate"]
    return seen[0]


def _seed_finding(what: str, drawn: Callable[[], Tensor]) -> Finding:
    """Under the same public seeds, what is drawn must be something else."""
    seen = []
    for _ in range(2):
        random.seed(42)
        np.random.seed(42)
        torch.manual_seed(42)
        seen.append(drawn())
    return Finding(f"{what} repeats under the public seed", float(torch.equal(*seen)), 0.0)


def _side_findings(trainer: DCSGDTrainer, draws: int) -> list[Finding]:
    """The side value's noise; a histogram gets many more bins, so that few steps give enough numbers."""
    plan = trainer.plan
    assert plan is not None
    many_bins = {"histogram_bins": _MANY_BINS} if "histogram_bins" in plan.settings else {}
    plan = dataclasses.replace(plan, num_parameters=1, settings={**plan.settings, **many_bins})
    mechanism = DPMechanism(plan)
    query = mechanism.threshold.side_query
    if query is None:
        return []
    seen = watched_side(mechanism)
    nothing = torch.zeros(plan.num_parameters)
    for _ in range(math.ceil(min(draws, 20_000 * query.size) / query.size)):
        mechanism.release(nothing)
    values = torch.from_numpy(np.concatenate(seen)) / (query.sensitivity * query.noise_multiplier)
    return _normal_findings("side value", values)
