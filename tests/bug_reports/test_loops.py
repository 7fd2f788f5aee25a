"""Reports on loops: dependencies between iterations, accumulation, buffers inside and outside, runtime loops."""

from __future__ import annotations

import inspect
import warnings

import numpy as np
import pytest
from tests.lang.harness import instructions, run, sample

from opennki import jit
from opennki.dialects.neuronxcc import language as nl
from opennki.dialects.neuronxcc import typing as nt
from opennki.errors import NkiError, NkiWarning
from opennki.ir.nodes import Instr, statements


def line_of(fn, text):
    """Number of the first line of a function that contains a text."""
    lines, first = inspect.getsourcelines(fn)
    return first + next(i for i, line in enumerate(lines) if text in line)


def warned(fn, *args, **options):
    """(result, warnings about rules) of a run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(fn, *args, **options)
    return result, [w for w in caught if issubclass(w.category, NkiWarning)]


def refused(fn, *args, **options):
    """The error of a run."""
    with pytest.raises(NkiError) as caught:
        run(fn, *args, **options)
    return caught.value


# ---- BR001, BR038: accumulation in SBUF -----------------------------------------------------------------------------
def bias_in_affine(x):
    out = nl.ndarray((128, 64), np.float32, buffer=nl.shared_hbm)
    total = nl.zeros((128, 64), np.float32, buffer=nl.sbuf)
    for step in nl.affine_range(4):
        total += nl.load(x[step])  # accumulate
    nl.store(out, total)
    return out


def bias_in_sequential(x):
    out = nl.ndarray((128, 64), np.float32, buffer=nl.shared_hbm)
    total = nl.zeros((128, 64), np.float32, buffer=nl.sbuf)
    for step in nl.sequential_range(4):
        total += nl.load(x[step])
    nl.store(out, total)
    return out


def bias_in_static(x):
    out = nl.ndarray((128, 64), np.float32, buffer=nl.shared_hbm)
    total = nl.zeros((128, 64), np.float32, buffer=nl.sbuf)
    for step in nl.static_range(4):
        total += nl.load(x[step])
    nl.store(out, total)
    return out


def test_BR001_accumulation_outside_psum_matmul_is_warned_about():
    """+= on SBUF with a destination that does not depend on the affine loop: a warning with the loop, the line and the remedy."""
    x = sample((4, 128, 64))
    got, found = warned(bias_in_affine, x)
    np.testing.assert_array_equal(got, x[0] + x[1] + x[2] + x[3])
    (warning,) = found
    text = str(warning.message)
    assert warning.filename == __file__ and warning.lineno == line_of(bias_in_affine, "# accumulate")
    for part in (f"test_loops.py:{warning.lineno}", "step", "total += nl.load(x[step])", "sequential_range"):
        assert part in text, text


def test_BR001_accumulation_of_matmuls_in_psum_is_silent():
    """The same on PSUM with matmuls is how accumulation is meant: no warning."""
    def kernel(x, y):
        out = nl.ndarray((64, 32), np.float32, buffer=nl.shared_hbm)
        acc = nl.zeros((64, 32), np.float32, buffer=nl.psum)
        for k in nl.affine_range(4):
            acc += nl.matmul(nl.load(x[k]), nl.load(y[k]), transpose_x=True)
        nl.store(out, acc)
        return out
    x, y = sample((4, 128, 64), seed=1), sample((4, 128, 32), seed=2)
    got, found = warned(kernel, x, y)
    assert not found
    np.testing.assert_allclose(got, np.einsum("kpm,kpn->mn", x.astype(np.float64), y), rtol=1e-4, atol=1e-3)


def test_BR001_a_destination_without_the_loop_index_is_an_error():
    """Loads whose destination lacks the enclosing loop index: err_unexpected_output_dependencies with loop, line and remedy."""
    def kernel(x):
        out = nl.ndarray((4, 128, 64), np.float32, buffer=nl.shared_hbm)
        tiles = nl.ndarray((128, 4, 64), np.float32, buffer=nl.sbuf)
        for tap in nl.affine_range(4):
            tiles[:, 0] = nl.load(x[tap])  # no index
        for tap in nl.affine_range(4):
            nl.store(out[tap], tiles[:, 0])
        return out
    error = refused(kernel, sample((4, 128, 64)))
    assert error.code == "err_unexpected_output_dependencies"
    text = str(error)
    for part in (f"test_loops.py:{line_of(kernel, '# no index')}", "affine loop tap", "tiles[:, 0] = nl.load(x[tap])", "sequential_range"):
        assert part in text, text


def test_BR038_sbuf_accumulation_in_affine_sequential_and_static_range():
    """affine_range breaks, static_range works: one result in all loops; affine_range says so, and is an error on request."""
    x = sample((4, 128, 64))
    affine, about = warned(bias_in_affine, x)
    for fn in (bias_in_sequential, bias_in_static):
        got, found = warned(fn, x)
        assert not found, [str(w.message) for w in found]
        np.testing.assert_array_equal(got, affine)
    assert len(about) == 1
    error = refused_with(bias_in_affine, x, {"carried": "error"})
    assert error.code == "err_unexpected_output_dependencies"
    text = str(error)
    assert f"test_loops.py:{line_of(bias_in_affine, '# accumulate')}" in text and "sequential_range" in text and "step" in text
    _, silent = warned_with(bias_in_affine, x, {"carried": "off"})
    assert not silent


def refused_with(fn, x, checks):
    """The error of a run with some checks set."""
    with pytest.raises(NkiError) as caught:
        jit(fn, mode="simulation", platform_target="trn1").simulate(x, checks=checks)
    return caught.value


def warned_with(fn, x, checks):
    """(result, warnings) of a run with some checks set."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = jit(fn, mode="simulation", platform_target="trn1").simulate(x, checks=checks)
    return result, [w for w in caught if issubclass(w.category, NkiWarning)]


