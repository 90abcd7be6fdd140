"""The card, matched in full from a fixed report; and what a trainer puts into it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import yaml
from huggingface_hub import ModelCard
from simulated_runs import simulate
from tiny_tasks import accuracy, feature_trainer, text_trainer, tiny_bert

from hf_dcsgd.clipping import STRATEGIES
from hf_dcsgd.reporting import model_card, report, snippets
from hf_dcsgd.reporting.model_card import CardFacts, render_card

REPORT: dict[str, Any] = {
    "format": 1,
    "guarantee": {
        "holds": True,
        "sentence": "This is the guarantee.",
        "epsilon": 7.9999,
        "delta": 9.547e-06,
        "unit": "example",
        "neighboring": "add or remove one example",
        "sampling": "poisson",
        "accountant": "rdp",
        "opt_outs": [],
    },
    "budget": {
        "accountant": "rdp",
        "epsilon": 7.9999,
        "delta": 9.547e-06,
        "target_epsilon": 8.0,
        "planned_epsilon": 7.9999,
        "other_accountant": "pld",
        "other_epsilon": 6.56521,
    },
    "steps": {"planned": 2045, "charged": 2047, "released": 2045, "lost": 2, "torn_ledger_lines": 0},
    "sampling": {
        "method": "poisson",
        "dataset_size": 104743,
        "expected_batch_size": 256,
        "sampling_rate": 256 / 104743,
        "privacy_unit": None,
    },
    "noise": {
        "noise_multiplier": 0.48978,
        "grad_noise_multiplier": 0.49214,
        "side_noise_multipliers": {"histogram_noise_multiplier": 5.0},
        "loss_clip": None,
    },
    "clipping": {"strategy": "dc_sgd_e", "settings": {"clip_threshold": 1.0, "histogram_bins": 20}},
    "layout": {"world_size": 2, "gradient_accumulation_steps": 4},
    "model": {
        "num_parameters": 7680002,
        "trainable_layers": "last_encoder_pooler_classifier",
        "sharded_parameters": 0,
    },
    "earlier_spending": None,
    "earlier_runs": {"runs": [], "composed_epsilon": 9.12345, "composed_delta": 9.547e-06},
    "software": {"python": "3.11.7", "torch": "2.13.0"},
    "trajectory": {},
    "epsilon_over_steps": {},
    "notes": ["The evaluation data are not protected."],
}
FACTS = CardFacts(
    model_name="bert-private",
    usage='model = load("someone/bert-private")',
    arguments={"clipping": "dc_sgd_e", "target_epsilon": 8.0, "learning_rate": 0.001},
    metrics={"loss": 0.51, "accuracy": 0.7629},
    task="text-classification",
    base_model="bert-base-uncased",
    language="en",
    license="apache-2.0",
    tags=["generated_from_trainer"],
    dataset_ids=["glue"],
    dataset_names=["GLUE QNLI"],
    report_files=["privacy_report.json", "privacy_report.html"],
    trajectory="clip_threshold.png",
)
CARD = """\
---
base_model: bert-base-uncased
datasets:
- glue
language:
- en
library_name: transformers
license: apache-2.0
metrics:
- accuracy
pipeline_tag: text-classification
tags:
- differential-privacy
- dc-sgd
- hf-dcsgd
- generated_from_trainer
privacy:
  guarantee: differential-privacy
  epsilon: 8.0
  delta: 9.547e-06
  unit: example
  neighboring: add-remove
  sampling: poisson
  accountant: rdp
  epsilon_pld: 6.566
  noise_multiplier: 0.48978
  grad_noise_multiplier: 0.49214
  sampling_rate: 0.002444077408514173
  dataset_size: 104743
  steps: 2047
  clipping: dc_sgd_e
  opt_outs: []
model-index:
- name: bert-private
  results:
  - task:
      type: text-classification
    dataset:
      name: GLUE QNLI
      type: glue
    metrics:
    - type: loss
      value: 0.51
    - type: accuracy
      value: 0.7629
---

# bert-private

