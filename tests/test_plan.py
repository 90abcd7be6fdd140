"""The plan: every number from the same source, nothing silent, round trips."""

import json
import math

import dp_accounting
import pytest

from hf_dcsgd.clipping import BUILTIN_OPTIONS, STRATEGIES, strategy
from hf_dcsgd.privacy import accounting
from hf_dcsgd.privacy.ledger import plan_differences
from hf_dcsgd.privacy.plan import PrivacyPlan, PrivacyUnit
from hf_dcsgd.reporting.plan_table import describe_plan

QNLI = {"dataset_size": 104743, "expected_batch_size": 256, "steps": 2045, "num_parameters": 100_000}


def make(**arguments):
    """A plan; options of strategies may be given by name."""
    settings = {name: arguments.pop(name) for name in BUILTIN_OPTIONS.keys() & arguments.keys()}
    defaults = {**QNLI, "noise_multiplier": 0.75, "accountant": "rdp", "settings": settings}
    return PrivacyPlan.create(**(defaults | arguments))


@pytest.mark.parametrize(
    ("epsilon", "sigma", "grad_sigma"), [(2, 0.75093, 0.75954), (4, 0.60082, 0.60520), (8, 0.48978, 0.49214)]
)
def test_paper_budget(epsilon, sigma, grad_sigma):
    plan = make(noise_multiplier=None, target_epsilon=epsilon)
    assert plan.noise_multiplier == pytest.approx(sigma, abs=6e-6)
    assert plan.grad_noise_multiplier == pytest.approx(grad_sigma, abs=6e-6)
    assert plan.settings["histogram_noise_multiplier"] == 5
    assert plan.delta == 1 / 104743
    assert plan.sampling_rate == 256 / 104743
    assert epsilon - 1e-3 < plan.epsilon() <= epsilon


def test_theorem_1():
    plan = make(noise_multiplier=1.0, histogram_noise_multiplier=5.0)
    assert plan.grad_noise_multiplier == pytest.approx(1.0206207262, abs=1e-10)


def test_andrew_uses_twice_the_std_of_the_count():
    plan = make(clipping="andrew", noise_multiplier=0.75)
    assert plan.settings["andrew_count_noise_std"] == 12.8
    assert plan.side_noise_multipliers == {"2*andrew_count_noise_std": 25.6}
    assert plan.grad_noise_multiplier**-2 == pytest.approx(0.75**-2 - 25.6**-2)


def test_loss_takes_its_share():
    plan = make(loss_clip=4.0, loss_noise_multiplier=7.0)
    assert plan.side_noise_multipliers == {"histogram_noise_multiplier": 5.0, "loss_noise_multiplier": 7.0}
    assert plan.grad_noise_multiplier**-2 == pytest.approx(0.75**-2 - 5.0**-2 - 7.0**-2)
    assert make(loss_clip=4.0).loss_noise_multiplier == 5.0
    assert make().loss_noise_multiplier is None


@pytest.mark.parametrize("clipping", STRATEGIES)
@pytest.mark.parametrize("loss_clip", [None, 3.0])
def test_the_event_costs_what_the_plan_says(clipping, loss_clip):
    plan = make(clipping=clipping, loss_clip=loss_clip)
    orders = [1.5, 2, 4, 8, 16, 32, 64]
    composed = dp_accounting.rdp.RdpAccountant(orders)
    releases = [plan.grad_noise_multiplier, *plan.side_noise_multipliers.values()]
    release = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(multiplier) for multiplier in releases])
    composed.compose(dp_accounting.PoissonSampledDpEvent(plan.sampling_rate, release), plan.steps)
    single = dp_accounting.rdp.RdpAccountant(orders)
    single.compose(
        dp_accounting.PoissonSampledDpEvent(plan.sampling_rate, dp_accounting.GaussianDpEvent(0.75)), plan.steps
    )
    assert composed.get_epsilon(plan.delta) == pytest.approx(single.get_epsilon(plan.delta), rel=1e-9)
    # Nothing larger than σ may reach the accountant.
    assert plan.epsilon() == accounting.epsilon_spent(
        noise_multiplier=0.75, sampling_rate=plan.sampling_rate, steps=2045, delta=plan.delta
    )


