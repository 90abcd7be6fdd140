"""The zoo: every class of transformers' auto classes, tiny, run as training runs it.

For each class, one record is added to a few others, and it is measured how far that moves the clipped sum, in units of
the threshold C: (A) rows of unequal lengths, (B) one longer row, within a stack and in one of its own, (C) a row of
extreme values. More than C is allowed only where the class was refused.

    python tests/zoo.py --results zoo.jsonl                                    # looks at all, or at those named
    python tests/zoo.py --results zoo.jsonl --write docs/supported_models.md   # and writes the section of the docs
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from zoo_models import Species, build, species, tiny_config
from zoo_rows import BEGIN, END, Row, collator, rows_and_records
from zoo_table import write_section

from hf_dcsgd.checks.parity import ParityError
from hf_dcsgd.checks.preflight import check_before_training
from hf_dcsgd.data.rows import RowCollator
from hf_dcsgd.ghost import BatchCouplingError, UnsupportedModelError
from hf_dcsgd.privacy.mechanism import NoisyRelease
from hf_dcsgd.step import PrivateStep
from hf_dcsgd.tasks.layer_selection import DEFAULT_LAYERS, select_trainable_layers, train_mode
from hf_dcsgd.tasks.loss_kind import loss_kind

REFUSALS = (BatchCouplingError, UnsupportedModelError, ParityError)
SECONDS_PER_CLASS = 40
TOLERANCE = 1e-4
# How far the others may be moved by a record beside its own share, in units of C: rounding.
ROUNDING = 1e-3

Result = dict[str, Any]


# --- one class -------------------------------------------------------------------------------------------------------


class ClippedSums:
    """Stands in for the mechanism: clips at a threshold and hands back the sum without noise."""

    def __init__(self) -> None:
        self.threshold = math.inf
        self.norms: list[Tensor] = []
        self.sum = torch.empty(0)

    def clip_factors(self, norms: Tensor, losses: Tensor) -> Tensor:
        self.norms.append(norms)
        return (self.threshold / norms).clamp(max=1.0).nan_to_num(0.0)

    def release(self, clipped_sum: Tensor) -> NoisyRelease:
        self.sum = clipped_sum.double()
        return NoisyRelease(clipped_sum, 1.0, None, None, {})

    def abandon(self) -> None: ...

    def discard(self) -> None: ...


def clipped_sum(step: PrivateStep, collate: RowCollator, rows: Sequence[Row]) -> Tensor:
    for stack in collate(rows):
        step.accumulate(stack)
    step.release()
    mechanism: Any = step.mechanism
    return mechanism.sum


def movements(step: PrivateStep, collate: RowCollator, rows: list[Row], records: dict[str, Row]) -> dict[str, float]:
    """How far a record moves the clipped sum, and how far it moves the others' share of it, in units of C."""
    mechanism: Any = step.mechanism
    step.train()
    clipped_sum(step, collate, rows)
    mechanism.threshold = threshold = float(torch.cat(mechanism.norms).median())
    without = clipped_sum(step, collate, rows)
    moved, others_moved = {}, {}
    for name, record in records.items():
        difference = clipped_sum(step, collate, [record, *rows]) - without
        moved[name] = float(difference.norm()) / threshold
        others_moved[name] = float((difference - clipped_sum(step, collate, [record])).norm()) / threshold
    others_moved["what stays"] = float((clipped_sum(step, collate, rows) - without).norm()) / threshold
    return {"moved": _largest(moved.values()), "others": _largest(others_moved.values())}


def _largest(values: Iterable[float]) -> float:
    return max(values, key=lambda value: (math.isnan(value), value))


# What a message of refusal asks for, other than dropout.
CURES = {key: {"attention_type": "original_full"} for key in ("big_bird", "bigbird_pegasus")}
WITHOUT_LOGITS = ("PPLCNetForImageClassification",)  # calls them last_hidden_state


def own_loss(task: str) -> Any:
    """Give the loss of a task for classes whose name does not tell."""

    def losses(outputs: Any, labels: Tensor) -> Tensor:
        logits = outputs["logits"] if "logits" in outputs else outputs[0]
        if task == "CausalLM":
            logits, labels = logits[:, :-1], labels[:, 1:]
        entropies = nn.functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=-100
        )
        return entropies.view(len(logits), -1).mean(dim=1)

    return losses


def prepared(kind: Species, layers: str, settings: dict[str, Any]) -> tuple[PrivateStep, RowCollator]:
    model = build(kind, settings)
    select_trainable_layers(model, layers)
    try:
        loss_kind(model)
        loss = own_loss(kind.task) if kind.class_name in WITHOUT_LOGITS else None
    except ValueError:
        loss = own_loss(kind.task)
    train_mode(model)
    mechanism: Any = ClippedSums()
    return PrivateStep(model, mechanism, loss=loss, spot_checks=False), collator(kind, model)


def refusal(kind: Species, layers: str, settings: dict[str, Any]) -> Exception | None:
    """Run what precedes training, and return what was raised."""
    try:
        step, collate = prepared(kind, layers, settings)
        rows, _ = rows_and_records(kind, step.model.config)
        check_before_training(step, collate.alone(rows[0]), (0, BEGIN, END))
    except REFUSALS as error:
        return error
    return None


