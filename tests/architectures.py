"""Tiny random models of many architectures, each with a padded batch: the table other tests walk through.

Everything is offline and builds in well under a second. Weights are random on purpose, also where Hugging Face would
start from zeros or ones (biases, norm weights, LoRA's B), so that no gradient vanishes by accident of initialization.
`batch` returns the inputs *without* labels, and the labels apart, as `per_example_losses` wants them.
Most transformers models cannot run a forward on zero examples (their reshapes cannot infer a size), though `batch` can
make one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

VOCAB, HIDDEN, HEADS, LAYERS, LENGTH, NUM_LABELS = 60, 16, 2, 2, 11, 3
FIRST_FREE_TOKEN, LAST_FREE_TOKEN = 5, 25  # few enough for repeated tokens within an example; below are special tokens
IMAGE_SIZE = 16

Labels = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Architecture:
    """`task` is one of the loss kinds of `hf_dcsgd.tasks.losses`, as this table's labels ask for."""

    name: str
    task: str
    build: Callable[[], nn.Module]
    batch: Callable[..., tuple[dict[str, Tensor], Labels]]  # batch(model, n=4, seed=0)


# --- batches ---------------------------------------------------------------------------------------------------------


def lengths_for(n: int, longest: int = LENGTH) -> list[int]:
    """Unequal lengths, the first one full, none below 4: 11, 8, 5, 10, 7, 4, 9, ..."""
    return [4 + (longest - 4 - 3 * i) % (longest - 3) for i in range(n)]


def padded_tokens(
    n: int, generator: torch.Generator, pad_token: int = 0, left: bool = False, longest: int = LENGTH
) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of shape (n, longest), padded on one side."""
    mask = (torch.arange(longest) < torch.tensor(lengths_for(n, longest), dtype=torch.long).unsqueeze(-1)).long()
    mask = mask.flip(-1) if left else mask
    tokens = torch.randint(FIRST_FREE_TOKEN, LAST_FREE_TOKEN, (n, longest), generator=generator)
    return tokens.where(mask.bool(), pad_token), mask


def _labels_for(task: str, tokens: Tensor, mask: Tensor, generator: torch.Generator) -> Labels:
    n, length = tokens.shape
    if task == "single_label_classification":
        return torch.randint(NUM_LABELS, (n,), generator=generator)
    if task == "token_classification":
        return torch.randint(NUM_LABELS, (n, length), generator=generator).where(mask.bool(), -100)
    if task == "masked_lm":
        # Every third token is asked for: at least one per row, and not as many in each.
        return tokens.where(mask.bool() & (torch.arange(length) % 3 == 1), -100)
    if task == "causal_lm":
        return tokens.where(mask.bool(), -100)
    if task == "question_answering":
        start = torch.randint(2, (n,), generator=generator)
        return {"start_positions": start, "end_positions": start + 2}
    raise ValueError(f"no labels for task {task!r}")


def text_batch(
    model: nn.Module, n: int = 4, seed: int = 0, *, task: str, segments: bool = False, left: bool = False
) -> tuple[dict[str, Tensor], Labels]:
    generator = torch.Generator().manual_seed(seed)
    tokens, mask = padded_tokens(n, generator, _pad_token(model), left)
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if segments:
        inputs["token_type_ids"] = (torch.arange(LENGTH) >= 3).long() * mask
    return inputs, _labels_for(task, tokens, mask, generator)


def seq2seq_batch(model: nn.Module, n: int = 4, seed: int = 0) -> tuple[dict[str, Tensor], Labels]:
    generator = torch.Generator().manual_seed(seed)
    pad_token = _pad_token(model)
    tokens, mask = padded_tokens(n, generator, pad_token)
    # Targets flipped, so that the longest source does not go with the longest target.
    target, target_mask = (x.flip(0) for x in padded_tokens(n, generator, pad_token, longest=LENGTH - 2))
    labels = target.where(target_mask.bool(), -100)
    start = torch.full((n, 1), model.config.decoder_start_token_id)
    decoder_input_ids = torch.cat([start, target[:, :-1]], dim=1)
    inputs = {"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": decoder_input_ids}
    return inputs, labels


def image_batch(model: nn.Module, n: int = 4, seed: int = 0) -> tuple[dict[str, Tensor], Labels]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(n, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    return {"pixel_values": pixels}, torch.randint(NUM_LABELS, (n,), generator=generator)


def _pad_token(model: nn.Module) -> int:
    pad_token = getattr(getattr(model, "config", None), "pad_token_id", None)
    return 0 if pad_token is None else pad_token


# --- models ----------------------------------------------------------------------------------------------------------

ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * HIDDEN,
    "max_position_embeddings": 32,
    "num_labels": NUM_LABELS,
}
DECODER = {**ENCODER, "num_key_value_heads": 1, "use_cache": False, "pad_token_id": 0}
NEO_X = {key: value for key, value in DECODER.items() if key != "num_key_value_heads"}


def randomized(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model that `make` builds, with noise on every parameter; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _from_config(model_class: str, config_class: str, settings: dict[str, Any]) -> nn.Module:
    config = getattr(hf, config_class)(**settings)
    return randomized(lambda: getattr(hf, model_class)(config))


def _lora(model_class: str, config_class: str, settings: dict[str, Any], lora: dict[str, Any]) -> nn.Module:
    config = getattr(hf, config_class)(**settings)
    adapter = LoraConfig(r=3, lora_alpha=6, lora_dropout=0.0, **lora)
    return randomized(lambda: get_peft_model(getattr(hf, model_class)(config), adapter))


class ResidualBlock(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False, groups=2)
        self.norm2 = nn.GroupNorm(4, width)
        self.shortcut = nn.Conv2d(width_in, width, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


class GroupNormResNet(nn.Module):
    """A small ResNet with GroupNorm in place of BatchNorm; returns its logits as a bare tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(4, 8)
        self.blocks = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2))
        self.classifier = nn.Linear(16, NUM_LABELS)

    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden = self.blocks(torch.relu(self.norm(self.stem(pixel_values))))
        return self.classifier(hidden.mean(dim=(2, 3)))


