"""Masks of whole kernels: what they narrow, what they leave, and what may follow them."""
import numpy as np
import pytest

import opennki.dropin  # noqa: F401  isort: skip
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
from opennki.errors import NkiReadError, NkiWarning

rng = np.random.default_rng(3)


def run(kernel, *args, **kwargs):
    return nki.simulate_kernel(nki.jit(kernel, platform_target="trn2"), *args, **kwargs)


def test_positions_count_from_the_start_of_the_operand():
    """A mask that starts in the middle does not shift the indices that an instruction computes."""
    def kernel(x):
        out = nl.ndarray((4, 8), dtype=nl.uint32, buffer=nl.shared_hbm)
        t = nl.load(x)
        ip, ix = nl.mgrid[0:4, 0:32]
        top = nisa.max8(src=t[ip, ix], mask=ix >= 16)
        nl.store(out, nisa.nc_find_index8(data=t[ip, ix], vals=top, mask=ix >= 16))
        return out
    x = rng.permutation(4 * 32).reshape(4, 32).astype(np.float32)
    expected = 16 + np.argsort(-x[:, 16:], axis=1)[:, :8]
    np.testing.assert_array_equal(run(kernel, x), expected)


def test_edge_tile():
    """The last tile of a tensor that is no multiple of the tile: masked load, unmasked arithmetic, masked store."""
    def kernel(x):
        n, m = x.shape
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        ip, ix = nl.mgrid[0:128, 0:m]
        for i in nl.affine_range((n + 127) // 128):
            t = nl.load(x[i * 128 + ip, ix], mask=i * 128 + ip < n)
            nl.store(out[i * 128 + ip, ix], nl.exp(t) + 1.0, mask=i * 128 + ip < n)
        return out
    x = rng.standard_normal((300, 40)).astype(np.float32)
    np.testing.assert_allclose(run(kernel, x), np.exp(x) + 1, rtol=1e-6)


def test_accumulator_of_a_masked_product_is_undefined_in_the_masked_rows_only():
    """128 rows, 64 columns: the rows of the accumulator that a masked operand leaves undefined do not reach the others."""
    def kernel(lhs_t, rhs):
        k, m = lhs_t.shape
        out = nl.ndarray((m, 64), dtype=nl.float32, buffer=nl.shared_hbm)
        part, free, col = nl.arange(128)[:, None], nl.arange(128)[None, :], nl.arange(64)[None, :]
        acc = nl.zeros((128, 64), dtype=nl.float32, buffer=nl.psum)
        for i in nl.affine_range(k // 128):
            lhs = nl.load(lhs_t[i * 128 + part, free], mask=free < m)
            acc += nisa.nc_matmul(lhs, nl.load(rhs[i * 128 + part, col]))
        nl.store(out[part, col], acc, mask=part < m)
        return out
    lhs_t, rhs = (rng.integers(-4, 5, (256, n)).astype(np.float32) for n in (72, 64))
    np.testing.assert_array_equal(run(kernel, lhs_t, rhs, checks={"masked": "error"}), lhs_t.T @ rhs)


def test_masked_out_elements_keep_what_was_there():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        ip, ix = nl.mgrid[0:16, 0:16]
        t = nl.zeros((16, 16), dtype=nl.float32)
        t[ip, ix] = nl.load(x[ip, ix], mask=ix < ip)
        nl.store(out, t)
        return out
    x = rng.standard_normal((16, 16)).astype(np.float32)
    np.testing.assert_array_equal(run(kernel, x), np.tril(x, -1))


def test_reduction_leaves_masked_elements_out():
    def kernel(x):
        out = nl.ndarray((8, 3), dtype=x.dtype, buffer=nl.shared_hbm)
        ip, ix = nl.mgrid[0:8, 0:20]
        t = nl.load(x)
        nl.store(out[:, 0:1], nl.sum(t[ip, ix], axis=1, mask=ix < 7))
        nl.store(out[:, 1:2], nl.max(t[ip, ix], axis=1, mask=ix >= 15))
        nl.store(out[:, 2:3], nl.sum(t[ip, ix], axis=1, mask=ix <= ip))
        return out
    x = rng.standard_normal((8, 20)).astype(np.float32)
    expected = np.stack([x[:, :7].sum(1), x[:, 15:].max(1), np.tril(x).sum(1)], 1)
    np.testing.assert_allclose(run(kernel, x), expected, rtol=1e-5, atol=1e-6)


def test_and_joins_masks():
    """`a and b` in a mask argument is a & b, not b alone."""
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        ip, ix = nl.mgrid[0:16, 0:16]
        t = nl.zeros((16, 16), dtype=nl.float32)
        t[ip, ix] = nl.load(x[ip, ix], mask=(ip < 4 and ix < 8 and ix >= 2))
        nl.store(out, t)
        return out
    x = rng.standard_normal((16, 16)).astype(np.float32)
    expected = np.zeros_like(x)
    expected[:4, 2:8] = x[:4, 2:8]
    np.testing.assert_array_equal(run(kernel, x), expected)


def test_undefined_elements_that_reach_hbm_are_reported():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        ip, ix = nl.mgrid[0:8, 0:8]
        t = nl.load(x[ip, ix], mask=ix < 4)
        nl.store(out, t)
        return out
    x = np.ones((8, 8), np.float32)
    with pytest.warns(NkiWarning, match="mask left undefined"):
        run(kernel, x)
    with pytest.raises(NkiReadError, match="mask left undefined"):
        run(kernel, x, checks={"masked": "error"})
