"""Folds over few elements as trees of their function: the same bits as the interpreter's folds, and no fold on the tape."""

import ml_dtypes
import numpy as np
import pytest

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
from opennki.execute import abi
from opennki.execute.executor import executor_of
from opennki.interpret.prepared import Prepared

R = np.random.default_rng(0)
FOLDS = {"max": nl.max, "min": nl.min, "sum": nl.sum, "prod": nl.prod}


def windows(fold, height, width, step):
    def kernel(x):
        p, h, w = x.shape
        ho, wo = (h - height) // step + 1, (w - width) // step + 1
        out = nl.ndarray((p, ho, wo), dtype=x.dtype, buffer=nl.shared_hbm)
        ip, iy, ix, ky, kx = nl.mgrid[0:p, 0:ho, 0:wo, 0:height, 0:width]
        nl.store(out, fold(nl.load(x)[ip, step * iy + ky, step * ix + kx], axis=[3, 4]))
        return out

    return kernel


def both(kernel, monkeypatch, *args):
    native = nki.simulate_kernel(nki.jit(kernel), *args, checks="off")
    with monkeypatch.context() as patched:
        patched.setenv("OPENNKI_EXECUTOR", "interpreter")
        expected = nki.simulate_kernel(nki.jit(kernel), *args, checks="off")
    return native, expected


def same(native, expected):
    bits = f"u{native.dtype.itemsize}"
    nan = np.isnan(native.astype(np.float32)) & np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.where(nan, 0, native.view(bits)), np.where(nan, 0, expected.view(bits)))


def folds(kernel, *args):
    calls = executor_of(Prepared(nki.jit(kernel).trace(*args), "off").tape).lowering.calls
    return sum(c.what.structure.uops[i].code == abi.FOLD for c in calls if c.kind == abi.K_EW for i in range(c.what.structure.n_uops))


def odd(*shape, dtype=np.float32):
    """Random numbers with zeros of both signs, infinities, NaN and denormals among them."""
    x = R.standard_normal(shape).astype(np.float32)
    for value in (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40):
        x[R.random(shape) < 0.03] = value
    return x.astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("window", [(3, 3, 2), (2, 2, 2), (1, 2, 1), (4, 8, 3), (5, 5, 1), (4, 4, 4)])
def test_windows(name, window, dtype, monkeypatch):
    kernel = windows(FOLDS[name], *window)
    x = odd(64, 21, 23, dtype=dtype)
    assert folds(kernel, x) == 0
    same(*both(kernel, monkeypatch, x))


def test_what_stays_a_fold():
    assert folds(windows(nl.max, 6, 6, 1), odd(64, 21, 23)) == 1, "more elements than lanes"
    assert folds(windows(nl.max, 3, 3, 2), odd(1, 5, 5)) == 1, "few rows"
    assert folds(lambda x: normalised(x), odd(128, 4)) == 2, "the elements of the row are results too"


def normalised(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    t = nl.load(x)
    e = nl.exp(nl.subtract(t, nl.max(t, axis=1, keepdims=True)))
    nl.store(out, nl.divide(e, nl.sum(e, axis=1, keepdims=True)))
    return out


def spread(x, scale):
    """Two folds inside each other, with values of the row in between, and a result in the place of an operand."""
    out = nl.ndarray((128, 1), dtype=x.dtype, buffer=nl.shared_hbm)
    t, s = nl.load(x), nl.load(scale)
    mean = nl.multiply(nl.sum(t, axis=1, keepdims=True), 0.2)
    s[...] = nl.add(nl.multiply(nl.sum(nl.square(nl.subtract(t, mean)), axis=1, keepdims=True), s), mean)
    nl.store(out, nl.sqrt(s))
    return out


def test_folds_inside_each_other(monkeypatch):
    x, scale = R.standard_normal((128, 5)).astype(np.float32), R.random((128, 1)).astype(np.float32)
    assert folds(spread, x, scale) == 0
    same(*both(spread, monkeypatch, x, scale))


def running(x):
    """A fold that is joined with the row before, in place."""
    out = nl.ndarray((128, 8), dtype=x.dtype, buffer=nl.shared_hbm)
    t = nl.load(x)
    best = nl.full((128, 8), -3.0, dtype=x.dtype)
    for i in nl.sequential_range(4):
        best[...] = nl.maximum(best, nl.max(t[:, i, :, :], axis=2))
    nl.store(out, best)
    return out


def test_a_fold_joined_with_what_was_there(monkeypatch):
    x = odd(128, 4, 8, 3)
    same(*both(running, monkeypatch, x))
