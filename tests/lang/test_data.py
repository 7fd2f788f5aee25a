"""Copies, selection, matmul, transpose, random numbers, programs, printing."""

from __future__ import annotations

import io

import numpy as np
import pytest

from opennki.dialects.neuronxcc import isa as nisa
from opennki.dialects.neuronxcc import iterators
from opennki.dialects.neuronxcc import language as nl

from .harness import BF16, FLOATS, FP16, FP32, INTS, close, fails, kernel_of, ops, run, sample, tiles

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS], ids=str)
def test_copy_and_cast(dtype):
    x = sample((8, 3, 4), dtype, 1)
    close(tiles(nl.copy, x), x)
    close(tiles(lambda t: nl.copy(t, dtype=nl.float32), x), x.astype(np.float32))
    close(tiles(lambda t: nl.static_cast(t, nl.float32), x), x.astype(np.float32))
    close(tiles(lambda t: t.astype(nl.float32), x), x.astype(np.float32))


def test_copy_permutes_free_dimensions():
    x = sample((8, 3, 4), FP32, 2)

    def kernel(x):
        out = nl.ndarray((8, 4, 3), x.dtype, buffer=nl.shared_hbm)
        t, r = nl.load(x), nl.ndarray((8, 4, 3), x.dtype)
        p, a, b = nl.mgrid[0:8, 0:4, 0:3]
        r[p, a, b] = nl.copy(t[p, b, a])
        nl.store(out, r)
        return out

    close(run(kernel, x), x.transpose(0, 2, 1))


def test_static_cast_of_arrays():
    x = sample((3, 4), FP32, 3)
    assert nl.static_cast(x, nl.bfloat16).dtype == BF16
    close(nl.static_cast(x, nl.bfloat16), x.astype(BF16))
    assert nl.static_cast(x, np.int32).dtype == np.int32 and nl.static_cast(2.7, np.int32) == 2


@pytest.mark.parametrize("shape", [(1, 1), (1, 12), (8, 1), (12,)])
def test_broadcast_to(shape):
    x = sample(shape, FP32, 4)
    if len(shape) == 1:
        x = x[None]
    close(tiles(lambda t: nl.broadcast_to(t, shape=(8, 12)), x), np.broadcast_to(x, (8, 12)))


def test_broadcast_makes_a_new_tile():
    x = sample((8, 1), FP32, 5)

    def body(t):
        assert nl.broadcast_to(t, shape=(8, 1)) is t
        wide = nl.broadcast_to(t, shape=(8, 3))
        wide[:, 1:2] = 7.0
        return wide

    close(tiles(body, x), np.concatenate([x, np.full_like(x, 7), x], 1))
    close(
        tiles(lambda t: nl.broadcast_to(nl.expand_dims(t, 2), shape=(8, 1, 2)), x),
        np.broadcast_to(x[:, :, None], (8, 1, 2)),
    )
    fails("", lambda x: tiles_store(nl.broadcast_to(nl.load(x), shape=(16, 3))), x)


def tiles_store(tile):
    out = nl.ndarray(tile.shape, tile.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


def test_expand_dims():
    x = sample((8, 3), FP32, 6)
    close(tiles(lambda t: nl.expand_dims(t, 2), x), x[:, :, None])
    close(tiles(lambda t: nl.expand_dims(t, 1), x), x[:, None])
    fails(
        "err_leading_dimension_of_tensor_must_be_partition",
        lambda x: tiles_store(nl.expand_dims(nl.load(x), 0)),
        x,
    )


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS], ids=str)
def test_where(dtype):
    c = np.array([[1, 0, 2, 0], [0, 0, 3, 1]], dtype)
    x, y = sample((2, 4), FP32, 7), sample((2, 4), FP32, 8)
    close(tiles(nl.where, c, x, y), np.where(c != 0, x, y))
    close(tiles(lambda c, x: nl.where(c, x, -1.5), c, x), np.where(c != 0, x, np.float32(-1.5)))
    close(tiles(lambda c, x: nl.where(c, 0, x), c, x), np.where(c != 0, 0, x))
    close(tiles(lambda c, x: nl.where(c, x[:, 0:1], x), c, x), np.where(c != 0, x[:, :1], x))
    close(tiles(lambda c, x: nl.where(c[0:1], x, 0.0), c, x), np.where(c[:1] != 0, x, 0))


