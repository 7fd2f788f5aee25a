"""Compare a kernel that is expanded into a JAX program with the interpreter."""
from __future__ import annotations

import ml_dtypes
import numpy as np

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
from opennki.bind.inline import inline
from opennki.kernels.generic import GenericKernel


def kernel_of(fn, **options):
    """A kernel object of a function."""
    return fn if isinstance(fn, GenericKernel) else nki.jit(fn, platform_target="trn2", **options)


def both(fn, *arrays, wrap=lambda f: f, **options):
    """(results of the expansion, results of the interpreter): outputs, then written inputs that no output returns."""
    kernel = kernel_of(fn, **options)
    traced = kernel.trace(*arrays)
    got = [np.asarray(x) for x in wrap(inline(traced))(*arrays)]
    copies = [np.array(a) for a in arrays]
    result = nki.simulate_kernel(kernel, *copies)
    want = [] if result is None else [np.asarray(x) for x in (result if isinstance(result, (tuple, list)) else [result])]
    for param, array in zip(traced.params, copies, strict=True):
        if param in traced.written_params and not any(o.alloc is param and o.is_whole for o in traced.outputs):
            want.append(array)
    return got, want


def close(got, want, rtol=2e-6):
    """Integers equal; floats within `rtol` of the largest value, or two units in the last place of their dtype."""
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype, (g.shape, g.dtype, w.shape, w.dtype)
        if g.dtype.kind in "iub":
            np.testing.assert_array_equal(g, w)
            continue
        eps = float(ml_dtypes.finfo(g.dtype).eps)
        a, b = g.astype(np.float64), w.astype(np.float64)
        finite = np.isfinite(b)
        np.testing.assert_array_equal(np.isfinite(a), finite)
        np.testing.assert_array_equal(a[~finite], b[~finite])
        largest = np.abs(b[finite]).max(initial=0)
        step = 2 * eps if eps > 1e-6 else 0
        np.testing.assert_allclose(a[finite], b[finite], rtol=max(step, rtol), atol=largest * rtol)


def exact(got, want):
    """Equal bit by bit, any NaN being as good as another."""
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype
        np.testing.assert_array_equal(g.astype(np.float64), w.astype(np.float64))


def agree(fn, *arrays, check=close, **options):
    """The expansion agrees with the interpreter."""
    got, want = both(fn, *arrays, **options)
    check(got, want)
    return got


def normal(*shape, dtype=np.float32, seed=0):
    """Normal random values."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32).astype(dtype)


def integers(*shape, low=0, high=100, dtype=np.int32, seed=0):
    """Random integers of [low, high)."""
    return np.random.default_rng([seed, *shape]).integers(low, high, shape).astype(dtype)
