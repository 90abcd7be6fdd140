"""The frozen trunk, computed once per row and fed in again: the same run, whatever happens to the files."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES, ENCODER
from datasets import Dataset
from tiny_tasks import pad, private_args, text_rows, tiny_bert
from torch import Tensor, nn
from worker_pool import WorkerPool

from hf_dcsgd import DCSGDTrainer
from hf_dcsgd.cli import main
from hf_dcsgd.data.rows import RowCollator, stack
from hf_dcsgd.step import PrivateStep
from hf_dcsgd.tasks.layer_selection import default_layers, select_trainable_layers, train_mode
from hf_dcsgd.tasks.losses import split_labels
from hf_dcsgd.trunk.build import TrunkCache, stored_caches
from hf_dcsgd.trunk.check import require_same_results
from hf_dcsgd.trunk.cut import TRUNK_ENTRY, FrozenTrunk, TrunkCacheError
from hf_dcsgd.trunk.store import RowStore

pytestmark = pytest.mark.usefixtures("no_report_page", "quick_statements")

CUT = (
    *("bert", "bert_masked_lm", "bert_token", "bert_qa", "roberta", "distilbert", "electra", "deberta_v2", "mpnet"),
    *("modernbert", "gpt2", "gpt2_lm_tied", "llama", "llama_classifier", "qwen3", "gemma", "opt", "gpt_neox", "vit"),
)
NOT_CUT = {
    "albert": "first block .* is trained",
    "t5": "encoder-decoder",
    "bart": "encoder-decoder",
    "lora_bert": "first block .* is trained",
    "lstm": "no list of blocks",
}


def prepared(name: str, layers: str | None = None) -> tuple[nn.Module, dict[str, Any]]:
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    select_trainable_layers(model, layers or default_layers(model))
    train_mode(model)
    inputs, labels = architecture.batch(model, n=3)
    return model, {**inputs, **(labels if isinstance(labels, dict) else {"labels": labels})}


@pytest.mark.parametrize("name", CUT)
def test_a_model_goes_on_from_its_hidden_states(name: str) -> None:
    model, batch = prepared(name)
    trunk = FrozenTrunk(model)
    calls: list[Any] = []
    hidden_states = trunk.capture(split_labels(model, batch)[0])
    step = PrivateStep(model, trunk=trunk)
    for block in trunk.blocks:
        block.register_forward_hook(lambda *args: calls.append(args))
    model.eval()
    whole = step.losses(batch)
    assert calls
    fed = step.losses({**batch, TRUNK_ENTRY: hidden_states})
    assert torch.allclose(whole, fed, rtol=1e-5, atol=1e-6)
    require_same_results(step, [{**batch, TRUNK_ENTRY: hidden_states}])


FRONTS = {"bert": "bert.embeddings", "gpt2": "transformer.drop", "llama": "model.embed_tokens", "opt": None}


@pytest.mark.parametrize("name", FRONTS)
def test_what_leads_to_the_frozen_blocks_is_passed_over_as_well(name: str) -> None:
    model, batch = prepared(name)
    trunk, model = FrozenTrunk(model), model.eval()
    hidden_states = trunk.capture(split_labels(model, batch)[0])
    names = {module: path for path, module in model.named_modules()}
    assert (names[trunk._front] if trunk._front is not None else None) == FRONTS[name]
    lookups: list[Any] = []
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda *args: lookups.append(args))
    step = PrivateStep(model, trunk=trunk)
    step.losses({**batch, TRUNK_ENTRY: hidden_states})
    if name == "bert":
        assert not lookups
    lookups.clear()
    step.losses(batch)
    assert lookups
    assert not any("forward" in vars(module) for module in model.modules())


def test_embeddings_of_another_size_than_the_blocks_are_computed() -> None:
    """ELECTRA projects its embeddings: the first block is given what no look-up returned."""
    config = hf.ElectraConfig(**{**ENCODER, "embedding_size": 8})
    model = hf.ElectraForSequenceClassification(config).eval()
    select_trainable_layers(model, default_layers(model))
    trunk = FrozenTrunk(model)
    trunk.capture({"input_ids": torch.randint(1, 50, (2, 6))})
    assert trunk._front is model.electra.embeddings_project


def test_all_blocks_are_passed_over_when_the_head_alone_is_trained() -> None:
    model, batch = prepared("bert", "head")
    trunk = FrozenTrunk(model)
    assert len(trunk.blocks) == len(model.bert.encoder.layer)
    hidden_states = trunk.capture(split_labels(model, batch)[0])
    require_same_results(PrivateStep(model, trunk=trunk), [{**batch, TRUNK_ENTRY: hidden_states}])


@pytest.mark.parametrize("name", NOT_CUT)
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(name: str) -> None:
    model, _ = prepared(name)
    with pytest.raises(TrunkCacheError, match=NOT_CUT[name]):
        FrozenTrunk(model)


def test_trained_embeddings_in_front_of_frozen_blocks_are_refused() -> None:
    model, batch = prepared("bert", "bert.embeddings,classifier")
    with pytest.raises(TrunkCacheError, match=r"embeddings.* is trained and comes before"):
        FrozenTrunk(model).capture(split_labels(model, batch)[0])


def test_hidden_states_that_are_not_all_of_it_are_found() -> None:
    """A head that looks at the embeddings' output, too."""
    model, batch = prepared("bert", "head")
    trunk = FrozenTrunk(model)
    hidden_states = trunk.capture(split_labels(model, batch)[0])
    step = PrivateStep(model, trunk=trunk)
    with pytest.raises(TrunkCacheError, match="differ with and without the cache"):
        require_same_results(step, [{**batch, TRUNK_ENTRY: hidden_states + 0.5}])


