"""Products leave out what a mask throws away, and nothing else."""

from __future__ import annotations

import ctypes as C

import numpy as np
import pytest
from tests.bind import kernels as k
from tests.execute import native
from tests.execute.agree import both
from tests.execute.test_native_matmul import DTYPES, descriptor
from tests.execute.test_passes import normal, shown, traced

from opennki.execute import abi, lower
from opennki.execute.executor import executor_of
from opennki.interpret.checks import Checks, tape_of
from opennki.interpret.prepared import Prepared

nki, nl, nisa = k.nki, k.nl, k.nisa
P, F, D = 64, 96, 48


def scores_of(q, keys, i, j):
    """Scores of a block of queries and a block of keys, which nobody has masked yet."""
    return nisa.nc_matmul(nl.load(q[:, nl.ds(i * P, P)]), nl.load(keys[:, nl.ds(j * F, F)]))


def causal(q, keys, always=True, raw=False, twice=False, slope=1):
    out = nl.ndarray((q.shape[1], keys.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    top = nl.ndarray((q.shape[1], 1), dtype=nl.float32, buffer=nl.shared_hbm)
    plain = nl.ndarray((q.shape[1], keys.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    for i in nl.affine_range(q.shape[1] // P):
        for j in nl.affine_range(keys.shape[1] // F):
            made = scores_of(q, keys, i, j)
            scores = nl.ndarray((P, F), dtype=nl.float32)
            scores[...] = nl.multiply(made, 0.25)
            row, column = nl.mgrid[0:P, 0:F]
            if always:
                scores[...] = nisa.affine_select(pred=slope * (i * P + row) >= j * F + column, on_true_tile=scores, on_false_value=-9.0)
            elif (j + 1) * F > i * P:
                scores[...] = nisa.affine_select(pred=(i * P + row >= j * F + column), on_true_tile=scores, on_false_value=-9.0)
            if twice:
                scores[...] = nl.add(scores, made)
            if raw:
                nl.store(plain[nl.ds(i * P, P), nl.ds(j * F, F)], made)
            nl.store(top[nl.ds(i * P, P)], nl.max(scores, axis=1, keepdims=True))
            nl.store(out[nl.ds(i * P, P), nl.ds(j * F, F)], scores)
    return out, top, plain


def variant(**options):
    def kernel(q, keys):
        out, top, plain = causal(q, keys, **options)
        return (out, top, plain) if options.get("raw") else (out, top)

    return kernel


def operands(dtype):
    q, keys = (normal(D, n, seed=n).astype(DTYPES[dtype]) for n in (3 * P, 2 * F))
    return q, keys


def products(ir):
    return [line for line in shown(ir).splitlines() if line.strip().startswith("mm")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"always": False}, {"slope": 3}, {"slope": -1}], ids=str)
def test_products_know_what_is_wanted(options, dtype, monkeypatch):
    ir = traced(variant(**options), *operands(dtype))
    (line,) = products(ir)
    assert line.count("predicates") == 1
    assert (", " in line.split("predicates")[1]) == (options == {"always": False})  # the branch, and the selection
    q, keys = operands(dtype)
    assert both(ir, [q, keys])
    keys[:, 2 * F - 1] = np.nan  # whether it is looked at is decided by the mask alone
    made = [ran(ir, [q, keys])]
    monkeypatch.setattr(lower, "leave_out", lambda *_: None)
    made.append(ran(ir, [q, keys]))
    for a, b in zip(*made, strict=True):
        native.assert_same(a, b)


def ran(ir, arrays):
    tape = tape_of(ir, Checks.of("off"), roll=True)
    executor = executor_of(tape)
    assert not executor.lowering.fallbacks
    outs = [np.zeros(o.shape, np.float32) for o in ir.outputs]
    Prepared(ir, "off", tape=tape, native=lambda _: executor).run(arrays, outs)
    return outs


@pytest.mark.parametrize("options", [{"raw": True}, {"twice": True}], ids=str)
def test_what_is_used_without_the_mask_is_wanted(options):
    """Stored as it is, or added to what the mask has left."""
    ir = traced(variant(**options), *operands("float32"))
    assert all("predicates" not in line for line in products(ir))
    assert both(ir, list(operands("float32")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("level", native.LEVELS)
def test_blocks_that_nobody_wants(level, dtype):
    """All that is wanted is there, under every pair of conditions."""
    lib = native.at_level(level)
    lib.nki_mm_scratch.restype = C.c_size_t
    rng = np.random.default_rng(5)
    for round in range(60):
        K, M, N = (int(n) for n in rng.integers(1, [70, 150, 200]))
        s, m = (rng.standard_normal((K, n)).astype(np.float32).astype(DTYPES[dtype]) for n in (M, N))
        kind = descriptor(s, m, want := np.zeros((M, N), np.float32), dtypes=(dtype, dtype))
        raw = np.zeros(lib.nki_mm_scratch(C.byref(kind)) + 64, np.uint8)
        room = C.c_void_p(raw.ctypes.data - raw.ctypes.data % -64)
        at = [*(C.c_void_p(x.ctypes.data) for x in (s, m, want)), room]
        lib.nki_mm_where_run(C.byref(kind), *at, None, None, None)
        count = round % (abi.WHERES + 1)
        where, bases, dead = (abi.Where * abi.WHERES)(), (C.c_int64 * abi.WHERES)(), np.ones((M, N), bool)
        for n in range(count):
            where[n].m, where[n].n, where[n].holds = int(rng.integers(-3, 4)), int(rng.integers(-3, 4)), int(rng.integers(0, 2))
            bases[n] = int(rng.integers(-300, 300))
            truth = bases[n] + where[n].m * np.arange(M)[:, None] + where[n].n * np.arange(N) >= 0
            dead &= truth == bool(where[n].holds)
        kind.n_where, kind.where = count, where
        got = np.full((M, N), np.nan, np.float32)
        at[2] = C.c_void_p(got.ctypes.data)
        lib.nki_mm_where_run(C.byref(kind), *at, None, None, bases)
        wanted = ~dead if count else np.ones((M, N), bool)
        np.testing.assert_array_equal(got[wanted], want[wanted])
        if dead.all() and count and min(M, N) > 64:
            assert np.isnan(got).any()  # it is left out indeed
