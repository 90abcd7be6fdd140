"""Training data as evaluation data: found in every disguise that ordinary code gives them, and held-out data pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, concatenate_datasets, load_from_disk
from tiny_tasks import feature_rows, feature_trainer
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split

from hf_dcsgd.checks.evaluation_data import refuse_training_data

N = 3000


def columns(n: int = N, seed: int = 0) -> dict[str, list[Any]]:
    """Texts from few words, tokens, labels and an index, as GLUE has them."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(3, 20, n)
    tokens = [generator.integers(0, 50, length).tolist() for length in lengths]
    texts = [" ".join(f"word{token}" for token in row) for row in tokens]
    return {"text": texts, "input_ids": tokens, "label": generator.integers(0, 2, n).tolist(), "idx": list(range(n))}


@pytest.fixture(scope="module")
def train() -> Dataset:
    return Dataset.from_dict(columns())


def prepared(dataset: Dataset) -> Dataset:
    """New rows on new memory, by a function of each."""
    return dataset.map(lambda row: {"input_ids": [token + 1 for token in row["input_ids"]]})


def saved(dataset: Dataset, folder: Path) -> Dataset:
    dataset.save_to_disk(str(folder))
    return load_from_disk(str(folder))


VIEWS: dict[str, Callable[[Dataset], Any]] = {
    "the same object": lambda data: data,
    "select": lambda data: data.select([5, 17, 2000]),
    "contiguous select": lambda data: data.select(range(100, 200)),
    "shuffle": lambda data: data.shuffle(seed=1),
    "shuffle and select": lambda data: data.shuffle(seed=1).select(range(10)),
    "shard": lambda data: data.shard(10, 3),
    "fewer columns": lambda data: data.select_columns(["text"]),
    "renamed columns": lambda data: data.rename_column("text", "sentence").remove_columns(["label", "idx"]),
    "another format": lambda data: data.with_format("torch").select(range(50)),
    "an added column": lambda data: data.add_column("more", [0] * len(data)),
    "with other data": lambda data: concatenate_datasets([Dataset.from_dict(columns(500, 9)), data.select([7])]),
    "a part": lambda data: Subset(data, [3, 4]),
    "a part of a part": lambda data: Subset(Subset(data.shuffle(seed=2), list(range(100))), [5]),
    "equal": lambda data: Dataset.from_dict(data.to_dict()),
    "an equal part": lambda data: Dataset.from_dict(data.shuffle(seed=3).select(range(40)).to_dict()),
    "an equal part, fewer columns": lambda data: Dataset.from_dict(data.select(range(40)).to_dict()).select_columns(
        "text"
    ),
    "two thirds": lambda data: concatenate_datasets(
        [Dataset.from_dict(data.select(range(400)).to_dict()), Dataset.from_dict(columns(200, 9))]
    ),
    "other numbers' types": lambda data: (
        data.to_pandas().assign(label=lambda d: d.label.astype("int8")).pipe(Dataset.from_pandas)
    ),
}


@pytest.mark.parametrize("view", VIEWS)
def test_training_data_are_refused(train: Dataset, view: str) -> None:
    with pytest.raises(ValueError, match=r"eval_dataset .*predict\(\)"):
        refuse_training_data(train, VIEWS[view](train))


def test_the_same_data_loaded_or_prepared_twice(train: Dataset, tmp_path: Path) -> None:
    again = saved(train, tmp_path / "a")
    assert (
        again.data.column("text").chunks[0].buffers()[1].address
        != train.data.column("text").chunks[0].buffers()[1].address
    )
    for evaluation in (again, again.shuffle(seed=4).select(range(30)), prepared(again).select(range(30))):
        refused = prepared(train) if len(evaluation) == 30 and evaluation._indices is None else train
        with pytest.raises(ValueError, match="eval_dataset"):
            refuse_training_data(refused, evaluation)


def test_held_out_data_pass(train: Dataset, tmp_path: Path) -> None:
    split = train.train_test_split(0.2, seed=0)
    refuse_training_data(split["train"], split["test"])
    refuse_training_data(split["train"], split["test"].shuffle(seed=5).select(range(100)))
    refuse_training_data(prepared(split["train"]), prepared(split["test"]))
    refuse_training_data(train.select(range(1000)), train.select(range(1000, 3000)))
    refuse_training_data(*random_split(train, [2000, 1000]))  # type: ignore[arg-type]
    refuse_training_data(train, Dataset.from_dict(columns(300, 9)))
    refuse_training_data(train, saved(Dataset.from_dict(columns(300, 9)), tmp_path))
    assert split["train"].data.column("text").chunks[0].buffers()[1] is not None


def test_some_rows_that_look_alike_are_normal(train: Dataset) -> None:
    some = concatenate_datasets(
        [Dataset.from_dict(train.select(range(60)).to_dict()), Dataset.from_dict(columns(90, 9))]
    )
    refuse_training_data(train, some)
    # Labels alone, or other texts under the same numbers, say nothing.
    refuse_training_data(train, Dataset.from_dict({"label": [0, 1] * 50}))
    other = columns(300, 9)
    refuse_training_data(
        train, Dataset.from_dict({"sentence": other["text"], "label": other["label"], "idx": range(300)})
    )
    # Every row looks like any other.
    refuse_training_data(Dataset.from_dict({"x": [1.0] * 100}), Dataset.from_dict({"x": [1.0] * 90}))


