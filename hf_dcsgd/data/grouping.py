"""Which rows of a dataset are one unit of privacy, by the values of a column.

The values are compared with each other and forgotten; what is kept, and public, is how many different ones there are.

| column                                            | behavior                                                   |
|---------------------------------------------------|------------------------------------------------------------|
| missing, in the dataset or in a row               | `ValueError` with the columns that there are               |
| a value that is null or NaN                       | `ValueError`: whose row is it?                             |
| values that cannot be compared (lists, structs)   | `TypeError`                                                |
| of an Arrow dataset                               | encoded by Arrow: a million rows take a part of a second   |
| of any other dataset                              | read row by row, with a progress bar after a second        |
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
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


def group_rows(dataset: Any, column: str, *, show_progress: bool = True) -> RowsOfUnits:
    """Find out which rows have the same value in a column: each value is one unit of privacy."""
    map_style_length(dataset)
    if hasattr(dataset, "column_names") and hasattr(dataset, "with_format"):
        return RowsOfUnits(_codes_by_arrow(dataset, column))
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


def _codes_by_arrow(dataset: Any, column: str) -> np.ndarray:
    _require_column(column, dataset.column_names)
    values = dataset.select_columns([column]).with_format("arrow")[:].column(column)
    is_missing = pc.is_null(values, nan_is_null=pa.types.is_floating(values.type))
    if pc.any(is_missing).as_py():
        raise _missing_value(column)
    try:
        encoded = values.dictionary_encode().unify_dictionaries().combine_chunks()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise _not_comparable(column, str(values.type)) from error
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def _codes_row_by_row(dataset: Any, column: str, show_progress: bool) -> np.ndarray:
    known: dict[Hashable, int] = {}
    codes = np.empty(len(dataset), dtype=np.int64)
    indices = range(len(dataset))
    for index in tqdm(indices, desc=f"Units by {column}", unit="row", delay=1, disable=not show_progress):
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
