#!/bin/sh
# Builds the wheel of this machine into dist/, installs it in a new environment, and runs a kernel there natively, without a compiler.
# PYTHON names the interpreter. With auditwheel installed the wheel is made one for manylinux. For release, for x86-64 and aarch64, the
# recipe is `cibuildwheel --platform linux` (settings in pyproject.toml), which does the same in the manylinux containers.
set -eu
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work/made" .
wheel="$(ls "$work"/made/*.whl)"
case "$wheel" in
    *-py3-none-any.whl) echo "wheel: $wheel has no native code" >&2; exit 1 ;;
    *-py3-none-*) ;;
    *) echo "wheel: $wheel is for one Python only" >&2; exit 1 ;;
esac
mkdir -p dist
if "$python" -m auditwheel --version >/dev/null 2>&1; then
    "$python" -m auditwheel repair --wheel-dir dist "$wheel"
else
    cp "$wheel" dist/
fi
"$python" -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel"
cd "$work"
env/bin/python -I "$OLDPWD/scripts/check_wheel.py"
ls -l "$OLDPWD"/dist/*.whl
