"""Forwarding of copies, and what is moved out of loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bind import kernels as k
from tests.execute.agree import both
from tests.execute.test_passes import normal, shown, traced

nki, nl, nisa = k.nki, k.nl, k.nisa


def scanned(a, b):
    """Loads and a store that a scan does itself."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(2):
        rows = nl.ds(i * 32, 32)
        nl.store(out[rows], nisa.tensor_tensor_scan(nl.load(a[rows]), nl.load(b[rows]), 0.0, np.multiply, np.add))
    return out


def product(a, b):
    """Operands in narrow HBM are read there, those in wide rows are brought together."""
    out = nl.ndarray((64, 512), dtype=nl.float32, buffer=nl.shared_hbm)
    acc = nl.zeros((64, 512), nl.float32, buffer=nl.psum)
    for q in nl.affine_range(2):
        acc += nisa.nc_matmul(nl.load(a[nl.ds(q * 64, 64)]), nl.load(b[nl.ds(q * 64, 64), nl.ds(512, 512)]))
    nl.store(out, acc)
    return out


def parts(a, b):
    """A part of a tile, at a place that moves."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    tile = nl.load(a)
    for i in nl.sequential_range(2):
        part = nisa.tensor_tensor_scan(tile[:, nl.ds(i * 32, 32)], nl.load(b[:, nl.ds(i * 32, 32)]), 0.0, np.multiply, np.add)
        nl.store(out[:, nl.ds(i * 32, 32)], part)
    return out


def invariant(a, b):
    """What the inner loop does not change is computed before it."""
    out = nl.ndarray((4, *a.shape), dtype=a.dtype, buffer=nl.shared_hbm)
    for i in nl.sequential_range(2):
        for j in nl.sequential_range(4):
            row = nl.max(nl.load(a[nl.ds(i * 32, 32)]), axis=1, keepdims=True)
            tile = nisa.tensor_tensor_scan(nl.load(b[nl.ds(i * 32, 32)]), nl.load(a[nl.ds(i * 32, 32)]), row, np.multiply, np.add)
            nl.store(out[j, nl.ds(i * 32, 32)], nl.add(tile, nl.load(b[nl.ds(j * 8, 32)])))
    return out


WANTED = {
    "scanned": (
        scanned,
        "for i1 in 2:\n"
        "  scan [32, 64] a@8192*i1 [256, 4]; b@8192*i1 [256, 4]; t1*@8192*i1 [256, 4]",
    ),
    "product": (
        product,
        "ew [32768] (convert) t2*@0 [4]\n"
        "for i1 in 2:\n"
        "  copy [64, 512] t4*@0 [2048, 4]; b@524288*i1 + 2048 [8192, 4]\n"
        "  mm [64, 512] (added) a@16384*i1 [256, 4]; t4@0 [2048, 4]; t2*@0 [2048, 4]\n"
        "copy [32768] t1*@0 [4]; t2@0 [4]",
    ),
    "parts": (
        parts,
        "for i1 in 2:\n"
        "  scan [64, 32] a@128*i1 [256, 4]; b@128*i1 [256, 4]; t1*@128*i1 [256, 4]",
    ),
    "invariant": (
        invariant,
        "for i1 in 2:\n"
        "  ew [32, 64] (fold maximum) a@8192*i1 [256, 4]; t3*@0 [4, 0]\n"
        "  scan [32, 64] b@8192*i1 [256, 4]; a@8192*i1 [256, 4]; t6*@0 [256, 4]; t3@0 [4]\n"
        "  ew [4, 2048] (add) t1*@8192*i1 [16384, 4]; t6@0 [0, 4]; b@0 [2048, 4]",  # the inner loop is merged
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WANTED)
def test_copies_are_forwarded(case):
    fn, want = WANTED[case]
    a, b = (normal(128, 64), normal(128, 2048, seed=1)) if fn is product else (normal(64, 64), normal(64, 64, seed=1))
    ir = traced(fn, a, b)
    assert shown(ir) == want
    assert both(ir, [a, b])


def changed_between(a, b):
    """The source of a copy is written before the copy is used."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(a))
    tile = nl.load(out)
    nl.store(out, nl.load(b))
    other = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(other, nisa.tensor_tensor_scan(tile, tile, 0.0, np.multiply, np.add))
    return out, other


