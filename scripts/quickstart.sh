#!/usr/bin/env bash
# From a fresh checkout to early-exit answers: environment, model, heads, coloured answers, and full against split.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
eeinfer pull >/dev/null
echo
echo "Answers of the default model; every token is coloured by the layer it left at:"
echo
eeinfer generate --num-prompts 5 --max-tokens 48 --show-exits
echo
echo "The same engine at full depth and with exits:"
echo
eeinfer bench --strategy split --batch 8 --repeats 3 2>/dev/null
cat <<'TXT'
What to expect on this small model: the packaged thresholds promise a loss of at most 2 %, and few of its tokens can leave early under
that promise, fewer than pay for the checks. README.md has the figures, and says how to choose other thresholds.
TXT
