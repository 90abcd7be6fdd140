"""Noise: its law on a million draws, and that no draw is ever seen twice."""

import copy
import os
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from hf_dcsgd.privacy import noise as noise_module
from hf_dcsgd.privacy.noise import NoiseSource, SensitiveSum

DRAWS = 1_000_000
# A correct source fails about once in ten million runs.
ALPHA = 1e-7


def assert_gaussian(sample, std):
    """Mean, standard deviation and shape of ``sample`` are those of N(0, std²), at the resolution of its size."""
    sample = np.asarray(sample, dtype=np.float64).ravel()
    assert abs(sample.mean()) < 5.5 * std / np.sqrt(len(sample))
    assert abs(sample.std() / std - 1) < 5.5 / np.sqrt(2 * len(sample))
    assert stats.kstest(sample / std, "norm").pvalue > ALPHA
    # Neighbors in the tensor are uncorrelated.
    assert abs(np.mean(sample[1:] * sample[:-1])) < 5.5 * std**2 / np.sqrt(len(sample))


@pytest.mark.parametrize(("sensitivity", "multiplier"), [(1.0, 5.0), (0.37, 0.7595), (1e-30, 1.0), (1e30, 3.0)])
def test_noise_is_gaussian_with_multiplier_times_sensitivity(sensitivity, multiplier):
    total = SensitiveSum(torch.zeros(DRAWS), sensitivity)
    noisy = NoiseSource().add_noise(total, multiplier)
    assert noisy.dtype == torch.float32
    assert noisy.isfinite().all()
    assert_gaussian(noisy.double() / sensitivity, multiplier)


def test_noise_is_added_to_a_copy():
    value = torch.arange(12.0).reshape(3, 4)
    total = SensitiveSum(value, 0.01)
    noisy = NoiseSource().add_noise(total, 0.1)
    assert noisy.shape == value.shape
    assert torch.equal(total.value, torch.arange(12.0).reshape(3, 4))
    assert (noisy - value).abs().max() < 0.1
    # On zeros, for beside 11 one draw in thousands is lost in rounding.
    assert (NoiseSource().add_noise(SensitiveSum(torch.zeros(3, 4), 0.01), 0.1) != 0).all()


def test_noise_is_added_in_the_memory_of_a_disposable_value():
    value = torch.arange(12.0)
    noisy = NoiseSource().add_noise(SensitiveSum(value, 0.01, disposable=True), 0.1)
    assert noisy.data_ptr() == value.data_ptr()
    assert 0 < (noisy - torch.arange(12.0)).abs().max() < 0.1
    across = torch.arange(12.0).view(3, 4).T  # has gaps between its numbers: a copy is made
    noisy = NoiseSource().add_noise(SensitiveSum(across, 0.01, disposable=True), 0.1)
    assert noisy.shape == (4, 3)
    assert 0 < (noisy - torch.arange(12.0).view(3, 4).T).abs().max() < 0.1


@pytest.fixture
def short_streams(monkeypatch):
    monkeypatch.setattr(noise_module, "_STREAM_LENGTH", 1000)


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 50_500])
@pytest.mark.usefixtures("short_streams")
def test_streams_cover_every_number_once(size):
    noisy = NoiseSource().add_noise(SensitiveSum(torch.zeros(size), 1.0), 1.0)
    assert noisy.shape == (size,)
    assert (noisy == 0).sum() <= 3  # that is not noise: one number in ten million
    assert size < 2000 or abs(noisy.double().std() - 1) < 5.5 / np.sqrt(2 * size)


@pytest.mark.parametrize("unsafe_seed", [None, 42])
@pytest.mark.usefixtures("short_streams")
def test_streams_are_independent_of_each_other(unsafe_seed):
    source = NoiseSource(unsafe_seed=unsafe_seed)
    draws = [source.add_noise(SensitiveSum(torch.zeros(40_000), 1.0), 1.0).view(40, 1000) for _ in range(2)]
    gram = np.corrcoef(torch.cat(draws).numpy())
    assert np.abs(gram - np.eye(80)).max() < 6.5 / np.sqrt(1000)
    assert_gaussian(torch.cat(draws), 1.0)