# ---- BR039: plain accumulation --------------------------------------------------------------------------------------
def plain_accumulation(x, y):
    out = nl.ndarray((64, 32), np.float32, buffer=nl.shared_hbm)
    r = nl.zeros((64, 32), np.float32, buffer=nl.sbuf)
    for i in nl.affine_range(2):
        for j in nl.affine_range(3):
            product = nl.matmul(nl.load(x[i]), nl.load(y[j]), transpose_x=True)
            r[...] = r + nl.copy(product)  # plain
    nl.store(out, r)
    return out


def test_BR039_plain_accumulation_names_loops_line_and_fix():
    """Plain accumulation flagged with jargon: the message names both loops with their lines, the statement and the fix."""
    x, y = sample((2, 128, 64), seed=1), sample((3, 128, 32), seed=2)
    got, found = warned(plain_accumulation, x, y)
    want = np.einsum("ipm,jpn->mn", x.astype(np.float64), y.astype(np.float64))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
    (warning,) = found
    text = str(warning.message)
    first, second = line_of(plain_accumulation, "for i in"), line_of(plain_accumulation, "for j in")
    for part in (f"i (line {first})", f"j (line {second})", f"test_loops.py:{line_of(plain_accumulation, '# plain')}",
                 "r[...] = r + nl.copy(product)", "sequential_range"):
        assert part in text, text
    assert "dst indices" not in text


def test_BR039_an_update_that_depends_on_order_is_an_error():
    """An update that is no accumulation (its result depends on the order of the iterations) is refused, not warned about."""
    def kernel(x):
        out = nl.ndarray((128, 64), np.float32, buffer=nl.shared_hbm)
        state = nl.zeros((128, 64), np.float32, buffer=nl.sbuf)
        for t in nl.affine_range(4):
            state[...] = nl.load(x[t]) - state  # recurrence
        nl.store(out, state)
        return out

    def in_order(x):
        out = nl.ndarray((128, 64), np.float32, buffer=nl.shared_hbm)
        state = nl.zeros((128, 64), np.float32, buffer=nl.sbuf)
        for t in nl.sequential_range(4):
            state[...] = nl.load(x[t]) - state
        nl.store(out, state)
        return out
    x = sample((4, 128, 64))
    error = refused(kernel, x)
    assert error.code == "err_unexpected_output_dependencies" and "affine loop t" in str(error)
    assert error.loc.line == line_of(kernel, "# recurrence")
    np.testing.assert_array_equal(run(in_order, x), x[3] - (x[2] - (x[1] - (x[0] - np.float32(0)))))


# ---- BR021, BR041: order across the border of a loop ----------------------------------------------------------------
def test_BR021_program_order_across_a_runtime_loop():
    """A dynamic loop body raced with earlier accesses: write, loop (read, write), read keep program order."""
    def kernel(x, limit):
        out = nl.ndarray((128, 8), np.float32, buffer=nl.shared_hbm)
        tile = nl.ndarray((128, 8), np.float32, buffer=nl.sbuf)
        count = nl.ndarray((1, 1), np.int32, buffer=nl.sbuf)
        top = nl.load(limit)
        tile[...] = nl.load(x)
        count[...] = 0
        again = nt.scalar(True)
        while again:
            tile[...] = tile * 2.0 + 1.0
            count[...] = count + 1
            again = nt.scalar(nl.less(count, top))
        tile[...] = tile - 3.0
        nl.store(out, tile)
        return out
    x = sample((128, 8))
    for trips in (1, 2, 5):
        want = x.copy()
        for _ in range(trips):
            want = want * np.float32(2) + np.float32(1)
        np.testing.assert_array_equal(run(kernel, x, np.array([[trips]], np.int32)), want - np.float32(3))


