"""The directly allocated kernels, the double-row product and the tutorial's kernel, against NumPy."""

from __future__ import annotations

import functools
import warnings

import ml_dtypes
import numpy as np
import opennki.dropin  # noqa: F401  isort: skip
import pytest

import neuronxcc.nki.compiler as ncc
from neuronxcc import nki
from neuronxcc.nki import kernels
from neuronxcc.nki.kernels.allocated_attention import allocated_fused_self_attn_for_SD_small_head_size as attention
from neuronxcc.nki.kernels.allocated_fused_linear import allocated_fused_rms_norm_qkv as qkv
from neuronxcc.nki.kernels.double_row_matmul import quantized_double_row_matmul as double_row
from neuronxcc.nki.kernels.tutorial import add_kernel_nx8x128x512 as add
from opennki.errors import NkiError, NkiTypeError, NkiValueError
from opennki.passes.allocate import allocate
from opennki.timing import estimate
from tests.kernels.library import attention_oracle as oracle
from tests.kernels.library.attention_oracle import BF16, close, normal

FP8 = np.dtype(ml_dtypes.float8_e4m3)


def simulate(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return nki.simulate_kernel(*args, **kwargs)


# ---- attention ----
def attended(q, k, v):
    """(batch, d, seq) for q, k (batch, d, seq), v (batch, seq, d)."""
    o, _, _ = oracle.attention(q[:, None], k[:, None], v.swapaxes(1, 2)[:, None], scale=0.125, causal=False)
    return o[:, 0].swapaxes(1, 2)


def attention_inputs(batch, d, length, dtype=np.float32):
    q, k = (normal(n, batch, d, length, dtype=dtype) for n in (1, 2))
    return q, k, normal(3, batch, length, d, dtype=dtype)


@pytest.mark.parametrize("batch, d, length, dtype, mixed, tolerance", [
    (1, 128, 1024, np.float32, False, 2e-6), (2, 64, 512, np.float32, True, 8e-3), (1, 128, 1024, BF16, True, 8e-3),
    (1, 40, 1536, np.float16, False, 1e-3)])
@pytest.mark.parametrize("checks", ["full", "off"])
def test_attention(batch, d, length, dtype, mixed, tolerance, checks):
    args = attention_inputs(batch, d, length, dtype)
    got = simulate(attention[batch], *args, mixed_precision=mixed, checks=checks)
    assert got.dtype == dtype
    close(got, attended(*args), tolerance)


def test_attention_is_the_same_when_the_compiler_allocates():
    args = attention_inputs(1, 64, 512)
    placed = simulate(attention[1], *args)
    assert np.array_equal(placed, simulate(ncc.force_auto_alloc(attention)[1], *args))


# ---- projection ----
def projected(x, weights, eps=1e-6):
    x, weights = x.astype(np.float64), weights.astype(np.float64)
    return (x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)) @ weights


@pytest.mark.parametrize("batch, length, dim, out, dtype, tolerance", [
    (1, 128, 512, 512, np.float16, 1e-3), (2, 100, 256, 96, np.float32, 2e-6), (1, 130, 1024, 384, BF16, 8e-3), (1, 40, 128, 1, BF16, 8e-3),
    (1, 256, 2048, 512, BF16, 8e-3)])
@pytest.mark.parametrize("checks", ["full", "off"])
def test_projection(batch, length, dim, out, dtype, tolerance, checks):
    x, weights = normal(1, batch, length, dim, dtype=dtype), normal(2, dim, out, dtype=dtype)
    got = simulate(qkv, x, weights, checks=checks)
    assert got.dtype == dtype
    close(got, projected(x, weights), tolerance)


def test_projection_of_small_rows_and_another_eps():
    x, weights = normal(1, 1, 128, 128) * 1e-3, normal(2, 128, 64)
    close(simulate(qkv, x, weights, eps=0.5), projected(x, weights, 0.5), 2e-6)
    got = simulate(qkv, x, weights, norm_dtype=np.float16)
    close(got, projected(x, weights), 2e-3)
    zero = simulate(qkv, np.zeros_like(x), weights)
    assert not zero.any()


