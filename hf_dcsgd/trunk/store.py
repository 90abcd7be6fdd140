"""Collated rows and their hidden states on disk: appended once, then memory-mapped by any number of runs.

A store is one folder. Each process appends to a shard of its own: `rows-*.bin` holds the numbers of one row after the
other, `rows-*.idx` one record per row (row, place, size, checksum, shapes), written after the numbers have reached the
disk. So a store that was cut off by a crash goes on where it stopped, and a record vouches for its row.

| case                                    | behavior                                                                  |
|-----------------------------------------|---------------------------------------------------------------------------|
| killed while it is written              | what has a record is kept, the rest is computed again                     |
| a file that is shorter than its records | those records are dropped and computed again                              |
| a changed byte                          | `TrunkCacheError` when that row is read                                   |
| another process writes the same shard   | waits until it is done                                                    |
| permissions                             | the owner's alone, whatever the umask is: the rows are private data       |
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from hf_dcsgd.data.rows import StackedRows
from hf_dcsgd.trunk.cut import TrunkCacheError

META_FILENAME = "store.json"
FORMAT = 2  # of records; what was written in another one is not looked for
_FIXED = 4  # row, offset, bytes, checksum


class Schema:
    """Names, types and numbers of axes of a row's entries, the same for all rows of a store."""

    def __init__(self, entries: Mapping[str, tuple[str, int]]) -> None:
        self.entries = {name: (dtype, int(axes)) for name, (dtype, axes) in entries.items()}

    @classmethod
    def of(cls, row: Mapping[str, Tensor]) -> Schema:
        return cls({name: (str(value.dtype).removeprefix("torch."), value.dim()) for name, value in row.items()})

    @property
    def record_length(self) -> int:
        return _FIXED + sum(axes for _, axes in self.entries.values())

    def pack(self, index: int, offset: int, row: Mapping[str, Tensor]) -> tuple[bytes, list[int]]:
        """Turn a row into its bytes and its record."""
        if Schema.of(row).entries != self.entries:
            raise TrunkCacheError(f"expected rows with the entries {self.entries}, got {Schema.of(row).entries}")
        data = b"".join(_bytes_of(row[name]) for name in self.entries)
        shapes = [size for name in self.entries for size in row[name].shape]
        return data, [index, offset, len(data), _checksum(data), *shapes]

    def unpack(self, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Tensor]:
        """Turn rows of one shape, each with its bytes and its record, back into a stack: every byte is copied once."""
        for data, record in rows:
            if _checksum(data) != record[3]:
                raise TrunkCacheError(
                    f"row {record[0]} of the trunk cache was changed on disk; remove it with `hf-dcsgd cache rm`"
                )
        stack, start, sizes = {}, 0, iter(rows[0][1][_FIXED:].tolist())
        for name, (dtype, axes) in self.entries.items():
            first, *others = [next(sizes) for _ in range(axes)]
            kind = getattr(torch, dtype)
            end = start + first * math.prod(others) * kind.itemsize
            joined = np.empty((len(rows), end - start), dtype=np.uint8)
            for k, (data, _) in enumerate(rows):
                joined[k] = data[start:end]
            stack[name] = torch.from_numpy(joined).view(-1).view(kind).view(len(rows) * first, *others)
            start = end
        return stack


def _checksum(data: bytes | np.ndarray) -> int:
    """Return 63 bits that a changed byte changes: a quarter of the time of a CRC, for each row of each step."""
    return xxh3_64_intdigest(data) >> 1  # type: ignore[arg-type]


