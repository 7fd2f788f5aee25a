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


def computing_kernel():
    """Much between two meetings, which is native without full checks; rows that a table names."""

    @nki.jit(platform_target="trn2")
    def kernel(x, rows):
        out, partial = (nl.ndarray((128, 64), dtype=np.float32, buffer=nl.shared_hbm) for _ in range(2))
        tile = nl.load(x[nl.load(rows), nl.arange(64)[None, :]], dtype=np.float32)
        for _ in nl.sequential_range(3):
            for _ in nl.sequential_range(20):
                tile[...] = nl.multiply(nl.add(tile, 0.125), 0.75)
            product = nl.matmul(nl.transpose(nl.copy(tile)), tile, transpose_x=False)
            tile[0:64] = nl.add(tile[0:64], nl.multiply(product, 1e-3))
            nl.store(partial, tile)
            dist.all_reduce([partial], [out], np.add)
            tile[...] = nl.multiply(nl.load(out), 1 / 4)
        return out

    return kernel


TABLES = [np.random.default_rng(10 + r).standard_normal((200, 64), np.float32) for r in range(4)]


@pytest.mark.parametrize("checks", ["full", "fast", "off"])
def test_native_code_between_meetings_gives_the_bits_of_one_process(checks):
    kernel, tables = computing_kernel(), TABLES
    rows = [np.random.default_rng(20 + r).permutation(200)[:128, None].astype(np.int32) for r in range(4)]
    want = opennki.launch(kernel, 4, lambda r: (tables[r], rows[r]), checks=checks)
    for processes in (2, 3):
        got = opennki.launch(kernel, 4, lambda r: (tables[r], rows[r]), checks=checks, engine="ray", processes=processes)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("checks", ["full", "off"])
def test_an_error_of_native_code_names_its_rank_and_line(checks):
    kernel, tables = computing_kernel(), TABLES
    rows = [np.full((128, 1), 200 if r == 2 else 1, np.int32) for r in range(4)]
    with pytest.raises(IndexError) as caught:
        opennki.launch(kernel, 4, lambda r: (tables[r], rows[r]), checks=checks, engine="ray", processes=2)
    report = caught.value if isinstance(caught.value, NkiError) else caught.value.__cause__
    assert isinstance(report, NkiError) and "rank 2: " in str(report) and "test_ray.py:" in str(report), caught.value


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
