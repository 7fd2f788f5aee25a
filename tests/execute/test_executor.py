"""The native executor as a whole: what it covers, fuses and runs in parallel, its errors, and what stays with the interpreter."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest
from tests.bind import kernels as k
from tests.execute.agree import both

from opennki.errors import NkiIndexError
from opennki.execute import build
from opennki.interpret import pointers
from opennki.execute.executor import coverage, executor_of, native, profiled
from opennki.interpret.checks import Checks, tape_of
from opennki.interpret.prepared import Prepared

nki, nl, nisa = k.nki, k.nl, k.nisa
BF16 = np.dtype(ml_dtypes.bfloat16)


def traced(fn, *arrays, grid=None):
    kernel = nki.jit(fn, platform_target="trn2")
    return (kernel if grid is None else kernel[grid]).trace(*arrays)


def executor(ir, **kwargs):
    found = executor_of(tape_of(ir, Checks.of("off")), **kwargs)
    assert found is not None, build.library().origin
    return found


def rms(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // 128):
        tile = nl.load(x[i * 128 : (i + 1) * 128])
        scale = nl.rsqrt(nl.mean(nl.square(tile), axis=1, keepdims=True) + 1e-6)
        nl.store(out[i * 128 : (i + 1) * 128], tile * scale)
    return out


def matmul(a, b):
    out = nl.ndarray((a.shape[1], b.shape[1]), dtype=a.dtype, buffer=nl.shared_hbm)
    for m in nl.affine_range(a.shape[1] // 128):
        for n in nl.affine_range(b.shape[1] // 512):
            acc = nl.zeros((128, 512), nl.float32, buffer=nl.psum)
            for q in nl.affine_range(a.shape[0] // 128):
                acc += nisa.nc_matmul(nl.load(a[q * 128 : (q + 1) * 128, m * 128 : (m + 1) * 128]),
                                      nl.load(b[q * 128 : (q + 1) * 128, n * 512 : (n + 1) * 512]))
            nl.store(out[m * 128 : (m + 1) * 128, n * 512 : (n + 1) * 512], acc)
    return out


def edges(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    row, column = nl.arange(128)[:, None], nl.arange(96)[None, :]
    for i in nl.affine_range((x.shape[0] + 127) // 128):
        keep = (i * 128 + row < x.shape[0]) & (column < x.shape[1])
        tile = nl.load(x[i * 128 + row, column], mask=keep)
        nl.store(out[i * 128 + row, column], nl.add(tile, 1.5, mask=keep), mask=keep)
    return out


def triangle(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(4):
        total = nl.zeros((32, x.shape[1]), nl.float32)
        for j in nl.sequential_range(4):
            if j <= i:
                total += nl.load(x[nl.ds(j * 32, 32)])
        nl.store(out[nl.ds(i * 32, 32)], total)
    return out


def halves(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.static_range(2):
        tile = nl.load(x[nl.ds(i * 16, 16)])
        for j in nl.affine_range(4):
            nl.store(out[nl.ds(i * 16, 16), nl.ds((j // 2) * 8 + (j % 2) * 4, 4)], tile[:, nl.ds(j * 4, 4)])
    return out


def positions(x):
    """Index values of every sign and size, in the dtype of the argument (uint8 and int16 saturate)."""
    out = nl.ndarray((128, 64), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(4):
        values = nisa.iota(nl.arange(64)[None, :] * 300 + i * 1000 - 5000 + nl.arange(32)[:, None], dtype=x.dtype)
        nl.store(out[nl.ds(i * 32, 32)], values)
    return out


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


CASES = {
    "rms": (rms, (normal(256, 512),)),
    "rms bf16": (rms, (normal(256, 512, dtype=BF16),)),
    "matmul": (matmul, (normal(256, 256), normal(256, 1024, seed=1))),
    "matmul bf16": (matmul, (normal(256, 128, dtype=BF16), normal(256, 512, dtype=BF16, seed=1))),
    "edges": (edges, (normal(200, 80),)),
    "triangle": (triangle, (normal(128, 64),)),
    "divisions": (halves, (normal(32, 16),)),
    **{f"positions {d}": (positions, (np.zeros((1, 1), d),)) for d in ("int32", "float32", "uint8", "int16")},
    "rows": (k.rows.func, (normal(64, 16),)),
}


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_interpreter(case):
    fn, arrays = CASES[case]
    ir = traced(fn, *arrays, grid=2 if case == "rows" else None)
    assert coverage(executor(ir))["interpreted"] == 0
    assert both(ir, list(arrays))


def test_a_chain_of_rows_is_one_program():
    """Load, square, mean, rsqrt, product and store: nothing in between is stored."""
    found = executor(traced(rms, normal(256, 512)))
    assert coverage(found) == {"native": 1, "interpreted": 0, "why": {}}


def test_what_is_read_outside_of_a_chain_is_stored():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        twice = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile = nl.load(x)
        double = nl.multiply(tile, 2.0)
        nl.store(out, nl.exp(double))
        for i in nl.affine_range(2):
            nl.store(twice[nl.ds(i * 16, 16)], double[nl.ds(i * 16, 16)] if False else nl.add(tile, double)[nl.ds(i * 16, 16)])
        return out, twice

    x = normal(32, 16)
    assert both(traced(kernel, x), [x])


def test_an_operand_that_is_overwritten_in_a_chain():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile = nl.load(x)
        before = nl.copy(tile)
        tile[...] = nl.multiply(tile, 3.0)
        tile[...] = nl.subtract(tile, nl.max(tile, axis=1, keepdims=True))
        nl.store(out, nl.add(tile, before))
        return out

    x = normal(32, 64)
    assert both(traced(kernel, x), [x])


def test_a_transposed_tile_in_a_chain():
    def kernel(x):
        out = nl.ndarray((x.shape[1], x.shape[0]), dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.copy(nl.transpose(nl.add(nl.load(x), 1.0))))
        return out

    x = normal(32, 32)
    assert both(traced(kernel, x), [x])


def test_an_index_outside_is_reported_as_by_the_interpreter():
    """A mask that excludes too little: the index is wrong in the last iteration only."""

    def kernel(x):
        out = nl.ndarray((24, 16), dtype=x.dtype, buffer=nl.shared_hbm)
        row, column = nl.arange(8)[:, None], nl.arange(16)[None, :]
        for i in nl.sequential_range(4):
            keep = i * 8 + row < 24
            nl.store(out[i * 8 + row, column], nl.load(x[i * 8 + row, column], mask=keep), mask=keep)
        return out

    x = normal(20, 16)
    ir = traced(kernel, x)
    texts = []
    for way in (None, native):
        with pytest.raises(NkiIndexError) as caught:
            Prepared(ir, "off", native=way).run([x], [np.zeros((24, 16), np.float32)])
        texts.append(str(caught.value))
    assert texts[0] == texts[1] and "test_executor.py" in texts[0] and "16 to 23" in texts[0]


def test_a_runtime_index_outside_is_reported_and_the_next_run_is_right():
    ir = nki.jit(k.pick.func, platform_target="trn2").trace(normal(8, 4), np.zeros((2, 1), np.int32))
    assert coverage(executor(ir))["interpreted"] == 0
    table, index = normal(8, 4), np.array([[3], [7]], np.int32)
    out = np.zeros((2, 4), np.float32)
    texts = []
    for way in (None, native):
        plan = Prepared(ir, "off", native=way)
        plan.run([table, index], [out])
        np.testing.assert_array_equal(out, table[[3, 7]])
        with pytest.raises(IndexError) as caught:
            plan.run([table, np.array([[3], [9]], np.int32)], [out])
        texts.append((str(caught.value), str(caught.value.__cause__)))
        plan.run([table, index], [out])
        np.testing.assert_array_equal(out, table[[3, 7]])
    assert texts[0] == texts[1] and "9" in texts[0][1]


def test_an_instruction_without_native_form_is_interpreted_and_counted():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        for i in nl.sequential_range(2):
            tile = nl.add(nl.load(x[nl.ds(i * 4, 4)]), 1.0)
            nl.device_print("tile", tile)
            nl.store(out[nl.ds(i * 4, 4)], tile)
        return out

    x = normal(8, 4)
    ir = traced(kernel, x)
    found = coverage(executor(ir))
    assert found["interpreted"] == 1 and "device_print" in found["why"]
    plan, out = Prepared(ir, "off", native=native), np.zeros_like(x)
    lines = []

    class Out:
        def write(self, text):
            lines.append(text)

    plan.run([x], [out], out=Out())
    np.testing.assert_array_equal(out, x + 1)
    assert "".join(lines).count("tile") == 2

    class Closed:
        def write(self, text):
            raise OSError("closed")

    with pytest.raises(OSError, match="closed"):  # raised in a call from native code, and the next run is right
        plan.run([x], [out], out=Closed())
    plan.run([x], [out], out=Out())
    np.testing.assert_array_equal(out, x + 1)


@pytest.mark.parametrize("threads", ["1", "2", "5"])
def test_the_number_of_threads_does_not_show(monkeypatch, threads):
    a, b = normal(256, 512), normal(256, 1024, seed=1)
    ir = traced(matmul, a, b)
    assert executor(ir).lowering.parallel
    outs = []
    for n in ("1", threads):
        monkeypatch.setenv("OPENNKI_NUM_THREADS", n)
        out = np.zeros((512, 1024), np.float32)
        plan = Prepared(ir, "off", native=native)
        for _ in range(3):
            plan.run([a, b], [out])
        outs.append(out)
    np.testing.assert_array_equal(*outs)


def heads(x, w):
    """A product for each program, through SBUF and PSUM of its own."""
    out = nl.ndarray((x.shape[0], 128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
    head = nl.program_id(0)
    a, b = nl.load(x[head]), nl.load(w)
    nl.store(out[head], nl.exp(nl.multiply(nisa.nc_matmul(a, b), 0.01)))
    return out


def test_programs_of_a_grid_run_on_several_threads(monkeypatch):
    x, w = normal(6, 128, 128), normal(128, 512, seed=1)
    ir = traced(heads, x, w, grid=6)
    assert executor(ir).lowering.programs is not None
    assert both(ir, [x, w])
    outs = []
    for threads in ("1", "2", "8"):
        monkeypatch.setenv("OPENNKI_NUM_THREADS", threads)
        plan, out = Prepared(ir, "off", native=native), np.zeros((6, 128, 512), np.float32)
        for _ in range(3):
            plan.run([x, w], [out])
        outs.append(out)
    assert all((o == outs[0]).all() for o in outs)


def test_programs_that_write_one_place_run_one_after_the_other():
    def last(x):
        out = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x[nl.program_id(0)]))
        return out

    x = normal(8, 128, 512)
    ir = traced(last, x, grid=8)
    assert executor(ir).lowering.programs is None
    out = np.zeros((128, 512), np.float32)
    Prepared(ir, "off", native=native).run([x], [out])
    np.testing.assert_array_equal(out, x[7])


def carried(x):
    out = nl.ndarray((128, x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    total = nl.zeros((128, x.shape[1]), nl.float32)
    for i in nl.sequential_range(x.shape[0] // 128):
        total[...] = nl.add(total, nl.load(x[nl.ds(i * 128, 128)]))
    nl.store(out, total)
    return out


def shifted(x):
    out = nl.ndarray((x.shape[0] + 64, x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.sequential_range(x.shape[0] // 128):
        nl.store(out[nl.ds(i * 64, 128)], nl.load(x[nl.ds(i * 128, 128)]))
    return out


@pytest.mark.parametrize(("fn", "parallel"), [(rms, True), (carried, False), (shifted, False)], ids=lambda f: getattr(f, "__name__", f))
def test_loops_run_in_parallel_only_where_iterations_share_nothing(fn, parallel):
    x = normal(1024, 512)
    ir = traced(fn, x)
    assert bool(executor(ir).lowering.parallel) is parallel
    if fn is not shifted:  # there rows are stored twice
        assert both(ir, [x])


def test_several_python_threads_at_once():
    ir = traced(rms, normal(256, 512))
    plan = Prepared(ir, "off", native=native)
    want = np.zeros((256, 512), np.float32)
    plan.run([normal(256, 512)], [want])
    wrong = []

    def work(seed):
        x = normal(256, 512, seed=seed)
        first, out = np.zeros_like(x), np.zeros_like(x)
        Prepared(ir, "off").run([x], [first])
        for _ in range(30):
            plan.run([x], [out])
        if np.abs(out - first).max() > 1e-5:
            wrong.append(seed)

    pool = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in pool:
        t.start()
    for t in pool:
        t.join(120)
    assert not wrong and not any(t.is_alive() for t in pool)


def test_addresses_are_those_of_the_public_attribute():
    a = normal(5, 7)
    for array in (a, a[1:, 3:], a[::-1], a.T, np.zeros((0, 2)), np.zeros((2, 2), BF16)):
        assert pointers.address(array) == array.__array_interface__["data"][0]


# ---- what runs where ----


def test_full_checks_stay_with_the_interpreter(monkeypatch):
    def refuse(*args):
        raise AssertionError("native code was asked for")

    monkeypatch.setattr("opennki.kernels.base.native", refuse)
    x = normal(128, 64)
    nki.simulate_kernel(nki.jit(rms, platform_target="trn2"), x)
    with pytest.raises(AssertionError, match="native code"):
        nki.simulate_kernel(nki.jit(rms, platform_target="trn2"), x, checks="fast")


def test_a_setting_turns_it_off(monkeypatch):
    ir = traced(rms, normal(128, 64))
    monkeypatch.setenv("OPENNKI_EXECUTOR", "interpreter")
    assert executor_of(tape_of(ir, Checks.of("off"))) is None


def test_without_a_compiler_the_interpreter_runs_and_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(build, "compiler", lambda: None)
    build._load.cache_clear()
    try:
        assert build.library().lib is None and "no C compiler" in build.library().origin
        ir = traced(rms, normal(128, 64))
        assert executor_of(tape_of(ir, Checks.of("off"))) is None
        out = np.zeros((128, 64), np.float32)
        Prepared(ir, "off", native=native).run([normal(128, 64)], [out])
        assert np.isfinite(out).all() and out.any()
    finally:
        build._load.cache_clear()


def test_sources_that_do_not_compile_are_a_reason_and_no_exception(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENNKI_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    (tmp_path / "broken.c").write_text("int nki_abi(void) { return }")
    build._load.cache_clear()
    try:
        found = build.library()
        assert found.lib is None and "could not be built" in found.origin and "broken.c" in found.origin
        assert not list((tmp_path / "native").glob("*.so"))
    finally:
        build._load.cache_clear()


def test_the_time_of_each_call_can_be_asked_for():
    x = np.ones((512, 64), np.float32)
    ir = traced(rms, x)
    made = executor(ir)
    plan = Prepared(ir, "off", tape=made.tape, native=lambda _: made)
    with profiled(made) as spent:
        for _ in range(3):
            plan.run((x,), [np.empty_like(x)])
    assert {one.runs for one in spent} == {12} and all(one.ns > 0 for one in spent)
    ops = [i.op for one in spent for i in one.instrs]
    assert ops[0] == ops[-1] == "dma_copy" and "activation" in ops
    before = list(spent)
    plan.run((x,), [np.empty_like(x)])
    assert spent == before
