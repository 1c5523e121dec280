"""Losses of prompts at the steps of a path, from the folder where `eeinfer calibrate-thresholds` keeps judged answers.

Usage: collect_losses.py WORK [PROMPTS] > losses.csv

One line a prompt and one column a step, the step with the smallest mean loss first; a comment names the thresholds of
each. Policies that were judged on fewer than PROMPTS prompts (default: as many as any) are left out, and full depth is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean


def main() -> None:
    """Read the folder, write the table."""
    policies = {}
    work, *few = sys.argv[1:]
    for path in Path(work).glob("*.jsonl"):
        header, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        if thresholds := header["policy"]["thresholds"]:
            policies[tuple(thresholds)] = {line["prompt"]: line["loss"] for line in lines}
    least = int(few[0]) if few else max(map(len, policies.values()))
    kept = sorted((fmean(losses.values()), key) for key, losses in policies.items() if len(losses) >= least)
    prompts = sorted(set.intersection(*(set(policies[key]) for _, key in kept)))
    for mean, key in kept:
        print(f"# {mean:.6f} {' '.join(map(str, key))}")
    for prompt in prompts:
        print(",".join(f"{policies[key][prompt]:.6g}" for _, key in kept))


if __name__ == "__main__":
    main()
