"""The defined reduction order against a plain Python loop that follows the text of `opennki.isa.reduce`."""

import math
import warnings
from functools import reduce as fold

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opennki.isa.reduce import LANES, reduce_free, reduce_partition, scan_free

ARITHMETIC = ["add", "subtract", "multiply", "maximum", "minimum"]
LENGTHS = [1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 100, 128, 513]


@pytest.fixture(autouse=True)
def nothing_may_warn():
    with np.errstate(all="warn"), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def step(op, a, b):
    with np.errstate(all="ignore"):
        if op in ("add", "subtract"):
            return np.float32(a + b)
        if op == "multiply":
            return np.float32(a * b)
    if math.isnan(a) or math.isnan(b):
        return np.float32(math.nan)
    return max(a, b) if op == "maximum" else min(a, b)


IDENTITY = {"add": -0.0, "subtract": -0.0, "multiply": 1.0, "maximum": -math.inf, "minimum": math.inf}


def by_the_text(values, op):
    """The defined order, one float32 at a time."""
    values = [np.float32(v) for v in values]
    if op == "subtract":
        values = values[:1] + [-v for v in values[1:]]
    lanes = [np.float32(IDENTITY[op])] * 32
    for i, v in enumerate(values):
        lanes[i % 32] = step(op, lanes[i % 32], v)
    for half in (16, 8, 4, 2, 1):
        lanes = [step(op, lanes[j], lanes[j + half]) for j in range(half)]
    return lanes[0]


def same(got, want):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert got.shape == want.shape
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], want.view(np.uint32)[~nan])


def values(shape, seed=0, op="add"):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)
    if op == "multiply":
        x = np.exp(rng.standard_normal(shape) / 4) * np.sign(x)
    return x.astype(np.float32)


@pytest.mark.oracle
@pytest.mark.parametrize("op", ARITHMETIC)
@pytest.mark.parametrize("n", LENGTHS)
def test_free_axis(op, n):
    x = values((3, n), n, op)
    same(reduce_free(x, op, 1), [by_the_text(row, op) for row in x.tolist()])


@pytest.mark.oracle
@pytest.mark.parametrize("op", ARITHMETIC)
@pytest.mark.parametrize("p", LENGTHS[:16])
def test_partition_axis(op, p):
    x = values((p, 3), p, op)
    got = reduce_partition(x, op)
    assert got.shape == (1, 3)
    same(got[0], [by_the_text(column, op) for column in x.T.tolist()])


@pytest.mark.oracle
@pytest.mark.parametrize("rows", [1, 2, 128])
def test_many_blocks(rows):
    n = 4128 if rows == 128 else 131104 // rows  # more than one transposed block, and a tail
    x = values((rows, n), 1)
    got = reduce_free(x, "add", 1)
    for row in (0, rows - 1):
        lanes = np.full(LANES, -0.0, np.float32)
        for start in range(0, n, LANES):
            part = x[row, start : start + LANES]
            lanes[: len(part)] += part
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        same(got[row], lanes[0])
    np.testing.assert_allclose(got, x.astype(np.float64).sum(1), rtol=1e-3, atol=0.5)


@pytest.mark.oracle
@pytest.mark.parametrize("op", ARITHMETIC)
def test_lanes_carry_over_from_block_to_block(op):
    x = values((256, 32 * 30 + 5), 8, op)
    if op == "maximum":
        x = -np.abs(x)  # an accumulator that starts at zero would win
    if op == "minimum":
        x = np.abs(x)
    got = reduce_free(x, op, 1)
    for row in (0, 255):
        same(got[row], by_the_text(x[row].tolist(), op))


def layouts(x):
    yield np.asfortranarray(x)
    yield np.repeat(x, 2, axis=-1)[..., ::2]
    yield x[::-1, ..., ::-1].copy()[::-1, ..., ::-1]  # negative strides
    yield np.ascontiguousarray(np.moveaxis(x, 0, -1)).transpose(x.ndim - 1, *range(x.ndim - 1))
    padded = np.zeros((x.shape[0] + 1, *x.shape[1:]), x.dtype)
    padded[1:] = x
    yield padded[1:]


@pytest.mark.parametrize("op", ARITHMETIC)
@pytest.mark.parametrize("shape", [(4, 100), (128, 7), (5, 3, 33), (2, 2, 3, 40), (33, 1), (1, 65), (40, 64)])
def test_memory_layout_changes_no_bit(op, shape):
    x = values(shape, 2, op)
    free = tuple(range(1, x.ndim))
    plain, across = reduce_free(x, op, free), reduce_partition(x, op)
    for y in layouts(x):
        assert (y == x).all()
        same(reduce_free(y, op, free), plain)
        same(reduce_partition(y, op), across)
    wide = np.broadcast_to(x[:, :1], shape)  # a 0-stride axis
    same(reduce_free(wide, op, free), reduce_free(wide.copy(), op, free))
    tall = np.broadcast_to(x[:1], shape)
    same(reduce_partition(tall, op), reduce_partition(tall.copy(), op))


