"""Compares rows of `datasets.Dataset` objects, all at once: by where they lie in memory, and by what they hold.

*Where they lie*: `select`, `shuffle`, `train_test_split`, renamed and removed columns are views of the same Arrow
buffers, so that a row keeps its address in memory. *What they hold*: a key per row from the length and a few values of
each column, for all rows at once (a million in well under a second); rows whose keys agree are then compared in full.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from hf_dcsgd.data.grouping import positions_in_table

Rows = np.ndarray | None  # positions in a dataset; None for all of them

_ENDS, _BETWEEN = np.arange(5)[:, None], np.arange(1, 4)[:, None]
_COMPARED_ROWS = 64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.random.default_rng(0).integers(2**63, size=(13, 1), dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def shared_addresses(train: Any, train_rows: Rows, evaluation: Any, evaluation_rows: Rows) -> int:
    """Count the evaluation rows that lie in memory where training rows lie."""
    addresses = {column: _buffers(train.data.column(column)) for column in train.column_names}
    for column in evaluation.column_names:
        buffers = _buffers(evaluation.data.column(column))
        for other, known in addresses.items():
            if not buffers.isdisjoint(known):
                ours = _addresses(evaluation, column)[_positions(evaluation, evaluation_rows)]
                theirs = _addresses(train, other)[_positions(train, train_rows)]
                return int(np.isin(ours, theirs).sum())
    return 0


def shared_contents(train: Any, train_rows: Rows, evaluation: Any, evaluation_rows: Rows) -> tuple[int, int]:
    """Count the distinct evaluation rows whose columns are equal to those of a training row, and the distinct ones.

    The columns must be the same, or those of one dataset a part of the other's; else nothing is compared. The count is
    an estimate, from some of the rows whose keys agree.
    """
    common = [name for name in evaluation.column_names if name in train.column_names]
    if not common or len(common) < min(len(evaluation.column_names), len(train.column_names)):
        return 0, 0
    theirs, their_rows = _keys(train, common), _positions(train, train_rows)
    ours, our_rows = _keys(evaluation, common), _positions(evaluation, evaluation_rows)
    distinct = len(np.unique(ours[our_rows]))
    found, mine, others = np.intersect1d(ours[our_rows], theirs[their_rows], return_indices=True)
    if not len(found):
        return 0, distinct
    looked_at = np.linspace(0, len(found) - 1, min(len(found), _COMPARED_ROWS)).astype(int)
    pairs = zip(
        _contents(evaluation, common, our_rows[mine[looked_at]]),
        _contents(train, common, their_rows[others[looked_at]]),
        strict=True,
    )
    equal = sum(one == other for one, other in pairs) / len(looked_at)
    return int(equal * len(found)), distinct


def _positions(dataset: Any, rows: Rows) -> np.ndarray:
    """Return the positions in the Arrow table of rows of a dataset, which may be a view of it."""
    positions = positions_in_table(dataset)
    return positions if rows is None else positions[rows]


def _width(kind: pa.DataType) -> int | None:
    """Return the bytes per row in the first buffer of a column, of values or of offsets; None where there are none."""
    if types.is_string(kind) or types.is_binary(kind) or types.is_list(kind):
        return 4
    if types.is_large_string(kind) or types.is_large_binary(kind) or types.is_large_list(kind):
        return 8
    if types.is_integer(kind) or types.is_floating(kind) or types.is_temporal(kind):
        return kind.bit_width // 8
    return None


def _buffers(column: pa.ChunkedArray) -> set[int]:
    if _width(column.type) is None:
        return set()
    return {chunk.buffers()[1].address for chunk in column.chunks if len(chunk)}


def _addresses(dataset: Any, name: str) -> np.ndarray:
    column = dataset.data.column(name)
    width = _width(column.type)
    assert width is not None
    parts = [
        chunk.buffers()[1].address + width * np.arange(chunk.offset, chunk.offset + len(chunk))
        for chunk in column.chunks
        if len(chunk)
    ]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _keys(dataset: Any, columns: list[str]) -> np.ndarray:
    """Return a key for each row of the table, from its columns of numbers, texts and lists of numbers."""
    keys = np.zeros(dataset.data.num_rows, dtype=np.uint64)
    for name in columns:
        column = dataset.data.column(name)
        parts = [part for chunk in column.chunks if (part := _chunk_keys(chunk)) is not None]
        if parts and len(parts) == column.num_chunks:
            keys = _mixed(keys, np.concatenate(parts))
    return keys


def _chunk_keys(array: Any) -> np.ndarray | None:
    kind, width = array.type, _width(array.type)
    if types.is_boolean(kind) or types.is_temporal(kind):
        array = array.cast(pa.int8() if types.is_boolean(kind) else pa.int64() if width == 8 else pa.int32())
        kind = array.type
    if types.is_integer(kind) or types.is_floating(kind):
        return _bits(array.fill_null(0).to_numpy(zero_copy_only=False))
    if width is None:
        return None
    _, offset_buffer, *_ = array.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32 if width == 4 else np.int64)[array.offset :][: len(array) + 1]
    if types.is_list(kind) or types.is_large_list(kind):
        if not (types.is_integer(kind.value_type) or types.is_floating(kind.value_type)):
            return None
        values = array.values.to_numpy(zero_copy_only=False)
    else:
        data = array.buffers()[2]
        values = np.frombuffer(b"" if data is None else data, np.uint8)
    offsets = offsets.astype(np.int64)
    lengths = np.diff(offsets)
    keys = _bits(lengths)
    if not len(values):
        return keys
    last = np.maximum(lengths - 1, 0)
    # The first and the last values, as there may be padding on either side, and some in between.
    places = np.concatenate([np.minimum(_ENDS, last), np.maximum(last - _ENDS, 0), last * _BETWEEN // 4])
    found = _bits(values[np.minimum(offsets[:-1] + places, len(values) - 1)])
    return _mixed(keys, np.where(lengths > 0, (found * _FACTORS).sum(axis=0, dtype=np.uint64), np.uint64(0)))


def _bits(values: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
    return wide.view(np.uint64)


def _mixed(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    keys = (keys ^ values) * _GOLDEN
    return keys ^ (keys >> np.uint64(29))


def _contents(dataset: Any, columns: list[str], positions: np.ndarray) -> list[dict[str, Any]]:
    return dataset.data.table.select(columns).take(positions).to_pylist()
