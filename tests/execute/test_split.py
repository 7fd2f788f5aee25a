"""Large calls without a loop around them: rows in blocks on several threads, with the results of one."""

import numpy as np
import pytest

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
from opennki.execute.executor import executor_of
from opennki.execute.show import text
from opennki.interpret.prepared import Prepared

R = np.random.default_rng(0)


def normal(*shape):
    return R.standard_normal(shape).astype(np.float32)


def chain(x):
    """A row-wise program with folds."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    t = nl.load(x)
    e = nl.exp(nl.subtract(t, nl.max(t, axis=1, keepdims=True)))
    nl.store(out, nl.divide(e, nl.sum(e, axis=1, keepdims=True)))
    return out


def flat(x):
    """Nothing but elements."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.multiply(nl.exp(nl.load(x)), 0.5))
    return out


def scan(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    t = nl.load(x)
    nl.store(out, nisa.tensor_tensor_scan(nl.multiply(t, 0.1), t, 0.5, np.multiply, np.add))
    return out


def selected(x):
    """A predicate and an index value that move with the rows."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    row, column = nl.mgrid[0 : x.shape[0], 0 : x.shape[1]]
    t = nisa.affine_select(pred=(row * 8 >= column), on_true_tile=nl.load(x), on_false_value=-3.0)
    nl.store(out, nl.add(t, nisa.iota(row * 2 + column, dtype=nl.float32)))
    return out


def counted(x):
    """In a loop whose iterations hand a value on."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    total = nl.load(x)
    for _ in nl.sequential_range(3):
        total[...] = nl.sqrt(nl.abs(nl.add(total, 1.0)))
    nl.store(out, total)
    return out


def shifted(x):
    """Rows that read what other rows store: nothing to share out."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    t = nl.load(x)
    for i in nl.sequential_range(2):
        t[:, 1 : x.shape[1]] = nl.multiply(t[:, 0 : x.shape[1] - 1], 0.5)
    nl.store(out, t)
    return out


def tape(kernel, x):
    return text(executor_of(Prepared(nki.jit(kernel).trace(x), "off").tape).lowering)


@pytest.mark.parametrize("kernel", [chain, flat, scan, selected, counted])
def test_large_calls_are_shared_out(kernel):
    assert "in 8: parallel" in tape(kernel, normal(128, 4096))
    assert "parallel" not in tape(kernel, normal(128, 256)), "not worth it"


@pytest.mark.parametrize("rows", [128, 126, 97])
@pytest.mark.parametrize("kernel", [chain, flat, scan, selected, counted, shifted])
def test_results_do_not_depend_on_the_threads(kernel, rows, monkeypatch):
    x = normal(rows, 4099)
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setenv("OPENNKI_NUM_THREADS", str(threads))
        results.append(nki.simulate_kernel(nki.jit(kernel), x, checks="off"))
    monkeypatch.setenv("OPENNKI_EXECUTOR", "interpreter")
    expected = nki.simulate_kernel(nki.jit(kernel), x, checks="off")
    for result in results:
        np.testing.assert_array_equal(result.view(np.uint32), results[0].view(np.uint32))
    np.testing.assert_allclose(results[0], expected, rtol=2e-6, atol=1e-6)


def test_rows_of_one_result_each_are_places_of_their_own():
    def last(x):
        out = nl.ndarray((128, 1), dtype=x.dtype, buffer=nl.shared_hbm)
        t = nl.load(x)
        nl.store(out, nl.max(nl.exp(t), axis=1, keepdims=True))
        return out

    assert "in 8: parallel" in tape(last, normal(128, 4096))
