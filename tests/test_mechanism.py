"""The step: noise of the right size, once, after the charge; the same on every rank; never past the budget."""

import json
import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_noise import DRAWS, assert_gaussian

from hf_dcsgd.clipping import BUILTIN_OPTIONS, STRATEGIES, NormClipping, strategy
from hf_dcsgd.clipping.fixed import FixedThreshold
from hf_dcsgd.privacy.ledger import LedgerError, PrivacyLedger
from hf_dcsgd.privacy.mechanism import BudgetExhausted, DPMechanism
from hf_dcsgd.privacy.noise import NoiseSource
from hf_dcsgd.privacy.plan import PrivacyPlan

every_strategy = pytest.mark.parametrize("clipping", STRATEGIES)


def make_plan(**arguments):
    """A plan; options of strategies may be given by name, and those of others are left out."""
    clipping = strategy(arguments.get("clipping", "dc_sgd_e"))
    options = {name: arguments.pop(name) for name in BUILTIN_OPTIONS.keys() & arguments.keys()}
    defaults = {
        "dataset_size": 10_000,
        "expected_batch_size": 256,
        "steps": 50,
        "num_parameters": 6,
        "noise_multiplier": 0.75,
        "settings": {option.name: options[option.name] for option in clipping.options if option.name in options},
    }
    return PrivacyPlan.create(**(defaults | arguments))


def noiseless(**arguments):
    """A plan whose gradient carries no noise, for exact comparisons."""
    return make_plan(noise_multiplier=0.0, **arguments)


