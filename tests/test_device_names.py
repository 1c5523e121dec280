"""What only a GPU runs cannot fail on a CPU but by its name: each is here, was looked up, and must exist."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ON_DEVICE = ("torch.cuda", "torch.profiler", "torch.OutOfMemoryError", "triton")

# By the page of the documentation on which they stand, of torch (2.11 and stable) and of triton (main).
DOCUMENTED = {
    "https://docs.pytorch.org/docs/stable/cuda.html": """
        torch.cuda.current_stream torch.cuda.device_count torch.cuda.get_device_capability torch.cuda.get_device_name
        torch.cuda.get_device_properties torch.cuda.is_available torch.cuda.set_device torch.cuda.set_sync_debug_mode
        torch.cuda.stream torch.cuda.synchronize torch.cuda.empty_cache torch.cuda.mem_get_info
        torch.cuda.memory_allocated torch.cuda.max_memory_allocated torch.cuda.memory_reserved
        torch.cuda.reset_peak_memory_stats torch.cuda.graph_pool_handle torch.cuda.graph torch.cuda.OutOfMemoryError
        torch.cuda.CUDAGraph torch.cuda.CUDAGraph.replay
        torch.cuda.Event torch.cuda.Event.record torch.cuda.Event.synchronize
        torch.cuda.Stream torch.cuda.Stream.wait_stream""",
    "https://docs.pytorch.org/docs/stable/profiler.html": """
        torch.profiler.profile torch.profiler.profile.export_chrome_trace
        torch.profiler.ProfilerActivity torch.profiler.ProfilerActivity.CPU torch.profiler.ProfilerActivity.CUDA""",
    "https://triton-lang.org/main/python-api/triton.html": "triton.jit",
    "https://triton-lang.org/main/python-api/triton.language.html": """
        triton.language.arange triton.language.dot triton.language.erf triton.language.exp triton.language.full
        triton.language.load triton.language.log triton.language.max triton.language.maximum triton.language.min
        triton.language.minimum triton.language.num_programs triton.language.program_id triton.language.rsqrt
        triton.language.sigmoid triton.language.store triton.language.sum triton.language.where
        triton.language.zeros triton.language.zeros_like""",
    # In tutorials alone, and in the sources.
    "https://triton-lang.org/main/getting-started/tutorials/index.html": """
        triton.cdiv triton.next_power_of_2 triton.language.constexpr triton.language.bfloat16 triton.language.float32
        triton.language.int32 triton.language.int64""",
    # The first has the second's page; knobs are what the environment variables of triton's README set.
    "https://github.com/triton-lang/triton/blob/main/README.md": """
        torch.OutOfMemoryError triton.knobs triton.knobs.runtime.interpret""",
}
NAMES = {name: page for page, names in DOCUMENTED.items() for name in names.split()}
# Mends triton's interpreter, which no GPU runs.
PRIVATE = ("triton.runtime.interpreter", "triton.language.core")


def names_in(source: str) -> Iterator[str]:
    """Dotted names below torch and triton that a module uses, under whatever name it imported them."""
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                known[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def dotted(node: ast.expr) -> str | None:
        if isinstance(node, ast.Attribute):
            return f"{inner}.{node.attr}" if (inner := dotted(node.value)) else None
        return known.get(node.id) if isinstance(node, ast.Name) else None

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            yield name
        else:
            for child in ast.iter_child_nodes(node):
                yield from walk(child)

    yield from known.values()
    yield from walk(tree)


def exists(name: str) -> bool:
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:depth]))
        except ImportError:
            continue
        try:
            reduce(getattr, parts[depth:], module)
        except AttributeError:
            return False
        return True
    return False


def test_every_name_that_only_a_gpu_runs_was_looked_up() -> None:
    sources = [
        *(ROOT / "eeinfer").rglob("*.py"),
        *(ROOT / "scripts" / "gpu").glob("*.py"),
        ROOT / "scripts/gpu_check.py",
    ]
    used = {(name, path.relative_to(ROOT)) for path in sources for name in names_in(path.read_text(encoding="utf-8"))}
    unknown = sorted(
        (name, str(path))
        for name, path in used
        if any(name.startswith(f"{part}.") or name == part for part in ON_DEVICE)
        if name not in {*NAMES, *ON_DEVICE, "triton.language"} and not name.startswith(PRIVATE)
    )
    assert unknown == [], "look these up in the documentation of the oldest torch and triton in use, and add them"


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_name_exists(name: str) -> None:
    if name.startswith("triton"):
        pytest.importorskip("triton", reason="its names are there where it is")
    assert exists(name), f"see {NAMES[name]}"


def test_names_are_found_and_missed() -> None:
    source = (
        "import torch\nimport triton.language as tl\nfrom torch import cuda as c\ntl.dot(torch.cuda.graph)\nc.x()\nz.w"
    )
    modules = {"torch", "triton.language", "torch.cuda"}
    assert set(names_in(source)) == modules | {"triton.language.dot", "torch.cuda.graph", "torch.cuda.x"}
    assert exists("torch.cuda.CUDAGraph.replay")
    assert not exists("torch.cuda.no_such_thing")
    assert not exists("no_such_module.thing")
