"""Compare synthetic texts with private ones: lengths, n-grams, copies. What is returned here is PRIVATE, not noised.

Figures are given beside those of real rows that no model saw, as many of them as of training rows: what a model that
knows the distribution, and no single row, would show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy.spatial.distance import jensenshannon
from scipy.stats import fisher_exact, wasserstein_distance

GRAM = 5  # characters
NEAR = 0.6  # of the 5-grams of both texts together, what a near copy shares
SHORTEST = 20  # characters: shorter texts are alike by chance


def normalized(text: str) -> str:
    """Return a text without differences of case and spacing."""
    return " ".join(text.lower().split())


class Copies:
    """Finds exact and near copies of some texts."""

    def __init__(self, originals: Iterable[str]) -> None:
        texts = [normalized(text) for text in originals]
        self._exact = set(texts)
        grams = [_grams(text) for text in texts]
        self._sizes = np.array([len(found) for found in grams])
        places: dict[str, list[int]] = {}
        for number, found in enumerate(grams):
            for gram in found:
                places.setdefault(gram, []).append(number)
        self._places = {gram: np.array(numbers) for gram, numbers in places.items()}

    def count(self, texts: Sequence[str]) -> dict[str, int]:
        """Count texts that are copies, among those long enough to tell."""
        long_enough = [text for text in map(normalized, texts) if len(text) >= SHORTEST]
        exact = sum(text in self._exact for text in long_enough)
        near = sum(self._is_near(text) for text in long_enough)
        return {"texts": len(long_enough), "exact": exact, "near_or_exact": near}

    def _is_near(self, text: str) -> bool:
        grams = _grams(text)
        found = [self._places[gram] for gram in grams if gram in self._places]
        if not found:
            return False
        shared = np.bincount(np.concatenate(found), minlength=len(self._sizes))
        return bool((shared / (self._sizes + len(grams) - shared)).max() >= NEAR)


def _grams(text: str) -> set[str]:
    return {text[start : start + GRAM] for start in range(max(1, len(text) - GRAM + 1))}


def compare_copies(
    synthetic: Sequence[str], train: Sequence[str], held_out: Sequence[str], seed: int
) -> dict[str, Any]:
    """Count copies of training rows, and of as many held-out rows; `p_value` is Fisher's that there are more of them.

    Rows that occur in both parts of the data are left out of both: a copy of them tells nothing.
    """
    train_rows, held_rows = _apart(train, held_out)
    size = min(len(train_rows), len(held_rows))
    generator = np.random.default_rng(seed)
    pools = [[rows[k] for k in generator.permutation(len(rows))[:size]] for rows in (train_rows, held_rows)]
    of_train, of_held_out = (Copies(pool).count(synthetic) for pool in pools)
    table = [[found["near_or_exact"], found["texts"] - found["near_or_exact"]] for found in (of_train, of_held_out)]
    return {
        "all_training_rows": Copies(train).count(synthetic),
        "rows_compared": size,
        "training_rows": of_train,
        "held_out_rows": of_held_out,
        "p_value": float(fisher_exact(table, alternative="greater").pvalue),
    }


def _apart(first: Sequence[str], second: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the distinct texts of each that the other does not have."""
    ours, theirs = (dict.fromkeys(map(normalized, texts)) for texts in (first, second))
    return [text for text in ours if text not in theirs], [text for text in theirs if text not in ours]


def compare_distributions(
    synthetic: Sequence[str], train: Sequence[str], held_out: Sequence[str], seed: int
) -> dict[str, Any]:
    """Return distances to the training rows in lengths (words, Wasserstein) and n-grams (Jensen-Shannon, 0 to 1).

    Samples are cut to one size, as distances between samples shrink with it.
    """
    generator = np.random.default_rng(seed)
    size = min(len(synthetic), len(train), len(held_out))
    parts = [[rows[k] for k in generator.permutation(len(rows))[:size]] for rows in (synthetic, held_out, train)]
    *others, reference = parts
    return {
        "rows": size,
        **{
            name: {
                "length": float(wasserstein_distance(*(_lengths(texts) for texts in (rows, reference)))),
                **{f"{n}-grams": _ngram_distance(rows, reference, n) for n in (1, 2)},
            }
            for name, rows in zip(("synthetic", "held_out"), others, strict=True)
        },
    }


def _lengths(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def _ngram_distance(first: Sequence[str], second: Sequence[str], n: int) -> float:
    counts = [Counter(gram for text in texts for gram in _word_grams(text, n)) for texts in (first, second)]
    if not all(counts):
        return 1.0
    names = sorted(counts[0].keys() | counts[1].keys())
    return float(jensenshannon(*([count[name] for name in names] for count in counts), base=2))


def _word_grams(text: str, n: int) -> list[tuple[str, ...]]:
    words = normalized(text).split()
    return list(zip(*(words[start:] for start in range(n)), strict=False))
