"""Reductions of the language against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from opennki.dialects.neuronxcc import language as nl

from .harness import BF16, FLOATS, FP32, INTS, close, fails, ops, run, sample, tiles

pytestmark = pytest.mark.oracle
NUMPY = {"max": np.max, "min": np.min, "sum": np.sum, "prod": np.prod, "mean": np.mean}


def column(a):
    """On chip a tile has two dimensions at least."""
    return a.reshape(-1, 1) if a.ndim == 1 else a


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NUMPY)
def test_last_axis(name, dtype):
    x = sample((16, 33), dtype, 1, 0.8, 1.2)
    for axis in (1, -1, (1,), [1]):
        got = tiles(lambda t: getattr(nl, name)(t, axis=axis), x)  # noqa: B023
        assert got.dtype == dtype and got.shape == (16, 1)
        close(got, column(NUMPY[name](x.astype(np.float64), 1)), steps=8 if dtype == FP32 else 1.01)


@pytest.mark.parametrize("axis", [1, 2, 3, (1, 2), (2, 3), (1, 3), (1, 2, 3), -1, (-2, -1)])
@pytest.mark.parametrize("name", NUMPY)
@pytest.mark.parametrize("keep", [False, True])
def test_any_free_axes(name, axis, keep):
    x = sample((8, 3, 4, 5), FP32, 2, 0.8, 1.2)
    got = tiles(lambda t: getattr(nl, name)(t, axis, keepdims=keep), x)
    close(got, column(NUMPY[name](x.astype(np.float64), axis, keepdims=keep)), steps=8)


@pytest.mark.parametrize("axis", [1, 2, (1, 2)])
def test_var(axis):
    x = sample((8, 6, 50), FP32, 3)
    close(tiles(lambda t: nl.var(t, axis), x), column(x.astype(np.float64).var(axis)), steps=16)


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integers(dtype):
    x = sample((4, 10), dtype, 4)
    close(tiles(lambda t: nl.max(t, 1), x), x.max(1, keepdims=True))
    close(tiles(lambda t: nl.sum(t, 1, dtype=nl.int32), x), x.sum(1, keepdims=True))
    got = tiles(lambda t: nl.mean(t, 1), x)
    assert got.dtype == np.float32
    close(got, x.mean(1, keepdims=True), steps=4)
    assert tiles(lambda t: nl.var(t, 1), x).dtype == np.float32


def test_all():
    x = np.array([[1, 2, 3], [1, 0, 3], [0, 0, 0], [-1, 5, 0.5]], np.float32)
    got = tiles(lambda t: nl.all(t, 1), x)
    assert got.dtype in (np.bool_, np.uint8)
    close(got, np.array([[1], [0], [0], [1]]))
    close(
        tiles(lambda t: nl.all(t, 1, dtype=nl.float32), x[:, :1]), np.array([[1], [1], [0], [1]], np.float32)
    )


@pytest.mark.parametrize("name", NUMPY)
def test_mask_excludes_operands(name):
    x = sample((8, 20), FP32, 5, 0.8, 1.2)
    got = tiles(lambda t: getattr(nl, name)(t, 1, mask=nl.arange(20)[None, :] < 20), x)
    close(got, column(NUMPY[name](x.astype(np.float64), 1)), steps=8)
    if name != "mean":  # the mean divides by the size of the axis, masked or not
        got = tiles(lambda t: getattr(nl, name)(t, 1, mask=nl.arange(20)[None, :] < 7), x)
        close(got, column(NUMPY[name](x[:, :7].astype(np.float64), 1)), steps=8)


def softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("axis", [2, 1, (1, 2), -1])
def test_softmax(dtype, axis):
    x = sample((16, 5, 12), dtype, 6)
    got = tiles(lambda t: nl.softmax(t, axis), x)
    assert got.dtype == dtype
    close(got, softmax(x.astype(np.float64), axis if axis != -1 else 2), steps=16 if dtype == FP32 else 1.01)
    assert tiles(lambda t: nl.softmax(t, axis, compute_dtype=nl.float32), x).dtype == np.float32


def test_softmax_of_large_values():
    x = np.array([[1e4, 1e4 - 1, -1e4]], np.float32)
    close(tiles(lambda t: nl.softmax(t, 1), x), softmax(x.astype(np.float64), 1), steps=16)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("w_shape", [(1, 40), (16, 40), (16, 1), None])
def test_rms_norm(dtype, w_shape):
    x = sample((16, 40), dtype, 7)
    w = sample(w_shape or (1, 40), dtype, 8)

    def body(t, g):
        return nl.rms_norm(t, g if w_shape else None, axis=1, n=40, epsilon=1e-5)

    got = tiles(body, x, w)
    x64 = x.astype(np.float64)
    want = (
        x64
        / np.sqrt((x64 * x64).sum(1, keepdims=True) / 40 + 1e-5)
        * (w.astype(np.float64) if w_shape else 1)
    )
    assert got.dtype == dtype
    close(got, want, steps=8 if dtype == FP32 else 1.5)


def test_reduction_is_one_instruction():
    x = sample((4, 3, 5))

    def kernel(x):
        out = nl.ndarray((4, 1), x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.max(nl.load(x), (1, 2)))
        return out

    assert ops(kernel, x) == ["dma_copy", "tensor_reduce", "dma_copy"]


@pytest.mark.parametrize(
    "axis,text",
    [
        (0, "tensor_partition_reduce"),
        (5, "free axes"),
        ((1, 1), "at most once"),
        (-2, "partition"),
        ("x", "integer"),
    ],
)
def test_axis_errors(axis, text):
    def kernel(x):
        out = nl.ndarray((4, 1), x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.sum(nl.load(x), axis))
        return out

    assert text in str(fails("", kernel, sample((4, 6))))


# ---- loop_reduce ----
@pytest.mark.parametrize(
    "op,oracle", [(np.add, np.sum), (np.max, np.max), (nl.minimum, np.min), ("multiply", np.prod)]
)
@pytest.mark.parametrize("eager", [False, True])
def test_loop_reduce_into_a_tile(op, oracle, eager):
    x = sample((4, 16, 8), FP32, 9)

    def kernel(x):
        out = nl.ndarray((16, 8), x.dtype, buffer=nl.shared_hbm)
        acc = nl.ndarray((16, 8), x.dtype)
        for i in nl.affine_range(4):
            acc[...] = nl.loop_reduce(nl.load(x[i]), op, loop_indices=[i])
        nl.store(out, acc)
        return out

    close(run(kernel, x, eager=eager), oracle(x.astype(np.float64), 0), steps=8)


def test_loop_reduce_into_a_name():
    x = sample((3, 2, 16, 8), FP32, 10)

    def kernel(x):
        out = nl.ndarray((16, 8), x.dtype, buffer=nl.shared_hbm)
        acc = nl.zeros((16, 8), x.dtype)
        for i in nl.affine_range(3):
            for j in nl.affine_range(2):
                acc = nl.loop_reduce(nl.load(x[i, j]), op=np.add, loop_indices=(i, j))
        nl.store(out, acc)
        return out

    close(run(kernel, x), x.astype(np.float64).sum((0, 1)), steps=8)


def test_loop_reduce_with_other_loops_around_and_inside():
    x = sample((2, 3, 2, 16, 8), FP32, 11)

    def kernel(x):
        out = nl.ndarray((2, 2, 16, 8), nl.bfloat16, buffer=nl.shared_hbm)
        for b in nl.affine_range(2):
            acc = nl.ndarray((2, nl.par_dim(16), 8), nl.float32)
            for k in nl.affine_range(3):
                for m in nl.affine_range(2):
                    acc[m, :, 0:8] = nl.loop_reduce(
                        nl.load(x[b, k, m]), op=np.add, loop_indices=[k], dtype=nl.float32
                    )
            for m in nl.affine_range(2):
                nl.store(out[b, m], acc[m])
        return out

    close(run(kernel, x), x.astype(np.float64).sum(1), steps=1.01)


def test_loop_reduce_of_unrolled_loops():
    x = sample((2, 3, 16, 8), FP32, 12)

    def kernel(x):
        out = nl.ndarray((2, 16, 8), x.dtype, buffer=nl.shared_hbm)
        acc = nl.ndarray((16, 8), x.dtype)
        for b in nl.static_range(2):
            for k in nl.static_range(3):
                acc[...] = nl.loop_reduce(nl.load(x[b, k]), op=np.max, loop_indices=[k])
            nl.store(out[b], acc)
        return out

    close(run(kernel, x), x.max(1))


def test_loop_reduce_leaves_masked_iterations_out():
    x = sample((4, 16, 8), FP32, 13)

    def kernel(x):
        out = nl.ndarray((16, 8), x.dtype, buffer=nl.shared_hbm)
        acc = nl.ndarray((16, 8), x.dtype)
        for i in nl.affine_range(4):
            acc[...] = nl.loop_reduce(nl.load(x[i]), np.add, loop_indices=[i], mask=(i >= 2))
        nl.store(out, acc)
        return out

    close(run(kernel, x), x[2:].astype(np.float64).sum(0), steps=4)


def test_loop_reduce_of_matmuls_in_psum():
    a, b = sample((3, 32, 16), BF16, 14), sample((3, 32, 20), BF16, 15)

    def kernel(a, b):
        out = nl.ndarray((16, 20), nl.float32, buffer=nl.shared_hbm)
        acc = nl.ndarray((16, 20), nl.float32)
        for k in nl.affine_range(3):
            acc[...] = nl.loop_reduce(nl.matmul(nl.load(a[k]), nl.load(b[k]), transpose_x=True), np.add, [k])
        nl.store(out, acc)
        return out

    want = np.einsum("kim,kin->mn", a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(run(kernel, a, b), want, rtol=1e-5, atol=1e-4)


def test_loop_reduce_errors():
    x = sample((4, 16, 8))

    def body(fn):
        def kernel(x):
            out = nl.ndarray((16, 8), x.dtype, buffer=nl.shared_hbm)
            for i in nl.affine_range(4):
                nl.store(out, fn(nl.load(x[i]), i))
            return out

        return kernel

    assert "assigned" in str(fails("", body(lambda t, i: nl.exp(nl.loop_reduce(t, np.add, [i]))), x))
    assert "loop_indices" in str(fails("", body(lambda t, i: nl.loop_reduce(t, np.add, [t])), x))
    assert "identity" in str(fails("", body(lambda t, i: nl.loop_reduce(t, np.divide, [i])), x))

    def inner(x):
        out = nl.ndarray((16, 8), x.dtype, buffer=nl.shared_hbm)
        for i in nl.affine_range(2):
            for j in nl.affine_range(2):
                acc = nl.loop_reduce(nl.load(x[2 * i + j]), np.add, [i])
        nl.store(out, acc)
        return out

    assert "acc[i]" in str(fails("", inner, x))
