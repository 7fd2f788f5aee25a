"""Passes over lowered kernels: what they make of a kernel, as text, and that it computes the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bind import kernels as k
from tests.execute.agree import both

from opennki.execute.executor import executor_of, native
from opennki.execute.show import text
from opennki.interpret.checks import Checks, tape_of
from opennki.interpret.prepared import Prepared

nki, nl, nisa = k.nki, k.nl, k.nisa
nt = nki.typing


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def traced(fn, *arrays, grid=None):
    kernel = nki.jit(fn, platform_target="trn2")
    return (kernel if grid is None else kernel[grid]).trace(*arrays)


def shown(ir):
    return text(executor_of(tape_of(ir, Checks.of("off"), roll=True)).lowering)


# ---- merging of small tiles ----
def tiny(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[1] // 4):
        t = nl.load(x[:, i * 4 : (i + 1) * 4])
        nl.store(out[:, i * 4 : (i + 1) * 4], t * 2.5 + t)
    return out


def nest(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // 32):
        for j in nl.affine_range(x.shape[1] // 8):
            nl.store(out[nl.ds(i * 32, 32), nl.ds(j * 8, 8)], nl.exp(nl.load(x[nl.ds(i * 32, 32), nl.ds(j * 8, 8)])))
    return out


def folded(n):
    """A kernel that sums each row of small tiles, n elements wide."""

    def kernel(x):
        out = nl.ndarray((x.shape[0], x.shape[1] // n), dtype=x.dtype, buffer=nl.shared_hbm)
        for i in nl.affine_range(x.shape[1] // n):
            nl.store(out[:, nl.ds(i, 1)], nl.sum(nl.load(x[:, nl.ds(i * n, n)]), axis=1, keepdims=True))
        return out

    return kernel


def transposed(x):
    """Tiles that go somewhere else, in another order."""
    n = x.shape[1] // 4
    out = nl.ndarray((x.shape[0], n, 4), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(n):
        nl.store(out[:, n - 1 - i], nl.load(x[:, nl.ds(i * 4, 4)]))
    return out


def positions(x):
    """Index values and predicates that move with the loop."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    row, column = nl.arange(32)[:, None], nl.arange(4)[None, :]
    for i in nl.affine_range(x.shape[1] // 4):
        tile = nl.load(x[row, i * 4 + column])
        seen = nisa.affine_select(pred=(row >= i * 4 + column), on_true_tile=tile, on_false_value=-1.0)
        nl.store(out[row, i * 4 + column], nl.add(seen, nisa.iota(i * 4 + column + 2 * row, dtype=nl.float32)))
    return out


def rest(x):
    """A number of iterations without a divisor near the block."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    other = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0]):
        nl.store(out[nl.ds(i, 1)], nl.load(x[nl.ds(i, 1)]))
        nl.store(other[nl.ds(i, 1)], nl.negative(nl.load(x[nl.ds(i, 1)])))
    return out, other


MERGED = {
    "tiny": (tiny, (normal(128, 64),), "ew [8192] (multiply, add) t1*@0 [4]; x@0 [4]"),
    "nest": (nest, (normal(64, 64),), "ew [4096] (exp) t1*@0 [4]; x@0 [4]"),
    "folded": (folded(40), (normal(32, 320),), "ew [8, 32, 40] (fold add) x@0 [160, 1280, 4]; t1*@0 [4, 32, 0]"),  # rows stay rows
    "unfolded": (
        folded(4),
        (normal(32, 64),),
        "ew [512] (fold add) t1*@0 [4]; x@0 [16]; x@4 [16]; x@8 [16]; x@12 [16]",
    ),
    "transposed": (transposed, (normal(32, 64),), "copy [32, 16, 4] t1*@240 [256, -16, 4]; x@0 [256, 16, 4]"),
    "positions": (
        positions,
        (normal(32, 64),),
        "ew [32, 64] (pred, select, index, add) t1*@0 [256, 4]; x@0 [256, 4]; predicates 0; indices 0",
    ),
    "rest": (
        rest,
        (normal(16411, 64),),
        "for i1.block in 32: parallel\n"
        "  copy [32768] t1*@131072*i1.block [4]; x@131072*i1.block [4]\n"
        "  ew [32768] (negative) t2*@131072*i1.block [4]; x@131072*i1.block [4]\n"
        "copy [1728] t1*@4194304 [4]; x@4194304 [4]\n"
        "ew [1728] (negative) t2*@4194304 [4]; x@4194304 [4]",
    ),
}


@pytest.mark.parametrize("case", MERGED)
def test_loops_of_small_tiles_are_merged(case):
    fn, arrays, want = MERGED[case]
    ir = traced(fn, *arrays)
    assert shown(ir) == want
    assert both(ir, list(arrays))


def carried(x):
    out = nl.ndarray((x.shape[0], 4), dtype=x.dtype, buffer=nl.shared_hbm)
    total = nl.zeros((x.shape[0], 4), nl.float32)
    for i in nl.sequential_range(x.shape[1] // 4):
        total[...] = nl.subtract(nl.load(x[:, nl.ds(i * 4, 4)]), total)
    nl.store(out, total)
    return out


def shifted(x):
    """Each iteration reads what the one before has written."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x))
    for i in nl.sequential_range(x.shape[1] // 4 - 1):
        nl.store(out[:, nl.ds(i * 4 + 4, 4)], nl.multiply(nl.load(out[:, nl.ds(i * 4, 4)]), 0.5))
    return out


def overlapping(x):
    """The last one to write an element counts."""
    out = nl.ndarray((x.shape[0], x.shape[1] // 2 + 2), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.sequential_range(x.shape[1] // 4):
        nl.store(out[:, nl.ds(i * 2, 4)], nl.load(x[:, nl.ds(i * 4, 4)]))
    return out


def edges(x):
    """A mask that moves with the loop."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    row, column = nl.arange(32)[:, None], nl.arange(4)[None, :]
    for i in nl.affine_range(16):
        keep = i * 4 + column < x.shape[1]
        nl.store(out[row, i * 4 + column], nl.load(x[row, i * 4 + column], mask=keep), mask=keep)
    return out


def in_place(x: nt.mutable_tensor):
    """A written argument: reads of one column, writes of the one before."""
    for i in nl.sequential_range(x.shape[1] // 4 - 1):
        nl.store(x[:, nl.ds(i * 4, 4)], nl.add(nl.load(x[:, nl.ds(i * 4 + 4, 4)]), nl.load(x[:, nl.ds(i * 4, 4)])))
    return x


@pytest.mark.parametrize("fn", [carried, shifted, overlapping, edges, in_place], ids=lambda f: f.__name__)
def test_loops_whose_iterations_meet_are_not_merged(fn):
    x = normal(32, 62 if fn is edges else 64)
    ir = traced(fn, x)
    assert shown(ir).startswith("for") or "\nfor" in shown(ir)
    assert both(ir, [x])


def test_a_mask_that_does_not_move_is_merged():
    def kernel(x):
        out = nl.ndarray((32, 64), dtype=x.dtype, buffer=nl.shared_hbm)
        row, column = nl.arange(32)[:, None], nl.arange(4)[None, :]
        tile = nl.load(x)
        nl.store(out, nl.add(tile, 1.0))
        for i in nl.affine_range(16):
            nl.store(out[row, i * 4 + column], tile[row, i * 4 + column], mask=row < 20)
        return out

    x = normal(32, 64)
    ir = traced(kernel, x)
    assert shown(ir).endswith("copy [16, 32, 4] t1*@0 [16, 256, 4]; t2@0 [16, 256, 4]; where 19")
    assert both(ir, [x])


# ---- random nests of loops ----
PLACE = st.tuples(st.integers(0, 12), st.sampled_from([0, 2, 4, 4, 4, 8]), st.sampled_from([0, 4, 8, 16, 16, 32]))
STEP = st.tuples(st.sampled_from(["load", "store", "out", "add", "sum", "copy", "keep", "local"]), PLACE, PLACE, st.booleans())
NEST = st.tuples(st.integers(1, 4), st.integers(1, 4), st.lists(STEP, min_size=1, max_size=6), st.lists(STEP, max_size=2))


def random_kernel(plan):
    outer, inner_, steps, after = plan

    def at(place, i, j):
        return nl.ds(place[0] + place[1] * i + place[2] * j, 4)

    def kernel(x, y):
        out = nl.ndarray((8, 256), dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        kept = nl.zeros((8, 256), nl.float32)
        for i in nl.sequential_range(outer):
            t = nl.load(x[:, at((0, 4, 0), i, 0)])
            for j in nl.sequential_range(inner_):
                t = body(steps, x, y, out, kept, t, i, j)
            body(after, x, y, out, kept, nl.load(y[:, at((0, 4, 0), i, 0)]), i, 0)
        other = nl.ndarray((8, 256), dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(other, kept)
        return out, other

    def body(steps, x, y, out, kept, t, i, j):
        t = nl.copy(t)
        for what, a, b, flag in steps:
            p, q = at(a, i, j), at(b, i, j)
            if what == "load":
                t = nl.load((x if flag else y)[:, p])
            elif what == "store":
                nl.store(out[:, p], t)
            elif what == "out":
                t = nl.load(out[:, p])
            elif what == "add":
                t = nl.add(t, nl.load(y[:, p])) if flag else nl.multiply(t, 0.5)
            elif what == "sum":
                t = nl.add(t, nl.sum(nl.load(x[:, p]), axis=1, keepdims=True))
            elif what == "copy":
                nl.store(out[:, q], nl.load(out[:, p]))
            elif what == "keep":
                kept[:, p] = nl.add(kept[:, q], t) if flag else nl.copy(t)
            else:
                t = nl.subtract(kept[:, p], t)
        return t

    return kernel


@settings(max_examples=60, deadline=None)
@given(NEST)
def test_random_nests_of_loops_give_the_same_bits(plan):
    x, y = normal(8, 256), normal(8, 256, seed=1)
    assert both(traced(random_kernel(plan), x, y), [x, y])


def test_threads_share_merged_blocks(monkeypatch):
    x = normal(128, 16384)
    ir = traced(tiny, x)
    assert "parallel" in shown(ir)
    outs = []
    for threads in ("1", "2", "7"):
        monkeypatch.setenv("OPENNKI_NUM_THREADS", threads)
        out = np.zeros_like(x)
        Prepared(ir, "off", native=native).run([x], [out])
        outs.append(out)
    assert all((o == x * np.float32(2.5) + x).all() for o in outs)


# ---- branches ----
def causal(x):
    """A straight line with a branch in it: blocks on the diagonal are masked in place."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    sums = nl.ndarray((x.shape[0], x.shape[1] // 32), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // 32):
        for j in nl.sequential_range(x.shape[1] // 32):
            part = nl.ds(i * 32, 32), nl.ds(j * 32, 32)
            scores = nl.ndarray((32, 32), dtype=nl.float32)
            scores[...] = nl.multiply(nl.load(x[part]), 0.25)
            if i // 2 == j // 2:
                row, column = nl.mgrid[0:32, 0:32]
                scores[...] = nisa.affine_select(
                    pred=(i * 32 + row >= j * 32 + column), on_true_tile=scores, on_false_value=-3.0
                )
            nl.store(sums[nl.ds(i * 32, 32), nl.ds(j, 1)], nl.sum(scores, axis=1, keepdims=True))
            nl.store(out[part], nl.subtract(scores, 1.0))
    return out, sums


def computed(x):
    """The branch makes the tile from another one, and what comes after reads both."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // 16):
        tile = nl.load(x[nl.ds(i * 16, 16)])
        other = nl.ndarray(tile.shape, dtype=nl.float32)
        other[...] = nl.add(tile, 1.0)
        if i >= 2:
            other[...] = nl.multiply(tile, tile)
        nl.store(out[nl.ds(i * 16, 16)], nl.multiply(other, tile))
    return out


@pytest.mark.parametrize("fn", [causal, computed])
def test_a_line_goes_on_over_a_branch(fn):
    x = normal(128, 128)
    ir = traced(fn, x)
    assert both(ir, [x])
    tree = shown(ir)
    assert "select" in tree and tree.count("ew") == 1, tree


def narrow(x):
    """A branch around an instruction with a mask."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // 16):
        tile = nl.add(nl.load(x[nl.ds(i * 16, 16)]), 1.0, dtype=nl.bfloat16)
        if i >= 2:
            tile[...] = nl.multiply(tile, tile, mask=nl.arange(16)[:, None] < 9)
        nl.store(out[nl.ds(i * 16, 16)], tile)
    return out


def test_a_branch_around_a_masked_instruction_stays():
    x = normal(64, 40)
    ir = traced(narrow, x)
    assert both(ir, [x])
    assert "if " in shown(ir)
