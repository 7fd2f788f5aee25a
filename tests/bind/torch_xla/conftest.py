"""The tests of the PyTorch/XLA bridge need torch_xla, which pins its torch: `make test-xla` runs them in an environment of
their own. Elsewhere the report says that they were not run."""

from __future__ import annotations

import os
from importlib import metadata

os.environ.setdefault("PJRT_DEVICE", "CPU")

try:
    metadata.version("torch-xla")
    MISSING = False
except metadata.PackageNotFoundError:
    MISSING = True
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_terminal_summary(terminalreporter):
    if MISSING:
        terminalreporter.write_line("NOT RUN: tests/bind/torch_xla, as torch-xla is not installed; make test-xla runs them", yellow=True)