@pytest.mark.oracle
@pytest.mark.parametrize("axes", [1, 2, 3, -1, (1, 2), (2, 3), (1, 3), (3, 1), (1, 2, 3)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_axes(axes, keepdims):
    x = values((4, 5, 6, 7), 3)
    for op, fn in (("add", np.sum), ("maximum", np.max), ("minimum", np.min)):
        got = reduce_free(x, op, axes, keepdims)
        want = fn(x.astype(np.float64), axis=axes, keepdims=keepdims)
        assert got.shape == want.shape and got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-2)
    same(reduce_free(x, "add", (3, 1)), reduce_free(x, "add", (1, 3)))  # row-major, whatever the order of axes
    moved = x.transpose(0, 2, 1, 3).reshape(4, 6, 35)
    same(
        reduce_free(x, "add", (1, 3)),
        np.array([[by_the_text(v, "add") for v in row] for row in moved.tolist()]),
    )


@pytest.mark.oracle
@pytest.mark.parametrize("op", ["logical_and", "logical_or", "logical_xor"])
def test_logical(op):
    rng = np.random.default_rng(4)
    fn = {"logical_and": all, "logical_or": any, "logical_xor": lambda v: sum(v) % 2 == 1}[op]
    for n in (1, 7, 33, 100):
        x = (rng.random((20, n)) < (0.95 if op == "logical_and" else 0.05)).astype(np.float32)
        x[0] = [math.nan] * n
        x[1] = -0.0
        x[2] = 1e-45
        want = [float(fn([v != 0 for v in row])) for row in x.tolist()]
        got = reduce_free(x, op, 1)
        assert got.dtype == np.float32 and got.tolist() == want
        assert reduce_partition(x.T, op).tolist() == [want]
        assert reduce_free((x != 0).astype(np.int8), op, 1).tolist() == want


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint32", "int32"])
@pytest.mark.parametrize("op", ["bitwise_and", "bitwise_or", "bitwise_xor"])
def test_bitwise(op, dtype):
    fn = {"bitwise_and": int.__and__, "bitwise_or": int.__or__, "bitwise_xor": int.__xor__}[op]
    info = np.iinfo(dtype)
    for n in (1, 3, 33, 70):
        x = np.random.default_rng(n).integers(info.min, info.max, (5, n), dtype, endpoint=True)
        x = x | np.array(5, dtype) if op == "bitwise_and" else x
        want = [fold(fn, row) for row in x.tolist()]
        got = reduce_free(x, op, 1)
        assert got.dtype == np.dtype(dtype) and got.tolist() == want
        assert reduce_partition(x.T, op).tolist() == [want]


def test_special_values():
    zeros = np.full((2, 70), -0.0, np.float32)
    for got in (
        reduce_free(zeros, "add", 1),
        reduce_free(zeros[:, :3], "add", 1),
        reduce_partition(zeros, "add"),
    ):
        assert np.signbit(got).all() and not got.any()
    for n in (3, 70):  # -0 - 0 - 0 ... is -0
        x = np.zeros((1, n), np.float32)
        x[0, 0] = -0.0
        assert np.signbit(reduce_free(x, "subtract", 1)).all() and np.signbit(reduce_partition(x.T, "subtract")).all()
    x = np.ones((1, 40), np.float32)
    x[0, 37] = math.nan
    for op in ARITHMETIC:
        assert math.isnan(reduce_free(x, op, 1)[0])
        assert math.isnan(reduce_partition(x.T, op)[0, 0])
    x[0, 37] = math.inf
    assert [reduce_free(x, op, 1)[0] for op in ARITHMETIC] == [math.inf, -math.inf, math.inf, math.inf, 1.0]
    x[0, 5] = -math.inf
    assert math.isnan(reduce_free(x, "add", 1)[0])
    big = np.full((1, 64), 3e38, np.float32)
    assert reduce_free(big, "add", 1)[0] == math.inf
    tiny = np.full((1, 64), 1e-45, np.float32)
    assert reduce_free(tiny, "add", 1)[0] == np.float32(64) * np.float32(1e-45)


@pytest.mark.parametrize(("op", "want"), list(IDENTITY.items()) + [("logical_and", 1.0), ("logical_or", 0.0)])
def test_empty_extents_give_the_identity(op, want):
    got = reduce_free(np.zeros((3, 0), np.float32), op, 1)
    assert got.tolist() == [want] * 3 and got.dtype == np.float32
    assert reduce_partition(np.zeros((0, 2), np.float32), op).tolist() == [[want] * 2]
    assert reduce_free(np.zeros((0, 4), np.float32), op, 1).shape == (0,)


def test_operands_stay_as_they_are():
    x = values((4, 100))
    before = x.copy()
    x.setflags(write=False)
    for op in ARITHMETIC:
        reduce_free(x, op, 1)
        reduce_free(x[:, :7], op, 1)
        reduce_partition(x, op)
    assert (x == before).all()
    y = values((40, 3))
    got = reduce_partition(y, "add")
    got += 1
    one = reduce_free(values((3, 1)), "add", 1)
    one += 1
    assert (y == values((40, 3))).all()


def test_operators_by_function():
    x = values((3, 50))
    same(reduce_free(x, np.add, 1), reduce_free(x, "add", 1))
    same(reduce_free(x, np.max, 1), reduce_free(x, "maximum", 1))


def test_bad_input():
    x = values((3, 4, 5))
    for axes in (0, (0, 1), -3, 3, (1, 1), (1, -2), ()):
        with pytest.raises(ValueError, match="reduce_free"):
            reduce_free(x, "add", axes)
    for op in ("divide", "exp", "left_shift", "equal"):
        with pytest.raises(ValueError, match="does not reduce; operators that do are add"):
            reduce_free(x, op, 1)
        with pytest.raises(ValueError, match="does not reduce"):
            reduce_partition(x, op)
    with pytest.raises(TypeError, match="accumulates in float32, got float64"):
        reduce_free(x.astype(np.float64), "add", 1)
    with pytest.raises(TypeError, match="accumulates in float32, got int32"):
        reduce_partition(x.astype(np.int32), "maximum")
    with pytest.raises(TypeError, match="bits of integers"):
        reduce_free(x, "bitwise_or", 1)
    with pytest.raises(ValueError, match="no partition axis"):
        reduce_partition(np.float32(1) * np.ones((), np.float32), "add")
    with pytest.raises(TypeError, match="not an operator"):
        reduce_free(x, "plus", 1)


# ---- scan ----

SCAN = {
    "add": lambda a, b: np.float32(a + b),
    "subtract": lambda a, b: np.float32(a - b),
    "multiply": lambda a, b: np.float32(a * b),
    "maximum": lambda a, b: max(a, b),
    "minimum": lambda a, b: min(a, b),
    "divide": lambda a, b: np.float32(a / b),
    "less": lambda a, b: np.float32(a < b),
    "logical_and": lambda a, b: np.float32(bool(a) and bool(b)),
}


def scan_by_the_text(d0, d1, initial, op0, op1, reverse0, reverse1):
    out = np.empty_like(d0)
    for p in range(d0.shape[0]):
        r = np.float32(initial[p])
        for i in range(d0.shape[1]):
            t = SCAN[op0](r, d0[p, i]) if reverse0 else SCAN[op0](d0[p, i], r)
            r = SCAN[op1](d1[p, i], t) if reverse1 else SCAN[op1](t, d1[p, i])
            out[p, i] = r
    return out


@pytest.mark.oracle
@pytest.mark.parametrize("op0", SCAN)
@pytest.mark.parametrize("op1", SCAN)
def test_scan(op0, op1):
    rng = np.random.default_rng(6)
    d0, d1 = (rng.uniform(0.5, 1.5, (3, 12)).astype(np.float32) for _ in range(2))
    initial = rng.uniform(0.5, 1.5, (3, 1)).astype(np.float32)
    for reverse in ((False, False), (True, False), (False, True), (True, True)):
        with np.errstate(all="ignore"):
            want = scan_by_the_text(d0, d1, initial[:, 0], op0, op1, *reverse)
        got = scan_free(d0, d1, initial, op0, op1, *reverse)
        assert got.dtype == np.float32
        same(got, want)
        spread = np.repeat(d1, 2, 1)[:, ::2]
        same(scan_free(np.asfortranarray(d0), spread, initial, op0, op1, *reverse), want)


def test_scan_shapes_and_scalars():
    x = np.ones((4, 3, 5), np.float32)
    got = scan_free(x, x, 2.0, "multiply", "add")
    assert got.shape == x.shape
    assert got.reshape(4, -1).tolist() == [[3.0 + i for i in range(15)]] * 4
    assert scan_free(x[:, :0], x[:, :0], 0.0, "multiply", "add").shape == (4, 0, 5)
    initial = np.arange(4, dtype=np.float32)
    assert scan_free(x, x, initial[:, None], np.multiply, np.add)[:, 0, 0].tolist() == [1, 2, 3, 4]
    assert initial.tolist() == [0, 1, 2, 3]
    assert scan_free(x, x, 3e38, "multiply", "multiply").max() == np.float32(3e38)
    assert math.isinf(scan_free(x * np.float32(10), x, 3e38, "multiply", "add")[0, 0, 0])


def test_scan_refuses():
    x = np.ones((4, 3), np.float32)
    with pytest.raises(ValueError, match="one shape"):
        scan_free(x, x[:, :2], 0.0, "add", "add")
    with pytest.raises(ValueError, match="initial has 3 elements"):
        scan_free(x, x, np.zeros(3, np.float32), "add", "add")
    for op in ("exp", "bitwise_or"):
        with pytest.raises(ValueError, match="not an arithmetic operator of two operands"):
            scan_free(x, x, 0.0, op, "add")
        with pytest.raises(ValueError, match="not an arithmetic operator of two operands"):
            scan_free(x, x, 0.0, "add", op)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=80))
@settings(max_examples=60)
def test_random_extents(numbers):
    x = np.array([numbers], np.float32)
    for op in ("add", "maximum"):
        want = by_the_text(numbers, op)
        got = reduce_free(x, op, 1)[0]
        assert got == want or (math.isnan(got) and math.isnan(want))
        got = reduce_partition(x.T, op)[0, 0]
        assert got == want or (math.isnan(got) and math.isnan(want))