class Recorder(NoiseSource):
    """Keeps what noise was asked for, in order, among other events."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def add_noise(self, total, noise_multiplier):
        self.events.append(("noise", total.sensitivity, noise_multiplier, total.value.clone()))
        return super().add_noise(total, noise_multiplier)


# --- the noise ----------------------------------------------------------------------------------------------------


@every_strategy
def test_gradient_noise_on_a_million_draws(clipping):
    plan = make_plan(clipping=clipping, num_parameters=DRAWS, clip_threshold=0.37)
    mechanism = DPMechanism(plan)
    sensitivity = mechanism.threshold.sensitivity
    assert sensitivity == (1.0 if clipping == "auto_clip" else 0.37)
    noisy = mechanism.release(torch.zeros(DRAWS)).noisy_gradient
    assert noisy.dtype == torch.float32
    assert_gaussian(noisy, plan.grad_noise_multiplier * sensitivity / 256)


def test_histogram_noise_on_a_million_draws():
    mechanism = DPMechanism(make_plan(clipping="dc_sgd_p", histogram_bins=100_000))
    released = [mechanism.release(torch.zeros(6)).values["noisy_histogram"] for _ in range(DRAWS // 100_000)]
    assert_gaussian(np.concatenate(released), 5.0)


def test_histogram_noise_over_many_steps():
    mechanism = DPMechanism(make_plan(clipping="dc_sgd_e", steps=1000))
    draws = [mechanism.release(torch.zeros(6)).values["noisy_histogram"] for _ in range(1000)]
    assert_gaussian(np.array(draws), 5.0)


def test_andrew_and_loss_noise_over_many_steps():
    plan = make_plan(clipping="andrew", steps=1500, loss_clip=2.0, loss_noise_multiplier=6.0)
    events = []
    mechanism = DPMechanism(plan, noise=Recorder(events))
    losses = [mechanism.release(torch.zeros(6)).noisy_loss for _ in range(1500)]
    assert_gaussian(np.array(losses) * 256, 6.0 * 2.0)
    assert {event[1:3] for event in events if len(event[3]) == 1} == {(0.5, 25.6), (2.0, 6.0)}


def test_nothing_repeats_between_parts_steps_and_runs():
    seen = []
    for _ in range(3):
        torch.manual_seed(42)
        np.random.seed(42)
        mechanism = DPMechanism(make_plan(clipping="dc_sgd_e", num_parameters=20))
        for _ in range(5):
            torch.manual_seed(42)
            release = mechanism.release(torch.zeros(20))
            seen += (release.noisy_gradient * 256 / mechanism.plan.grad_noise_multiplier).tolist()
            seen += (np.array(release.values["noisy_histogram"]) / 5).tolist()
    rounded = {round(abs(value), 5) for value in seen if value != 0}
    # Among 600 normals rounded to 1e-5 about one pair meets by chance; one repeated draw alone gives 20.
    assert len(rounded) > len(seen) - 10


def test_the_global_generators_are_not_moved():
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    mechanism = DPMechanism(make_plan())
    mechanism.clip_factors(torch.ones(3))
    mechanism.release(torch.zeros(6))
    assert torch.equal(torch.rand(2), expected)


# --- sensitivity --------------------------------------------------------------------------------------------------


@every_strategy
def test_noise_is_scaled_to_the_threshold_that_clipped_this_batch(clipping):
    """The heart of the guarantee: σ_T × the C of the factors, never of the step before or after."""
    events = []
    plan = make_plan(clipping=clipping, du_decay=1e-6, andrew_learning_rate=20.0, percentile=0.9, steps=12)
    mechanism = DPMechanism(plan, noise=Recorder(events))
    used = []
    for step in range(12):
        norms = torch.full((200,), 10.0 ** (step % 5 - 2))
        huge = torch.tensor([1e12])
        factors = mechanism.clip_factors(norms), mechanism.clip_factors(huge)
        # What the factors say about the threshold: a huge norm is cut to exactly C.
        used.append((factors[1] * huge).item())
        events.clear()
        release = mechanism.release(torch.zeros(6))
        _, sensitivity, multiplier, _ = events[0]
        assert sensitivity == pytest.approx(used[-1], rel=1e-5)
        assert multiplier == plan.grad_noise_multiplier
        if clipping != "auto_clip":
            assert release.values["clip_threshold"] == sensitivity
    if clipping not in ("fixed", "auto_clip"):
        assert len(set(used)) > 5, "the threshold did not move: nothing was tested"


def test_gradient_noise_follows_a_moving_threshold():
    plan = make_plan(clipping="du", du_decay=1e-4, steps=4, num_parameters=20_000)
    mechanism = DPMechanism(plan)
    for step in range(4):
        noisy = mechanism.release(torch.zeros(20_000)).noisy_gradient
        assert_gaussian(noisy, 0.75 * 1e-4 ** (step / 4) / 256)


def test_a_threshold_that_moves_within_a_batch_is_refused():
    mechanism = DPMechanism(make_plan(clipping="du"))
    mechanism.clip_factors(torch.ones(2))
    mechanism.threshold.update(None)
    with pytest.raises(RuntimeError, match="moved within a logical batch"):
        mechanism.release(torch.zeros(6))
    assert (mechanism.charged, mechanism.released) == (0, 0)


def test_state_is_not_loaded_in_the_middle_of_a_batch():
    mechanism = DPMechanism(make_plan())
    state = mechanism.state_dict()
    mechanism.clip_factors(torch.ones(2))
    with pytest.raises(RuntimeError, match="no logical batch under way"):
        mechanism.load_state_dict(state)
    mechanism.discard()
    mechanism.load_state_dict(state)


@every_strategy
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_one_example_moves_every_private_sum_by_at_most_its_sensitivity(clipping, data):
    """Neighboring batches, the whole way from norms and losses to what the noise is added to."""
    gradients = np.array(data.draw(st.lists(st.lists(st.floats(-100, 100), min_size=6, max_size=6), max_size=5)))
    extra = np.array(data.draw(st.lists(st.floats(-1e6, 1e6), min_size=6, max_size=6)))
    losses = data.draw(st.lists(st.floats(width=32), min_size=len(gradients) + 1, max_size=len(gradients) + 1))
    plan = make_plan(clipping=clipping, loss_clip=3.0)
    sums = []
    for rows in (gradients.reshape(-1, 6), np.vstack([gradients.reshape(-1, 6), extra])):
        events = []
        mechanism = DPMechanism(plan, noise=Recorder(events))
        rows = torch.tensor(rows, dtype=torch.float32)
        factors = mechanism.clip_factors(rows.norm(dim=1), torch.tensor(losses[: len(rows)]))
        mechanism.release((factors[:, None] * rows).sum(dim=0))
        sums.append(events)
    for without, with_extra in zip(*sums, strict=True):
        sensitivity, multiplier = without[1:3]
        assert with_extra[1:3] == (sensitivity, multiplier)
        distance = (with_extra[3].double() - without[3].double()).norm().item()
        assert distance <= sensitivity * (1 + 1e-4) + 1e-4


# --- the sums -----------------------------------------------------------------------------------------------------


@every_strategy
def test_micro_batches_add_up(clipping):
    rng = np.random.default_rng(0)
    norms = torch.tensor(rng.lognormal(0, 1, 40), dtype=torch.float32)
    losses = torch.tensor(rng.uniform(0, 4, 40), dtype=torch.float32)
    plan = make_plan(clipping=clipping, loss_clip=3.0)
    recorded = []
    for cuts in ([40], [10, 10, 10, 10], [0, 39, 0, 1]):
        events = []
        mechanism = DPMechanism(plan, noise=Recorder(events))
        factors = [mechanism.clip_factors(*part) for part in zip(norms.split(cuts), losses.split(cuts), strict=True)]
        mechanism.release(torch.zeros(6))
        recorded.append((torch.cat(factors), [event[3] for event in events]))
    for factors, totals in recorded[1:]:
        assert torch.equal(factors, recorded[0][0])
        for total, expected in zip(totals, recorded[0][1], strict=True):
            torch.testing.assert_close(total, expected)
    assert recorded[0][1][-1].item() == pytest.approx(losses.clamp(0, 3).sum().item())


def test_release_divides_by_the_expected_batch_size():
    clipped_sum = torch.arange(6.0)
    mechanism = DPMechanism(noiseless(clipping="fixed"))
    mechanism.clip_factors(torch.ones(3))
    released = mechanism.release(clipped_sum).noisy_gradient
    assert torch.equal(released, torch.arange(6.0) / 256)
    assert released.data_ptr() == clipped_sum.data_ptr(), "a copy of the sum was made"


@every_strategy
def test_an_empty_logical_batch_is_noise_only_and_charged(clipping, tmp_path):
    plan = make_plan(clipping=clipping, loss_clip=3.0)
    mechanism = DPMechanism(plan, ledger=PrivacyLedger.open(tmp_path, plan.privacy_dict(), resume=False))
    for empty_call in (False, True):
        if empty_call:
            assert mechanism.clip_factors(torch.empty(0)).shape == (0,)
        release = mechanism.release(torch.zeros(6))
        assert (release.noisy_gradient != 0).all()
        assert math.isfinite(release.noisy_loss)
    assert mechanism.charged == PrivacyLedger.read(tmp_path).charged == 2


def test_the_batch_is_cleared_by_a_release():
    events = []
    mechanism = DPMechanism(make_plan(clipping="dc_sgd_e"), noise=Recorder(events))
    mechanism.clip_factors(torch.ones(100))
    mechanism.release(torch.zeros(6))
    mechanism.release(torch.zeros(6))
    assert [event[3].sum().item() for event in events if len(event[3]) == 20] == [100, 0]


def test_losses_are_cut_and_never_poison_the_sum():
    events = []
    mechanism = DPMechanism(make_plan(clipping="fixed", loss_clip=2.0), noise=Recorder(events))
    mechanism.clip_factors(torch.ones(6), torch.tensor([1.0, 5.0, -3.0, math.nan, math.inf, -math.inf]))
    mechanism.release(torch.zeros(6))
    assert events[-1][3].item() == 1 + 2 + 0 + 2 + 2 + 0
    with pytest.raises(
        ValueError, match="expected 2 per_example_losses, because the plan releases the loss, got None"
    ):
        mechanism.clip_factors(torch.ones(2))
    with pytest.raises(ValueError, match=r"got \(3,\)"):
        mechanism.clip_factors(torch.ones(2), torch.ones(3))


def test_no_loss_is_released_unless_planned():
    mechanism = DPMechanism(make_plan())
    mechanism.clip_factors(torch.ones(3), torch.ones(3))
    assert mechanism.release(torch.zeros(6)).noisy_loss is None


def test_values_are_released_ones_only():
    mechanism = DPMechanism(make_plan(clipping="dc_sgd_e", expected_batch_size=2560))
    mechanism.clip_factors(torch.rand(2560) * 5)
    values = mechanism.release(torch.zeros(6)).values
    of_the_histogram = {"histogram_range", "histogram_edges", "noisy_histogram"}
    assert values.keys() == {"clip_threshold", "noisy_clip_fraction"} | of_the_histogram
    assert values["clip_threshold"] == 1.0
    assert values["noisy_clip_fraction"] == pytest.approx(0.8, abs=0.1)
    json.dumps(values, allow_nan=False)


# --- charging -----------------------------------------------------------------------------------------------------


def test_the_charge_comes_before_the_noise(tmp_path):
    plan = make_plan()
    events = []

    class Watched(PrivacyLedger):
        def charge(self, step):
            events.append(("charge", step))
            return super().charge(step)

    mechanism = DPMechanism(
        plan, noise=Recorder(events), ledger=Watched.open(tmp_path, plan.privacy_dict(), resume=False)
    )
    for _ in range(3):
        mechanism.release(torch.zeros(6))
    assert [event[0] for event in events] == ["charge", "noise", "noise"] * 3
    assert [event[1] for event in events if event[0] == "charge"] == [0, 1, 2]


def test_nothing_is_released_when_the_charge_fails(tmp_path):
    plan = make_plan()
    events = []
    ledger = PrivacyLedger.open(tmp_path, plan.privacy_dict(), resume=False)
    mechanism = DPMechanism(plan, noise=Recorder(events), ledger=ledger)
    ledger.close()
    state = mechanism.threshold.state_dict()
    with pytest.raises(LedgerError):
        mechanism.release(torch.zeros(6))
    assert events == []
    assert mechanism.released == 0
    assert mechanism.threshold.state_dict() == state


@pytest.mark.parametrize("with_ledger", [False, True])
def test_the_budget_is_never_passed(tmp_path, with_ledger):
    plan = make_plan(steps=3)
    events = []
    ledger = PrivacyLedger.open(tmp_path, plan.privacy_dict(), resume=False) if with_ledger else None
    mechanism = DPMechanism(plan, noise=Recorder(events), ledger=ledger)
    for _ in range(3):
        assert not mechanism.exhausted
        mechanism.release(torch.zeros(6))
    events.clear()
    state = mechanism.state_dict()
    for _ in range(2):
        assert mechanism.exhausted
        with pytest.raises(BudgetExhausted, match=r"all 3 planned steps are charged \(3\)"):
            mechanism.release(torch.zeros(6))
    assert events == []
    assert (mechanism.charged, mechanism.released) == (3, 3)
    assert mechanism.state_dict() == state
    assert mechanism.epsilon() == plan.epsilon()
    if with_ledger:
        assert PrivacyLedger.read(tmp_path).charged == 3


def test_steps_lost_in_a_crash_stay_charged(tmp_path):
    plan = make_plan(steps=10)

    def start(resume):
        return DPMechanism(plan, ledger=PrivacyLedger.open(tmp_path, plan.privacy_dict(), resume=resume))

    first = start(resume=False)
    for _ in range(4):
        first.release(torch.zeros(6))
    checkpoint = json.loads(json.dumps(first.state_dict()))
    for _ in range(3):
        first.release(torch.zeros(6))
    first.close()

    second = start(resume=True)
    second.load_state_dict(checkpoint)
    assert second.threshold.state_dict() == checkpoint["threshold"]
    assert (second.charged, second.released) == (7, 0)
    assert second.epsilon() == plan.epsilon(7)
    for _ in range(3):
        second.release(torch.zeros(6))
    with pytest.raises(BudgetExhausted):
        second.release(torch.zeros(6))
    lines = (tmp_path / PrivacyLedger.FILENAME).read_text().splitlines()
    assert [json.loads(line).get("step") for line in lines[1:]] == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6]


def test_a_checkpoint_that_the_ledger_does_not_know_is_refused(tmp_path):
    plan = make_plan()
    mechanism = DPMechanism(plan, ledger=PrivacyLedger.open(tmp_path, plan.privacy_dict(), resume=False))
    mechanism.release(torch.zeros(6))
    checkpoint = mechanism.state_dict()
    fresh = DPMechanism(plan, ledger=PrivacyLedger.open(tmp_path / "other", plan.privacy_dict(), resume=False))
    with pytest.raises(LedgerError, match="lines were removed, or the ledger belongs to another run"):
        fresh.load_state_dict(checkpoint)
    with pytest.raises(LedgerError, match="written without a ledger"):
        fresh.load_state_dict(DPMechanism(plan).state_dict())


def test_loading_an_old_state_takes_no_charge_back():
    mechanism = DPMechanism(make_plan())
    old = mechanism.state_dict()
    for _ in range(3):
        mechanism.release(torch.zeros(6))
    mechanism.load_state_dict(old)
    assert mechanism.charged == 3


@every_strategy
def test_state_goes_on_where_it_stopped(clipping):
    plan = noiseless(clipping=clipping, unsafe_noise_seed=5)
    whole, first, second = (DPMechanism(plan) for _ in range(3))
    for _ in range(3):
        for mechanism in (whole, first):
            mechanism.clip_factors(torch.full((300,), 0.3))
            mechanism.release(torch.zeros(6))
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert second.state_dict() == whole.state_dict()
    assert second.threshold.sensitivity == whole.threshold.sensitivity
    assert second.charged == 3


# --- several processes --------------------------------------------------------------------------------------------


class Ranks:
    """Runs one function per rank in lockstep threads; ``all_reduce`` sums over them as a process group would."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=20)
        self.slots = [None] * world_size

    def all_reduce(self, rank):
        def reduce(tensor):
            self.slots[rank] = tensor.clone()
            self.barrier.wait()
            tensor.copy_(sum(self.slots))
            self.barrier.wait()

        return reduce

    def run(self, work):
        results, errors = [None] * self.world_size, []

        def target(rank):
            try:
                results[rank] = work(rank, self.all_reduce(rank))
            except Exception as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


