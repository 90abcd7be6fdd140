"""Frozen trunks in 4 and 8 bits. What needs bitsandbytes or torchao, which nothing else does, runs where they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from architectures import DECODER, randomized
from oracles import clip_factors, clipped_sum_of, gradients_one_by_one, norms_of
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_dcsgd.checks.preflight import check_before_training
from hf_dcsgd.ghost import GhostClipper, UnsupportedModelError
from hf_dcsgd.sharding.groups import sharding_groups
from hf_dcsgd.step import PrivateStep
from hf_dcsgd.tasks.losses import per_example_losses


class PerTensor:
    """Named as torchao's."""


class PerRow:
    """Named as torchao's."""


def scaled_by(granularity: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    model[0].weight.act_quant_kwargs = SimpleNamespace(granularity=granularity)
    return model


def test_one_scale_for_the_whole_batch_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"0 \(Linear\): .*one scale for the whole batch \(PerTensor\)"):
        GhostClipper(scaled_by(PerTensor()))
    GhostClipper(scaled_by(PerRow()))


def test_a_function_of_the_whole_input_is_refused() -> None:
    model = scaled_by(PerRow())
    model[0].weight.input_quant_func = lambda inputs: inputs
    with pytest.raises(UnsupportedModelError, match="a function that may look at the whole batch"):
        GhostClipper(model)


def test_quantized_weights_are_not_sharded() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match=r"got 0.weight in torch.uint8.*leave fsdp out"):
        sharding_groups(model)


# --- with the packages -----------------------------------------------------------------------------------------------


def llama() -> nn.Module:
    config = hf.LlamaConfig(**{**DECODER, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4})
    return randomized(lambda: hf.LlamaForCausalLM(config))


def in_four_bits(model: nn.Module) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and "lm_head" not in name:
            parent, _, key = name.rpartition(".")
            small = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
            )
            small.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")
            setattr(model.get_submodule(parent), key, small.to("cpu"))
    return model


def by_torchao(config: str, **options: Any) -> Any:
    def quantize(model: nn.Module) -> nn.Module:
        ao = pytest.importorskip("torchao.quantization")
        granularity = {key: getattr(ao, value)() for key, value in options.items()}
        ao.quantize_(model.model.layers, getattr(ao, config)(**granularity))
        return model

    return quantize


def with_adapters(model: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return adapted


def rows(n: int = 4) -> dict[str, Tensor]:
    tokens = torch.randint(5, 60, (n, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


@pytest.mark.parametrize(
    "quantize",
    [in_four_bits, by_torchao("Int8WeightOnlyConfig")],
    ids=["bitsandbytes, 4 bits", "torchao, int8 weights"],
)
def test_adapters_on_quantized_weights_are_exact(quantize: Any) -> None:
    model = with_adapters(quantize(llama()))
    check_before_training(PrivateStep(model), {name: value[:1] for name, value in rows().items()})
    inputs, clipper = rows(), GhostClipper(model)
    labels = inputs.pop("labels")
    clipped_sum = clipper.zeros()
    with clipper:
        norms = clipper.norms(per_example_losses(model, model(**inputs), labels))
        factors = clip_factors(norms, 0.5 * float(norms.mean()))
        clipper.accumulate(factors, clipped_sum)
    gradients = gradients_one_by_one(model, inputs, labels, per_example_losses)
    torch.testing.assert_close(norms, norms_of(gradients).float(), rtol=1e-4, atol=1e-6)
    expected = clipped_sum_of(gradients, factors)
    for name, part in clipper.unflatten(clipped_sum).items():
        torch.testing.assert_close(part, expected[name].float(), rtol=1e-3, atol=1e-5)


def test_one_scale_for_the_batch_is_refused_by_torchao_as_well() -> None:
    quantize = by_torchao("Int8DynamicActivationInt8WeightConfig", granularity="PerTensor")
    with pytest.raises(UnsupportedModelError, match="one scale for the whole batch"):
        GhostClipper(with_adapters(quantize(llama())))
