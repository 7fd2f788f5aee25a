"""Reports on numbers: broadcasting, casts, accumulation, low-precision matmul. Right behaviour, on kernels of our own."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tests.lang.harness import BF16, FP32, close, run, sample, tiles

from opennki import jit, simulate_kernel
from opennki.dialects.neuronxcc import language as nl
from opennki.errors import NkiError

E4M3, E4M3FN, E5M2 = (np.dtype(t) for t in (ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))


# ---- BR001: conv2d --------------------------------------------------------------------------------------------------
def conv_by_reshape(image, weights):
    """3x3 convolution; the filter taps of one loaded weight tile are split off by a reshape."""
    c_in, height, width = image.shape
    _, _taps, c_out = weights.shape
    blocks = c_out // 128
    rows, cols = height - 2, width - 2
    out = nl.ndarray((c_out, rows, cols), image.dtype, buffer=nl.shared_hbm)
    filters = nl.load(weights).reshape((c_in, 3, 3, blocks, 128))
    pixels = nl.load(image)
    for block in nl.affine_range(blocks):
        acc = nl.zeros((128, rows * cols), np.float32, buffer=nl.psum)
        for dy in nl.static_range(3):
            for dx in nl.static_range(3):
                window = nl.copy(pixels[:, dy:dy + rows, dx:dx + cols]).reshape((c_in, rows * cols))
                acc += nl.matmul(filters[:, dy, dx, block], window, transpose_x=True)
        done = nl.copy(acc).reshape((128, rows, cols))
        nl.store(out[nl.ds(block * 128, 128)], done)
    return out


def conv_by_copies(image, weights):
    """The same convolution; every tap is loaded into a tile of its own."""
    c_in, height, width = image.shape
    _, _taps, c_out = weights.shape
    rows, cols = height - 2, width - 2
    out = nl.ndarray((c_out, rows, cols), image.dtype, buffer=nl.shared_hbm)
    pixels = nl.load(image)
    for block in nl.affine_range(c_out // 128):
        acc = nl.zeros((128, rows * cols), np.float32, buffer=nl.psum)
        for tap in nl.static_range(9):
            dy, dx = tap // 3, tap % 3
            one = nl.ndarray((c_in, 128), image.dtype, buffer=nl.sbuf)
            one[...] = nl.load(weights[:, tap, nl.ds(block * 128, 128)])
            window = nl.ndarray((c_in, rows, cols), image.dtype, buffer=nl.sbuf)
            for r in nl.affine_range(rows):
                window[:, r] = nl.copy(pixels[:, r + dy, dx:dx + cols])
            acc += nl.matmul(one, window.reshape((c_in, rows * cols)), transpose_x=True)
        nl.store(out[nl.ds(block * 128, 128)], nl.copy(acc).reshape((128, rows, cols)))
    return out


@pytest.mark.parametrize(("c_in", "c_out"), [(128, 256), (128, 128)])
def test_BR001_reshape_of_a_loaded_tile_equals_copies_of_its_slices(c_in, c_out):
    """conv2d right in simulate, wrong on device: the reshape variant is bit-equal to the one with a copy per slice."""
    image, weights = sample((c_in, 12, 12), seed=1), sample((c_in, 9, c_out), seed=2, low=-1, high=1)
    a = run(conv_by_reshape, image, weights)
    b = run(conv_by_copies, image, weights)
    np.testing.assert_array_equal(a, b)
    want = np.zeros((c_out, 10, 10))
    for dy in range(3):
        for dx in range(3):
            pixels, taps = image[:, dy:dy + 10, dx:dx + 10].astype(np.float64), weights[:, dy * 3 + dx].astype(np.float64)
            want += np.einsum("chw,co->ohw", pixels, taps)
    np.testing.assert_allclose(a, want, rtol=1e-4, atol=1e-3)


# ---- BR003: broadcasting --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("small", [(128, 8, 1), (128, 1, 64), (128, 64), (128, 1, 1), (128, 1), (1, 64), (1, 8, 64)])
@pytest.mark.parametrize("spelling", ["operator", "function", "swapped"])
def test_BR003_broadcast_multiply(dtype, small, spelling):
    """3-D x 2-D broadcast multiply repeats rows: equals NumPy's broadcast (a (P, F) tile spans the middle dimension)."""
    x, y = sample((128, 8, 64), dtype, seed=1), sample(small, dtype, seed=2)
    forms = {"operator": lambda a, b: a * b, "function": nl.multiply, "swapped": lambda a, b: b * a}
    got = tiles(forms[spelling], x, y)
    wide = y.reshape(128, 1, 64) if small == (128, 64) else y.reshape(128, 1, 1) if small == (128, 1) else y
    close(got, x.astype(np.float64) * wide.astype(np.float64), dtype, 1)