@every_strategy
def test_ranks_agree_and_noise_enters_once(clipping):
    plan = make_plan(clipping=clipping, num_parameters=100_000, world_size=3, loss_clip=2.0)

    def work(rank, all_reduce):
        mechanism = DPMechanism(plan, all_reduce=all_reduce, is_main_process=rank == 0)
        gradients, losses, values = [], [], []
        for step in range(3):
            if rank != step:  # a rank may have drawn nothing
                mechanism.clip_factors(torch.full((50,), float(rank + 1)), torch.ones(50))
            release = mechanism.release(torch.full((100_000,), float(rank)))
            gradients.append(release.noisy_gradient)
            losses.append(release.noisy_loss)
            values.append(release.values)
        return gradients, losses, values, mechanism.state_dict()["threshold"], mechanism.charged

    results = Ranks(3).run(work)
    for gradients, *rest in results[1:]:
        assert rest == list(results[0][1:])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, results[0][0], strict=True))
    for gradient, values in zip(results[0][0], results[0][2], strict=True):
        std = plan.grad_noise_multiplier * values.get("clip_threshold", 1.0)
        assert_gaussian(gradient.double() * 256 - (0 + 1 + 2), std)


def test_side_values_are_summed_over_ranks():
    plan = noiseless(clipping="dc_sgd_e", world_size=2, expected_batch_size=2000, histogram_rule="paper")

    def work(rank, all_reduce):
        mechanism = DPMechanism(plan, all_reduce=all_reduce, is_main_process=rank == 0)
        mechanism.clip_factors(torch.full((1000,), 3.5 + 8 * rank))
        return mechanism.release(torch.zeros(6)).values["noisy_histogram"]

    first, second = Ranks(2).run(work)
    assert first == second
    counts = np.zeros(20)
    counts[[3, 11]] = 1000
    np.testing.assert_allclose(first, counts, atol=35)


