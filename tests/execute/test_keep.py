"""Operands of products that are packed once: which ones, and that results stay what they are."""

import ml_dtypes
import numpy as np
import pytest

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
from opennki.execute import lower
from opennki.execute.build import library
from opennki.execute.executor import executor_of
from opennki.interpret.prepared import Prepared

R = np.random.default_rng(0)
BF16 = ml_dtypes.bfloat16
needs_native = pytest.mark.skipif(library().lib is None, reason="no native code")


def bf16(*shape):
    return R.standard_normal(shape).astype(BF16)


def blocks(a, b):
    """out[i, j] = a[:, i].T b[:, j]: every block of a meets every block of b."""
    out = nl.ndarray((a.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    for i in nl.affine_range(a.shape[1] // 128):
        for j in nl.affine_range(b.shape[1] // 256):
            left = nl.load(a[:, nl.ds(i * 128, 128)])
            right = nl.load(b[:, nl.ds(j * 256, 256)])
            nl.store(out[nl.ds(i * 128, 128), nl.ds(j * 256, 256)], nl.copy(nisa.nc_matmul(left, right)))
    return out


def causal(a, b):
    """Products under a branch, accumulated; the right side is wide enough that its rows are far apart."""
    out = nl.ndarray((a.shape[1], 128), dtype=nl.float32, buffer=nl.shared_hbm)
    for i in nl.affine_range(a.shape[1] // 128):
        total = nl.zeros((128, 128), dtype=nl.float32)
        for j in nl.sequential_range(b.shape[1] // 128):
            if j <= i:
                left = nl.load(a[:, nl.ds(i * 128, 128)])
                right = nl.load(b[:, nl.ds(j * 128, 128)])
                total[...] = nl.add(total, nisa.nc_matmul(left, right))
        nl.store(out[nl.ds(i * 128, 128), :], total)
    return out


def changed(a, b):
    """The right side is written between two products: nothing of it may be kept."""
    out = nl.ndarray((4, 128, 128), dtype=nl.float32, buffer=nl.shared_hbm)
    room = nl.ndarray((128, 128), dtype=b.dtype, buffer=nl.private_hbm)
    for i in nl.sequential_range(4):
        nl.store(room, nl.load(b[:, nl.ds(i * 128, 128)]))
        product = nl.zeros((128, 128), dtype=nl.float32, buffer=nl.psum)
        for _ in nl.affine_range(4):
            product += nisa.nc_matmul(nl.load(a[:, 0:128]), nl.load(room))
        nl.store(out[i], nl.copy(product))
    return out


def programs(a, b):
    """The right side depends on the program."""
    n = nl.program_id(0)
    out = nl.ndarray((4, a.shape[1], 128), dtype=nl.float32, buffer=nl.shared_hbm)
    for i in nl.affine_range(a.shape[1] // 128):
        tile = nisa.nc_matmul(nl.load(a[:, nl.ds(i * 128, 128)]), nl.load(b[:, nl.ds(n * 128, 128)]))
        nl.store(out[n, nl.ds(i * 128, 128), :], nl.copy(tile))
    return out


def computed(a, b):
    """The left side is made on chip, the right side is met again and again."""
    out = nl.ndarray((a.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    for i in nl.affine_range(a.shape[1] // 128):
        left = nl.negative(nl.load(a[:, nl.ds(i * 128, 128)]))
        for j in nl.affine_range(b.shape[1] // 256):
            right = nl.load(b[:, nl.ds(j * 256, 256)])
            nl.store(out[nl.ds(i * 128, 128), nl.ds(j * 256, 256)], nl.copy(nisa.nc_matmul(left, right)))
    return out


def places(kernel, *args, grid=None):
    jitted = nki.jit(kernel)
    traced = (jitted[grid] if grid else jitted).trace(*args)
    return [c.places for c in executor_of(Prepared(traced, "off").tape).lowering.calls if any(c.places)]


def both(kernel, monkeypatch, *args, grid=None):
    """Results with operands that are kept, and without."""
    jitted = nki.jit(kernel)
    jitted = jitted[grid] if grid else jitted
    kept = nki.simulate_kernel(jitted, *args, checks="off")
    with monkeypatch.context() as patched:
        patched.setattr(lower, "keep", lambda *_: None)
        plain = nki.simulate_kernel(jitted, *args, checks="off")
    return kept, plain


@needs_native
def test_what_is_kept():
    assert places(blocks, bf16(128, 512), bf16(128, 512)) == [(4, 2)]
    assert places(causal, bf16(128, 512), bf16(128, 4096)) == [(4, 32)]
    assert places(changed, bf16(128, 512), bf16(128, 512)) == [(1, 0)]
    assert places(programs, bf16(128, 512), bf16(128, 512), grid=(4,)) == [(0, 1)]
    assert places(blocks, bf16(128, 128), bf16(128, 256)) == [], "each operand is met once"


@needs_native
def test_float32_is_packed_for_vectors():
    assert places(blocks, *(bf16(128, 512).astype(np.float32) for _ in range(2))) == [(4, 2)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kernel", [blocks, causal, changed, programs])
def test_the_results_are_those_without(kernel, threads, monkeypatch):
    monkeypatch.setenv("OPENNKI_NUM_THREADS", str(threads))
    for dtype in (BF16, np.float32, np.float16):
        a, b = bf16(128, 512).astype(dtype), bf16(128, 512).astype(dtype)
        for _ in range(3):  # new values in the same arrays: nothing stays from run to run
            kept, plain = both(kernel, monkeypatch, a, b, grid=(4,) if kernel is programs else None)
            np.testing.assert_array_equal(kept, plain)
            a[...], b[...] = bf16(128, 512).astype(dtype), bf16(128, 512).astype(dtype)


def test_dot_products_are_a_setting(monkeypatch):
    a, b = bf16(128, 512), bf16(128, 512)
    exact = nki.simulate_kernel(nki.jit(blocks), a, b, checks="off")
    monkeypatch.setenv("OPENNKI_BF16_DOT", "1")
    calls = executor_of(Prepared(nki.jit(blocks).trace(a, b), "off").tape).lowering.calls
    assert [c.what.dot for c in calls if hasattr(c.what, "dot")] == [1]
    np.testing.assert_allclose(nki.simulate_kernel(nki.jit(blocks), a, b, checks="off"), exact, atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e-39, 2.0**-120, 0.0])
def test_values_that_the_tile_unit_does_not_take(value, monkeypatch):
    a, b = bf16(128, 512), bf16(128, 512)
    b[5, 300] = value
    for left, right in ((a, b), (b, a), (b, b)):
        kept, plain = both(blocks, monkeypatch, left, right)
        np.testing.assert_array_equal(kept.view(np.uint32), plain.view(np.uint32))


@needs_native
@pytest.mark.parametrize("value", [None, np.nan, -np.inf, 1e-39])
@pytest.mark.parametrize("rows", [0, 1, 32, 33, 64, 100, 127])
def test_zeros_are_left_out_where_that_changes_nothing(rows, value, monkeypatch):
    a, b = bf16(128, 256), bf16(128, 512)
    a[rows:, :128], a[rows:, 140:160] = 0.0, -0.0
    if value is not None:
        b[120, 300] = value
    assert [c[1] for c in places(computed, a, b)] == [2], "the right side is kept, so that native code knows whether it is finite"
    kept, plain = both(computed, monkeypatch, a, b)
    np.testing.assert_array_equal(kept.view(np.uint32), plain.view(np.uint32))
    if value is not None and not np.isfinite(value):
        assert np.isnan(kept[:128, 300]).all() == (bool(np.isnan(value)) or rows <= 120), "0 times what is not finite is NaN"