# ---- fp8 ----
def paired(rhs):
    """(K, N) as (K / 2, 2 N): of two tiles (128, 512) along K, the second beside the first."""
    k, n = rhs.shape
    return np.ascontiguousarray(rhs.reshape(k // 256, 2, 128, n // 512, 512).transpose(0, 2, 3, 1, 4).reshape(k // 2, 2 * n))


def quantised(x, axis):
    factors = np.abs(x).max(axis, keepdims=True) / 240
    return (x / np.where(factors == 0, 1, factors)).astype(FP8), factors


@pytest.mark.parametrize("m, k, n, dtype, tiles, tolerance", [
    (128, 256, 512, np.float32, (1, 1, 2), 1e-6), (256, 1024, 1024, BF16, (2, 2, 4), 8e-3), (256, 512, 1536, np.float16, (2, 3, 2), 1e-3),
    (512, 512, 1024, np.float32, (4, 2, 2), 1e-6)])
@pytest.mark.parametrize("checks", ["full", "off"])
def test_double_row_is_the_product_of_what_was_quantised(m, k, n, dtype, tiles, tolerance, checks):
    lhs, rhs = normal(1, m, k, dtype=dtype), normal(2, k, n)
    lhs[3] = 0
    right, scale = quantised(rhs, 0)
    left, factors = quantised(lhs.astype(np.float32), 1)
    got = simulate(double_row, lhs, paired(right), np.broadcast_to(scale, (128, n)).astype(dtype), *tiles, checks=checks)
    assert got.dtype == dtype
    exact = (left.astype(np.float64) @ right.astype(np.float64)) * factors * scale.astype(dtype).astype(np.float64)
    assert np.linalg.norm(got.astype(np.float64) - exact) < max(tolerance, 5e-3) * np.linalg.norm(exact)
    assert np.linalg.norm(got.astype(np.float64) - lhs.astype(np.float64) @ rhs) < 0.05 * np.linalg.norm(exact)


def test_rows_that_do_not_fit_are_loaded_in_parts(monkeypatch):
    lhs, (right, scale) = normal(1, 128, 512), quantised(normal(2, 512, 512), 0)
    args = (lhs, paired(right), np.broadcast_to(scale, (128, 512)), 1, 1, 2)
    whole = simulate(double_row, *args)
    monkeypatch.setattr("opennki.dialects.neuronxcc.kernels.double_row_matmul._RESIDENT", 0.0)
    assert np.array_equal(whole, simulate(double_row, *args))


# ---- tutorial ----
@pytest.mark.parametrize("grid", [None, 2])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_addition(grid, dtype):
    a, b = (normal(n, 2, 8, 128, 512, dtype=dtype) for n in (1, 2))
    assert np.array_equal(simulate(add[grid] if grid else add, a, b, a.size), a + b)


def test_addition_of_some():
    a, b = (normal(n, 1, 8, 128, 512) for n in (1, 2))
    n = 3 * 128 * 512 + 5 * 512 + 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the rest is not written, and a warning says so
        got = nki.simulate_kernel(add[1], a, b, n).reshape(-1)
    assert np.array_equal(got[:n], (a + b).reshape(-1)[:n])
    assert np.isnan(got[n:]).all()


# ---- all ----
def test_in_jax_and_torch():
    import jax
    torch = pytest.importorskip("torch")

    q, k, v = attention_inputs(1, 16, 512)
    kernel = functools.partial(attention[1], mixed_precision=False)
    for call in (jax.jit(lambda *a: kernel(*a)), lambda *a: kernel(*map(torch.tensor, a))):
        close(call(q, k, v), attended(q, k, v), 2e-6)
    x, weights = normal(1, 1, 128, 256), normal(2, 256, 64)
    for call in (jax.jit(qkv), lambda *a: qkv(*map(torch.tensor, a))):
        close(call(x, weights), projected(x, weights), 2e-6)


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize("kernel, args, documented", [
    (attention[1], (np.empty((1, 128, 4096), BF16), np.empty((1, 128, 4096), BF16), np.empty((1, 4096, 128), BF16)), 380),
    (attention[1], (np.empty((1, 128, 5120), BF16), np.empty((1, 128, 5120), BF16), np.empty((1, 5120, 128), BF16)), 586),
    (qkv, (np.empty((1, 512, 1024), BF16), np.empty((1024, 384), BF16)), 40),
    (qkv, (np.empty((1, 128, 1024), BF16), np.empty((1024, 512), BF16)), 28),
    (qkv, (np.empty((1, 1024, 8192), BF16), np.empty((8192, 512), BF16)), 301),
    (double_row, (np.empty((512, 16384), BF16), np.empty((8192, 2048), FP8), np.empty((128, 1024), BF16), 2, 2, 16), 320),
    (double_row, (np.empty((512, 16384), BF16), np.empty((8192, 2048), FP8), np.empty((128, 1024), BF16), 4, 2, 128), 320),
])
def test_memory_and_documented_latencies(target, kernel, args, documented, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    made = kernel.trace(*args)
    allocate(made)
    found = estimate(made)
    assert not found.warnings
    assert found.latency_us < documented


Q, V = np.zeros((1, 64, 512), np.float32), np.zeros((1, 512, 64), np.float32)
LONG = (np.zeros((1, 128, 65536), np.float32),) * 2 + (np.zeros((1, 65536, 128), np.float32), False, False)
X, W = np.zeros((1, 128, 256), BF16), np.zeros((256, 64), BF16)
LHS, RHS, SCALE = np.zeros((128, 256), BF16), np.zeros((128, 1024), FP8), np.zeros((128, 512), BF16)
TILE = np.zeros((1, 8, 128, 512), np.float32)


@pytest.mark.parametrize("kernel, args, kind, operand", [
    (attention[1], (Q, Q, Q), NkiValueError, "v_ref"),
    (attention[1], (Q, Q, V, True), NkiValueError, "use_causal_mask"),
    (attention[1], (Q[..., :256], Q[..., :256], V[:, :256]), NkiValueError, "q_ref"),
    (attention[1], (Q.astype(BF16), Q, V), NkiTypeError, "k_ref"),
    (attention[2], (Q, Q, V), NkiValueError, "grid"),
    (attention, (Q, Q, V), NkiValueError, "grid"),
    (attention[1], LONG, NkiValueError, "q_ref"),
    (qkv, (X[0], W), NkiValueError, "hidden"),
    (qkv, (X[..., :100], W[:100]), NkiValueError, "hidden"),
    (qkv, (X, W[:128]), NkiValueError, "weights"),
    (qkv, (X, np.zeros((256, 600), BF16)), NkiValueError, "weights"),
    (qkv, (X, W.astype(np.float16)), NkiTypeError, "weights"),
    (qkv[2], (X, W), NkiValueError, "grid"),
    (double_row, (LHS, RHS.astype(BF16), SCALE, 1, 1, 2), NkiTypeError, "rhs_quantized"),
    (double_row, (LHS, RHS[:64], SCALE, 1, 1, 2), NkiValueError, "rhs_quantized"),
    (double_row, (LHS, RHS, SCALE[:1], 1, 1, 2), NkiValueError, "rhs_scale"),
    (double_row, (LHS, RHS, SCALE, 2, 1, 2), NkiValueError, "TILES_IN_BLOCK_M"),
    (double_row, (LHS, RHS, SCALE, 1, 0, 2), NkiValueError, "TILES_IN_BLOCK_N"),
    (double_row, (LHS, RHS, SCALE, 1, 1, 1), NkiValueError, "TILES_IN_BLOCK_K"),
    (add, (TILE, TILE, TILE.size + 1), NkiValueError, "n_elements"),
    (add, (TILE[0], TILE[0], TILE.size), NkiValueError, "a_ptr"),
    (add[3], (TILE, TILE, TILE.size), NkiValueError, "grid"),
])
def test_bad_arguments_are_errors_at_the_call(kernel, args, kind, operand):
    with pytest.raises(NkiError) as caught:
        nki.simulate_kernel(kernel, *args)
    assert isinstance(caught.value, kind) and caught.value.operand == operand
    assert caught.value.rule and caught.value.fix and caught.value.loc.file == __file__


def test_every_documented_name_is_there_and_at_home_in_the_package():
    assert len(kernels.__all__) == 12
    for name in kernels.__all__:
        found = getattr(kernels, name)
        assert getattr(found, "__doc__", None) and not hasattr(kernels, name + "_")
