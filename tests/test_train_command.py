"""`hf-dcsgd train`: from a CSV file to a model with its report, in a process of its own; dry runs, errors, help."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from glue_fixtures import save_tiny_bert
from tiny_language_model import save_tiny_llama
from worker_pool import WorkerPool

from hf_dcsgd.cli import main
from hf_dcsgd.cli import train as train_command
from hf_dcsgd.jobs.arguments import JobParser, ModelArguments
from hf_dcsgd.jobs.errors import REFUSED, SPENT, USAGE_ERROR, exit_code_of
from hf_dcsgd.jobs.language_arguments import LanguageDataArguments, LanguageModelArguments
from hf_dcsgd.jobs.metrics import span_metrics, spans_of
from hf_dcsgd.jobs.token_data import TokenDataArguments
from hf_dcsgd.privacy.ledger import LedgerError, PrivacyLedger
from hf_dcsgd.privacy.mechanism import BudgetExhausted

pytestmark = pytest.mark.usefixtures("quick_statements")

ROWS = 64


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def message(k: int) -> dict[str, object]:
    return {"text": f"{'good' if k % 2 else 'bad'} {k}", "label": "yes" if k % 2 else "no", "user_id": k // 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("train")
    save_tiny_bert(root / "bert")
    write_csv(root / "train.csv", [message(k) for k in range(ROWS)])
    write_csv(root / "dev.csv", [message(k) for k in range(ROWS, ROWS + 8)])
    tagged = [{"tokens": f"anna sees {k}", "ner_tags": "B-PER O B-NUM"} for k in range(ROWS + 8)]
    write_csv(root / "tagged.csv", tagged[:ROWS])
    write_csv(root / "tagged_dev.csv", tagged[ROWS:])
    data = root / "dataset"
    data.mkdir()
    for name, numbers in {"train": range(ROWS), "validation": range(ROWS, ROWS + 8)}.items():
        write_csv(data / f"{name}.csv", [message(k) for k in numbers])
    return root


QUIET = ["--report_to", "none", "--use_cpu", "--disable_tqdm", "true", "--save_strategy", "no", "--recipe", "none"]
SHORT = [*QUIET, "--max_steps", "2", "--accountant", "rdp", "--max_seq_length", "16"]


def test_a_csv_and_a_model_become_a_private_model_with_its_report(
    workers: WorkerPool, folder: Path, tmp_path: Path
) -> None:
    data = ["--train_file", folder / "train.csv", "--validation-file", folder / "dev.csv"]
    done = workers.run(1, [
        "-m", "hf_dcsgd.cli", "train", "--task", "text-classification", "--model", folder / "bert", *data,
        "--epsilon", "8", "--output-dir", tmp_path / "out", "--cache_dir", tmp_path / "cache", *SHORT,
    ])  # fmt: skip
    assert PrivacyLedger.read(tmp_path / "out").charged == 2
    report = json.loads((tmp_path / "out" / "privacy_report.json").read_text(encoding="utf-8"))
    assert report["guarantee"]["epsilon"] <= 8
    assert {"README.md", "model.safetensors", "eval_results.json", "train_results.json"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    for shown in ("Estimate (cpu, made-up examples of 16 tokens)", "Privacy plan", "eval_accuracy"):
        assert shown in done.output


EXTRAS = ("matplotlib", "peft", "evaluate", "sklearn", "sacrebleu", "opacus", "hypothesis", "tensorboard")


@pytest.mark.slow
def test_base_dependencies_are_enough(folder: Path, tmp_path: Path) -> None:
    """What the extras bring is taken away before the package is imported; adapters then say which one they need."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))\n"
        "from hf_dcsgd.cli import main\n"
        "refused = main(['train', *sys.argv[1:], '--output_dir', 'other', '--lora'])\n"
        f"sys.exit(main(['train', *sys.argv[1:], '--output_dir', 'out']) if refused == {USAGE_ERROR} else 1)"
    )
    options = [*text_options(folder, validation_file=folder / "dev.csv"), "--cache_dir", tmp_path / "cache", *SHORT]
    argv = [sys.executable, "-c", code, *map(str, options)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "pip install 'hf-dcsgd[demo]'" in done.stderr
    assert not (tmp_path / "other").exists()
    assert (tmp_path / "out" / "privacy_report.json").is_file()
    assert (tmp_path / "out" / "eval_results.json").is_file()


def call(*options: object) -> int:
    return main(["train", *map(str, options)])


def text_options(folder: Path, **changes: object) -> list[object]:
    options = {"task": "text-classification", "model": folder / "bert", "train_file": folder / "train.csv", **changes}
    return [part for name, value in options.items() if value is not None for part in (f"--{name}", value)]


def test_a_dry_run_shows_plan_recipe_and_cost_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(*text_options(folder, epsilon=3), "--dry_run", "--use_cpu", "--cache_dir", tmp_path / "cache") == 0
    shown = capsys.readouterr().out
    for part in ("ε ≤ 3", "Recipe (auto)", "WARNING", "expect little: 64 examples", "Estimate (cpu", "memory", "time"):
        assert part in shown
    assert shown.rstrip().endswith("Dry run: nothing was spent, nothing was written.")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.slow
def test_a_file_holds_the_options_and_those_after_it_have_the_last_word(folder: Path, tmp_path: Path) -> None:
    options = {
        "task": "token-classification", "model": str(folder / "bert"), "train_file": str(folder / "tagged.csv"),
        "validation_file": str(folder / "tagged_dev.csv"), "epsilon": 1e-3, "output_dir": str(tmp_path / "out"),
        "cache_dir": str(tmp_path / "cache"), "ignore_mismatched_sizes": True,
    }  # fmt: skip
    (tmp_path / "names.yaml").write_text(yaml.safe_dump(options))
    assert call(tmp_path / "names.yaml", "--epsilon", 8, *SHORT) == 0
    ledger = PrivacyLedger.read(tmp_path / "out")
    assert ledger.charged == 2
    assert ledger.plan["target_epsilon"] == 8
    metrics = json.loads((tmp_path / "out" / "eval_results.json").read_text(encoding="utf-8"))
    assert {"eval_f1", "eval_precision", "eval_recall", "eval_accuracy"} <= set(metrics)
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["id2label"] == {"0": "O", "1": "B-NUM", "2": "B-PER"}


def test_a_dataset_by_its_name_whole_persons_and_the_cache(folder: Path, tmp_path: Path) -> None:
    caches = ["--cache_dir", tmp_path / "cache", "--trunk_cache", "on", "--trunk_cache_dir", tmp_path / "trunk"]
    options = text_options(folder, train_file=None, dataset=folder / "dataset", output_dir=tmp_path / "out")
    assert call(*options, "--privacy_unit", "user_id", "--noise_multiplier", 1, *caches, *SHORT) == 0
    ledger = PrivacyLedger.read(tmp_path / "out")
    assert ledger.charged == 2
    assert (tmp_path / "out" / "eval_results.json").is_file()
    report = json.loads((tmp_path / "out" / "privacy_report.json").read_text(encoding="utf-8"))
    assert "user_id" in report["guarantee"]["sentence"]


@pytest.mark.slow
def test_adapters_of_a_language_model(folder: Path, tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "llama")
    rows = [{"prompt": f"say {k}", "completion": f"{k} it is"} for k in range(ROWS)]
    write_csv(tmp_path / "prompts.csv", rows)
    options = ["--task", "text-generation", "--model", model, "--train_file", tmp_path / "prompts.csv"]
    assert call(*options, "--output_dir", tmp_path / "out", "--cache_dir", tmp_path / "cache", *SHORT) == 0
    assert PrivacyLedger.read(tmp_path / "out").charged == 2
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


# --- errors and help -------------------------------------------------------------------------------------------------

ERRORS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "no task": ({"task": None}, ("--task", "text-classification, token-classification, text-generation", "got None")),
    "unknown task": ({"task": "classify"}, ("--task", "got classify")),
    "no output": ({"output_dir": None}, ("--output_dir", "--dry_run")),
    "no data": ({"train_file": None}, ("--train_file",)),
    "no such file": ({"train_file": "nowhere.csv"}, ("--train_file nowhere.csv", "no such file")),
    "no such data set": ({"train_file": None, "dataset": "no/such-set"}, ("--dataset_name no/such-set", "Hub")),
    "no such model": ({"model": "no-such-model"}, ("no-such-model", "network")),
    "misspelled": ({"epsilom": 3}, ("--epsilom",)),
    "budget": ({"epsilon": 0}, ("target_epsilon", "got 0")),
    "fp16": ({"fp16": True}, ("fp16", "bf16=True, which works on a CPU, too")),
    "unit": ({"privacy_unit": "person"}, ("--privacy_unit person", "columns: text, label, user_id")),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_line_with_code_2(
    case: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, fragments = ERRORS[case]
    options = {"output_dir": tmp_path / "out", "cache_dir": tmp_path / "cache", **changes}
    assert call(*text_options(folder, **options)) == USAGE_ERROR
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    for fragment in fragments:
        assert fragment in lines[0]
    assert not (tmp_path / "out" / PrivacyLedger.FILENAME).exists()


@pytest.mark.slow
def test_a_run_that_is_there_is_not_repeated(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*text_options(folder, output_dir=tmp_path / "out", cache_dir=tmp_path / "cache"), *SHORT]
    assert call(*options) == 0
    assert call(*options) == USAGE_ERROR
    assert "already holds a run (2 of 2 steps charged)" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(BudgetExhausted, SPENT), (LedgerError, SPENT)])