@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.slow)])
def test_short_rows_in_long_padding_are_told_apart(train: Dataset, side: str) -> None:
    def padded(dataset: Dataset) -> Dataset:
        rows = [ids[:20] for ids in dataset["input_ids"]]
        pads = [[0] * (128 - len(ids)) for ids in rows]
        joined = [pad + ids if side == "left" else ids + pad for ids, pad in zip(rows, pads, strict=True)]
        return Dataset.from_dict({"input_ids": joined, "label": dataset["label"]})

    split = train.train_test_split(0.1, seed=0)
    refuse_training_data(padded(split["train"]), padded(split["test"]))
    with pytest.raises(ValueError, match="by their contents"):
        refuse_training_data(padded(split["train"]), padded(split["train"].select(range(100))))


def test_texts_that_share_their_ends_are_told_apart() -> None:
    """The keys of these rows agree; what they hold does not."""
    known = Dataset.from_dict({"text": [f"{i:04d}{'a' * 25}x{'b' * 70}" for i in range(200)]})
    refuse_training_data(known, Dataset.from_dict({"text": [f"{i:04d}{'a' * 25}y{'b' * 70}" for i in range(200)]}))
    with pytest.raises(ValueError, match="by their contents"):
        refuse_training_data(known, Dataset.from_dict({"text": known["text"][::-1]}))


# --- lists and datasets of torch -------------------------------------------------------------------------------------


class OnDemand(torch.utils.data.Dataset):
    """Makes its rows when asked."""

    def __init__(self, start: int, n: int) -> None:
        self.start, self.n = start, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.start + i)
        return {"x": torch.rand(4, generator=generator), "labels": i % 2}


def tensors(n: int = 200, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.rand(n, 4, generator=generator), torch.arange(n) % 2)


@pytest.mark.parametrize(
    ("known", "evaluation"),
    [
        (feature_rows(), lambda known: known[:3]),
        (feature_rows(), lambda known: known[::-1]),
        (feature_rows(), lambda known: feature_rows()[:20]),
        (feature_rows(), lambda known: [{"features": row["features"]} for row in feature_rows()[:20]]),
        (feature_rows(), lambda known: Subset(known, [1])),
        (feature_rows(5000), lambda known: [dict(row) for row in known][::-1]),
        (feature_rows(), lambda known: ConcatDataset([feature_rows(50, 9), known])),
        (tensors(), lambda known: tensors()),
        (tensors(), lambda known: Subset(known, [1, 2])),
        (Subset(tensors(), range(100)), lambda known: Subset(known.dataset, range(99, 150))),
        (OnDemand(0, 10**6), lambda known: OnDemand(0, 10**6)),
        (OnDemand(0, 100), lambda known: OnDemand(50, 20)),
    ],
)
def test_training_rows_of_other_datasets_are_refused(known: Any, evaluation: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="eval_dataset"):
        refuse_training_data(known, evaluation(known))


@pytest.mark.parametrize(
    ("known", "evaluation"),
    [
        (feature_rows(), feature_rows(seed=1)),
        (tensors(), tensors(seed=1)),
        random_split(tensors(), [150, 50]),
        (OnDemand(0, 1000), OnDemand(1000, 1000)),
        ([1, 2, 3] * 10, [1, 2, 3]),
        (feature_rows(), None),
        (None, feature_rows()),
        (feature_rows(), "the name of a set"),
        (feature_rows(), iter(feature_rows())),
        (feature_rows(), []),
        ([object() for _ in range(9)], [object() for _ in range(9)]),
    ],
)
def test_other_rows_of_other_datasets_pass(known: Any, evaluation: Any) -> None:
    refuse_training_data(known, evaluation)


def test_user_code_that_fails_is_left_to_fail_where_it_is_used() -> None:
    class Broken(OnDemand):
        def __getitem__(self, i: int) -> dict[str, Any]:
            raise RuntimeError("no such file")

    refuse_training_data(Broken(0, 10), OnDemand(0, 10))


def test_looking_does_not_move_the_global_random_state_by_what_rows_draw() -> None:
    class Augmented(OnDemand):
        draws = 1

        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"x": torch.rand(self.draws), "noise": np.random.rand(self.draws)}

    states = []
    for draws in (1, 7):
        Augmented.draws = draws
        torch.manual_seed(0)
        np.random.seed(0)
        refuse_training_data(Augmented(0, 10), OnDemand(0, 10))
        states.append((torch.rand(1).item(), np.random.rand()))
    assert states[0] == states[1]


def test_several_evaluation_sets_are_looked_at_one_by_one(train: Dataset) -> None:
    split = train.train_test_split(0.2, seed=0)
    refuse_training_data(split["train"], {"test": split["test"]})
    with pytest.raises(ValueError, match=r"eval_dataset\['small'\] has 10 of its 10 rows"):
        refuse_training_data(split["train"], DatasetDict(test=split["test"], small=split["train"].select(range(10))))


def test_the_trainer_refuses_at_once_and_when_it_evaluates(tmp_path: Path) -> None:
    rows = feature_rows()
    with pytest.raises(ValueError, match="3 of its 3 rows"):
        feature_trainer(tmp_path, rows=rows, trainer_options={"eval_dataset": rows[:3]})
    trainer = feature_trainer(tmp_path, rows=rows)
    with pytest.raises(ValueError, match="by their contents"):
        trainer.evaluate(feature_rows()[10:40])
    assert "eval_loss" in trainer.evaluate()
    assert len(trainer.predict(rows[:4]).predictions) == 4
