"""What each expression trains, in every architecture of the table and in bert-base."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES, ENCODER, HIDDEN, LAYERS
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from torch import nn

from hf_dcsgd.tasks.layer_selection import DEFAULT_LAYERS, PRESETS, select_trainable_layers

# Written down by reading each model's forward: the list of blocks, and what is used after it.
BLOCKS_AND_HEAD = {
    "bert": ("bert.encoder.layer", ["bert.pooler", "classifier"]),
    "bert_masked_lm": ("bert.encoder.layer", ["cls"]),  # its decoder is tied to the embeddings
    "bert_token": ("bert.encoder.layer", ["classifier"]),
    "bert_qa": ("bert.encoder.layer", ["qa_outputs"]),
    "roberta": ("roberta.encoder.layer", ["classifier"]),
    "distilbert": ("distilbert.transformer.layer", ["pre_classifier", "classifier"]),
    "electra": ("electra.encoder.layer", ["classifier"]),
    "albert": ("albert.encoder.albert_layer_groups", ["albert.pooler", "classifier"]),
    "deberta_v2": ("deberta.encoder.layer", ["pooler", "classifier"]),
    "deberta_v2_absolute": ("deberta.encoder.layer", ["pooler", "classifier"]),
    "mpnet": ("mpnet.encoder.layer", ["classifier"]),
    "modernbert": ("model.layers", ["model.final_norm", "head", "classifier"]),
    "xlnet": ("transformer.layer", ["sequence_summary", "logits_proj"]),
    "gpt2": ("transformer.h", ["transformer.ln_f", "score"]),
    "gpt2_lm_tied": ("transformer.h", ["transformer.ln_f"]),
    "opt": ("model.decoder.layers", ["model.decoder.final_layer_norm"]),
    "gpt_neox": ("gpt_neox.layers", ["gpt_neox.final_layer_norm", "lm_head"]),
    "llama": ("model.layers", ["model.norm", "lm_head"]),
    "llama_classifier": ("model.layers", ["model.norm", "score"]),
    "qwen3": ("model.layers", ["model.norm", "lm_head"]),
    "gemma": ("model.layers", ["model.norm"]),
    "t5": ("decoder.block", ["decoder.final_layer_norm"]),
    "bart": ("model.decoder.layers", []),
    "vit": ("vit.layers", ["vit.layernorm", "classifier"]),
    "groupnorm_resnet": ("blocks", ["classifier"]),
}


def under(model: nn.Module, prefixes: list[str]) -> list[str]:
    names = [name for name, _ in model.named_parameters()]
    return [name for name in names if any(name.startswith(f"{prefix}.") for prefix in prefixes)]


def trainable(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_the_default_is_the_papers_for_bert_base() -> None:
    with torch.device("meta"):
        model = hf.BertForSequenceClassification(hf.BertConfig())
    names = select_trainable_layers(model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert list(sizes) == names
    assert sum(size for name, size in sizes.items() if name.startswith("bert.encoder.layer.11.")) == 7_087_872
    assert sum(size for name, size in sizes.items() if name.startswith("bert.pooler.")) == 590_592
    assert sum(size for name, size in sizes.items() if name.startswith("classifier.")) == 1_538
    assert sum(sizes.values()) == 7_680_002


@pytest.mark.parametrize("name", list(BLOCKS_AND_HEAD))
def test_presets_find_the_blocks_and_the_head(name: str) -> None:
    blocks, head = BLOCKS_AND_HEAD[name]
    model = ARCHITECTURES[name].build()
    count = 1 if name == "albert" else LAYERS
    last = under(model, [f"{blocks}.{count - 1}", *head])
    for expression in (DEFAULT_LAYERS, "last:1"):
        assert select_trainable_layers(model, expression) == last
        assert trainable(model) == last
    assert select_trainable_layers(model, f"last:{count}") == under(model, [blocks, *head])
    if head:
        assert select_trainable_layers(model, "head") == under(model, head) == trainable(model)
    everything = select_trainable_layers(model, "all")
    assert everything == [parameter for parameter, _ in model.named_parameters()] == trainable(model)


@pytest.mark.parametrize("name", [name for name in BLOCKS_AND_HEAD if name != "albert"])
def test_nothing_that_is_selected_acts_before_the_last_block(name: str) -> None:
    """So that the frozen trunk needs no backward. (ALBERT's shared group is its first block as well.)"""
    blocks, head = BLOCKS_AND_HEAD[name]
    model = ARCHITECTURES[name].build().eval()
    inputs, _ = ARCHITECTURES[name].batch(model)
    needs_backward: list[bool] = []

    def note(module, args, output) -> None:
        needs_backward.append((output[0] if isinstance(output, tuple) else output).requires_grad)

    for block in model.get_submodule(blocks):
        block.register_forward_hook(note)
    select_trainable_layers(model)
    model(**inputs)
    assert needs_backward == [False, True]
    if head:
        needs_backward.clear()
        select_trainable_layers(model, "head")
        model(**inputs)
        assert needs_backward == [False, False]


def test_albert_trains_its_shared_group() -> None:
    config = hf.AlbertConfig(**{**ENCODER, "embedding_size": 8, "num_hidden_groups": 2, "num_hidden_layers": 4})
    model = hf.AlbertForSequenceClassification(config)
    assert select_trainable_layers(model) == under(
        model, ["albert.encoder.albert_layer_groups.1", "albert.pooler", "classifier"]
    )


def test_the_models_without_a_task_and_without_blocks() -> None:
    base = hf.BertModel(hf.BertConfig(**ENCODER))
    assert select_trainable_layers(base) == under(base, ["encoder.layer.1", "pooler"])
    with pytest.raises(ValueError, match="found no list of blocks in LSTMClassifier: name the modules"):
        select_trainable_layers(ARCHITECTURES["lstm"].build())
    assert select_trainable_layers(ARCHITECTURES["lstm"].build(), "lstm,classifier")[0] == "lstm.weight_ih_l0"


def test_a_large_list_of_heads_is_not_taken_for_the_blocks() -> None:
    model = ARCHITECTURES["bert_token"].build()
    model.extra_heads = nn.ModuleList([nn.Linear(HIDDEN, 1000), nn.Linear(HIDDEN, 1000)])
    assert select_trainable_layers(model) == under(model, ["bert.encoder.layer.1", "classifier", "extra_heads"])


def test_seq2seq_takes_the_decoder_even_when_the_encoder_is_larger() -> None:
    model = hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_heads=2, num_layers=6, num_decoder_layers=1)
    )
    assert select_trainable_layers(model) == under(model, ["decoder.block.0", "decoder.final_layer_norm"])


