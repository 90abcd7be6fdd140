"""Imports go one way, from the trainer down to the stages; and one file alone draws Gaussian noise."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hf_dcsgd

PACKAGE = Path(hf_dcsgd.__file__).parent

# Rooms from the ground up: a room may import the rooms above it in this list, and none in its own line or below.
TIERS: tuple[tuple[str, ...], ...] = (
    ("validation",),
    ("sampling", "noise", "histogram", "accounting", "ledger", "losses", "layer_selection", "ghost", "randomness"),
    ("thresholds",),
    ("plan", "tuning_cost"),
    ("mechanism",),
    ("dataloading", "parity", "padding", "forward_writes", "processes"),
    ("callbacks", "search_cost", "checkpoints", "step_cost"),
    ("training_args", "preflight", "run_start"),
    ("report",),
    ("publishing",),
    ("trainer",),
    ("audit", "doctor"),
    ("cli",),
)
STAGES = TIERS[1]
# Files that live in the room of another.
LODGERS = {
    "accountants": "accounting",
    **dict.fromkeys(("report_page", "run_record", "plots", "model_card"), "report"),
}
TIER_OF = {room: height for height, rooms in enumerate(TIERS) for room in rooms}

NORMAL_DRAWS = {"randn", "randn_like", "normal", "normal_", "standard_normal", "gauss", "normalvariate", "Normal"}
# Made-up inputs from a fixed seed, to find out what a module computes: nothing is hidden by them.
TRIAL_INPUTS = {"ghost/normalization.py"}


def module_files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, *, deferred: bool) -> Iterator[str]:
    """Our modules that a file imports: those at its top, and with `deferred` also those inside functions.

    Imports for the type checker alone are no edges: they do not happen.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not deferred:
            continue
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "hf_dcsgd")
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            if source.split(".")[0] == "hf_dcsgd":
                for alias in node.names:
                    submodule = PACKAGE.parent.joinpath(*source.split("."), alias.name)
                    exists = submodule.with_suffix(".py").exists() or (submodule / "__init__.py").exists()
                    yield f"{source}.{alias.name}" if exists else source
        else:
            nodes += ast.iter_child_nodes(node)


def room(module: str) -> str:
    first = module.split(".")[1] if "." in module else ""
    return LODGERS.get(first, first)


def test_every_file_has_a_room() -> None:
    homeless = {module_name(path) for path in module_files() if room(module_name(path)) not in TIER_OF}
    assert not homeless, f"say in TIERS or LODGERS where these belong: {sorted(homeless)}"


@pytest.mark.parametrize("path", module_files(), ids=module_name)
def test_imports_go_down_only(path: Path) -> None:
    here = room(module_name(path))
    for module in imported_modules(path, deferred=True):
        there = room(module)
        assert there, f"{module_name(path)} imports from the package itself, which imports the trainer"
        assert there == here or TIER_OF[there] < TIER_OF[here], f"{module_name(path)} may not import {module}"


@pytest.mark.parametrize("path", module_files(), ids=module_name)
def test_stages_know_nothing_of_each_other(path: Path) -> None:
    here = room(module_name(path))
    if here in STAGES:
        assert {room(module) for module in imported_modules(path, deferred=True)} <= {here, "validation"}


def test_there_are_no_circles() -> None:
    graph = {module_name(path): set(imported_modules(path, deferred=False)) for path in module_files()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other: {' → '.join(error.args[1])}")


def test_the_walk_sees_what_it_should(tmp_path: Path) -> None:
    seen = set(imported_modules(PACKAGE / "trainer.py", deferred=True))
    assert {
        "hf_dcsgd.privacy.mechanism",
        "hf_dcsgd.ghost",
        "hf_dcsgd.training_args",
        "hf_dcsgd.privacy.randomness",
    } <= seen
    assert "hf_dcsgd.validation" in set(imported_modules(PACKAGE / "thresholds" / "andrew.py", deferred=True))
    assert room("hf_dcsgd.ghost.engine") == "ghost"


def test_no_rooms_for_odds_and_ends() -> None:
    assert not {path.stem for path in module_files()} & {"utils", "util", "common", "helpers", "misc"}


def normal_draws(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls]
    return [name for name in names if name in NORMAL_DRAWS]


def test_noise_is_the_only_file_that_draws_gaussian_noise() -> None:
    drawing = {str(path.relative_to(PACKAGE)) for path in module_files() if normal_draws(path)}
    assert drawing - TRIAL_INPUTS == {"noise.py"}
    for name in TRIAL_INPUTS:
        for node in ast.walk(ast.parse((PACKAGE / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in NORMAL_DRAWS:
                assert "generator" in {keyword.arg for keyword in node.keywords}, f"{name} draws from the global state"