# --- runs ------------------------------------------------------------------------------------------------------------


def trainer(folder: Path, cache_dir: Path, model: nn.Module | None = None, **options: Any) -> DCSGDTrainer:
    args = private_args(
        folder,
        **{"max_steps": 4, "trunk_cache_dir": str(cache_dir), "unsafe_noise_seed": 7, "trunk_cache": "on", **options},
    )
    rows = options.get("rows") or text_rows()
    return DCSGDTrainer(model or tiny_bert(), args, pad, Dataset.from_list(rows))


def trained_weights(run: DCSGDTrainer) -> Tensor:
    run.train()
    return torch.cat([p.detach().flatten() for p in run.model.parameters() if p.requires_grad])


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        ("fp32", 1e-5),
        pytest.param("fp16", 2e-3, marks=pytest.mark.slow),
        pytest.param("bf16", 2e-2, marks=pytest.mark.slow),
    ],
)
def test_cached_and_uncached_runs_agree_to_the_storage_precision(tmp_path: Path, dtype: str, tolerance: float) -> None:
    start = torch.cat(
        [p.detach().flatten() for p in trainer(tmp_path / "0", tmp_path).model.parameters() if p.requires_grad]
    )
    without = trained_weights(trainer(tmp_path / "1", tmp_path / "cache", trunk_cache="off"))
    cached = trained_weights(trainer(tmp_path / "2", tmp_path / "cache", trunk_cache_dtype=dtype))
    assert (without - cached).norm() <= tolerance * (without - start).norm()
    assert (without - start).norm() > 0


def test_runs_and_strategies_share_a_cache_and_the_trunk_runs_once(tmp_path: Path) -> None:
    model = tiny_bert()
    calls: list[int] = []
    model.bert.encoder.layer[0].attention.output.register_forward_hook(
        lambda module, args, output: calls.append(len(args[0]))
    )
    trainer(tmp_path / "1", tmp_path / "cache", model, clipping="dc_sgd_p").train()
    (cache,) = stored_caches(tmp_path / "cache")
    assert (cache["rows"], cache["model"]) == (64, "BertForSequenceClassification")
    again = tiny_bert()
    second: list[int] = []
    again.bert.encoder.layer[0].attention.output.register_forward_hook(
        lambda module, args, output: second.append(len(args[0]))
    )
    trainer(tmp_path / "2", tmp_path / "cache", again, clipping="fixed").train()
    assert sum(calls) - sum(second) == 64  # the rest is what is looked at before training
    assert len(stored_caches(tmp_path / "cache")) == 1


