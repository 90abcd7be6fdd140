"""Evaluation from cached hidden states: each batch goes through the frozen trunk once, however often it is evaluated.

Evaluation batches come in the same order and padding each time, so that whole batches are kept, by the content of
their inputs, in a folder of the training rows' cache: what that one depends on is in its name, and who removes it
removes these, too. A file that was cut off or changed is computed again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hf_dcsgd.data.rows import Batch
from hf_dcsgd.trunk.build import TrunkCache, buffer_of
from hf_dcsgd.trunk.cut import TRUNK_ENTRY, TrunkCacheError
from hf_dcsgd.trunk.store import Schema, private_file

logger = logging.getLogger(__name__)

FOLDER = "evaluation"
_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
Result = TypeVar("Result")
Way: TypeAlias = Callable[[], AbstractContextManager[Any]]


class EvaluationCache:
    """Hidden states of evaluation batches on disk, beside those of the training rows.

    Args:
        cache: The cache of the training rows.
        forward_context: Makes a context around each forward, such as autocast.
    """

    def __init__(self, cache: TrunkCache, forward_context: Way) -> None:
        self._cache, self._forward_context = cache, forward_context
        self._entry_schema = Schema({TRUNK_ENTRY: cache.store.schema.entries[TRUNK_ENTRY]})
        self._folder = cache.folder / FOLDER
        self._tolerance = _TOLERANCE[self._entry_schema.entries[TRUNK_ENTRY][0]]
        self._way: Way | None = None
        self._tried = False

    def run(self, batch: Batch, evaluate: Callable[[], Result], narrowed: Way = nullcontext) -> Result:
        """Return `evaluate()`, which runs the model on this batch, with the frozen blocks passed over.

        `narrowed` makes a context in which blocks leave out what training does not read. The first time, results are
        compared with that of the whole model: one that shows what is left out is computed without it, and one that
        shows what the frozen blocks do (all hidden states, attentions) ends the use of this cache.
        """
        if self._tried:
            return evaluate() if self._way is None else self._cached(batch, evaluate, self._way)
        self._tried, expected = True, evaluate()
        ways = (narrowed, nullcontext)
        self._way = next((way for way in ways if self._leads_to(expected, batch, evaluate, way)), None)
        if self._way is None:
            logger.warning("evaluation goes on without the trunk cache: it shows what the frozen blocks compute")
        return expected

    def _cached(self, batch: Batch, evaluate: Callable[[], Result], way: Way) -> Result:
        hidden_states = self._hidden_states(self._cache.inputs_of(batch))
        with way(), self._cache.trunk.feed(hidden_states):
            return evaluate()

    def _leads_to(self, expected: Result, batch: Batch, evaluate: Callable[[], Result], way: Way) -> bool:
        try:
            return _agree(self._cached(batch, evaluate, way), expected, self._tolerance)
        except (IndexError, RuntimeError, TypeError, ValueError):
            if way is nullcontext:
                raise
            return False  # something takes what is left out

    def _hidden_states(self, inputs: Batch) -> Tensor:
        device = next(value.device for value in inputs.values() if isinstance(value, Tensor))
        path = self._folder / f"{_digest(inputs)}.bin"
        stored = self._read(path)
        if stored is None:
            with self._forward_context():
                stored = self._cache.trunk.capture(inputs).to(
                    getattr(torch, self._entry_schema.entries[TRUNK_ENTRY][0])
                )
            self._write(path, stored)
        return stored.to(device)

    def _read(self, path: Path) -> Tensor | None:
        if not path.exists():
            return None
        content, width = np.fromfile(path, dtype=np.uint8), 8 * self._entry_schema.record_length
        try:
            return self._entry_schema.unpack([(content[width:], content[:width].view(np.int64))])[TRUNK_ENTRY]
        except (TrunkCacheError, ValueError, IndexError):
            return None

    def _write(self, path: Path, hidden_states: Tensor) -> None:
        if hidden_states.nbytes > 0.95 * shutil.disk_usage(self._cache.folder).free:
            return  # the next evaluation computes it again
        self._folder.mkdir(mode=0o700, exist_ok=True)
        data, record = self._entry_schema.pack(0, 0, {TRUNK_ENTRY: hidden_states})
        partial = path.with_suffix(f".{os.getpid()}.partial")
        with private_file(partial, os.O_WRONLY | os.O_TRUNC) as file, os.fdopen(os.dup(file), "wb") as stream:
            stream.write(np.asarray(record, dtype=np.int64).tobytes() + data)
        partial.replace(path)


def _digest(inputs: Batch) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(inputs.items()):
        is_tensor = isinstance(value, Tensor)
        digest.update(repr((name, value.dtype, value.shape) if is_tensor else (name, value)).encode())
        digest.update(buffer_of(value) if is_tensor else b"")
    return digest.hexdigest()


def _agree(found: Any, expected: Any, tolerance: float) -> bool:
    pairs = list(zip(tree_leaves(found), tree_leaves(expected), strict=True))
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))
        for a, b in ((a.float(), b.float()) for a, b in pairs if isinstance(a, Tensor) and a.numel())
    )