def test_BR003_in_place_rescale_equals_the_loop_over_slices():
    """The flash-decode rescale of an accumulator in place equals the loop over its slices, bit for bit."""
    def broadcast(acc, factor):
        out = nl.ndarray(acc.shape, acc.dtype, buffer=nl.shared_hbm)
        tile, scale = nl.load(acc), nl.load(factor)
        tile[...] = tile * scale
        nl.store(out, tile)
        return out

    def by_slices(acc, factor):
        out = nl.ndarray(acc.shape, acc.dtype, buffer=nl.shared_hbm)
        tile, scale = nl.load(acc), nl.load(factor)
        for m in nl.affine_range(acc.shape[1]):
            tile[:, m] = tile[:, m] * scale
        nl.store(out, tile)
        return out
    x, y = sample((128, 8, 64), seed=3), sample((128, 64), seed=4)
    np.testing.assert_array_equal(run(broadcast, x, y), run(by_slices, x, y))


def test_BR003_what_does_not_broadcast_is_refused():
    """A broadcast that NumPy does not have is an error, never a wrong result."""
    with pytest.raises(NkiError, match="do not broadcast") as caught:
        tiles(nl.multiply, sample((128, 8, 64)), sample((128, 3, 64)))
    assert caught.value.loc.file.endswith(("test_numerics.py", "harness.py"))


# ---- BR006: casts ---------------------------------------------------------------------------------------------------
CAST = [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3e9, -3e9, 300.0, -300.0, 254.5, 255.5, np.inf, -np.inf, np.nan, -0.0]


def round_half_even(value, low, high):
    """Independent of NumPy's casts: Python's round, then the limits of the type."""
    if value != value:
        return 0
    if value in (np.inf, -np.inf):
        return high if value > 0 else low
    return min(max(round(float(np.float32(value))), low), high)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
@pytest.mark.parametrize("how", ["astype", "copy", "load", "store", "assign"])
def test_BR006_float_to_int_rounds_to_even_and_saturates(dtype, how):
    """float-to-int cast used truncation: it rounds to nearest even, saturates to the range, and NaN gives 0."""
    kind = getattr(nl, dtype)

    def kernel(x):
        out = nl.ndarray(x.shape, kind, buffer=nl.shared_hbm)
        if how == "load":
            nl.store(out, nl.load(x, dtype=kind))
        elif how == "store":
            nl.store(out, nl.load(x))
        elif how == "assign":
            tile = nl.ndarray(x.shape, kind, buffer=nl.sbuf)
            tile[...] = nl.load(x)
            nl.store(out, tile)
        else:
            tile = nl.load(x)
            nl.store(out, tile.astype(kind) if how == "astype" else nl.copy(tile, dtype=kind))
        return out
    got = run(kernel, np.array([CAST], np.float32))
    info = np.iinfo(dtype)
    assert got.dtype == np.dtype(dtype)
    assert got[0].tolist() == [round_half_even(v, info.min, info.max) for v in CAST]


def test_BR006_integers_saturate_too():
    """Integer to integer casts saturate to the range of the destination."""
    x = np.array([[-2**24, -129, -128, -1, 0, 127, 128, 255, 256, 65536, 2**24 - 1]], np.int32)
    for kind in ("int8", "uint8", "int16", "uint16", "uint32"):
        info = np.iinfo(kind)
        got = tiles(lambda t, kind=kind: nl.copy(t, dtype=getattr(nl, kind)), x)
        assert got[0].tolist() == [min(max(int(v), info.min), info.max) for v in x[0]], kind


# ---- BR014: truth ---------------------------------------------------------------------------------------------------
def test_BR014_logical_and_truth_table():
    """logical_and wrong in simulation: non-zero is true (NaN too, -0.0 is not); the result is 0 or 1."""
    values = [0.0, -0.0, np.nan, 2.0, 1.0, -3.5, np.inf, 1e-30]
    pairs = [(a, b) for a in values for b in values]
    x, y = (np.array([[p[i] for p in pairs]], np.float32) for i in (0, 1))
    for fn, oracle in ((nl.logical_and, lambda a, b: a and b), (nl.logical_or, lambda a, b: a or b), (nl.logical_xor, lambda a, b: a != b)):
        got = tiles(fn, x, y)
        assert got.dtype == np.bool_
        assert got[0].tolist() == [oracle(a != 0, b != 0) for a, b in pairs], fn
    ints = np.array([[0, 1, 2, -1]], np.int32), np.array([[1, 2, 0, -1]], np.int32)
    assert tiles(nl.logical_and, *ints)[0].tolist() == [False, True, False, True]
    assert tiles(lambda a, b: nl.logical_and(a, b, dtype=nl.float32), x, y).dtype == FP32


def test_BR024_a_bool_output_stays_bool():
    """bool outputs become uint8: a comparison returned by a kernel is bool, for NumPy and for torch tensors on the CPU."""
    torch = pytest.importorskip("torch")

    def positive(x):
        out = nl.ndarray(x.shape, nl.bool_, buffer=nl.shared_hbm)
        nl.store(out, nl.greater(nl.load(x), 0))
        return out
    x = sample((4, 16))
    got = run(positive, x)
    assert got.dtype == np.bool_
    np.testing.assert_array_equal(got, x > 0)
    result = simulate_kernel(jit(positive), torch.from_numpy(x))
    assert result.dtype == torch.bool and result.tolist() == (x > 0).tolist()


