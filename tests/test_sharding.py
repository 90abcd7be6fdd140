"""A frozen trunk in pieces over real processes: the same numbers as with whole models, or nothing at all.

What the processes run is `sharding_worker.py`.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import sharding_worker as worker
import torch
from glue_fixtures import save_tiny_bert
from safetensors.torch import load_file
from sharded_models import MODELS
from sharding_watch import digest, global_draw
from test_distributed import (
    ACCELERATE,
    CONFIGS,
    EXAMPLES,
    assert_glue_ran_on_two_processes,
    glue_command,
    launch,
    saw,
)
from tiny_language_model import save_tiny_llama
from torch import nn
from worker_pool import WorkerPool

from hf_dcsgd.privacy.ledger import PrivacyLedger
from hf_dcsgd.sharding.groups import sharding_groups
from hf_dcsgd.sharding.lockstep import GatherLog

SHARED = ("plain", "sharded", "continued", "broken_lockstep", "refused")


@pytest.fixture(scope="module")
def pair(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded-pair")
    workers.run(2, [worker.__file__, directory, *SHARED])
    return directory


# --- the same numbers ------------------------------------------------------------------------------------------------


def assert_same_as_whole_models(directory: Path) -> None:
    """Data parallelism with whole models, on as many processes: bit by bit, and all ranks alike."""
    ranks = saw(directory, "sharded")
    for plain, pieces in zip(saw(directory, "plain"), ranks, strict=True):
        assert plain.keys() == pieces.keys()
        for name in plain:
            assert pieces[name]["digests"] == plain[name]["digests"] == ranks[0][name]["digests"], name
            assert all(map(torch.equal, pieces[name]["norms"], plain[name]["norms"])), name
            for key in ("clipped_sum", "counts", "noisy_gradient", "noisy_counts"):
                for one, other in zip(pieces[name]["releases"], plain[name]["releases"], strict=True):
                    assert torch.equal(one[key], other[key]), (name, key)
            losses = [[e["eval_loss"] for e in run[name]["history"] if "eval_loss" in e] for run in (plain, pieces)]
            assert losses[0] == losses[1], name


def assert_close_to_one_process(directory: Path) -> None:
    """Norms and clipped sums of every step, at the same weights: within 1e-5 of those of this process."""
    worker.run(directory / "alone", "plain", at_weights_of=directory / "sharded" / "rank0.pt")
    (alone,), ranks = saw(directory / "alone", "plain"), saw(directory, "sharded")
    for name, reference in alone.items():
        for step, release in enumerate(reference["releases"]):
            one, together = release["clipped_sum"], sum(rank[name]["releases"][step]["clipped_sum"] for rank in ranks)
            assert float((together - one).norm()) <= 1e-5 * float(one.norm()), (name, step)
            norms = torch.cat([rank[name]["norms"][step] for rank in ranks])
            assert len(norms) == len(global_draw(step))
            torch.testing.assert_close(norms.sort()[0], reference["norms"][step].sort()[0], rtol=1e-5, atol=0)


def test_pieces_give_the_norms_sums_and_weights_of_whole_models_bit_by_bit(pair: Path) -> None:
    assert_same_as_whole_models(pair)
    for rank in saw(pair, "sharded"):
        assert all(len(run["releases"]) == worker.STOPPED["stop_at"] for run in rank.values())
        assert all(run["releases"][1]["counts"].sum() == 0 for run in rank.values()), "the second draw was empty"
    first, second = (rank["bert"]["releases"][2]["counts"].sum() for rank in saw(pair, "sharded"))
    assert first > 0 == second, "in the third step one rank had nothing but made-up rows"


@pytest.mark.usefixtures("no_report_page")
def test_pieces_give_what_one_process_gives(pair: Path) -> None:
    assert_close_to_one_process(pair)


# --- what a rank holds -----------------------------------------------------------------------------------------------


def assert_one_block_at_a_time(directory: Path, scenario: str = "sharded") -> None:
    """Parameters take frozen bytes / ranks + trained bytes + one block, at the worst moment of a run."""
    ranks = saw(directory, scenario)
    for rank in ranks:
        for name, run in rank.items():
            allowed, estimate = run["allowed"], run["estimate"]
            pieces = allowed["frozen"] / len(ranks) + allowed["trained"]
            assert max(run["held"]) <= pieces, f"{name}: also after an evaluation"
            assert run["left"] == 0, f"{name}: of the tensors that were sharded, none is left"
            assert run["groups"] == 1, f"{name}: beside what belongs to no block"
            assert run["peak"] <= pieces + allowed["block"] + allowed["rest"], name
            assert run["ahead"] == 0, f"{name}: nothing is fetched while a block runs backwards"
            assert pieces == estimate["frozen"] + estimate["trained"], name
            # With the buffers in which pieces arrive; four parts may have padded rows.
            assert run["peak"] < run["buffered"] <= pieces + estimate["gathered"] + 4 * allowed["padding"], name


def test_one_block_at_a_time_is_whole(pair: Path) -> None:
    assert_one_block_at_a_time(pair)


@pytest.mark.slow
def test_one_block_at_a_time_is_whole_of_models_of_a_real_size(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(2, [worker.__file__, tmp_path, "large"], timeout=900)
    assert_one_block_at_a_time(tmp_path, "large")


@pytest.mark.slow
def test_one_process_reads_the_weights_and_none_keeps_them(workers: WorkerPool, tmp_path: Path) -> None:
    worker.LARGE["bert-base"]().bfloat16().save_pretrained(save_tiny_bert(tmp_path / "checkpoint"))
    workers.run(2, [worker.__file__, tmp_path, "loading"])
    ranks = saw(tmp_path, "loading")
    for name in ("by one", "by all"):
        for rank, found in enumerate(run[name] for run in ranks):
            whole, slack = found["whole"], 0.1 * found["whole"]
            reads = rank == 0 or name == "by all"
            assert whole * reads <= found["read"] + slack, (rank, name)
            assert found["read"] <= whole * reads + slack, (rank, name)
            # What was read goes as the pieces come; on the way are a block and the buffers of its broadcast.
            pieces = found["frozen"] / 2 + found["trained"]
            assert found["sharded"] <= pieces + 2 * found["block"] + slack, (rank, name)
    assert len({run[name]["digest"] for run in ranks for name in run}) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("no_report_page")
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_all_models_and_settings_on_several_numbers_of_processes(
    workers: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    workers.run(processes, [worker.__file__, tmp_path, "plain", "sharded"], VARIANTS="all", timeout=1200)
    assert_same_as_whole_models(tmp_path)
    assert_one_block_at_a_time(tmp_path)
    monkeypatch.setenv("VARIANTS", "all")
    assert_close_to_one_process(tmp_path)


# --- in lockstep, or not at all --------------------------------------------------------------------------------------


def test_another_order_of_gathers_is_found_before_the_release(pair: Path) -> None:
    for rank in saw(pair, "broken_lockstep"):
        found = rank["swapped"]
        assert found["error"].startswith("LockstepError: ranks did not gather the same weights in the same order")
        assert "nothing was released, and the step was charged" in found["error"]
        assert (found["charged"], found["released"]) == (2, 1), "the second step is paid for, and nothing left it"
        assert found["unmoved"], "the weights are those of the first step"
        unseen = rank["swapped and unseen"]
        assert (unseen["error"], unseen["released"]) == ("no error", 2), "nothing else would have seen it"


def test_a_callback_cannot_run_the_model_during_training(pair: Path) -> None:
    for rank in saw(pair, "broken_lockstep"):
        assert rank["callback"]["error"].startswith("LockstepError: a model whose weights are sharded can run only")


def test_the_checksum_tells_orders_and_numbers_apart() -> None:
    def value(*names: str) -> int:
        log = GatherLog()
        for name in names:
            log.note(name)
        return log.value

    orders = [(), ("a",), ("b",), ("a", "b"), ("b", "a"), ("ab",), ("a", "b", "a"), ("a", "a", "b")]
    assert len({value(*names) for names in orders}) == len(orders)


def test_ranks_with_different_numbers_of_passes_release_nothing(workers: WorkerPool, tmp_path: Path) -> None:
    """The mutation that even numbers of stacks are there to prevent."""
    workers.run(2, [worker.__file__, tmp_path, "uneven"], check=False)
    first, second = saw(tmp_path, "uneven")
    assert first["error"].startswith("LockstepError: ranks did not gather the same weights in the same order")
    assert second["error"].startswith("LockstepError: not all ranks came to gather the weights of blocks.0")
    for rank in (first, second):
        assert "released, and" in rank["error"]
        assert (rank["released"], rank["charged"]) == (0, 1)
        assert rank["unmoved"]


def test_weights_that_stay_whole_are_seen(pair: Path) -> None:
    """The mutation: FSDP's default, which keeps the weights of the whole model gathered after a forward."""
    for rank in saw(pair, "refused"):
        assert rank["left whole"] > 0
        assert "modifies the model in place" in rank["left whole and trained"]


