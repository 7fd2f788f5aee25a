#!/bin/sh
# Runs the tests of native code, and random kernels, with the library under the address and undefined-behaviour sanitizers.
#
#     scripts/sanitize.sh [quick] [arguments for pytest]
#
# quick: the best level of this CPU, a part of the tests; else all levels and tests. PYTHON names the interpreter. Ends with an error where
# the compiler has no sanitizers.
set -eu
cd "$(dirname "$0")/.."
cc="$(command -v cc || command -v gcc || command -v clang || true)"
[ -n "$cc" ] || { echo "sanitize: no C compiler: NOTHING WAS CHECKED" >&2; exit 1; }
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
echo 'int main(void) { return 0; }' > "$work/t.c"
if ! "$cc" -fsanitize=address,undefined "$work/t.c" -o "$work/t" 2> "$work/why" || ! "$work/t"; then
    echo "sanitize: $cc has no sanitizers: NOTHING WAS CHECKED" >&2
    cat "$work/why" >&2
    exit 1
fi
preload="$("$cc" -print-file-name=libasan.so) $("$cc" -print-file-name=libubsan.so)"
levels=all
if [ "${1:-}" = quick ]; then
    shift
    levels=best
    set -- -k "not same_bits and not million and not every_dtype and not all_patterns" "$@"
fi
# Python itself keeps memory to its end, which is no leak of ours.
env OPENNKI_TEST_SANITIZE="$levels" ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 \
    PYTHONPATH="$PWD/src" OMP_NUM_THREADS=1 LD_PRELOAD="$preload" \
    "${PYTHON:-python}" -m pytest -p no:cacheprovider -q tests/execute "$@"
