"""Each rule alone, over random shapes, against autograd on one example at a time in double precision."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import pkgutil

import pytest
import torch
import transformers.models
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import gradients_one_by_one, norms_of
from torch import nn
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.pytorch_utils import Conv1D

from hf_dcsgd.ghost import Dense, GhostClipper, OneHotRows, Outer, norms, register_rule, rule_for
from hf_dcsgd.ghost.contributions import ClipFactors
from hf_dcsgd.ghost.norms import squared_norms, take_norms

EXAMPLES = settings(deadline=None, max_examples=80)
batch_sizes = st.integers(0, 3)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
seeds = st.integers(0, 2**32 - 1)


def expected_gradients(module: nn.Module, inputs: torch.Tensor, output_grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """Per-example gradients of ⟨output, output_grad⟩, (n, *shape) in double precision."""
    module = copy.deepcopy(module).double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found: dict[str, list[torch.Tensor]] = {name: [] for name in trainable}
    for i in range(len(inputs)):
        output = module(inputs[i : i + 1])
        grads = torch.autograd.grad(output, list(trainable.values()), output_grad[i : i + 1].double())
        for name, grad in zip(trainable, grads, strict=True):
            found[name].append(grad.to_dense())
    return {name: torch.stack(grads) if grads else torch.zeros(0, *trainable[name].shape, dtype=torch.float64)
            for name, grads in found.items()}  # fmt: skip


def assert_same(parts, expected: torch.Tensor, dtype: torch.dtype, seed: int = 0) -> None:
    """Norms and weighted sums of contributions are those of the written-down gradients (n, *shape)."""
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    shape, n = expected.shape[1:], len(expected)
    squared, remaining = take_norms({"weight": parts}, {"weight": shape})
    assert squared.shape == (n,)
    assert squared.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected_norms = expected.flatten(1).norm(dim=1)
    torch.testing.assert_close(squared.double().sqrt(), expected_norms, rtol=tolerance, atol=tolerance * 1e-1)
    factors = torch.rand(n, generator=torch.Generator().manual_seed(seed))
    total = torch.einsum("n,n...->...", factors.double(), expected)
    before = torch.rand(shape, dtype=squared.dtype, generator=torch.Generator().manual_seed(seed))
    found = before.clone()
    for part in remaining["weight"]:
        part.add_weighted_sum(ClipFactors(factors), found)
    scale = max(1.0, expected_norms.max().item() if n else 1.0)
    torch.testing.assert_close(found.double(), before + total, rtol=tolerance, atol=tolerance * scale)


def check_rule(module: nn.Module, inputs: torch.Tensor, dtype: torch.dtype, seed: int) -> None:
    """`inputs` are given in fp64; activations and output gradients reach the rule in `dtype`, as under autocast."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        shape = copy.deepcopy(module).double()(inputs).shape
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    output_grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    rule = rule_for(module)
    assert rule is not None
    found = rule(module, inputs, output_grad)
    expected = expected_gradients(module, inputs, output_grad)
    assert set(found) == set(expected)
    for name, gradients in expected.items():
        assert_same([found[name]], gradients, dtype, seed)


def random(shape, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def freeze(module: nn.Module, frozen: str | None) -> nn.Module:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name != frozen)
    return module


# --- linear ----------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(
    n=batch_sizes,
    middle=st.lists(st.integers(1, 7), max_size=2),
    d=st.integers(1, 9),
    p=st.integers(1, 9),
    bias=st.booleans(),
    frozen=st.sampled_from([None, "weight", "bias"]),
    transposed=st.booleans(),
    dtype=dtypes,
    seed=seeds,
)
def test_linear(n, middle, d, p, bias, frozen, transposed, dtype, seed):
    module = Conv1D(p, d) if transposed else nn.Linear(d, p, bias=bias)
    if not bias and frozen == "weight":
        frozen = None
    check_rule(freeze(module, frozen), random((n, *middle, d), seed), dtype, seed)