def _bytes_of(value: Tensor) -> bytes:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class RowStore(StackedRows):
    """A folder with the rows of one dataset, by index. Make it with `RowStore.open`."""

    def __init__(self, folder: Path, schema: Schema, rows: int) -> None:
        self.folder = folder
        self.schema = schema
        self.rows = rows
        self._refresh()

    @classmethod
    def open(cls, folder: Path, schema: Schema, rows: int, description: Mapping[str, Any]) -> RowStore:
        """Open the store in a folder, or start one there."""
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
        path = folder / META_FILENAME
        if not path.exists():
            with private_file(path.with_suffix(".partial"), os.O_WRONLY | os.O_TRUNC) as file:
                content = {"entries": schema.entries, "rows": rows, **description}
                os.write(file, json.dumps(content, indent=2).encode())
            path.with_suffix(".partial").replace(path)
        return cls(folder, schema, rows)

    def _refresh(self) -> None:
        """Read the records of all shards."""
        self._shards: list[np.ndarray] = []
        self._place = np.full((self.rows, 2), -1, dtype=np.int64)
        for path in sorted(self.folder.glob("rows-*.idx")):
            records = self._whole_records(path)
            if len(records):
                self._place[records[:, 0], 0] = len(self._shards)
                self._place[records[:, 0], 1] = np.arange(len(records))
                self._shards.append(records)
        self._data = [
            np.asarray(np.memmap(path.with_suffix(".bin"), dtype=np.uint8, mode="r"))  # slices of a memmap are slow
            for path in sorted(self.folder.glob("rows-*.idx"))
            if len(self._whole_records(path))
        ]

    def _whole_records(self, path: Path) -> np.ndarray:
        """Return those records of a shard whose numbers are all there."""
        width = self.schema.record_length
        flat = np.fromfile(path, dtype=np.int64)
        records = flat[: len(flat) // width * width].reshape(-1, width)
        data = path.with_suffix(".bin")
        size = data.stat().st_size if data.exists() else 0
        short = np.flatnonzero(records[:, 1] + records[:, 2] > size)
        return records[: short[0]] if len(short) else records

    def missing(self, indices: Iterable[int]) -> list[int]:
        """Return those rows that are not in the store yet."""
        return [index for index in indices if self._place[index, 0] < 0]

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        (row,) = self.stacks([index])
        return row

    def stacks(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return these rows, those of one shape together."""
        groups: dict[bytes, list[tuple[np.ndarray, np.ndarray]]] = {}
        for index in indices:
            shard, place = self._place[index]
            if shard < 0:
                raise TrunkCacheError(f"row {index} is not in the trunk cache at {self.folder}")
            record = self._shards[shard][place]
            row = self._data[shard][record[1] : record[1] + record[2]], record
            groups.setdefault(record[_FIXED:].tobytes(), []).append(row)
        return [self.schema.unpack(rows) for rows in groups.values()]

    @contextmanager
    def appending(self, shard: str) -> Iterator[_Shard]:
        """Append rows to a shard, which no other process may write meanwhile; they can be read afterwards."""
        name = self.folder / f"rows-{shard}"
        flags = os.O_RDWR
        with (
            private_file(name.with_suffix(".idx"), flags) as index,
            private_file(name.with_suffix(".bin"), flags) as data,
        ):
            fcntl.flock(index, fcntl.LOCK_EX)
            records = self._whole_records(name.with_suffix(".idx"))
            end = int(records[-1, 1] + records[-1, 2]) if len(records) else 0
            os.ftruncate(index, records.nbytes)
            os.ftruncate(data, end)
            self._refresh()
            yield _Shard(self.schema, index, data, end)
        self._refresh()


class _Shard:
    """Appends rows to one shard: first the numbers, then the records that vouch for them."""

    def __init__(self, schema: Schema, index: int, data: int, end: int) -> None:
        self._rows_schema, self._index, self._data, self._end = schema, index, data, end
        os.lseek(index, 0, os.SEEK_END)
        os.lseek(data, end, os.SEEK_SET)

    def append(self, rows: Mapping[int, Mapping[str, Tensor]]) -> None:
        records, place = [], self._end
        for index, row in rows.items():
            packed, record = self._rows_schema.pack(index, place, row)
            _write_all(self._data, packed)
            records.append(record)
            place += len(packed)
        os.fdatasync(self._data)
        _write_all(self._index, np.asarray(records, dtype=np.int64).tobytes())
        os.fdatasync(self._index)
        self._end = place


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


@contextmanager
def private_file(path: Path, flags: int) -> Iterator[int]:
    """Open or make a file that only its owner may read, whatever the umask is."""
    file = os.open(path, flags | os.O_CREAT, 0o600)
    try:
        os.fchmod(file, 0o600)
        yield file
    finally:
        os.close(file)
