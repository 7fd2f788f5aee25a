"""Elementwise calls in loops are prepared once, and anew where their operands are to each other something else."""

from __future__ import annotations

import ctypes as C

import numpy as np
import pytest
from tests.bind import kernels as k
from tests.execute import native
from tests.execute.agree import both
from tests.execute.test_passes import normal, traced

from opennki.execute import abi
from opennki.execute.assemble import elementwise, uop
from opennki.execute.executor import executor_of
from opennki.interpret.checks import Checks, tape_of

nki, nl, nisa = k.nki, k.nl, k.nisa


def meets(x):
    """What is read lies before what is written, across its beginning, on it, and across its end."""
    out = nl.ndarray((32, 300), dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    for i in nl.sequential_range(80):
        tile[:, nl.ds(164 - 2 * i, 128)] = nisa.tensor_scalar(tile[:, nl.ds(20, 128)], np.multiply, 0.5)
    nl.store(out, tile)
    return out


def branches(x):
    """A predicate that is the same everywhere holds in some rounds."""
    out = nl.ndarray((32, 28), dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    row, column = nl.mgrid[0:32, 0:28]
    for i in nl.sequential_range(9):
        tile[...] = nl.multiply(tile, 0.75)
        if i < 5:
            tile[...] = nisa.affine_select(pred=(row >= column + i), on_true_tile=tile, on_false_value=2.0)
        tile[...] = nl.add(tile, 0.125)
    nl.store(out, tile)
    return out


def many(x):
    """More calls in a loop than are remembered, of which some are not worth it, in tiles that are too wide."""
    out = nl.ndarray((4, 9000), dtype=nl.float32, buffer=nl.shared_hbm)
    small = nl.zeros((nl.par_dim(32), 28), nl.float32)
    wide = nl.zeros((nl.par_dim(4), 9000), nl.float32)
    tile = nl.load(x)
    for i in nl.sequential_range(3):
        for n in range(300):
            small[:, nl.ds(n % 27, 1)] = nl.add(nl.multiply(small[:, nl.ds((5 * n) % 27, 1)], 0.5), float(n))
        small[...] = nl.add(small, tile)
        wide[...] = nl.exp(nl.subtract(nl.multiply(wide, 0.5), nl.max(wide, axis=1, keepdims=True)))
    wide[0:4, 0:28] = nl.copy(small[0:4, 0:28])
    nl.store(out, wide)
    return out


@pytest.mark.parametrize("fn, columns", [(meets, 300), (branches, 28), (many, 28)])
@pytest.mark.parametrize("poisoned", [0, 1])
def test_agrees_with_the_interpreter(fn, columns, poisoned):
    x = normal(32, columns)
    ir = traced(fn, x)
    executor = executor_of(tape_of(ir, Checks.of("off"), roll=True))
    assert executor is not None and not executor.lowering.fallbacks
    native.best().nki_poison_from_now(poisoned)
    try:
        assert both(ir, [x])
    finally:
        native.best().nki_poison_from_now(0)


@pytest.mark.parametrize("level", native.LEVELS)
def test_operands_that_come_to_overlap(level):
    """What was prepared for operands that are apart does not do for those that are not: a store would go ahead of the load."""
    lib = native.at_level(level)
    lib.nki_memo_new.restype = C.c_void_p
    made = [uop(abi.LOAD, 0, 1), uop(abi.CONST, 1, imm=0.5), uop(abi.FUNC, 2, 0, 1, fn="multiply"), uop(abi.STORE, 0, 2)]
    rows, n, pitch = 3, 300, 4 * 2000
    program = elementwise(1, 1, (rows, n), [(False, made)], [((pitch, 4), "float32"), ((pitch, 4), "float32")])
    memo = C.c_void_p(lib.nki_memo_new())
    first = normal(rows, 2000)
    for shift in (None, None, None, 20, None, 1, 0, -1, -20, None):
        for remembered in (False, True):
            x = first.copy()
            to, start = (np.zeros_like(x), 400) if shift is None else (x, 400 + shift)
            at = (C.c_void_p * 2)(to.ctypes.data + 4 * start, x.ctypes.data + 4 * 400)
            if remembered:
                lib.nki_memo_run(memo, C.c_int64(5), C.byref(program.structure), at, None, None)
            else:
                lib.nki_ew_run(C.byref(program.structure), at, None, None, None, None)
            native.assert_same(to[:, start : start + n], first[:, 400 : 400 + n] * np.float32(0.5), shift)
    lib.nki_memo_free(memo)
