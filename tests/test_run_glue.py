"""run_glue.py end to end on a tiny model, offline: tasks, formats, LoRA, prediction, resume, configuration, errors."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from datasets import Dataset
from glue_fixtures import EXAMPLES, OFFICIAL, save_tiny_bert, write_official
from transformers import AutoModelForSequenceClassification, AutoTokenizer, EvalPrediction

import hf_dcsgd.trainer
from hf_dcsgd.jobs.arguments import DataTrainingArguments, JobParser
from hf_dcsgd.jobs.errors import INTERRUPTED, USAGE_ERROR, exit_code_of
from hf_dcsgd.jobs.glue import TASKS
from hf_dcsgd.jobs.metrics import text_metrics
from hf_dcsgd.jobs.text_classification import metrics_of
from hf_dcsgd.jobs.text_data import load_text_data, tokenized
from hf_dcsgd.privacy.ledger import PrivacyLedger

# isort: split
import run_glue

pytestmark = pytest.mark.usefixtures("quick_statements")

QUICK = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "max_seq_length": 32,
    "disable_tqdm": True,
    "log_level": "error",
    "use_cpu": True,
}


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_bert(tmp_path_factory.mktemp("tiny") / "bert")


@pytest.fixture(scope="session")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty texts with a label, as csv."""
    path = tmp_path_factory.mktemp("messages") / "train.csv"
    Dataset.from_list(message_rows()).to_csv(path, index=False)
    return path


def message_rows() -> list[dict[str, Any]]:
    texts = ["None", "it hurts, a lot", 'he said "ah"', "all is well"]
    return [{"text": f"{texts[k % 4]} {k}" if k % 4 else "None", "label": ("no", "yes")[k % 2]} for k in range(20)]


def call(**options: Any) -> int:
    """run_glue.main with these options on top of the quick ones; None takes one out."""
    argv = []
    for name, value in {**QUICK, **options}.items():
        if value is None:
            continue
        argv += [f"--{name}", str(value)]
    return run_glue.main(argv)


# --- tasks -----------------------------------------------------------------------------------------------------------

# Task → labels of the train split, and of each evaluation split, as ids.
EXPECTED_LABELS = {
    "cola": ([1, 0, 1], [[1, 0]]),
    "sst2": ([1, 0, 0], [[1, 0]]),
    "mrpc": ([1, 0], [[1, 0]]),
    "stsb": ([5.0, 3.8, 0.25], [[5.0, 1.5]]),
    "qqp": ([0, 1], [[1, 0]]),
    "mnli": ([0, 1, 2], [[0, 2], [2]]),
    "qnli": ([0, 1], [[0, 1]]),
    "rte": ([1, 0], [[0]]),
    "wnli": ([1, 0], [[0]]),
}


@pytest.mark.parametrize("task", OFFICIAL)
def test_official_files_of_each_task_are_read_and_tokenized(task: str, tmp_path: Path, tiny_bert: str) -> None:
    args = DataTrainingArguments(task_name=task, glue_dir=str(write_official(tmp_path, task)))
    data = load_text_data(args)
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    train_labels, evaluation_labels = EXPECTED_LABELS[task]
    train = tokenized(data, "train", tokenizer, args)
    assert list(train["label"]) == pytest.approx(train_labels)
    found = [list(tokenized(data, split, tokenizer, args)["label"]) for split in data.splits_of("validation")]
    assert found == evaluation_labels
    for split in data.splits_of("test"):
        assert "label" not in tokenized(data, split, tokenizer, args).column_names
    is_pair = len(data.task.texts) == 2
    assert train[0]["input_ids"].count(tokenizer.sep_token_id) == (2 if is_pair else 1)


def test_open_quotes_are_text(tmp_path: Path) -> None:
    data = load_text_data(DataTrainingArguments(task_name="qnli", glue_dir=str(write_official(tmp_path, "qnli"))))
    assert data.splits["train"]["question"][0] == '"When did it start?'
    assert data.splits["train"]["sentence"][0] == 'It started in 1903, he said: "we began.'


