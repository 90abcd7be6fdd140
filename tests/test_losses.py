"""Per-example losses against transformers' own losses, one example at a time."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES, ENCODER, NUM_LABELS, Architecture, randomized, text_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.auto import modeling_auto
from transformers.trainer_pt_utils import LabelSmoother

from hf_dcsgd.tasks.loss_kind import kind_of_class, loss_kind, unwrapped_model
from hf_dcsgd.tasks.losses import checked_user_losses, per_example_losses, split_labels

FROM_TRANSFORMERS = [name for name in ARCHITECTURES if name not in ("groupnorm_resnet", "lstm")]
SMOOTHABLE = [name for name in FROM_TRANSFORMERS if ARCHITECTURES[name].task != "question_answering"]


def bert(**config) -> nn.Module:
    settings_ = {**ENCODER, **config}
    return randomized(lambda: hf.BertForSequenceClassification(hf.BertConfig(**settings_))).eval()


def row(batch, i: int):
    """Example i alone, as a batch of one."""
    return batch[i : i + 1] if isinstance(batch, Tensor) else {key: value[i : i + 1] for key, value in batch.items()}


def as_inputs(labels) -> dict[str, Tensor]:
    return labels if isinstance(labels, dict) else {"labels": labels}


def built(name: str) -> tuple[Architecture, nn.Module, dict[str, Tensor], Tensor | dict[str, Tensor]]:
    architecture = ARCHITECTURES[name]
    model = architecture.build().eval()
    return architecture, model, *architecture.batch(model)


# --- against transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FROM_TRANSFORMERS)
def test_equals_the_models_own_loss_of_each_example_alone(name: str) -> None:
    architecture, model, inputs, labels = built(name)
    assert loss_kind(model, labels) == architecture.task
    losses = per_example_losses(model, model(**inputs), labels)
    own = torch.stack([model(**row(inputs, i), **as_inputs(row(labels, i))).loss for i in range(4)])
    torch.testing.assert_close(losses, own, rtol=1e-5, atol=1e-6)
    assert losses.shape == (4,)
    assert losses.dtype == torch.float32
    assert losses.requires_grad


@pytest.mark.parametrize(
    ("config", "labels", "kind"),
    [
        ({"num_labels": 1}, torch.tensor([0.5, -2.0, 3.25, 0.0]), "regression"),
        ({"num_labels": 1}, torch.tensor([[0.5], [-2.0], [3.25], [0.0]]), "regression"),
        ({"num_labels": 3, "problem_type": "regression"}, torch.randn(4, 3), "regression"),
        ({"num_labels": 3}, torch.eye(4, 3), "multi_label_classification"),
        ({"problem_type": "multi_label_classification"}, torch.ones(4, 3), "multi_label_classification"),
        ({"problem_type": "single_label_classification"}, torch.tensor([0, 2, 1, 2]), "single_label_classification"),
        ({"num_labels": 3}, torch.tensor([[0], [2], [1], [2]]), "single_label_classification"),
    ],
)
def test_every_problem_type(config: dict, labels: Tensor, kind: str) -> None:
    model = bert(**config)
    inputs, _ = text_batch(model, task="single_label_classification")
    losses = per_example_losses(model, model(**inputs), labels)
    assert loss_kind(model, labels) == kind
    # Unlike transformers, we do not write to the config: the next batch is judged afresh.
    assert model.config.problem_type == config.get("problem_type")
    own = torch.stack([model(**row(inputs, i), labels=row(labels, i)).loss for i in range(4)])
    torch.testing.assert_close(losses, own, rtol=1e-5, atol=1e-6)


def test_integer_targets_of_a_regression_and_of_multiple_labels_are_cast() -> None:
    logits = torch.randn(4, 1)
    ratings = torch.tensor([1, 5, 3, 0])
    losses = per_example_losses(bert(num_labels=1), logits, ratings)
    torch.testing.assert_close(losses, (logits[:, 0] - ratings) ** 2)
    many = bert(problem_type="multi_label_classification")
    logits, flags = torch.randn(4, 3), torch.eye(4, 3, dtype=torch.bool)
    expected = F.binary_cross_entropy_with_logits(logits, flags.float(), reduction="none").mean(1)
    torch.testing.assert_close(per_example_losses(many, logits, flags.long()), expected)
    torch.testing.assert_close(per_example_losses(many, logits, flags), expected)


@pytest.mark.parametrize("name", SMOOTHABLE)
@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_label_smoothing_is_that_of_the_trainer_for_each_example_alone(name: str, epsilon: float) -> None:
    architecture, model, inputs, labels = built(name)
    outputs = model(**inputs)
    losses = per_example_losses(model, outputs, labels, label_smoothing=epsilon)
    smoother = LabelSmoother(epsilon=epsilon)
    shift = architecture.task == "causal_lm"
    alone = [smoother({"logits": row(outputs.logits, i)}, row(labels, i), shift_labels=shift) for i in range(4)]
    torch.testing.assert_close(losses, torch.stack(alone), rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), n=st.integers(0, 4), length=st.integers(1, 6), classes=st.integers(2, 5))
@pytest.mark.parametrize("name", ["bert_token", "bert_masked_lm", "llama", "t5"])
def test_losses_over_tokens_are_means_over_the_examples_own_tokens(name, data, n, length, classes) -> None:
    """Any pattern of ignored labels, against cross entropy row by row; an example without labels has loss 0."""
    model = model_of(name)
    flat = data.draw(st.lists(st.sampled_from([-100, *range(classes)]), min_size=n * length, max_size=n * length))
    labels = torch.tensor(flat, dtype=torch.long).view(n, length)
    epsilon = data.draw(st.sampled_from([0.0, 0.2]))
    logits = torch.randn(n, length, classes, generator=torch.Generator().manual_seed(n)).requires_grad_()
    losses = per_example_losses(model, {"logits": logits}, labels, label_smoothing=epsilon)
    assert losses.shape == (n,)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    for i in range(n):
        x, y = (logits[i, :-1], labels[i, 1:]) if name == "llama" else (logits[i], labels[i])
        counted = y != -100
        if counted.any():
            expected = F.cross_entropy(x[counted], y[counted], label_smoothing=epsilon)
            torch.testing.assert_close(losses[i], expected, rtol=1e-5, atol=1e-6)
        else:
            assert losses[i] == 0
            assert (gradient[i] == 0).all()
    assert gradient.isfinite().all()


@functools.cache
def model_of(name: str) -> nn.Module:
    return ARCHITECTURES[name].build()


# --- each example for itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ARCHITECTURES))
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_neighbors_change_no_loss_and_get_no_gradient(name: str, epsilon: float) -> None:
    architecture, model, inputs, labels = built(name)
    if epsilon and architecture.task == "question_answering":
        pytest.skip("label smoothing is not defined for question answering")
    outputs = model(**inputs)
    losses = per_example_losses(model, outputs, labels, label_smoothing=epsilon)
    for i in range(4):
        alone = per_example_losses(model, model(**row(inputs, i)), row(labels, i), label_smoothing=epsilon)
        torch.testing.assert_close(alone, losses[i : i + 1], rtol=1e-4, atol=1e-6)
    if isinstance(outputs, Tensor):
        logits = [outputs]
    elif isinstance(outputs, tuple):
        logits = [outputs[0]]
    else:
        logits = [outputs[key] for key in ("logits", "start_logits", "end_logits") if key in outputs]
    for gradient in torch.autograd.grad(losses[1], logits):
        assert (gradient[1] != 0).any()
        assert (gradient[[0, 2, 3]] == 0).all()


def test_a_broken_example_spoils_no_other() -> None:
    for name, shape in (("bert", (3, NUM_LABELS)), ("bert_token", (3, 5, NUM_LABELS))):
        logits = torch.randn(shape)
        logits[1] = float("nan")
        logits.requires_grad_()
        labels = torch.ones(shape[:-1], dtype=torch.long)
        losses = per_example_losses(ARCHITECTURES[name].build(), logits, labels)
        assert losses.isfinite().tolist() == [True, False, True]
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        assert gradient[[0, 2]].isfinite().all()
    losses = per_example_losses(bert(num_labels=1), torch.zeros(3, 1), torch.tensor([1.0, float("inf"), 2.0]))
    assert losses.tolist() == [1.0, float("inf"), 4.0]


def test_an_example_without_a_label_has_loss_zero() -> None:
    logits = torch.randn(3, NUM_LABELS, requires_grad=True)
    losses = per_example_losses(bert(), logits, torch.tensor([1, -100, 0]))
    assert losses[1] == 0
    assert (torch.autograd.grad(losses.sum(), logits)[0][1] == 0).all()


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_an_empty_batch_is_attached_to_the_graph(name: str) -> None:
    _, model, inputs, labels = built(name)
    outputs = model(**inputs)
    if isinstance(outputs, dict):
        outputs = {key: value[:0] for key, value in outputs.items() if isinstance(value, Tensor)}
    else:
        outputs = outputs[0][:0] if isinstance(outputs, tuple) else outputs[:0]
    labels = {key: value[:0] for key, value in labels.items()} if isinstance(labels, dict) else labels[:0]
    losses = per_example_losses(model, outputs, labels)
    assert losses.shape == (0,)
    assert losses.dtype == torch.float32
    assert losses.requires_grad
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(losses.sum(), trainable, allow_unused=True)
    assert all((gradient == 0).all() for gradient in gradients if gradient is not None)


@pytest.mark.parametrize("name", ["bert", "llama", "bert_qa"])
def test_half_precision_logits_give_fp32_losses(name: str) -> None:
    _, model, inputs, labels = built(name)
    outputs = model(**inputs)
    half = {key: value.bfloat16() for key, value in outputs.items() if "logits" in key}
    losses = per_example_losses(model, half, labels)
    assert losses.dtype == torch.float32
    upcast = per_example_losses(model, {key: value.float() for key, value in half.items()}, labels)
    torch.testing.assert_close(losses, upcast, rtol=0, atol=0)


# --- question answering ----------------------------------------------------------------------------------------------


def test_answers_as_a_pair_or_a_mapping_and_beyond_the_input() -> None:
    _, model, inputs, labels = built("bert_qa")
    outputs = model(**inputs)
    losses = per_example_losses(model, outputs, labels)
    pair = (labels["start_positions"], labels["end_positions"].unsqueeze(-1))
    torch.testing.assert_close(per_example_losses(model, outputs, pair), losses, rtol=0, atol=0)
    length = outputs.start_logits.shape[1]
    cut = {"start_positions": torch.tensor([1, length, -5, length + 9]), "end_positions": torch.tensor([2, 3, 1, 99])}
    losses = per_example_losses(model, outputs, cut)
    own = model(**row(inputs, 2), **row(cut, 2)).loss  # a negative position means position 0 there
    torch.testing.assert_close(losses[2], own)
    assert losses[3] == 0
    end_only = F.cross_entropy(outputs.end_logits[1:2], torch.tensor([3])) / 2
    torch.testing.assert_close(losses[1], end_only)
    with pytest.raises(TypeError, match="start_positions, end_positions"):
        per_example_losses(model, outputs, {"start_positions": torch.zeros(4)})


# --- the kind --------------------------------------------------------------------------------------------------------


class Renamed(hf.BertForTokenClassification):
    pass


class PlainPretrained(hf.BertPreTrainedModel):
    pass


class DecoderOnlyForConditionalGeneration(hf.BertPreTrainedModel):
    """As models from images to text are called: they shift labels, and are not seq2seq."""


def test_the_kind_is_found_under_wrappers_and_in_ancestors() -> None:
    model = ARCHITECTURES["lora_llama"].build()
    assert loss_kind(nn.DataParallel(model)) == "causal_lm"
    compiled = torch.compile(ARCHITECTURES["bert_masked_lm"].build(), backend="eager")
    assert loss_kind(compiled) == "masked_lm"
    assert type(unwrapped_model(nn.DataParallel(torch.compile(model, backend="eager")))) is hf.LlamaForCausalLM
    assert loss_kind(Renamed(hf.BertConfig(**ENCODER))) == "token_classification"


def test_a_classifier_without_labels_at_hand_is_taken_for_single_label() -> None:
    assert loss_kind(bert()) == "single_label_classification"
    assert loss_kind(bert(num_labels=1)) == "regression"


@pytest.mark.parametrize(
    "model",
    [
        lambda: hf.BertForPreTraining(hf.BertConfig(**ENCODER)),
        lambda: PlainPretrained(hf.BertConfig(**ENCODER)),
        lambda: DecoderOnlyForConditionalGeneration(hf.BertConfig(**ENCODER)),
        lambda: hf.BartForCausalLM(hf.BartConfig(vocab_size=9, d_model=16, decoder_layers=1, decoder_ffn_dim=8)),
    ],
)
def test_models_without_a_known_loss_are_refused_with_the_cure(model) -> None:
    instance = model()
    with pytest.raises(ValueError, match=rf"{type(instance).__name__}.*; pass .*\(outputs, labels\)"):
        loss_kind(instance)


@pytest.mark.slow
def test_every_causal_lm_we_accept_shifts_its_labels_itself() -> None:
    """Some classes called ForCausalLM compare logits and labels position by position; those must not be accepted."""
    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    wrong = []
    for name in sorted({name for entry in names for name in ([entry] if isinstance(entry, str) else entry)}):
        model_class = getattr(hf, name)
        source = inspect.getsource(model_class.forward)
        shifts = "self.loss_function(" in source or "shift_labels" in source or "super().forward(" in source
        if kind_of_class(model_class) == "causal_lm" and not shifts and "labels" in source:
            wrong.append(name)
    assert wrong == []


@pytest.mark.parametrize(
    ("logits", "labels", "kind"),
    [
        (torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), "single_label_classification"),
        (torch.randn(4, 3), torch.tensor([[0], [1], [2], [0]]), "single_label_classification"),
        (torch.randn(4, 3), torch.rand(4, 3), "multi_label_classification"),
        (torch.randn(4, 1), torch.randn(4), "regression"),
        (torch.randn(4, 1), torch.randn(4, 1), "regression"),
        (torch.randn(4), torch.randn(4), "regression"),
        (torch.randn(4, 5, 3), torch.ones(4, 5, dtype=torch.long), "token_classification"),
        (torch.randn(0, 3), torch.ones(0, dtype=torch.long), "single_label_classification"),
    ],
)
def test_plain_modules_are_judged_by_shapes(logits: Tensor, labels: Tensor, kind: str) -> None:
    model = nn.Linear(2, 2)
    assert loss_kind(model, labels, logits) == kind
    results = [
        per_example_losses(model, outputs, labels)
        for outputs in (logits, (logits,), {"logits": logits}, SimpleNamespace(logits=logits))
    ]
    assert all(torch.equal(result, results[0]) and result.shape == (len(logits),) for result in results)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (torch.randn(4, 3), torch.randn(4)),
        (torch.randn(4, 3), torch.ones(5, dtype=torch.long)),
        (torch.randn(4, 3, 6, 6), torch.ones(4, 6, 6, dtype=torch.long)),
        (torch.randn(4, 5, 3), torch.randn(4, 5, 3)),
        (torch.randn(4, 3), None),
        (None, torch.ones(4)),
    ],
)
def test_plain_modules_with_other_shapes_are_refused(logits, labels) -> None:
    with pytest.raises(ValueError, match=r"cannot tell the loss of Linear from logits .* and labels"):
        loss_kind(nn.Linear(2, 2), labels, logits)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shape"), [("bert", (2,)), ("bert_token", (2, 5)), ("llama", (2, 5))])
@pytest.mark.parametrize("bad", [-1, 7, 4711])
def test_labels_out_of_range_name_the_range_and_not_the_label(name: str, shape: tuple[int, ...], bad: int) -> None:
    labels = torch.zeros(shape, dtype=torch.long)
    labels[1] = bad
    with pytest.raises(ValueError, match=r"from 0 to 6 .num_labels = 7. or -100") as error:
        per_example_losses(ARCHITECTURES[name].build(), torch.randn(*shape, 7), labels)
    assert "4711" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "logits", "labels", "message"),
    [
        ("bert", torch.randn(2, 3), torch.zeros(3, dtype=torch.long), "labels for 2 examples, got shape .3,."),
        ("bert", torch.randn(2, 3), torch.zeros(2, 2, dtype=torch.long), r"shape \(2,\) .* got \(2, 2\)"),
        ("llama", torch.randn(2, 8, 7), torch.zeros(2, 5, dtype=torch.long), r"shape \(2, 8\) .* got \(2, 5\)"),
        ("bert", torch.randn(2, 3), torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]]), "between 0 and 1"),
    ],
)
def test_labels_that_do_not_fit(name: str, logits: Tensor, labels: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        per_example_losses(ARCHITECTURES[name].build(), logits, labels)


def test_other_wrong_arguments() -> None:
    logits, labels = torch.randn(2, 3), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"label_smoothing in \[0, 1\], got -0.1"):
        per_example_losses(bert(), logits, labels, label_smoothing=-0.1)
    for model in (bert(num_labels=1), bert(problem_type="multi_label_classification")):
        with pytest.raises(ValueError, match=r"label_smoothing is not defined for (regression|multi_label)"):
            per_example_losses(model, logits, labels, label_smoothing=0.1)
    with pytest.raises(TypeError, match="labels to be a tensor"):
        per_example_losses(bert(), logits, [0, 1])
    with pytest.raises(TypeError, match=r"integer class labels, got torch.float32"):
        per_example_losses(bert(problem_type="single_label_classification"), logits, labels.float())
    with pytest.raises(ValueError, match="expected logits in the model's outputs, got last_hidden_state"):
        per_example_losses(bert(), {"last_hidden_state": logits}, labels)
    with pytest.raises(ValueError, match="expected end_logits in the model's outputs"):
        per_example_losses(ARCHITECTURES["bert_qa"].build(), (logits,), (labels, labels))
    model = bert()
    model.config.__dict__["problem_type"] = "ranking"
    with pytest.raises(ValueError, match=r"problem_type to be one of .* got 'ranking'"):
        per_example_losses(model, logits, labels)


# --- a loss function of the user's own -------------------------------------------------------------------------------


def own_losses(outputs, labels) -> Tensor:
    return F.cross_entropy(outputs["logits"], labels, reduction="none")


def test_a_users_losses_pass_through_as_fp32() -> None:
    logits, labels = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    losses = checked_user_losses(own_losses, {"logits": logits}, labels, 4)
    torch.testing.assert_close(losses, F.cross_entropy(logits, labels, reduction="none"))
    half = checked_user_losses(lambda o, y: own_losses(o, y).bfloat16(), {"logits": logits}, labels, 4)
    assert half.dtype == torch.float32
    assert checked_user_losses(own_losses, {"logits": logits[:0]}, labels[:0], 0).shape == (0,)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            lambda o, y: own_losses(o, y).mean(),
            ValueError,
            r'scalar: return one loss per example, shape \(4,\).*"none"',
        ),
        (lambda o, y: own_losses(o, y)[:3], ValueError, r"shape \(4,\), got shape \(3,\)"),
        (lambda o, y: own_losses(o, y).view(2, 2), ValueError, r"shape \(4,\), got shape \(2, 2\)"),
        (lambda o, y: own_losses(o, y).detach(), ValueError, "do not require grad"),
        (lambda o, y: own_losses(o, y).long(), TypeError, "floating-point losses, got torch.int64"),
        (lambda o, y: own_losses(o, y).tolist(), TypeError, "return a tensor, got list"),
    ],
)
def test_a_users_losses_that_are_not_one_per_example(function, error: type[Exception], message: str) -> None:
    logits, labels = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    with pytest.raises(error, match=message):
        checked_user_losses(function, {"logits": logits}, labels, 4)


def test_a_scalar_is_refused_for_a_batch_of_one_and_no_grad_needs_no_grad() -> None:
    logits, labels = torch.randn(1, 3, requires_grad=True), torch.tensor([2])
    with pytest.raises(ValueError, match="returned a scalar"):
        checked_user_losses(lambda o, y: F.cross_entropy(o, y), logits, labels, 1)
    with torch.no_grad():
        assert checked_user_losses(own_losses, {"logits": logits}, labels, 1).shape == (1,)


# --- sound and pixels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_ctc_loss_is_that_of_one_example_at_a_time(reduction: str, masked: bool) -> None:
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    others = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 9, "pad_token_id": 0}
    config = hf.Wav2Vec2Config(
        **convolutions, **sizes, **others, feat_extract_norm="layer", ctc_loss_reduction=reduction
    )
    model = randomized(lambda: hf.Wav2Vec2ForCTC(config)).eval()
    sound = torch.randn(3, 400, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, 3], [4, 4, -100], [5, -100, -100]])
    batch = {"input_values": sound, "labels": labels}
    if masked:
        batch["attention_mask"] = (torch.arange(400) < torch.tensor([[400], [300], [220]])).long()
    own = torch.stack([model(**row(batch, i)).loss for i in range(3)])
    model_inputs, found = split_labels(model, batch)
    losses = per_example_losses(model, model(**model_inputs), found, attention_mask=batch.get("attention_mask"))
    torch.testing.assert_close(losses, own, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="below 9, the size of the vocabulary"):
        per_example_losses(model, model(**model_inputs), found.clamp(min=9))


def test_the_loss_of_pixels_is_that_of_one_example_at_a_time() -> None:
    stages = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
    sizes = {"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    config = hf.SegformerConfig(**stages, **sizes, decoder_hidden_size=8, num_labels=3)
    model = randomized(lambda: hf.SegformerForSemanticSegmentation(config)).eval()
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (2, 16, 16), generator=generator)
    labels[1, :9] = 255
    batch = {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": labels}
    own = torch.stack([model(**row(batch, i)).loss for i in range(2)])
    model_inputs, found = split_labels(model, batch)
    torch.testing.assert_close(per_example_losses(model, model(**model_inputs), found), own, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="from 0 to 2, or 255"):
        per_example_losses(model, model(**model_inputs), found + 3)


def test_permuted_language_models_are_not_shifted() -> None:
    config = hf.XLNetConfig(vocab_size=20, d_model=8, n_layer=1, n_head=2, d_inner=8)
    model = randomized(lambda: hf.XLNetLMHeadModel(config)).eval()
    tokens = torch.randint(3, 20, (2, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(6) % 2 == 0, -100)}
    own = torch.stack([model(**row(batch, i)).loss for i in range(2)])
    model_inputs, found = split_labels(model, batch)
    torch.testing.assert_close(per_example_losses(model, model(**model_inputs), found), own, rtol=1e-5, atol=1e-6)


# --- labels out of a batch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_labels_are_kept_out_of_the_forward(name: str) -> None:
    _, model, inputs, labels = built(name)
    batch = {**inputs, **as_inputs(labels)}
    model_inputs, found = split_labels(model, batch)
    assert model_inputs.keys() == inputs.keys()
    assert all(model_inputs[key] is inputs[key] for key in inputs)
    assert found == labels if isinstance(labels, dict) else found is labels
    assert batch.keys() == {*inputs, *as_inputs(labels)}


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_seq2seq_models_get_the_decoder_inputs_of_their_own_forward(name: str) -> None:
    _, model, inputs, labels = built(name)
    batch = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "labels": labels}
    model_inputs, found = split_labels(model, batch)
    assert "decoder_input_ids" in model_inputs
    torch.testing.assert_close(model(**model_inputs).logits, model(**batch).logits)
    losses = per_example_losses(model, model(**model_inputs), found)
    own = torch.stack([model(**row(batch, i)).loss for i in range(4)])
    torch.testing.assert_close(losses, own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["M2M100", "Whisper"])
def test_models_that_shift_labels_in_their_forward(kind: str) -> None:
    layers = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes = {"vocab_size": 60, "d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_source_positions": 8}
    tokens = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    config_class = getattr(hf, f"{kind}Config")
    # Where it is declared as a whole number, its own default is refused (5.4).
    scale = {"scale_embedding": 1} if config_class.__annotations__.get("scale_embedding") in (int, "int") else {}
    config = config_class(**layers, **sizes, **tokens, **scale, num_mel_bins=8)
    model = randomized(lambda: getattr(hf, f"{kind}ForConditionalGeneration")(config)).eval()
    labels = torch.tensor([[5, 6, 7, 2], [8, 2, -100, -100]])
    inputs: dict[str, torch.Tensor] = {"input_ids": torch.tensor([[5, 6, 7, 8, 2]] * 2)}
    if kind == "Whisper":
        inputs = {"input_features": torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))}
    batch = {**inputs, "labels": labels}
    model_inputs, found = split_labels(model, batch)
    own = torch.stack([model(**row(batch, i)).loss for i in range(2)])
    torch.testing.assert_close(per_example_losses(model, model(**model_inputs), found), own, rtol=1e-5, atol=1e-6)


def test_an_encoder_decoder_classifier_gets_no_decoder_inputs() -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = hf.BartConfig(
        vocab_size=60, num_labels=3, encoder_attention_heads=2, decoder_attention_heads=2, use_cache=False, **sizes
    )
    model = randomized(lambda: hf.BartForSequenceClassification(config)).eval()
    batch = {"input_ids": torch.tensor([[0, 5, 6, 2]] * 2), "labels": torch.tensor([0, 2])}
    model_inputs, labels = split_labels(model, batch)
    assert list(model_inputs) == ["input_ids"]
    own = torch.stack([model(**row(batch, i)).loss for i in range(2)])
    torch.testing.assert_close(per_example_losses(model, model(**model_inputs), labels), own)


def test_label_names_can_be_given_and_must_be_there() -> None:
    model = ARCHITECTURES["bert"].build()
    inputs, labels = split_labels(model, {"input_ids": 1, "target": 2, "weight": 3}, ["target", "weight"])
    assert inputs == {"input_ids": 1}
    assert labels == {"target": 2, "weight": 3}
    with pytest.raises(ValueError, match=r"a label entry \(labels\) in the batch, got input_ids, label"):
        split_labels(model, {"input_ids": 1, "label": 2})
    with pytest.raises(ValueError, match=r"\(start_positions or end_positions\)"):
        split_labels(ARCHITECTURES["bert_qa"].build(), {"input_ids": 1})
