"""The clipper's protocol: one micro-batch after another, dropout, checkpointing, autocast, memory, misuse."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES, ENCODER, IMAGE_SIZE, NUM_LABELS, randomized
from ghost_checks import assert_sum, check_exact, gradients_on_one_graph, run, squared_output
from oracles import clipped_sum_of, gradients_of, gradients_one_by_one, norms_of
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_dcsgd.ghost import GhostClipper
from hf_dcsgd.tasks.layer_selection import select_trainable_layers
from hf_dcsgd.tasks.losses import per_example_losses


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def perceptron(seed: int = 0) -> nn.Module:
    return randomized(Perceptron, seed)


def prepared(name: str, n: int = 4):
    model = ARCHITECTURES[name].build().eval()
    return model, *ARCHITECTURES[name].batch(model, n=n)


# --- a sample's norm is its own --------------------------------------------------------------------------------------

INVARIANT = ["bert", "albert", "deberta_v2", "mpnet", "xlnet", "gpt2_lm_tied", "t5", "vit", "groupnorm_resnet", "lstm"]


def rows(batch, index):
    return batch[index] if isinstance(batch, torch.Tensor) else {key: value[index] for key, value in batch.items()}


@pytest.mark.parametrize("name", INVARIANT)
def test_norms_do_not_change_with_neighbors_or_their_order(name):
    model, inputs, labels = prepared(name, n=5)
    clipper = GhostClipper(model)
    norms = run(clipper, inputs, labels)
    for index in ([3, 1, 4, 0, 2], [2, 0], [4], [1, 1, 3]):
        found = run(clipper, rows(inputs, index), rows(labels, index))
        torch.testing.assert_close(found, norms[index], rtol=1e-5, atol=0.0)


def with_more_padding(name: str, model, inputs, labels, more: int = 3):
    left = name == "xlnet"
    fill = {"attention_mask": 0, "token_type_ids": 0}
    pad_token = getattr(getattr(model, "config", None), "pad_token_id", None) or 0
    sides = (more, 0) if left else (0, more)
    padded = {key: nn.functional.pad(x, sides, value=fill.get(key, pad_token)) for key, x in inputs.items()}
    return padded, nn.functional.pad(labels, sides, value=-100) if labels.dim() > 1 else labels


@pytest.mark.parametrize("name", [name for name in INVARIANT if name not in ("vit", "groupnorm_resnet")])
def test_norms_do_not_change_with_padding(name):
    model, inputs, labels = prepared(name)
    clipper = GhostClipper(model)
    norms = run(clipper, inputs, labels)
    longer = run(clipper, *with_more_padding(name, model, inputs, labels))
    torch.testing.assert_close(longer, norms, rtol=1e-4, atol=0.0)


# --- micro-batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "t5", "vit"])
def test_micro_batches_accumulate(name):
    model, inputs, labels = prepared(name, n=5)
    gradients = gradients_one_by_one(model, inputs, labels)
    factors = torch.rand(5, generator=torch.Generator().manual_seed(0))
    clipper = GhostClipper(model)
    clipped_sum = clipper.zeros()
    for index in ([0, 1, 2], [3], [4]):
        run(clipper, rows(inputs, index), rows(labels, index), factors=factors[index], into=clipped_sum)
    assert_sum(clipper, clipped_sum, clipped_sum_of(gradients, factors))


def test_micro_batches_within_one_context_accumulate():
    model, x = perceptron(), torch.randn(4, 4)
    gradients = gradients_one_by_one(model, {"x": x}, torch.zeros(4), squared_output)
    clipper, factors = GhostClipper(model), torch.tensor([0.1, 0.7, 1.0, 0.0])
    clipped_sum = clipper.zeros()
    with clipper:
        for half in (slice(0, 2), slice(2, 4)):
            clipper.norms(squared_output(model, model(x[half])))
            clipper.accumulate(factors[half], into=clipped_sum)
    assert_sum(clipper, clipped_sum, clipped_sum_of(gradients, factors))


def test_an_empty_batch_adds_nothing():
    model = perceptron()
    clipper = GhostClipper(model)
    clipped_sum = torch.arange(clipper.num_parameters, dtype=torch.float32)
    for _ in range(2):
        norms = run(clipper, {"x": torch.zeros(0, 4)}, losses=squared_output, into=clipped_sum)
        assert norms.shape == (0,)
        assert norms.dtype == torch.float32
        with clipper:  # transformers models cannot run on nothing: no forward at all is fine too
            assert clipper.norms(torch.zeros(0)).shape == (0,)
            clipper.accumulate(torch.zeros(0), into=clipped_sum)
        assert torch.equal(clipped_sum, torch.arange(clipper.num_parameters, dtype=torch.float32))
        run(clipper, {"x": torch.randn(3, 4)}, losses=squared_output)  # and after a batch that is not empty


def test_a_batch_of_one_comes_first():
    model, inputs, labels = prepared("xlnet", n=1)
    clipper = check_exact(model, inputs, labels, per_example_losses)
    check_exact(clipper, *ARCHITECTURES["xlnet"].batch(model, n=3), per_example_losses)


def test_norms_and_sums_are_never_part_of_a_graph():
    model, inputs, labels = prepared("t5")
    clipper = GhostClipper(model)
    clipped_sum = clipper.zeros()
    assert not run(clipper, inputs, labels, into=clipped_sum).requires_grad
    assert not clipped_sum.requires_grad


def test_the_buffer_has_the_parameters_in_their_order():
    model = perceptron()
    model.first.bias.requires_grad_(False)
    clipper = GhostClipper(model)
    flat = torch.arange(float(clipper.num_parameters))
    parts = clipper.unflatten(flat)
    assert list(parts) == list(clipper.parameters) == ["first.weight", "second.weight", "second.bias"]
    assert torch.equal(torch.cat([part.flatten() for part in parts.values()]), flat)
    assert [part.shape for part in parts.values()] == [(5, 4), (3, 5), (3,)]
    parts["second.bias"].zero_()
    assert not flat[-3:].any()


def test_gradients_of_others_are_neither_read_nor_changed():
    model, x = perceptron(), torch.randn(3, 4)
    clipper = GhostClipper(model)
    sums = [clipper.zeros(), clipper.zeros()]
    run(clipper, {"x": x}, losses=squared_output, into=sums[0])
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    run(clipper, {"x": x}, losses=squared_output, into=sums[1])
    torch.testing.assert_close(*sums)
    assert all((p.grad == 7.0).all() for p in model.parameters())


def test_a_module_called_twice_counts_once_with_cross_terms():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)
            self.norm = nn.LayerNorm(4)
            self.table = nn.Embedding(5, 4)

        def forward(self, x, tokens):
            hidden = self.norm(torch.tanh(self.body(x)))
            return self.norm(self.body(hidden)) + self.table(tokens) * self.table(tokens.flip(1))

    tokens = torch.randint(5, (3, 6), generator=torch.Generator().manual_seed(0))
    clipper = check_exact(randomized(Twice), {"x": torch.randn(3, 6, 4), "tokens": tokens})
    assert not clipper.slow_parameters


# --- what is allocated, kept and freed -------------------------------------------------------------------------------


class OutputShapes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(x.shape) for x in tree_leaves(output) if isinstance(x, torch.Tensor)}
        return output


@pytest.mark.parametrize(("positions", "written"), [(1, False), (4, False), (7, False), (8, True), (16, True)])
def test_per_example_gradients_of_linear_layers_are_written_down_only_beyond_the_crossover(positions, written):
    n, p, d = 7, 24, 20  # p·d / (1.5·(p + d)) = 7.3 positions
    model = nn.Linear(d, p)
    clipper = GhostClipper(model)
    inputs, clipped_sum = {"input": torch.randn(n, positions, d)}, clipper.zeros()
    for verifying in (True, False):
        with clipper:
            losses = squared_output(model, model(**inputs))
            with OutputShapes() as seen:
                clipper.norms(losses)
                clipper.accumulate(torch.ones(n), into=clipped_sum)
        assert ((n, p, d) in seen.shapes) is written, verifying
        if not written:
            assert max(torch.Size(shape).numel() for shape in seen.shapes) < n * p * d


class Watched(nn.Module):
    """Remembers weakly what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.seen: list[weakref.ref] = []

    def forward(self, x):
        x = x.clone()
        hidden = self.inner(x)
        self.seen += [weakref.ref(x), weakref.ref(hidden)]
        return hidden * self.scale


