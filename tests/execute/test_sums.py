"""Products that are added up: which loops and zeros become one call, and that no bit changes."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from tests.bind import kernels as k
from tests.execute.agree import both
from tests.execute.differ import library_functions
from tests.execute.test_passes import normal, shown, traced

from opennki.execute.executor import executor_of
from opennki.interpret.checks import Checks, tape_of
from opennki.interpret.prepared import Prepared

nki, nl, nisa = k.nki, k.nl, k.nisa


def parts(a, i, n=32):
    return a[nl.ds(i * n, n)]


def summed(a, b):
    """Blocks of a contraction, from zero."""
    out = nl.ndarray((64, 48), dtype=nl.float32, buffer=nl.shared_hbm)
    acc = nl.zeros((64, 48), nl.float32, buffer=nl.psum)
    for i in nl.affine_range(4):
        acc += nisa.nc_matmul(nl.load(parts(a, i)), nl.load(parts(b, i)))
    nl.store(out, acc)
    return out


def in_two_loops(block):
    """Two loops over the blocks of one contraction: those of the left operand are where `block` says."""

    def kernel(a, b):
        out = nl.ndarray((64, 48), dtype=nl.float32, buffer=nl.shared_hbm)
        acc = nl.zeros((64, 48), nl.float32, buffer=nl.psum)
        for i in nl.affine_range(2):
            for j in nl.affine_range(2):
                acc += nisa.nc_matmul(nl.load(parts(a, block(i, j))), nl.load(parts(b, i * 2 + j)))
        nl.store(out, acc)
        return out

    return kernel


nested, crossed = in_two_loops(lambda i, j: i * 2 + j), in_two_loops(lambda i, j: i + 2 * j)  # one walk; only the inner loop is a call


def onto_a_tile(a, b):
    """Added to what is there."""
    out = nl.ndarray((64, 48), dtype=nl.float32, buffer=nl.shared_hbm)
    acc = nl.ndarray((64, 48), nl.float32, buffer=nl.psum)
    acc[...] = nisa.tensor_copy(nl.load(parts(b, 0, 64)))
    for i in nl.affine_range(2):
        acc += nisa.nc_matmul(nl.load(parts(a, i)), nl.load(parts(b, i)))
    nl.store(out, acc)
    return out


def moving(a, b):
    """Each block has a result of its own."""
    out = nl.ndarray((4, 64, 48), dtype=nl.float32, buffer=nl.shared_hbm)
    acc = nl.zeros((64, 4, 48), nl.float32, buffer=nl.psum)
    for i in nl.affine_range(4):
        acc[:, i, :] += nisa.nc_matmul(nl.load(parts(a, i)), nl.load(parts(b, i)))
    for i in nl.affine_range(4):
        nl.store(out[i], acc[:, i, :])
    return out


def cleared_in_part(a, b):
    """What is cleared is not just what is added to."""
    out = nl.ndarray((64, 96), dtype=nl.float32, buffer=nl.shared_hbm)
    acc = nl.zeros((64, 96), nl.float32, buffer=nl.psum)
    acc[:, 0:48] += nisa.nc_matmul(nl.load(parts(a, 0)), nl.load(parts(b, 0)))
    nl.store(out, acc)
    return out


def used_between(a, b):
    """What is cleared is read before anything is added."""
    out = nl.ndarray((2, 64, 48), dtype=nl.float32, buffer=nl.shared_hbm)
    acc = nl.zeros((64, 48), nl.float32, buffer=nl.psum)
    nl.store(out[0], acc)
    for i in nl.affine_range(4):
        acc += nisa.nc_matmul(nl.load(parts(a, i)), nl.load(parts(b, i)))
    nl.store(out[1], acc)
    return out


FOUR = "of 4 by [8192, 6144] (added to 0)"
WANTED = {  # kernel: its products, as the tape has them
    summed: [FOUR], nested: [FOUR], crossed: ["of 2 by [16384, 6144] (added)"], onto_a_tile: ["of 2 by [8192, 6144] (added)"],
    moving: ["(added)"], cleared_in_part: ["(added)"], used_between: ["of 4 by [8192, 6144] (added)"],
}  # fmt: skip


@pytest.mark.parametrize("kernel", WANTED)
def test_what_is_one_call(kernel):
    lines = [line.strip() for line in shown(traced(kernel, normal(128, 64), normal(128, 48, seed=1))).splitlines()]
    assert [re.search(r"\] (.*\))", line).group(1) for line in lines if line.startswith("mm ")] == WANTED[kernel]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kernel", WANTED)
def test_no_bit_changes(kernel, dtype):
    """The interpreter, whose products are those of the native library, adds the blocks one by one."""
    arrays = [normal(128, 64).astype(dtype), normal(128, 48, seed=1).astype(dtype)]
    if kernel is onto_a_tile:
        arrays = [a.astype(np.float32) for a in arrays]
    ir = traced(kernel, *arrays)
    tape = tape_of(ir, Checks.of("off"))
    executor = executor_of(tape)
    outs = [[np.empty(o.shape, np.float32) for o in ir.outputs] for _ in range(2)]
    Prepared(ir, "off", tape=tape, native=lambda _: executor).run(list(arrays), outs[0])
    with library_functions():
        Prepared(ir, "off", native=lambda _: None).run(list(arrays), outs[1])
    for native, plain in zip(*outs, strict=True):
        np.testing.assert_array_equal(native.view(np.uint32), plain.view(np.uint32))
    assert both(ir, arrays)
