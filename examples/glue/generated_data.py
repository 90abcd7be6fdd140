"""Generate messages to a doctor's practice: does the writer report a health problem of their own?

Nobody in here exists; but such messages are what one would want to keep private, and a practice may want to sort them.
The rows have the shape of SST-2: a sentence and a label, `own_health` or `other`. Half of the others speak of the same
pains, illnesses and medicines, only not of the writer's own, or not any more; so the topic alone does not give the
label. Validation rows use wordings and words that training never shows. Both come from patient_messages.toml.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

LABELS = ("other", "own_health")
MATERIAL = tomllib.loads((Path(__file__).parent / "patient_messages.toml").read_text(encoding="utf-8"))
HELD_OUT_WORDINGS = 3
HELD_OUT_WORDS = 5  # one in five
OPENING_SHARE, CLOSING_SHARE = 0.4, 0.4


def generate_rows(count: int, *, seed: int = 0, validation: bool = False) -> list[dict[str, str]]:
    """Return `count` different rows, near half of them of either label; the same seed gives the same rows."""
    pick = random.Random(f"{seed} {'validation' if validation else 'train'}")
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        row, is_new = _any_row(pick, validation)
        if is_new == validation:
            rows.setdefault(row["sentence"], row)
    return list(rows.values())


def _any_row(pick: random.Random, validation: bool) -> tuple[dict[str, str], bool]:
    """Return a row, and whether it has a wording or a word that training never shows."""
    is_new = False

    def one_of(choices: Sequence[str], held_out: int) -> str:
        nonlocal is_new
        seen = len(choices) - held_out
        place = pick.randrange(len(choices) if validation else seen)
        is_new |= place >= seen
        return choices[place]

    def word(slot: re.Match[str]) -> str:
        words = MATERIAL["words"][slot[1]]
        return one_of(words, len(words) // HELD_OUT_WORDS)

    label = pick.choice(LABELS)
    kinds = [kind for kind in MATERIAL["kinds"] if kind["label"] == label]
    kind = pick.choices(kinds, [kind["share"] for kind in kinds])[0]
    text = one_of(kind["wordings"], HELD_OUT_WORDINGS)
    if pick.random() < OPENING_SHARE:
        text = pick.choice(MATERIAL["openings"]) + text
    if pick.random() < CLOSING_SHARE:
        text += pick.choice(MATERIAL["closings"])
    text = re.sub(r"\{(\w+)\}", word, text)
    text = re.sub(r"\b(my|the|more) an? ", r"\1 ", text)  # "my a dry cough"
    return {"sentence": text[0].upper() + text[1:], "label": label}, is_new


def write_tsv(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Write the format of GLUE's own files: a header, tabs, no quoting."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["sentence\tlabel", *(f"{row['sentence']}\t{row['label']}" for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