def test_anything_the_numbers_depend_on_makes_another_cache(tmp_path: Path) -> None:
    def key(rows: list[dict[str, Any]], model: nn.Module, dtype: str = "fp32", longest: int = 64) -> str:
        select_trainable_layers(model, default_layers(model))

        def collate(batch: list[Any]) -> Any:
            return pad([{**row, "input_ids": row["input_ids"][:longest]} for row in batch])

        trunk = FrozenTrunk(model)
        cache = TrunkCache(
            trunk, Dataset.from_list(rows), RowCollator(collate), lambda b: split_labels(model, b)[0],
            cache_dir=tmp_path, dtype=dtype,
        )  # fmt: skip
        return cache.folder.name

    rows = text_rows()
    changed = [*rows[:40], {**rows[40], "input_ids": [*rows[40]["input_ids"][:-1], 6]}, *rows[41:]]
    other = tiny_bert()
    with torch.no_grad():
        other.bert.encoder.layer[0].output.dense.weight[0, 0] += 1e-3
    head = tiny_bert()
    with torch.no_grad():
        head.classifier.weight.add_(1.0)  # trained: no part of the trunk
    same = key(rows, tiny_bert())
    assert same == key(text_rows(), head)
    others = {
        key(changed, tiny_bert()),
        key(rows, other),
        key(rows, tiny_bert(), dtype="bf16"),
        key(rows, tiny_bert(), longest=5),
        key(rows, tiny_bert(layer_norm_eps=1e-3)),
    }
    assert len(others | {same}) == 6


def test_auto_goes_on_without_a_cache_and_on_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TrunkCacheError, match="first block") as caught:
        trainer(tmp_path / "1", tmp_path / "cache", trainable_layers="all").train()
    assert 'trunk_cache="auto"' in "".join(caught.value.__notes__)
    run = trainer(tmp_path / "2", tmp_path / "cache", trainable_layers="all", trunk_cache="auto")
    run.train()
    assert run.state.global_step == 4
    assert "without a trunk cache" in caplog.text
    assert not stored_caches(tmp_path / "cache")


def test_a_collator_that_augments_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path / "1", tmp_path / "cache")
    run.data_collator = lambda rows: {**pad(rows), "input_ids": torch.randint(5, 25, (1, 8))}
    with pytest.raises(TrunkCacheError, match="another form each time"):
        run.train()


# --- files -----------------------------------------------------------------------------------------------------------


def small_cache(folder: Path, rows: list[dict[str, Any]] | None = None) -> TrunkCache:
    model = tiny_bert()
    select_trainable_layers(model, default_layers(model))
    return TrunkCache(
        FrozenTrunk(model),
        Dataset.from_list(rows or text_rows()),
        RowCollator(pad),
        lambda batch: split_labels(model, batch)[0],
        cache_dir=folder,
    )


def fill(cache: TrunkCache, rows: range | None = None) -> None:
    cache.fill(range(64) if rows is None else rows, show_progress=False)


def test_rows_come_back_as_they_went_in(tmp_path: Path) -> None:
    cache = small_cache(tmp_path)
    fill(cache)
    rows = text_rows()
    for index in (0, 31, 63):
        stored = cache.store[index]
        for name, value in pad([rows[index]]).items():
            assert torch.equal(stored[name], value)
    assert {len(batch["labels"]) for batch in stack([cache.store[i] for i in range(64)])} != {1}


def test_stacks_are_those_of_rows_read_one_by_one(tmp_path: Path) -> None:
    cache = small_cache(tmp_path)
    fill(cache)
    drawn = [63, 5, 0, 31, 30, 12, 7]
    stacks, expected = cache.store.stacks(drawn), stack([cache.store[index] for index in drawn])
    assert 1 < len(stacks) == len(expected)
    for found, one_by_one in zip(stacks, expected, strict=True):
        assert found.keys() == one_by_one.keys()
        assert all(torch.equal(value, one_by_one[name]) for name, value in found.items())
    assert cache.store.stacks([]) == []