def test_gathered_weights_are_not_taken_for_written_and_written_ones_are_found(pair: Path) -> None:
    for rank in saw(pair, "refused"):
        assert rank["writes nothing"] == "no error"
        assert "blocks.0 (WritingBlock) writes into its frozen weights" in rank["writes"]
        assert rank["unguarded writes"] == "no error", "nothing else would have seen it"


def test_transformers_own_averaging_of_gradients_is_refused(pair: Path) -> None:
    for rank in saw(pair, "refused"):
        assert "expected no hooks on the gradients of trained parameters" in rank["averaging hook"]


def test_what_cannot_be_sharded_is_refused_by_name(pair: Path) -> None:
    for rank in saw(pair, "refused"):
        assert "every parameter of this model is trained" in rank["everything"]
        assert "trainable_layers or a LoRA adapter" in rank["everything"]
        assert "got NoLayer" in rank["classes"]
        assert "one backward pass per example" in rank["slow path"]
        assert "head.weight" in rank["slow path"]
        assert "(the model itself)" in rank["fallback"]
        assert "fsdp=True cannot be used with a search" in rank["search"]


# --- what is saved ---------------------------------------------------------------------------------------------------


def test_checkpoints_are_those_of_whole_models(pair: Path) -> None:
    for name, file in (("bert", "model.safetensors"), ("llama", "adapter_model.safetensors")):
        plain, pieces = (pair / kind / name / "run" / "checkpoint-2" for kind in ("plain", "sharded"))
        assert sorted(p.name for p in plain.iterdir()) == sorted(p.name for p in pieces.iterdir())
        whole, saved = load_file(plain / file), load_file(pieces / file)
        assert whole.keys() == saved.keys()
        assert all(torch.equal(whole[key], saved[key]) for key in whole)
        config = "config.json" if name == "bert" else "adapter_config.json"
        settings = [json.loads((folder / config).read_text()) for folder in (plain, pieces)]
        for one in settings:
            for run in one.get("privacy_spent", []):
                run.pop("run_id")  # each run has its own
        assert settings[0] == settings[1]


