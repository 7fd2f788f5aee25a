"""A prepared kernel on the caller's buffers: the values of a simulation, without copies, from several threads."""
import io
import threading
import warnings
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import neuronxcc.nki.typing as nt
from opennki.errors import NkiError, NkiReadError, NkiValueError, NkiWarning
from opennki.interpret import blas, prepared
from opennki.interpret.blas import one_thread
from opennki.interpret.prepared import Prepared
from opennki.interpret.simulate import Checks, simulate
from opennki.ir.nodes import whole
from opennki.isa import dtypes
from opennki.trace.kernel import trace_kernel
from opennki.lang.emit import call

rng = np.random.default_rng(7)


def normal(*shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def traced(kernel, *args, grid=None):
    jitted = nki.jit(kernel, mode="simulation", platform_target="trn2")
    jitted = jitted if grid is None else jitted[grid]
    return trace_kernel(jitted.func, args, {}, jitted.options())


def buffers(plan):
    """Output buffers that hold garbage."""
    out = []
    for place in (*plan.kernel.outputs, *plan.extra):
        array = np.empty(place.shape, dtypes.storage(place.dtype))
        array.reshape(-1).view(np.uint8)[...] = 0x5A
        out.append(array)
    return out


def stored(arrays, ir):
    return [prepared.stored(a, p.dtype).reshape(p.shape) for a, p in zip(arrays, ir.params, strict=True)]


def add_new(x, y):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.add(nl.load(x), nl.load(y)))
    return out


def in_place(x: nt.mutable_tensor):
    nl.store(x, nl.multiply(nl.load(x), 2.0))
    return x


def both(x: nt.mutable_tensor, y):
    out = nl.ndarray(y.shape, dtype=y.dtype, buffer=nl.shared_hbm)
    t = nl.add(nl.load(x), nl.load(y))
    nl.store(x, t)
    nl.store(out, nl.multiply(t, 3.0))
    return x, out


def view_returned(x):
    out = nl.ndarray((2, *x.shape), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(2):
        nl.store(out[i], nl.multiply(nl.load(x), i + 1.0))
    return out[1]


def part_of_a_tensor(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out[:, 1:], nl.load(x[:, 1:]))
    return out


def input_returned(x, y):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.add(nl.load(x), nl.load(y)))
    return out, y


