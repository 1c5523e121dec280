#!/usr/bin/env bash
# Makes the packaged exit heads of the default model and their certified thresholds anew: two hours on 2 cores.
# Usage: scripts/make_default_heads.sh TUNE.jsonl CALIBRATE.jsonl FOLDER
# TUNE trains and chooses, CALIBRATE certifies, and they share no prompt. What FOLDER then holds goes to
# eeinfer/data/heads/smollm2-135m-instruct. An interrupted run goes on where it stopped.
set -euo pipefail
[ $# -eq 3 ] || { echo "usage: $0 TUNE.jsonl CALIBRATE.jsonl FOLDER" >&2; exit 2; }
tune="$(realpath "$1")" calibrate="$(realpath "$2")" folder="$(realpath -m "$3")"
cd "$(dirname "$0")/.."
. scripts/environment.sh bench
eeinfer pull >/dev/null
if [ ! -e "$folder/calibration.toml" ]; then
    eeinfer tune-heads -c configs/default-heads.toml --method distill --prompts "$tune" --exits 18,21,24,26,28 \
        --kind mlp --width 288 --batch-tokens 512 --epochs 3 \
        --judge "$calibrate" --work "$folder.work/heads" --output "$folder"
fi
# Two of the five exits: on the prompts that fix the path, each other one skips less than its checks cost.
eeinfer calibrate-thresholds --heads "$folder" --prompts "$calibrate" --path-prompts "$tune" --exits 21,24 \
    --measure gate --tolerance 0.02 --batch 64 \
    --work "$folder.work/calibration" --output "$folder/calibration.toml" --plot "$folder.work/calibration.png"
