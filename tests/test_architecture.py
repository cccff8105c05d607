"""The house keeps its floors: imports go down only, homes are kept, files stay readable."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ZONES = {
    "ppo_lightning": "ppo_lightning",
    "callbacks": "ppo_lightning.callbacks",
    "recipes": "ppo_lightning.recipes",
}
# first match wins; a module may import from any floor below, and from its own inside its folder
FLOORS = [
    ("ppo_lightning.recipes", 7),
    ("ppo_lightning.cli", 6),
    ("ppo_lightning.__main__", 6),
    ("ppo_lightning.run", 5),
    ("ppo_lightning.launchers", 1),
    ("ppo_lightning.callbacks", 4),
    ("ppo_lightning.hooks", 3),
    ("ppo_lightning.data", 3),
    ("ppo_lightning.module", 3),
    ("ppo_lightning.loop", 3),
    ("ppo_lightning.megatron", 2),
    ("ppo_lightning.engines", 1),
    ("ppo_lightning.rewards", -1),
    ("ppo_lightning", 0),
]
HOMES = {
    "megatron": "ppo_lightning.megatron",
    "ray": "ppo_lightning.launchers",
    "sglang": "ppo_lightning.engines",
}
MAX_FILE, MAX_FUNCTION = 300, 50
LONGER_FUNCTIONS = {"ppo_lightning.module:training_step": 60}


def sources() -> dict[str, Path]:
    found = {}
    for folder, package in ZONES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *[p for p in parts if p != "__init__"]])] = path
    return found


SOURCES = sources()


def floor(module: str) -> int:
    if module == "ppo_lightning":
        return 8  # the lazy front door
    return next(f for prefix, f in FLOORS if module == prefix or module.startswith(prefix + "."))


def folder(module: str) -> Path:
    return SOURCES[module].parent


def imports(tree: ast.AST) -> list[tuple[str, bool]]:
    """(module imported, at the top of the file?), those under TYPE_CHECKING left out."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"relative import in line {child.lineno}"
                names = [f"{child.module}.{alias.name}" for alias in child.names]
                found.extend((name if name in SOURCES else child.module, top) for name in names)
            visit(child, top and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))

    visit(tree, True)
    return found


@pytest.mark.parametrize("module", SOURCES)
def test_imports_go_down(module: str) -> None:
    tree = ast.parse(SOURCES[module].read_text())
    mine = floor(module)
    for name, _ in imports(tree):
        if not name.startswith("ppo_lightning") or name == "ppo_lightning":
            continue
        theirs = floor(name)
        assert theirs < mine or (theirs == mine and folder(name) == folder(module)), (
            f"{module} imports {name}"
        )


@pytest.mark.parametrize("module", SOURCES)
def test_heavy_packages_stay_at_home(module: str) -> None:
    for name, top in imports(ast.parse(SOURCES[module].read_text())):
        home = HOMES.get(name.split(".")[0])
        if home is not None:
            assert module.startswith(home), f"{module} imports {name}, whose home is {home}"
            assert not top or home == "ppo_lightning.megatron", f"{module} imports {name} at its top"


def test_callbacks_do_not_know_each_other() -> None:
    for module in SOURCES:
        if module.startswith("ppo_lightning.callbacks."):
            for name, _ in imports(ast.parse(SOURCES[module].read_text())):
                assert not name.startswith("ppo_lightning.callbacks"), f"{module} imports {name}"


@pytest.mark.parametrize("module", SOURCES)
def test_files_and_functions_stay_short(module: str) -> None:
    text = SOURCES[module].read_text()
    assert len(text.splitlines()) <= MAX_FILE, module
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if module.startswith("ppo_lightning.recipes.") and node.name == "config":
                continue  # a list of options, one a line
            limit = LONGER_FUNCTIONS.get(f"{module}:{node.name}", MAX_FUNCTION)
            lines = node.end_lineno - node.lineno + 1
            assert lines <= limit, f"{module}:{node.name} has {lines} lines"


@pytest.mark.parametrize("module", SOURCES)
def test_no_swallowed_errors_and_no_global_args(module: str) -> None:
    """A broad except raises again, or says in a comment on its line why it is the last stop."""
    text = SOURCES[module].read_text()
    tree, lines = ast.parse(text), text.splitlines()
    assert "utils" not in module.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            ends = any(isinstance(n, ast.Raise) for n in ast.walk(node))
            ends = ends or "# noqa: BLE001" in lines[node.lineno - 1]
            assert not broad or ends, f"{module}:{node.lineno} swallows every error"


def test_every_package_is_installed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {m for m, path in SOURCES.items() if path.name == "__init__.py"}
    assert listed == present
