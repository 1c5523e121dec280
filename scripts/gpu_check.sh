#!/usr/bin/env bash
# Is everything right on this GPU, and how fast is it? Minutes, with no network, no model file and no installation:
# it needs a Python that has torch with CUDA, triton, safetensors, tokenizers, typer, rich and numpy.
# Usage: scripts/gpu_check.sh [--output FILE] [--budget SECONDS] [--full] [--dry] [--keep-going]
# PYTHON names the interpreter; without it the one of .venv is taken if there is one, else python3.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "$PYTHON" scripts/gpu_check.py "$@"