def over_a_grid(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    i = nl.program_id(0)
    t = nl.load(x[:, nl.ds(i * 4, 4)])
    nl.store(out[:, nl.ds(i * 4, 4)], nl.multiply(t, i + 1.0))
    return out


def product(x, y):
    out = nl.ndarray((x.shape[1], y.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    acc = nl.zeros((x.shape[1], y.shape[1]), dtype=nl.float32, buffer=nl.psum)
    a, b = nl.load(x), nl.load(y)
    for _ in nl.affine_range(3):
        acc += nisa.nc_matmul(a, b)
    nl.store(out, nl.copy(acc))
    return out


def is_positive(x):
    out = nl.ndarray(x.shape, dtype=nl.bool_, buffer=nl.shared_hbm)
    nl.store(out, nl.greater(nl.load(x), 0.0, dtype=nl.bool_))
    return out


def counted(n):
    """A do-while loop: doubles until 100."""
    out = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.shared_hbm)
    t = nl.load(n)
    cond = nt.scalar(True)
    while cond:
        t[...] = nl.add(t, t)
        cond = nt.scalar(nl.less(t, 100, dtype=nl.uint8))
    nl.store(out, t)
    return out


def scratch_in_hbm(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    between = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(between, nl.add(nl.load(x), 1.0))
    nl.store(out, nl.multiply(nl.load(between), 2.0))
    return out


def drawn(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.add(nl.load(x), nl.rand(x.shape)))
    return out


def meeting(x):
    """Programs that wait for each other: each reads what the other one stored."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    between = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    i = nl.program_id(0)
    nl.store(between[:, nl.ds(i * 4, 4)], nl.add(nl.load(x[:, nl.ds(i * 4, 4)]), 1.0))
    call("barrier", (), {})
    nl.store(out[:, nl.ds(i * 4, 4)], nl.load(between[:, nl.ds(4 - i * 4, 4)]))
    return out


E4M3, BF16 = ml_dtypes.float8_e4m3, ml_dtypes.bfloat16
CASES = {
    "new": (add_new, [normal(128, 16), normal(128, 16)]),
    "bf16": (add_new, [normal(64, 8, dtype=BF16), normal(64, 8, dtype=BF16)]),
    "fp8": (add_new, [normal(64, 8, dtype=E4M3), normal(64, 8, dtype=E4M3)]),
    "int8": (add_new, [rng.integers(-100, 100, (64, 8), np.int8), rng.integers(-100, 100, (64, 8), np.int8)]),
    "bool_in": (add_new, [rng.random((16, 8)) > 0.5, rng.random((16, 8)) > 0.5]),
    "bool_out": (is_positive, [normal(16, 8)]),
    "in_place": (in_place, [normal(128, 8)]),
    "both": (both, [normal(16, 8), normal(16, 8)]),
    "view_returned": (view_returned, [normal(16, 8)]),
    "input_returned": (input_returned, [normal(16, 8), normal(16, 8)]),
    "product": (product, [normal(128, 32), normal(128, 48)]),
    "scratch": (scratch_in_hbm, [normal(16, 8)]),
    "drawn": (drawn, [normal(16, 8)]),
    "do_while": (counted, [np.full((1, 1), 3, np.int32)]),
}


@pytest.mark.parametrize("level", ["off", "fast", "full"])
@pytest.mark.parametrize("case", CASES)
def test_the_values_of_a_simulation(case, level):
    kernel, arrays = CASES[case]
    ir, given = traced(kernel, *arrays)
    expected, news = simulate(ir, given, Checks.of(level), seed=3)
    plan = Prepared(ir, level)
    inputs = stored(given, ir)
    before = [a.tobytes() for a in inputs]
    for array in inputs:
        array.flags.writeable = False
    for _ in range(3):  # the memory of the first call serves the others
        outputs = buffers(plan)
        plan.run(inputs, outputs, seed=3)
        for got, wanted in zip(outputs, expected, strict=False):
            assert got.astype(wanted.dtype).tobytes() == wanted.tobytes()
        for alloc, wanted in zip(ir.written_params, news, strict=True):
            assert outputs[plan.homes[alloc]].tobytes() == wanted.tobytes()
    assert [a.tobytes() for a in inputs] == before


@pytest.mark.parametrize("order", ["program", "reversed", "shuffle:3"])
@pytest.mark.parametrize("kernel", [over_a_grid, meeting])
def test_programs_of_a_grid(kernel, order):
    x = normal(16, 8)
    ir, given = traced(kernel, x, grid=(2,))
    plan = Prepared(ir, "full")
    expected = simulate(ir, given, Checks.of("full"))[0][0]
    done = []
    for _ in range(2):
        out, = buffers(plan)
        plan.run([x], [out], order=order, progress=lambda *at: done.append(at))
        np.testing.assert_array_equal(out, expected)
    assert done == [(1, 2), (2, 2)] * 2


def test_no_copy_of_an_input_or_of_a_whole_output(monkeypatch):
    """What a program stores to and loads from is the memory of the caller."""
    ir, _ = traced(add_new, normal(16, 8), normal(16, 8))
    plan = Prepared(ir)
    seen = []
    run = prepared.Instance.run
    monkeypatch.setattr(prepared.Instance, "run", lambda machine: (seen.append(list(machine.buffers)), run(machine))[1])
    x, y = normal(16, 8), normal(16, 8)
    out, = buffers(plan)
    plan.run([x, y], [out])
    for array in (x, y, out):
        assert sum(np.shares_memory(array, held) for held in seen[0] if held is not None) == 1


def test_a_call_keeps_nothing_of_the_callers_memory():
    ir, _ = traced(add_new, normal(16, 8), normal(16, 8))
    plan = Prepared(ir)
    x, y = normal(16, 8), normal(16, 8)
    out, = buffers(plan)
    plan.run([x, y], [out])
    kept = [held for machine in plan._idle for held in (*machine.buffers, *machine.views) if held is not None]
    assert kept and not any(np.shares_memory(array, held) for array in (x, y, out) for held in kept)


def test_a_written_parameter_in_its_own_memory():
    x, y = normal(16, 8), normal(16, 8)
    ir, _ = traced(both, x, y)
    plan = Prepared(ir)
    start = x.copy()
    out = np.empty_like(y)
    plan.run([x, y], [x, out])
    np.testing.assert_array_equal(x, start + y)
    np.testing.assert_array_equal(out, (start + y) * 3)


def test_a_written_parameter_that_is_not_returned_has_a_buffer_after_the_outputs():
    def kernel(x: nt.mutable_tensor):
        nl.store(x, nl.multiply(nl.load(x), 2.0))
    x = normal(16, 8)
    jitted = nki.trace(kernel)
    ir, _ = trace_kernel(jitted.func, (x,), {}, jitted.options())
    plan = Prepared(ir)
    assert not ir.outputs and plan.extra == ir.params
    new = np.empty_like(x)
    plan.run([x], [new])
    np.testing.assert_array_equal(new, x * 2)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("kernel", [add_new, both])
def test_one_tensor_returned_twice(kernel, apart):
    x, y = normal(16, 8), normal(16, 8)
    ir, _ = traced(kernel, x, y)
    once = Prepared(ir)
    single = buffers(once)
    once.run([x, y], single)
    twice = replace(ir, outputs=[*ir.outputs, whole(ir.outputs[0].alloc)])
    plan = Prepared(twice)
    outputs = buffers(plan)
    if not apart:
        outputs[-1] = outputs[0]
    plan.run([x, y], outputs)
    for got, wanted in zip(outputs, [*single, single[0]], strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_bool_buffers():
    x = normal(16, 8)
    ir, _ = traced(is_positive, x)
    out = np.empty((16, 8), np.bool_)
    Prepared(ir).run([x], [out])
    np.testing.assert_array_equal(out, x > 0)


def test_scalars_and_empty_arrays():
    """A 0-d input and an empty one that the kernel does not load, and an empty output."""
    def kernel(x, zero, none):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.add(nl.load(x), 1.0))
        return out, zero, none
    x, zero, none = normal(4, 4), np.array(2.5, np.float32), np.zeros((0, 4), np.float32)
    ir, given = traced(kernel, x, zero, none)
    plan = Prepared(ir, "full")
    outputs = buffers(plan)
    plan.run([x, zero, none], outputs)
    assert [o.shape for o in outputs] == [(4, 4), (), (0, 4)]
    np.testing.assert_array_equal(outputs[0], x + 1)
    assert outputs[1] == np.float32(2.5)
    simulated = simulate(ir, given, Checks.of("full"))[0]
    assert [(o.shape, o.tobytes()) for o in simulated] == [(o.shape, o.tobytes()) for o in outputs]


def test_threads():
    x, y = normal(128, 16), normal(128, 16)
    sum_ = Prepared(traced(add_new, x, y)[0])
    matmul = Prepared(traced(product, x, y)[0])
    wrong = []

    def work(number):
        a = x + number
        expected = None
        for turn in range(200):
            out = np.empty_like(x)
            sum_.run([a, y], [out])
            if not np.array_equal(out, a + y):
                wrong.append((number, turn))
            square = np.empty((16, 16), np.float32)
            matmul.run([a, y], [square])
            expected = square if expected is None else expected
            if not np.array_equal(square, expected):
                wrong.append((number, turn, "product"))
        np.testing.assert_allclose(expected, 3 * (a.T.astype(np.float64) @ y), rtol=1e-3, atol=1e-2)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert len(sum_._idle) <= 8


def gathered(x, index):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    i = nl.load(index)
    nl.store(out, nl.load(x[i[:, 0], nl.arange(x.shape[1])[None, :]]))
    return out


def test_the_call_after_an_error_is_right():
    x = normal(8, 4)
    good, bad = np.arange(8, dtype=np.int32)[::-1].reshape(8, 1).copy(), np.full((8, 1), 99, np.int32)
    plan = Prepared(traced(gathered, x, good)[0])
    for _ in range(3):
        with pytest.raises(IndexError):
            plan.run([x, bad], buffers(plan))
        out, = buffers(plan)
        plan.run([x, good], [out])
        np.testing.assert_array_equal(out, x[::-1])


def unset(x, n):
    """Reads the part of a tile beyond n, which was not written."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    t = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    t[:, 0:n] = nl.load(x[:, 0:n])
    nl.store(out, nl.copy(t))
    return out


def test_no_value_of_an_earlier_call_is_left_where_nothing_was_written():
    x = normal(8, 8)
    ir, _ = traced(unset, x, 4)
    plan = Prepared(ir, "fast")
    for _ in range(2):
        out, = buffers(plan)
        plan.run([x], [out])
        np.testing.assert_array_equal(out[:, :4], x[:, :4])
        assert np.isnan(out[:, 4:]).all()
    full = Prepared(ir, "full")
    for _ in range(2):
        with pytest.raises(NkiReadError):
            full.run([x], buffers(full))


def test_a_program_sees_nothing_of_the_one_before_it():
    def kernel(x):
        out = nl.ndarray((2, *x.shape), dtype=x.dtype, buffer=nl.shared_hbm)
        i = nl.program_id(0)
        t = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
        t[:, nl.ds(i * 4, 4)] = nl.load(x[:, nl.ds(i * 4, 4)])
        nl.store(out[i], nl.copy(t))
        return out
    x = normal(8, 8)
    plan = Prepared(traced(kernel, x, grid=(2,))[0], "fast")
    for order in ("program", "reversed"):
        out, = buffers(plan)
        plan.run([x], [out], order=order)
        expected = np.full((2, 8, 8), np.nan, np.float32)
        expected[0, :, :4], expected[1, :, 4:] = x[:, :4], x[:, 4:]
        np.testing.assert_array_equal(out, expected)


def test_unwritten_elements_of_an_output_have_no_value_and_are_reported():
    x = normal(8, 8)
    ir, _ = traced(part_of_a_tensor, x)
    plan = Prepared(ir, "full")
    for _ in range(2):
        out, = buffers(plan)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            plan.run([x], [out])
        assert len(seen) == 1 and issubclass(seen[0].category, NkiWarning) and "8 of 64 elements" in str(seen[0].message)
        assert np.isnan(out[:, 0]).all()
        np.testing.assert_array_equal(out[:, 1:], x[:, 1:])


def test_device_print_goes_where_the_call_says():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        t = nl.load(x)
        nl.device_print("tile", t)
        nl.store(out, t)
        return out
    x = np.full((1, 2), 7, np.float32)
    plan = Prepared(traced(kernel, x)[0])
    text = io.StringIO()
    plan.run([x], buffers(plan), out=text)
    assert text.getvalue() == "tile [[7. 7.]]\n"


def test_a_buffer_that_does_not_fit_is_refused():
    x, y = normal(16, 8), normal(16, 8)
    plan = Prepared(traced(add_new, x, y)[0])
    out, = buffers(plan)
    read_only = np.empty_like(x)
    read_only.flags.writeable = False
    for inputs, outputs in (([x], [out]), ([x, y], []), ([x, y[:, :4]], [out]), ([x, normal(8, 16).T], [out]), ([x, y], [read_only]),
                            ([x, y], [np.empty((8, 16), np.float32).T]), ([x, y], [np.empty((16, 4), np.float32)])):
        with pytest.raises(NkiValueError):
            plan.run(inputs, outputs)
    with pytest.raises(NkiError):
        plan.run([x, y], [out], order="backwards")
    plan.run([x, y], [out])
    np.testing.assert_array_equal(out, x + y)


def test_little_memory_is_kept():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        big = nl.zeros((40, nl.par_dim(128), 4096), dtype=nl.float32)
        for i in nl.affine_range(40):
            big[i, :, 0:8] = nl.load(x)
        nl.store(out, big[39, :, 0:8])
        return out
    x = normal(128, 8)
    plan = Prepared(traced(kernel, x)[0])
    assert plan.tape.own_bytes > prepared.KEPT
    out, = buffers(plan)
    plan.run([x], [out])
    np.testing.assert_array_equal(out, x)
    assert not plan._idle


def test_blas_threads_come_back_when_the_last_of_overlapping_blocks_ends():
    from threadpoolctl import threadpool_info

    with one_thread():  # the libraries are found at the first use: another one, loaded later (SciPy's), multiplies no tiles
        tiles = {lib.filepath for lib in blas._libraries()}

    def counts():
        return {lib["num_threads"] for lib in threadpool_info() if lib["filepath"] in tiles}

    with threadpool_limits(2, "blas"):
        before = counts()
        first, second = one_thread(), one_thread()
        first.__enter__()
        second.__enter__()
        assert counts() == {1}
        first.__exit__(None, None, None)
        assert counts() == {1}
        second.__exit__(None, None, None)
        assert counts() == before
