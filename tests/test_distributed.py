"""Real processes over gloo; what they run is `distributed_worker.py`.

By default the processes are forked from one that has imported all they need (`worker_pool.py`). The launchers that
people use, torchrun and accelerate, start the same scripts in the slow tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import distributed_worker as worker
import numpy as np
import psutil
import pytest
import torch
from glue_fixtures import EXAMPLES, save_tiny_bert
from oracles import clip_factors, clipped_sum_of, gradients_of, gradients_one_by_one, norms_of
from scipy import stats
from worker_pool import REPOSITORY, WorkerPool, clean_environment

from hf_dcsgd.privacy.ledger import PrivacyLedger

CONFIGS = EXAMPLES / "accelerate"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch")
SHARED = (
    "layout",
    "noise",
    "lockstep",
    "inclusion",
    "units",
    "seeded",
    "disagreement",
    "interrupted",
    "two_then_one",
    "search",
    "whole_job",
    "collectives",
)


def launch(
    command: list[str | Path], *, timeout: float = 300, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs it to its end; when that does not come in time, neither launcher nor workers are left behind."""
    process = subprocess.Popen(
        [str(part) for part in command],
        env=clean_environment(**environment),
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                child.kill()
            process.wait()
    finished = subprocess.CompletedProcess(command, process.returncode, output)
    if check:
        assert finished.returncode == 0, output
    return finished


def torchrun(processes: int, directory: Path, *scenarios: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    options = ("--standalone", f"--nproc_per_node={processes}")
    return launch([*TORCHRUN, *options, worker.__file__, directory, *scenarios], **kwargs)


def accelerate(processes: int, *script: str | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    options = ("--config_file", CONFIGS / "cpu.yaml", "--num_processes", str(processes), "--main_process_port", "0")
    return launch([*ACCELERATE, *options, *script], **kwargs)


def saw(directory: Path, scenario: str) -> list[dict[str, Any]]:
    """What each rank saw, by rank."""
    files = sorted((directory / scenario).glob("rank*.pt"))
    return [torch.load(file, weights_only=False) for file in files]


@pytest.fixture(scope="module")
def pair(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pair")
    workers.run(2, [worker.__file__, directory, *SHARED])
    return directory


@pytest.fixture(scope="module")
def quad(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quad")
    workers.run(4, [worker.__file__, directory, "layout"])
    return directory


@pytest.fixture(scope="module")
def whole_quad(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole_quad")
    workers.run(4, [worker.__file__, directory, "noise", "inclusion"])
    return directory


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process: this one."""
    directory = tmp_path_factory.mktemp("single")
    for scenario in ("layout", "noise", "units"):
        worker.run(directory, scenario)
    return directory


# --- the same mechanism, however many processes ----------------------------------------------------------------------


def summed(ranks: list[dict[str, Any]], step: int, what: str) -> torch.Tensor:
    return torch.stack([rank["releases"][step][what] for rank in ranks]).sum(0)


@pytest.mark.parametrize(("processes", "name"), [(2, "pair"), pytest.param(4, "quad", marks=pytest.mark.slow)])
def test_several_processes_give_the_sums_counts_and_model_of_one(
    single: Path, processes: int, name: str, request: pytest.FixtureRequest
) -> None:
    reference, *others = (saw(directory, "layout") for directory in (single, request.getfixturevalue(name)))
    assert [len(ranks) for ranks in (reference, *others)] == [1, processes]
    for ranks in others:
        for step in range(worker.LAYOUT_STEPS):
            (alone,) = (rank["releases"][step] for rank in reference)
            for what in ("clipped_sum", "counts"):
                torch.testing.assert_close(summed(ranks, step, what), alone[what], rtol=1e-4, atol=1e-5)
            for rank in ranks:
                together = rank["releases"][step]
                assert together["sensitivity"] == pytest.approx(alone["sensitivity"], rel=1e-4)
                torch.testing.assert_close(together["noisy_gradient"], alone["noisy_gradient"], rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(together["noisy_counts"], alone["noisy_counts"], rtol=1e-4, atol=1e-3)
        for rank in ranks:
            torch.testing.assert_close(rank["parameters"], reference[0]["parameters"], rtol=1e-3, atol=1e-5)


def test_the_sum_over_ranks_is_that_of_plain_autograd(pair: Path) -> None:
    records, model, drawn = worker.Records(worker.LAYOUT_RECORDS), worker.seeded_net(), worker.global_draw(0)

    def losses(_: Any, outputs: Any, labels: Any) -> torch.Tensor:
        return worker.losses_of(outputs, labels)

    gradients = gradients_one_by_one(model, {"inputs": records.inputs[drawn]}, records.labels[drawn], losses)
    norms = norms_of(gradients)
    clipped = clipped_sum_of(gradients, clip_factors(norms, 1.0))
    expected = torch.cat([clipped[name].flatten() for name, _ in model.named_parameters()]).float()
    ranks = saw(pair, "layout")
    torch.testing.assert_close(summed(ranks, 0, "clipped_sum"), expected, rtol=1e-4, atol=1e-5)
    edges = 100 * 1.5 ** np.arange(-19.0, 0.0)  # of the following histogram, between its first and its last bin
    bins = np.searchsorted(edges, norms.numpy(), side="right")
    assert summed(ranks, 0, "counts").tolist() == np.bincount(bins, minlength=20).tolist()
    assert summed(ranks, 1, "counts").sum() == 0, "the second draw was empty on every rank"


def assert_noise_of_the_planned_size(directory: Path) -> None:
    for rank in saw(directory, "noise"):
        assert rank["coordinates"] >= 1_000_000
        assert rank["ratio"] == pytest.approx(1.0, abs=0.01)
        assert abs(rank["mean"]) < 5.5 / rank["coordinates"] ** 0.5


def test_noise_enters_once_at_the_planned_size(single: Path, pair: Path) -> None:
    for directory in (single, pair):
        assert_noise_of_the_planned_size(directory)
    for rank in saw(pair, "lockstep"):
        # 100 × 20 noisy counts: one standard error is 1.6%.
        assert rank["count_noise_ratio"] == pytest.approx(1.0, abs=0.08)


def test_ranks_stay_in_lockstep_bit_by_bit(pair: Path) -> None:
    first, second = saw(pair, "lockstep")
    assert len(first["digests"]) == worker.LOCKSTEP_STEPS
    assert first["digests"] == second["digests"]
    assert first["thresholds"] == second["thresholds"]
    assert len(set(first["thresholds"])) > 25, "the threshold should have moved"
    assert len(set(first["digests"])) == worker.LOCKSTEP_STEPS
    empty = [sum(not drawn for drawn in rank["draws"]) for rank in (first, second)]
    assert min(empty) > 20, "empty local draws should have been frequent"


def assert_drawn_at_rate_q_and_on_one_rank_only(ranks: list[dict[str, Any]]) -> None:
    rate = len(ranks) / worker.LOCKSTEP_RECORDS
    masks = np.stack([rank["mask"] for rank in ranks])
    by_rank = masks.any(axis=1)
    assert (by_rank.sum(axis=0) == 1).all(), "every record is in one rank's shard, and only there"
    together = masks.any(axis=0)
    draws, records = together.shape
    low, high = stats.binom.interval(1 - 1e-7 / records, draws, rate)
    counts = together.sum(axis=0)
    assert (low <= counts).all()
    assert (counts <= high).all()
    # Independent draws: the size of the whole draw varies as a binomial does, also over ranks.
    variance = records * rate * (1 - rate)
    ratio = together.sum(axis=1).var() / variance
    # A binomial's fourth moment is larger than a normal's, by about its variance.
    assert ratio == pytest.approx(1.0, abs=6 * ((2 + 1 / variance) / draws) ** 0.5)
    assert len({tuple(row.nonzero()[0]) for row in together}) > draws / 2


def test_every_record_is_drawn_at_rate_q_and_on_one_rank_only(pair: Path) -> None:
    ranks = saw(pair, "inclusion")
    assert len(ranks) == 2
    assert_drawn_at_rate_q_and_on_one_rank_only(ranks)


@pytest.mark.slow
def test_draws_and_noise_on_four_processes(whole_quad: Path) -> None:
    assert_noise_of_the_planned_size(whole_quad)
    ranks = saw(whole_quad, "inclusion")
    assert len(ranks) == 4
    assert_drawn_at_rate_q_and_on_one_rank_only(ranks)


def test_no_record_is_on_two_ranks_in_a_step_of_a_run(pair: Path) -> None:
    first, second = saw(pair, "lockstep")
    assert len(first["draws"]) >= worker.LOCKSTEP_STEPS
    for one, other in zip(first["draws"], second["draws"], strict=True):
        assert not set(one) & set(other)
        assert len(set(one)) == len(one)


def test_the_unsafe_seed_repeats_a_run_whatever_the_global_seeds_are(pair: Path) -> None:
    first, second = saw(pair, "seeded")
    assert first["digests"] == second["digests"]
    assert len(set(first["digests"])) == 1


# --- units of several rows -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["single", "pair"])
def units_of_ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What the ranks of a run with `privacy_unit` saw, on one and on two processes."""
    return saw(request.getfixturevalue(request.param), "units")


@pytest.mark.parametrize("where", ["forwards of the run", "draws"])
def test_every_unit_enters_at_rate_q_with_rows_drawn_uniformly(
    units_of_ranks: list[dict[str, Any]], where: str
) -> None:
    owners, sizes = worker.OwnedRecords().owners, np.array(worker.UNIT_SIZES)
    if where == "draws":  # of the sampler that the trainer made for the run
        times, entered = worker.UNIT_DRAWS, [rows for rank in units_of_ranks for rows in rank["draws"]]
    else:
        times, entered = worker.UNIT_STEPS, [rows for rank in units_of_ranks for _, _, rows in rank["entered"]]
    rate = units_of_ranks[0]["rate"]
    assert rate == 8 / len(sizes)
    counts = np.bincount([owners[rows[0]] for rows in entered], minlength=len(sizes))
    low, high = stats.binom.interval(1 - 1e-8 / len(counts), times, rate)
    assert (low <= counts).all()
    assert (counts <= high).all()
    # All together, so that a rate that follows the number of rows is seen.
    spread = ((counts - times * rate) ** 2).sum() / (times * rate * (1 - rate))
    assert spread < stats.chi2.ppf(1 - 1e-9, len(counts))
    rows_entered = np.bincount([row for rows in entered for row in rows], minlength=len(owners))
    for unit, size in enumerate(sizes):
        of_unit = rows_entered[owners == unit]
        assert of_unit.sum() == counts[unit] * min(size, worker.UNIT_CAP)
        # Rows of one draw exclude each other, which makes counts more alike than independent ones.
        assert size <= worker.UNIT_CAP or stats.chisquare(of_unit).pvalue > 1e-9


def test_a_unit_is_in_one_forward_of_one_rank_with_rows_of_its_own(units_of_ranks: list[dict[str, Any]]) -> None:
    owners = worker.OwnedRecords().owners
    places: dict[tuple[int, int], tuple[int, int]] = {}  # (step, unit) → (rank, stack)
    for rank, seen in enumerate(units_of_ranks):
        for step, stack, rows in seen["entered"]:
            (unit,) = {int(owners[row]) for row in rows}
            assert len(rows) == len(set(rows)) == min(worker.UNIT_SIZES[unit], worker.UNIT_CAP)
            assert (step, unit) not in places, "a unit enters a step at most once"
            places[step, unit] = (rank, stack)
    rank_of_unit = {(unit, rank) for (_, unit), (rank, _) in places.items()}
    assert len(rank_of_unit) == len(worker.UNIT_SIZES), "every unit is in one rank's shard, and only there"
    assert len(set(places.values())) > worker.UNIT_STEPS, "steps should have had several stacks"


def test_units_are_clipped_as_a_whole_and_noise_enters_once(units_of_ranks: list[dict[str, Any]]) -> None:
    records, model = worker.OwnedRecords(), worker.seeded_net()
    first = [rows for rank in units_of_ranks for step, _, rows in rank["entered"] if step == 0]
    gradients = []
    for rows in first:
        losses = worker.losses_of(model(records.inputs[rows]), records.labels[rows])
        gradients.append(gradients_of(losses.mean(), model))
    expected = torch.zeros(sum(p.numel() for p in model.parameters()))
    if first:
        clipped = clipped_sum_of(gradients, clip_factors(norms_of(gradients), 1.0))
        expected = torch.cat([clipped[name].flatten() for name, _ in model.named_parameters()]).float()
    total = torch.stack([rank["sums"][0] for rank in units_of_ranks]).sum(0)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)
    for rank in units_of_ranks:
        # 90 releases of 163 numbers: one standard error is 0.6%.
        assert rank["noise"] == pytest.approx(1.0, abs=0.03)


# --- agreement, resumption, the end of the budget --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("dataset_size", "dataset_size: 60 | 61"),
        ("batch_size", "expected_batch_size: 8 | 16"),
        ("steps", "steps: 6 | 7"),
        ("noise", "noise_multiplier: 1.0 | 2.0"),
        ("strategy", "clipping: dc_sgd_e | dc_sgd_p"),
        ("learning_rate", "learning_rate: 0.01 | 0.02"),
        ("layers", "num_parameters: 136 | 128"),
        ("model", "num_parameters: 163 | 183"),
    ],
)
def test_ranks_that_disagree_stop_together_and_name_the_numbers(pair: Path, what: str, named: str) -> None:
    for rank in saw(pair, "disagreement"):
        assert rank[what].startswith("RuntimeError: the processes disagree")
        assert named in rank[what]


def test_resuming_with_another_batch_size_is_refused_on_all_ranks(pair: Path) -> None:
    for rank in saw(pair, "interrupted"):
        assert "expected_batch_size: 8 in the checkpoint, 16 now" in rank["refusals"]["batch_size"]
        assert "noise_multiplier: 1.0 in the checkpoint, 2.0 now" in rank["refusals"]["noise"]
        assert "disagree" in rank["refusals"]["one_rank_anew"]
        assert "'charged': 2" in rank["refusals"]["one_rank_anew"]


def test_the_budget_ends_on_all_ranks_at_the_same_step(pair: Path) -> None:
    first, second = saw(pair, "interrupted")
    assert first == second
    # Six were paid for; the third was taken twice, so the fifth is the last.
    assert (first["checkpoint"], first["global_step"], first["charged"]) == ("checkpoint-2", 5, 6)
    assert first["exhausted"].startswith("BudgetExhausted")
    assert PrivacyLedger.read(pair / "interrupted" / "run").charged == 6


@pytest.mark.usefixtures("no_report_page")
def test_two_processes_may_become_one_when_the_batch_size_stays(pair: Path) -> None:
    directory = pair / "two_then_one"
    checkpoint = str(directory / "run" / "checkpoint-3")
    changed = worker.make_trainer(directory, per_device_train_batch_size=4)
    with pytest.raises(ValueError, match="expected_batch_size: 8 in the checkpoint, 4 now"):
        changed.train(resume_from_checkpoint=checkpoint)
    trainer = worker.make_trainer(directory, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    trainer.train(resume_from_checkpoint=checkpoint)
    assert trainer.state.global_step == 6
    assert PrivacyLedger.read(directory / "run").charged == 6


# --- a whole job -----------------------------------------------------------------------------------------------------


def test_a_whole_job_writes_and_speaks_on_the_main_process_only(pair: Path) -> None:
    main, other = saw(pair, "whole_job")
    run = pair / "whole_job" / "run"
    assert "Privacy plan" in main["printed"]
    assert "erratic" in main["warnings"], "a batch of 8 deserves a warning"
    assert (other["printed"], other["warnings"]) == ("", "")
    summary = PrivacyLedger.read(run)
    assert (len(summary.runs), summary.charged) == (1, 6)
    assert len((run / "privacy_trace.jsonl").read_text().splitlines()) == 6
    assert json.loads((run / "privacy_run.json").read_text())["plan"]["world_size"] == 2
    assert json.loads((run / "privacy_report.json").read_text())["layout"]["world_size"] == 2


def test_a_whole_job_evaluates_saves_and_loads_the_same_best_model(pair: Path) -> None:
    main, other = saw(pair, "whole_job")
    assert main["digest"] == other["digest"]
    assert main["best"] == other["best"]
    for key in ("eval_loss", "noisy_loss", "clip_threshold", "epsilon"):
        assert [e[key] for e in main["history"] if key in e] == [e[key] for e in other["history"] if key in e]
    assert main["predictions"].shape == (21, worker.CLASSES)
    torch.testing.assert_close(main["predictions"], other["predictions"], rtol=0, atol=0)
    best = min(entry["eval_loss"] for entry in main["history"] if "eval_loss" in entry)
    assert main["evaluation"]["eval_loss"] == pytest.approx(best, rel=1e-6)
    assert main["epsilon"] == pytest.approx(20.0, rel=1e-3)
    evaluated, true = main["losses_of_a_bert"]
    assert evaluated == pytest.approx(true, rel=1e-4)  # transformers alone would multiply it by the number of ranks
    state = torch.load(pair / "whole_job" / "final" / "training_args.bin", weights_only=False)
    assert state.unsafe_noise_seed is None


def test_a_search_runs_and_charges_its_trials_on_all_ranks_alike(pair: Path) -> None:
    first, second = saw(pair, "search")
    assert first == second
    assert "2 trials" in first["cost"]
    ledgers = list((pair / "search").rglob(PrivacyLedger.FILENAME))
    assert [sum(run.charged for run in PrivacyLedger.read(ledger.parent).runs) for ledger in ledgers] == [6, 6]


# --- the end of a process --------------------------------------------------------------------------------------------


def assert_died_in_the_fifth_step(run: Path) -> None:
    assert len((run / "privacy_trace.jsonl").read_text().splitlines()) == 4
    assert PrivacyLedger.read(run).charged == 5, "the step under way was charged before anything left it"


def assert_resumed_within_the_budget(directory: Path) -> None:
    first, second = saw(directory, "resumed")
    assert first == second
    # The checkpoint was that of step 3; steps 4 and 5 are paid for once more, which leaves 6 as the last of 8.
    assert (first["checkpoint"], first["global_step"], first["charged"]) == ("checkpoint-3", 6, 8)
    assert PrivacyLedger.read(directory / "dying" / "run").charged == 8


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_job_and_the_next_one_resumes(workers: WorkerPool, tmp_path: Path, victim: int) -> None:
    ended = workers.run(2, [worker.__file__, tmp_path, "dying"], check=False, VICTIM_RANK=str(victim))
    assert ended.exit_codes[victim] == -signal.SIGKILL
    assert ended.exit_codes[1 - victim] == 1, "the other rank ends by an error of its own"
    assert_died_in_the_fifth_step(tmp_path / "dying" / "run")
    workers.run(2, [worker.__file__, tmp_path, "resumed"])
    assert_resumed_within_the_budget(tmp_path)


@pytest.mark.slow
def test_a_job_of_torchrun_is_killed_and_one_of_accelerate_resumes_it(tmp_path: Path) -> None:
    ended = torchrun(2, tmp_path, "dying", check=False, VICTIM_RANK="1")
    assert ended.returncode != 0
    assert_died_in_the_fifth_step(tmp_path / "dying" / "run")
    accelerate(2, worker.__file__, tmp_path, "resumed")
    assert_resumed_within_the_budget(tmp_path)


@pytest.mark.slow
def test_a_rank_that_stops_answering_ends_the_job_by_the_timeout(tmp_path: Path) -> None:
    kind = signal.Signals.SIGSTOP.name
    ended = torchrun(2, tmp_path, "dying", check=False, VICTIM_RANK="1", VICTIM_SIGNAL=kind, COLLECTIVE_TIMEOUT="15")
    assert ended.returncode != 0
    assert_died_in_the_fifth_step(tmp_path / "dying" / "run")


# --- what is sent, and the example -----------------------------------------------------------------------------------


def test_one_collective_call_per_logical_batch(pair: Path) -> None:
    for rank in saw(pair, "collectives"):
        release = ("allreduce", (rank["d"] + 20) * 4)
        assert rank["plain"] == [release] * 5, "five counted steps"
        assert rank["accumulated"] == [release] * 5
        # The loop of transformers gathers the loss that it shows, which is zero here: two small calls per log.
        assert [call for call in rank["logged"] if call[0] == "allreduce"] == [release] * 5
        assert all(size < 100 for kind, size in rank["logged"] if kind != "allreduce")
        assert ("allreduce", rank["d"] * 4) in rank["reducer"], "the count sees DDP's reducer where it works"


@pytest.mark.slow
def test_the_benchmark_of_collective_calls(tmp_path: Path) -> None:
    output = tmp_path / "collectives.json"
    launch([sys.executable, REPOSITORY / "benchmarks" / "collectives.py", "--output", output])
    result = json.loads(output.read_text())
    for name in ("private", "private, 4 micro-batches"):
        row = result["rows"][name]
        assert row["world_size"] == 2
        assert row["kinds"] == {"allreduce": 4}, "four counted steps: none from DDP's reducer"
        assert row["calls_per_step"] == 1
        assert row["bytes_per_step"] == row["largest_bytes"] == (row["d"] + 20) * 4
    assert result["rows"]["plain Trainer"]["kinds"]["allreduce"] >= 4, (
        "the count sees DDP's reducer where there is one"
    )
    logging = result["rows"]["private, logging every step"]
    assert logging["kinds"]["allreduce"] == 4


def glue_command(folder: Path) -> list[str | Path]:
    """The example on files of two dozen rows and a tiny model, which this writes."""
    for name, rows, film in (("train", 48, "film"), ("dev", 9, "film film")):
        lines = [f"{'good' if k % 2 else 'bad'} {film} {k}\t{k % 2}" for k in range(rows)]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    files = ("--train_file", folder / "train.tsv", "--validation_file", folder / "dev.tsv", "--max_seq_length", "16")
    size = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--num_train_epochs", "2")
    model = ("--model_name_or_path", save_tiny_bert(folder / "model"), "--do_train", "--do_eval", "--use_cpu")
    script = EXAMPLES / "run_glue.py"
    return [
        script,
        *model,
        *files,
        *size,
        "--target_epsilon",
        "8",
        "--report_to",
        "none",
        "--output_dir",
        folder / "output",
    ]


def assert_glue_ran_on_two_processes(output: Path, printed: str) -> None:
    assert printed.count("Privacy plan") == 1, printed
    report = json.loads((output / "privacy_report.json").read_text())
    assert report["layout"] == {"world_size": 2, "gradient_accumulation_steps": 2}
    assert json.loads((output / "privacy_run.json").read_text())["plan"]["expected_batch_size"] == 16
    assert PrivacyLedger.read(output).charged == 6
    assert "eval_accuracy" in json.loads((output / "all_results.json").read_text())


@pytest.mark.slow
def test_the_glue_example_on_two_processes(workers: WorkerPool, tmp_path: Path) -> None:
    ended = workers.run(2, glue_command(tmp_path))
    assert_glue_ran_on_two_processes(tmp_path / "output", ended.output)


@pytest.mark.slow
def test_the_glue_example_launched_by_accelerate(tmp_path: Path) -> None:
    finished = accelerate(2, *glue_command(tmp_path))
    assert_glue_ran_on_two_processes(tmp_path / "output", finished.stdout)


@pytest.mark.slow
def test_the_first_fsdp_asked_of_accelerate_is_refused(tmp_path: Path) -> None:
    options = ["--use_fsdp", "--fsdp_version", "1", "--num_processes", "2", "--main_process_port", "0"]
    ended = launch([*ACCELERATE, *options, worker.__file__, tmp_path, "two_then_one"], check=False)
    assert ended.returncode != 0
    assert "version=1 cannot be honored" in ended.stdout


@pytest.mark.slow
def test_two_nodes_with_one_process_each(tmp_path: Path) -> None:
    """The configuration file for several machines, both of them this one."""
    config = CONFIGS / "multi_node.yaml"
    port = str(20_000 + os.getpid() % 20_000)
    common = [*ACCELERATE, "--config_file", config, "--num_machines", "2", "--num_processes", "2"]
    common += ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
    nodes = [
        subprocess.Popen(
            [str(p) for p in [*common, "--machine_rank", str(k), worker.__file__, tmp_path, "own_disks"]],
            env=clean_environment(),
            stdout=subprocess.DEVNULL,
        )
        for k in range(2)
    ]
    try:
        assert [node.wait(timeout=300) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            if node.poll() is None:
                for child in [*psutil.Process(node.pid).children(recursive=True), node]:
                    child.kill()
    first, second = saw(tmp_path, "own_disks")
    assert first == second
    assert (first["step"], first["charged"]) == (6, 6)
    ledgers = [path.parent.parent.name for path in tmp_path.rglob(PrivacyLedger.FILENAME)]
    assert ledgers == ["machine0"]
