"""Fill a trunk cache, and hand out its rows.

The folder of a cache is named by what its numbers depend on: the rows of the dataset, what the collator makes of them,
the frozen weights, the cut, the precision, the format, and the version of transformers. So a changed row, tokenizer,
length or weight finds no cache, and makes another one.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from huggingface_hub.constants import HF_HOME
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_dcsgd.data.rows import Batch, Collator, RowCollator, batch_length, fetch_row, move_to, stack, take_row
from hf_dcsgd.tasks.losses import split_labels
from hf_dcsgd.trunk.cut import TRUNK_ENTRY, FrozenTrunk, TrunkCacheError
from hf_dcsgd.trunk.store import FORMAT, META_FILENAME, RowStore, Schema

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CHUNK = 512  # rows that are sorted by shape, computed and appended together
_SAMPLE = 32  # rows by which the size is estimated and the collator tried
_ROW_ENTRY = "row_index"


def default_cache_dir() -> Path:
    """Return where caches are kept unless the user says otherwise: beside the Hub's, never in an output directory."""
    return Path(HF_HOME) / "hf_dcsgd" / "trunk_cache"


class TrunkCache:
    """The rows of a dataset, collated and run through the frozen trunk of a model, on disk.

    Args:
        trunk: The frozen part of the model.
        rows: The dataset; its rows are fetched one at a time.
        collate: Collates one row.
        inputs_of: Takes the labels out of a batch, and moves it to the model's device.
        cache_dir: The folder of all caches.
        dtype: The precision in which hidden states are kept: fp32, bf16 or fp16.
        largest: How many rows are run at once.
    """

    def __init__(
        self,
        trunk: FrozenTrunk,
        rows: Any,
        collate: RowCollator,
        inputs_of: Callable[[Batch], Batch],
        *,
        cache_dir: str | Path | None = None,
        dtype: str = "fp32",
        largest: int = 64,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"expected trunk_cache_dtype to be one of {', '.join(DTYPES)}, got {dtype!r}")
        self.trunk, self._rows, self._collate, self.inputs_of = trunk, rows, collate, inputs_of
        self._dtype, self._largest = DTYPES[dtype], largest
        sample = self._sample()
        _require_deterministic(rows, collate, sample)
        first = self._with_hidden_states([(0, sample[0])])[0]
        key = _key(trunk, rows, sample.values(), dtype)
        self.folder = Path(cache_dir or default_cache_dir()) / key
        self._bytes_per_row = self._estimate(sample, first)
        model = trunk.model
        description = {"model": type(model).__name__, "trunk": str(trunk), "dtype": dtype, "key": key}
        self.store = RowStore.open(self.folder, Schema.of(first), len(rows), description)

    def _sample(self) -> dict[int, Batch]:
        count = min(_SAMPLE, len(self._rows))
        indices = sorted({len(self._rows) * k // count for k in range(count)})
        return {index: self._collate.alone(fetch_row(self._rows, index)) for index in indices}

    def _estimate(self, sample: Mapping[int, Batch], first: Mapping[str, Tensor]) -> float:
        """Estimate the bytes of a row: its entries, and hidden states that grow as its largest entry does."""

        def entries(row: Batch) -> int:
            return sum(value.nbytes for value in row.values() if isinstance(value, Tensor))

        share = first[TRUNK_ENTRY].nbytes / max(1, entries(sample[0]))
        return sum(entries(row) * (1 + share) for row in sample.values()) / len(sample)

    def fill(self, indices: Iterable[int], shard: str = "0", *, show_progress: bool = True) -> None:
        """Compute the rows that are missing; interrupted, it goes on where it stopped."""
        wanted = list(indices)
        if not self.store.missing(wanted):
            return
        with self.store.appending(shard) as files:
            missing = self.store.missing(wanted)
            self._require_space(len(missing))
            bar = tqdm(total=len(wanted), initial=len(wanted) - len(missing), desc="Filling the trunk cache",
                       unit="row", disable=not show_progress)  # fmt: skip
            with bar:
                for start in range(0, len(missing), _CHUNK):
                    chunk = missing[start : start + _CHUNK]
                    collated = [(index, self._collate.alone(fetch_row(self._rows, index))) for index in chunk]
                    files.append(dict(sorted(self._computed(collated))))
                    bar.update(len(chunk))

    @property
    def size(self) -> str:
        """Say how large it is, or will be."""
        return f"{len(self._rows):,} rows, about {len(self._rows) * self._bytes_per_row / 1e9:.2f} GB"

    def _require_space(self, rows: int) -> None:
        needed, free = rows * self._bytes_per_row, shutil.disk_usage(self.folder).free
        if needed > 0.95 * free:
            raise TrunkCacheError(
                f"{rows:,} rows need about {needed / 1e9:.1f} GB at {self.folder}, where {free / 1e9:.1f} GB are "
                "free; set trunk_cache_dir to a larger disk, or trunk_cache_dtype to bf16"
            )

    def _computed(self, collated: list[tuple[int, Batch]]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Run rows of one shape together."""
        numbered = [{**row, _ROW_ENTRY: torch.tensor([index])} for index, row in collated]
        for batch in stack(numbered, self._largest):
            indices = batch.pop(_ROW_ENTRY).tolist()
            rows = [(index, take_row(batch, k)) for k, index in enumerate(indices)]
            yield from zip(indices, self._with_hidden_states(rows), strict=True)

    def _with_hidden_states(self, rows: list[tuple[int, Batch]]) -> list[dict[str, Tensor]]:
        (batch,) = stack([row for _, row in rows])
        hidden = self.trunk.capture(self.inputs_of(batch))
        if hidden.dim() < 2 or len(hidden) != batch_length(batch):
            raise TrunkCacheError(f"hidden states of shape {tuple(hidden.shape)} do not have one entry per row")
        others = [name for name, value in batch.items() if not isinstance(value, Tensor)]
        if others:
            raise TrunkCacheError(f"the collator gives {others[0]!r}, which is no tensor")
        return [{**row, TRUNK_ENTRY: hidden[k : k + 1].to(self._dtype)} for k, (_, row) in enumerate(rows)]


def open_cache(
    model: nn.Module,
    rows: Any,
    collate: Collator,
    *,
    label_names: Sequence[str] | None,
    device: torch.device,
    **options: Any,
) -> TrunkCache:
    """Open the cache of a model's frozen trunk for these rows, empty or not; `options` are those of `TrunkCache`."""

    def inputs_of(batch: Batch) -> Batch:
        return move_to(split_labels(model, batch, label_names)[0], device)

    return TrunkCache(FrozenTrunk(model), rows, RowCollator(collate), inputs_of, **options)


def _require_deterministic(rows: Any, collate: RowCollator, sample: Mapping[int, Batch]) -> None:
    for index, before in sample.items():
        again = collate.alone(fetch_row(rows, index))
        if any(not torch.equal(value, again[name]) for name, value in before.items() if isinstance(value, Tensor)):
            raise TrunkCacheError("the dataset or the collator gives a row another form each time (augmentation)")


def _key(trunk: FrozenTrunk, rows: Any, sample: Iterable[Batch], dtype: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    versions = [importlib.metadata.version(package) for package in ("transformers", "torch")]
    config: Any = getattr(trunk.model, "config", None)
    settings = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else ""
    device = next(trunk.model.parameters()).device.type
    autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
    public = [FORMAT, str(trunk), type(trunk.model).__qualname__, dtype, autocast, *versions, _without_names(settings)]
    digest.update(json.dumps(public).encode())
    for name, tensor in trunk.parameters():
        digest.update(name.encode())
        digest.update(buffer_of(tensor))
    for row in sample:
        for name, value in sorted(row.items()):
            digest.update(name.encode())
            digest.update(buffer_of(value) if isinstance(value, Tensor) else repr(value).encode())
    for piece in _content(rows):
        digest.update(piece)
    return digest.hexdigest()


def _without_names(config_json: str) -> str:
    """Drop where a model was loaded from, which changes nothing."""
    values = json.loads(config_json) if config_json else {}
    return json.dumps({name: value for name, value in values.items() if not name.startswith("_")}, sort_keys=True)


def _content(rows: Any) -> Iterator[bytes | memoryview]:
    """Yield the bytes of all rows: Arrow's where they can be had at once, those of each row otherwise."""
    if hasattr(rows, "with_format") and getattr(rows, "format", {}).get("type") != "custom":
        for table in rows.with_format("arrow").iter(batch_size=10_000):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema.remove_metadata()) as stream:
                stream.write_table(table.replace_schema_metadata(None))
            yield memoryview(sink.getvalue())
        return
    for index in range(len(rows)):
        row = fetch_row(rows, index)
        for name, value in sorted(row.items()) if isinstance(row, Mapping) else enumerate(row):
            yield str(name).encode()
            yield buffer_of(value) if isinstance(value, Tensor) else repr(value).encode()


def buffer_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor."""
    value = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(value.view(torch.uint8).numpy())  # type: ignore[arg-type]


def stored_caches(cache_dir: str | Path | None = None) -> list[dict[str, Any]]:
    """Describe the caches in a folder: path, model, rows and size."""
    found = []
    for meta in sorted(Path(cache_dir or default_cache_dir()).glob(f"*/{META_FILENAME}")):
        content = json.loads(meta.read_text(encoding="utf-8"))
        size = sum(path.stat().st_size for path in meta.parent.rglob("*"))
        found.append({"path": str(meta.parent), "bytes": size, "modified": meta.parent.stat().st_mtime, **content})
    return found
