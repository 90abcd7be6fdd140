"""The zoo: no class of transformers is silently wrong, and the docs say what each of them is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from torch import Tensor, nn
from zoo_models import Species, species
from zoo_table import BEGIN, END, section, verdict

from hf_dcsgd.tasks.layer_selection import DEFAULT_LAYERS

DOCS = Path(__file__).parents[1] / "docs" / "supported_models.md"
BERT = Species("SequenceClassification", "bert", "BertForSequenceClassification")
# They raise errors of their own while they are checked.
OWN_ERRORS = {"ReformerForMaskedLM", "ReformerForSequenceClassification", "ReformerModelWithLMHead", "RwkvForCausalLM"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_none_is_silently_wrong(tmp_path: Path, count):
    """Takes about ten minutes on one core."""
    torch.set_num_threads(1)  # processes are forked
    zoo.look_at_all(tmp_path / "zoo.jsonl")
    results = zoo.read_results(tmp_path / "zoo.jsonl")
    assert set(results) == {(kind.task, kind.class_name) for kind in species()}
    assert not [result for result in results.values() if result["verdict"] == "wrong"]
    assert {result["class"] for result in results.values() if result["verdict"] == "error"} <= OWN_ERRORS
    found = [verdict(result) for result in results.values()]
    count("classes of transformers, exact under every added record", len(found) - found.count("refused"))
    count("classes of transformers, refused", found.count("refused"))


def test_a_sound_class_is_exact():
    result = zoo.look_at(BERT)
    assert result["verdict"] == "exact"
    assert result["moved"] <= 1 + zoo.TOLERANCE


class Centered(nn.Module):
    """Takes the mean of the batch off, but lets no gradient show it."""

    def __init__(self, inner: nn.Module, longest: int) -> None:
        super().__init__()
        self.inner, self.longest = inner, longest

    def forward(self, hidden: Tensor) -> Tensor:
        found = self.inner(hidden)
        return found - 3 * found.mean(dim=0).detach() if len(found) > self.longest else found


@pytest.mark.parametrize(("longest", "verdict"), [(0, "refused"), (4, "wrong")])
def test_a_coupled_class_is_found(monkeypatch: pytest.MonkeyPatch, longest: int, verdict: str):
    """In stacks of three it is found before training; what shows in larger ones alone, the zoo finds."""
    build = zoo.build

    def coupled(*args: object) -> nn.Module:
        model = build(*args)
        model.bert.pooler.dense = Centered(model.bert.pooler.dense, longest)
        return model

    monkeypatch.setattr(zoo, "build", coupled)
    assert zoo.look_at_layers(BERT, DEFAULT_LAYERS, {"hidden_dropout_prob": 0.0})["verdict"] == verdict


def test_the_section_of_the_docs():
    text = DOCS.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    written = text[text.index(BEGIN) : text.index(END)]
    for kind in species():
        assert kind.class_name in written, f"{kind.class_name} is not in {DOCS.name}: run tests/zoo.py --write"


def test_a_section_counts_each_class_once():
    line = {"task": "MaskedLM", "model_type": "t", "layers": DEFAULT_LAYERS}
    results = [
        {**line, "class": "A", "verdict": "exact"},
        {**line, "class": "B", "verdict": "slow", "slow": ["t.layer.3.table"]},
        {**line, "class": "C", "verdict": "exact", "layers": "head", "default_refused": "x (BatchNorm2d): y"},
        {**line, "class": "D", "verdict": "error", "reason": "RuntimeError: of its own"},
    ]
    lines = section(results).splitlines()
    assert "| `MaskedLM` | 4 | 1 | 1 | 1 | 1 | 0 | 0 |" in lines
    assert '| BatchNorm in what is trained | C | `trainable_layers="head"` |' in lines
    assert "| `*.table` | `t` |" in lines
