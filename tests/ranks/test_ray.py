"""Ranks as tasks of a Ray cluster on this machine; `make test-ray` brings Ray."""

from __future__ import annotations

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
