"""A fused program whose first result takes the place of what a later one reads: the running maximum of online softmax."""

from __future__ import annotations

import numpy as np
import pytest

import opennki.dialects.neuronxcc as nki
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
