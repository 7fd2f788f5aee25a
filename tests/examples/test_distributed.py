"""The distributed example: every case, on threads, in forked processes, and in processes that meet over TCP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import opennki

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import distributed_kernels

    return distributed_kernels


@pytest.mark.parametrize("case", ["mlp", "attention", "experts"])
def test_cases_have_the_same_bits_in_processes(kernels, case):
    kernel, args_of, wanted = kernels.CASES[case](8)
    for checks in ("full", "off"):  # interpreted, and with native code between the meetings
        here = opennki.launch(kernel, 8, args_of, checks=checks)
        there = opennki.launch(kernel, 8, args_of, processes=2, checks=checks)
        for rank in range(8):
            np.testing.assert_allclose(here[rank], wanted(rank), rtol=1e-4, atol=1e-4)
            np.testing.assert_array_equal(here[rank], there[rank])


@pytest.mark.slow
def test_the_example_over_tcp():
    command = [sys.executable, "-m", "opennki", "launch", "-n", "2", str(EXAMPLES / "distributed.py"), "--ranks", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("4 ranks, 2 of them here") == 6


@pytest.mark.slow
def test_the_example_over_torch_distributed():
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / "distributed.py"),
               "--gloo", "--ranks", "4", "--case", "mlp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("4 ranks, 2 of them here") == 2
