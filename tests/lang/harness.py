"""Small kernels in tests of the language: make one from a function of tiles, run it, compare, look at its
instructions.
"""

from __future__ import annotations

import copy

import ml_dtypes
import numpy as np
import pytest

from opennki.dialects.neuronxcc import language as nl
from opennki.errors import NkiError
from opennki.ir.nodes import Instr, statements
from opennki.kernels.entry import jit
from tests.execute.agree import both

BF16 = np.dtype(ml_dtypes.bfloat16)
FP16, FP32 = np.dtype(np.float16), np.dtype(np.float32)
FLOATS = (FP32, BF16, FP16)
INTS = tuple(np.dtype(t) for t in (np.int32, np.uint8, np.int8, np.int16, np.uint16, np.uint32))


def kernel_of(fn, target="trn1", **kwargs):
    """A jitted kernel of a Python function."""
    return jit(fn, mode="simulation", platform_target=target, **kwargs)


def run(fn, *args, target="trn1", grid=None, **options):
    """Run a kernel function on the interpreter with every check on, and then by native code, which must agree."""
    kernel = kernel_of(fn, target)
    kernel = kernel if grid is None else kernel[grid]
    before = copy.deepcopy(args)
    result = kernel.simulate(*args, checks="full", **options)
    if not options:
        both(*kernel.specialize_and_call(before, {}))
    return result


def tiles(fn, *arrays, target="trn1", out_dtype=None):
    """fn of the loaded arrays (128 rows at most), stored; the result has the shape and dtype of the tile."""

    def kernel(*inputs):
        result = fn(*[nl.load(x) for x in inputs])
        out = nl.ndarray(result.shape, out_dtype or result.dtype, buffer=nl.shared_hbm)
        nl.store(out, result)
        return out

    return run(kernel, *arrays, target=target)


def instructions(fn, *args, target="trn1"):
    """The instructions of a traced kernel function."""
    return [s for s in statements(kernel_of(fn, target).trace(*args).body) if isinstance(s, Instr)]


def ops(fn, *args, target="trn1"):
    """Their names."""
    return [i.op for i in instructions(fn, *args, target=target)]


def fails(code, fn, *args, kind=NkiError, **options):
    """The error of a kernel function; its code is checked, and that it points into this test."""
    with pytest.raises(kind) as caught:
        run(fn, *args, **options)
    assert caught.value.code == code, str(caught.value)
    assert caught.value.loc.file.endswith(".py") and "opennki" not in caught.value.loc.file.rsplit("/", 1)[-1]
    assert "/src/opennki/" not in caught.value.loc.file
    return caught.value


def sample(shape, dtype=FP32, seed=0, low=-4.0, high=4.0):
    """Random values of a dtype; integers over a small range around zero or from zero on."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return rng.integers(0 if dtype.kind == "u" else -50, 50, shape).astype(dtype)
    return rng.uniform(low, high, shape).astype(np.float32).astype(dtype)


def close(got, want, dtype=None, steps=2.0):
    """Equal up to `steps` units in the last place of the dtype of `got` (float32 arithmetic, rounded
    once).
    """
    dtype = np.dtype(dtype or got.dtype)
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    if dtype.kind in "iub":
        np.testing.assert_array_equal(got, want)
        return
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(got, want, rtol=steps * eps, atol=steps * float(ml_dtypes.finfo(FP32).eps))
