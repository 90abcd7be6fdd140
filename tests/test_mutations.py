"""Deliberately broken variants of the library, each of which the audit must refute.

The table `MUTATIONS` is the evidence: what is broken, how, and which level finds it. It is repeated in
`docs/privacy.md`, and a test keeps the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Count

from hf_dcsgd.audit import audit_strategy
from hf_dcsgd.audit.processes import audit_processes
from hf_dcsgd.clipping import dc_sgd
from hf_dcsgd.data.rows import Batch
from hf_dcsgd.example_losses import ExampleLosses
from hf_dcsgd.ghost import GhostClipper
from hf_dcsgd.privacy import noise
from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.privacy.noise import NoiseSource
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.privacy.sampling import PoissonBatchSampler
from hf_dcsgd.step import PrivateStep

pytestmark = pytest.mark.proof

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutation:
    name: str
    level: int
    finding: str  # part of the name of a finding that must fail
    break_it: Patch


def noise_not_scaled(patch: pytest.MonkeyPatch) -> None:
    original = NoiseSource.add_noise

    def add_noise(self: NoiseSource, total: Any, noise_multiplier: float) -> torch.Tensor:
        return original(self, replace(total, sensitivity=1.0), noise_multiplier)

    patch.setattr(NoiseSource, "add_noise", add_noise)


def sigma_for_sigma_t(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrivacyPlan, "grad_noise_multiplier", property(lambda plan: plan.noise_multiplier))


def clipping_per_micro_batch(patch: pytest.MonkeyPatch) -> None:
    def accumulate(self: PrivateStep, stack: Batch) -> torch.Tensor:
        losses = self.losses(stack)
        grads = torch.autograd.grad(losses.sum(), list(self.clipper.parameters.values()))
        total = torch.cat([grad.flatten() for grad in grads])
        self.mechanism.clip_factors(torch.zeros(len(losses)))
        before = 0.0 if self._clipped_sum is None else self._clipped_sum
        self._clipped_sum = before + total * min(1.0, self.mechanism.threshold.sensitivity / total.norm().item())
        return losses.detach().sum()

    patch.setattr(PrivateStep, "accumulate", accumulate)


def noise_per_micro_batch(patch: pytest.MonkeyPatch) -> None:
    accumulate = PrivateStep.accumulate

    def accumulate_and_release(self: PrivateStep, stack: Batch) -> torch.Tensor:
        loss_sum = accumulate(self, stack)
        self.release()
        return loss_sum

    patch.setattr(PrivateStep, "accumulate", accumulate_and_release)


def noise_from_the_global_seed(patch: pytest.MonkeyPatch) -> None:
    def add_normal(values: Any, std: float, entropy: Any) -> None:
        values += std * torch.randn(len(values)).numpy()

    patch.setattr(noise, "_add_numpy_normal", add_normal)


def dividing_by_the_realized_batch_size(patch: pytest.MonkeyPatch) -> None:
    clip_factors, release = DPMechanism.clip_factors, DPMechanism._noisy_totals

    def count(self: DPMechanism, norms: torch.Tensor, *args: Any) -> torch.Tensor:
        self.realized = getattr(self, "realized", 0) + len(norms)
        return clip_factors(self, norms, *args)

    def rescaled(self: DPMechanism, queries: Any) -> Any:
        parts = release(self, queries)
        parts["gradient"] *= self.plan.expected_batch_size / max(1, getattr(self, "realized", 0))
        self.realized = 0
        return parts

    patch.setattr(DPMechanism, "clip_factors", count)
    patch.setattr(DPMechanism, "_noisy_totals", rescaled)


def histogram_counts_twice(patch: pytest.MonkeyPatch) -> None:
    histogram = dc_sgd.norm_histogram
    patch.setattr(dc_sgd, "norm_histogram", lambda *args: 2 * histogram(*args))


def histogram_unnoised(patch: pytest.MonkeyPatch) -> None:
    add_noise = NoiseSource.add_noise

    def only_gradients(self: NoiseSource, total: Any, noise_multiplier: float) -> torch.Tensor:
        return total.value.clone() if total.sensitivity == 1.0 else add_noise(self, total, noise_multiplier)

    patch.setattr(NoiseSource, "add_noise", only_gradients)


def batch_normalized_loss(patch: pytest.MonkeyPatch) -> None:
    losses_of = ExampleLosses.__call__

    def normalized(self: ExampleLosses, batch: Batch, **options: Any) -> Any:
        losses, outputs = losses_of(self, batch, **options)
        return losses / len(losses), outputs

    patch.setattr(ExampleLosses, "__call__", normalized)


def a_record_sampled_twice(patch: pytest.MonkeyPatch) -> None:
    split = PoissonBatchSampler.split
    patch.setattr(PoissonBatchSampler, "split", lambda self, draw: split(self, [*draw, *draw[:1]]))


def accountant_fed_sigma_t(patch: pytest.MonkeyPatch) -> None:
    epsilon = PrivacyPlan.epsilon

    def understated(self: PrivacyPlan, *args: Any, **kwargs: Any) -> float:
        sigma, sigma_t = self.noise_multiplier, self.grad_noise_multiplier
        object.__setattr__(self, "noise_multiplier", sigma_t)
        try:
            return epsilon(self, *args, **kwargs)
        finally:
            object.__setattr__(self, "noise_multiplier", sigma)

    patch.setattr(PrivacyPlan, "epsilon", understated)


def lost_steps_uncharged(patch: pytest.MonkeyPatch) -> None:
    load_state_dict = DPMechanism.load_state_dict

    def trusting(self: DPMechanism, state: Any) -> None:
        load_state_dict(self, state)
        self._charged = state["charged"]

    patch.setattr(DPMechanism, "load_state_dict", trusting)


def nan_example_not_zeroed(patch: pytest.MonkeyPatch) -> None:
    norms_of = GhostClipper.norms

    def blind(self: GhostClipper, losses: torch.Tensor) -> torch.Tensor:
        self._norms = norms_of(self, losses).nan_to_num(nan=1.0, posinf=1.0)
        return self._norms

    patch.setattr(GhostClipper, "norms", blind)


def dropout_from_the_global_seed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrivateStep, "randomness", lambda self: nullcontext())


def half_precision_norms(patch: pytest.MonkeyPatch) -> None:
    norms_of = GhostClipper.norms
    patch.setattr(GhostClipper, "norms", lambda self, losses: norms_of(self, losses).half().float())


REFUTED = "broken variant refuted by the audit"
MUTATIONS = (
    Mutation("noise not scaled by C", 1, "gradient noise: deviation", noise_not_scaled),
    Mutation("σ used for σ_T", 0, "accounted σ", sigma_for_sigma_t),
    Mutation("clipping per micro-batch", 0, "clipped sum", clipping_per_micro_batch),
    Mutation("noise per micro-batch", 0, "number of noise draws", noise_per_micro_batch),
    Mutation("noise from the global seed", 1, "noise repeats under the public seed", noise_from_the_global_seed),
    Mutation("dropout from the global seed", 1, "dropout repeats under the public seed", dropout_from_the_global_seed),
    Mutation("dividing by the realized batch size", 0, "clipped sum", dividing_by_the_realized_batch_size),
    Mutation("histogram of sensitivity 2", 0, "side value", histogram_counts_twice),
    Mutation("histogram unnoised", 1, "side value noise", histogram_unnoised),
    Mutation("loss normalized over the batch", 0, "clipped sum", batch_normalized_loss),
    Mutation("a record sampled twice", 0, "drawn twice", a_record_sampled_twice),
    Mutation("accountant fed σ_T", 0, "claimed ε", accountant_fed_sigma_t),
    Mutation("lost steps uncharged", 0, "not charged after a resume", lost_steps_uncharged),
    Mutation("NaN example not zeroed", 0, "finite, a NaN canary", nan_example_not_zeroed),
    Mutation("norms in half precision", 0, "clipped sum, a canary just above", half_precision_norms),
)

# Broken in the processes that the audit starts: (what, level, finding, lines that break it there).
PROCESS_MUTATIONS = (
    ("noise per rank", 3, "main process only", "    self._is_main_process = True"),
    ("every rank draws from the whole data set", 3, "drawn by two ranks", None),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
@pytest.mark.usefixtures("fewer_draws")
def test_the_audit_refutes_it(mutation: Mutation, monkeypatch: pytest.MonkeyPatch, count: Count) -> None:
    mutation.break_it(monkeypatch)
    (report,) = audit_strategy("dc_sgd_e", levels=(mutation.level,))
    assert any(mutation.finding in failure.name for failure in report.failures), str(report)
    count(REFUTED, 1)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.finding == "clipped sum"], ids=lambda m: m.name)
def test_the_adversary_alone_refutes_what_leaks_through_the_sum(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch, count: Count
) -> None:
    mutation.break_it(monkeypatch)
    (report,) = audit_strategy("dc_sgd_e", levels=(2,), trials=4_000)
    assert not report.findings[0].passed, str(report)
    count("broken variant refuted by the adversary of L2 alone", 1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "level", "finding", "line"), PROCESS_MUTATIONS, ids=lambda value: str(value)[:30])
def test_the_audit_over_processes_refutes_it(
    name: str, level: int, finding: str, line: str | None, tmp_path: Path, count: Count
) -> None:
    if line is not None:
        broken = f"""
from hf_dcsgd.privacy.mechanism import DPMechanism
noisy_totals = DPMechanism._noisy_totals
def everywhere(self, queries):
{line}
    return noisy_totals(self, queries)
DPMechanism._noisy_totals = everywhere
"""
    else:
        broken = """
from hf_dcsgd.privacy.sampling import PoissonBatchSampler
made = PoissonBatchSampler.__init__
def everything(self, *args, rank=0, world_size=1, **kwargs):
    made(self, *args, **kwargs)
PoissonBatchSampler.__init__ = everything
"""
    script = tmp_path / "broken.py"
    script.write_text(f"{broken}\nfrom hf_dcsgd.audit.processes import main\nmain()\n")
    report = audit_processes("dc_sgd_e", entry=[str(script)])
    assert any(finding in failure.name for failure in report.failures), str(report)
    count(REFUTED, 1)


def test_the_table_in_the_docs_is_this_one() -> None:
    text = (Path(__file__).parents[1] / "docs" / "privacy.md").read_text(encoding="utf-8")
    rows = [(m.name, m.level) for m in MUTATIONS] + [(name, level) for name, level, *_ in PROCESS_MUTATIONS]
    missing = [name for name, level in rows if f"| {name} | L{level} |" not in text]
    assert not missing