@pytest.mark.parametrize("trips", [0, 1, 7])
@pytest.mark.parametrize("kind", ["sequential_range", "static_range", "range"])
def test_BR041_int8_scaled_in_a_loop(trips, kind):
    """Runtime loops do not compile: int8 * 0.99 in a loop of 0, 1 and 7 iterations rounds to even after each one."""
    loop = range if kind == "range" else getattr(nl, kind)

    def kernel(x):
        out = nl.ndarray(x.shape, nl.int8, buffer=nl.shared_hbm)
        tile = nl.load(x)
        for _ in loop(trips):
            tile[...] = nl.multiply(tile, 0.99, dtype=nl.int8)
        nl.store(out, tile)
        return out
    x = np.arange(-128, 128, dtype=np.int8).reshape(1, 256).repeat(2, 0)
    want = x.copy()
    for _ in range(trips):
        want = np.clip(np.rint(want.astype(np.float32) * np.float32(0.99)), -128, 127).astype(np.int8)
    np.testing.assert_array_equal(run(kernel, x), want)


# ---- BR043: buffers inside and outside ------------------------------------------------------------------------------
def declared_inside(x, w):
    out = nl.ndarray((x.shape[0], 128, 64), x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0]):
        tile = nl.ndarray((128, 64), x.dtype, buffer=nl.sbuf)
        tile[...] = nl.load(x[i])
        tile[...] = nl.exp(tile) * 0.5
        nl.store(out[i], tile)
    return out


def declared_outside(x, w):
    out = nl.ndarray((x.shape[0], 128, 64), x.dtype, buffer=nl.shared_hbm)
    tiles = nl.ndarray((x.shape[0], nl.par_dim(128), 64), x.dtype, buffer=nl.sbuf)
    for i in nl.affine_range(x.shape[0]):
        tiles[i] = nl.load(x[i])
        tiles[i] = nl.exp(tiles[i]) * 0.5
        nl.store(out[i], tiles[i])
    return out


def pipelined(x, w):
    """Prologue, loop and epilogue over two buffers declared outside."""
    count = x.shape[0]
    out = nl.ndarray((count, 128, 64), x.dtype, buffer=nl.shared_hbm)
    stages = nl.ndarray((128, 2, 64), x.dtype, buffer=nl.sbuf)
    stages[:, 0] = nl.load(x[0])
    for i in nl.sequential_range(count - 1):
        stages[:, 1] = nl.load(x[i + 1])
        nl.store(out[i], nl.exp(stages[:, 0]) * 0.5)
        stages[:, 0] = nl.copy(stages[:, 1])
    nl.store(out[count - 1], nl.exp(stages[:, 0]) * 0.5)
    return out


def test_BR043_where_a_buffer_is_declared_does_not_change_the_meaning():
    """Buffers declared outside loops: same output, and neither costs more to trace."""
    x = sample((6, 128, 64))
    want = run(declared_inside, x, x)
    for fn in (declared_outside, pipelined):
        np.testing.assert_array_equal(run(fn, x, x), want)
    np.testing.assert_allclose(want, np.exp(x.astype(np.float64)) * 0.5, rtol=1e-5)


def test_BR043_the_trace_does_not_grow_with_the_trip_count():
    """Linear trace time: the IR of both forms has the same number of nodes at 4 and at 4096 iterations."""
    sizes = {}
    for fn in (declared_inside, declared_outside, pipelined):
        counts = set()
        for n in (4, 4096):
            kernel = jit(fn, mode="simulation", platform_target="trn1").trace(np.broadcast_to(np.float32(0), (n, 128, 64)),
                                                                           np.zeros((1, 1), np.float32))
            counts.add(sum(1 for _ in statements(kernel.body)))
        assert len(counts) == 1, (fn.__name__, counts)
        sizes[fn.__name__] = counts.pop()
    assert sizes["declared_outside"] <= 2 * sizes["declared_inside"]


