"""Made-up messages to a doctor's practice: does the writer report a health problem of their own?

Nobody in here exists; but such messages are what one would want to keep private, and a practice may want to sort them.
The rows have the shape of SST-2: a sentence and a label, `own_health` or `other`. Half of the others speak of the same
pains, illnesses and medicines, only not of the writer's own, or not any more; so the topic alone does not give the
label. Validation rows use wordings and words that training never shows. Both come from patient_messages.toml.
"""

from __future__ import annotations

import csv
import random
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

LABELS = ("other", "own_health")
COLUMNS = ("sentence", "label")
MATERIAL = tomllib.loads((Path(__file__).parent / "patient_messages.toml").read_text(encoding="utf-8"))
HELD_OUT_WORDINGS = 3
HELD_OUT_WORDS = 5  # one in five
OPENING_SHARE, CLOSING_SHARE = 0.4, 0.4


class MessageWriter:
    """Writes rows of one split. The same seed writes the same rows."""

    def __init__(self, seed: int, validation: bool = False) -> None:
        self._random = random.Random(f"{seed} {'validation' if validation else 'train'}")
        self._validation = validation
        self._kinds = {label: [kind for kind in MATERIAL["kinds"] if kind["label"] == label] for label in LABELS}
        self._is_new = False

    def row(self) -> dict[str, str]:
        """One row; in validation, one with a wording or a word that training never shows."""
        while True:
            self._is_new = False
            row = self._any_row()
            if self._is_new == self._validation:
                return row

    def _any_row(self) -> dict[str, str]:
        pick = self._random
        label = pick.choice(LABELS)
        kinds = self._kinds[label]
        kind = pick.choices(kinds, [kind["share"] for kind in kinds])[0]
        text = self._one_of(kind["wordings"], len(kind["wordings"]) - HELD_OUT_WORDINGS)
        if pick.random() < OPENING_SHARE:
            text = pick.choice(MATERIAL["openings"]) + text
        if pick.random() < CLOSING_SHARE:
            text += pick.choice(MATERIAL["closings"])
        text = re.sub(r"\{(\w+)\}", lambda slot: self._word(slot[1]), text)
        text = re.sub(r"\b(my|the|more) an? ", r"\1 ", text)  # "my a dry cough"
        return {"sentence": text[0].upper() + text[1:], "label": label}

    def _word(self, name: str) -> str:
        words = MATERIAL["words"][name]
        return self._one_of(words, len(words) - len(words) // HELD_OUT_WORDS)

    def _one_of(self, choices: Sequence[str], seen: int) -> str:
        """One of the first `seen` in training, one of all in validation."""
        place = self._random.randrange(len(choices) if self._validation else seen)
        self._is_new |= place >= seen
        return choices[place]


def generate_rows(count: int, *, seed: int = 0, validation: bool = False) -> list[dict[str, str]]:
    """`count` different rows, near half of them of either label."""
    writer = MessageWriter(seed, validation)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        row = writer.row()
        rows.setdefault(row["sentence"], row)
    return list(rows.values())


def write_tsv(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """In the format of GLUE's own files: a header, tabs, no quoting."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([row[column] for column in COLUMNS] for row in rows)