@pytest.mark.parametrize(("positions", "form"), [(1, None), (2, "gram"), (3, "direct"), (9, "direct")])
def test_both_forms_of_a_linear_norm_are_exact_and_chosen_by_shape(positions, form, monkeypatch):
    # p = d = 8: 1.5·positions·(p + d) ≥ p·d from 3 positions on
    used = []
    for name, function in (("gram", "_gram"), ("direct", "_written")):
        original = getattr(norms, function)
        monkeypatch.setattr(
            norms, function, lambda *a, name=name, original=original: used.append(name) or original(*a)
        )
    check_rule(nn.Linear(8, 8, bias=False), random((3, positions, 8), 0), torch.float32, 0)
    assert set(used) == ({form} if form else set())


@pytest.mark.parametrize("positions", [6, 7])
def test_mirrored_products_are_taken_once(positions, monkeypatch):
    monkeypatch.setattr(norms, "_GRAM_BLOCK", 3)
    check_rule(nn.Linear(40, 30), random((3, positions, 40), 0), torch.float32, 0)


# --- embedding -------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(
    n=batch_sizes,
    middle=st.lists(st.integers(1, 6), max_size=2),
    rows=st.integers(1, 5),  # few rows: most tokens are repeated
    d=st.integers(1, 5),
    padding=st.booleans(),
    sparse=st.booleans(),
    dtype=dtypes,
    seed=seeds,
)
def test_embedding(n, middle, rows, d, padding, sparse, dtype, seed):
    module = nn.Embedding(rows, d, padding_idx=rows - 1 if padding else None, sparse=sparse)
    tokens = torch.randint(rows, (n, *middle), generator=torch.Generator().manual_seed(seed))
    check_rule(module, tokens, dtype, seed)


@pytest.mark.parametrize(
    "module",
    [BartScaledWordEmbedding(6, 3, padding_idx=1, embed_scale=1.7), Gemma3TextScaledWordEmbedding(6, 3, 0, 2.5)],
    ids=lambda module: type(module).__name__,
)
def test_scaled_embeddings_of_transformers(module):
    tokens = torch.randint(6, (3, 5), generator=torch.Generator().manual_seed(0))
    check_rule(module, tokens, torch.float32, 0)


def test_a_scaled_embedding_that_does_something_else_is_not_recognized():
    class Shifted(nn.Embedding):
        embed_scale = 2.0

        def forward(self, tokens):
            return super().forward(tokens) * self.embed_scale + 1.0

    assert rule_for(Shifted(4, 3)) is None


# --- normalization ---------------------------------------------------------------------------------------------------


@EXAMPLES
@given(
    n=batch_sizes,
    middle=st.lists(st.integers(1, 4), max_size=2),
    normalized=st.lists(st.integers(2, 5), min_size=1, max_size=2),
    bias=st.booleans(),
    frozen=st.sampled_from([None, "weight", "bias"]),
    dtype=dtypes,
    seed=seeds,
)
def test_layer_norm(n, middle, normalized, bias, frozen, dtype, seed):
    if not bias and frozen == "weight":
        frozen = None
    module = freeze(nn.LayerNorm(normalized, bias=bias, eps=1e-3), frozen)
    check_rule(module, random((n, *middle, *normalized), seed), dtype, seed)


@EXAMPLES
@given(
    n=batch_sizes,
    middle=st.lists(st.integers(1, 4), max_size=2),
    normalized=st.lists(st.integers(2, 5), min_size=1, max_size=2),
    eps=st.sampled_from([None, 1e-2]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),  # without an eps, torch's own depends on the dtype
    seed=seeds,
)
def test_rms_norm_of_torch(n, middle, normalized, eps, dtype, seed):
    check_rule(nn.RMSNorm(normalized, eps=eps), random((n, *middle, *normalized), seed), dtype, seed)


@EXAMPLES
@given(
    n=batch_sizes,
    spatial=st.lists(st.integers(1, 4), max_size=2),
    groups=st.integers(1, 3),
    width=st.integers(1, 3),
    dtype=dtypes,
    seed=seeds,
)
def test_group_norm(n, spatial, groups, width, dtype, seed):
    if groups * width * math.prod(spatial) <= groups:
        spatial = [*spatial, 2]  # torch refuses groups of one value
    module = nn.GroupNorm(groups, groups * width, eps=1e-3)
    check_rule(module, random((n, groups * width, *spatial), seed), dtype, seed)


