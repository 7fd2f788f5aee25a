"""The tests of the PyTorch bridge need PyTorch; where it is not installed, the report says that they were not run."""

from __future__ import annotations

import importlib.util

MISSING = importlib.util.find_spec("torch") is None
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_terminal_summary(terminalreporter):
    if MISSING:
        terminalreporter.write_line("NOT RUN: tests/bind/torch, as PyTorch is not installed", red=True)
