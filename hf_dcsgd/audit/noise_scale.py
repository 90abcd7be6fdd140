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
from hf_dcsgd.audit.replay import Subject, prepared
from hf_dcsgd.data.rows import fetch_row
from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.trainer import DCSGDTrainer

DRAWS = 1_000_000
_SMALLEST_P = 1e-6
_MANY_BINS = 50_000


def noise_findings(trainer: DCSGDTrainer, draws: int = DRAWS) -> list[Finding]:
    """Compare the noise with σ_T·C and σ_H: scale, Kolmogorov–Smirnov, and no number used twice."""
    with prepared(trainer) as subject:
        mechanism = subject.new_mechanism()
        count = max(2, math.ceil(draws / subject.plan.num_parameters))
        steps = [_noise_of_a_step(subject, mechanism) for _ in range(count)]
        findings = _normal_findings("gradient", torch.cat(steps))
        findings += _uniqueness_findings(subject, steps)
        findings.append(_seed_finding("noise", lambda: _noise_of_a_step(subject, subject.new_mechanism())))
        row = fetch_row(trainer.rows_and_collator()[0], 0)
        findings.append(_seed_finding("dropout", lambda: _random_numbers_of_a_step(subject, row)))
        if subject.world_size == 1:
            findings += _side_findings(subject.plan, draws)
    return findings


def _noise_of_a_step(subject: Subject, mechanism: DPMechanism) -> Tensor:
    """Return the noise in the gradient of an empty step, in units of the promised standard deviation."""
    scale = subject.plan.grad_noise_multiplier * mechanism.threshold.sensitivity
    return subject.released_sum(subject.logical_step([], mechanism)) / scale


def _normal_findings(name: str, values: Tensor) -> list[Finding]:
    sample = values.numpy()
    tolerance = max(5 / math.sqrt(2 * len(sample)), 1e-3)
    p_value = stats.kstest(sample, "norm").pvalue
    unlikely = -math.log10(max(p_value, 1e-300))
    return [
        Finding(f"{name} noise: deviation of its scale from 1", abs(float(sample.std()) - 1), tolerance),
        Finding(f"{name} noise: mean", abs(float(sample.mean())), 5 / math.sqrt(len(sample))),
        Finding(f"{name} noise: Kolmogorov-Smirnov, −log p", unlikely, -math.log10(_SMALLEST_P)),
    ]


def _uniqueness_findings(subject: Subject, steps: list[Tensor]) -> list[Finding]:
    """Check that neither two steps nor two tensors of a step share their noise."""
    repeated_steps = sum(torch.equal(a, b) for a, b in pairwise(steps))
    sizes = [p.numel() for p in subject.step.clipper.parameters.values()]
    heads = [tuple(part[: min(sizes)].tolist()) for part in steps[0].split(sizes)]
    return [
        Finding("steps with the noise of the step before", float(repeated_steps), 0.0),
        Finding("tensors with the noise of another tensor", float(len(heads) - len(set(heads))), 0.0),
    ]


def _random_numbers_of_a_step(subject: Subject, row: Any) -> Tensor:
    """Return what a model would draw for dropout within a step."""
    seen: list[Tensor] = []
    handle = subject.step.model.register_forward_pre_hook(lambda module, inputs: seen.append(torch.rand(8)))
    try:
        subject.logical_step(subject.stacks([[row]]), subject.new_mechanism())
    finally:
        handle.remove()
    return seen[0]


def _seed_finding(what: str, drawn: Callable[[], Tensor]) -> Finding:
    """Check that something else is drawn under the same public seeds."""
    seen = []
    for _ in range(2):
        random.seed(42)
        np.random.seed(42)
        torch.manual_seed(42)
        seen.append(drawn())
    return Finding(f"{what} repeats under the public seed", float(torch.equal(*seen)), 0.0)


def _side_findings(plan: PrivacyPlan, draws: int) -> list[Finding]:
    """Look at the side value's noise; a histogram gets many more bins, so that few steps give enough numbers."""
    many_bins = {"histogram_bins": _MANY_BINS} if "histogram_bins" in plan.settings else {}
    mechanism = DPMechanism(dataclasses.replace(plan, num_parameters=1, settings={**plan.settings, **many_bins}))
    query = mechanism.threshold.side_query
    if query is None:
        return []
    steps = math.ceil(min(draws, 20_000 * query.size) / query.size)
    seen = [release.noisy_side for release in (mechanism.release(torch.zeros(1)) for _ in range(steps))]
    values = torch.from_numpy(np.concatenate([side for side in seen if side is not None]))
    return _normal_findings("side value", values / (query.sensitivity * query.noise_multiplier))
