"""Reads of what was never written, found by native code at the level `fast`."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bind import kernels as k
from tests.execute.test_passes import normal, traced

from opennki.errors import NkiReadError
from opennki.execute.executor import executor_of, native
from opennki.execute.show import text
from opennki.interpret.checks import Checks, tape_of
from opennki.interpret.prepared import Prepared
from opennki.isa import dtypes

nki, nl, nisa = k.nki, k.nl, k.nisa


def run(ir, arrays, level, threads=None):
    """Outputs, or the error of a read of unwritten elements."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = Prepared(ir, level, native=None if level == "full" else native)
        outs = [np.zeros(o.shape, dtypes.storage(o.dtype)) for o in ir.outputs]
        try:
            for _ in range(2):  # nothing of the first run is left for the second
                plan.run(arrays, outs)
        except NkiReadError as error:
            return error
    return outs


def watched(ir):
    return executor_of(tape_of(ir, Checks.of("fast"), roll=True)).lowering.watch.cells


def never(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf)
    nl.store(out, nl.add(tile, nl.load(x)))
    return out


def one_block_missing(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf)
    for i in nl.sequential_range(8):
        if i != 5:
            tile[:, nl.ds(i * 8, 8)] = nl.load(x[:, nl.ds(i * 8, 8)])
    for i in nl.sequential_range(8):
        nl.store(out[:, nl.ds(i * 8, 8)], nl.exp(tile[:, nl.ds(i * 8, 8)]))
    return out


def each_iteration_anew(x):
    """Written in the first iteration only; each iteration has a tensor of its own."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.sequential_range(4):
        tile = nl.ndarray((x.shape[0], 16), dtype=nl.float32, buffer=nl.sbuf)
        if i == 0:
            tile[...] = nl.load(x[:, 0:16])
        nl.store(out[:, nl.ds(i * 16, 16)], nl.exp(tile))
    return out


def interpreted(x):
    """The reader has no native form."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf)
    for i in nl.sequential_range(2):
        if i == 3:
            tile[...] = nl.load(x)
    nl.store(out, nl.dropout(tile, rate=0.5))
    return out


@pytest.mark.parametrize("fn", [never, one_block_missing, each_iteration_anew, interpreted], ids=lambda f: f.__name__)
def test_a_read_of_what_was_never_written_is_an_error(fn):
    x = normal(32, 64)
    ir = traced(fn, x)
    assert watched(ir)
    full, fast = run(ir, [x], "full"), run(ir, [x], "fast")
    assert isinstance(full, NkiReadError) and isinstance(fast, NkiReadError)
    assert fast.loc == full.loc and fast.operand == full.operand and fast.rule == full.rule and fast.fix == full.fix
    assert isinstance(run(ir, [x], "off"), list)


def test_what_is_proven_costs_nothing():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        for i in nl.affine_range(4):
            tile = nl.load(x[:, nl.ds(i * 16, 16)])
            nl.store(out[:, nl.ds(i * 16, 16)], nl.exp(tile))
        return out

    assert not watched(traced(kernel, normal(32, 64)))


def test_the_tape_of_a_watched_tensor():
    ir = traced(one_block_missing, normal(32, 64))
    lines = text(executor_of(tape_of(ir, Checks.of("fast"), roll=True)).lowering).splitlines()
    assert lines[0] == "unwritten t2"
    uses = [line.strip() for line in lines if " t2@(" in line and "ew" not in line]
    assert uses == ["mark t2@(0, 8*i1) in cells of (32, 8)"] * 2 + ["ask t2@(0, 8*i2) in cells of (32, 8)"]


