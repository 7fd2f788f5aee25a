"""Counters that only feed addresses do not unroll the loop that advances them."""
import numpy as np
import pytest

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.compiler as ncc
import neuronxcc.nki.language as nl
from opennki.ir.nodes import Alloc, For, statements

X = np.arange(512 * 64, dtype=np.float32).reshape(512, 64)


def counted(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    at = 256
    for i in nl.affine_range(4):
        first = nl.ndarray((128, 64), dtype=x.dtype, buffer=ncc.sbuf.mod_alloc(base_addr=at))
        at += 64 * 4
        second = nl.ndarray((128, 64), dtype=x.dtype, buffer=ncc.sbuf.mod_alloc(base_addr=at))
        at = at + 64 * 4
        first[...] = nl.load(x[nl.ds(i * 128, 128), :])
        second[...] = nl.add(first, 1.0)
        nl.store(out[nl.ds(i * 128, 128), :], second)
    last = nl.ndarray((128, 64), dtype=x.dtype, buffer=ncc.sbuf.mod_alloc(base_addr=at))
    last[...] = nl.load(out[0:128, :])
    nl.store(out[0:128, :], last)
    return out


def also_an_index(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    at = 0
    for i in nl.affine_range(4):
        tile = nl.ndarray((128, 64), dtype=x.dtype, buffer=ncc.sbuf.mod_alloc(base_addr=at))
        tile[...] = nl.load(x[nl.ds(at // 2, 128), :])
        nl.store(out[nl.ds(at // 2, 128), :], tile)
        at += 256
    return out


@pytest.mark.parametrize("kernel, loops, addresses", [(counted, 1, [256, 512, 768]), (also_an_index, 0, [0, 256, 512, 768])])
def test_an_address_counter_does_not_unroll_its_loop(kernel, loops, addresses):
    made = nki.jit(kernel, mode="simulation", platform_target="trn1").trace(X)
    assert sum(isinstance(s, For) for s in statements(made.body)) == loops
    assert sorted(s.placement[0][1] for s in statements(made.body) if isinstance(s, Alloc) and s.space == "sbuf") == addresses
    expected = X + 1 if kernel is counted else X
    np.testing.assert_array_equal(nki.jit(kernel, mode="simulation", platform_target="trn1")(X), expected)
