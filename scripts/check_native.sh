#!/usr/bin/env bash
# The tests of the native kernels under the address and undefined-behaviour sanitizers.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh test
export CXXFLAGS="-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined"
export ASAN_OPTIONS="detect_leaks=0" # the interpreter's own
LD_PRELOAD="$("${CXX:-g++}" -print-file-name=libasan.so) $("${CXX:-g++}" -print-file-name=libubsan.so)" \
    python -m pytest -q -p no:cacheprovider tests/test_native*.py "$@"
