"""The doctor on tiny models of many kinds: what it says must be what training would do."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers as hf
from architectures import DECODER, ENCODER, HIDDEN
from torch import nn

from hf_dcsgd.checks.step_cost import PeakMemory, measure_step
from hf_dcsgd.cli import diagnosis as doctor
from hf_dcsgd.cli import main
from hf_dcsgd.cli.doctor import TASKS
from hf_dcsgd.ghost import GhostClipper
from hf_dcsgd.tasks.layer_selection import select_trainable_layers

IMAGES = {"image_size": 16, "patch_size": 8, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2}


def saved(folder: Path, model: hf.PreTrainedModel) -> str:
    model.save_pretrained(folder)
    return str(folder)


def diagnose(folder: Path, model: hf.PreTrainedModel, **options) -> dict:
    return doctor.diagnose(saved(folder, model), **{"batch_size": 4, "sequence_length": 8, **options})


def test_a_bert_in_full(tmp_path: Path):
    model = hf.BertForSequenceClassification(hf.BertConfig(**ENCODER))
    found = diagnose(tmp_path, model)
    selected = select_trainable_layers(model)
    clipper = GhostClipper(model)
    assert found["class"] == "BertForSequenceClassification"
    assert found["task"] == "text-classification"
    assert found["refused"] == []
    assert found["trained_parameters"] == sum(model.get_parameter(name).numel() for name in selected)
    assert found["total_parameters"] == model.num_parameters()
    assert [group["name"] for group in found["groups"]] == ["bert.encoder.layer.1", "bert.pooler", "classifier"]
    assert sorted(name for names in found["rules"].values() for name in names) == sorted(clipper.rules())
    assert set(found["rules"]) == {"linear", "layer_norm"}
    assert found["slow_parameters"] == []
    assert found["shape"] == [8]
    step = found["step"]
    assert step["batch_size"] == 4
    assert 0 < step["seconds"] < 60
    assert 0 < step["plain_seconds"] < 60
    assert step["bytes"]["weights"] == 4 * model.num_parameters()
    assert step["bytes"]["gradient_optimizer_noise"] == 24 * found["trained_parameters"]
    assert step["bytes"]["total"] == sum(value for name, value in step["bytes"].items() if name != "total")
    json.dumps(found)


def test_the_memory_of_several_devices(tmp_path: Path):
    model = hf.BertForSequenceClassification(hf.BertConfig(**ENCODER))
    found = diagnose(tmp_path, model, devices=4)
    memory, trained = found["devices"]["bytes"], found["trained_parameters"]
    frozen = 4 * (found["total_parameters"] - trained)
    assert frozen / 4 <= memory["frozen"] <= frozen / 4 + 200, "rows that cannot be dealt out evenly"
    assert memory["trained"] == 4 * trained
    assert memory["activations"] == found["step"]["bytes"]["activations"]
    assert memory["total"] == sum(value for name, value in memory.items() if name != "total")
    assert "with fsdp each of 4 devices holds" in doctor.describe(found)
    everything = diagnose(tmp_path, model, devices=2, trainable_layers="all")
    assert "every parameter of this model is trained" in everything["refused"][0]


def test_an_adapter_on_its_base_model(tmp_path: Path):
    base = hf.BertForSequenceClassification(hf.BertConfig(**ENCODER))
    folder = saved(tmp_path / "base", base)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], base_model_name_or_path=folder)
    adapted = peft.get_peft_model(hf.AutoModelForSequenceClassification.from_pretrained(folder), config)
    adapted.save_pretrained(tmp_path / "adapter")
    found = doctor.diagnose(str(tmp_path / "adapter"), batch_size=4, sequence_length=8)
    assert found["class"] == "PeftModelForSequenceClassification"
    assert found["task"] == "text-classification"
    assert found["refused"] == []
    assert found["trainable_layers"] == "as_is"
    assert found["trained_parameters"] == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert found["step"]["measured_size"] == 4
    assert "lora" in doctor.describe(found)


def test_an_adapter_whose_base_model_is_gone(tmp_path: Path, capsys):
    base = hf.BertForSequenceClassification(hf.BertConfig(**ENCODER))
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "gone/base"}))
    assert main(["doctor", "--model", str(tmp_path)]) == 2
    assert "gone/base" in capsys.readouterr().err


MODELS = {
    "text-generation": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    ),
    "text-classification": lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**DECODER)),
    "fill-mask": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**ENCODER)),
    "question-answering": lambda: hf.DistilBertForQuestionAnswering(
        hf.DistilBertConfig(vocab_size=40, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=16)
    ),
    "token-classification": lambda: hf.BertForTokenClassification(hf.BertConfig(**ENCODER)),
    "text2text-generation": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    ),
    "image-classification": lambda: hf.ViTForImageClassification(hf.ViTConfig(**IMAGES)),
}


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, marks=() if task in ("text-generation", "image-classification") else pytest.mark.slow)
        for task in MODELS
    ],
)
def test_every_task_is_found_from_the_configuration(tmp_path: Path, task: str):
    found = diagnose(tmp_path, MODELS[task]())
    assert found["refused"] == []
    assert found["task"] == task
    assert found["step"]["measured_size"] == 4


def test_the_command_knows_every_task():
    assert set(TASKS) == set(MODELS)


def test_a_base_model_gets_the_head_that_is_asked_for(tmp_path: Path):
    found = diagnose(tmp_path, hf.BertModel(hf.BertConfig(**ENCODER)), task="token-classification")
    assert found["class"] == "BertForTokenClassification"
    assert found["loss"] == "token_classification"


@pytest.mark.slow
def test_regression_and_several_labels(tmp_path: Path):
    for name, settings in (("one", {"num_labels": 1}), ("many", {"problem_type": "multi_label_classification"})):
        model = hf.BertForSequenceClassification(hf.BertConfig(**{**ENCODER, **settings}))
        assert diagnose(tmp_path / name, model)["refused"] == []


def test_batch_normalization_is_refused_by_name(tmp_path: Path):
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    found = diagnose(tmp_path, hf.ResNetForImageClassification(config), trainable_layers="all")
    assert len(found["refused"]) == 1
    assert "statistics of the whole batch" in found["refused"][0]
    assert "resnet.encoder.stages.0.layers.0" in found["refused"][0]
    assert found["groups"]
    assert "step" not in found
    shown = doctor.describe(found)
    assert "REFUSED, training would not start:" in shown


def test_an_unknown_layer_is_refused_with_near_matches(tmp_path: Path, capsys: pytest.CaptureFixture):
    name = saved(tmp_path, hf.BertForSequenceClassification(hf.BertConfig(**ENCODER)))
    assert main(["doctor", "--model", name, "--trainable-layers", "poler"]) == 1
    shown = capsys.readouterr().out
    assert "'poler' matches no module" in shown
    assert "bert.pooler" in shown


@pytest.mark.slow
def test_slow_parameters_are_listed(tmp_path: Path):
    config = hf.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    found = diagnose(tmp_path, hf.T5ForConditionalGeneration(config), trainable_layers="all")
    assert found["refused"] == []
    if found["slow_parameters"]:
        assert "one backward per example (exact, slow)" in doctor.describe(found)
    biases = [name for name in found["slow_parameters"] if "relative_attention_bias" in name]
    assert biases == found["slow_parameters"]


def test_norms_that_disagree_with_autograd_are_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    norms = GhostClipper.norms
    monkeypatch.setattr(GhostClipper, "norms", lambda self, losses: norms(self, losses) * 1.01)
    found = diagnose(tmp_path, hf.BertForSequenceClassification(hf.BertConfig(**ENCODER)))
    assert "do not agree with autograd" in found["refused"][0]
    assert "step" not in found


def test_errors_of_usage_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main(["doctor", "--model", str(tmp_path / "nothing")]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "cannot load" in shown
    assert "save_pretrained" in shown
    assert main(["doctor", "--model", "x", "--batch-size", "0"]) == 2
    assert "expected --batch-size >= 1, got 0" in capsys.readouterr().err
    name = saved(tmp_path, hf.ViTForImageClassification(hf.ViTConfig(**IMAGES)))
    assert main(["doctor", "--model", name, "--task", "text-generation"]) == 2
    assert "for text-generation" in capsys.readouterr().err


def test_the_command_prints_text_or_json(tmp_path: Path, capsys: pytest.CaptureFixture):
    name = saved(tmp_path, hf.BertForSequenceClassification(hf.BertConfig(**ENCODER)))
    arguments = ["doctor", "--model", name, "--sequence-length", "6", "--batch-size", "4"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    for expected in (
        f"BertForSequenceClassification from {name}, for text-classification",
        f"{found['trained_parameters']:,} of {found['total_parameters']:,} parameters",
        "linear rule",
        "refused: nothing",
        "agree with autograd",
        "one step of 4 examples on cpu, estimated from 4",
        "the same step without privacy",
    ):
        assert expected in shown


# --- the cost of a step ----------------------------------------------------------------------------------------------


def test_peak_memory_counts_live_tensors_only():
    weight = torch.zeros(100)
    with PeakMemory() as memory:
        first = weight + 1  # 400 bytes
        view = first.view(10, 10)
        second = view * 2  # 800
        del first, view
        third = second.sum()  # 400 + 4
        del second
        assert memory.live == 4
    assert memory.peak == 800
    assert third.numel() == 1


def test_what_autograd_keeps_for_the_backward_is_counted():
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    inputs = torch.randn(10, 32)
    with PeakMemory() as memory:
        output = layers(inputs)
        assert memory.live == 6 * 10 * 32 * 4
        output.sum().backward()
        del output
        assert memory.live == sum(4 * p.numel() for p in layers.parameters())


def test_the_estimate_scales_with_the_batch_and_leaves_no_trace():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    clipper = GhostClipper(model)
    costs = {}
    for n in (8, 32):
        inputs = torch.randn(n, 20, 64)
        costs[n] = measure_step(
            clipper, lambda inputs=inputs: model(inputs).square().mean(dim=(1, 2)), measured_size=n, batch_size=32
        )
    assert all(p.grad is None for p in model.parameters())
    estimated, measured = costs[8]["bytes"]["activations"], costs[32]["bytes"]["activations"]
    assert estimated == pytest.approx(measured, rel=0.35)
    assert (
        costs[8]["bytes"]["weights"] == costs[32]["bytes"]["weights"] == 4 * sum(p.numel() for p in model.parameters())
    )