@pytest.mark.parametrize("clipping", STRATEGIES)
def test_the_threshold_asks_for_the_noise_that_is_accounted(clipping):
    plan = make(clipping=clipping)
    query = strategy(clipping).from_plan(plan).side_query
    asked = [] if query is None else [query.noise_multiplier]
    assert asked == list(plan.side_noise_multipliers.values())


@pytest.mark.parametrize("clipping", STRATEGIES)
def test_round_trip(clipping):
    plan = make(clipping=clipping, loss_clip=2.0, world_size=2, gradient_accumulation_steps=4, unsafe_noise_seed=3)
    restored = PrivacyPlan.from_dict(json.loads(json.dumps(plan.to_dict(), allow_nan=False)))
    assert restored == plan
    json.dumps(plan.privacy_dict(), allow_nan=False)
    with pytest.raises(ValueError, match="got also surprise"):
        PrivacyPlan.from_dict(plan.to_dict() | {"surprise": 1})


def test_defaults():
    error, percentile = make(clipping="dc_sgd_e"), make(clipping="dc_sgd_p")
    assert error.settings == {
        "clip_threshold": 1.0,
        "histogram_bins": 20,
        "histogram_range": 100.0,
        "histogram_rule": "following",
        "histogram_noise_multiplier": 5.0,
    }
    papers = {"percentile": 0.5, "histogram_range": 1.0, "histogram_rule": "paper"}
    assert percentile.settings == error.settings | papers
    plain = PrivacyPlan.create(**QNLI, noise_multiplier=1.0)
    assert (plain.clipping, plain.accountant) == ("dc_sgd_e", "pld")
    assert make(clipping="dc_sgd_e", histogram_rule="paper").settings["histogram_range"] == 20.0
    for sigma, expected in ((1.9, 5), (2.0, 8), (3.0, 8), (3.1, 12)):
        assert make(noise_multiplier=sigma).settings["histogram_noise_multiplier"] == expected


def test_differences_name_what_changed():
    def differences(**arguments):
        return plan_differences(plan.privacy_dict(), make(**arguments).privacy_dict(), "the ledger")

    plan = make(clipping="dc_sgd_p")
    assert differences(clipping="dc_sgd_p", world_size=4, gradient_accumulation_steps=8) == ""
    assert differences(clipping="dc_sgd_p", percentile=0.7) == "percentile: 0.5 in the ledger, 0.7 now"
    changed = differences(clipping="fixed", noise_multiplier=0.8, expected_batch_size=128)
    assert "noise_multiplier: 0.75 in the ledger, 0.8 now" in changed
    assert "histogram_noise_multiplier: 5.0 in the ledger, None now" in changed
    assert "clipping: dc_sgd_p in the ledger, fixed now" in changed
    assert differences(clipping="dc_sgd_p", unsafe_noise_seed=1).count(" now") == 2


def test_every_number_is_privacy_relevant_but_the_layout():
    ignored = make().to_dict().keys() - make().privacy_dict().keys()
    assert ignored == {"world_size", "gradient_accumulation_steps", "settings", "unit"}
    of_unit = make(unit=PrivacyUnit("user_id", make().dataset_size, 4)).privacy_dict()
    assert of_unit.items() >= {"privacy_unit_column": "user_id", "privacy_unit_max_rows": 4}.items()
    assert PrivacyPlan.from_privacy_dict(of_unit).unit == PrivacyUnit("user_id", make().dataset_size, 4)


