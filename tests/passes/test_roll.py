"""Unrolled sequences become loops again where they are such, and compute the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bind import kernels as k
from tests.execute.agree import both

from opennki.errors import NkiIndexError
from opennki.execute.executor import native
from opennki.interpret.prepared import Prepared
from opennki.ir.nodes import For, Instr, statements
from opennki.passes.roll import rolled

nki, nl, nisa = k.nki, k.nl, k.nisa


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def traced(fn, *arrays):
    return nki.jit(fn, platform_target="trn2").trace(*arrays)


def outline(body):
    """Loops as (trips, what is inside), other statements as names."""
    return [(s.trips, outline(s.body)) if isinstance(s, For) else s.op if isinstance(s, Instr) else "." for s in body]


def instructions(kernel):
    return sum(isinstance(s, Instr) for s in statements(kernel.body))


def flat(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in range(16):
        t = nl.load(x[:, i * 4 : (i + 1) * 4])
        nl.store(out[:, i * 4 : (i + 1) * 4], nl.add(t, 1.5))
    return out


def nested(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for j in range(8):
        for i in range(16):
            t = nl.load(x[j * 4 : (j + 1) * 4, i * 4 : (i + 1) * 4])
            nl.store(out[j * 4 : (j + 1) * 4, i * 4 : (i + 1) * 4], nl.add(t, 1.5))
    return out


def inner_loop(x):
    """A loop that stayed one, in an unrolled one."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for j in range(8):
        total = nl.zeros((4, 4), nl.float32)
        for i in nl.sequential_range(16):
            total[...] = nl.add(nl.load(x[nl.ds(j * 4, 4), nl.ds(i * 4, 4)]), total)
            nl.store(out[nl.ds(j * 4, 4), nl.ds(i * 4, 4)], total)
    return out


def test_a_sequence_is_a_loop_again():
    ir = traced(flat, normal(32, 64))
    assert outline(rolled(ir).body) == [".", (16, [".", ".", "dma_copy", "tensor_scalar", "dma_copy"])]
    ir = traced(nested, normal(32, 64))
    assert instructions(ir) == 8 * 16 * 3 and instructions(rolled(ir)) == 3
    (outer,) = [s for s in rolled(ir).body if isinstance(s, For)]
    assert outer.trips == 8 and any(isinstance(s, For) and s.trips == 16 for s in outer.body)
    ir = traced(inner_loop, normal(32, 64))
    assert instructions(rolled(ir)) == instructions(ir) // 8


@pytest.mark.parametrize("fn", [flat, nested, inner_loop], ids=lambda f: f.__name__)
def test_a_rolled_kernel_computes_the_same(fn):
    x = normal(32, 64)
    assert both(traced(fn, x), [x])


def chained(x):
    """Each statement takes what the one before has made."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    t = nl.load(x)
    for _ in range(40):
        t = nl.add(t, 1.5)
    nl.store(out, t)
    return out


def squares(x):
    """Places that do not step evenly."""
    out = nl.ndarray((x.shape[0], 2048), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in range(16):
        nl.store(out[:, i * i * 8 : i * i * 8 + 4], nl.load(x[:, i * 4 : (i + 1) * 4]))
    return out


def kept(x):
    """Tiles that are used after the sequence."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tiles = [nl.add(nl.load(x[:, i * 4 : (i + 1) * 4]), 1.0) for i in range(16)]
    for i in range(16):
        nl.store(out[:, i * 4 : (i + 1) * 4], tiles[15 - i])
    return out


def constants(x):
    """Numbers that are no indices."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in range(16):
        nl.store(out[:, i * 4 : (i + 1) * 4], nl.multiply(nl.load(x[:, i * 4 : (i + 1) * 4]), float(i)))
    return out


@pytest.mark.parametrize("fn", [chained, squares, kept, constants], ids=lambda f: f.__name__)
def test_what_is_no_sequence_stays(fn):
    ir = traced(fn, normal(32, 64))
    assert instructions(rolled(ir)) == instructions(ir)


def test_a_sequence_with_an_exception_in_the_middle():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        for i in range(64):
            t = nl.load(x[:, i : i + 1])
            nl.store(out[:, i : i + 1], nl.exp(t) if i == 30 else nl.negative(t))
        return out

    x = normal(32, 64)
    ir = traced(kernel, x)
    assert sorted(s.trips for s in statements(rolled(ir).body) if isinstance(s, For)) == [30, 33]
    assert both(ir, [x])


def test_random_numbers_are_not_rolled():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        for i in range(32):
            nl.store(out[:, i : i + 1], nl.rand((32, 1)))
        return out

    x = normal(32, 32)
    ir = traced(kernel, x)
    assert instructions(rolled(ir)) == instructions(ir)
    assert both(ir, [x], seed=3)


def test_an_error_names_the_same_line():
    def kernel(x, index):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        rows = nl.load(index)
        for i in range(40):
            nl.store(out[:, i : i + 1], nl.load(x[rows, i]))
        return out

    x, index = normal(32, 40), np.full((32, 1), 40, np.int32)
    ir = traced(kernel, x, index)
    texts = []
    for way in (None, native):
        with pytest.raises((NkiIndexError, IndexError)) as caught:
            Prepared(ir, "off", native=way).run([x, index], [np.zeros_like(x)])
        texts.append((str(caught.value), str(caught.value.__cause__)))
    assert texts[0] == texts[1]


PART = st.tuples(st.sampled_from(["load", "add", "store", "acc", "out"]), st.integers(0, 8), st.sampled_from([0, 1, 2, 4, -1]))
CASE = st.tuples(st.integers(1, 24), st.integers(1, 3), st.lists(PART, min_size=1, max_size=5), st.integers(0, 30))


@settings(max_examples=50, deadline=None)
@given(CASE)
def test_random_sequences_compute_the_same(case):
    outer, inner, parts, odd = case

    def kernel(x):
        out = nl.ndarray((8, 512), dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        acc = nl.zeros((8, 2), nl.float32)
        number = 0
        for i in range(outer):
            for j in range(inner):
                t = nl.load(x[:, 30 + i : 32 + i])
                for what, base, step in parts:
                    at = slice(100 + base + step * i + 40 * j, 102 + base + step * i + 40 * j)
                    number += 1
                    if what == "load" or number == odd:
                        t = nl.load(x[:, at])
                    elif what == "add":
                        t = nl.add(t, nl.load(x[:, at]))
                    elif what == "store":
                        nl.store(out[:, at], t)
                    elif what == "acc":
                        acc[...] = nl.subtract(t, acc)
                    else:
                        t = nl.load(out[:, at])
        last = nl.ndarray((8, 2), dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(last, acc)
        return out, last

    x = normal(8, 512)
    assert both(traced(kernel, x), [x])