def hook_count(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def alive(model: Watched) -> int:
    gc.collect()
    return sum(ref() is not None for ref in model.seen)


def test_everything_is_freed_after_accumulate():
    model = Watched()
    clipper = GhostClipper(model)
    with clipper:
        assert hook_count(model) > 0
        losses = squared_output(model, model(torch.randn(3, 4)))
        assert alive(model) > 0
        clipper.norms(losses)
        del losses
        clipper.accumulate(torch.ones(3), clipper.zeros())
        assert alive(model) == 0
    assert hook_count(model) == 0


def test_everything_is_freed_when_norms_is_never_called():
    model = Watched()
    with GhostClipper(model):
        model(torch.randn(3, 4))
    assert alive(model) == 0
    assert hook_count(model) == 0


@pytest.mark.parametrize("where", ["forward", "norms", "accumulate"])
def test_everything_is_freed_when_an_exception_passes(where):
    model = Watched()
    clipper = GhostClipper(model)

    def fail():
        with clipper:
            losses = squared_output(model, model(torch.randn(3, 4)))
            if where == "forward":
                raise ZeroDivisionError
            clipper.norms(losses[:2] if where == "norms" else losses)
            clipper.accumulate(torch.ones(2), clipper.zeros())

    with pytest.raises((ZeroDivisionError, ValueError)):
        fail()
    assert alive(model) == 0
    assert hook_count(model) == 0
    check_exact(clipper, {"x": torch.randn(3, 4)})


def test_frozen_modules_are_neither_hooked_nor_differentiated():
    model, inputs, labels = prepared("bert")
    selected = select_trainable_layers(model, "last_encoder_pooler_classifier")
    clipper = GhostClipper(model)
    trunk = []
    model.bert.encoder.layer[0].register_forward_hook(lambda module, args, output: trunk.append(output))
    with clipper:
        hooked = {name for name, module in model.named_modules() if module._forward_hooks}
        losses = per_example_losses(model, model(**inputs), labels)
        norms = clipper.norms(losses)
        clipper.accumulate(torch.ones_like(norms), clipper.zeros())
    assert hooked == {name.rpartition(".")[0] for name in selected} | {"bert.encoder.layer.0"}
    assert not any(x.requires_grad for x in tree_leaves(trunk))
    assert set(clipper.parameters) == set(selected)


# --- modes -----------------------------------------------------------------------------------------------------------


def vit_with_dropout() -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=IMAGE_SIZE,
        patch_size=8,
        num_labels=NUM_LABELS,
        hidden_dropout_prob=0.3,
    )
    return randomized(lambda: hf.ViTForImageClassification(config))