# --- bias ------------------------------------------------------------------------------------------------------------


def test_bias_selects_bias_terms_and_nothing_else() -> None:
    model = ARCHITECTURES["bert"].build()
    names = select_trainable_layers(model, "bias")
    assert names == [name for name, _ in model.named_parameters() if name.endswith(".bias")] == trainable(model)
    assert "classifier.weight" not in names
    both = select_trainable_layers(model, "bias, head")
    assert set(both) == set(names) | {"bert.pooler.dense.weight", "classifier.weight"}


def test_bias_terms_under_other_names() -> None:
    names = select_trainable_layers(ARCHITECTURES["xlnet"].build(), "bias")
    assert "transformer.layer.0.rel_attn.r_w_bias" in names
    names = select_trainable_layers(ARCHITECTURES["lstm"].build(), "bias")
    assert names == [*(f"lstm.bias_{kind}_l{layer}" for layer in (0, 1) for kind in ("ih", "hh")), "classifier.bias"]
    # An embedding that is called a bias is not one.
    names = select_trainable_layers(ARCHITECTURES["mpnet"].build(), "bias")
    assert names
    assert not [name for name in names if name.endswith("weight")]


def test_a_model_without_bias_terms_or_with_a_tied_head_only() -> None:
    with pytest.raises(
        ValueError, match="'bias' selects no parameter of T5ForConditionalGeneration\npresets: last_enc"
    ):
        select_trainable_layers(ARCHITECTURES["t5"].build(), "bias")
    with pytest.raises(ValueError, match=r"'head' selects no parameter of Bart.*tied to the input embeddings"):
        select_trainable_layers(ARCHITECTURES["bart"].build(), "head")


# --- names and globs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "prefixes"),
    [
        ("classifier", ["classifier"]),
        ("bert.pooler, classifier", ["bert.pooler", "classifier"]),
        (["bert.pooler", "classifier"], ["bert.pooler", "classifier"]),
        (("bert.encoder.layer.1",), ["bert.encoder.layer.1"]),
        ("bert.encoder.layer.[01].output", ["bert.encoder.layer.0.output", "bert.encoder.layer.1.output"]),
        ("*.intermediate", ["bert.encoder.layer.0.intermediate", "bert.encoder.layer.1.intermediate"]),
        ("head,bert.embeddings", ["bert.embeddings", "bert.pooler", "classifier"]),
        ("bert", ["bert"]),
    ],
)
def test_names_and_globs(expression, prefixes: list[str]) -> None:
    model = ARCHITECTURES["bert"].build()
    assert select_trainable_layers(model, expression) == under(model, prefixes) == trainable(model)


def test_parameter_names_and_prefixes_are_not_confused() -> None:
    model = ARCHITECTURES["bert"].build()
    assert select_trainable_layers(model, "classifier.bias") == ["classifier.bias"]
    assert select_trainable_layers(model, "*LayerNorm.weight") == [
        name for name, _ in model.named_parameters() if name.endswith("LayerNorm.weight")
    ]
    deep = nn.Sequential(*[nn.Linear(2, 2) for _ in range(12)])
    assert select_trainable_layers(deep, "1") == ["1.weight", "1.bias"]  # and not 10 or 11
    plain = nn.Module()
    plain.norm_in, plain.blocks, plain.norm = nn.LayerNorm(2), deep, nn.LayerNorm(2)
    assert select_trainable_layers(plain, "head") == ["norm.weight", "norm.bias"]  # and not norm_in