def masked(x):
    """A mask leaves out a part of what is written; the reader has the same mask."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    row, column = nl.arange(32)[:, None], nl.arange(16)[None, :]
    tile = nl.ndarray((32, 64), dtype=nl.float32, buffer=nl.sbuf)
    for i in nl.sequential_range(4):
        keep = i * 16 + column < 50
        tile[row, i * 16 + column] = nl.load(x[row, i * 16 + column], mask=keep)
        nl.store(out[row, i * 16 + column], nl.exp(tile[row, i * 16 + column], mask=keep), mask=keep)
    return out


def strided(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray((32, 64), dtype=nl.float32, buffer=nl.sbuf)
    row, column = nl.arange(32)[:, None], nl.arange(16)[None, :]
    for i in nl.sequential_range(3):
        tile[row, column * 4 + i] = nl.load(x[:, nl.ds(i * 16, 16)])
        nl.store(out[:, nl.ds(i * 16, 16)], nl.copy(tile[row, column * 4 + i]))
    nl.store(out[:, nl.ds(48, 16)], nl.copy(tile[row, column * 4]))
    return out


def runtime_index(x):
    """Written at places that are known when it runs."""
    out = nl.ndarray((8, 64), dtype=x.dtype, buffer=nl.shared_hbm)
    table = nl.ndarray((64, 64), dtype=nl.float32, buffer=nl.private_hbm)
    index = nisa.iota(nl.arange(1)[None, :] + nl.arange(8)[:, None] * 3, dtype=nl.int32)
    column = nl.arange(64)[None, :]
    nl.store(table[index, column], nl.load(x[0:8]))
    nl.store(out, nl.load(table[index, column]))
    return out


def accumulated(x):
    """The first product of PSUM starts from zero."""
    out = nl.ndarray((64, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    acc = nl.ndarray((64, 64), dtype=nl.float32, buffer=nl.psum)
    for i in nl.sequential_range(2):
        acc += nisa.nc_matmul(nl.load(x), nl.load(x))
        if i == 1:
            nl.store(out, acc)
    return out


@pytest.mark.parametrize("fn", [masked, strided, runtime_index, accumulated], ids=lambda f: f.__name__)
def test_what_is_written_is_no_error(fn):
    x = normal(32, 64)
    ir = traced(fn, x)
    assert isinstance(run(ir, [x], "full"), list)
    assert isinstance(run(ir, [x], "fast"), list)


@pytest.mark.parametrize("threads", ["1", "2", "5"])
def test_each_thread_has_cells_of_its_own(monkeypatch, threads):
    def kernel(x, last):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        for i in nl.affine_range(x.shape[0] // 128):
            tile = nl.ndarray((128, x.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
            for j in nl.sequential_range(2):
                if i * 2 + j < last.shape[0]:
                    tile[:, nl.ds(j * 256, 256)] = nl.load(x[nl.ds(i * 128, 128), nl.ds(j * 256, 256)])
            nl.store(out[nl.ds(i * 128, 128)], nl.exp(tile))
        return out

    monkeypatch.setenv("OPENNKI_NUM_THREADS", threads)
    x = normal(1024, 512)
    good, bad = (traced(kernel, x, np.zeros((n, 1), np.float32)) for n in (16, 13))
    assert executor_of(tape_of(good, Checks.of("fast"), roll=True)).lowering.parallel
    assert isinstance(run(good, [x, np.zeros((16, 1), np.float32)], "fast"), list)
    assert isinstance(run(bad, [x, np.zeros((13, 1), np.float32)], "fast"), NkiReadError)


KINDS = st.sampled_from(["write", "write", "read", "masked", "whole", "step"])
USE = st.tuples(KINDS, st.integers(0, 7), st.integers(0, 2), st.integers(1, 3))


@settings(max_examples=80, deadline=None)
@given(st.lists(USE, min_size=1, max_size=6), st.lists(USE, max_size=5), st.integers(1, 4))
def test_no_false_alarms(first, inside, trips):
    def kernel(x):
        out = nl.ndarray((16, 64), dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        tile = nl.ndarray((16, 64), dtype=nl.float32, buffer=nl.sbuf)
        uses(first, x, out, tile, 0)
        for i in nl.sequential_range(trips):
            uses(inside, x, out, tile, i)
        return out

    def uses(plan, x, out, tile, i):
        row, column = nl.arange(16)[:, None], nl.arange(8)[None, :]
        for what, place, move, size in plan:
            at = nl.ds(place * 4 + move * 4 * i, 4 * size)
            if what == "write":
                tile[:, at] = nl.load(x[:, at])
            elif what == "read":
                nl.store(out[:, at], nl.exp(tile[:, at]))
            elif what == "masked":
                keep = column + 8 * move * i < 12
                tile[row, place * 4 + column] = nl.load(x[row, place * 4 + column], mask=keep)
            elif what == "step":
                tile[row, place + size * column] = nl.load(x[:, 0:8])
            elif place == 0:
                nl.store(out, nl.exp(tile))

    x = normal(16, 64)
    ir = traced(kernel, x)
    fast, full = run(ir, [x], "fast"), run(ir, [x], "full")
    if isinstance(fast, NkiReadError):
        assert isinstance(full, NkiReadError)
