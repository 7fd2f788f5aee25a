"""Ranks as tasks of a Ray cluster on this machine; `make test-ray` brings Ray."""

from __future__ import annotations

import os

import numpy as np
import pytest

import opennki
import opennki.dropin  # isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.distributed as dist
import neuronxcc.nki.language as nl
from opennki.errors import NkiError, NkiValueError

pytestmark = pytest.mark.usefixtures("ray_cluster")


def kernel_of():
    @nki.jit(platform_target="trn2")
    def kernel(x, way):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        if way == "skip":
            nl.store(out, nl.load(x))
        else:
            dist.all_reduce([x], [out], np.add)
        return out

    return kernel


X = [np.random.default_rng(r).standard_normal((8, 16), np.float32) for r in range(6)]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_results_are_those_of_one_process(processes):
    kernel, x = kernel_of(), X
    want = opennki.launch(kernel, 6, lambda r: (x[r], ""))
    for a, b in zip(opennki.launch(kernel, 6, lambda r: (x[r], ""), engine="ray", processes=processes), want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_wait_for_ever_is_reported():
    kernel, x = kernel_of(), X
    with pytest.raises(NkiError, match=r"5 ranks wait for ever: .* for rank 4"):
        opennki.launch(kernel, 6, lambda r: (x[r], "skip" if r == 4 else ""), engine="ray", processes=2)


def test_more_processes_than_the_cluster_has():
    kernel, x = kernel_of(), X
    with pytest.raises(NkiValueError, match="on a cluster of 3 CPUs"):
        opennki.launch(kernel, 6, lambda r: (x[r], ""), engine="ray", processes=6)


def test_a_process_that_is_killed_is_named(tmp_path):
    """One of the tasks, whichever comes first, is killed while the ranks meet."""
    kernel, mark = looping_kernel(), str(tmp_path / "mark")

    def args_of(rank):
        import os
        import signal
        import threading

        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return (X[rank],)
        if os.getpid() != driver:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            os.unlink(mark)
        return (X[rank],)

    driver = os.getpid()
    with pytest.raises(NkiError, match=r"the process of ranks (0, 1, 2|3, 4, 5) has gone"):
        opennki.launch(kernel, 6, args_of, engine="ray", processes=2)


def looping_kernel():
    @nki.jit(platform_target="trn2")
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        for _ in nl.sequential_range(100000):
            dist.all_reduce([x], [out], np.add)
        return out

    return kernel