@pytest.mark.usefixtures("short_streams")
def test_noise_of_an_unsafe_seed_does_not_depend_on_the_number_of_threads():
    before = torch.get_num_threads()
    drawn = []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            drawn.append(NoiseSource(unsafe_seed=3).add_noise(SensitiveSum(torch.zeros(20_500), 1.0), 1.0))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


def test_each_draw_takes_256_bits_from_the_operating_system(monkeypatch):
    asked = []
    monkeypatch.setattr(os, "urandom", lambda size, original=os.urandom: asked.append(size) or original(size))
    source = NoiseSource()
    for _ in range(3):
        source.add_noise(SensitiveSum(torch.zeros(10), 1.0), 1.0)
    assert asked == [32] * 3


@pytest.mark.parametrize("unsafe_seed", [None, 42])
def test_nothing_repeats_between_tensors_and_steps(unsafe_seed):
    noise = NoiseSource(unsafe_seed=unsafe_seed)
    zeros = SensitiveSum(torch.zeros(1000), 1.0)
    draws = []
    for _ in range(50):
        torch.manual_seed(42)
        np.random.seed(42)
        draws.append(noise.add_noise(zeros, 1.0))
    assert len({draw.numpy().tobytes() for draw in draws}) == 50
    gram = np.corrcoef(torch.stack(draws).numpy())
    assert np.abs(gram - np.eye(50)).max() < 6.5 / np.sqrt(1000)


def test_nothing_repeats_between_sources_copies_and_runs(tmp_path, workers):
    script = tmp_path / "other_run.py"
    script.write_text(
        "import torch; torch.manual_seed(42)\n"
        "from hf_dcsgd.privacy.noise import NoiseSource, SensitiveSum\n"
        "print(NoiseSource().add_noise(SensitiveSum(torch.zeros(8), 1.0), 1.0).tolist())"
    )
    other_runs = [workers.run(1, [script]).output.strip() for _ in range(2)]

    def draw(source):
        torch.manual_seed(42)
        return str(source.add_noise(SensitiveSum(torch.zeros(8), 1.0), 1.0).tolist())

    source = NoiseSource()
    first = draw(source)
    copies = [copy.deepcopy(source), pickle.loads(pickle.dumps(source)), NoiseSource(), source]
    seen = [*other_runs, first, *(draw(each) for each in copies)]
    assert len(set(seen)) == len(seen)


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(42)
    expected = torch.rand(3)
    torch.manual_seed(42)
    NoiseSource().add_noise(SensitiveSum(torch.zeros(100), 1.0), 1.0)
    assert torch.equal(torch.rand(3), expected)


def test_unsafe_seed_makes_runs_repeat():
    def draws(seed):
        noise = NoiseSource(unsafe_seed=seed)
        return [noise.add_noise(SensitiveSum(torch.zeros(5), 1.0), 1.0).tolist() for _ in range(3)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def test_seeds_are_not_cut_to_32_bits():
    # torch's CPU generator cannot tell these two apart, which is why noise on the CPU does not come from it.
    same = [torch.randn(4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1 + 2**32)]
    assert torch.equal(*same)
    first, second = (
        NoiseSource(unsafe_seed=seed).add_noise(SensitiveSum(torch.zeros(4), 1.0), 1.0) for seed in (1, 1 + 2**32)
    )
    assert not torch.equal(first, second)


def test_the_path_for_other_devices_draws_normals_too():
    first, second = torch.zeros(DRAWS), torch.zeros(DRAWS)
    for seed, values in enumerate((first, second)):
        noise_module._add_torch_normal(values, 2.5, np.random.SeedSequence(seed))
        assert_gaussian(values, 2.5)
    assert not torch.equal(first, second)


def test_multiplier_zero_gives_the_value_itself():
    value = torch.rand(10)
    noisy = NoiseSource().add_noise(SensitiveSum(value, 1.0), 0.0)
    assert torch.equal(noisy, value)
    assert noisy.data_ptr() != value.data_ptr()


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"float32 value, got torch\.float16"):
        SensitiveSum(torch.zeros(1, dtype=torch.float16), 1.0)
    for sensitivity in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"sensitivity > 0, got {sensitivity}"):
            SensitiveSum(torch.zeros(1), sensitivity)
    for multiplier in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"noise_multiplier >= 0, got {multiplier}"):
            NoiseSource().add_noise(SensitiveSum(torch.zeros(1), 1.0), multiplier)