[bert-base-uncased](https://huggingface.co/bert-base-uncased), fine-tuned with DC-SGD-E and differential privacy on \
GLUE QNLI.

## Privacy

**This is the guarantee.**

| | |
|---|---|
| ε (RDP accountant) | 8 |
| ε (PLD accountant) | 6.566 |
| δ | 9.547e-06 |
| unit of privacy | one training example, added or removed |
| sampling | Poisson, q = B/N = 0.0024441 |
| training examples N | 104,743 |
| expected batch size B | 256 |
| steps charged / planned | 2,047 / 2,045 |
| steps charged but lost | 2 |
| noise multiplier σ (accounted) | 0.48978 |
| noise multiplier of the gradient σ_T | 0.49214 |
| histogram noise multiplier | 5 |
| clipping | dc_sgd_e, clip_threshold 1, histogram_bins 20 |
| trained parameters d | 7,680,002 (last_encoder_pooler_classifier) |
| processes | 2 |

Earlier runs were charged in the same directory. If they used the same data, all of them together cost
ε = 9.124 at δ = 9.547e-06.

- The evaluation data are not protected.

The full statement is in [`privacy_report.json`](privacy_report.json) and [`privacy_report.html`](privacy_report.html).

![The clipping threshold of each step](clip_threshold.png)

## Evaluation

| metric | value |
|---|---|
| loss | 0.51 |
| accuracy | 0.7629 |

## How to use

```python
model = load("someone/bert-private")
```

## How to reproduce

```python
from hf_dcsgd import DCSGDTrainer, DCSGDTrainingArguments

args = DCSGDTrainingArguments(
    output_dir="out",
    clipping="dc_sgd_e",
    target_epsilon=8.0,
    learning_rate=0.001,
)
trainer = DCSGDTrainer(model, args, train_dataset=train_dataset)
trainer.train()
```

It ran on 2 processes.
Noise and sampling come from the operating system and are never stored, so that another run gives another model.
Versions: python 3.11.7, torch 2.13.0.

## Citation

```bibtex
@misc{wei-dc-sgd,
  title  = {DC-SGD: Differentially Private SGD with Dynamic Clipping through Gradient Norm Distribution Estimation},
  author = {Chengkun Wei and Weixian Li and Chen Gong and Wenzhi Chen},
}
```
"""


def test_the_card_in_full():
    assert render_card(REPORT, FACTS) == CARD


def test_huggingface_hub_reads_the_metadata_back():
    card = ModelCard(render_card(REPORT, FACTS))
    assert card.data.library_name == "transformers"
    assert card.data.privacy["epsilon"] == 8.0
    assert [(result.metric_type, result.metric_value) for result in card.data.eval_results] == [
        ("loss", 0.51),
        ("accuracy", 0.7629),
    ]


def test_a_card_without_a_guarantee_says_so_first_and_states_no_epsilon():
    opted_out = {
        **REPORT["guarantee"],
        "holds": False,
        "sentence": "There is no privacy guarantee for this run, because of zero_noise.",
        "epsilon": None,
        "delta": None,
        "opt_outs": [{"name": "zero_noise", "text": "No noise was added."}],
    }
    card = render_card({**REPORT, "guarantee": opted_out}, FACTS)
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["privacy"] == {"guarantee": "none", "opt_outs": ["zero_noise"]}
    assert "differential-privacy" not in metadata["tags"]
    body = card.split("## Privacy")[1]
    assert body.strip().startswith("> ### ⚠️ THIS MODEL HAS NO PRIVACY GUARANTEE")
    assert "> - `zero_noise`: No noise was added." in body
    assert "| ε (RDP accountant), nominal, NOT a guarantee | 8 |" in body
    assert "fine-tuned with DC-SGD-E on" in card
    assert "come from the operating system" not in card


def test_a_card_with_little_to_say():
    facts = CardFacts(model_name="model", usage="pass", arguments={})
    card = render_card({**REPORT, "earlier_runs": None, "layout": {"world_size": 1}}, facts)
    metadata = yaml.safe_load(card.split("---")[1])
    assert "model-index" not in metadata
    for absent in ("## Evaluation", "![", "full statement", "Earlier runs", "It ran on", "None"):
        assert absent not in card
    assert "A model, trained with DC-SGD-E and differential privacy." in card


def test_an_earlier_run_without_a_guarantee_is_not_composed():
    earlier = {"runs": [], "composed_epsilon": None, "composed_delta": 1e-5}
    assert "an unbounded ε" in render_card({**REPORT, "earlier_runs": earlier}, FACTS)


RUN = {"clipping": "fixed", "charged": 40, "epsilon": 1.23456, "delta": 1e-05, "accountant": "rdp", "opt_outs": []}


def test_a_card_tells_of_what_the_weights_had_spent_before():
    counted = {"runs": [RUN, {**RUN, "charged": 2}], "dismissed": None}
    card = render_card({**REPORT, "earlier_spending": counted}, FACTS)
    metadata = yaml.safe_load(card.split("---")[1])["privacy"]
    assert metadata["earlier_spending"] == "counted"
    assert metadata["epsilon"] == 8.0
    assert "epsilon_pld" not in metadata  # of this run alone
    assert "fixed, 40 steps (ε = 1.235 at δ = 1e-05); \nfixed, 2 steps" in card
    assert "| ε (RDP accountant), this run alone | 8 |" in card
    dismissed = {"runs": [RUN], "dismissed": "other_data"}
    card = render_card({**REPORT, "earlier_spending": dismissed}, FACTS)
    assert "(`earlier_spending=other_data`)" in card
    assert yaml.safe_load(card.split("---")[1])["privacy"]["earlier_spending"] == "other_data"


def test_names_of_earlier_runs_are_escaped():
    """They come from the configuration of a model that anybody may have written."""
    evil = {**RUN, "clipping": "</p><script>\n# evil", "opt_outs": ["[x](javascript:y)"]}
    card = render_card({**REPORT, "earlier_spending": {"runs": [evil], "dismissed": None}}, FACTS)
    assert "<script>" not in card
    assert "\n# evil" not in card
    assert "[x](" not in card


# --- what a trainer knows --------------------------------------------------------------------------------------------


def test_arguments_leave_out_seeds_tokens_and_paths(tmp_path: Path):
    trainer = feature_trainer(
        tmp_path,
        seed=123454321,
        data_seed=123454322,
        unsafe_noise_seed=123454323,
        hub_token="hf_secret",
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        clipping="dc_sgd_p",
        percentile=0.3,
    )
    assert model_card.training_arguments(trainer.args) == {
        "clipping": "dc_sgd_p",
        "recipe": "none",
        "accountant": "rdp",
        "scale_free_gradient": False,
        "noise_multiplier": 1.0,
        "percentile": 0.3,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 1,
        "learning_rate": 0.001,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
    }


def test_metrics_are_those_of_the_last_evaluation():
    history = [
        {"eval_loss": 3.0, "eval_accuracy": 0.1, "step": 1},
        {"loss": 0.7, "epsilon": 1.0, "step": 2},
        {"eval_loss": 0.5, "eval_f1": 1, "eval_runtime": 2.0, "eval_samples_per_second": 3.0, "epoch": 1.0, "step": 2},
        {"train_loss": 0.6, "train_runtime": 1.0, "step": 2},
    ]
    assert model_card.last_metrics(history) == {"loss": 0.5, "f1": 1.0}
    assert model_card.last_metrics([]) == {}


def test_a_trainer_writes_card_report_and_picture(tmp_path: Path):
    trainer = text_trainer(tmp_path, log_train_loss="raw", trainer_options={"compute_metrics": accuracy})
    trainer.train()
    trainer.evaluate()
    (tmp_path / "privacy_report.json").write_text("of an earlier run")
    trainer.create_model_card(model_name="tiny", tags="mine", dataset="letters", dataset_tags="someone/letters")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.tags == ["dc-sgd", "hf-dcsgd", "mine", "generated_from_trainer"]
    assert card.data.privacy == {"guarantee": "none", "opt_outs": ["raw_train_loss"]}
    assert [result.dataset_type for result in card.data.eval_results] == ["someone/letters"] * 2
    assert json.loads((tmp_path / "privacy_report.json").read_text()) == trainer.privacy_report()
    assert (tmp_path / "clip_threshold.png").read_bytes().startswith(b"\x89PNG")
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logged
    for entry in logged:
        entry["loss"] = 918273.645
    trainer.create_model_card(model_name="tiny", tags="mine", dataset="letters", dataset_tags="someone/letters")
    assert (tmp_path / "README.md").read_text() == str(card), "the card depends on the raw training loss"


def test_a_plain_module_and_a_strategy_without_a_threshold(tmp_path: Path, no_report_page: None):
    trainer = feature_trainer(tmp_path, clipping="auto_clip")
    trainer.train()
    (tmp_path / "clip_threshold.png").write_bytes(b"of an earlier run")
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "of your FeatureClassifier" in card
    assert "![" not in card
    assert not (tmp_path / "clip_threshold.png").exists()


def test_there_is_no_card_without_a_run(tmp_path: Path):
    with pytest.raises(RuntimeError, match="expected a ledger"):
        feature_trainer(tmp_path).create_model_card()


def test_usage_of_an_adapter_names_its_base():
    text = snippets.usage(tiny_bert(), "someone/lora", "bert-base-uncased", adapter=True)
    assert 'BertForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=3)' in text
    assert "AutoTokenizer" not in text
    assert 'PeftModel.from_pretrained(base, "someone/lora")' in text


def test_code_that_makes_the_model_again_runs(tmp_path: Path):
    base = tiny_bert()
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["query", "value"], use_dora=True, bias="lora_only"
    )
    adapted = peft.get_peft_model(base, config)
    code = snippets.model_code(base, str(tmp_path / "base"), adapted.peft_config["default"])
    made: dict[str, Any] = {}
    exec(code, made)
    assert {n: p.shape for n, p in made["model"].named_parameters()} == {
        n: p.shape for n, p in adapted.named_parameters()
    }
    adapted.save_pretrained(tmp_path / "adapter")
    exec(snippets.usage(base, str(tmp_path / "adapter"), str(tmp_path / "base"), adapter=True), made)
    assert made["model"].peft_config["default"].r == 2


def test_a_folder_on_this_machine_is_no_base_model_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert model_card._is_repo_id("tiny")
    (tmp_path / "tiny").mkdir()
    assert not model_card._is_repo_id("tiny")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_a_card(tmp_path: Path, strategy: str):
    simulate(tmp_path, clipping=strategy, loss_clip=2.0)
    card = render_card(report.build_report(tmp_path), dataclasses.replace(FACTS, trajectory=None))
    assert f"| clipping | {strategy}" in card
    assert "| loss noise multiplier |" in card