def test_every_rank_stops_at_the_same_step(tmp_path):
    plan = make_plan(steps=5, world_size=2)
    # A crashed attempt charged three steps; the checkpoint is from before them.
    crashed = DPMechanism(plan, ledger=PrivacyLedger.open(tmp_path, plan.privacy_dict(), resume=False))
    checkpoint = crashed.state_dict()
    for _ in range(3):
        crashed.release(torch.zeros(6))
    crashed.close()

    def work(rank, all_reduce):
        ledger = PrivacyLedger.open(tmp_path, plan.privacy_dict(), resume=True) if rank == 0 else None
        mechanism = DPMechanism(plan, all_reduce=all_reduce, is_main_process=rank == 0, ledger=ledger)
        mechanism.load_state_dict(checkpoint)
        for _ in range(2):
            mechanism.release(torch.zeros(6))
        with pytest.raises(BudgetExhausted):
            mechanism.release(torch.zeros(6))
        return mechanism.charged, mechanism.released

    assert Ranks(2).run(work) == [(5, 2), (5, 2)]


def test_charges_can_be_agreed_on_before_the_first_step(tmp_path):
    plan = make_plan(steps=2, world_size=2)
    ledger = PrivacyLedger.open(tmp_path, plan.privacy_dict(), resume=False)
    ledger.charge(0)
    ledger.charge(1)

    def work(rank, all_reduce):
        mechanism = DPMechanism(
            plan, all_reduce=all_reduce, is_main_process=rank == 0, ledger=ledger if rank == 0 else None
        )
        mechanism.agree_on_charges("cpu")
        return mechanism.exhausted

    assert Ranks(2).run(work) == [True, True]


