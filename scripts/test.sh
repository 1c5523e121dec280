#!/usr/bin/env bash
# Sets up the environment and passes the tests: lint, types, pytest. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh test
eeinfer pull >/dev/null # the tests against the real model need it; a no-op when it is there
ruff check .
ruff format --check .
mypy
exec pytest "$@"
