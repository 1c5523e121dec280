# Sourced by the other scripts: a virtual environment in .venv with the right build of torch and eeinfer itself (editable).
# Usage: . scripts/environment.sh [EXTRA]      (EXTRA: an optional-dependencies group of pyproject.toml)
# Quick when nothing changed. TORCH_REQUIREMENT replaces the choice of torch, PYTHON the interpreter.

extra="${1:-}"
python="${PYTHON:-python3}"

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: eeinfer needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2
    exit 2
fi

# Machines with an NVIDIA GPU take the CUDA build, which is the registry's default; others a pinned build.
if [ -z "${TORCH_REQUIREMENT:-}" ]; then
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then
        TORCH_REQUIREMENT="torch>=2.11"
    else
        TORCH_REQUIREMENT="torch==2.13.0"
    fi
fi

stamp="$("$python" -c 'import hashlib, sys; print(hashlib.sha256(open("pyproject.toml", "rb").read() + " ".join(sys.argv[1:]).encode() + sys.version.encode()).hexdigest())' "$TORCH_REQUIREMENT")"
stamp_file=".venv/.installed-${extra:-base}"
if [ ! -x .venv/bin/python ] || [ "$(cat "$stamp_file" 2>/dev/null)" != "$stamp" ]; then
    echo "setting up .venv ($TORCH_REQUIREMENT); this takes some minutes the first time" >&2
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$TORCH_REQUIREMENT"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".${extra:+[$extra]}" "$TORCH_REQUIREMENT"
    echo "$stamp" >"$stamp_file"
fi
export PATH="$PWD/.venv/bin:$PATH"
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}" # as the eeinfer command sets it; see eeinfer/cli/app.py
