"""Load: thousands of steps in flat memory, and logical batches of thousands of examples in hundreds of pieces."""

from __future__ import annotations

import gc
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from simulated_runs import without_fsync
from tiny_tasks import feature_rows, feature_trainer
from transformers import TrainerCallback

from hf_dcsgd.privacy.ledger import PrivacyLedger
from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.reporting import report
from hf_dcsgd.runs.trace import TRACE_FILENAME

SOAK_STEPS = 5_000


def resident_bytes() -> int:
    """Memory of this process that is in use now; `resource` only knows the most there ever was."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def live_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


class Watch(TrainerCallback):
    """Looks at memory every so many steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.bytes: list[int] = []
        self.tensors: list[int] = []

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step % self.every == 0:
            gc.collect()
            self.bytes.append(resident_bytes())
            self.tensors.append(live_tensors())


def read_trace(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / TRACE_FILENAME).read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_five_thousand_steps_in_flat_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_fsync(monkeypatch)  # durability is tested elsewhere, and a slow disk is no leak
    watch = Watch(every=250)
    trainer = feature_trainer(
        tmp_path,
        rows=feature_rows(2_000),
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        max_steps=SOAK_STEPS,
        logging_steps=100,
        learning_rate=1e-2,
        trainer_options={"callbacks": [watch]},
    )
    trainer.train()
    settled = len(watch.bytes) // 4  # allocators and caches have warmed up by then
    slope = np.polyfit(np.arange(len(watch.bytes) - settled) * watch.every, watch.bytes[settled:], 1)[0]
    growth = watch.bytes[-1] - watch.bytes[settled]
    print(f"{SOAK_STEPS} steps: {growth / 2**20:+.2f} MB after the warm-up, {slope:+.1f} bytes per step")
    # The trace of thresholds and the ledger's hashes in memory are some hundred bytes per step.
    assert growth < 8 * 2**20
    # Two for each stack of the last draw; one left behind per step would make 250 more each time.
    assert max(watch.tensors[settled:]) - min(watch.tensors[settled:]) <= 12

    trace = read_trace(tmp_path)
    assert [line["step"] for line in trace] == list(range(1, SOAK_STEPS + 1))
    assert all(0 < line["clip_threshold"] < math.inf and 0 < line["histogram_range"] < math.inf for line in trace)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())

    ledger = PrivacyLedger.read(tmp_path)
    told = report.build_report(tmp_path)
    assert ledger.charged == trainer.mechanism.charged == trainer.plan.steps == SOAK_STEPS
    assert told["steps"] == {
        "planned": SOAK_STEPS,
        "charged": SOAK_STEPS,
        "released": SOAK_STEPS,
        "lost": 0,
        "torn_ledger_lines": 0,
    }
    assert told["guarantee"]["epsilon"] == trainer.epsilon() == trainer.plan.epsilon()


@pytest.mark.slow
def test_logical_batches_of_8192_over_256_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[int]] = [[]]
    releases: list[torch.Tensor] = []
    clip_factors, release = DPMechanism.clip_factors, DPMechanism.release

    def counting(self: DPMechanism, norms: torch.Tensor, losses: torch.Tensor | None = None) -> torch.Tensor:
        drawn[-1].append(len(norms))
        return clip_factors(self, norms, losses)

    def watched(self: DPMechanism, clipped_sum: torch.Tensor):
        releases.append(clipped_sum.clone())
        drawn.append([])
        return release(self, clipped_sum)

    monkeypatch.setattr(DPMechanism, "clip_factors", counting)
    monkeypatch.setattr(DPMechanism, "release", watched)
    rows = feature_rows(16_384)
    trainer = feature_trainer(
        tmp_path,
        rows=rows,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=256,
        max_steps=4,
        clipping="fixed",
        learning_rate=0.0,
    )
    trainer.train()
    assert trainer.plan.expected_batch_size == 8_192
    assert trainer.plan.sampling_rate == 0.5
    assert len(releases) == 4
    for sizes in drawn[:4]:
        assert len(sizes) == math.ceil(sum(sizes) / 32)
        assert max(sizes) - min(sizes) <= 1
        assert abs(sum(sizes) - 8_192) < 6 * math.sqrt(16_384 * 0.25)
    assert PrivacyLedger.read(tmp_path).charged == 4
    # The weights never move, so every clipped sum estimates the same mean over all rows.
    sums = torch.stack(releases) / 8_192
    assert (sums - sums.mean(0)).norm(dim=1).max() < 6 / math.sqrt(8_192)
