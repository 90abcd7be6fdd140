"""The command line as a user meets it: help, tables, JSON, and one line for every error."""

import json
import subprocess
import sys

import pytest

from hf_dcsgd.cli import main
from hf_dcsgd.privacy import tuning_cost
from hf_dcsgd.privacy.accounting import epsilon_spent, grad_noise_multiplier
from hf_dcsgd.privacy.tuning_cost import METHODS, TuningCost

QNLI = ["--dataset-size", "104743", "--batch-size", "256", "--epochs", "5"]
SIGMA_H = '{"histogram_noise_multiplier": 7.5}'
SMALL = ["--dataset-size", "2000", "--batch-size", "200", "--steps", "20", "--delta", "1e-5"]

FIGURES = {
    "noise_multiplier",
    "grad_noise_multiplier",
    "side_noise_multipliers",
    "steps",
    "sampling_rate",
    "epsilon",
    "delta",
    "accountant",
}


def calibrated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["calibrate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_calibrate_gives_the_figures_of_the_paper(capsys: pytest.CaptureFixture[str]):
    result = calibrated(capsys, "--epsilon", "2", *QNLI)
    assert set(result) == FIGURES | {"other"}
    assert set(result["other"]) == FIGURES
    assert (result["accountant"], result["other"]["accountant"]) == ("rdp", "pld")
    assert result["noise_multiplier"] == pytest.approx(0.75093, abs=1e-5)
    assert result["grad_noise_multiplier"] == pytest.approx(0.75954, abs=1e-5)
    assert result["other"]["noise_multiplier"] == pytest.approx(0.67331, abs=1e-5)
    assert result["other"]["grad_noise_multiplier"] == pytest.approx(0.67950, abs=1e-5)
    for figures in (result, result["other"]):
        assert figures["side_noise_multipliers"] == {"histogram_noise_multiplier": 5.0}
        assert (figures["steps"], figures["sampling_rate"]) == (2045, 256 / 104743)
        assert (figures["epsilon"], figures["delta"]) == (2.0, 1 / 104743)


@pytest.mark.parametrize(
    "clipping", ["fixed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("du", "auto_clip"))]
)
def test_strategies_without_a_side_release(capsys: pytest.CaptureFixture[str], clipping: str):
    result = calibrated(capsys, "--epsilon", "3", *SMALL, "--clipping", clipping)
    for figures in (result, result["other"]):
        assert figures["side_noise_multipliers"] == {}
        assert figures["grad_noise_multiplier"] == figures["noise_multiplier"]


def test_andrew_has_a_side_release_of_its_own(capsys: pytest.CaptureFixture[str]):
    result = calibrated(capsys, "--epsilon", "3", *SMALL, "--clipping", "andrew")
    assert result["side_noise_multipliers"] == {"2*andrew_count_noise_std": 20.0}
    sigma = result["noise_multiplier"]
    # 1/σ² = 1/σ_T² + 1/(2σ_b)² with σ_b = B/20
    assert result["grad_noise_multiplier"] == pytest.approx((sigma**-2 - (2 * 200 / 20) ** -2) ** -0.5, rel=1e-12)


@pytest.mark.parametrize("clipping", ["dc_sgd_p", "dc_sgd_e"])
def test_histogram_noise_multiplier_is_taken(capsys: pytest.CaptureFixture[str], clipping: str):
    result = calibrated(capsys, "--epsilon", "3", *SMALL, "--clipping", clipping, "--clipping-options", SIGMA_H)
    assert result["side_noise_multipliers"] == {"histogram_noise_multiplier": 7.5}
    expected = grad_noise_multiplier(result["noise_multiplier"], {"histogram_noise_multiplier": 7.5})
    assert result["grad_noise_multiplier"] == expected


def test_table_rounds_sigma_up(capsys: pytest.CaptureFixture[str]):
    assert main(["calibrate", "--epsilon", "3", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "T = 20 steps at q = 200/2000 = 0.1" in out
    row = next(line for line in out.splitlines() if line.startswith("noise_multiplier"))
    for accountant, printed in zip(("rdp", "pld"), row.split()[-2:], strict=True):
        run = {"sampling_rate": 0.1, "steps": 20, "delta": 1e-5, "accountant": accountant}
        assert epsilon_spent(noise_multiplier=float(printed), **run) <= 3
        assert epsilon_spent(noise_multiplier=float(printed) - 1e-4, **run) > 3


def test_the_other_accountant_may_fail_alone(capsys: pytest.CaptureFixture[str]):
    arguments = ["--epsilon", "3", *SMALL[:-1], "1e-17"]
    result = calibrated(capsys, *arguments)
    assert result["noise_multiplier"] > 1
    assert result["other"]["noise_multiplier"] is None
    assert set(result["other"]) == FIGURES
    assert main(["calibrate", *arguments]) == 0
    captured = capsys.readouterr()
    assert "note: nothing by pld: no noise_multiplier" in captured.err
    assert main(["calibrate", *arguments, "--accountant", "pld"]) == 2


# --- tuning-cost -----------------------------------------------------------------------------------------------------


def test_tuning_cost_json(capsys: pytest.CaptureFixture[str]):
    assert main(["tuning-cost", "--epsilon", "2", "--runs", "10", *QNLI, "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)
    assert [cost["method"] for cost in costs] == list(METHODS)
    for cost in costs:
        assert set(cost) == {"method", "noise_multiplier", "per_run_epsilon", "per_run_delta"}
    assert costs[0]["noise_multiplier"] == pytest.approx(1.00948, abs=1e-5)
    assert costs[1]["noise_multiplier"] == pytest.approx(2.2602, abs=1e-4)
    assert costs[2]["noise_multiplier"] < costs[0]["noise_multiplier"]


def test_tuning_cost_table_says_what_cannot_be_met(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `test_tuning_cost.py` finds it for this budget."""
    unmet = "cannot meet epsilon=0.005 at delta=1e-05"
    costs = [TuningCost(METHODS[0], 184.868, 0.0015, 1e-5, "exactly 10 runs; all of them may be released")]
    costs += [TuningCost(method, None, None, None, unmet) for method in METHODS[1:]]
    monkeypatch.setattr(tuning_cost, "tuning_costs", lambda **budget: costs)
    budget = ["--epsilon", "0.005", "--delta", "1e-5", "--runs", "10"]
    assert main(["tuning-cost", *budget, "--dataset-size", "1000", "--batch-size", "10", "--steps", "100"]) == 0
    out = capsys.readouterr().out
    assert out.count(unmet) == 3
    assert "exactly 10 runs; all of them may be released" in out
    assert out.rstrip().endswith("least noise: rdp_composition")


# --- errors and help -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon", "0", *SMALL], "expected a finite epsilon > 0, got 0.0"),
        (["--epsilon", "nan", *SMALL], "expected a finite epsilon > 0, got nan"),
        (["--epsilon", "2", *QNLI, "--delta", "1"], "expected 0 < delta < 1, got 1.0"),
        (
            ["--epsilon", "2", "--dataset-size", "100", "--batch-size", "256", "--epochs", "1"],
            "expected --dataset-size >= --batch-size, got 100 and 256",
        ),
        (
            ["--epsilon", "2", "--dataset-size", "100", "--batch-size", "0", "--epochs", "1"],
            "expected --batch-size >= 1, got 0",
        ),
        (
            ["--epsilon", "2", "--dataset-size", "100", "--batch-size", "10", "--steps", "0"],
            "expected a whole steps >= 1, got 0",
        ),
        (
            ["--epsilon", "2", "--dataset-size", "100", "--batch-size", "10", "--epochs", "0"],
            "expected a finite epochs > 0, got 0.0",
        ),
        (
            ["--epsilon", "3", *SMALL, "--clipping-options", '{"histogram_noise_multiplier": 0.5}'],
            "target_epsilon = 3 needs noise_multiplier = 1.19, which leaves nothing for the gradient: expected "
            "histogram_noise_multiplier > noise_multiplier, got 0.5 and 1.19041",
        ),
        (["--epsilon", "0.1", *SMALL], "target_epsilon = 0.1 needs noise_multiplier = "),
        (
            ["--epsilon", "3", *SMALL, "--clipping", "fixed", "--clipping-options", SIGMA_H],
            "expected options of fixed (clip_threshold), got histogram_noise_multiplier",
        ),
        (
            ["--epsilon", "3", *SMALL, "--clipping-options", '{"histogram_bins": "few"}'],
            "expected histogram_bins to be a whole number, got 'few'",
        ),
        (
            ["--epsilon", "3", *SMALL, "--accountant", "moments"],
            "expected accountant to be one of rdp, pld, got 'moments'",
        ),
    ],
)
def test_wrong_values_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str):
    assert main(["calibrate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"hf-dcsgd calibrate: error: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "hf-dcsgd: error: the following arguments are required: COMMAND"),
        (["calibrat"], "hf-dcsgd: error: argument COMMAND: invalid choice: 'calibrat'"),
        (
            ["calibrate", "--epsilon", "two", *QNLI],
            "hf-dcsgd calibrate: error: argument --epsilon: invalid float value",
        ),
        (
            ["calibrate", "--epsilon", "2", *QNLI, "--steps", "3"],
            "hf-dcsgd calibrate: error: argument --steps: not allowed",
        ),
        (
            ["calibrate", "--epsilon", "2", *QNLI, "--clipping-options", "[1]"],
            "hf-dcsgd calibrate: error: argument --clipping-options: expected a JSON mapping, got '[1]'",
        ),
        (
            ["tuning-cost", "--epsilon", "2", *QNLI],
            "hf-dcsgd tuning-cost: error: the following arguments are required",
        ),
    ],
)
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["calibrate", "tuning-cost"])
def test_help_names_every_option(capsys: pytest.CaptureFixture[str], command: str):
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    out = capsys.readouterr().out
    for option in ("--epsilon", "--delta", "--dataset-size", "--batch-size", "--epochs", "--steps", "--json"):
        assert option in out
    assert f"hf-dcsgd {command} --epsilon 2" in out


def test_nothing_of_the_libraries_reaches_the_screen_and_nothing_heavy_is_loaded():
    """A fresh process at a rate where dp_accounting would warn; the console script runs the same function."""
    program = (
        "import sys; from hf_dcsgd.cli import main\n"
        "code = main(['calibrate', '--epsilon', '8', '--dataset-size', '100', '--batch-size', '50', '--steps', '2',"
        " '--delta', '1e-5'])\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules), 'heavy imports'\n"
        "sys.exit(code)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "grad_noise_multiplier" in finished.stdout


def test_a_reader_that_stops_early_is_no_error():
    quick = "--dataset-size 1000 --batch-size 1000 --steps 1 --delta 1e-5 --clipping fixed"  # without sampling
    command = f"{sys.executable} -m hf_dcsgd.cli calibrate --epsilon 2 {quick}"
    shell = f"set -o pipefail; {command} --json | head -c 0"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert "Error" not in done.stderr
    assert "Traceback" not in done.stderr


# --- where the figures are not the point: quick accounting from here on ----------------------------------------------


@pytest.mark.usefixtures("quick_statements")
def test_calibrate_swaps_the_accountants(capsys: pytest.CaptureFixture[str]):
    rdp = calibrated(capsys, "--epsilon", "3", *SMALL)
    pld = calibrated(capsys, "--epsilon", "3", *SMALL, "--accountant", "pld")
    assert {key: pld[key] for key in FIGURES} == rdp["other"]
    assert {key: rdp[key] for key in FIGURES} == pld["other"]


@pytest.mark.usefixtures("quick_statements")
def test_calibrate_compares_both_ways_to_protect_units(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*SMALL, "--epsilon", "3", "--units", "1000", "--rows-per-unit", "2"]
    result = calibrated(capsys, *options)
    assert (result["unit"]["sampling_rate"], result["row"]["sampling_rate"]) == (200 / 1000, 200 / 2000)
    assert result["unit"]["noise_multiplier"] < result["row"]["noise_multiplier"]
    assert result["smaller"] == "unit"
    assert main(["calibrate", *options]) == 0
    printed = capsys.readouterr().out
    assert "for adding or removing one of 1000 units with all of its rows" in printed
    assert f"σ = {result['row']['noise_multiplier']:.5f}" in printed
    assert "privacy_unit_clipping=unit needs less noise, if the cap leaves 2000 rows" in printed
    assert main(["calibrate", *options[:-2]]) != 0
    assert "--units and --rows-per-unit" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_statements")
def test_default_delta_is_noted(capsys: pytest.CaptureFixture[str]):
    assert main(["calibrate", "--epsilon", "3", *SMALL[:-2]]) == 0
    captured = capsys.readouterr()
    assert captured.err == "note: delta is 1/N = 0.0005 by default; a smaller one is better practice\n"
    assert "δ = 0.0005" in captured.out
    assert main(["calibrate", "--epsilon", "3", *SMALL]) == 0
    assert capsys.readouterr().err == ""