def test_a_file_that_was_cut_short_is_completed(tmp_path: Path) -> None:
    cache = small_cache(tmp_path)
    fill(cache)
    before = [cache.store[index] for index in range(64)]
    (data,) = cache.folder.glob("rows-*.bin")
    with data.open("r+b") as file:
        file.truncate(data.stat().st_size // 2)
    again = small_cache(tmp_path)
    missing = again.store.missing(range(64))
    assert 20 < len(missing) < 44
    fill(again)
    for index, row in enumerate(before):
        assert all(torch.allclose(value, again.store[index][name], atol=1e-6) for name, value in row.items())


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    cache = small_cache(tmp_path)
    fill(cache)
    (data,) = cache.folder.glob("rows-*.bin")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    store = small_cache(tmp_path).store
    with pytest.raises(TrunkCacheError, match="was changed on disk"):
        [store[index] for index in range(64)]


def test_only_the_owner_may_read_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache = small_cache(tmp_path / "caches")
        fill(cache)
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in cache.folder.iterdir()} == {0o600}


def test_a_disk_without_space_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = small_cache(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: os.terminal_size((0, 0)) and type("U", (), {"free": 1000}))
    with pytest.raises(TrunkCacheError, match=r"rows need about .* GB are free"):
        fill(cache)
    assert len(cache.store.missing(range(64))) == 64


KILLED = """
import os, signal
from pathlib import Path
from test_trunk_cache import small_cache
from hf_dcsgd.trunk import build, store

build._CHUNK = 8
appended = 0
write_all = store._write_all

def dying(file, data):
    global appended
    appended += 1
    if appended == 30:  # in the middle of a chunk
        os.write(file, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    write_all(file, data)

store._write_all = dying
small_cache(Path({folder!r})).fill(range(64), show_progress=False)
"""


def test_a_process_killed_while_it_fills_the_cache_loses_no_finished_row(tmp_path: Path, workers: WorkerPool) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(folder=str(tmp_path)))
    ended = workers.run(1, [script], check=False)
    assert ended.exit_codes == [-signal.SIGKILL], ended.output[-2000:]
    cache = small_cache(tmp_path)
    missing = cache.store.missing(range(64))
    assert 0 < len(missing) < 64
    fill(cache)
    whole = small_cache(tmp_path / "whole")
    fill(whole)
    for index in range(64):
        expected = whole.store[index]
        assert all(torch.allclose(v, cache.store[index][n], atol=1e-6) for n, v in expected.items())


FILLING = """
from pathlib import Path
from test_trunk_cache import small_cache
from hf_dcsgd.trunk import build

build._CHUNK = 4
cache = small_cache(Path({folder!r}))
cache.fill(range(64), show_progress=False)
assert not cache.store.missing(range(64))
"""


def test_two_processes_that_fill_one_cache_wait_for_each_other(tmp_path: Path, workers: WorkerPool) -> None:
    script = tmp_path / "filling.py"
    script.write_text(FILLING.format(folder=str(tmp_path)))
    workers.run(2, [script])
    cache = small_cache(tmp_path)
    (index,) = cache.folder.glob("rows-*.idx")
    records = index.stat().st_size // (8 * cache.store.schema.record_length)
    assert records == 64  # every row once
    assert torch.equal(cache.store[5]["input_ids"], pad([text_rows()[5]])["input_ids"])


def test_two_shards_make_one_cache(tmp_path: Path) -> None:
    cache = small_cache(tmp_path)
    cache.fill(range(0, 64, 2), shard="0-of-2", show_progress=False)
    cache.fill(range(1, 64, 2), shard="1-of-2", show_progress=False)
    assert not small_cache(tmp_path).store.missing(range(64))
    assert len(list(cache.folder.glob("rows-*.bin"))) == 2


def test_a_store_refuses_rows_that_it_does_not_hold(tmp_path: Path) -> None:
    cache = small_cache(tmp_path)
    fill(cache, range(10))
    assert isinstance(cache.store, RowStore)
    with pytest.raises(TrunkCacheError, match="row 11 is not in the trunk cache"):
        cache.store[11]


def test_the_command_lists_and_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = small_cache(tmp_path)
    fill(cache)
    assert main(["cache", "ls", "--cache-dir", str(tmp_path)]) == 0
    assert cache.folder.name in capsys.readouterr().out
    assert main(["cache", "rm", "--cache-dir", str(tmp_path)]) == 2
    assert main(["cache", "rm", cache.folder.name[:6], "--cache-dir", str(tmp_path)]) == 0
    assert not cache.folder.exists()