def test_label_ids_are_those_of_the_hub() -> None:
    hub = {
        "cola": ("unacceptable", "acceptable"),
        "sst2": ("negative", "positive"),
        "mrpc": ("not_equivalent", "equivalent"),
        "qqp": ("not_duplicate", "duplicate"),
        "mnli": ("entailment", "neutral", "contradiction"),
        "qnli": ("entailment", "not_entailment"),
        "rte": ("entailment", "not_entailment"),
        "wnli": ("not_entailment", "entailment"),
        "stsb": (),
    }
    assert {name: task.labels for name, task in TASKS.items()} == hub


def reference_metrics(task: str, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    accuracy = sklearn.metrics.accuracy_score(references, predictions) if task != "stsb" else 0.0
    if task == "cola":
        return {"matthews_correlation": sklearn.metrics.matthews_corrcoef(references, predictions)}
    if task == "stsb":
        pearson = scipy.stats.pearsonr(references, predictions).statistic
        spearman = scipy.stats.spearmanr(references, predictions).statistic
        return {"pearson": pearson, "spearmanr": spearman, "combined_score": (pearson + spearman) / 2}
    if task in ("mrpc", "qqp"):
        f1 = sklearn.metrics.f1_score(references, predictions)
        return {"accuracy": accuracy, "f1": f1, "combined_score": (accuracy + f1) / 2}
    return {"accuracy": accuracy}


@pytest.mark.parametrize("task", OFFICIAL)
def test_metrics_of_each_task(task: str, tmp_path: Path) -> None:
    data = load_text_data(DataTrainingArguments(task_name=task, glue_dir=str(write_official(tmp_path, task))))
    generator = np.random.default_rng(0)
    width = max(len(data.task.labels), 1)
    logits = generator.normal(size=(40, width)).astype(np.float32)
    references = (
        generator.uniform(0, 5, 40).astype(np.float32) if task == "stsb" else generator.integers(width, size=40)
    )
    answers = logits[:, 0] if task == "stsb" else logits.argmax(axis=-1)
    found = metrics_of(data.task)(EvalPrediction(predictions=logits, label_ids=references))
    assert found == pytest.approx(reference_metrics(task, answers, references), abs=1e-6)


def test_metric_of_a_constant_prediction_is_finite() -> None:
    names = ("pearson", "spearmanr", "mean_squared_error")
    values = text_metrics(names, predictions=[2.0, 2.0, 2.0], references=[1.0, 2.0, 3.0])
    assert values == pytest.approx({"pearson": 0.0, "spearmanr": 0.0, "mean_squared_error": 2 / 3})


def test_macro_f1_is_that_of_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    for references, predictions in generator.integers(5, size=(20, 2, 12)):
        wanted = sklearn.metrics.f1_score(references, predictions, average="macro", zero_division=0.0)
        assert text_metrics(["f1_macro"], predictions, references)["f1"] == pytest.approx(wanted)


# --- files -----------------------------------------------------------------------------------------------------------


def write_rows(rows: list[dict[str, Any]], path: Path) -> Path:
    data = Dataset.from_list(rows)
    if path.suffix == ".csv":
        data.to_csv(path, index=False)
    elif path.suffix == ".tsv":
        lines = ["\t".join(data.column_names), *("\t".join(str(value) for value in row.values()) for row in rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    elif path.suffix == ".parquet":
        data.to_parquet(path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl", ".parquet"])
def test_every_format_gives_the_same_rows(suffix: str, tmp_path: Path) -> None:
    path = write_rows(message_rows(), tmp_path / f"rows{suffix}")
    data = load_text_data(DataTrainingArguments(train_file=str(path)), cache_dir=str(tmp_path / "cache"))
    assert (data.task.texts, data.task.label) == (("text",), "label")
    assert data.task.labels == ("no", "yes")
    assert list(data.splits["train"]["text"]) == [row["text"] for row in message_rows()]
    assert data.task.metrics == ("accuracy", "f1_macro")


@pytest.mark.parametrize(
    ("row", "texts", "label"),
    [
        ({"premise": "a", "hypothesis": "b", "label": 1}, ("premise", "hypothesis"), "label"),
        ({"id": 3, "headline": "a", "target": "x"}, ("headline",), "target"),
        ({"left": "a", "right": "b", "score": 0.5}, ("left", "right"), "score"),
        ({"note": "x", "content": "a", "class": 1}, ("content",), "class"),
    ],
)
def test_columns_are_found(row: dict[str, Any], texts: tuple[str, ...], label: str, tmp_path: Path) -> None:
    other = {name: value + 1 if isinstance(value, int | float) else f"{value}2" for name, value in row.items()}
    path = write_rows([row, other], tmp_path / "rows.json")
    data = load_text_data(DataTrainingArguments(train_file=str(path)), cache_dir=str(tmp_path / "cache"))
    assert (data.task.texts, data.task.label) == (texts, label)
    assert data.task.is_regression == (label == "score")


def test_labels_may_be_named_and_numbered(tmp_path: Path, tiny_bert: str) -> None:
    rows = [{"text": "a", "label": k} for k in (7, 3, 7)]
    path = write_rows(rows, tmp_path / "rows.json")
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    for options, ids in (({}, [1, 0, 1]), ({"labels": "7,3"}, [0, 1, 0])):
        args = DataTrainingArguments(train_file=str(path), **options)
        data = load_text_data(args, cache_dir=str(tmp_path / "cache"))
        assert list(tokenized(data, "train", tokenizer, args)["label"]) == ids


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qnli_run(tmp_path_factory: pytest.TempPathFactory, tiny_bert: str) -> Path:
    """Training, evaluation and prediction on QNLI's own files (repeated, to have more rows than a batch)."""
    root = write_official(tmp_path_factory.mktemp("glue"), "qnli")
    train = root / "QNLI" / "train.tsv"
    header, *rows = train.read_text(encoding="utf-8").splitlines()
    train.write_text("\n".join([header, *rows * 8]) + "\n", encoding="utf-8")
    output = tmp_path_factory.mktemp("run") / "qnli"
    code = call(
        model_name_or_path=tiny_bert, task_name="qnli", glue_dir=root, output_dir=output,
        do_train=True, do_eval=True, do_predict=True, pad_to_max_length=True,
    )  # fmt: skip
    assert code == 0
    return output


def test_run_leaves_results_predictions_and_a_ledger(qnli_run: Path) -> None:
    results = json.loads((qnli_run / "all_results.json").read_text())
    assert 0 <= results["eval_accuracy"] <= 1
    assert 0 < results["epsilon"] <= 8
    assert "train_loss" not in results
    assert PrivacyLedger.read(qnli_run).charged == 2
    lines = (qnli_run / "predictions_qnli_test.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction"
    assert [line.split("\t")[0] for line in lines[1:]] == ["0", "1"]
    assert {line.split("\t")[1] for line in lines[1:]} <= {"entailment", "not_entailment"}


def test_trained_model_is_a_folder_that_loads(qnli_run: Path, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(qnli_run)
    assert model.config.label2id == {"entailment": 0, "not_entailment": 1}
    root = write_official(tmp_path, "qnli")
    assert call(model_name_or_path=qnli_run, task_name="qnli", glue_dir=root, output_dir=tmp_path, do_eval=True) == 0
    again = json.loads((tmp_path / "eval_results.json").read_text())
    assert again["eval_loss"] == pytest.approx(json.loads((qnli_run / "eval_results.json").read_text())["eval_loss"])


def test_mnli_is_evaluated_and_predicted_on_both_sets(tmp_path: Path, tiny_bert: str) -> None:
    root = write_official(tmp_path, "mnli")
    out = tmp_path / "out"
    options = {"model_name_or_path": tiny_bert, "task_name": "MNLI", "glue_dir": root, "output_dir": out}
    assert call(**options, ignore_mismatched_sizes=True, do_eval=True, do_predict=True) == 0
    results = json.loads((out / "eval_results.json").read_text())
    assert {"eval_accuracy", "eval_mm_accuracy"} <= set(results)
    assert len((out / "predictions_mnli_test_matched.tsv").read_text().splitlines()) == 2
    assert len((out / "predictions_mnli_test_mismatched.tsv").read_text().splitlines()) == 3


@pytest.mark.slow
def test_regression_task_trains_and_predicts_scores(tmp_path: Path, tiny_bert: str) -> None:
    root = write_official(tmp_path, "stsb")
    out = tmp_path / "out"
    code = call(
        model_name_or_path=tiny_bert, task_name="stsb", glue_dir=root, output_dir=out, do_train=True, do_eval=True,
        do_predict=True, ignore_mismatched_sizes=True, per_device_train_batch_size=1,
    )  # fmt: skip
    assert code == 0
    assert "eval_pearson" in json.loads((out / "eval_results.json").read_text())
    float((out / "predictions_stsb_test.tsv").read_text().splitlines()[1].split("\t")[1])


@pytest.mark.slow
def test_own_files_with_labelled_test_data(tmp_path: Path, tiny_bert: str, messages: Path) -> None:
    test = write_rows(message_rows()[:6], tmp_path / "test.parquet")
    out = tmp_path / "out"
    code = call(
        model_name_or_path=tiny_bert, train_file=messages, validation_file=messages, test_file=test, output_dir=out,
        cache_dir=tmp_path / "cache", do_train=True, do_eval=True, do_predict=True, max_train_samples=16,
        max_eval_samples=5, max_predict_samples=3, clipping="fixed",
    )  # fmt: skip
    assert code == 0
    results = json.loads((out / "eval_results.json").read_text())
    assert {"eval_accuracy", "eval_f1"} <= set(results)
    assert PrivacyLedger.read(out).plan["dataset_size"] == 16
    predictions = [line.split("\t")[1] for line in (out / "predictions_own_test.tsv").read_text().splitlines()[1:]]
    assert len(predictions) == 3
    assert set(predictions) <= {"no", "yes"}


def test_texts_longer_than_the_model_takes_are_cut(tmp_path: Path, tiny_bert: str) -> None:
    rows = write_rows([{"text": "long " * 100, "label": k} for k in (0, 1)], tmp_path / "long.json")
    code = call(
        model_name_or_path=tiny_bert, validation_file=rows, output_dir=tmp_path / "out", do_eval=True,
        cache_dir=tmp_path / "cache", max_seq_length=500,
    )  # fmt: skip
    assert code == 0


@pytest.mark.slow
@pytest.mark.usefixtures("no_report_page")
def test_lora_run_saves_adapters_that_load_again(tmp_path: Path, tiny_bert: str, messages: Path) -> None:
    out = tmp_path / "out"
    held_out = tmp_path / "validation.csv"
    Dataset.from_list([{**row, "text": f"again {row['text']}"} for row in message_rows()]).to_csv(
        held_out, index=False
    )
    files = {"validation_file": held_out, "cache_dir": tmp_path / "cache"}
    code = call(
        model_name_or_path=tiny_bert, train_file=messages, output_dir=out, do_train=True, do_eval=True, lora=True,
        lora_rank=2, lora_alpha=4, lora_targets="query,value", learning_rate=0.1, **files,
    )  # fmt: skip
    assert code == 0
    adapter = json.loads((out / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (2, 4)
    assert set(adapter["target_modules"]) == {"query", "value"}
    assert "classifier" in adapter["modules_to_save"]
    # 2 layers × 2 modules × 2 × 16 × rank 2, and the classifier of 16 × 2 + 2.
    assert PrivacyLedger.read(out).plan["num_parameters"] == 256 + 34
    again = tmp_path / "again"
    assert call(model_name_or_path=out, output_dir=again, do_eval=True, labels="no,yes", **files) == 0
    before, after = (json.loads((p / "eval_results.json").read_text())["eval_loss"] for p in (out, again))
    assert after == pytest.approx(before, abs=1e-5)


def test_non_private_reference_says_so(
    tmp_path: Path, tiny_bert: str, messages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = call(
        model_name_or_path=tiny_bert, train_file=messages, output_dir=tmp_path / "out", do_train=True,
        non_private=True, cache_dir=tmp_path / "cache",
    )  # fmt: skip
    assert code == 0
    assert "NOTHING IS PRIVATE" in capsys.readouterr().out
    assert not (tmp_path / "out" / PrivacyLedger.FILENAME).exists()
    assert "epsilon" not in json.loads((tmp_path / "out" / "train_results.json").read_text())


@pytest.mark.usefixtures("no_report_page")
def test_interrupted_run_is_offered_and_resumed(
    tmp_path: Path,
    tiny_bert: str,
    messages: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    options = {
        "model_name_or_path": tiny_bert, "train_file": messages, "output_dir": out, "do_train": True, "max_steps": 4,
        "save_steps": 2, "cache_dir": tmp_path / "cache",
    }  # fmt: skip
    real_step = hf_dcsgd.trainer.DCSGDTrainer.training_step

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 3:
            raise KeyboardInterrupt
        return real_step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(hf_dcsgd.trainer.DCSGDTrainer, "training_step", interrupted)
        assert call(**options) == INTERRUPTED
    assert "--resume_from_checkpoint last" in capsys.readouterr().err

    assert call(**options) == USAGE_ERROR
    said = capsys.readouterr().err
    assert "already holds a run (3 of 4 steps charged)" in said
    assert "--resume_from_checkpoint last" in said

    (out / "checkpoint-3").mkdir()  # a checkpoint of which nothing was written before the run was ended
    assert call(**options, resume_from_checkpoint="last") == 0
    # Three charged before, of which one was lost with the interruption: one is left.
    assert PrivacyLedger.read(out).charged == 4

    capsys.readouterr()
    assert call(**options, new_run=True) == 0
    assert len(PrivacyLedger.read(out).runs) == 2
    assert "together with the earlier runs in this directory" in capsys.readouterr().out


# --- configuration ---------------------------------------------------------------------------------------------------

CONFIG = {
    "model_name_or_path": "somewhere",
    "task_name": "qnli",
    "output_dir": "out",
    "do_train": True,
    "learning_rate": 0.001,
    "target_epsilon": 4,
    "lora": False,
    "label_names": ["labels"],
    "lr_scheduler_kwargs": None,
}


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml"])
def test_file_and_command_line_mean_the_same(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"config{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps(CONFIG))
    else:
        # YAML 1.1 reads 1e-3 as a string.
        lines = [f"{name}: {json.dumps(value)}" for name, value in CONFIG.items()]
        path.write_text("\n".join(lines).replace("0.001", "1e-3"))
    line = "--model_name_or_path somewhere --task_name qnli --output_dir out --do_train --learning_rate 1e-3"
    argv = [*line.split(), "--target_epsilon", "4", "--label_names", "labels"]
    from_file, from_line = JobParser().parse([str(path)]), JobParser().parse(argv)
    for one, two in zip(from_file, from_line, strict=True):
        # Logging directories and the like carry the time.
        one, two = ({k: v for k, v in vars(o).items() if isinstance(v, int | float | list | None)} for o in (one, two))
        assert one == two


def test_options_after_a_file_have_the_last_word(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    _, data, training = JobParser().parse([str(path), "--target_epsilon", "2", "--task_name", "rte"])
    assert (training.target_epsilon, data.task_name) == (2.0, "rte")
    assert training.learning_rate == 1e-3


def test_empty_cells_are_empty_texts(tmp_path: Path, tiny_bert: str) -> None:
    rows = "".join(f"{'' if k == 3 else 'word'},{'yes' if k % 2 else 'no'}\n" for k in range(8))
    (tmp_path / "rows.csv").write_text(f"text,label\n{rows}")
    _, data_args, _ = JobParser().parse(
        ["--model_name_or_path", tiny_bert, "--train_file", str(tmp_path / "rows.csv"), "--output_dir", str(tmp_path)]
    )
    data = load_text_data(data_args, str(tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    tokens = tokenized(data, "train", tokenizer, data_args)["input_ids"]
    assert tokens[3] == tokenizer("")["input_ids"]


def test_help_has_a_text_for_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run_glue.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for heading in ("\nmodel:", "\ndata:", "\nprivacy:", "\ntraining (transformers' TrainingArguments):"):
        assert heading in text
    assert text.index("\nmodel:") < text.index("\nprivacy:") < text.index("\ntraining (")
    privacy, training = text.split("\nprivacy:")[1].split("\ntraining (")
    for option in ("target_epsilon", "clipping", "trainable_layers", "unsafe_noise_seed"):
        assert f"\n  --{option}" in privacy
        assert f"\n  --{option}" not in training
    assert "\n  --learning_rate X" in training
    # An option without a text stands alone: the next line is another option.
    assert not re.findall(r"\n  --\S+[^\n]{0,30}\n(?=  -)", text)


# --- errors ----------------------------------------------------------------------------------------------------------

ERRORS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "model not found": ({"model_name_or_path": "no-such-model"}, ("no-such-model", "network", "folder")),
    "model in an empty folder": ({"model_name_or_path": "EMPTY"}, ("cannot load the model",)),
    "unknown task": ({"train_file": None, "task_name": "qnil"}, ("'qnil'", "did you mean qnli?")),
    "no data hub": ({"train_file": None, "task_name": "rte"}, ("rte", "--glue_dir")),
    "glue folder missing": (
        {"train_file": None, "task_name": "rte", "glue_dir": "nowhere"}, ("--glue_dir nowhere", "not a folder"),
    ),
    "glue folder of another task": (
        {"train_file": None, "task_name": "rte", "glue_dir": "EMPTY"}, ("holds none of train.tsv", "empty/RTE"),
    ),
    "missing column": ({"text_column": "txet"}, ("'txet'", "columns: text, label", "--text_column")),
    "pair without text": ({"text_pair_column": "text"}, ("needs --text_column",)),
    "no file": ({"train_file": "missing.csv"}, ("--train_file missing.csv", "no such file")),
    "unknown format": ({"train_file": "rows.xlsx"}, ("rows.xlsx", ".csv")),
    "epsilon cannot be met": ({"target_epsilon": 1e-6, "target_delta": 1e-12}, ("epsilon", "1e-06")),
    "epsilon not positive": ({"target_epsilon": 0}, ("target_epsilon", "got 0")),
    "both budgets": ({"target_epsilon": 1, "noise_multiplier": 1}, ("target_epsilon and noise_multiplier",)),
    "unknown layer": ({"trainable_layers": "bert.poolr"}, ("bert.poolr", "near matches: bert.pooler")),
    "fewer rows than a batch": ({"per_device_train_batch_size": 64}, ("20 examples and 128",)),
    "unknown option": ({"target_epsilom": 8}, ("--target_epsilom", "did you mean --target_epsilon?")),
    "value of the wrong type": ({"learning_rate": "fast"}, ("learning_rate", "fast")),
    "unknown strategy": ({"clipping": "dc_sgd"}, ("clipping", "dc_sgd_e")),
    "presets on adapters": ({"lora": True, "lora_targets": "query", "trainable_layers": "head"}, ("as_is",)),
    "unknown lora target": ({"lora": True, "lora_targets": "qeury"}, ("--lora_targets qeury", "key, query, value")),
    "no checkpoint": ({"resume_from_checkpoint": "last"}, ("complete checkpoint in",)),
    "nothing to do": ({"do_train": None}, ("--do_train, --do_eval or --do_predict",)),
    "no validation data": ({"do_train": None, "do_eval": True}, ("no validation data",)),
    "no test data": ({"do_train": None, "do_predict": True}, ("no test data",)),
    "no validation data, told before training": ({"do_eval": True}, ("--do_eval", "no validation data")),
    "no test data, told before training": ({"do_predict": True}, ("--do_predict", "no test data")),
    "epsilon too small for the histogram": (
        {"target_epsilon": 0.01, "target_delta": 1e-5},
        ("target_epsilon = 0.01 needs noise_multiplier", "histogram_noise_multiplier"),
    ),
    "output below a file": ({"output_dir": "FILE/out"}, ("--output_dir", "FILE/out", "cannot be written")),
    "no hub to push to": (
        {"push_to_hub": True, "hub_model_id": "me/x"}, ("--push_to_hub", "nothing was trained", "hf auth login"),
    ),
    "no source": ({"train_file": None}, ("--task_name", "--train_file")),
    "labels that do not occur": ({"labels": "maybe,never"}, ("'label'", "maybe, never")),
    "another number of labels": ({"labels": "no,yes,maybe"}, ("--ignore_mismatched_sizes",)),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_friendly_line(
    case: str, tmp_path: Path, tiny_bert: str, messages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, fragments = ERRORS[case]
    (tmp_path / "empty").mkdir()
    (tmp_path / "FILE").write_text("")
    options = {name: tmp_path / "empty" if value == "EMPTY" else value for name, value in options.items()}
    options = {name: tmp_path / value if value == "FILE/out" else value for name, value in options.items()}
    defaults = {
        "model_name_or_path": tiny_bert, "train_file": messages, "do_train": True, "output_dir": tmp_path / "out",
        "cache_dir": tmp_path / "cache",
    }  # fmt: skip
    assert call(**{**defaults, **options}) == USAGE_ERROR
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    for fragment in fragments:
        assert fragment in lines[0]
    assert not (tmp_path / "out" / PrivacyLedger.FILENAME).exists()


@pytest.mark.parametrize(
    ("name", "text", "fragment"),
    [
        ("missing.yaml", None, "there is no such file"),
        ("broken.json", "{", "cannot be read"),
        ("list.json", "[1]", "expected option names"),
        ("extra.json", '{"model_name_or_path": "x", "task_name": "rte", "epsilom": 3}', "--epsilom"),
    ],
)
def test_bad_configuration_files(
    name: str, text: str | None, fragment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert run_glue.main([str(tmp_path / name)]) == USAGE_ERROR
    assert fragment in capsys.readouterr().err


def test_a_missing_extra_is_named(
    tmp_path: Path,
    tiny_bert: str,
    messages: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    files = {"train_file": messages, "output_dir": tmp_path / "out", "cache_dir": tmp_path / "cache"}
    assert call(model_name_or_path=tiny_bert, do_train=True, lora=True, **files) == USAGE_ERROR
    assert "pip install 'hf-dcsgd[demo]'" in capsys.readouterr().err


def test_faults_of_ours_keep_their_traceback() -> None:
    def fault() -> None:
        raise ValueError("not for the user")

    with pytest.raises(ValueError, match="not for the user"):
        exit_code_of(fault)


def test_whole_persons_from_a_csv(tmp_path: Path, tiny_bert: str) -> None:
    rows = [{**row, "user_id": f"person-{k % 12}"} for k, row in enumerate(message_rows() * 2)]
    train = write_rows(rows, tmp_path / "train.csv")
    code = call(
        model_name_or_path=tiny_bert, train_file=train, privacy_unit="user_id", max_rows_per_unit=2,
        per_device_train_batch_size=4, output_dir=tmp_path / "out", do_train=True,
    )  # fmt: skip
    assert code == 0
    report = json.loads((tmp_path / "out" / "privacy_report.json").read_text())
    assert report["sampling"]["privacy_unit"] == {
        "column": "user_id", "count": 12, "max_rows": 2, "clipping": "unit",
    }  # fmt: skip
    assert report["sampling"]["dataset_size"] == 12
    assert "for adding or removing any one user_id with all of its rows" in report["guarantee"]["sentence"]
    for path in (tmp_path / "out").rglob("*"):
        assert not path.is_file() or b"person-" not in path.read_bytes(), path


def test_the_command_of_the_readme_for_whole_persons(
    tmp_path: Path, tiny_bert: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands there, but with another model, for two steps."""
    text = (EXAMPLES.parents[1] / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = (line for line in text.splitlines() if "run_glue.py" in line and "--privacy_unit user_id" in line)
    rows = [{**row, "user_id": k % 40} for k, row in enumerate(message_rows() * 6)]
    write_rows(rows, tmp_path / "messages.csv")
    monkeypatch.chdir(tmp_path)
    program, script, *options = shlex.split(command)
    assert (program, script) == ("python", "examples/glue/run_glue.py")
    quick = ["--max_steps", "2", "--accountant", "rdp", "--use_cpu", "--report_to", "none"]
    assert run_glue.main([*options, "--model_name_or_path", tiny_bert, *quick]) == 0
    (written,) = tmp_path.rglob("privacy_report.json")
    report = json.loads(written.read_text())
    assert written.parent == tmp_path / options[options.index("--output_dir") + 1]
    assert report["sampling"]["privacy_unit"]["count"] == report["sampling"]["dataset_size"] == 40
    assert report["guarantee"]["sentence"].count("one user_id with all of its rows")


@pytest.mark.parametrize(
    ("cells", "column", "message"),
    [("a,", "user_id", "column 'user_id' is empty in some rows"), ("a,b", "author", "no such column")],
)
def test_owners_that_are_missing(
    tmp_path: Path, tiny_bert: str, cells: str, column: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.csv"
    path.write_text(
        "text,label,user_id\n" + "\n".join(f"some text,{k % 2},{c}" for k, c in enumerate(cells.split(",")))
    )
    assert call(
        model_name_or_path=tiny_bert, train_file=path, privacy_unit=column, output_dir=tmp_path / "out", do_train=True
    )
    assert message in capsys.readouterr().err