def test_spent_budgets_have_a_code_of_their_own(
    error: type[Exception], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(error):  # raised by the test, so that it is no message of the package
        exit_code_of(lambda: (_ for _ in ()).throw(error("x")))
    if error is LedgerError:
        (tmp_path / PrivacyLedger.FILENAME).write_text("no ledger\n")
        assert exit_code_of(lambda: PrivacyLedger.read(tmp_path)) == code


def test_models_that_couple_examples_have_a_code_of_their_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers as hf
    from torch import nn

    original = hf.BertForSequenceClassification.__init__

    def with_batch_norm(model: hf.BertForSequenceClassification, config: hf.BertConfig) -> None:
        original(model, config)
        model.classifier = nn.Sequential(nn.BatchNorm1d(config.hidden_size), model.classifier)

    monkeypatch.setattr(hf.BertForSequenceClassification, "__init__", with_batch_norm)
    options = text_options(folder, output_dir=tmp_path / "out", cache_dir=tmp_path / "cache")
    assert call(*options, *SHORT) == REFUSED
    assert "BatchNorm" in capsys.readouterr().err
    assert not (tmp_path / "out" / PrivacyLedger.FILENAME).exists()


def test_the_short_help_names_options_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    parsers = (
        JobParser(),
        JobParser(ModelArguments, TokenDataArguments),
        JobParser(LanguageModelArguments, LanguageDataArguments),
    )
    known = {spelling for parser in parsers for spelling in parser._option_string_actions}
    listed = re.findall(r"^  --([\w-]+)", shown, flags=re.MULTILINE)
    assert len(listed) > 20
    for name in set(listed) - {"task", "help_all"}:
        assert f"--{train_command.SHORT.get(name, name)}" in known, name
    for heading in ("what:", "data:", "privacy:", "training:", "exit codes:", "examples:"):
        assert f"\n{heading}" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_all_options_of_a_task_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--task", "token-classification", "--help_all"])
    shown = capsys.readouterr().out
    assert "--words_column" in shown
    assert "--target_epsilon" in shown


# --- spans -----------------------------------------------------------------------------------------------------------


def test_spans_of_tags() -> None:
    assert spans_of(["B-PER", "I-PER", "O", "B-LOC", "B-LOC"]) == {(0, 2, "PER"), (3, 4, "LOC"), (4, 5, "LOC")}
    assert spans_of(["I-PER", "I-LOC", "I-LOC"]) == {(0, 1, "PER"), (1, 3, "LOC")}
    assert spans_of(["NOUN", "O", "NOUN"]) == {(0, 1, "NOUN"), (2, 3, "NOUN")}
    assert spans_of([]) == set()


def test_span_metrics_count_whole_spans() -> None:
    wanted = [["B-PER", "I-PER", "O"], ["B-LOC", "O", "O"]]
    made = [["B-PER", "O", "O"], ["B-LOC", "O", "B-PER"]]
    found = span_metrics(made, wanted)
    assert found == pytest.approx({"precision": 1 / 3, "recall": 1 / 2, "f1": 2 / 5, "accuracy": 4 / 6})
