# make demo   sets up .venv on a fresh machine and runs flash attention on the interpreter
# make test   sets up .venv and runs the test suite (two processes, one BLAS thread each)
# Both set up the environment themselves; a second run finds the stamp files and starts at once.

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python

# PyTorch is an extra opinion for the oracle tests, not a dependency: `make test TORCH=` goes without it.
# Pinned: this is the version whose results the oracle tests were checked against.
TORCH ?= torch==2.13.0

# PyTorch/XLA, whose last release this is, and the torch that it wants. Together some 7 GB on x86-64, where that torch is a CUDA build.
VENV_XLA ?= .venv-xla
PY_XLA   := $(VENV_XLA)/bin/python
XLA      ?= torch==2.9.1 torch-xla==2.9.0

# Arguments for pytest: make test ARGS='tests/isa -x'
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-jax test-xla test-ray setup-ray lint format types stubs bench mutate sanitize wheel fuzz clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile
	@echo "make lint | types | stubs | bench | mutate | sanitize | wheel | fuzz | format | clean"

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "opennki needs Python 3.11 or newer; set PYTHON=python3.x" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamp is younger than what decides which packages are installed.
$(VENV)/.installed: pyproject.toml src/opennki/_version.py | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

# A stamp also when PyTorch is not to be had, so that every run does not try again; its text says which it was.
$(VENV)/.torch: | $(VENV)/.installed
	@if [ -z "$(TORCH)" ]; then :; \
	elif $(PY) -m pip install --quiet --disable-pip-version-check '$(TORCH)'; then \
	  echo installed > $@; \
	else \
	  echo unavailable > $@; \
	  echo "note: $(TORCH) could not be installed; PyTorch oracles are left out (rm $@ to try again)" >&2; \
	fi

setup: $(VENV)/.installed

demo: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(PY) examples/flash_attention.py

test: $(VENV)/.installed $(VENV)/.torch
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(PY) -m pytest -n 2 --durations=10 --durations-min=1 $(ARGS)

# The tests of the bridges alone, for a second Python and so a second JAX:
#   make test-jax PYTHON=python3.12 VENV=.venv-3.12
test-jax: $(VENV)/.installed
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(PY) -m pytest -n 2 tests/bind tests/kernels tests/bug_reports/test_jax.py $(ARGS)

# The tests of the PyTorch/XLA bridge, on XLA's CPU client, and those of the PyTorch bridge with the older torch. Not here: drivers of
# tutorials, for which torch_xla is a stand-in, programs of several processes, and what inductor compiles for minutes.
test-xla: $(VENV_XLA)/.installed
	PJRT_DEVICE=CPU OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(PY_XLA) -m pytest -n 2 --durations=5 --durations-min=5 \
	  tests/bind/torch_xla tests/bug_reports/test_torch.py tests/bind/torch --ignore tests/bind/torch/test_drivers.py \
	  --ignore tests/bind/torch/test_ranks.py \
	  --deselect tests/bind/torch/test_graphs.py::test_inductor $(ARGS)

$(VENV_XLA)/.installed: pyproject.toml src/opennki/_version.py
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "torch-xla needs Python 3.11 to 3.13; set PYTHON=python3.x" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV_XLA)
	$(PY_XLA) -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-compile -e . $(XLA) \
	  'pytest>=8' 'pytest-timeout>=2.3' 'pytest-xdist>=3.5' 'hypothesis>=6.100'
	@touch $@

# make test-ray   sets up .venv-ray and runs ranks and sweeps on a Ray cluster on this machine
test-ray: setup-ray
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 .venv-ray/bin/python -m pytest -p no:cacheprovider --durations=5 \
	  tests/ranks/test_ray.py tests/ranks/test_hosts.py::test_ray_on_two_hosts tests/sweep/test_sweep_on_ray.py $(ARGS)

setup-ray:
	@$(MAKE) --no-print-directory VENV=.venv-ray .venv-ray/.ray

.venv-ray/.ray: pyproject.toml src/opennki/_version.py | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[ray]' pytest pytest-timeout
	@touch $@

lint: $(VENV)/.installed
	$(PY) -m ruff check .

format: $(VENV)/.installed
	$(PY) -m ruff check --fix .

types: $(VENV)/.installed
	$(PY) -m mypy

stubs: $(VENV)/.installed
	$(PY) -m opennki.tools.stubs

bench: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(PY) -m benchmarks

# A sample of the mutants; scripts/mutate.py --help tells how to run all of them.
mutate: $(VENV)/.installed $(VENV)/.torch
	$(PY) scripts/mutate.py --limit 10

# The tests of native code under the address and undefined-behaviour sanitizers; scripts/sanitize.sh without `quick` runs all of them.
sanitize: $(VENV)/.installed
	PYTHON=$(abspath $(PY)) scripts/sanitize.sh quick

# A wheel with native code for every level of CPU in dist/, tried in a new environment without a compiler.
wheel: $(VENV)/.installed
	PYTHON=$(abspath $(PY)) scripts/wheel.sh

# Random kernels by native code and by the interpreter: make fuzz ARGS='--minutes 60 --seed 1000'
fuzz: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(PY) scripts/fuzz_executor.py $(ARGS)

clean:
	rm -rf $(VENV) $(VENV_XLA) .venv-ray build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