def test_BR071_a_huge_tiled_kernel_traces_in_proportion_to_its_text():
    """Huge unrolled kernels take very long: 256 x 32 tiles with 8 outputs are one body, traced once."""
    def einsum(x, w):
        rows, depth, outs = x.shape[0], x.shape[1], w.shape[0]
        out = nl.ndarray((outs, rows, 128, 64), np.float32, buffer=nl.shared_hbm)
        for o in nl.affine_range(outs):
            for r in nl.affine_range(rows):
                acc = nl.zeros((128, 64), np.float32, buffer=nl.psum)
                for k in nl.affine_range(depth):
                    acc += nl.matmul(nl.load(x[r, k]), nl.load(w[o, k]), transpose_x=True)
                nl.store(out[o, r], nl.copy(acc))
        return out
    x = np.broadcast_to(np.float32(0), (256, 32, 128, 128))
    w = np.broadcast_to(np.float32(0), (8, 32, 128, 64))
    kernel = jit(einsum, mode="simulation", platform_target="trn1").trace(x, w)
    assert sum(isinstance(s, Instr) for s in statements(kernel.body)) < 12


# ---- BR045: double buffering ----------------------------------------------------------------------------------------
def test_BR045_double_buffered_matmul_equals_the_simple_one():
    """Races only show under injected delays: a legal double-buffered matmul gives the bits of the simple one."""
    def simple(x, w):
        out = nl.ndarray((4, 64, 96), np.float32, buffer=nl.shared_hbm)
        weights = nl.load(w)
        for i in nl.affine_range(4):
            nl.store(out[i], nl.matmul(nl.load(x[i]), weights, transpose_x=True))
        return out

    def double(x, w):
        out = nl.ndarray((4, 64, 96), np.float32, buffer=nl.shared_hbm)
        weights = nl.load(w)
        slots = nl.ndarray((128, 2, 64), np.float32, buffer=nl.sbuf)
        slots[:, 0] = nl.load(x[0])
        for i in nl.static_range(4):
            if i < 3:
                slots[:, (i + 1) % 2] = nl.load(x[i + 1])
            nl.store(out[i], nl.matmul(slots[:, i % 2], weights, transpose_x=True))
        return out
    x, w = sample((4, 128, 64), seed=8), sample((128, 96), seed=9)
    np.testing.assert_array_equal(run(double, x, w), run(simple, x, w))


def test_BR045_two_slots_in_an_affine_loop_are_a_race():
    """A ring of two buffers indexed by i % 2 in an affine_range: iterations 0 and 2 share a slot, which is reported."""
    def ring(x):
        out = nl.ndarray((4, 128, 64), np.float32, buffer=nl.shared_hbm)
        slots = nl.ndarray((128, 2, 64), np.float32, buffer=nl.sbuf)
        for i in nl.affine_range(4):
            slots[:, i % 2] = nl.load(x[i])
            nl.store(out[i], slots[:, i % 2])
        return out
    error = refused(ring, sample((4, 128, 64)))
    assert error.code == "err_unexpected_output_dependencies" and "affine loop i" in str(error)


def test_BR045_reading_what_another_iteration_writes_is_a_race():
    """t[i + 1] = t[i] in an affine_range: each iteration writes its own place but reads that of the one before."""
    def shift(x):
        out = nl.ndarray((128, 5, 16), np.float32, buffer=nl.shared_hbm)
        t = nl.zeros((128, 5, 16), np.float32, buffer=nl.sbuf)
        t[:, 0] = nl.load(x)
        for i in nl.affine_range(4):
            t[:, i + 1] = t[:, i] * 2.0  # carried
        nl.store(out, t)
        return out
    text = ""
    try:
        _, found = warned(shift, sample((128, 16)))
        text = "\n".join(str(w.message) for w in found)
    except NkiError as error:
        text = str(error)
    assert "loop i" in text and f"test_loops.py:{line_of(shift, '# carried')}" in text and "sequential_range" in text


def test_eager_and_traced_agree_on_the_reported_kernels():
    """The loop kernels of these reports give the same bits statement by statement."""
    x = sample((4, 128, 64))
    for fn, args in ((bias_in_sequential, (x,)), (declared_outside, (x, x)), (pipelined, (x, x))):
        np.testing.assert_array_equal(run(fn, *args, eager=True), run(fn, *args))


def test_the_trace_of_an_accumulation_is_one_instruction():
    """The plain and the in-place form of an accumulation are the same instruction."""
    names = [i.op for i in instructions(plain_accumulation, sample((2, 128, 64)), sample((3, 128, 32)))]
    assert names.count("tensor_tensor") == 1
