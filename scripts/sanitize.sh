#!/bin/sh
# Runs the tests of native code with the library under the address and undefined-behaviour sanitizers of gcc.
# Further arguments go to pytest. PYTHON names the interpreter.
set -eu
cd "$(dirname "$0")/.."
preload="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
# Python itself keeps memory to its end, which is no leak of ours.
exec env OPENNKI_TEST_SANITIZE=1 ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH="$PWD/src" OMP_NUM_THREADS=1 \
    LD_PRELOAD="$preload" "${PYTHON:-python}" -m pytest -p no:cacheprovider -q tests/execute "$@"