def quiet_settings(config: Any) -> dict[str, Any]:
    """Return the settings that turn every dropout of a configuration off."""
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, hf.PreTrainedConfig):
            if inner := quiet_settings(value):
                found[name] = inner
        elif re.search(r"drop|jitter|mask_\w+_prob", name):
            if isinstance(value, float) and value > 0:
                found[name] = 0.0
            elif isinstance(value, list | tuple) and any(value):
                found[name] = [0.0] * len(value)
    return found


def look_at(kind: Species, trained: str = DEFAULT_LAYERS) -> Result:
    """Give a verdict on a class: exact, slow, refused, not built, or wrong.

    Where the trained layers are refused, the head is tried, the last linear layer alone, and all.
    """
    try:
        quiet = quiet_settings(tiny_config(kind, part=False))
        _try_forward(kind)
    except Exception as error:
        return {"verdict": "not built", "reason": _words(error)}
    first: Result = {}
    for layers in (trained, "head", _last_linear(build(kind)), "all"):
        try:
            select_trainable_layers(build(kind), layers)
        except ValueError:
            continue
        result = look_at_layers(kind, layers, quiet)
        if result["verdict"] != "refused":
            return result | ({"default_refused": first["reason"]} if first else {})
        first = first or result
    return first


def _last_linear(model: nn.Module) -> str:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]


def _try_forward(kind: Species) -> None:
    model = build(kind).eval()
    rows, _ = rows_and_records(kind, model.config)
    batch = collator(kind, model).alone(rows[0])
    batch.pop("labels")
    with torch.no_grad():
        model(**batch)


def look_at_layers(kind: Species, layers: str, quiet: dict[str, Any]) -> Result:
    """Give a verdict on a class with some of its layers trained; `quiet` turns its dropout off for the measurement."""
    result: Result = {"verdict": "exact", "layers": layers}
    refused, cure = refusal(kind, layers, {}), CURES.get(kind.model_type, {})
    if refused:
        cures = [cure, *({name: value} for name, value in quiet.items()), quiet]
        if needs := next((needs for needs in cures if needs and not refusal(kind, layers, needs)), None):
            result |= {"needs": needs, "default_refused": f"{type(refused).__name__}: {_words(refused)}"}
            refused = None
    try:
        step, collate = prepared(kind, layers, {**quiet, **cure})
        for module in step.model.modules():
            if isinstance(module, nn.Dropout):  # some are not in the configuration
                module.p = 0.0
        rows, records = rows_and_records(kind, step.model.config)
        result |= movements(step, collate, rows, records)
    except REFUSALS as error:
        refused = refused or error
    if refused:
        return result | {"verdict": "refused", "reason": f"{type(refused).__name__}: {_words(refused)}"}
    if result["moved"] > 1 + TOLERANCE or result["others"] > ROUNDING or math.isnan(result["others"]):
        return result | {"verdict": "wrong"}
    if step.clipper.slow_parameters:
        result |= {"verdict": "slow", "slow": sorted(step.clipper.slow_parameters)}
    return result


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.removeprefix("per-example gradients are not possible for these parts of the model: ")[:400]


# --- all of them -----------------------------------------------------------------------------------------------------


def look_at_all(results: Path, names: Sequence[str] = (), trained: str = DEFAULT_LAYERS) -> None:
    """Look at all classes that have no result yet, or at the named classes and types; write a line for each.

    Classes of one type share a process of their own, so that neither a crash nor a class without end stops the rest.
    """
    done = set() if names else set(read_results(results))
    wanted = [kind for kind in species() if not names or {kind.class_name, kind.model_type} & set(names)]
    wanted = [kind for kind in wanted if (kind.task, kind.class_name) not in done]
    wanted.sort(key=lambda kind: kind.model_type)
    for _, group in groupby(wanted, key=lambda kind: kind.model_type):
        kinds = list(group)
        while kinds:
            process = os.fork()
            if process == 0:
                try:
                    for kind in kinds:
                        _write(results, kind, _within_time(kind, trained))
                finally:
                    os._exit(0)
            os.waitpid(process, 0)
            done = set(read_results(results))
            kinds = [kind for kind in kinds if (kind.task, kind.class_name) not in done]
            if kinds:
                _write(results, kinds.pop(0), {"verdict": "error", "reason": "ended the process"})


def read_results(results: Path) -> dict[tuple[str, str], Result]:
    """Read the last result of each class, by its task and name."""
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return {(line["task"], line["class"]): line for line in lines}


def _within_time(kind: Species, trained: str) -> Result:
    def end(*_: Any) -> None:
        raise TimeoutError(f"took more than {SECONDS_PER_CLASS} seconds")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS_PER_CLASS)
    start = time.perf_counter()
    try:
        return {**look_at(kind, trained), "seconds": round(time.perf_counter() - start, 1)}
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        return {"verdict": "error", "reason": f"{type(error).__name__}: {_words(error)} ({where})"}
    finally:
        signal.alarm(0)


def _write(results: Path, kind: Species, result: Result) -> None:
    line = {"task": kind.task, "class": kind.class_name, "model_type": kind.model_type, **result}
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="classes or types; all by default")
    parser.add_argument("--results", type=Path, required=True, help="a file of results, one line for each class")
    parser.add_argument("--write", type=Path, help="a document whose section on the zoo is written from the results")
    parser.add_argument("--trained", default=DEFAULT_LAYERS, help="trainable_layers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    look_at_all(options.results, options.names, options.trained)
    if options.write:
        write_section(options.write, read_results(options.results).values())