def lora_with_dropout() -> nn.Module:
    adapter = LoraConfig(r=3, lora_dropout=0.3, task_type="SEQ_CLS", target_modules=["query", "value"])
    return randomized(lambda: get_peft_model(hf.BertForSequenceClassification(hf.BertConfig(**ENCODER)), adapter))


DROPOUT_MODELS = {
    **{name: ARCHITECTURES[name].build for name in ("bert", "gpt2_lm_tied", "deberta_v2", "t5")},
    "vit": vit_with_dropout,
    "lora_bert": lora_with_dropout,
}


@pytest.mark.parametrize("name", DROPOUT_MODELS)
def test_dropout_masks_are_those_of_the_forward(name):
    model = DROPOUT_MODELS[name]().train()
    inputs, labels = ARCHITECTURES[name].batch(model)
    torch.manual_seed(7)
    total = gradients_of(per_example_losses(model, model(**inputs), labels).sum(), model)
    clipper = GhostClipper(model)
    clipped_sum = clipper.zeros()
    run(clipper, inputs, labels, seed=7, into=clipped_sum)
    assert_sum(clipper, clipped_sum, {key: value.double() for key, value in total.items()})
    for seed in (7, 8):  # the second one with everything already verified
        check_exact(clipper, inputs, labels, per_example_losses, alone=False, seed=seed)
    if name == "vit":  # its embeddings have no rule, and running them again would draw other masks
        assert clipper.slow_parameters == {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"}


class FunctionalDropout(nn.Module):
    """A module without a rule that draws masks where no nn.Dropout shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(nn.functional.dropout(x @ self.weight, 0.5, self.training))


def test_hidden_dropout_of_a_module_without_rule():
    model, inputs = FunctionalDropout().eval(), {"x": torch.randn(3, 5, 4)}
    clipper = check_exact(model, inputs)
    assert not clipper.slow_parameters
    model.train()  # verified before, but not in this mode
    check_exact(clipper, inputs, alone=False)
    assert clipper.slow_parameters == {"weight"}


class RecurrentWithin(FunctionalDropout):
    """One that cannot be vectorized either, so that nothing but a comparison tells."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(4, 4, batch_first=True).requires_grad_(False)

    def forward(self, x):
        return super().forward(self.recurrent(x)[0])


def test_what_was_verified_in_eval_mode_is_verified_again_in_train_mode():
    model, inputs = RecurrentWithin().eval(), {"x": torch.randn(3, 5, 4)}
    clipper = check_exact(model, inputs)
    assert not clipper.slow_parameters
    check_exact(clipper, inputs)
    model.train()
    check_exact(clipper, inputs, alone=False)
    assert clipper.slow_parameters == {"weight"}


class RecurrentDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(4, 3, num_layers=2, batch_first=True, dropout=0.5)

    def forward(self, x):
        return self.recurrent(x)[0]


def test_dropout_between_recurrent_layers():
    clipper = check_exact(RecurrentDropout().train(), {"x": torch.randn(3, 5, 4)}, alone=False)
    assert len(clipper.slow_parameters) == 8
    assert not check_exact(RecurrentDropout().eval(), {"x": torch.randn(3, 5, 4)}).slow_parameters


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2_lm_tied", "t5", "vit"])
def test_gradient_checkpointing(name):
    build = DROPOUT_MODELS.get(name, ARCHITECTURES[name].build)
    model, plain = build().train(), build().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    inputs, labels = ARCHITECTURES[name].batch(model)
    clipper = GhostClipper(model)
    for seed in (0, 1):
        check_exact(clipper, inputs, labels, per_example_losses, alone=False, seed=seed)
        expected = run(GhostClipper(plain), inputs, labels, seed=seed)
        torch.testing.assert_close(run(clipper, inputs, labels, seed=seed), expected, rtol=1e-5, atol=0.0)


AUTOCAST = partial(torch.autocast, "cpu", torch.bfloat16)


@pytest.mark.parametrize("name", ["bert", "gpt2_lm_tied", "llama", "t5", "vit", "groupnorm_resnet", "deberta_v2"])
def test_bf16_autocast(name):
    model, inputs, labels = prepared(name)
    with AUTOCAST():
        gradients = gradients_on_one_graph(model, inputs, labels, per_example_losses, seed=0)
    clipper = GhostClipper(model)
    clipped_sum = clipper.zeros()
    norms = run(clipper, inputs, labels, around_forward=AUTOCAST, into=clipped_sum)
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), norms_of(gradients), rtol=0.02, atol=0.0)
    assert clipped_sum.dtype == torch.float32
    assert_sum(clipper, clipped_sum, clipped_sum_of(gradients, torch.ones(4)), rtol=0.05)
    plain = GhostClipper(model)
    torch.testing.assert_close(norms, run(plain, inputs, labels), rtol=0.06, atol=0.0)
    assert clipper.slow_parameters == plain.slow_parameters


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_clipped_sums_in_bf16_are_bounded_by_the_norms_that_were_measured(name):
    model, inputs, labels = prepared(name, n=1)
    clipper = GhostClipper(model)
    for threshold in torch.logspace(-6, 0, 7):
        factor = threshold / run(clipper, inputs, labels, around_forward=AUTOCAST)
        clipped_sum = clipper.zeros()
        run(clipper, inputs, labels, factors=factor, around_forward=AUTOCAST, into=clipped_sum)
        assert clipped_sum.double().norm() <= threshold * (1 + 1e-5)


