"""Refuses training data as evaluation data: metrics are logged and published without noise.

| evaluation set | found by |
|---|---|
| the training set, a torch `Subset` of it, a list with the same rows | the same object at the same position |
| `select`, `shuffle`, renamed or removed columns of a `datasets.Dataset` | the same place in memory |
| the same data loaded or prepared once more | equal fingerprints; else contents: more than half of the distinct rows |

Rows that are one and the same object are refused however few they are. Rows that merely look alike are normal in real
data, so that contents count above a half only. They are compared for all rows of a `datasets.Dataset`; of other data,
for some thousand rows of a list, and a hundred of a dataset that makes them on demand.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from hf_dcsgd.privacy.randomness import private_randomness

Leaf = tuple[Any, np.ndarray | None]  # a dataset that is no view of another, and the rows of it (None for all)

_ROWS_OF_A_LIST, _ROWS_ON_DEMAND = 2048, 128
# Fewer rows than these look alike by chance.
_FEWEST_ALIKE = 8


def refuse_training_data(train_dataset: Any, eval_dataset: Any) -> None:
    """Raise ValueError when `eval_dataset`, or one of several in a dict, holds training data.

    Nothing is done where either is None, the name of a set, or not map-style. User code that fails here will fail
    where it is used, and is no evidence.
    """
    several = eval_dataset if isinstance(eval_dataset, Mapping) else {None: eval_dataset}
    for name, dataset in several.items():
        if dataset is train_dataset and dataset is not None:
            shared = "is the training data"
        elif not (_map_style(train_dataset) and _map_style(dataset)) or isinstance(dataset, str):
            continue
        elif count := sum(
            _identical_rows(*known, *leaf) for leaf in _leaves(dataset) for known in _leaves(train_dataset)
        ):
            shared = f"has {count} of its {len(dataset)} rows in common with train_dataset"
        elif _mostly_alike(train_dataset, dataset):
            shared = "has more than half of its rows in common with train_dataset, by their contents"
        else:
            continue
        place = "eval_dataset" if name is None else f"eval_dataset[{name!r}]"
        raise ValueError(
            f"{place} {shared}: metrics of training examples would be logged without noise. Hold data out (another "
            "split, or train_test_split before both are prepared); to look at training examples yourself use "
            "predict(), which logs nothing"
        )


def _map_style(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def _is_arrow(dataset: Any) -> bool:
    return all(hasattr(dataset, name) for name in ("data", "column_names", "_indices", "_fingerprint"))


def _leaves(dataset: Any, rows: np.ndarray | None = None) -> list[Leaf]:
    """Look through views of torch, down to what holds the rows."""
    if isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices, dtype=np.int64)
        return _leaves(dataset.dataset, indices if rows is None else indices[rows])
    if isinstance(dataset, ConcatDataset):
        leaves = []
        for part, end in zip(dataset.datasets, dataset.cumulative_sizes, strict=True):
            start = end - len(part)  # type: ignore[arg-type]
            inside = None if rows is None else rows[(rows >= start) & (rows < end)] - start
            leaves += _leaves(part, inside)
        return leaves
    return [(dataset, rows)]


def _identical_rows(train: Any, known: np.ndarray | None, evaluation: Any, rows: np.ndarray | None) -> int:
    """Count evaluation rows that are training rows, by where they are, in datasets that are no views."""
    both_arrow = _is_arrow(train) and _is_arrow(evaluation)
    if train is evaluation or (both_arrow and train._fingerprint == evaluation._fingerprint):
        trained = np.full(len(train), known is None)
        trained[[] if known is None else known] = True
        return int(trained.sum() if rows is None else trained[rows].sum())
    if both_arrow:
        from hf_dcsgd.checks.arrow_rows import shared_addresses

        return shared_addresses(train, known, evaluation, rows)
    if isinstance(train, list | tuple) and isinstance(evaluation, list | tuple):
        objects = {id(row) for row in _chosen(train, known) if _is_record(row)}
        return sum(id(row) in objects for row in _chosen(evaluation, rows))
    return 0


def _chosen(rows: Sequence[Any], positions: np.ndarray | None) -> Sequence[Any]:
    return rows if positions is None else [rows[i] for i in positions]


def _is_record(row: Any) -> bool:
    """Tell whether a row is an object of its own: small numbers and texts are shared by all who use them."""
    return isinstance(row, Mapping | list | torch.Tensor | np.ndarray) or (isinstance(row, tuple) and bool(row))


# -- contents --------------------------------------------------------------------------------------------------------


def _mostly_alike(train: Any, evaluation: Any) -> bool:
    leaves, known = _leaves(evaluation), _leaves(train)
    if len(leaves) == len(known) == 1 and _is_arrow(leaves[0][0]) and _is_arrow(known[0][0]):
        from hf_dcsgd.checks.arrow_rows import shared_contents

        alike, distinct = shared_contents(*known[0], *leaves[0])
        scale, rows = 1.0, len(evaluation)
    else:
        alike, distinct, rows, scale = _alike_in_samples(train, evaluation)
    # Rows that repeat each other (labels alone, say) are like any others: they prove nothing.
    return alike >= _FEWEST_ALIKE and 2 * distinct >= rows and scale * alike > distinct / 2


def _alike_in_samples(train: Any, evaluation: Any) -> tuple[int, int, int, float]:
    """Count distinct rows in a sample of either set that look alike: (alike, distinct, rows, factor to the whole)."""
    try:
        with private_randomness(torch.device("cpu")):  # rows may be drawn at random
            known, rows = _sample(train), _sample(evaluation)
        names = _common_names(known, rows)
        seen = {_content(row, names) for row in known}
        distinct = {_content(row, names) for row in rows}
    except Exception:
        return 0, 0, 0, 0.0
    alike = len(seen & distinct)
    in_place = 2 * alike > len(distinct)  # copies in the same order meet at the same positions
    return alike, len(distinct), len(rows), 1.0 if in_place else len(train) / max(len(known), 1)


def _sample(dataset: Any) -> list[Any]:
    """Take rows at places that follow from the size alone: all processes must come to the same conclusion."""
    if _is_arrow(dataset):
        dataset = dataset.with_format(None)  # without the user's transform
    most = _ROWS_OF_A_LIST if isinstance(dataset, list | tuple) else _ROWS_ON_DEMAND
    many = len(dataset) > most
    places = np.unique(np.random.default_rng(0).integers(len(dataset), size=most)) if many else range(len(dataset))
    return [dataset[int(i)] for i in places]


def _common_names(known: list[Any], rows: list[Any]) -> list[str] | None:
    """Return the entries to compare: all of the rows that have fewer; None for rows without names."""
    if not (known and rows and isinstance(known[0], Mapping) and isinstance(rows[0], Mapping)):
        return None
    names = sorted(known[0].keys() & rows[0].keys())
    if len(names) < min(len(known[0]), len(rows[0])):
        raise ValueError(f"expected rows with the same entries, got {list(known[0])} and {list(rows[0])}")
    return names


def _content(value: Any, names: list[str] | None = None) -> Hashable:
    """Make what a row holds comparable, whether in tensors, arrays or lists."""
    if isinstance(value, Mapping):
        return tuple((name, _content(value[name])) for name in (sorted(value) if names is None else names))
    if value is None or isinstance(value, str | bytes):
        return value
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype == torch.bfloat16 else value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of unequal length
        array = np.zeros(0, dtype=object)
    if array.dtype.kind in "biuf":
        return array.shape, array.astype(np.float64).tobytes()
    if isinstance(value, list | tuple):
        return tuple(_content(item) for item in value)
    raise TypeError(f"expected rows of numbers, texts and lists, got {type(value).__name__}")
