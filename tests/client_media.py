"""Scripts with the shape of transformers' examples for images and sound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
import torch
import transformers as hf
from client_models import sentence
from client_scripts import EVAL_ROWS, TRAIN_ROWS, Names, parse, train_and_evaluate
from client_text import accuracy

IMAGE = 32


def noise(k: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(k))


def rows_of(row: Any) -> tuple[Any, Any]:
    """Return rows that are transformed as they are fetched, as scripts for images have it."""
    splits = []
    for numbers in (range(TRAIN_ROWS), range(1000, 1000 + EVAL_ROWS)):
        rows = datasets.Dataset.from_dict({"number": list(numbers)})

        def transform(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
            made = [row(k) for k in batch["number"]]
            return {name: [one[name] for one in made] for name in made[0]}

        rows.set_transform(transform)
        splits.append(rows)
    return splits[0], splits[1]


def stacked(*names: str) -> Any:
    """Return a collator as scripts write their own: these entries of the rows, stacked."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in names}

    return collate


def media_script(
    names: Names,
    argv: Sequence[str],
    auto_class: Any,
    row: Any,
    collate: Any,
    compute_metrics: Any = None,
    **settings: Any,
) -> dict:
    parsed = parse(names[1], argv)
    args: Any = parsed.training
    args.remove_unused_columns = False
    for name, value in settings.items():
        setattr(args, name, value)
    train, validation = rows_of(row)
    trainer = names[0](
        model=auto_class.from_pretrained(parsed.path),
        args=args,
        train_dataset=train,
        eval_dataset=validation,
        data_collator=collate,
        compute_metrics=compute_metrics,
    )
    return train_and_evaluate(trainer, parsed)


def run_image_classification(names: Names, argv: Sequence[str]) -> dict:
    def row(k: int) -> dict[str, Any]:
        return {"pixel_values": noise(k, 3, IMAGE, IMAGE), "labels": k % 2}

    collate = stacked("pixel_values", "labels")
    return media_script(names, argv, hf.AutoModelForImageClassification, row, collate, accuracy)


def run_audio_classification(names: Names, argv: Sequence[str]) -> dict:
    def row(k: int) -> dict[str, Any]:
        return {"input_values": noise(k, 800), "labels": k % 2}

    collate = stacked("input_values", "labels")
    return media_script(names, argv, hf.AutoModelForAudioClassification, row, collate, accuracy)


def run_speech_recognition_ctc(names: Names, argv: Sequence[str], auto_class: Any = hf.AutoModelForCTC) -> dict:
    def row(k: int) -> dict[str, Any]:
        letters = [1 + "abcdefghijklmnopqrstuvwxyz".find(letter) % 9 for letter in sentence(k, 1)]
        return {"input_values": noise(k, 800 + 80 * (k % 3)), "labels": torch.tensor(letters)}

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        values = torch.nn.utils.rnn.pad_sequence([row["input_values"] for row in rows], batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row["input_values"])) for row in rows], True)
        labels = torch.nn.utils.rnn.pad_sequence([row["labels"] for row in rows], True, padding_value=-100)
        return {"input_values": values, "attention_mask": mask.long(), "labels": labels}

    def letters_right(prediction: Any) -> dict[str, float]:
        made = np.argmax(prediction.predictions, axis=-1)
        return {"blank": float((made == 0).mean())}

    return media_script(names, argv, auto_class, row, collate, letters_right)


class WithFreshAdapters:
    """Loads a model as the script does that trains adapters of attention, and nothing else."""

    @staticmethod
    def from_pretrained(path: str) -> Any:
        model: Any = hf.Wav2Vec2ForCTC.from_pretrained(path)
        model.init_adapter_layers()
        model.freeze_base_model()
        for weight in model._get_adapters().values():
            weight.requires_grad = True
        return model


def run_speech_recognition_ctc_adapter(names: Names, argv: Sequence[str]) -> dict:
    return run_speech_recognition_ctc(names, argv, WithFreshAdapters)


def run_semantic_segmentation(names: Names, argv: Sequence[str]) -> dict:
    def row(k: int) -> dict[str, Any]:
        return {"pixel_values": noise(k, 3, IMAGE, IMAGE), "labels": (noise(k, IMAGE, IMAGE) > 0).long()}

    def pixel_accuracy(prediction: Any) -> dict[str, float]:
        logits = torch.nn.functional.interpolate(torch.tensor(prediction.predictions), size=(IMAGE, IMAGE))
        return {"accuracy": float((logits.argmax(dim=1).numpy() == prediction.label_ids).mean())}

    collate = stacked("pixel_values", "labels")
    return media_script(names, argv, hf.AutoModelForSemanticSegmentation, row, collate, pixel_accuracy)


def run_object_detection(names: Names, argv: Sequence[str]) -> dict:
    def row(k: int) -> dict[str, Any]:
        boxes = torch.tensor([[0.5, 0.5, 0.2, 0.2]] * (1 + k % 2))
        return {
            "pixel_values": noise(k, 3, IMAGE, IMAGE),
            "labels": {"class_labels": torch.zeros(len(boxes), dtype=torch.long), "boxes": boxes},
        }

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
            "labels": [row["labels"] for row in rows],
        }

    settings = {"eval_do_concat_batches": False}
    return media_script(names, argv, hf.AutoModelForObjectDetection, row, collate, None, **settings)


def run_instance_segmentation(names: Names, argv: Sequence[str]) -> dict:
    def row(k: int) -> dict[str, Any]:
        masks = (noise(k, 1 + k % 2, IMAGE, IMAGE) > 0).float()
        return {
            "pixel_values": noise(k, 3, IMAGE, IMAGE),
            "mask_labels": masks,
            "class_labels": torch.zeros(len(masks), dtype=torch.long),
            "pixel_mask": torch.ones(IMAGE, IMAGE, dtype=torch.long),
        }

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = {name: torch.stack([row[name] for row in rows]) for name in ("pixel_values", "pixel_mask")}
        return batch | {name: [row[name] for row in rows] for name in ("mask_labels", "class_labels")}

    settings = {"eval_do_concat_batches": False, "batch_eval_metrics": True}
    return media_script(
        names, argv, hf.AutoModelForUniversalSegmentation, row, collate,
        lambda prediction, compute_result=False: {"maps": 0.0}, **settings,
    )  # fmt: skip


def run_clip(names: Names, argv: Sequence[str]) -> dict:
    def row(k: int) -> dict[str, Any]:
        return {"pixel_values": noise(k, 3, IMAGE, IMAGE), "input_ids": torch.arange(8) + k % 4}

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = stacked("pixel_values", "input_ids")(rows)
        return batch | {"attention_mask": torch.ones_like(batch["input_ids"]), "return_loss": True}

    return media_script(names, argv, hf.AutoModel, row, collate)


def run_mae(names: Names, argv: Sequence[str]) -> dict:
    """Hidden parts of images are painted again: no labels, but the images themselves."""

    def row(k: int) -> dict[str, Any]:
        return {"pixel_values": noise(k, 3, IMAGE, IMAGE)}

    return media_script(
        names, argv, hf.ViTMAEForPreTraining, row, stacked("pixel_values"), label_names=["pixel_values"]
    )


def run_mim(names: Names, argv: Sequence[str]) -> dict:
    def row(k: int) -> dict[str, Any]:
        return {"pixel_values": noise(k, 3, IMAGE, IMAGE), "bool_masked_pos": noise(k, 16) > 0}

    collate = stacked("pixel_values", "bool_masked_pos")
    return media_script(names, argv, hf.AutoModelForMaskedImageModeling, row, collate)