def changed_by_the_loop(a, b):
    """A load that looks the same in each iteration, of what the loop changes."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(a))
    for _ in nl.sequential_range(3):
        tile = nl.max(nl.load(out), axis=1, keepdims=True)
        nl.store(out, nisa.tensor_tensor_scan(nl.load(b), nl.load(out), tile, np.multiply, np.add))
    return out


def read_before(a, b):
    """A tile that the next iteration reads before it is made anew."""
    out = nl.ndarray((4, *a.shape), dtype=a.dtype, buffer=nl.shared_hbm)
    kept = nl.zeros(a.shape, nl.float32)
    for i in nl.sequential_range(4):
        nl.store(out[i], nl.add(kept, nl.load(a)))
        kept[...] = nisa.tensor_tensor_scan(nl.load(a), nl.load(b), 0.0, np.multiply, np.add)
    return out


def used_twice(a, b):
    """What is copied out is needed afterwards."""
    out = nl.ndarray((2, *a.shape), dtype=a.dtype, buffer=nl.shared_hbm)
    tile = nisa.tensor_tensor_scan(nl.load(a), nl.load(b), 0.0, np.multiply, np.add)
    nl.store(out[0], tile)
    nl.store(out[1], nisa.tensor_tensor_scan(tile, tile, 0.0, np.multiply, np.add))
    return out


def a_part_of_it(a, b):
    """Only a part of what is made is copied out, over what was there before."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(a))
    tile = nisa.tensor_tensor_scan(nl.load(a), nl.load(b), 0.0, np.multiply, np.add)
    nl.store(out[:, 8:40], tile[:, 16:48])
    return out


def read_between(a, b):
    """The target of a copy is read between the result and the copy."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(a))
    tile = nisa.tensor_tensor_scan(nl.load(a), nl.load(b), 0.0, np.multiply, np.add)
    before = nisa.tensor_tensor_scan(nl.load(out), nl.load(b), 0.0, np.multiply, np.add)
    nl.store(out, tile)
    other = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(other, before)
    return out, other


def turned(a, b):
    """Transposed on the way."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    tile = nl.load_transpose2d(a)
    nl.store(out, nisa.tensor_tensor_scan(tile, nl.load(b), 0.0, np.multiply, np.add))
    return out


def guarded(a, b):
    """A copy that only some iterations make."""
    out = nl.ndarray((4, *a.shape), dtype=a.dtype, buffer=nl.shared_hbm)
    tile = nl.zeros(a.shape, nl.float32)
    for i in nl.sequential_range(4):
        if i >= 2:
            tile[...] = nl.load(a)
        nl.store(out[i], nisa.tensor_tensor_scan(tile, nl.load(b), 0.0, np.multiply, np.add))
    return out


HARD = [changed_between, changed_by_the_loop, read_before, used_twice, a_part_of_it, read_between, turned, guarded]


@pytest.mark.parametrize("fn", HARD, ids=lambda f: f.__name__)
def test_what_is_in_the_way_of_forwarding(fn):
    a, b = normal(64, 64), normal(64, 64, seed=1)
    assert both(traced(fn, a, b), [a, b])


STEP = st.tuples(st.sampled_from(["load", "scan", "store", "out", "max", "keep", "kept", "part"]), st.integers(0, 3), st.integers(0, 2))


@settings(max_examples=60, deadline=None)
@given(st.tuples(st.integers(1, 3), st.lists(STEP, min_size=2, max_size=7), st.lists(STEP, max_size=5)))
def test_random_chains_give_the_same_bits(plan):
    trips, steps, inside = plan

    def kernel(a, b):
        out = nl.ndarray((16, 128), dtype=a.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(a))
        kept = nl.zeros((16, 32), nl.float32)
        t = body(steps, a, b, out, kept, nl.load(a[:, 0:32]), 0)
        for i in nl.sequential_range(trips):
            u = body(inside, a, b, out, kept, nl.copy(t), i)
            nl.store(out[:, nl.ds(i * 32, 32)], u)
        last = nl.ndarray((16, 32), dtype=a.dtype, buffer=nl.shared_hbm)
        nl.store(last, kept)
        return out, last

    def body(steps, a, b, out, kept, t, i):
        for what, place, move in steps:
            at = nl.ds(place * 16 + (move * 16 * i if move < 2 else 0), 32)
            if what == "load":
                t = nl.load((a if move else b)[:, at])
            elif what == "scan":
                t = nisa.tensor_tensor_scan(t, nl.load(b[:, at]), 0.5, np.multiply, np.add)
            elif what == "store":
                nl.store(out[:, at], t)
            elif what == "out":
                t = nl.load(out[:, at])
            elif what == "max":
                t = nisa.tensor_tensor_scan(t, t, nl.max(t, axis=1, keepdims=True), np.add, np.minimum)
            elif what == "keep":
                kept[...] = t
            elif what == "kept":
                t = nl.copy(kept)
            else:
                wide = nl.load(a)
                t = nisa.tensor_tensor_scan(wide[:, at], t, 0.0, np.multiply, np.add)
        return t

    a, b = normal(16, 128), normal(16, 128, seed=1)
    assert both(traced(kernel, a, b), [a, b])


def test_a_tile_of_runtime_indices_is_read():
    """A copy that only an index reads stays."""

    def kernel(x, rows):
        out = nl.ndarray((8, 64), dtype=x.dtype, buffer=nl.shared_hbm)
        index = nl.copy(nl.load(rows))
        nl.store(out, nl.load(x[index, nl.arange(64)[None, :]]))
        return out

    x, rows = normal(32, 64), np.arange(8, dtype=np.int32)[:, None] * 3
    assert both(traced(kernel, x, rows), [x, rows])