def test_losses_in_bf16_give_fp32_norms():
    model, x = perceptron(), torch.randn(3, 4)
    norms = run(GhostClipper(model), {"x": x}, losses=lambda m, o, y: squared_output(m, o).bfloat16())
    assert norms.dtype == torch.float32
    expected = norms_of(gradients_one_by_one(model, {"x": x}, torch.zeros(3), squared_output))
    torch.testing.assert_close(norms.double(), expected, rtol=0.03, atol=0.0)


def test_double_precision():
    clipper = check_exact(perceptron().double(), {"x": torch.randn(3, 5, 4, dtype=torch.float64)}, rtol=1e-6)
    assert clipper.zeros().dtype == torch.float64


# --- misuse ----------------------------------------------------------------------------------------------------------


def test_norms_twice():
    model = perceptron()
    with GhostClipper(model) as clipper:
        losses = squared_output(model, model(torch.randn(3, 4)))
        clipper.norms(losses)
        with pytest.raises(RuntimeError, match="called twice"):
            clipper.norms(losses)


def test_accumulate_before_norms():
    model = perceptron()
    with GhostClipper(model) as clipper:
        model(torch.randn(3, 4))
        with pytest.raises(RuntimeError, match="needs norms"):
            clipper.accumulate(torch.ones(3), clipper.zeros())


