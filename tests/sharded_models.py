"""Models of the tests of sharding, tiny ones and two of a real size."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from architectures import DECODER, randomized
from peft import LoraConfig, get_peft_model
from tiny_tasks import tiny_bert
from torch import Tensor, nn


def with_lora(model: nn.Module, task: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type=task))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zeros at first, so that nothing would reach the other half of an adapter
                nn.init.normal_(parameter, std=0.1)
    return adapted


def llama_lm() -> nn.Module:
    return with_lora(randomized(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER))), "CAUSAL_LM")


def qwen3_classifier() -> nn.Module:
    config = hf.Qwen3Config(**DECODER, head_dim=8)
    return with_lora(randomized(lambda: hf.Qwen3ForSequenceClassification(config)), "SEQ_CLS")


def tied_qwen3_lm() -> nn.Module:
    config = hf.Qwen3Config(**{**DECODER, "head_dim": 8, "tie_word_embeddings": True})
    return with_lora(randomized(lambda: hf.Qwen3ForCausalLM(config)), "CAUSAL_LM")


def bf16_llama_lm() -> nn.Module:
    """The trunk in half precision, the adapters in fp32."""
    adapted = with_lora(randomized(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER))).bfloat16(), "CAUSAL_LM")
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": tiny_bert,
    "llama": llama_lm,
    "qwen3": qwen3_classifier,
    "tied qwen3": tied_qwen3_lm,
    "bf16 llama": bf16_llama_lm,
}

LARGE: dict[str, Callable[[], nn.Module]] = {
    "bert-base": lambda: hf.BertForSequenceClassification(hf.BertConfig(num_labels=3)),
    "llama": lambda: with_lora(
        hf.LlamaForCausalLM(
            hf.LlamaConfig(
                vocab_size=32000,
                hidden_size=768,
                intermediate_size=2048,
                num_hidden_layers=4,
                num_attention_heads=12,
                num_key_value_heads=4,
            )
        ),
        "CAUSAL_LM",
    ),
}


class WritingBlock(nn.Module):
    """Writes its own weight anew, as it was."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(6, 6), writes

    def forward(self, features: Tensor) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.linear.weight.add_(0 * features.sum())
        return torch.tanh(self.linear(features))


class Blocks(nn.Module):
    def __init__(self, writes: bool = False, has_odd_parameter: bool = False, calls_head: bool = True) -> None:
        super().__init__()
        self.order = [0, 1]
        self.blocks = nn.ModuleList([WritingBlock(writes) for _ in range(2)]).requires_grad_(False)
        self.head, self.calls_head = nn.Linear(6, 3), calls_head
        self.odd = nn.Parameter(torch.ones(6)) if has_odd_parameter else None

    def forward(self, features: Tensor) -> Tensor:
        for number in self.order:
            features = self.blocks[number](features)
        features = features if self.odd is None else features * self.odd
        used = self.head(features)
        return used if self.calls_head else used + nn.functional.linear(features, self.head.weight)