# --- misuse -------------------------------------------------------------------------------------------------------


def test_a_threshold_other_than_the_planned_one_is_refused():
    plan = make_plan(clipping="dc_sgd_e")
    with pytest.raises(ValueError, match=r"expected a 'dc_sgd_e' threshold .* got FixedThreshold"):
        DPMechanism(plan, threshold=FixedThreshold(1.0))
    louder = make_plan(clipping="dc_sgd_e", histogram_noise_multiplier=4.0)
    with pytest.raises(ValueError, match=r"side noise multipliers \[5.0\], got \[4.0\]"):
        DPMechanism(plan, threshold=strategy("dc_sgd_e").from_plan(louder))
    own = strategy("dc_sgd_e").from_plan(plan)
    assert DPMechanism(plan, threshold=own).threshold is own


def test_a_threshold_under_the_name_of_another_is_refused():
    """Else a report would state a strategy that was not used."""

    class Smuggled(FixedThreshold):
        pass

    plan = make_plan(clipping="fixed")
    with pytest.raises(ValueError, match=r"expected a 'fixed' threshold .* got Smuggled"):
        DPMechanism(plan, threshold=Smuggled(1.0))
    mechanism = DPMechanism(plan)
    with pytest.raises(AttributeError):
        mechanism.threshold = Smuggled(1.0)
    mechanism._threshold = Smuggled(1.0)
    with pytest.raises(ValueError, match="got Smuggled"):
        mechanism.release(torch.zeros(6))
    assert mechanism.charged == 0


