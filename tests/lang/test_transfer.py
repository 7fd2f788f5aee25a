"""nl.load, nl.store, nl.load_transpose2d, nl.atomic_rmw."""

from __future__ import annotations

import numpy as np
import pytest

from opennki.dialects.neuronxcc import isa as nisa
from opennki.dialects.neuronxcc import language as nl

from .harness import BF16, FLOATS, FP16, FP32, INTS, close, fails, kernel_of, ops, run, sample

pytestmark = pytest.mark.oracle


def out_like(x, dtype=None):
    return nl.ndarray(x.shape, dtype or x.dtype, buffer=nl.shared_hbm)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS], ids=str)
def test_there_and_back_keeps_bits(dtype):
    x = sample((100, 3, 5), dtype, 1)

    def kernel(x):
        out = out_like(x)
        nl.store(out, nl.load(x))
        return out

    got = run(kernel, x)
    assert got.dtype == x.dtype and got.tobytes() == x.tobytes()


@pytest.mark.parametrize("to", [BF16, FP16, FP32, np.dtype(np.int32)], ids=str)
def test_casts(to):
    x = sample((16, 7), FP32, 2)

    def on_load(x):
        t = nl.load(x, dtype=to)
        assert t.dtype == to
        out = out_like(x, to)
        nl.store(out, t)
        return out

    def on_store(x):
        out = out_like(x, to)
        nl.store(out, nl.load(x))
        return out

    want = np.rint(x).astype(to) if to.kind == "i" else x.astype(to)
    close(run(on_load, x), want)
    close(run(on_store, x), want)


def test_shapes_of_vectors_and_scalars():
    x = sample((50,), FP32, 3)

    def kernel(x):
        vector, element = nl.load(x), nl.load(x[7])
        assert vector.shape == (50, 1) and element.shape == (1, 1)
        out = nl.ndarray((50,), x.dtype, buffer=nl.shared_hbm)
        one = nl.ndarray((1,), x.dtype, buffer=nl.shared_hbm)
        nl.store(out, vector)
        nl.store(one[0], element)
        return out, one

    out, one = run(kernel, x)
    close(out, x)
    close(one, x[7:8])


