"""A fused program whose first result takes the place of what a later one reads: the running maximum of online softmax."""

from __future__ import annotations

import numpy as np
import pytest

import opennki.dialects.neuronxcc as nki
from opennki.dialects.neuronxcc import isa as nisa
from opennki.dialects.neuronxcc import language as nl


@pytest.mark.parametrize("loop", [nl.sequential_range, range], ids=["loop", "unrolled"])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_copy_of_a_tile_that_is_overwritten_keeps_its_value(loop, rank):
    def kernel(x):
        out = nl.ndarray((128, 1), nl.float32, buffer=nl.shared_hbm)
        most, total = nl.full((128, 1), -10.0, nl.float32), nl.zeros((128, 1), nl.float32)
        part = 0 if rank == 1 else slice(0, 1)
        for j in loop(3):
            tile = nl.load(x[:, nl.ds(j, 1)])
            before = nl.copy(most[:, part])
            most[:, part] = nl.maximum(before, tile)
            total[...] = nl.add(total, nl.subtract(before, most[:, part]))
        nl.store(out, total)
        return out

    x = np.random.default_rng(0).standard_normal((128, 3)).astype(np.float32)
    full = nki.simulate_kernel(nki.trace(kernel), x)
    np.testing.assert_array_equal(nki.simulate_kernel(nki.trace(kernel), x, checks="fast"), full)
    np.testing.assert_allclose(full, -10.0 - x.max(axis=1, keepdims=True), rtol=1e-5)


@nki.jit(platform_target="trn2")
def divided_by_a_spread_sum(x):
    """A value with one element for each row is stored in all columns of a tile, which is read in another order later."""
    out = nl.ndarray((64, 128), dtype=nl.float32, buffer=nl.shared_hbm)
    tile = nl.load(x)
    e = nl.exp(tile)
    inverse = (1.0 / nl.sum(e, axis=1, keepdims=True)).broadcast_to((128, 64))
    divisor = nl.ndarray((128, 64), dtype=nl.float32)
    divisor[...] = nl.copy(inverse)
    nl.store(out, nl.copy(nisa.nc_transpose(divisor)))
    return out


def test_a_value_of_a_row_is_stored_in_all_columns():
    x = np.random.default_rng(3).standard_normal((128, 256), np.float32)
    want = np.broadcast_to(1 / np.exp(x.astype(np.float64)).sum(axis=1), (64, 128))
    np.testing.assert_allclose(nki.simulate_kernel(divided_by_a_spread_sum, x, checks="fast"), want, rtol=1e-5)
