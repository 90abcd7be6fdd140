"""Made-up patient notes in the shape of QNLI: does this sentence of the note answer the question?

Nobody in here exists; but such notes are what one would want to keep private. Each row holds a question about one fact
of one patient, and a sentence about a patient. The label is `entailment` when the sentence answers the question and
`not_entailment` when it does not. Wrong sentences are near misses: another fact of the same patient (often with the
same kind of answer), the right topic without the answer, or the right fact of someone else. Validation rows use
surnames and wordings that training never shows. Names and wordings are in patient_notes.toml.
"""

from __future__ import annotations

import csv
import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LABELS = ("entailment", "not_entailment")
COLUMNS = ("question", "sentence", "label")
MATERIAL = tomllib.loads((Path(__file__).parent / "patient_notes.toml").read_text(encoding="utf-8"))
FACTS: dict[str, dict] = MATERIAL["facts"]

OPENING_SHARE = 0.3
# How a wrong sentence goes wrong, and how often.
NEAR_MISSES = {"same_kind": 0.4, "other_fact": 0.25, "mention": 0.2, "other_patient": 0.15}


@dataclass(frozen=True)
class Patient:
    name: str
    pronoun: str
    possessive: str


class NoteWriter:
    """Writes rows of one split. The same seed writes the same rows."""

    def __init__(self, seed: int, validation: bool = False) -> None:
        self._random = random.Random(f"{seed} {'validation' if validation else 'train'}")
        self._validation = validation
        people = [(first, "She", "her") for first in MATERIAL["women"]] + [
            (first, "He", "his") for first in MATERIAL["men"]
        ]
        # Every fourth surname is seen in validation only.
        surnames = [name for k, name in enumerate(MATERIAL["surnames"]) if (k % 4 == 3) == validation]
        self._patients = [Patient(f"{first} {last}", he, his) for first, he, his in people for last in surnames]

    def row(self) -> dict[str, str]:
        pick = self._random
        patient = pick.choice(self._patients)
        asked = pick.choice(list(FACTS))
        label = pick.choice(LABELS)
        question = self._wording(FACTS[asked]["questions"]).format(n=patient.name)
        sentence = self._statement(asked, patient) if label == "entailment" else self._near_miss(asked, patient)
        return {"question": question, "sentence": sentence, "label": label}

    def _near_miss(self, asked: str, patient: Patient) -> str:
        pick = self._random
        how = pick.choices(list(NEAR_MISSES), list(NEAR_MISSES.values()))[0]
        if how == "mention":
            return self._sentence(self._wording(FACTS[asked]["mentions"]), patient)
        if how == "other_patient":
            first = patient.name.split()[0]
            others = [p for p in self._patients if not p.name.startswith(first) and p.pronoun != patient.pronoun]
            return self._statement(asked, pick.choice(others), by_name=True)
        kind = FACTS[asked]["kind"]
        near = [name for name in FACTS if name != asked and (FACTS[name]["kind"] == kind) == (how == "same_kind")]
        return self._statement(pick.choice(near), patient)

    def _statement(self, fact: str, patient: Patient, by_name: bool = False) -> str:
        wordings = FACTS[fact]["statements"]
        if by_name:  # "The scales showed 51 kilos" does not say whose
            wordings = [wording for wording in wordings if any(name in wording for name in ("{N}", "{n}", "{H}"))]
        value = self._random.choice(MATERIAL["values"][FACTS[fact]["values"]])
        return self._sentence(self._wording(wordings), patient, value, by_name)

    def _sentence(self, wording: str, patient: Patient, value: str = "", by_name: bool = False) -> str:
        pick = self._random
        subject = patient.name if by_name or pick.random() < 0.6 else patient.pronoun
        owner = f"{patient.name}'s" if by_name or pick.random() < 0.4 else patient.possessive.capitalize()
        text = wording.format(N=subject, n=patient.name, H=owner, h=patient.possessive, v=value)
        opening = pick.choice(MATERIAL["openings"]) if pick.random() < OPENING_SHARE else ""
        return opening + text[0].upper() + text[1:]

    def _wording(self, wordings: Sequence[str]) -> str:
        return self._random.choice(wordings if self._validation else wordings[:-1])


def generate_rows(count: int, *, seed: int = 0, validation: bool = False) -> list[dict[str, str]]:
    """`count` different rows, near half of them of either label."""
    writer = NoteWriter(seed, validation)
    rows: dict[tuple[str, str], dict[str, str]] = {}
    while len(rows) < count:
        row = writer.row()
        rows.setdefault((row["question"], row["sentence"]), row)
    return list(rows.values())


def write_tsv(path: Path, rows: list[dict[str, str]]) -> None:
    """In the format of GLUE's own QNLI files: tabs, a header with an index, no quoting."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE, lineterminator="\n")
        writer.writerow(["index", *COLUMNS])
        writer.writerows([index, *(row[column] for column in COLUMNS)] for index, row in enumerate(rows))
