"""Which rows of a dataset are one unit of privacy, by the values of a column.

The values are compared with each other and forgotten; what is kept, and public, is how many different ones there are.

| column                                            | behavior                                                   |
|---------------------------------------------------|------------------------------------------------------------|
| missing, in the dataset or in a row               | `ValueError` with the columns that there are               |
| a value that is null or NaN                       | `ValueError`: whose row is it?                             |
| values that cannot be compared (lists, structs)   | `TypeError`                                                |
| of an Arrow dataset                               | encoded by Arrow, some rows at a time: little memory       |
| of any other dataset                              | read row by row                                            |
| more than a second                                | a progress bar                                             |
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch import Tensor
from torch.utils.data import Subset
from tqdm.auto import tqdm

from hf_dcsgd.data.rows import fetch_row
from hf_dcsgd.privacy.sampling import map_style_length
from hf_dcsgd.privacy.units import RowsOfUnits

_ROWS_AT_ONCE = 100_000


def group_rows(dataset: Any, column: str, *, show_progress: bool = True) -> RowsOfUnits:
    """Find out which rows have the same value in a column: each value is one unit of privacy."""
    map_style_length(dataset)
    if all(hasattr(dataset, name) for name in ("data", "column_names", "_indices")):
        return RowsOfUnits(_codes_by_arrow(dataset, column, show_progress))
    return RowsOfUnits(_codes_row_by_row(dataset, column, show_progress))


def without_column(rows: Any, column: str) -> Any:
    """Return the same rows without a column, which is to reach no collator and no model."""
    if hasattr(rows, "column_names") and hasattr(rows, "remove_columns"):
        return rows.remove_columns([column])
    return _WithoutColumn(rows, column)


class _WithoutColumn:
    def __init__(self, rows: Any, column: str) -> None:
        self._rows, self._column = rows, column

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: value for name, value in fetch_row(self._rows, index).items() if name != self._column}


def select_rows(rows: Any, indices: np.ndarray) -> Any:
    """Return some rows as a dataset."""
    return rows.select(indices) if hasattr(rows, "select") else Subset(rows, indices.tolist())


def positions_in_table(dataset: Any) -> np.ndarray:
    """Return where the rows of a `datasets.Dataset`, which may be a view, are in its Arrow table."""
    indices = dataset._indices
    return np.arange(len(dataset)) if indices is None else indices.column(0).to_numpy().astype(np.int64)


def _codes_by_arrow(dataset: Any, column: str, show_progress: bool) -> np.ndarray:
    """Encode the whole table: gathering the rows of a view takes longer. Rows that are not in it may lack a value."""
    _require_column(column, dataset.column_names)
    values = dataset.data.column(column)
    encoded, missing = [], []
    for start in _progress(range(0, len(values), _ROWS_AT_ONCE), column, show_progress):
        part = values.slice(start, _ROWS_AT_ONCE).combine_chunks()
        missing.append(pc.is_null(part, nan_is_null=pa.types.is_floating(part.type)).to_numpy(zero_copy_only=False))
        encoded.append(_encoded(part, column))
    unified = pa.chunked_array(encoded).unify_dictionaries()
    codes = np.concatenate([chunk.indices.fill_null(0).to_numpy(zero_copy_only=False) for chunk in unified.chunks])
    positions = positions_in_table(dataset)
    if np.concatenate(missing)[positions].any():
        raise _missing_value(column)
    return np.unique(codes[positions], return_inverse=True)[1]


def _encoded(values: pa.Array, column: str) -> pa.DictionaryArray:
    try:
        return values.dictionary_encode()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise _not_comparable(column, str(values.type)) from error


def _codes_row_by_row(dataset: Any, column: str, show_progress: bool) -> np.ndarray:
    known: dict[Hashable, int] = {}
    codes = np.empty(len(dataset), dtype=np.int64)
    for index in _progress(range(len(dataset)), column, show_progress):
        row = fetch_row(dataset, index)
        _require_column(column, list(row) if isinstance(row, Mapping) else [])
        value = row[column]
        if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0:
            value = value.item()
        if value is None or value != value:
            raise _missing_value(column)
        if not isinstance(value, Hashable) or isinstance(value, Tensor):  # a tensor is hashed by its address
            raise _not_comparable(column, type(value).__name__)
        codes[index] = known.setdefault(value, len(known))
    return codes


def _progress(indices: range, column: str, show_progress: bool) -> Iterable[int]:
    label = {"desc": f"Units by {column}", "unit": "row", "unit_scale": indices.step}
    return tqdm(indices, **label, delay=1, disable=not show_progress)


def _require_column(column: str, columns: list[str]) -> None:
    if column not in columns:
        raise ValueError(
            f"expected privacy_unit to be a column of train_dataset, got {column!r} and the columns "
            f"{', '.join(map(str, columns)) or '(none: its rows are no mappings)'}"
        )


def _missing_value(column: str) -> ValueError:
    return ValueError(
        f"expected a value of privacy_unit={column!r} in every training row, got a row without one: fill these in, or "
        "leave such rows out"
    )


def _not_comparable(column: str, kind: str) -> TypeError:
    return TypeError(
        f"expected values of privacy_unit={column!r} that can be compared, such as numbers or texts, got {kind}"
    )
