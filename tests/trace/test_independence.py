"""Independence proofs and intervals against enumeration: what is proven must hold for every value."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from opennki import jit
from opennki.dialects.neuronxcc import isa as nisa
from opennki.dialects.neuronxcc import language as nl
from opennki.ir.affine import Affine, Var, variable
from opennki.ir.nodes import Access, Alloc, Dim
from opennki.trace.independence import disjoint, check

I, J = Var("i", 0, 3), Var("j", 0, 2)


def values(expr):
    return [expr.evaluate({I: i, J: j}) for i, j in product(range(4), range(3))]


@st.composite
def expressions(draw, depth=3):
    if depth == 0 or draw(st.booleans()):
        return variable(draw(st.sampled_from((I, J)))).scale(draw(st.integers(-3, 3))).add(draw(st.integers(-4, 4)))
    a, by = draw(expressions(depth=depth - 1)), draw(st.integers(2, 5))
    kind = draw(st.sampled_from(("sum", "div", "mod")))
    if kind == "sum":
        return a.add(draw(expressions(depth=depth - 1)))
    quotient = a.floordiv(by)
    return quotient if kind == "div" else a.add(quotient.scale(by), -1)


@settings(max_examples=300, deadline=None)
@given(expressions())
def test_an_interval_holds_every_value(expr):
    lo, hi = expr.range({})
    assert lo <= min(values(expr)) and max(values(expr)) <= hi


def test_the_interval_of_a_remainder_is_exact():
    for by in (2, 3, 4):
        i = variable(I)
        rest = i.add(i.floordiv(by).scale(by), -1)
        assert rest.range({}) == (0, min(by - 1, 3))
        assert rest.scale(64).add(5).range({}) == (5, 64 * min(by - 1, 3) + 5)


@st.composite
def accesses(draw, alloc):
    n = draw(st.integers(1, 3))
    dims = []
    for _ in range(2):
        base = Affine(draw(st.integers(0, 3)))
        for var in (I, J):
            base = base.add(variable(var).scale(draw(st.integers(-2, 4))))
        dims.append(Dim(base, (draw(st.integers(0, 3)),)))
    return Access(alloc, "float32", tuple(dims), (n,))


def places(access, i, j):
    return {tuple(d.base.evaluate({I: i, J: j}) + d.strides[0] * k for d in access.dims) for k in range(access.shape[0])}


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_what_is_provendisjoint_isdisjoint(data):
    """For different values of i, whatever j of each, no two of the accesses meet."""
    alloc = Alloc(1, "t", (64, 64), "float32", "shared_hbm")
    group = data.draw(st.lists(accesses(alloc), min_size=1, max_size=3))
    if not disjoint(group, I, {I: 4, J: 3}):
        return
    touched = [set().union(*(places(a, i, j) for a in group for j in range(3))) for i in range(4)]
    for a, b in product(range(4), repeat=2):
        assert a == b or not touched[a] & touched[b]


def findings(fn, *args, grid=None):
    kernel = jit(fn, mode="simulation", platform_target="trn1")
    return check((kernel if grid is None else kernel[grid]).trace(*args))


def test_ordinary_tiling_needs_nothing_at_run_time():
    """Tiled loads and stores, ping-pong slices, strided interleaving: proven, with no step slowed down."""
    def kernel(x):
        out = nl.ndarray((4, 128, 64), np.float32, buffer=nl.shared_hbm)
        tiles = nl.ndarray((128, 4, 64), np.float32, buffer=nl.sbuf)
        mixed = nl.ndarray((128, 4, 64), np.float32, buffer=nl.sbuf)
        lane, free = nl.mgrid[0:128, 0:16]
        for i in nl.affine_range(4):
            tiles[:, i] = nl.load(x[i])
            for j in nl.affine_range(4):
                mixed[lane, i, 4 * free + j] = nl.exp(tiles[lane, i, 4 * free + j])
            nl.store(out[i], mixed[:, i])
        return out
    found = findings(kernel, np.zeros((4, 128, 64), np.float32))
    assert not found.problems and not found.suspects


def test_programs_that_write_their_own_rows_need_nothing_at_run_time():
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        rows = nl.ds(nl.program_id(0) * 128, 128)
        nl.store(out[rows, nl.ds(nl.program_id(1) * 32, 32)], nl.load(x[rows, nl.ds(nl.program_id(1) * 32, 32)]))
        return out
    found = findings(kernel, np.zeros((256, 64), np.float32), grid=(2, 2))
    assert not found.problems and not found.suspects


def test_a_tensor_that_is_also_used_as_bytes_raises_no_false_alarm():
    """Elements written one by one as float32, read and patched as bytes: neither unwritten nor shared."""
    def kernel(x, y):
        out = nl.ndarray((4, 16), nl.uint8, buffer=nl.shared_hbm)
        tile = nl.ndarray((4, 4), nl.float32, buffer=nl.sbuf)
        for j in nl.affine_range(4):
            tile[:, j:j + 1] = nl.load(x[:, j:j + 1])
        tile.view(nl.uint8)[:, 8:9] = nl.load(y)
        nl.store(out[0:3], tile.view(nl.uint8)[0:3])
        nl.store(out[3:4], tile.view(nl.uint8)[3:4])
        return out
    x, y = np.arange(16, dtype=np.float32).reshape(4, 4), np.full((4, 1), 7, np.uint8)
    want = x.copy().view(np.uint8)
    want[:, 8] = 7
    got = jit(kernel, mode="simulation", platform_target="trn1").simulate(x, y, checks="full")
    np.testing.assert_array_equal(got, want)


def test_a_write_that_every_iteration_repeats_is_none_of_several():
    """The same bytes from a tensor that the loop leaves alone; not where the data, its source or another writer differs by iteration."""
    def repeated(x):
        out = nl.ndarray((128, 4), np.float32, buffer=nl.shared_hbm)
        spare = nl.ndarray((128, 4), np.float32, buffer=nl.private_hbm)
        for i in nl.affine_range(4):
            nisa.dma_copy(dst=spare, src=x)
            nl.store(out[:, nl.ds(i, 1)], nl.load(x[:, nl.ds(i, 1)]))
        nl.store(out, nl.load(spare))
        return out

    def other_data(x):
        spare = nl.ndarray((128, 1), np.float32, buffer=nl.shared_hbm)
        for i in nl.affine_range(4):
            nisa.dma_copy(dst=spare, src=x[:, nl.ds(i, 1)])
        return spare

    def own_source(x):
        spare = nl.ndarray((128, 1), np.float32, buffer=nl.shared_hbm)
        for i in nl.affine_range(4):
            nl.store(spare, nl.load(x[:, nl.ds(i, 1)]) * 2.0)
        return spare

    def changing_source(x):
        out = nl.ndarray((128, 4), np.float32, buffer=nl.shared_hbm)
        spare = nl.zeros((128, 4), np.float32, buffer=nl.sbuf)
        for i in nl.affine_range(4):
            nl.store(out, spare)
            spare[:, nl.ds(i, 1)] = nl.load(x[:, nl.ds(i, 1)])
        return out

    def two_writers(x):
        out = nl.ndarray((128, 4), np.float32, buffer=nl.shared_hbm)
        for i in nl.affine_range(4):
            nisa.dma_copy(dst=out, src=x)
            nisa.dma_copy(dst=out[:, nl.ds(i, 1)], src=x[:, nl.ds(0, 1)])
        return out

    def random(x):
        out = nl.ndarray((128, 4), np.float32, buffer=nl.sbuf)
        for i in nl.affine_range(4):
            out[...] = nl.rand((128, 4))
        total = nl.ndarray((128, 4), np.float32, buffer=nl.shared_hbm)
        nl.store(total, out)
        return total

    def registers(x):
        out = nl.ndarray((128, 4), np.float32, buffer=nl.shared_hbm)
        tile, running = nl.load(x), nl.ndarray((128, 4), np.float32, buffer=nl.sbuf)
        for _ in nl.affine_range(4):
            nisa.tensor_scalar_cumulative(src=tile, dst=running, op0=np.add, op1=np.add, imm0=0.0, reduce_cmd=nisa.reduce_cmd.reduce)
        nl.store(out, running)
        return out

    x = np.random.default_rng(0).standard_normal((128, 4)).astype(np.float32)
    assert not findings(repeated, x).problems
    np.testing.assert_array_equal(jit(repeated, mode="simulation", platform_target="trn1").simulate(x, checks="full"), x)
    for wrong in (other_data, own_source, changing_source, two_writers, random, registers):
        assert any("err_unexpected_output_dependencies" in str(e) for _, e in findings(wrong, x).problems), wrong.__name__
