#!/usr/bin/env python3
"""Kills a run of `eeinfer generate` at random points, resumes it, and compares its file with an undisturbed one's.

The model is a tiny random one of the tests, in float32 at full depth, where answers do not depend on their batch. Among
the prompts are bad lines, prompts that are too long, and sampled ones. Run it from anywhere:

    python scripts/kill_and_resume.py --num-prompts 2000 --kills 3
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tiny import write_model  # noqa: E402 - the path is set above

SETTINGS = ["--strategy", "full", "--dtype", "float32", "--device", "cpu", "--batch", "16", "--num-blocks", "256"]


def main() -> None:
    """Exit code 0: the files are the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=None, help="of the points; by default another one each time")
    given = parser.parse_args()
    seed = random.randrange(2**32) if given.seed is None else given.seed  # noqa: S311 - no secret
    print(f"seed {seed}")
    with tempfile.TemporaryDirectory() as folder:
        same = check(Path(folder), given.num_prompts, given.kills, random.Random(seed))  # noqa: S311 - no secret
    sys.exit(0 if same else 1)


def check(folder: Path, num_prompts: int, kills: int, chance: random.Random) -> bool:
    """Whether a run that is killed so often ends in the bytes of one that is not."""
    model, prompts = write_model(folder / "model", "gqa"), folder / "prompts.jsonl"
    prompts.write_text("".join(f"{prompt_line(i, chance)}\n" for i in range(num_prompts)), encoding="utf-8")
    whole, resumed = folder / "whole.jsonl", folder / "resumed.jsonl"
    common = ["-m", str(model), "--prompts", str(prompts), "--token-details", "--max-tokens", "12", *SETTINGS]
    started = time.perf_counter()
    start(common, whole).wait()
    print(f"undisturbed: {len(whole.read_bytes().splitlines())} lines in {time.perf_counter() - started:.1f} s")
    for point in sorted(chance.randrange(1, num_prompts * 9 // 10) for _ in range(kills)):
        process = start(common, resumed, "--resume")
        while answers_in(resumed) < point and process.poll() is None:
            time.sleep(0.002)
        time.sleep(chance.random() * 0.05)  # anywhere in a step or a write
        process.send_signal(signal.SIGKILL)
        died = process.wait() == -signal.SIGKILL
        print(f"{'killed' if died else 'too late to kill it'} with {answers_in(resumed)} answers in the journal")
        if not died:
            return False
    start(common, resumed, "--resume").wait()
    same = whole.read_bytes() == resumed.read_bytes()
    left = sorted(path.name for path in folder.glob("*resumed.jsonl*"))
    print(f"the files are {'the same' if same else 'NOT the same'}; beside them: {', '.join(left)}")
    return same and left == ["resumed.jsonl", "resumed.jsonl.settings.toml"]


def prompt_line(number: int, chance: random.Random) -> str:
    """Mostly good, some with sampling, a few bad or too long."""
    if number % 101 == 100:  # noqa: PLR2004
        return '{"prompt": "'
    text = "".join(chance.choices("abcdefgh é", k=500 if number % 97 == 96 else chance.randrange(1, 40)))  # noqa: PLR2004
    return json.dumps({"prompt": text, "temperature": number % 3 / 2, "max_tokens": chance.choice([None, 1, 5, 20])})


def start(common: list[str], output: Path, *more: str) -> subprocess.Popen[bytes]:
    """A run in a process of its own."""
    command = [sys.executable, "-m", "eeinfer", "generate", *common, "--output", str(output), *more]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ, stderr=subprocess.DEVNULL)  # noqa: S603


def answers_in(output: Path) -> int:
    """Whole records in the journal of `output`."""
    journal = output.with_name(f"{output.name}.journal")
    return max(journal.read_bytes().count(b"\n") - 1, 0) if journal.exists() else 0


if __name__ == "__main__":
    main()
