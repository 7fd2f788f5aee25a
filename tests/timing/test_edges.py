"""Accesses that reach over the end of a tensor, where a mask leaves the part outside out."""

from __future__ import annotations

import numpy as np

import opennki.dialects.neuronxcc as nki
from opennki.dialects.neuronxcc import language as nl
from opennki.isa.target import resolve
from opennki.timing import estimate
from opennki.timing.lower import Program
from opennki.timing.machine import Machine


@nki.jit(platform_target="trn1")
def shifted(x):
    """The next column is used where there is one; the kernel's last tensor is the one that is overrun."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    total = nl.zeros(x.shape, dtype=nl.float32)
    tile = nl.ndarray(x.shape, dtype=x.dtype)
    p, f = nl.arange(128)[:, None], nl.arange(32)[None, :]
    for j in nl.affine_range(4):
        tile[p, j * 32 + f] = nl.load(x[p, j * 32 + f])
    for j in nl.sequential_range(4):
        total[p, j * 32 + f] = nl.copy(tile[p, (j + 1) * 32 + f], mask=((j + 1) * 32 + f < 128))
    nl.store(out, total)
    return out


def test_cells_stay_within_their_tensor():
    kernel = shifted.trace(np.zeros((128, 128), np.float32))
    program = Program(kernel, resolve(kernel.target))
    machine = Machine(program, resolve(kernel.target))
    found = 0
    for op in program.ops:
        for ref in (*op.reads, *op.chained, *op.writes):
            family = ref.family
            for j in range(4):
                machine.env = [j] * len(machine.env)
                assert all(family.base <= c < family.base + family.cells for c in machine.touched([ref]))
            found += ref.ends is not None
    assert found, "an access of this kernel may lead outside"


def test_what_a_mask_leaves_out_orders_nothing():
    made = estimate(shifted.trace(np.zeros((128, 128), np.float32)), record=True)
    assert made.latency_us > 0 and made.instructions == len(made.rows)


def test_a_tile_that_nothing_writes_keeps_its_loop():
    @nki.jit(platform_target="trn1")
    def unwritten(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        for i in nl.affine_range(4):
            never = nl.ndarray((128, 32), dtype=x.dtype)
            nl.store(out[i * 128:(i + 1) * 128, :], nl.multiply(never, 2.0))
        return out

    t = estimate(unwritten.trace(np.zeros((512, 32), np.float32)), record=True)
    assert [r.op for r in t.rows].count("dma_copy") == 4