def test_row_into_a_vector():
    x = sample((1, 300), FP32, 4)

    def kernel(x):
        out = nl.ndarray((300,), x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out

    close(run(kernel, x), x[0])


def test_reshaping_and_broadcasting_stores():
    x, row, col = sample((8, 12), FP32, 5), sample((1, 12), FP32, 6), sample((8, 1), FP32, 7)

    def kernel(x, row, col):
        a = nl.ndarray((8, 3, 4), x.dtype, buffer=nl.shared_hbm)
        b = nl.ndarray((2, 8, 12), x.dtype, buffer=nl.shared_hbm)
        c, d = out_like(x), out_like(x)
        e = nl.ndarray((8, 1, 12), x.dtype, buffer=nl.shared_hbm)
        t = nl.load(x)
        nl.store(a, t)
        nl.store(b[1], t)
        nl.store(b[0], 3)
        nl.store(c, nl.load(row))
        nl.store(d, nl.load(col))
        nl.store(e, t)
        return a, b, c, d, e

    a, b, c, d, e = run(kernel, x, row, col)
    close(a, x.reshape(8, 3, 4))
    close(b, np.stack([np.full_like(x, 3), x]))
    close(c, np.broadcast_to(row, x.shape))
    close(d, np.broadcast_to(col, x.shape))
    close(e, x[:, None])


def test_number_fills_more_rows_than_partitions():
    def kernel(x):
        out = nl.ndarray((300, 4), nl.bfloat16, buffer=nl.shared_hbm)
        nl.store(out, value=np.float32(1.5))
        return out

    close(run(kernel, sample((1, 1))), np.full((300, 4), 1.5))


def test_psum_is_copied():
    x = sample((32, 20), FP32, 8)

    def kernel(x):
        out = nl.ndarray((20, 32), x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.transpose(nl.load(x)))
        return out

    close(run(kernel, x), x.T)
    assert ops(kernel, x) == ["dma_copy", "nc_transpose", "tensor_copy", "dma_copy"]


@pytest.mark.parametrize("n", [1, 127, 128, 129, 300])
def test_masked_tiles(n):
    x = sample((n, 9), FP32, 9)

    def kernel(x):
        out = out_like(x)
        i, j = nl.arange(128)[:, None], nl.arange(9)[None, :]
        for t in nl.affine_range((n + 127) // 128):
            rows = t * 128 + i
            tile = nl.load(x[rows, j], mask=rows < n)
            nl.store(out[rows, j], nl.exp(tile, mask=rows < n), mask=rows < n)
        return out

    close(run(kernel, x), np.exp(x.astype(np.float64)), steps=8)


def test_masked_load_is_assigned_where_it_is_defined():
    x = sample((100, 9), FP32, 10)

    def kernel(x):
        out = nl.ndarray((128, 9), x.dtype, buffer=nl.shared_hbm)
        t = nl.zeros((128, 9), x.dtype)
        i, j = nl.mgrid[0:128, 0:9]
        t[...] = nl.load(x[i, j], mask=i < 100)
        nl.store(out, t)
        return out

    close(run(kernel, x), np.concatenate([x, np.zeros((28, 9), np.float32)]))


def test_load_into_a_block_tensor_takes_no_copy():
    x = sample((4, 32, 6), FP32, 11)

    def kernel(x):
        out = out_like(x)
        t = nl.ndarray((4, nl.par_dim(32), 6), x.dtype)
        for i in nl.affine_range(4):
            t[i] = nl.load(x[i])
        for i in nl.affine_range(4):
            nl.store(out[i], t[i])
        return out

    close(run(kernel, x), x)
    assert ops(kernel, x) == ["dma_copy", "dma_copy"]


def test_gather_and_scatter_rows():
    x, index = sample((64, 6), FP32, 12), np.array([[5], [0], [63], [5]], np.int32)

    def kernel(x, index):
        out = nl.ndarray((10, 6), x.dtype, buffer=nl.shared_hbm)
        where = nl.ndarray((64, 6), x.dtype, buffer=nl.shared_hbm)
        nl.store(where, 0.0)
        j = nl.arange(6)[None, :]
        idx = nl.load(index)
        rows = nl.load(x[idx, j])
        nl.store(out[0:4], rows)
        nl.store(out[4:10], 1.0)
        nl.store(where[idx[0:3], j], rows[0:3])
        return out, where

    out, where = run(kernel, x, index)
    close(out[:4], x[index[:, 0]])
    want = np.zeros_like(x)
    want[[5, 0, 63]] = x[[5, 0, 63]]
    close(where, want)


def test_atomic_rmw():
    table, index, add = (
        sample((16, 6), FP32, 13),
        np.array([[3], [9], [1]], np.int32),
        sample((3, 6), FP32, 14),
    )

    def kernel(table, index, add):
        out = out_like(table)
        nl.store(out, nl.load(table))
        nl.atomic_rmw(out[nl.load(index), nl.arange(6)[None, :]], nl.load(add), np.add)
        return out

    want = table.copy()
    want[index[:, 0]] += add
    close(run(kernel, table, index, add), want)


@pytest.mark.parametrize("dtype", [FP32, BF16, np.dtype(np.int32), np.dtype(np.uint8)], ids=str)
@pytest.mark.parametrize("shape", [(5, 128), (300, 7), (1, 1)])
def test_load_transpose2d(dtype, shape):
    x = sample(shape, dtype, 15)

    def kernel(x):
        out = nl.ndarray(x.shape[::-1], x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load_transpose2d(x))
        return out

    close(run(kernel, x), x.T)


def test_load_transpose2d_at_a_runtime_offset():
    x = sample((40, 8), FP32, 16)

    def kernel(x, at):
        out = nl.ndarray((8, 16), x.dtype, buffer=nl.shared_hbm)
        rows, columns = nl.arange(16)[:, None], nl.arange(8)[None, :]
        nl.store(out, nl.load_transpose2d(x[rows + nl.load(at) * 4, columns]))
        return out

    for checks in ("full", "off"):
        for start in (0, 6):
            close(kernel_of(kernel).simulate(x, np.array([[start]], np.int32), checks=checks), x[4 * start : 4 * start + 16].T)
        with pytest.raises(IndexError):
            kernel_of(kernel).simulate(x, np.array([[7]], np.int32), checks=checks)


@pytest.mark.parametrize("checks", ["full", "fast", "off"])
def test_rows_outside_are_left_out(checks):
    """mode=oob_mode.skip of nl.load and nl.store: rows whose index is outside keep what was there."""
    table = sample((20, 6), FP32, 17)
    index = np.array([[3], [-1], [19], [20], [7]], np.int32)

    def kernel(table, index):
        out = nl.ndarray((20, 6), table.dtype, buffer=nl.shared_hbm)
        got = nl.ndarray((5, 6), table.dtype, buffer=nl.shared_hbm)
        at, columns = nl.load(index), nl.arange(6)[None, :]
        nl.store(out, nl.zeros((20, 6), table.dtype))
        rows = nl.ndarray((2, nl.par_dim(5), 6), table.dtype, buffer=nl.sbuf)
        for i in nl.affine_range(2):
            rows[i, 0:5, 0:6] = nisa.memset((5, 6), value=-4.0, dtype=table.dtype)
            rows[i, nl.arange(5)[:, None], columns] = nl.load(table[at, columns], mode=nisa.oob_mode.skip)
        nl.store(got, rows[1])
        nl.store(out[at, columns], rows[0], mode=nisa.oob_mode.skip)
        return got, out

    got, out = kernel_of(kernel).simulate(table, index, checks=checks)
    good = [0, 2, 4]
    want, left = np.full((5, 6), -4.0), np.zeros((20, 6))
    want[good] = left[index[good, 0]] = table[index[good, 0]]
    close(got, want)
    close(out, left)
    for way in ("load", "store"):

        def strict(table, index, way=way):
            out = nl.ndarray((20, 6), table.dtype, buffer=nl.shared_hbm)
            at, columns = nl.load(index), nl.arange(6)[None, :]
            nl.store(out, nl.load(table))
            if way == "load":
                nl.store(out[0:5], nl.load(table[at, columns]))
            else:
                nl.store(out[at, columns], 1.0)
            return out

        with pytest.raises(IndexError):
            kernel_of(strict).simulate(table, index, checks=checks)


def test_errors():
    x = sample((200, 8))

    def stored(fn):
        def kernel(x):
            out = nl.ndarray((8, 8), x.dtype, buffer=nl.shared_hbm)
            tile = fn(x, out)
            if tile is not None:
                nl.store(out, tile)
            return out

        return kernel

    fails("err_num_partition_exceed_arch_limit", stored(lambda x, o: nl.load(x)), x)
    fails("err_unsupported_memory", stored(lambda x, o: nl.load(nl.load(x[0:8]))), x)
    fails("err_unsupported_memory", stored(lambda x, o: nl.store(nl.load(x[0:8]), nl.load(x[0:8]))), x)
    fails("err_unsupported_memory", stored(lambda x, o: nl.store(o, x[0:8])), x)
    fails("err_store_dst_shape_smaller_than_other_shape", stored(lambda x, o: nl.load(x[0:9])), x)
    fails("err_1d_arange_not_supported", stored(lambda x, o: nl.load(x[nl.arange(8), nl.arange(8)])), x)
    fails(
        "err_unsupported_mixing_basic_advanced_tensor_indexing",
        stored(lambda x, o: nl.load(x[nl.arange(8)[:, None], 0:8])),
        x,
    )
    fails(
        "err_exceed_max_supported_dimension",
        stored(lambda x, o: nl.load_transpose2d(x.reshape((8, 25, 8)))),
        x,
    )
    fails(
        "err_num_partition_exceed_arch_limit",
        stored(lambda x, o: nl.load_transpose2d(x.reshape((8, 200)))),
        x,
    )
    fails(
        "err_tensor_access_out_of_bound",
        stored(lambda x, o: nl.load(x[nl.arange(8)[:, None] + 193, nl.arange(8)[None, :]])),
        x,
    )
    assert "np.add" in str(fails("", stored(lambda x, o: nl.atomic_rmw(o, nl.load(x[0:8]), np.multiply)), x))
    assert "runtime index" in str(
        fails("", stored(lambda x, o: nl.atomic_rmw(o, nl.load(x[0:8]), np.add)), x)
    )

    def diagonal(x, index):
        out = nl.ndarray((8, 1), x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x[nl.arange(8)[:, None], nl.load(index)]))
        return out

    fails("err_indirect_indices_free_dim", diagonal, x, np.zeros((8, 1), np.int32))