@settings(deadline=None, max_examples=60)
@given(pattern=st.text(alphabet="bertpolcasif.*?[]01_", min_size=1, max_size=8))
def test_any_glob_selects_what_fnmatch_matches_or_is_an_error(pattern: str) -> None:
    model = hf.BertForSequenceClassification(hf.BertConfig(**ENCODER))
    modules = {name for name, _ in model.named_modules() if name and fnmatchcase(name, pattern)}
    expected = [
        name
        for name, _ in model.named_parameters()
        if fnmatchcase(name, pattern) or any(name.startswith(f"{module}.") for module in modules)
    ]
    if pattern in PRESETS:
        return
    if expected:
        assert select_trainable_layers(model, [pattern]) == expected == trainable(model)
    else:
        with pytest.raises(ValueError, match="matches no module or parameter"):
            select_trainable_layers(model, [pattern])


def test_a_tied_head_can_be_named() -> None:
    model = ARCHITECTURES["gpt2_lm_tied"].build()
    assert select_trainable_layers(model, "lm_head") == ["transformer.wte.weight"]
    assert model.lm_head.weight.requires_grad
    untied = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=HIDDEN, n_layer=1, n_head=2, tie_word_embeddings=False))
    assert select_trainable_layers(untied, "head") == [
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
        "lm_head.weight",
    ]


# --- as it is, and peft ----------------------------------------------------------------------------------------------


def test_as_is_changes_nothing() -> None:
    model = ARCHITECTURES["lora_bert"].build()
    before = trainable(model)
    assert select_trainable_layers(model, "as_is") == before == trainable(model)
    assert any("lora_A" in name for name in before)
    model = ARCHITECTURES["bert"].build().requires_grad_(False)
    with pytest.raises(ValueError, match="as_is, but no parameter"):
        select_trainable_layers(model, "as_is")
    with pytest.raises(ValueError, match=r"as_is cannot be combined .*, got 'as_is,head'"):
        select_trainable_layers(model, "as_is,head")


@pytest.mark.parametrize("expression", [DEFAULT_LAYERS, "last:1", "head", "bias", "all"])
def test_presets_are_refused_for_peft_models_and_leave_them_alone(expression: str) -> None:
    for model in (ARCHITECTURES["lora_bert"].build(), ARCHITECTURES["lora_llama"].build()):
        before = trainable(model)
        with pytest.raises(ValueError, match=r'peft adapters.*trainable_layers="as_is"'):
            select_trainable_layers(model, expression)
        assert trainable(model) == before


def test_presets_are_refused_for_adapters_added_by_transformers() -> None:
    model = ARCHITECTURES["bert"].build()
    model.add_adapter(LoraConfig(target_modules=["query"]))
    with pytest.raises(ValueError, match="peft adapters"):
        select_trainable_layers(model)
    assert all("lora" in name for name in select_trainable_layers(model, "as_is"))


def test_peft_models_may_be_selected_from_by_name() -> None:
    model = ARCHITECTURES["lora_bert"].build()
    names = select_trainable_layers(model, "*lora_B*")
    assert names
    assert all("lora_B" in name for name in names)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "messages"),
    [
        ("pooler", ["'pooler' matches no", "near matches: bert.pooler"]),
        ("clasifier", ["'clasifier' matches no", "near matches: classifier"]),
        ("bert.encoder.layer.7", ["'bert.encoder.layer.7' matches", "bert.encoder.layer.1"]),
        ("heads", ["'heads' matches no", "near matches: head"]),
        ("last_encoder_pooler_clasifier", [f"near matches: {DEFAULT_LAYERS}"]),
        ("classifier,poler,zzz", ["'poler' matches no", "bert.pooler", "'zzz' matches no"]),
        (["query"], ["'query' matches no", "bert.encoder.layer.0.attention.self.query"]),
    ],
)
def test_an_entry_that_matches_nothing_shows_near_matches(expression, messages: list[str]) -> None:
    model = ARCHITECTURES["bert"].build()
    model.classifier.bias.requires_grad_(False)
    before = trainable(model)
    with pytest.raises(ValueError, match=re.escape(f"presets: {', '.join(PRESETS)}")) as error:
        select_trainable_layers(model, expression)
    for message in messages:
        assert message in str(error.value)
    assert "'classifier' matches" not in str(error.value)
    assert trainable(model) == before  # an error leaves the model as it was


@pytest.mark.parametrize("expression", ["last:0", "last:3", "last:x", "last:", "last:-1", "last:k", "last:1.5"])
def test_a_wrong_number_of_blocks(expression: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"1 <= k <= 2 (the number of blocks), got {expression}")):
        select_trainable_layers(ARCHITECTURES["bert"].build(), expression)


@pytest.mark.parametrize("expression", ["", " , ", []])
def test_an_empty_expression(expression) -> None:
    with pytest.raises(ValueError, match="trainable_layers is empty"):
        select_trainable_layers(ARCHITECTURES["bert"].build(), expression)


def test_entries_that_are_not_strings() -> None:
    with pytest.raises(TypeError, match=r"string or a list of strings, got \[1\]"):
        select_trainable_layers(ARCHITECTURES["bert"].build(), [1])
