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
eeinfer bench --strategy split --batch 8 --repeats 1 2>/dev/null
cat <<'TXT'
Early exit skips layers here but does not save time yet: a check by max-prob computes the whole vocabulary, which costs as much
as 8 of this small model's 30 layers, and it is made at every exit. README.md has the figures.
TXT
