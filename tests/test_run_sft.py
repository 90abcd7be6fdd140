"""run_sft.py end to end on a tiny model, offline: kinds of rows, what is learned, generation, adapters, errors."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
from tiny_language_model import chat_rows, prompt_rows, save_tiny_llama, text_rows, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, EvalPrediction

from hf_dcsgd.jobs.errors import USAGE_ERROR, UserError
from hf_dcsgd.jobs.generation import generate_texts
from hf_dcsgd.jobs.language_arguments import GenerationArguments, LanguageDataArguments
from hf_dcsgd.jobs.language_data import (
    MESSAGES,
    PROMPT,
    TEXT,
    Columns,
    RowFormat,
    encoded,
    find_columns,
    load_language_data,
    tokenized,
    use_end_token,
)
from hf_dcsgd.jobs.language_modeling import multi_reference_bleu, summed_losses, token_metrics
from hf_dcsgd.privacy.ledger import PrivacyLedger

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "language_modeling"))

# isort: split
import run_sft

pytestmark = pytest.mark.usefixtures("quick_statements")

QUICK = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "max_seq_length": 48,
    "max_new_tokens": 4,
    "disable_tqdm": True,
    "log_level": "error",
    "use_cpu": True,
}


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


def write(rows: list[dict[str, Any]], path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def call(**options: Any) -> int:
    """run_sft.main with these options on top of the quick ones; None takes one out, "" stands for a bare flag."""
    argv = []
    for name, value in {**QUICK, **options}.items():
        if value is not None:
            argv += [f"--{name}"] if value == "" else [f"--{name}", str(value)]
    return run_sft.main(argv)


# --- what is learned -------------------------------------------------------------------------------------------------


def learned_text(row: dict[str, Any], columns: Columns, separator: str = "\n") -> tuple[str, str]:
    """The whole row as the model reads it, and the part with labels."""
    tokenizer = tiny_tokenizer()
    tokens = encoded(tokenizer, RowFormat(tokenizer, columns, separator).example(row), 1000)
    kept = [token for token, label in zip(tokens["input_ids"], tokens["labels"], strict=True) if label != -100]
    assert all(label in (-100, token) for token, label in zip(tokens["input_ids"], tokens["labels"], strict=True))
    return tokenizer.decode(tokens["input_ids"]), tokenizer.decode(kept)


def test_of_conversations_only_what_the_assistant_says_is_learned() -> None:
    whole, learned = learned_text(chat_rows()[3], Columns(MESSAGES, ("messages",)))
    assert whole == "<s>[user]hi 3</s>[assistant]yes 3</s>[user]more</s>[assistant]no 3</s>"
    assert learned == "yes 3</s>no 3</s>"


def test_of_prompts_with_completions_the_completions_are_learned() -> None:
    columns = Columns(PROMPT, ("prompt", "completion"))
    assert learned_text(prompt_rows()[4], columns) == ("<s>name[2]\nIt is 4.</s>", "It is 4.</s>")
    row = {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}
    assert learned_text(row, columns) == ("<s>[user]q</s>[assistant]a</s>", "a</s>")
    earlier = [{"role": "assistant", "content": "old"}, {"role": "user", "content": "q"}]
    assert learned_text({"prompt": earlier, "completion": "a"}, columns)[1] == "a</s>"


def test_plain_texts_are_learned_whole_but_for_the_token_that_starts_them() -> None:
    assert learned_text({"text": "a text"}, Columns(TEXT, ("text",))) == ("<s>a text</s>", "a text</s>")


def test_prompts_are_what_training_rows_begin_with() -> None:
    tokenizer = tiny_tokenizer()
    for columns, row, reference in (
        (Columns(MESSAGES, ("messages",)), chat_rows()[1], "no 1"),
        (Columns(PROMPT, ("prompt", "completion")), prompt_rows()[1], "It is 1."),
    ):
        row_format = RowFormat(tokenizer, columns)
        assert row_format.example(row).text.startswith(row_format.prompt(row) + reference)
        assert row_format.reference(row) == reference
    spaced = RowFormat(tokenizer, Columns(PROMPT, ("prompt", "completion")), " => ")
    assert spaced.prompt({"prompt": "a"}) == "<s>a =>", "a space belongs to the word after it"


def test_another_token_may_end_a_text() -> None:
    tokenizer, columns = tiny_tokenizer(), Columns(PROMPT, ("prompt", "completion"))
    use_end_token(tokenizer, GenerationArguments(end_token="<s>"))
    tokens = encoded(tokenizer, RowFormat(tokenizer, columns).example(prompt_rows()[4]), 1000)
    assert tokens["labels"][-1] == tokens["input_ids"][0] == tokenizer.eos_token_id == 1


def test_long_rows_are_cut_and_may_have_nothing_to_learn(tmp_path: Path, tiny_llama: str) -> None:
    path = write([{"prompt": "p" * 60, "completion": "c"}, {"prompt": "p", "completion": "c"}], tmp_path / "a.jsonl")
    args = LanguageDataArguments(train_file=str(path), max_seq_length=16)
    data, columns = load_language_data(args, str(tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    rows = tokenized(data["train"], "train", RowFormat(tokenizer, columns), args)
    assert [len(ids) for ids in rows["input_ids"]] == [16, 5]
    assert [sum(label != -100 for label in labels) for labels in rows["labels"]] == [0, 2]


@pytest.mark.parametrize(
    ("available", "kind"),
    [(("id", "messages"), MESSAGES), (("completion", "prompt"), PROMPT), (("label", "content"), TEXT)],
)
def test_columns_are_found_by_their_names(available: tuple[str, ...], kind: str, tmp_path: Path) -> None:
    args = LanguageDataArguments(train_file=str(write(text_rows(2), tmp_path / "a.jsonl")))
    assert find_columns(args, available).kind == kind


# --- figures ---------------------------------------------------------------------------------------------------------


def test_loss_is_counted_by_tokens_not_by_rows(tiny_llama: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    ids = torch.randint(3, 200, (3, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 3:] = -100
    labels[2] = -100
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    metrics = token_metrics(EvalPrediction(summed_losses(logits, labels).numpy(), np.zeros(3)))
    kept = labels[:, 1:] != -100
    losses = -logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    assert metrics["loss_per_token"] == pytest.approx(losses[kept].mean().item(), rel=1e-5)
    assert metrics["tokens"] == 2 + 11
    assert metrics["perplexity"] == pytest.approx(np.exp(metrics["loss_per_token"]))


def test_bleu_takes_as_many_references_as_there_are() -> None:
    references = [["the cat sat on the mat today", "a cat sat on a mat"], ["it is raining very hard outside"]]
    assert multi_reference_bleu(["a cat sat on a mat", "it is raining very hard outside"], references) > 99.9
    assert multi_reference_bleu(["nothing of that kind at all", "no"], references) < 5


def test_texts_are_generated_in_the_order_of_their_prompts(tiny_llama: str) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_llama), AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.model_max_length = 128
    prompts = ["<s>a", "<s>some longer prompt", "<s>bc", "<s>a"]
    args = GenerationArguments(max_new_tokens=6, generation_batch_size=3)
    together = generate_texts(model, tokenizer, prompts, args, show_progress=False)
    alone = [generate_texts(model, tokenizer, [prompt], args, show_progress=False)[0] for prompt in prompts]
    assert together == alone
    with pytest.raises(UserError, match="max_new_tokens 200"):
        generate_texts(model, tokenizer, prompts, GenerationArguments(max_new_tokens=200))


def test_a_model_that_ends_at_once_writes_something_where_nothing_is_no_answer(tiny_llama: str) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_llama), AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.model_max_length = 128
    with torch.no_grad():
        likeliest = (
            model(torch.tensor([tokenizer("<s>a", add_special_tokens=False)["input_ids"]])).logits[0, -1].topk(2)
        )
    model.generation_config.eos_token_id = likeliest.indices[0].item()
    args = GenerationArguments(max_new_tokens=1)
    (empty,) = generate_texts(model, tokenizer, ["<s>a"], args, show_progress=False)
    (other,) = generate_texts(model, tokenizer, ["<s>a"], args, may_be_empty=False, show_progress=False)
    assert (empty.text, empty.finished) == ("", True)
    assert (other.text, other.finished) == (tokenizer.decode(likeliest.indices[1:]).strip(), False)


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("chat", chat_rows()),
        pytest.param("prompt", prompt_rows(), marks=pytest.mark.slow),
        pytest.param("text", text_rows(), marks=pytest.mark.slow),
    ],
)
def test_each_kind_of_rows_trains_adapters(
    kind: str, rows: list[dict[str, Any]], tmp_path: Path, tiny_llama: str
) -> None:
    out = tmp_path / "out"
    options = {} if kind == "text" else {"test_file": write(rows[:6], tmp_path / "test.jsonl"), "do_predict": ""}
    held_out = write(
        [json.loads(json.dumps(row).replace("a", "e")) | row for row in rows[16:]], tmp_path / "dev.jsonl"
    )
    code = call(
        model_name_or_path=tiny_llama, train_file=write(rows[:16], tmp_path / "train.jsonl"), output_dir=out,
        validation_file=held_out, cache_dir=tmp_path / "cache", do_train="", do_eval="", lora_rank=2, **options,
    )  # fmt: skip
    assert code == 0
    results = json.loads((out / "all_results.json").read_text())
    assert 0 < results["epsilon"] <= 8
    assert results["eval_loss_per_token"] == pytest.approx(np.log(259), abs=0.5)
    assert "train_loss" not in results
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 2
    assert PrivacyLedger.read(out).charged == 2
    assert "text-generation" in (out / "README.md").read_text()
    if kind != "text":
        lines = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
        distinct = {"chat": 6, "prompt": 3}[kind]
        assert len(lines) == distinct == results["test_prompts"]
        assert {len(line["references"]) for line in lines} == {6 // distinct}
        assert 0 <= results["test_bleu"] <= 100


@pytest.mark.slow
def test_adapters_go_on_and_are_evaluated_from_their_folder(tmp_path: Path, tiny_llama: str) -> None:
    rows = write(prompt_rows(), tmp_path / "train.jsonl")
    held_out = write([{"prompt": "x", "completion": "y"}], tmp_path / "dev.jsonl")
    common = {"validation_file": held_out, "do_eval": "", "cache_dir": tmp_path / "cache"}
    first, second = tmp_path / "first", tmp_path / "second"
    assert call(model_name_or_path=tiny_llama, train_file=rows, do_train="", output_dir=first, **common) == 0
    assert call(model_name_or_path=first, output_dir=second, **common) == 0
    losses = [json.loads((out / "eval_results.json").read_text())["eval_loss_per_token"] for out in (first, second)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_layers_of_the_model_or_no_privacy_if_asked_for(tmp_path: Path, tiny_llama: str) -> None:
    rows = write(prompt_rows(), tmp_path / "train.jsonl")
    common = {"model_name_or_path": tiny_llama, "train_file": rows, "do_train": "", "cache_dir": tmp_path / "cache"}
    assert call(**common, no_lora="", trainable_layers="last:1", output_dir=tmp_path / "layers") == 0
    assert not (tmp_path / "layers" / "adapter_config.json").exists()
    assert call(**common, non_private="", output_dir=tmp_path / "plain") == 0
    assert not (tmp_path / "plain" / PrivacyLedger.FILENAME).exists()


@pytest.mark.slow
def test_whole_persons_are_protected_if_a_column_names_them(tmp_path: Path, tiny_llama: str) -> None:
    rows = [{**row, "person": f"p{k % 10}"} for k, row in enumerate(chat_rows())]
    code = call(
        model_name_or_path=tiny_llama, train_file=write(rows, tmp_path / "a.jsonl"), output_dir=tmp_path / "out",
        do_train="", cache_dir=tmp_path / "cache", privacy_unit="person",
    )  # fmt: skip
    assert code == 0
    assert PrivacyLedger.read(tmp_path / "out").plan["dataset_size"] == 10


@pytest.mark.slow
def test_a_yaml_file_holds_all_options(tmp_path: Path, tiny_llama: str) -> None:
    rows = write(prompt_rows(), tmp_path / "train.jsonl")
    options = {**QUICK, "model_name_or_path": tiny_llama, "train_file": str(rows), "output_dir": str(tmp_path / "out")}
    lines = [f"{name}: {json.dumps(value)}" for name, value in {**options, "do_train": True}.items()]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    assert run_sft.main([str(tmp_path / "run.yaml"), "--max_steps", "1"]) == 0
    assert PrivacyLedger.read(tmp_path / "out").charged == 1


# --- errors ----------------------------------------------------------------------------------------------------------

ERRORS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no data": ({"train_file": None}, ("--train_file",)),
    "no such column": ({"text_column": "txet"}, ("'txet'", "columns: prompt, completion")),
    "half a pair": ({"prompt_column": "prompt"}, ("--prompt_column and --completion_column",)),
    "no validation data": ({"do_eval": ""}, ("--do_eval", "--validation_file")),
    "no test data": ({"do_predict": ""}, ("--do_predict", "--test_file")),
    "no template file": ({"chat_template": "missing.jinja"}, ("missing.jinja",)),
    "no chat template": ({"model_name_or_path": "NO_CHAT", "train_file": "CHATS"}, ("--chat_template FILE",)),
    "no tokens": ({"max_new_tokens": 0}, ("--max_new_tokens 0",)),
    "cold": ({"temperature": -1}, ("--temperature -1",)),
    "no such end": ({"end_token": "<end>"}, ("--end_token <end>",)),
    "unknown lora target": ({"lora_targets": "q_porj"}, ("--lora_targets q_porj", "q_proj")),
    "unknown option": ({"promt_column": "a"}, ("did you mean --prompt_column?",)),
    "model not found": ({"model_name_or_path": "no-such-model"}, ("no-such-model", "folder")),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_friendly_line(
    case: str, tmp_path: Path, tiny_llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options, fragments = ERRORS[case]
    special = {
        "NO_CHAT": lambda: save_tiny_llama(tmp_path / "plain", chat=False),
        "CHATS": lambda: write(chat_rows(), tmp_path / "chats.jsonl"),
    }
    defaults = {
        "model_name_or_path": tiny_llama, "train_file": write(prompt_rows(), tmp_path / "rows.jsonl"), "do_train": "",
        "output_dir": tmp_path / "out", "cache_dir": tmp_path / "cache",
    }  # fmt: skip
    assert call(**defaults | {name: special.get(value, lambda v=value: v)() for name, value in options.items()}) == 2
    assert USAGE_ERROR == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    for fragment in fragments:
        assert fragment in error
    assert not (tmp_path / "out" / PrivacyLedger.FILENAME).exists()


def test_help_has_a_text_for_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_sft.main(["--help"])
    text = capsys.readouterr().out
    for name in ("messages_column", "separator", "max_new_tokens", "lora", "target_epsilon"):
        assert f"\n  --{name}" in text