# ---- BR085, BR087: matmul -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [BF16, E4M3, E4M3FN, E5M2, np.dtype(np.float16)])
@pytest.mark.parametrize("shape", [(16, 16, 16), (128, 64, 96)])
def test_BR085_low_precision_matmul_of_small_integers_is_exact(dtype, shape):
    """Interpreter multiplies bf16 bit patterns: values are multiplied, so small integers give exact sums."""
    k, m, n = shape
    rng = np.random.default_rng(5)
    x, y = (rng.integers(-2, 3, s).astype(np.float32) for s in ((k, m), (k, n)))

    def kernel(a, b):
        out = nl.ndarray((m, n), nl.float32, buffer=nl.shared_hbm)
        nl.store(out, nl.matmul(nl.load(a), nl.load(b), transpose_x=True))
        return out
    target = "trn2" if dtype == E4M3FN else "trn1"
    got = run(kernel, x.astype(dtype), y.astype(dtype), target=target)
    np.testing.assert_array_equal(got, x.T @ y)


def test_BR087_float32_matmul_has_float32_precision():
    """Interpreter against device precision: float32 operands are multiplied in float32, the error is that of a float32 sum.

    No TF32 or bf16 truncation: |error| <= K * eps * (|x|.T @ |y|), and one product is correctly rounded.
    """
    x, y = sample((128, 64), seed=6), sample((128, 256), seed=7)

    def kernel(a, b):
        out = nl.ndarray((a.shape[1], b.shape[1]), nl.float32, buffer=nl.shared_hbm)
        nl.store(out, nl.matmul(nl.load(a), nl.load(b), transpose_x=True))
        return out
    got = run(kernel, x, y).astype(np.float64)
    exact = x.astype(np.float64).T @ y.astype(np.float64)
    bound = 128 * 2.0**-24 * (np.abs(x).astype(np.float64).T @ np.abs(y).astype(np.float64))
    assert (np.abs(got - exact) <= bound).all()
    one = np.array([[1 + 2.0**-23]], np.float32)
    assert run(kernel, one, one)[0, 0] == np.float32(one[0, 0] * one[0, 0])


# ---- BR090: float8 overflow -----------------------------------------------------------------------------------------
NAN, INF = float("nan"), float("inf")
OVERFLOW = {
    # ml_dtypes rounds first, to nearest even; what then exceeds the largest finite value is infinity, or NaN where there is none
    "float8_e4m3": {240.0: 240.0, 247.0: 240.0, 248.0: INF, 256.0: INF, 448.0: INF, 464.0: INF, 1000.0: INF, -1000.0: -INF, INF: INF},
    "float8_e4m3fn": {240.0: 240.0, 448.0: 448.0, 464.0: 448.0, 465.0: NAN, 480.0: NAN, 1000.0: NAN, -1000.0: NAN, INF: NAN},
    "float8_e5m2": {448.0: 448.0, 57344.0: 57344.0, 61439.0: 57344.0, 61440.0: INF, 1e6: INF, -1e6: -INF, INF: INF},
}


@pytest.mark.parametrize("dtype", sorted(OVERFLOW))
def test_BR090_float8_overflow_table(dtype):
    """fp8 overflow rule differs: one rule per format, written here and in docs; rounding to even comes before the limit."""
    table = OVERFLOW[dtype]
    kind = getattr(nl, dtype)

    def kernel(x):
        out = nl.ndarray(x.shape, nl.float32, buffer=nl.shared_hbm)
        nl.store(out, nl.copy(nl.load(x), dtype=kind))
        return out
    target = "trn2" if dtype == "float8_e4m3fn" else "trn1"
    got = run(kernel, np.array([list(table)], np.float32), target=target)
    np.testing.assert_array_equal(got[0], np.array(list(table.values()), np.float32))


def test_BR090_the_table_of_the_documentation_is_what_happens():
    """The overflow rule is stated: every row of the table in docs/numerics.md holds."""
    text = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")
    rows = [[float(v) for v in line.strip("| ").split("|")] for line in text.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) >= 9

    def kernel(x, dtype):
        out = nl.ndarray(x.shape, nl.float32, buffer=nl.shared_hbm)
        nl.store(out, nl.copy(nl.load(x), dtype=dtype))
        return out
    values = np.array([[row[0] for row in rows]], np.float32)
    for column, kind in enumerate((nl.float8_e4m3, nl.float8_e4m3fn, nl.float8_e5m2), 1):
        got = run(kernel, values, kind, target="trn2")
        np.testing.assert_array_equal(got[0], np.array([row[column] for row in rows], np.float32))
