"""L3: the levels L0 and L1 over several real processes, joined by gloo.

`audit_processes` starts them; each runs this module, and the first one prints what all of them found.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import torch
from accelerate.utils import gather_object

from hf_dcsgd.audit import PROBE_DIMENSIONS_L1, probe_findings
from hf_dcsgd.audit.findings import AuditReport, Finding
from hf_dcsgd.audit.noise_scale import noise_findings
from hf_dcsgd.audit.probe import probe_trainer
from hf_dcsgd.audit.replay import as_unit, owners_of_rows
from hf_dcsgd.trainer import DCSGDTrainer

_TIMEOUT_SECONDS = 600


def audit_processes(
    clipping: str,
    processes: int = 2,
    *,
    rows_per_unit: int | None = None,
    entry: Sequence[str] = ("-m", "hf_dcsgd.audit.processes"),
    timeout: float = _TIMEOUT_SECONDS,
) -> AuditReport:
    """Run L3 with a strategy, and units of several rows if asked for; RuntimeError when a process fails or hangs.

    `entry` is what each process runs: a script of yours may change something first, then call `main` of this module.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [*entry, "--clipping", clipping]
    command += [] if rows_per_unit is None else ["--rows-per-unit", str(rows_per_unit)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the audit over {processes} processes did not end within {timeout:g} s") from error
    if ended.returncode != 0:
        raise RuntimeError(f"the audit over {processes} processes failed:\n{ended.stderr[-6000:]}")
    found = json.loads(ended.stdout.strip().splitlines()[-1])
    findings = [
        Finding(**{**finding, "detail": f"rank {rank}"}) for rank, of_rank in enumerate(found) for finding in of_rank
    ]
    return AuditReport("L3", f"{clipping}, {processes} processes", findings)


def _overlap_finding(trainer: DCSGDTrainer) -> Finding:
    """Count records, or units, that two ranks can draw: shards must be disjoint, or one would count twice."""
    loader = trainer.get_train_dataloader()
    assert loader.batch_sampler is not None
    owners = owners_of_rows(trainer)
    items = [item for _ in range(20) for micro_batch in loader.batch_sampler for item in micro_batch]
    mine = set(items) if owners is None else {int(owners[as_unit(item)[0]]) for item in items}
    drawn = [index for indices in gather_object([sorted(mine)]) for index in indices]
    return Finding("records drawn by two ranks", float(len(drawn) - len(set(drawn))), 0.0)


def _findings(clipping: str, rows_per_unit: int | None) -> list[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = partial(probe_trainer, folder, clipping, rows_per_unit=rows_per_unit)
        first = trainer()
        found = [*probe_findings(first, rows_per_unit), _overlap_finding(first)]
        return found + noise_findings(trainer(dimensions=PROBE_DIMENSIONS_L1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clipping", required=True)
    parser.add_argument("--rows-per-unit", type=int)
    options = parser.parse_args()
    mine = [asdict(finding) for finding in _findings(options.clipping, options.rows_per_unit)]
    everything = gather_object([mine])
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(everything), flush=True)
    if torch.distributed.is_initialized():
        # Nobody leaves while another still listens: gloo would abort it.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
