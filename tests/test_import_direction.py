"""Imports go one way, from the command line down to the arithmetic, and no module reaches into another's privates."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hf_dcsgd

PACKAGE = Path(hf_dcsgd.__file__).parent

# Folders and files of the package, from the ground up. A layer may import the layers in the lines above its own.
TIERS: tuple[tuple[str, ...], ...] = (
    ("validation", "plugins"),
    ("clipping", "ghost", "tasks"),
    ("privacy",),
    ("data", "recipe"),
    ("checks", "trunk"),
    ("example_losses",),
    ("step", "training_args"),
    ("sharding",),
    ("runs",),
    ("reporting",),
    ("trainer", "own_loop"),
    ("seq2seq", "trl"),
    ("audit",),
    ("jobs",),
    ("cli",),
)
LAYER_TO_TIER = {layer: height for height, layers in enumerate(TIERS) for layer in layers}

NORMAL_DRAWS = {"randn", "randn_like", "normal", "normal_", "standard_normal", "gauss", "normalvariate", "Normal"}
# Synthetic inputs from a fixed seed, to find out what a module computes: nothing is hidden by them.
TRIAL_INPUTS = {"ghost/normalization.py"}


def module_files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    """The folder or top-level file of a module; "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def imported_modules(path: Path, *, deferred: bool = True) -> Iterator[str]:
    """Our modules that a file imports at its top, and with `deferred` also inside functions.

    Imports for the type checker alone are no edges: they do not happen.
    """
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    nodes: list[ast.AST] = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not deferred:
            continue
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "hf_dcsgd")
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            if source.split(".")[0] == "hf_dcsgd":
                for alias in node.names:
                    submodule = PACKAGE.parent.joinpath(*source.split("."), alias.name)
                    exists = submodule.with_suffix(".py").exists() or (submodule / "__init__.py").exists()
                    yield f"{source}.{alias.name}" if exists else source
        else:
            nodes += ast.iter_child_nodes(node)


def test_every_module_belongs_to_a_layer() -> None:
    unassigned = {module_name(path) for path in module_files() if layer_of(module_name(path)) not in LAYER_TO_TIER}
    assert not unassigned, f"say in TIERS where these belong: {sorted(unassigned)}"


def test_imports_go_down_only() -> None:
    wrong = [
        f"{module_name(path)} imports {module}"
        for path in module_files()
        for module in sorted(set(imported_modules(path)))
        if layer_of(module) != layer_of(module_name(path))
        # Not in the table: the package itself, which imports the trainer and so stands above everything.
        and LAYER_TO_TIER.get(layer_of(module), len(TIERS)) >= LAYER_TO_TIER[layer_of(module_name(path))]
    ]
    assert not wrong, "\n".join(wrong)


def test_there_are_no_circles() -> None:
    graph = {module_name(path): set(imported_modules(path, deferred=False)) for path in module_files()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other: {' → '.join(error.args[1])}")


def test_the_walk_sees_what_it_should() -> None:
    seen = set(imported_modules(PACKAGE / "trainer.py"))
    assert {"hf_dcsgd.training_args", "hf_dcsgd.reporting.publishing"} <= seen
    assert "hf_dcsgd.validation" in imported_modules(PACKAGE / "clipping" / "andrew.py")
    assert "hf_dcsgd.cli.diagnosis" in imported_modules(PACKAGE / "cli" / "doctor.py"), "deferred imports count"
    assert "hf_dcsgd.cli.diagnosis" not in imported_modules(PACKAGE / "cli" / "doctor.py", deferred=False)


# --- private names ---------------------------------------------------------------------------------------------------


def is_private(name: str) -> bool:
    return len(name) > 1 and name[0] == "_" != name[1]


def private_members(tree: ast.AST) -> set[str]:
    """Private methods and attributes of the classes in a file."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bodies = [node for owner in classes for node in owner.body]
    names = {node.name for node in bodies if isinstance(node, ast.FunctionDef)}
    for node in bodies:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    names |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    return {name for name in names if is_private(name)}


def private_uses(tree: ast.AST, members_elsewhere: set[str]) -> Iterator[str]:
    """Private names of other modules of ours: imported, taken from a module, or members of a class defined there."""
    foreign = members_elsewhere - private_members(tree)
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "hf_dcsgd" in (node.module or "")
    ]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    yield from sorted(name for name in imported if is_private(name))
    texts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            of_module = isinstance(node.value, ast.Name) and node.value.id in imported
            if of_module or node.attr in foreign:
                yield f"{ast.unparse(node)} (line {node.lineno})"
        elif (
            isinstance(node, ast.Constant) and node.value in foreign and id(node) not in texts
        ):  # getattr, setattr, __dict__
            yield f"{node.value!r} (line {node.lineno})"


def test_no_module_uses_a_private_name_of_another() -> None:
    trees = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in module_files()}
    members = {name: private_members(tree) for name, tree in trees.items()}
    wrong = []
    for name, tree in trees.items():
        elsewhere = {member for other, found in members.items() if other != name for member in found}
        wrong += [f"{name} uses {use}" for use in private_uses(tree, elsewhere)]
    assert not wrong, "\n".join(wrong)


def test_private_uses_are_seen() -> None:
    tree = ast.parse(
        "from hf_dcsgd.ghost import _hidden, engine\n"
        "def f(trainer, tensor, own):\n"
        "    own._mine = trainer.__dict__['_plan']\n"
        "    return trainer._losses(own._mine, tensor._version, engine._run)\n"
    )
    found = set(private_uses(tree, {"_losses", "_plan", "_mine"}))
    assert found == {"_hidden", "'_plan' (line 3)", "trainer._losses (line 4)", "engine._run (line 4)"}


# --- other rules -----------------------------------------------------------------------------------------------------


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    assert not {path.stem for path in module_files()} & {"utils", "util", "common", "helpers", "misc"}


def normal_draws(tree: ast.AST) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) in NORMAL_DRAWS]


def test_one_file_alone_draws_gaussian_noise() -> None:
    draws = {
        str(path.relative_to(PACKAGE)): normal_draws(ast.parse(path.read_text(encoding="utf-8")))
        for path in module_files()
    }
    assert {name for name, calls in draws.items() if calls} - TRIAL_INPUTS == {"privacy/noise.py"}
    for name in TRIAL_INPUTS:
        for call in draws[name]:
            assert "generator" in {keyword.arg for keyword in call.keywords}, f"{name} draws from the global state"