def test_a_sharded_run_resumes_and_loads_its_best_model(pair: Path) -> None:
    first, second = saw(pair, "continued")
    for name in ("bert", "llama"):
        assert first[name] == second[name]
        # Three of four steps were charged; the third is taken once more.
        assert (first[name]["step"], first[name]["charged"]) == (3, 4)
    assert first["best"]["evaluated"] == first["best"]["best"] == second["best"]["evaluated"]
    assert torch.equal(first["best"]["predictions"], second["best"]["predictions"])
    assert (pair / "continued" / "bert" / "model.safetensors").is_file()
    assert (pair / "continued" / "llama" / "adapter_model.safetensors").is_file()


def test_report_and_record_name_the_sharding(pair: Path) -> None:
    record = json.loads((pair / "sharded" / "bert" / "run" / "privacy_run.json").read_text())
    assert record["sharded_parameters"] == 15040 // 4
    assert record["model_class"] == "BertForSequenceClassification"
    plain = json.loads((pair / "plain" / "bert" / "run" / "privacy_run.json").read_text())
    assert plain["sharded_parameters"] == 0
    assert plain["total_parameters"] == record["total_parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_job_and_other_numbers_of_processes_resume_it(
    workers: WorkerPool, tmp_path: Path, victim: int
) -> None:
    ended = workers.run(2, [worker.__file__, tmp_path, "dying"], check=False, VICTIM_RANK=str(victim))
    assert ended.exit_codes[victim] == -signal.SIGKILL
    assert ended.exit_codes[1 - victim] == 1, "the other rank ends by an error of its own"
    run = tmp_path / "dying" / "run"
    released = len((run / "privacy_trace.jsonl").read_text().splitlines())
    charged = PrivacyLedger.read(run).charged
    assert released == 2
    assert charged == (3 if victim == 1 else 2), "the main process pays when another one ends"
    processes = 3 if victim == 1 else 2
    workers.run(processes, [worker.__file__, tmp_path, "resumed"])
    ranks = saw(tmp_path, "resumed")
    assert all(rank == ranks[0] for rank in ranks)
    assert (ranks[0]["step"], ranks[0]["charged"]) == (worker.STEPS - (charged - released), worker.STEPS)