def test_factors_of_a_wrong_strategy_are_cut_to_its_sensitivity(monkeypatch):
    norms = torch.tensor([0.0, 0.5, 4.0, math.nan, math.inf])
    mechanism = DPMechanism(make_plan(clipping="fixed"))
    for wrong in (1.0, math.inf, math.nan, -3.0):
        monkeypatch.setattr(
            NormClipping, "clip_factors", lambda self, norms, wrong=wrong: torch.full_like(norms, wrong)
        )
        factors = mechanism.clip_factors(norms)
        assert (factors >= 0).all()
        assert (factors[:3] * norms[:3] <= mechanism.threshold.sensitivity).all()
        assert factors[3:].tolist() == [0.0, 0.0]


def test_arguments_are_checked(tmp_path):
    plan = make_plan()
    ledger = PrivacyLedger.open(tmp_path, plan.privacy_dict(), resume=False)
    with pytest.raises(ValueError, match="no ledger outside the main process"):
        DPMechanism(plan, ledger=ledger, all_reduce=lambda tensor: None, is_main_process=False)
    with pytest.raises(ValueError, match="expected all_reduce outside the main process"):
        DPMechanism(plan, is_main_process=False)
    mechanism = DPMechanism(plan, ledger=ledger)
    with pytest.raises(ValueError, match=r"clipped_sum of shape \(6,\), got \(7,\)"):
        mechanism.release(torch.zeros(7))
    with pytest.raises(TypeError, match="float32"):
        mechanism.release(torch.zeros(6, dtype=torch.float64))
    assert (mechanism.charged, ledger.charged) == (0, 0), "a misuse was charged"
