"""`bench --random-weights` on a machine that has torch and little else, with eeinfer on its path and not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tiny import BASE

ROOT = Path(__file__).parent.parent
# What eeinfer depends on for other commands. Typer has its own reasons to import one of them.
ABSENT = {
    *("accelerate", "annotated_types", "filelock", "gguf", "huggingface_hub", "jinja2", "pydantic", "rouge_score"),
    *("psutil", "scipy", "tomli_w", "transformers"),
}
PROGRAM = f"""
import builtins, sys
from importlib import metadata
from pathlib import Path

plain_import, plain_version = builtins.__import__, metadata.version

def without(name, globals=None, locals=None, fromlist=(), level=0):
    importer, package = (globals or {{}}).get("__name__", ""), name.partition(".")[0]
    if importer.startswith("eeinfer") and package in {ABSENT!r}:
        raise ModuleNotFoundError(f"{{importer}} imports {{name}}")
    return plain_import(name, globals, locals, fromlist, level)

def version(name):
    if name == "eeinfer":
        raise metadata.PackageNotFoundError(name)
    return plain_version(name)

builtins.__import__, metadata.version = without, version
from eeinfer.model import random_weights
random_weights._SHAPES = Path(sys.argv.pop(1))
from eeinfer.cli.app import main
main()
"""


def test_random_weights_need_torch_and_little_else(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(BASE))
    report = tmp_path / "report.json"
    command = [
        *(sys.executable, "-c", PROGRAM, str(tmp_path), "bench", "--random-weights", "tiny", "--output", str(report)),
        *("--simulate-exits", "0.5@3", "--strategy", "split", "--measure", "similarity"),
        *("--batch", "2", "--input-len", "4", "--output-len", "3", "--repeats", "1", "--num-blocks", "16"),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    contents = json.loads(report.read_text())
    assert [cell["key"]["strategy"] for cell in contents["cells"]] == ["full", "split"]
    assert contents["eeinfer_version"] == "unknown (not installed)"