def rms_norm_classes(package: str) -> list[type[nn.Module]]:
    try:
        modeling = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    except (ImportError, AttributeError):
        return []
    return [
        value
        for name, value in vars(modeling).items()
        if inspect.isclass(value)
        and issubclass(value, nn.Module)
        and value.__module__ == modeling.__name__
        and ("RMSNorm" in name or name.endswith("T5LayerNorm"))
    ]


SAMPLE = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_next",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3n",
    "t5",
    "mt5",
    "longt5",
    "phi3",
    "olmo2",
    "jamba",
    "mamba",
    "mamba2",
    "bamba",
    "zamba",
    "granite",
    "gpt_oss",
    "falcon_h1",
    "recurrent_gemma",
)


class Alone(nn.Module):
    """A model that is one normalization layer, with a gate where the layer takes one."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.gated = "gate" in inspect.signature(norm.forward).parameters

    def forward(self, x, gate):
        return self.norm(x, gate) if self.gated else self.norm(x)


def check_rms_norm_class(norm_class: type[nn.Module]) -> str | None:
    """Exact by its rule or by the fallback; the name of the rule, or None if there is nothing to train."""
    try:
        norm = norm_class(8)
    except (TypeError, AttributeError):
        return None  # takes a config or more sizes
    if not any(True for _ in norm.parameters()):
        return None
    model = Alone(norm)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    inputs = {name: torch.randn(3, 5, 8, generator=generator) for name in ("x", "gate")}
    weights = torch.randn(5, 8, generator=generator)

    def losses(model, output, labels):
        return (output * weights).sum((1, 2))

    clipper = GhostClipper(model)
    with clipper:
        norms = clipper.norms(losses(model, model(**inputs), None))
    expected = norms_of(gradients_one_by_one(model, inputs, torch.zeros(3), losses))
    torch.testing.assert_close(norms.double(), expected, rtol=1e-4, atol=1e-7)
    assert not clipper.slow_parameters
    return clipper.rules()["norm"]


@pytest.mark.parametrize("package", SAMPLE)
def test_rms_norms_of_transformers(package):
    rules = {norm_class.__name__: check_rms_norm_class(norm_class) for norm_class in rms_norm_classes(package)}
    for name, rule in rules.items():
        if name.endswith("RMSNormGated"):
            assert rule in ("fallback", None), name  # None: takes a group size too
        elif name.endswith("RMSNorm"):
            assert rule == "rms_norm_rule", name
    assert "rms_norm_rule" in rules.values()


@pytest.mark.slow
def test_every_rms_norm_of_transformers():
    found = {
        norm_class.__name__: check_rms_norm_class(norm_class)
        for package in pkgutil.iter_modules(transformers.models.__path__)
        for norm_class in rms_norm_classes(package.name)
    }
    assert sum(rule == "rms_norm_rule" for rule in found.values()) > 150


def test_a_class_that_is_an_rms_norm_by_name_only_is_not_recognized():
    class CenteredRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.eps = 1e-6

        def forward(self, x):
            x = x - x.mean(-1, keepdim=True)
            return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    assert rule_for(CenteredRMSNorm()) is None
    assert check_rms_norm_class(lambda width: CenteredRMSNorm()) == "fallback"


# --- convolution -----------------------------------------------------------------------------------------------------


@EXAMPLES
@given(
    n=batch_sizes,
    dimensions=st.integers(1, 2),
    groups=st.integers(1, 2),
    width=st.integers(1, 2),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    padding=st.sampled_from([0, 1, 2, "same", "valid"]),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    bias=st.booleans(),
    size=st.integers(5, 7),
    dtype=dtypes,
    seed=seeds,
)
def test_convolution(n, dimensions, groups, width, kernel, stride, dilation, padding, mode, bias, size, dtype, seed):
    convolution = nn.Conv1d if dimensions == 1 else nn.Conv2d
    module = convolution(
        2 * groups,
        width * groups,
        kernel,
        stride=1 if padding == "same" else stride,
        dilation=dilation,
        padding=padding,
        groups=groups,
        bias=bias,
        padding_mode=mode if n else "zeros",  # torch itself cannot pad an empty batch otherwise
    )
    check_rule(module, random((n, 2 * groups, *(size + k for k in range(dimensions))), seed), dtype, seed)


def test_convolution_with_unequal_kernel_stride_and_padding():
    module = nn.Conv2d(4, 6, (2, 3), stride=(1, 2), padding=(2, 0), dilation=(2, 1), groups=2)
    check_rule(module, random((3, 4, 7, 8), 0), torch.float32, 0)


# --- contributions of several uses -----------------------------------------------------------------------------------


@EXAMPLES
@given(
    n=batch_sizes,
    forms=st.lists(st.sampled_from(["outer", "rows", "dense"]), min_size=1, max_size=4),
    positions=st.integers(1, 4),
    p=st.integers(1, 6),
    d=st.integers(1, 6),
    dtype=dtypes,
    seed=seeds,
)
def test_uses_are_added_before_the_norm_is_taken(n, forms, positions, p, d, dtype, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    parts, expected = [], torch.zeros(n, p, d, dtype=torch.float64)
    for form in forms:
        if form == "dense":
            parts.append(Dense(draw(n, p, d)))
            expected += parts[-1].value.double()
            continue
        right = draw(n, positions, d)
        if form == "outer":
            parts.append(Outer(draw(n, positions, p), right))
            left = parts[-1].left.double()
        else:
            parts.append(OneHotRows(torch.randint(p, (n, positions), generator=generator), right))
            left = nn.functional.one_hot(parts[-1].index, p).double()
        expected += left.transpose(1, 2) @ right.double()
    assert_same(parts, expected, dtype, seed)


def cancelling(second: str) -> list:
    """Two uses whose gradients nearly cancel: each 10³ times longer than their sum."""
    generator = torch.Generator().manual_seed(0)
    right = 100 * torch.randn(20, 1, 16, generator=generator)
    nearby = right + 0.1 * torch.randn(20, 1, 16, generator=generator)
    if second == "rows":
        index = torch.randint(16, (20, 1), generator=generator)
        return [Outer(nn.functional.one_hot(index, 16).float(), right), OneHotRows(index, -nearby)]
    left = torch.randn(20, 1, 16, generator=generator)
    return [Outer(torch.cat([left, -left], 1), torch.cat([right, nearby], 1))]


@pytest.mark.parametrize("second", ["outer", "rows"])
def test_norms_that_cancel_keep_their_digits(second, monkeypatch):
    parts = cancelling(second)
    written = [
        (p.left if isinstance(p, Outer) else nn.functional.one_hot(p.index, 16)).double().mT @ p.right.double()
        for p in parts
    ]
    expected = sum(written).flatten(1).norm(dim=1)
    shape = torch.Size([16, 16])
    torch.testing.assert_close(squared_norms(parts, shape).sqrt().double(), expected, rtol=1e-3, atol=0.0)
    # The example bites: in fp32 alone these norms are nonsense.
    monkeypatch.setattr(norms, "_CANCELLATION", 0.0)
    assert not torch.allclose(squared_norms(parts, shape).sqrt().double(), expected, rtol=0.01)


@pytest.mark.parametrize("second", ["outer", "rows"])
def test_norms_that_cancel_altogether_are_rounded_up(second):
    """The clipped sum could not be trusted with what they would weigh otherwise."""
    parts = cancelling(second)
    whole = squared_norms(parts[:1], torch.Size([16, 16])).sqrt() if second == "rows" else None
    for part in parts:
        if isinstance(part, Outer) and second == "outer":
            whole = squared_norms([Outer(part.left[:, :1], part.right[:, :1])], torch.Size([16, 16])).sqrt()
            part.right[:, 1] = part.right[:, 0]
        elif isinstance(part, OneHotRows):
            part.right.copy_(-parts[0].right)
    norms = squared_norms(parts, torch.Size([16, 16])).sqrt()
    torch.testing.assert_close(norms, 2 * whole / 2**12)


# --- the registry ----------------------------------------------------------------------------------------------------


def test_a_subclass_of_a_type_with_a_rule_goes_to_the_fallback():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert rule_for(Doubled(3, 3)) is None
    assert GhostClipper(Doubled(3, 3)).rules() == {"": "fallback"}


def test_a_rule_can_be_registered_by_users():
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.weight

    @register_rule(Scale)
    def scale_rule(module, inputs, output_grad):
        return {"weight": Dense((inputs * output_grad).flatten(1, -2).sum(1))}

    check_rule(Scale(), random((2, 4, 3), 0), torch.float32, 0)