@pytest.mark.usefixtures("no_report_page")
def test_one_process_resumes_a_sharded_run(pair: Path) -> None:
    run = pair / "sharded" / "bert"
    trainer = worker.make_trainer(run, **worker.BEST)
    with pytest.raises(RuntimeError, match="all 4 planned steps are charged"):
        trainer.train(resume_from_checkpoint=str(run / "run" / "checkpoint-2"))
    assert digest(trainer.model) != digest(MODELS["bert"]()), "the weights were loaded"


# --- as people type it -----------------------------------------------------------------------------------------------


def launched(*script: str | Path) -> str:
    options = ("--config_file", CONFIGS / "fsdp.yaml", "--num_processes", "2", "--main_process_port", "0")
    return launch([*ACCELERATE, *options, *script]).stdout


@pytest.mark.slow
def test_the_glue_example_launched_by_accelerate(tmp_path: Path) -> None:
    printed = launched(*glue_command(tmp_path))
    assert_glue_ran_on_two_processes(tmp_path / "output", printed)
    report = json.loads((tmp_path / "output" / "privacy_report.json").read_text())
    assert 0 < report["model"]["sharded_parameters"] < report["model"]["total_parameters"]
    assert "sharded over them" in (tmp_path / "output" / "privacy_report.html").read_text()
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(tmp_path / "output" / "model.safetensors")
    frozen = [name for name in before if "embeddings" in name or "layer.0" in name]
    assert frozen
    assert all(torch.equal(before[name], after[name]) for name in frozen), "also where one process alone read them"


@pytest.mark.slow
def test_the_language_model_script_launched_by_accelerate(tmp_path: Path) -> None:
    rows = [{"text": f"line {k} of a text"} for k in range(48)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "--model_name_or_path": save_tiny_llama(tmp_path / "llama"),
        "--train_file": tmp_path / "rows.jsonl",
        "--per_device_train_batch_size": 4,
        "--max_steps": 2,
        "--max_seq_length": 32,
        "--noise_multiplier": 1.0,
        "--output_dir": tmp_path / "output",
        "--report_to": "none",
    }
    arguments = [str(part) for pair in options.items() for part in pair]
    launched(EXAMPLES.parent / "language_modeling" / "run_sft.py", "--do_train", "--use_cpu", *arguments)
    record = json.loads((tmp_path / "output" / "privacy_run.json").read_text())
    assert (record["peft"], record["plan"]["world_size"]) == (True, 2)
    assert record["sharded_parameters"] > 0
    assert list((tmp_path / "output").glob("adapter_model.safetensors"))


# --- which parameters are gathered together --------------------------------------------------------------------------


def frozen(model: nn.Module, *trained: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    return model


def test_groups_of_frozen_parameters() -> None:
    model = frozen(MODELS["bert"](), "layer.1", "pooler", "classifier")
    groups = {group.name: set(group.parameters) for group in sharding_groups(model)}
    assert list(groups) == ["bert.encoder.layer.0", "bert.embeddings.word_embeddings", ""]
    assert groups[""] == {
        f"bert.embeddings.{name}"
        for name in (
            "position_embeddings.weight",
            "token_type_embeddings.weight",
            "LayerNorm.weight",
            "LayerNorm.bias",
        )
    }
    everything = {name for group in groups.values() for name in group}
    assert everything == {name for name, p in model.named_parameters() if not p.requires_grad}


def test_embeddings_and_heads_are_groups_of_their_own() -> None:
    names = [group.name.rpartition("model.")[2] for group in sharding_groups(MODELS["llama"]())]
    assert names == ["layers.0", "layers.1", "embed_tokens", "lm_head", ""]


def test_tied_embeddings_belong_to_the_whole_model() -> None:
    groups = {group.name: set(group.parameters) for group in sharding_groups(MODELS["tied qwen3"]())}
    assert not [name for name in groups if "embed" in name or "lm_head" in name]
    assert any("embed_tokens" in name for name in groups[""])


def test_what_blocks_share_with_others_stays_whole() -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.tied = nn.Linear(4, 4)
            self.tied.weight = self.blocks[0].weight
            self.scale = nn.Parameter(torch.ones(()))
            self.head = nn.Linear(4, 2)

    model = frozen(Sharing(), "head")
    names = {name for group in sharding_groups(model) for name in group.parameters}
    assert names == {"blocks.0.bias", "blocks.1.weight", "blocks.1.bias", "tied.bias"}
    with pytest.raises(ValueError, match="every parameter of this model is trained"):
        sharding_groups(nn.Linear(2, 2))
