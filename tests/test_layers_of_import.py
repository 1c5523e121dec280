"""The house's one-way imports: layers, no cycles, and no heavy package where `--help` or host code would load it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
# From low to high; a package imports from lower rows and itself. The lowest row may also import along, without cycles.
LAYERS = [
    {"ops", "config", "core", "errors", "version"},
    {"exits"},
    {"model"},
    {"runner"},
    {"engine"},
    {"training"},
    {"calibration"},
    {"bench", "serving"},
    {"cli"},
]
RANK = {package: rank for rank, layer in enumerate(LAYERS) for package in layer}
ENTRY_POINTS = {"eeinfer", "eeinfer.__main__"}  # they name what is above them, lazily
HEAVY = {"accelerate", "numpy", "pydantic", "torch", "transformers"}


class Import(NamedTuple):
    """One name imported by a module; `when` is "load", "call" (inside a function) or "types" (TYPE_CHECKING)."""

    module: str
    target: str
    line: int
    when: str


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((ROOT / "eeinfer").rglob("*.py"))}


def imports_of(module: str, source: str) -> Iterator[Import]:
    yield from _walk(ast.parse(source), module, "load")


def _walk(node: ast.AST, module: str, when: str) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(module, alias.name, child.lineno, when) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{module}:{child.lineno} imports relatively"
            for alias in child.names:
                submodule = f"{child.module}.{alias.name}"
                yield Import(module, submodule if submodule in MODULES else str(child.module), child.lineno, when)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _walk(child, module, "call" if when == "load" else when)
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for statement in child.body:
                yield from _walk(ast.Module([statement], []), module, "types")
            yield from _walk(ast.Module(child.orelse, []), module, when)
        else:
            yield from _walk(child, module, when)


ALL_IMPORTS = [found for name, path in MODULES.items() for found in imports_of(name, path.read_text(encoding="utf-8"))]
OWN_IMPORTS = [
    found for found in ALL_IMPORTS if found.target.split(".")[0] == "eeinfer" and found.module not in ENTRY_POINTS
]


def package(module: str) -> str:
    return module.split(".")[1]


def upward(found: Import) -> bool:
    if found.target == "eeinfer":
        return package(found.module) != "cli"  # `from eeinfer import …` reaches the top of the house
    here, there = package(found.module), package(found.target)
    return RANK[there] > RANK[here] or (RANK[there] == RANK[here] > 0 and here != there)


def where(found: Import) -> str:
    return f"{found.module}:{found.line} imports {found.target}"


def cycle(edges: list[tuple[str, str]]) -> list[str] | None:
    graph = defaultdict(set)
    for source, target in edges:
        if source != target:
            graph[source].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def test_every_package_has_its_layer() -> None:
    assert {package(module) for module in MODULES if module not in ENTRY_POINTS} <= set(RANK)


def test_imports_point_one_way() -> None:
    assert [where(found) for found in OWN_IMPORTS if upward(found)] == []


def test_there_are_no_cycles() -> None:
    assert cycle([(found.module, found.target) for found in OWN_IMPORTS]) is None
    packages = [(package(found.module), package(found.target)) for found in OWN_IMPORTS if found.target != "eeinfer"]
    assert cycle(packages) is None


def test_host_code_and_signatures_load_nothing_heavy() -> None:
    at_load = [found for found in ALL_IMPORTS if package_of(found) in {"config", "core", "errors", "cli"}]
    assert [where(f) for f in at_load if f.when == "load" and f.target.split(".")[0] in HEAVY] == []


def test_host_code_never_imports_torch() -> None:
    host = [found for found in ALL_IMPORTS if package_of(found) in {"config", "core", "errors"}]
    assert [where(f) for f in host if f.target.split(".")[0] in {"torch", "transformers", "accelerate"}] == []


def package_of(found: Import) -> str | None:
    return None if found.module in ENTRY_POINTS else package(found.module)


def test_nothing_heavy_comes_in_by_another_way() -> None:
    light = [module for module in MODULES if module.startswith(("eeinfer.config", "eeinfer.core", "eeinfer.errors"))]
    light += ["eeinfer", "eeinfer.cli.app", "eeinfer.cli.answers", "eeinfer.engine.prompt_file"]
    program = f"import sys, {', '.join(light)}\nprint(*{{m.partition('.')[0] for m in sys.modules}})"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert HEAVY & set(ended.stdout.split()) == set()


@pytest.mark.parametrize(
    ("module", "source", "broken"),
    [
        ("eeinfer.core.x", "from eeinfer.exits import heads", True),
        ("eeinfer.core.x", "def f():\n    import eeinfer.engine.llm", True),
        ("eeinfer.core.x", "if TYPE_CHECKING:\n    from eeinfer.cli import app", True),
        ("eeinfer.core.x", "from eeinfer import LLM", True),
        ("eeinfer.training.x", "from eeinfer.bench import suite", True),
        ("eeinfer.core.x", "from eeinfer.errors import RequestError", False),
        ("eeinfer.cli.x", "from eeinfer import __version__", False),
    ],
)
def test_a_broken_rule_is_seen(module: str, source: str, *, broken: bool) -> None:
    assert [upward(found) for found in imports_of(module, source)] == [broken]


def test_when_an_import_happens_is_seen() -> None:
    source = (
        "import a\nif TYPE_CHECKING:\n    import b\nelse:\n    import c\ntry:\n    import d\nexcept E:\n    pass\n"
        "class K:\n    def f(self):\n        import e\n"
    )
    seen = {found.target: found.when for found in imports_of("eeinfer.core.x", source)}
    assert seen == {"a": "load", "b": "types", "c": "load", "d": "load", "e": "call"}


def test_a_cycle_is_seen() -> None:
    assert cycle([("a", "b"), ("b", "c"), ("c", "a")]) is not None
    assert cycle([("a", "b"), ("a", "c"), ("b", "c")]) is None