def test_norms_outside_of_the_context():
    model = perceptron()
    with pytest.raises(RuntimeError, match="inside `with clipper:`"):
        GhostClipper(model).norms(squared_output(model, model(torch.randn(3, 4))))


def test_a_forward_outside_of_the_context():
    model = perceptron()
    losses = squared_output(model, model(torch.randn(3, 4)))
    with GhostClipper(model) as clipper, pytest.raises(RuntimeError, match="run the model's forward there"):
        clipper.norms(losses)


@pytest.mark.parametrize(
    ("reduce", "message"),
    [
        (torch.sum, r"one loss per example, a tensor of shape \(n,\), got shape \(\)"),
        (lambda losses: losses[:, None], r"got shape \(3, 1\)"),
        (lambda losses: losses[:2], "got 2 losses for a batch of 3"),
        (torch.detach, "do not depend on any trainable parameter"),
    ],
)
def test_losses_that_are_not_one_per_example(reduce, message):
    model = perceptron()
    with GhostClipper(model) as clipper, pytest.raises(ValueError, match=message):
        clipper.norms(reduce(squared_output(model, model(torch.randn(3, 4)))))


@pytest.mark.parametrize("factors", [torch.ones(2), torch.ones(3, 1), torch.tensor([1.0, torch.nan, 1.0])])
def test_wrong_clip_factors(factors):
    model = perceptron()
    with GhostClipper(model) as clipper:
        clipper.norms(squared_output(model, model(torch.randn(3, 4))))
        clipped_sum = clipper.zeros()
        with pytest.raises(ValueError, match="clip factor"):
            clipper.accumulate(factors, into=clipped_sum)
    assert not clipped_sum.any()


@pytest.mark.parametrize("into", [torch.zeros(42), torch.zeros(43, 1), torch.zeros(43, dtype=torch.float64)])
def test_a_buffer_of_another_shape_or_precision(into):
    model = perceptron()
    with GhostClipper(model) as clipper:
        clipper.norms(squared_output(model, model(torch.randn(3, 4))))
        with pytest.raises(ValueError, match=r"shape \(43,\) and torch\.float32"):
            clipper.accumulate(torch.ones(3), into=into)


def test_the_context_cannot_be_nested_in_itself():
    clipper = GhostClipper(perceptron())
    with clipper, pytest.raises(RuntimeError, match="cannot be nested"):
        clipper.__enter__()


def test_requires_grad_changed_after_construction():
    model = perceptron()
    clipper = GhostClipper(model)
    model.first.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="requires_grad changed"):
        clipper.__enter__()
    assert hook_count(model) == 0


def test_an_input_that_is_changed_in_place_after_the_forward():
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 4)

        def forward(self, tokens):
            hidden = self.table(tokens)
            tokens.zero_()
            return hidden

    model = Overwrites()
    with GhostClipper(model) as clipper:
        losses = squared_output(model, model(torch.randint(1, 5, (3, 6))))
        with pytest.raises(RuntimeError, match=r"the input of table \(Embedding\) was changed in place"):
            clipper.norms(losses)


def test_an_output_that_is_changed_in_place_is_fine():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 5)
            self.second = nn.Linear(5, 3)

        def forward(self, x):
            return self.second(self.first(x).relu_()).mul_(2.0)

    check_exact(randomized(InPlace), {"x": torch.randn(3, 6, 4)})


def test_an_evaluation_within_the_context_is_ignored():
    model, x = perceptron(), torch.randn(3, 4)
    expected = norms_of(gradients_one_by_one(model, {"x": x}, torch.zeros(3), squared_output))
    with GhostClipper(model) as clipper:
        losses = squared_output(model, model(x))
        with torch.no_grad():
            model(torch.randn(9, 4))
        torch.testing.assert_close(clipper.norms(losses).double(), expected, rtol=1e-5, atol=0.0)
