"""Files that somebody else wrote are read without running anything in them, and strings are shown, not interpreted."""

from __future__ import annotations

import ast
import dataclasses
import os
import pickle
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import yaml
from simulated_runs import simulate
from tiny_tasks import feature_classifier, feature_trainer

import hf_dcsgd
from hf_dcsgd.privacy.ledger import LedgerError, PrivacyLedger
from hf_dcsgd.reporting import report
from hf_dcsgd.reporting.model_card import CardFacts, render_card
from hf_dcsgd.reporting.snippets import usage
from hf_dcsgd.runs.checkpoints import is_complete
from hf_dcsgd.runs.trace import read_trace

PACKAGE = Path(hf_dcsgd.__file__).parent
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "code", "codeop"}
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__", "input"}
FORBIDDEN_CALLS = {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen", "pickle.loads"}


# --- the source ------------------------------------------------------------------------------------------------------


def dangers(source: str) -> list[str]:
    """What in a file could run data as code, or a command line as a shell would."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name, options = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            if name in FORBIDDEN_NAMES | FORBIDDEN_CALLS:
                found.append(name)
            if name == "torch.load" and options.get("weights_only") != "True":
                found.append("torch.load without weights_only=True")
            if name in ("np.load", "numpy.load") and options.get("allow_pickle", "False") != "False":
                found.append("numpy.load of pickles")
            if options.get("shell", "False") != "False":
                found.append("a shell")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_runs_data_as_code(path: Path) -> None:
    assert not dangers(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "exec(x)",
        "yaml.load(f)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_the_search_finds_what_it_should(source: str) -> None:
    assert dangers(source)


# --- files that were made to harm ------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def bomb(mark: Path) -> bytes:
    return pickle.dumps(Bomb(mark))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "try_to_write_report", lambda run_dir: None)
        feature_trainer(folder, max_steps=4, save_strategy="steps", save_steps=2).train()
    return folder


def test_the_bomb_goes_off_when_unpickled(tmp_path: Path) -> None:
    pickle.loads(bomb(tmp_path / "mark"))
    assert (tmp_path / "mark").exists()


OF_OURS = ("privacy_ledger.jsonl", "privacy_trace.jsonl", "privacy_run.json", "checkpoint-2/trainer_state.json")
OF_TORCH = (
    "checkpoint-2/training_args.bin",
    "checkpoint-2/rng_state.pth",
    "checkpoint-2/optimizer.pt",
    "checkpoint-2/scheduler.pt",
    "checkpoint-2/model.safetensors",
    "checkpoint-2/pytorch_model.bin",
)


@pytest.mark.parametrize(
    ("name", "zipped"),
    [
        *((name, False) for name in OF_OURS),
        *((name, True) for name in OF_TORCH),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in OF_OURS),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in OF_TORCH),
    ],
)
@pytest.mark.usefixtures("no_report_page")
def test_a_pickle_in_place_of_a_file_is_never_run(finished: Path, tmp_path: Path, name: str, zipped: bool) -> None:
    folder, mark = tmp_path / "run", tmp_path / "mark"
    shutil.copytree(finished, folder)
    path = folder / name
    assert path.exists() or path.name == "pytorch_model.bin"
    if path.name == "pytorch_model.bin":
        (folder / "checkpoint-2" / "model.safetensors").unlink()
    if zipped:
        torch.save(Bomb(mark), path)
    else:
        path.write_bytes(bomb(mark))
    resumed = feature_trainer(folder, max_steps=4, save_strategy="steps", save_steps=2)
    try:
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    except Exception as error:  # what kind it is, other tests tell; here it only must not have run
        print(type(error).__name__, error)
    is_complete(folder / "checkpoint-2")
    for read in (PrivacyLedger.read, report.build_report, report.try_to_write_report, read_trace):
        try:
            read(folder)
        except (LedgerError, ValueError) as error:
            print(read.__name__, error)
    assert not mark.exists()


# --- strings that were made to harm ----------------------------------------------------------------------------------

EVIL = (
    "<script>alert(1)</script> ![x](http://evil) [y](javascript:z) `a` | b\n\n# Not private\n```\n--- \"'; import os"
)


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


@pytest.mark.usefixtures("quick_statements")
def test_the_page_escapes_every_string_of_the_report(tmp_path: Path) -> None:
    """Every text in the report is replaced by an attack, one at a time; the page's tags stay what they were."""
    from hf_dcsgd.reporting.page import render_page

    simulate(tmp_path)
    honest, trace = report.build_report(tmp_path), read_trace(tmp_path)
    expected = Tags(render_page(honest, trace))
    attacked = 0
    for section, key in [(s, k) for s, part in honest.items() if isinstance(part, dict) for k in part]:
        if not isinstance(honest[section][key], str):
            continue
        page = Tags(render_page({**honest, section: {**honest[section], key: EVIL}}, trace))
        assert page.tags <= expected.tags, (section, key)
        assert page.attributes <= expected.attributes, (section, key)
        attacked += 1
    assert attacked >= 5
    assert "script" not in expected.tags
    assert not any(name.startswith("on") for name in expected.attributes)


def test_the_names_of_modules_are_escaped(tmp_path: Path) -> None:
    model = feature_classifier()
    model.add_module("<img src=x onerror=alert(1)>", torch.nn.Linear(1, 1))
    simulate(tmp_path, model=model, trainable_layers=EVIL)
    page = report.write_report(report.build_report(tmp_path), read_trace(tmp_path), tmp_path).read_text(
        encoding="utf-8"
    )
    assert "script" not in Tags(page).tags
    assert "onerror" not in Tags(page).attributes


@pytest.mark.parametrize("field", ["model_name", "dataset_names", "metrics", "usage", "arguments", "layers"])
def test_the_card_escapes_what_others_named(tmp_path: Path, field: str) -> None:
    simulate(tmp_path, trainable_layers=EVIL if field == "layers" else "as_is")
    facts = CardFacts("model", "model = load()", {"clipping": "fixed"}, metrics={"accuracy": 0.5})
    changes = {
        "model_name": {"model_name": EVIL},
        "dataset_names": {"dataset_names": [EVIL]},
        "metrics": {"metrics": {EVIL: 0.5}},
        "usage": {"usage": usage(torch.nn.Module(), EVIL, None, adapter=False)},
        "arguments": {"arguments": {"trainable_layers": EVIL}},
        "layers": {},
    }[field]
    built = report.build_report(tmp_path)
    honest, card = (render_card(built, f) for f in (facts, dataclasses.replace(facts, **changes)))
    yaml.safe_load(card.split("\n---\n")[0].removeprefix("---\n"))  # the header is still one document
    body = card.split("\n---\n", 1)[1]
    prose = "".join(body.split("\n```")[::2])  # outside of fenced blocks
    assert body.count("\n```") == honest.split("\n---\n", 1)[1].count("\n```")
    assert "<script" not in prose
    assert not re.search(r"^# Not private", prose, flags=re.MULTILINE)
    assert not re.search(r"(?<!\\)\[[xy](?<!\\)\]\(", prose)


def test_code_on_the_card_is_still_one_statement_per_line() -> None:
    made = usage(torch.nn.Module(), EVIL, None, adapter=False)
    names = [node.value for node in ast.walk(ast.parse(made)) if isinstance(node, ast.Constant)]
    assert EVIL in names