def test_what_voids_the_guarantee_is_said():
    plan = make(noise_multiplier=0.0)
    assert plan.opt_outs == ("zero_noise",)
    assert plan.epsilon() == math.inf
    assert "No noise is added" in describe_plan(plan)
    seeded = make(unsafe_noise_seed=1, opt_outs=("raw_loss_logged",))
    assert seeded.opt_outs == ("raw_loss_logged", "unsafe_noise_seed")
    assert "because of unsafe_noise_seed" in describe_plan(seeded)
    assert "raw_loss_logged" in describe_plan(seeded)
    assert "WARNING" not in describe_plan(make())
    for silent in ({"noise_multiplier": 0.0}, {"unsafe_noise_seed": 1}):
        with pytest.raises(ValueError, match="in opt_outs"):
            PrivacyPlan.from_dict(make().to_dict() | silent)


def test_description_shows_the_numbers():
    text = describe_plan(make(noise_multiplier=None, target_epsilon=2))
    for shown in ("ε ≤ 2 ", "9.547e-06", "rdp", "2045 steps", "256/104743", "0.75093", "0.75954", "dc_sgd_e"):
        assert shown in text
    assert "smaller one is better practice" in text
    assert "better practice" not in describe_plan(make(target_delta=1e-6))
    assert "25.6" in describe_plan(make(clipping="andrew"))


def test_epsilon_after_some_steps_and_by_the_other_accountant():
    plan = make()
    assert plan.epsilon(0) == 0
    assert 0 < plan.epsilon(100) < plan.epsilon(1000) < plan.epsilon() == plan.epsilon(2045)
    assert plan.epsilon(accountant="pld") <= plan.epsilon(accountant="rdp")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"histogram_noise_multiplier": 0.5}, "histogram_noise_multiplier > noise_multiplier, got 0.5 and 0.75"),
        ({"histogram_noise_multiplier": 0.75}, "histogram_noise_multiplier > noise_multiplier, got 0.75 and 0.75"),
        ({"histogram_noise_multiplier": 0.0}, "histogram_noise_multiplier > 0, got 0.0"),
        ({"clipping": "andrew", "andrew_count_noise_std": 0.3}, r"2\*andrew_count_noise_std > noise_mult.* 0.6 and"),
        ({"clipping": "andrew", "andrew_count_noise_std": 0.0}, "andrew_count_noise_std > 0, got 0"),
        ({"target_epsilon": 2.0}, "either target_epsilon or noise_multiplier, got 2.0 and 0.75"),
        ({"noise_multiplier": None}, "either target_epsilon or noise_multiplier, got None and None"),
        ({"noise_multiplier": -1.0}, "noise_multiplier >= 0, got -1.0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier >= 0, got nan"),
        ({"target_delta": 1.0}, "delta < 1, got 1.0"),
        ({"target_delta": 0.0}, "0 < delta < 1, got 0.0"),
        ({"expected_batch_size": 104744}, "expected_batch_size <= dataset_size, got 104744 and 104743"),
        ({"dataset_size": 0}, "dataset_size >= 1, got 0"),
        ({"steps": 0}, "steps >= 1, got 0"),
        ({"steps": 2.5}, "steps >= 1, got 2.5"),
        ({"num_parameters": 0}, "num_parameters >= 1, got 0"),
        ({"accountant": "moments"}, "one of rdp, pld, got 'moments'"),
        ({"clipping": "quantile"}, "one of .*fixed.*, got 'quantile'"),
        ({"loss_noise_multiplier": 5.0}, "both or neither of loss_clip and loss_noise_multiplier, got None and 5.0"),
        ({"loss_clip": -1.0}, "loss_clip > 0, got -1.0"),
        ({"clipping": "fixed", "percentile": 0.5}, r"options of fixed \(clip_threshold\), got percentile"),
        ({"histogram_range": math.inf}, "finite histogram_range > 0, got inf"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_zero_is_not_taken_for_a_missing_value():
    for arguments in ({"histogram_range": 0.0}, {"clip_threshold": 0.0}, {"histogram_bins": 0}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            make(**arguments)