def test_where_dtypes():
    c = np.array([[1, 0]], np.uint8)
    big = np.array([[2**30 + 1, 5]], np.int32)
    got = tiles(lambda c, x: nl.where(c, x, 7), c, big)
    assert got.dtype == np.int32 and got.tolist() == [[2**30 + 1, 7]]
    half = sample((1, 2), FP16, 9)
    assert tiles(lambda c, x: nl.where(c, x, np.float16(1)), c, half).dtype == np.float16
    assert tiles(lambda c, x: nl.where(c, x, 1.0), c, half).dtype == np.float32
    assert tiles(lambda c, x: nl.where(c, x, x, dtype=nl.bfloat16), c, half).dtype == BF16


def test_where_of_an_index_comparison():
    x = sample((8, 12), FP32, 10)

    def body(t):
        i, j = nl.mgrid[0:8, 0:12]
        return nl.where(j <= i, t, -9.0)

    close(tiles(body, x), np.where(np.tri(8, 12, dtype=bool), x, -9))

    def program(x):
        out = nl.ndarray((3, 8, 12), x.dtype, buffer=nl.shared_hbm)
        for k in nl.affine_range(3):
            nl.store(out[k], nl.where(k > 1, nl.load(x), 1.0))
        return out

    close(run(program, x), np.stack([np.ones_like(x), np.ones_like(x), x]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("m,k,n", [(16, 32, 40), (128, 128, 512), (1, 5, 1), (7, 128, 3)])
def test_matmul(dtype, m, k, n):
    a, b = sample((m, k), dtype, 11, -1, 1), sample((k, n), dtype, 12, -1, 1)
    want = a.astype(np.float64) @ b.astype(np.float64)
    got = tiles(nl.matmul, a, b)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)
    turned = tiles(lambda x, y: nl.matmul(x, y, transpose_x=True), np.ascontiguousarray(a.T), b)
    assert turned.tobytes() == got.tobytes()


def test_matmul_accumulates_in_psum():
    a, b = sample((3, 32, 16), BF16, 13, -1, 1), sample((3, 32, 20), BF16, 14, -1, 1)

    def kernel(a, b):
        out = nl.ndarray((16, 20), nl.float32, buffer=nl.shared_hbm)
        acc = nl.zeros((16, 20), nl.float32, buffer=nl.psum)
        for k in nl.affine_range(3):
            acc += nl.matmul(nl.load(a[k]), nl.load(b[k]), transpose_x=True)
        nl.store(out, acc)
        return out

    want = np.einsum("kim,kin->mn", a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(run(kernel, a, b), want, rtol=1e-5, atol=1e-4)
    assert ops(kernel, a, b) == ["memset", "dma_copy", "dma_copy", "nc_matmul", "tensor_copy", "dma_copy"]


def test_matmul_of_psum_operands_and_operand_masks():
    a, b = sample((16, 24), FP32, 15, -1, 1), sample((24, 8), FP32, 16, -1, 1)
    want = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(
        tiles(lambda x, y: nl.matmul(nl.transpose(x), y, transpose_x=True), a, b), want, atol=1e-5
    )

    def masked(x, y):
        _i, j = nl.mgrid[0:16, 0:24]
        p, _ = nl.mgrid[0:24, 0:8]
        return nl.matmul(x[j < 20], y[p < 20])

    np.testing.assert_allclose(
        tiles(masked, a, b), a[:, :20].astype(np.float64) @ b[:20].astype(np.float64), atol=1e-5
    )


@pytest.mark.parametrize("checks", ["full", "off"])
@pytest.mark.parametrize("n", [16, 64])
def test_a_mask_of_a_matmul_may_be_that_of_the_stationary_operand(n, checks):
    """A row mask counts the columns of the product; but one that the stationary operand has itself, and one that only that operand is as
    wide as, counts those of the stationary operand, which are the rows of the product."""
    a, b = sample((128, 40), FP32, 19, -1, 1), sample((128, n), FP32, 20, -1, 1)

    def kernel(a, b):
        out = nl.ndarray((48, n), a.dtype, buffer=nl.shared_hbm)
        weights, moving = nl.load(a), nl.load(b)
        for i in nl.affine_range(3):
            column = nl.arange(16)[None, :] + 16 * i
            stationary = weights[nl.arange(128)[:, None], column]
            acc = nl.zeros((16, n), np.float32, buffer=nl.psum)
            acc[...] += nisa.nc_matmul(
                stationary[column < 40] if n == 16 else stationary, moving, mask=column < 40
            )
            nl.store(out[nl.arange(16)[:, None] + 16 * i, nl.arange(n)[None, :]], acc)
        return out

    want = np.zeros((48, n))
    want[:40] = a.T.astype(np.float64) @ b
    np.testing.assert_allclose(kernel_of(kernel).simulate(a, b, checks=checks), want, atol=1e-4)


@pytest.mark.parametrize("checks", ["full", "off"])
def test_what_an_operand_leaves_out_of_the_sum_the_other_does_not_bring(checks):
    """Rows of the contraction beyond the mask of one operand are unwritten in the other: they take no part."""
    a, b = sample((80, 32), FP32, 21, -1, 1), sample((80, 64), FP32, 22, -1, 1)

    def kernel(a, b, left):
        out = nl.ndarray((32, 64), a.dtype, buffer=nl.shared_hbm)
        x, y = (nl.ndarray((nl.par_dim(128), n), a.dtype, buffer=nl.sbuf) for n in (32, 64))
        x[0:80], y[0:80] = nl.load(a), nl.load(b)
        row = nl.arange(128)[:, None]
        inside = -row + 79 >= 0
        x, y = x[row, nl.arange(32)[None, :]], y[row, nl.arange(64)[None, :]]
        nl.store(out, nisa.nc_matmul(x[inside], y) if left else nisa.nc_matmul(x, y[inside]))
        return out

    for left in (False, True):
        got = kernel_of(kernel).simulate(a, b, left, checks=checks)
        np.testing.assert_allclose(got, a.T.astype(np.float64) @ b, atol=1e-4)


def test_a_condition_on_an_operand_is_one_of_the_instruction():
    x = sample((4, 16, 8), FP32, 23)

    def kernel(x):
        out = nl.ndarray((4, 8, 16), x.dtype, buffer=nl.shared_hbm)
        turned = nl.zeros((8, 16), x.dtype)
        for i in nl.sequential_range(4):
            rows, columns = nl.arange(16)[:, None], nl.arange(8)[None, :]
            turned[...] = nl.load_transpose2d(x[i + 1, rows, columns][i < 3])
            nl.store(out[i], turned)
        return out

    want = [*x[1:].transpose(0, 2, 1), x[3].T]
    for checks in ("full", "off"):
        np.testing.assert_array_equal(kernel_of(kernel).simulate(x, checks=checks), want)


def test_matmul_of_a_partly_loaded_tile():
    a, b = sample((100, 24), FP32, 17, -1, 1), sample((24, 8), FP32, 18, -1, 1)

    def kernel(a, b):
        out = nl.ndarray((100, 8), a.dtype, buffer=nl.shared_hbm)
        i, j = nl.mgrid[0:128, 0:24]
        o, q = nl.mgrid[0:128, 0:8]
        t = nl.load(a[i, j], mask=i < 100)
        nl.store(out[o, q], nl.matmul(t[i < 100], nl.load(b)), mask=o < 100)
        return out

    np.testing.assert_allclose(run(kernel, a, b), a.astype(np.float64) @ b.astype(np.float64), atol=1e-5)


def test_matmul_errors():
    a, b = sample((16, 24)), sample((16, 8))
    assert "contracted" in str(fails("", lambda a, b: tiles_store(nl.matmul(nl.load(a), nl.load(b))), a, b))
    fails(
        "err_unsupported_memory", lambda a, b: tiles_store(nl.matmul(a, nl.load(b), transpose_x=True)), a, b
    )


@pytest.mark.parametrize("dtype", [*FLOATS, np.dtype(np.int32)], ids=str)
@pytest.mark.parametrize("shape", [(128, 128), (3, 100), (1, 1)])
def test_transpose(dtype, shape):
    x = sample(shape, dtype, 19)
    close(tiles(nl.transpose, x), x.T)
    close(tiles(lambda t: nl.transpose(nl.transpose(t)), x), x)


def test_transpose_errors():
    fails(
        "err_exceed_max_supported_dimension",
        lambda x: tiles_store(nl.transpose(nl.load(x))),
        sample((4, 2, 2)),
    )
    fails(
        "err_size_of_dimension_exceed_arch_limit",
        lambda x: tiles_store(nl.transpose(nl.load(x))),
        sample((4, 129)),
    )


def test_gather_flattened():
    x, i = sample((8, 3, 5), FP32, 20), np.random.default_rng(0).integers(0, 15, (8, 7)).astype(np.uint32)
    close(tiles(nl.gather_flattened, x, i), np.take_along_axis(x.reshape(8, -1), i.astype(int), 1))


# ---- random numbers ----
def test_rand():
    def kernel(x):
        out = nl.ndarray((2, 128, 200), nl.float32, buffer=nl.shared_hbm)
        for i in nl.static_range(2):
            nl.store(out[i], nl.rand((nl.par_dim(128), 200)))
        return out

    got = run(kernel, sample((1, 1)))
    assert (
        got.min() >= 0 and got.max() < 1 and abs(got.mean() - 0.5) < 0.01 and abs(got.var() - 1 / 12) < 0.005
    )
    assert (got[0] != got[1]).mean() > 0.99
    assert got.tobytes() == run(kernel, sample((1, 1))).tobytes()
    assert tiles(lambda t: nl.rand((4, 4), dtype=nl.bfloat16), sample((1, 1))).dtype == BF16


def test_seed_repeats_the_sequence():
    def kernel(seed):
        out = nl.ndarray((3, 16, 16), nl.float32, buffer=nl.shared_hbm)
        for i in nl.static_range(3):
            nl.random_seed(nl.load(seed) if i == 0 else 42 + (i == 2))
            nl.store(out[i], nl.rand((16, 16)))
        return out

    a, b, c = run(kernel, np.array([[42]], np.int32))
    assert (a == b).all() and (a != c).mean() > 0.99


def test_dropout():
    x = sample((64, 100), FP32, 21, 1, 2)
    got = tiles(lambda t: nl.dropout(t, 0.25), x)
    kept = got != 0
    close(got[kept], x[kept])
    assert abs(kept.mean() - 0.75) < 0.03
    assert (tiles(lambda t: nl.dropout(t, rate=1.0), x) == 0).all()
    close(tiles(lambda t: nl.dropout(t, nl.zeros((1, 1), nl.float32)), x), x)
    close(tiles(lambda t: nl.dropout(t, nl.zeros((64, 1), nl.float32)[:, 0]), x), x)


# ---- programs ----
def test_all_reduce():
    x = sample((6, 8, 5), FP32, 22)

    def kernel(x):
        i = nl.program_id(0)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        top = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        t = nl.load(x[i])
        nl.store(out[i], nl.all_reduce(t, op=np.add, program_axes=[0]))
        nl.store(top[i], nl.all_reduce(t, np.max, program_axes=[i]))
        return out, top

    out, top = run(kernel, x, grid=6)
    for i in range(6):
        close(out[i], x.astype(np.float64).sum(0), steps=8)
        close(top[i], x.max(0))


def test_all_reduce_along_one_axis():
    x = sample((2, 3, 8, 5), FP32, 23)

    def kernel(x):
        i, j = nl.program_id(0), nl.program_id(1)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out[i, j], nl.all_reduce(nl.load(x[i, j]), op=np.add, program_axes=1))
        return out

    got = run(kernel, x, grid=(2, 3))
    close(got, np.broadcast_to(x.astype(np.float64).sum(1, keepdims=True), x.shape), steps=8)

    def wrong(x):
        out = nl.ndarray((8, 5), x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.all_reduce(nl.load(x[0, 0]), op=np.add, program_axes=2))
        return out

    assert "axis" in str(fails("", wrong, x, grid=(1, 2)))


def test_sync_program():
    x = sample((4, 8, 5), FP32, 24)

    def kernel(x):
        i = nl.program_id(0)
        board = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(board[i], nl.load(x[i]) * 2.0)
        with iterators.sync_program((0,)):
            t = nl.load(board[3 - i])
        nl.store(out[i], t)
        return out, board

    out, _ = run(kernel, x, grid=4)
    close(out, x[::-1] * 2)


def test_device_print():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    text = io.StringIO()

    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        t = nl.load(x)
        assert nl.device_print("my tile", t) is None
        nl.store(out, t)
        return out

    run(kernel, x, dump_file=text)
    assert "my tile" in text.getvalue() and "5" in text.getvalue()
    assert "trace time" in str(fails("", lambda x: nl.device_print("x", 3) or tiles_store(nl.load(x)), x))


def test_transpose_is_moved_to_where_its_user_reads_it():
    a, b = sample((16, 24), BF16, 25, -1, 1), sample((24, 8), BF16, 26, -1, 1)

    def kernel(a, b):
        turned = nl.transpose(nl.load(a))
        return tiles_store(nl.matmul(turned, nl.load(b), transpose_x=True))

    np.testing.assert_allclose(run(kernel, a, b), a.astype(np.float64) @ b.astype(np.float64), atol=1e-5)

    def direct(a, b):
        turned = nisa.nc_transpose(nl.load(a))
        return tiles_store(nisa.nc_matmul(turned, nl.load(b)))

    assert ops(direct, a, b) == [
        "dma_copy",
        "nc_transpose",
        "dma_copy",
        "tensor_copy",
        "nc_matmul",
        "tensor_copy",
        "dma_copy",
    ]
    assert run(direct, a, b).tobytes() == run(kernel, a, b).tobytes()

    def product_as_operand(a, b):
        return tiles_store(nisa.nc_matmul(nisa.nc_matmul(nl.load(b), nl.load(b)), nl.load(b)[0:8]))

    fails("err_unsupported_memory", product_as_operand, a, b)