class LSTMClassifier(nn.Module):
    """Right-padded text through a two-layer LSTM, averaged over the real tokens; returns its logits as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN, padding_idx=0)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, num_layers=2, batch_first=True)
        self.classifier = nn.Linear(HIDDEN, NUM_LABELS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        hidden, _ = self.lstm(self.embedding(input_ids))
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (self.classifier((hidden * mask).sum(dim=1) / mask.sum(dim=1)),)


# --- the table -------------------------------------------------------------------------------------------------------

ARCHITECTURES: dict[str, Architecture] = {}


def _add(name: str, task: str, build: Callable[[], nn.Module], batch: Callable[..., Any]) -> None:
    ARCHITECTURES[name] = Architecture(name, task, build, batch)


def _add_text(
    name: str, model_class: str, config_class: str, settings: dict[str, Any], task: str, **batch_options: bool
) -> None:
    build = partial(_from_config, model_class, config_class, settings)
    _add(name, task, build, partial(text_batch, task=task, **batch_options))


CLASSIFY = "single_label_classification"

_add_text("bert", "BertForSequenceClassification", "BertConfig", ENCODER, CLASSIFY, segments=True)
_add_text("bert_masked_lm", "BertForMaskedLM", "BertConfig", ENCODER, "masked_lm", segments=True)
_add_text("bert_token", "BertForTokenClassification", "BertConfig", ENCODER, "token_classification", segments=True)
_add_text(
    "bert_qa",
    "BertForQuestionAnswering",
    "BertConfig",
    {**ENCODER, "num_labels": 2},
    "question_answering",
    segments=True,
)
_add_text("roberta", "RobertaForSequenceClassification", "RobertaConfig", ENCODER, CLASSIFY)
_add_text(
    "distilbert",
    "DistilBertForSequenceClassification",
    "DistilBertConfig",
    {
        "vocab_size": VOCAB,
        "dim": HIDDEN,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "hidden_dim": 2 * HIDDEN,
        "max_position_embeddings": 32,
        "num_labels": NUM_LABELS,
    },
    CLASSIFY,
)
# embedding_size differs from hidden_size, as in electra-small and albert: there is a projection in between.
_add_text(
    "electra",
    "ElectraForSequenceClassification",
    "ElectraConfig",
    {**ENCODER, "embedding_size": 8},
    CLASSIFY,
    segments=True,
)
_add_text(
    "albert",
    "AlbertForSequenceClassification",
    "AlbertConfig",
    {**ENCODER, "embedding_size": 8, "num_hidden_groups": 1, "classifier_dropout_prob": 0.1},
    CLASSIFY,
    segments=True,
)
# The settings of deberta-v3: relative positions pass through the shared key/query projections, without a batch axis.
DEBERTA_V3 = {
    **ENCODER,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "max_relative_positions": -1,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
_add_text("deberta_v2", "DebertaV2ForSequenceClassification", "DebertaV2Config", DEBERTA_V3, CLASSIFY)
_add_text("deberta_v2_absolute", "DebertaV2ForSequenceClassification", "DebertaV2Config", ENCODER, CLASSIFY)
_add_text("mpnet", "MPNetForSequenceClassification", "MPNetConfig", ENCODER, CLASSIFY)
_add_text(
    "modernbert",
    "ModernBertForSequenceClassification",
    "ModernBertConfig",
    {**ENCODER, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    CLASSIFY,
)
_add_text(
    "xlnet",
    "XLNetForSequenceClassification",
    "XLNetConfig",
    {
        "vocab_size": VOCAB,
        "d_model": HIDDEN,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "d_inner": 2 * HIDDEN,
        "num_labels": NUM_LABELS,
        "use_mems_eval": False,
        "use_mems_train": False,
    },
    CLASSIFY,
    segments=True,
    left=True,  # XLNet classifies from its last token; its mask_emb takes no part in the forward
)
GPT2 = {
    "vocab_size": VOCAB,
    "n_positions": 32,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "num_labels": NUM_LABELS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_add_text("gpt2", "GPT2ForSequenceClassification", "GPT2Config", GPT2, CLASSIFY)
_add_text("gpt2_lm_tied", "GPT2LMHeadModel", "GPT2Config", {**GPT2, "tie_word_embeddings": True}, "causal_lm")
_add_text(
    "opt",
    "OPTForCausalLM",
    "OPTConfig",
    {**NEO_X, "ffn_dim": 2 * HIDDEN, "word_embed_proj_dim": HIDDEN, "pad_token_id": 1},
    "causal_lm",
)
_add_text("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", NEO_X, "causal_lm")
_add_text("llama", "LlamaForCausalLM", "LlamaConfig", DECODER, "causal_lm")
_add_text("llama_classifier", "LlamaForSequenceClassification", "LlamaConfig", DECODER, CLASSIFY)
_add_text("qwen3", "Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}, "causal_lm")
# Gemma scales its RMSNorm by 1 + weight and ties its embeddings.
_add_text("gemma", "GemmaForCausalLM", "GemmaConfig", {**DECODER, "head_dim": 8}, "causal_lm")

_add(
    "t5",
    "seq2seq_lm",
    partial(
        _from_config,
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "d_kv": HIDDEN // HEADS,
            "d_ff": 2 * HIDDEN,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
    ),
    seq2seq_batch,
)
_add(
    "bart",
    "seq2seq_lm",
    partial(
        _from_config,
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "encoder_layers": LAYERS,
            "decoder_layers": LAYERS,
            "encoder_attention_heads": HEADS,
            "decoder_attention_heads": HEADS,
            "encoder_ffn_dim": 2 * HIDDEN,
            "decoder_ffn_dim": 2 * HIDDEN,
            "max_position_embeddings": 32,
            "use_cache": False,
        },
    ),
    seq2seq_batch,
)
_add(
    "vit",
    CLASSIFY,
    partial(
        _from_config,
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "intermediate_size": 2 * HIDDEN,
            "image_size": IMAGE_SIZE,
            "patch_size": 8,
            "num_labels": NUM_LABELS,
        },
    ),
    image_batch,
)
_add("groupnorm_resnet", CLASSIFY, partial(randomized, GroupNormResNet), image_batch)
_add("lstm", CLASSIFY, partial(randomized, LSTMClassifier), partial(text_batch, task=CLASSIFY))
_add(
    "lora_bert",
    CLASSIFY,
    partial(
        _lora,
        "BertForSequenceClassification",
        "BertConfig",
        ENCODER,
        {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]},
    ),
    partial(text_batch, task=CLASSIFY, segments=True),
)
_add(
    "lora_llama",
    "causal_lm",
    partial(
        _lora,
        "LlamaForCausalLM",
        "LlamaConfig",
        DECODER,
        {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj", "down_proj"]},
    ),
    partial(text_batch, task="causal_lm"),
)
