"""The command line on the real default model with its packaged heads: nothing is faked here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parent.parent
EXITS = {18, 21, 24, 26, 28, 30}


def eeinfer(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if "__" not in name}
    return subprocess.run(
        [sys.executable, "-m", "eeinfer", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment | {"NO_COLOR": "1"},
        check=False,
    )


FRANCE = '{"id": "france", "messages": [{"role": "user", "content": "What is the capital of France?"}]}'
SEA = '{"prompt": "The sea is", "max_tokens": 12}'


def test_prompts_in_answers_out(default_model: Path) -> None:
    assert default_model.is_dir()
    lines = f'{FRANCE}\n{{"prompt": "x", "max_token": 3}}\n{SEA}\n'
    ended = eeinfer(
        "generate", "--prompts", "-", "--dtype", "float32", "--threshold", "0.9", "--token-details", stdin=lines
    )
    assert ended.returncode == 1, ended.stderr
    france, bad, sea = (json.loads(line) for line in ended.stdout.splitlines())
    assert (france["id"], france["finish_reason"]) == ("france", "stop")
    assert france["text"].startswith("The capital of France is Paris")
    assert bad["line"] == 2
    assert "max_tokens" in bad["error"], "the nearest known field is named"
    assert sea["usage"]["completion_tokens"] <= 12
    for answer in (france, sea):
        depths = [token["layers_executed"] for token in answer["tokens"]]
        assert depths[0] == 30, "the first token comes from the prompt, which runs at full depth"
        assert set(depths) <= EXITS
        assert answer["exits"]["mean_layers"] == pytest.approx(sum(depths) / len(depths), abs=0.01)
        assert sum(answer["exits"]["share"].values()) == pytest.approx(1, abs=1e-3)
        assert all((t["confidence"] is None) == (t["layers_executed"] == 30) for t in answer["tokens"])
    assert any(t["layers_executed"] < 30 for a in (france, sea) for t in a["tokens"]), "something leaves early"
    assert "1 of 3 prompts failed" in ended.stderr


def test_full_depth_has_no_exits(default_model: Path) -> None:
    assert default_model.is_dir()
    ended = eeinfer("generate", "--prompts", "-", "--strategy", "full", stdin=SEA)
    assert ended.returncode == 0, ended.stderr
    assert "exits" not in json.loads(ended.stdout)


def test_heads_know_their_base(default_model: Path, tmp_path: Path) -> None:
    """The same architecture with other weights is another base: its heads are not used, and that is said."""
    other = tmp_path / "other"
    shutil.copytree(default_model, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * torch.tensor(1.5, dtype=torch.bfloat16)
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    ended = eeinfer("generate", "-m", other, "--prompts", "-", "--max-tokens", "3", stdin='{"prompt": "The sea"}')
    assert ended.returncode == 0, ended.stderr
    assert "another base" in ended.stderr
    assert "nothing leaves early" in ended.stderr
    packaged = ROOT / "eeinfer" / "data" / "heads" / "smollm2-135m-instruct"
    ended = eeinfer("generate", "-m", other, "--heads", packaged, "--prompts", "-", stdin=SEA)
    assert ended.returncode == 2
    assert "another base" in ended.stderr
