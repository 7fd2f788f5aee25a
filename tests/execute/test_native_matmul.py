"""Matrix products in C: one order of FMAs per element, for every dtype, layout, size and level of CPU, with and without a tile unit."""

from __future__ import annotations

import ctypes as C
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from opennki.execute import abi

DTYPES = {
    "float32": np.dtype(np.float32), "tfloat32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16), "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn), "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}  # fmt: skip
# K, M, N: below, at and above every block of every level, and operands that trade places
SIZES = [
    (1, 1, 1), (0, 3, 40), (7, 33, 127), (129, 127, 33), (33, 129, 7), (127, 1, 600), (256, 600, 1), (16, 500, 97), (5, 2, 97),
    (9, 4, 96), (128, 12, 32), (128, 6, 16), (3, 13, 15), (2, 3, 2), (300, 25, 64), (128, 128, 512),
]  # fmt: skip


def descriptor(s, m, d, accumulate=False, dtypes=("float32", "float32")):
    k = abi.Matmul(s.shape[0], s.shape[1], m.shape[1], abi.DTYPES[dtypes[0]], abi.DTYPES[dtypes[1]], accumulate=accumulate)
    k.s_stride[:], k.m_stride[:], k.d_stride[:] = s.strides, m.strides, d.strides
    return k


def run(lib, s, m, d, accumulate=False, dtypes=("float32", "float32")):
    """d (+)= s.T @ m in place, with scratch that is exactly as large as asked for and full of NaN."""
    k = descriptor(s, m, d, accumulate, dtypes)
    lib.nki_mm_scratch.restype = C.c_size_t
    size = lib.nki_mm_scratch(C.byref(k))
    raw = np.full(size + 192, 0xFF, np.uint8)
    start = -raw.ctypes.data % 64 + 64
    lib.nki_mm_run(C.byref(k), *(C.c_void_p(x.ctypes.data) for x in (s, m, d)), C.c_void_p(raw.ctypes.data + start))
    assert (raw[:start] == 0xFF).all() and (raw[start + size:] == 0xFF).all(), "scratch overrun"
    return d


def product(lib, s, m, **options):
    return run(lib, s, m, np.full((s.shape[1], m.shape[1]), np.nan, np.float32), **options)


def rounded(x):
    """The float32 nearest to a fraction, ties to even."""
    if x == 0:
        return 0.0
    top = abs(x)
    exponent = max(top.numerator.bit_length() - top.denominator.bit_length() - 25, -149)
    while top / Fraction(2) ** exponent >= 1 << 24:
        exponent += 1
    value = round(x / Fraction(2) ** exponent) * Fraction(2) ** exponent
    return float(value) if abs(value) < Fraction(2) ** 128 else float("inf") * (1 if x > 0 else -1)


def chain(s, m):
    """s.T @ m by fused multiply-adds over k in order, in exact arithmetic."""
    out = np.zeros((s.shape[1], m.shape[1]), np.float32)
    for i in range(s.shape[1]):
        for j in range(m.shape[1]):
            total = 0.0
            for k in range(s.shape[0]):
                total = rounded(Fraction(float(s[k, i])) * Fraction(float(m[k, j])) + Fraction(total))
            out[i, j] = total
    return out


NARROW = ("bfloat16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2")


def pairs(s, m):
    """s.T @ m in the order of pairs: of 32 steps those of even k are a chain and those of odd k another; exact arithmetic."""
    total = np.zeros((s.shape[1], m.shape[1]), np.float32)
    for k in range(0, s.shape[0], 32):
        total = total + (chain(s[k:k + 32:2], m[k:k + 32:2]) + chain(s[k + 1:k + 32:2], m[k + 1:k + 32:2]))
    return total


def same_bits(a, b):
    """Equal bit by bit; NaN has one meaning, whatever its payload."""
    assert a.shape == b.shape
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    keep = ~np.isnan(a)
    np.testing.assert_array_equal(np.ascontiguousarray(a)[keep].view(np.uint32), np.ascontiguousarray(b)[keep].view(np.uint32))


def operand(rng, shape, name):
    x = rng.standard_normal(shape).astype(np.float32)
    if name == "tfloat32":
        return (x.view(np.uint32) & ~np.uint32(0x1FFF)).view(np.float32)
    return x.astype(DTYPES[name])


def wide_range(rng, shape):
    """Values whose products cancel, lose bits, tie and go below the normal numbers."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 30, shape)
    x = np.where(rng.random(shape) < 0.3, rng.choice([1.0, -1.0, 1 + 2**-23, 2**-24, 2**24, -(2.0**-12), 3 * 2**-25], shape), x)
    return x.astype(np.float32)


@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**-70, 2.0**20])
@pytest.mark.parametrize("shape", [(40, 3, 5), (9, 13, 17), (6, 2, 40)])
def test_each_element_is_a_chain_of_fused_multiply_adds(native_levels, shape, scale):
    rng = np.random.default_rng(hash(shape) % 1000)
    s, m = (wide_range(rng, (shape[0], n)) * np.float32(scale) for n in shape[1:])
    expected = chain(s, m)
    for lib in native_levels.values():
        same_bits(product(lib, s, m), expected)


@pytest.mark.parametrize(("a", "b", "c"), [
    (1 + 2**-23, 1 + 2**-23, 2.0**24),  # rounding twice, first to double, would tie
    (1 + 2**-12, 1 + 2**-12, 2.0**-30), (2.0**-75, 2.0**-75, 1.0), (-(2.0**-75), 2.0**-75, 1.0), (2.0**-75, 2.0**-74, 2.0**-149),
    (2.0**-75, 2.0**-75, 0.0), (3 * 2.0**-76, 2.0**-75, 0.0), (1 + 2**-11, 1 + 2**-12, -1.0), (2.0**127, 1.5, 2.0**103),
    (2.0**-60, 2.0**-60, 1 + 2**-23), (2.0**-60, -(2.0**-60), 1 + 2**-23), (2.0**-30, 2.0**-30, 2.0**30 * (1 + 2**-23)),
])  # fmt: skip
def test_a_step_is_rounded_once(native_levels, a, b, c):
    """The first step sets the sum to c, the second adds a * b; also just next to ties of float32."""
    for x, y in ((a, b), (np.nextafter(np.float32(a), np.float32(9)), b), (a, np.nextafter(np.float32(b), np.float32(-9)))):
        s, m = np.array([[c], [x]], np.float32), np.array([[1], [y]], np.float32)
        expected = chain(s, m)
        for lib in native_levels.values():
            same_bits(product(lib, s, m), expected)


@pytest.mark.parametrize("size", SIZES)
def test_sizes(native_levels, size):
    rng = np.random.default_rng(1)
    K, M, N = size
    s, m = (rng.standard_normal((K, n), np.float32) for n in (M, N))
    bound = (K + 1) * 2.0**-24 * (np.abs(s).T.astype(float) @ np.abs(m)) + 1e-40
    results = [product(lib, s, m) for lib in native_levels.values()]
    assert (np.abs(results[0] - s.T.astype(float) @ m) <= bound).all()
    for other in results[1:]:
        same_bits(results[0], other)


@pytest.mark.parametrize("m_dtype", DTYPES)
@pytest.mark.parametrize("s_dtype", DTYPES)
def test_dtypes(native_levels, s_dtype, m_dtype):
    """What is narrow is widened exactly: the bits are those of the float32 or bfloat16 product, rows dense or not."""
    rng = np.random.default_rng(2)
    s, m = operand(rng, (35, 60), s_dtype), operand(rng, (35, 150), m_dtype)
    like = "bfloat16" if s_dtype in NARROW and m_dtype in NARROW else "float32"
    for lib in native_levels.values():
        for part_s, part_m in ((s, m), (s[:, :29], m[:, :70]), (s[:, ::2], m[:, ::3]), (s[:, :2], m), (s, m[:, :3])):
            expected = product(lib, part_s.astype(DTYPES[like]), part_m.astype(DTYPES[like]), dtypes=(like, like))
            same_bits(product(lib, part_s, part_m, dtypes=(s_dtype, m_dtype)), expected)


@pytest.mark.parametrize("name", [n for n in DTYPES if n not in ("float32", "tfloat32")])
def test_every_code_is_widened(native_levels, name):
    dtype = DTYPES[name]
    codes = np.arange(256 ** dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype).reshape(1, -1)
    with np.errstate(invalid="ignore"):
        expected = codes.astype(np.float32).T
    one = np.ones((1, 1), np.float32)
    for lib in native_levels.values():
        result = product(lib, codes, one, dtypes=(name, "float32"))
        np.testing.assert_array_equal(result, expected)  # -0 * 1 + 0 is 0
        dense = product(lib, np.ones((1, 24), np.float32), codes, dtypes=("float32", name))
        np.testing.assert_array_equal(dense, np.repeat(expected.T, 24, axis=0))


def layouts(rng, shape, dtype):
    """The same values, laid out in other ways."""
    rows, cols = shape
    values = rng.standard_normal(shape).astype(np.float32).astype(dtype)

    def put(view):
        view[...] = values
        return view

    yield values
    yield put(np.zeros((rows, cols + 13), dtype)[:, 5:5 + cols])
    yield put(np.zeros((rows, 4096), dtype)[:, 7:7 + cols])
    yield put(np.zeros((rows * 3, cols * 2), dtype)[::3, 1::2])
    yield put(np.zeros((cols, rows), dtype).T)
    yield put(np.zeros((rows, cols), dtype)[::-1])
    yield put(np.zeros((rows, cols), dtype)[::-1, ::-1])
    raw = np.zeros(values.nbytes + 8, np.uint8)
    yield put(np.ndarray(shape, dtype, raw, offset=1))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2"])
def test_layouts(native_levels, name):
    K, M, N = 31, 29, 75
    for lib in native_levels.values():
        for s in layouts(np.random.default_rng(3), (K, M), DTYPES[name]):
            for m in layouts(np.random.default_rng(4), (K, N), DTYPES[name]):
                result = product(lib, s, m, dtypes=(name, name))
                same_bits(result, product(lib, np.array(s, order="C"), np.array(m, order="C"), dtypes=(name, name)))


def test_rows_that_are_one(native_levels):
    """Strides of zero: every k has the same row, every column the same value."""
    row = np.arange(40, dtype=np.float32)
    s, m = np.broadcast_to(row[:20], (5, 20)), np.broadcast_to(row[:5, None], (5, 70))
    for lib in native_levels.values():
        np.testing.assert_array_equal(product(lib, s, m), np.repeat(10 * row[:20, None], 70, axis=1))


@pytest.mark.parametrize("size", [(17, 25, 70), (17, 1, 200), (17, 40, 3)])
def test_results_of_any_layout(native_levels, size):
    K, M, N = size
    rng = np.random.default_rng(5)
    s, m = rng.standard_normal((K, M), np.float32), rng.standard_normal((K, N), np.float32)
    for lib in native_levels.values():
        expected = product(lib, s, m)
        for d in layouts(rng, (M, N), np.dtype(np.float32)):
            before, around = d.copy(), d.base if d.base is not None else d
            outside = around.copy()
            same_bits(run(lib, s, m, d), expected)
            d[...] = before
            np.testing.assert_array_equal(around, outside)  # nothing else was written
            same_bits(run(lib, s, m, d, accumulate=True), before + expected)


def test_tiles_do_not_change_bits(native_levels):
    rng = np.random.default_rng(6)
    s, m = rng.standard_normal((64, 700), np.float32), rng.standard_normal((64, 130), np.float32)
    for lib in native_levels.values():
        whole = product(lib, s, m)
        for step_m, step_n in ((128, 64), (50, 7), (1, 130), (700, 1)):
            d = np.empty_like(whole)
            for i in range(0, 700, step_m):
                for j in range(0, 130, step_n):
                    run(lib, s[:, i:i + step_m], m[:, j:j + step_n], d[i:i + step_m, j:j + step_n])
            same_bits(d, whole)


def test_nan_infinity_and_subnormals(native_levels):
    s = np.array([[1, np.inf, np.nan, 2.0**-140, 2.0**-100, -np.inf, 0.0]], np.float32)
    m = np.array([[0, 1, -1, 2.0**-120, 4, np.nan, 3e38, -0.0]], np.float32)
    with np.errstate(all="ignore"):
        expected = s.T * m + np.float32(0)
    for lib in native_levels.values():
        same_bits(product(lib, s, m), expected)
        same_bits(product(lib, s, np.tile(m, 20)), np.tile(expected, 20))


# ---- products that are added up in one call ------------------------------------------------------------------------
def added(lib, s, m, d, adds, dtypes, kept=(False, False), dot=0):
    """d = what s[i].T @ m[i] add up to, from zero (2), d (1) or nothing (0), in one call; with operands that are kept, or not."""
    k = descriptor(s[0], m[0], d, dtypes=dtypes)
    k.accumulate, k.blocks, k.s_block, k.m_block, k.dot = adds, len(s), s.strides[0], m.strides[0], dot
    for query in (lib.nki_mm_scratch, lib.nki_mm_kept):
        query.restype = C.c_size_t
    size = lib.nki_mm_scratch(C.byref(k))
    room = [np.full(n + 192, 0xFF, np.uint8) for n in (size, *(lib.nki_mm_kept(C.byref(k), i) for i in (0, 1)))]
    start = [-raw.ctypes.data % 64 + 64 for raw in room]
    at = [C.c_void_p(raw.ctypes.data + n) for raw, n in zip(room, start, strict=True)]
    places = [None, None]
    for i, operand in enumerate((s, m)):
        if kept[i] and room[i + 1].size > 192:
            lib.nki_mm_keep(C.byref(k), i, C.c_void_p(operand.ctypes.data), at[i + 1])
            places[i] = at[i + 1]
    lib.nki_mm_kept_run(C.byref(k), *(C.c_void_p(x.ctypes.data) for x in (s, m, d)), at[0], *places)
    for raw, n in zip(room, start, strict=True):
        assert (raw[:n] == 0xFF).all() and (raw[raw.size - (192 - n):] == 0xFF).all(), "overrun"
    return d


@pytest.mark.parametrize("kept", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    "size", [(128, 128, 512), (40, 70, 90), (33, 13, 33), (8, 500, 64), (64, 3, 200), (50, 200, 5), (5, 1, 1), (200, 33, 50)]
)
@pytest.mark.parametrize(
    "kinds", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float8_e4m3", "bfloat16")]
)
def test_blocks_are_added_one_after_the_other(native_levels, kinds, size, kept):
    K, M, N = size
    rng = np.random.default_rng(10)
    for blocks in (1, 2, 3, 9):
        s, m = (operand(rng, (blocks, K, n), of) for n, of in ((M, kinds[0]), (N, kinds[1])))
        before = rng.standard_normal((M, N)).astype(np.float32)
        for lib in native_levels.values():
            one = [product(lib, a, b, dtypes=kinds) for a, b in zip(s, m, strict=True)]
            for adds, first in ((0, one[0]), (1, before + one[0]), (2, np.float32(0) + one[0])):
                want = first
                for more in one[1:]:
                    want = want + more
                same_bits(added(lib, s, m, before.copy(), adds, kinds, kept), want)


def test_blocks_of_any_layout(native_levels):
    rng = np.random.default_rng(11)
    s, m = rng.standard_normal((31, 4, 29), np.float32), rng.standard_normal((75, 31, 4), np.float32)  # blocks in the middle, and last
    a, b = s.transpose(1, 0, 2), m.transpose(2, 1, 0)
    for lib in native_levels.values():
        for d in layouts(rng, (29, 75), np.dtype(np.float32)):
            want = d.copy()
            for x, y in zip(a, b, strict=True):
                want = want + product(lib, x, y)
            for kept in ((False, False), (True, True)):
                again = d.copy()
                d[...] = again
                same_bits(added(lib, a, b, d, 1, ("float32", "float32"), kept), want)
                d[...] = again


def test_minus_zero_is_zero_where_it_is_added_to_zero(native_levels):
    s, m = np.full((2, 1, 16), -(2.0**-100), np.float32), np.full((2, 1, 40), 2.0**-100, np.float32)
    for lib in native_levels.values():
        for blocks in (1, 2):
            for adds in (0, 2):
                d = added(lib, s[:blocks], m[:blocks], np.ones((16, 40), np.float32), adds, ("float32", "float32"))
                assert (d == 0).all() and np.signbit(d).all() == (adds == 0)


@pytest.mark.parametrize("odd", [np.inf, np.nan, 2.0**-130, 2.0**-100])
@pytest.mark.parametrize("block", [0, 2, 7])
def test_blocks_that_the_tile_unit_does_not_take(native_levels, odd, block):
    kinds = ("bfloat16", "bfloat16")
    rng = np.random.default_rng(12)
    s, m = (operand(rng, (8, 96, n), "bfloat16") for n in (80, 100))
    for which, (row, column) in ((s, (5, 70)), (m, (90, 40)), (m, (1, 99))):
        which[block, row, column] = odd
        for lib in native_levels.values():
            want = np.float32(0)
            for a, b in zip(s, m, strict=True):
                want = want + product(lib, a, b, dtypes=kinds)
            for kept in ((False, False), (True, False), (False, True), (True, True)):
                same_bits(added(lib, s, m, np.ones((80, 100), np.float32), 2, kinds, kept), want)


# ---- products that are summed in pairs, and the tile unit ---------------------------------------------------------


@pytest.fixture
def tile_unit(native_levels):
    """A library whose CPU has a tile unit, as `with_unit(lib, wanted)` switches it; left on."""
    lib = native_levels.get("v4")
    if lib is None or not lib.nki_tiles_use(1):
        pytest.skip("this CPU has no tile unit")
    yield lib
    lib.nki_tiles_use(1)


def both(lib, s, m, name="bfloat16", **options):
    """A product with the tile unit and without it."""
    made = []
    for wanted in (1, 0):
        lib.nki_tiles_use(wanted)
        made.append(product(lib, s, m, dtypes=(name, name), **options))
    return made


@pytest.mark.parametrize("scale", [1.0, 2.0**-66, 2.0**20])
@pytest.mark.parametrize("shape", [(40, 3, 5), (70, 13, 17), (33, 40, 2), (64, 2, 40), (9, 24, 24)])
def test_narrow_operands_are_summed_in_pairs(native_levels, shape, scale):
    rng = np.random.default_rng(sum(shape))
    s, m = ((wide_range(rng, (shape[0], n)) * np.float32(scale)).astype(DTYPES["bfloat16"]) for n in shape[1:])
    expected = pairs(s, m)
    for lib in native_levels.values():
        same_bits(product(lib, s, m, dtypes=("bfloat16", "bfloat16")), expected)


@pytest.mark.parametrize(
    "size", [(32, 32, 32), (128, 128, 512), (127, 40, 70), (8, 16, 32), (31, 17, 33), (300, 65, 129), (64, 1, 600), (128, 600, 1)]
)
def test_the_tile_unit_changes_no_bit(tile_unit, size):
    K, M, N = size
    rng = np.random.default_rng(8)
    for spread in (0, 6, 30):
        s, m = (rng.standard_normal((K, n)) * 2.0 ** rng.integers(-spread, spread + 1, (K, n)) for n in (M, N))
        for name in NARROW:
            with np.errstate(over="ignore"):
                a, b = both(tile_unit, s.astype(np.float32).astype(DTYPES[name]), m.astype(np.float32).astype(DTYPES[name]), name)
            same_bits(a, b)
    native = DTYPES["bfloat16"]
    before = rng.standard_normal((M, N), np.float32)
    made = []
    for wanted in (1, 0):
        tile_unit.nki_tiles_use(wanted)
        made.append(run(tile_unit, s.astype(native), m.astype(native), before.copy(), accumulate=True, dtypes=("bfloat16", "bfloat16")))
    same_bits(*made)


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan, 2.0**-130, -(2.0**-133), 2.0**-126, 2.0**-70, 2.0**127, -0.0])
@pytest.mark.parametrize("where", ["stationary", "moving", "both"])
def test_what_the_tile_unit_would_round_in_another_way(tile_unit, odd, where):
    """Infinities, NaN, denormal operands, and products that are denormal, in one place of a tile."""
    rng = np.random.default_rng(9)
    s, m = (rng.standard_normal((64, n)).astype(np.float32) for n in (48, 160))
    if where != "moving":
        s[7, 5] = odd
    if where != "stationary":
        m[7, 100] = odd
    for tiny in (1.0, 2.0**-60, 2.0**-110):
        with np.errstate(all="ignore"):
            a, b = both(tile_unit, (s * np.float32(tiny)).astype(DTYPES["bfloat16"]), m.astype(DTYPES["bfloat16"]))
            same_bits(a, b)


@pytest.mark.parametrize("kept", [(False, False), (True, False), (False, True), (True, True)])
def test_tiles_of_zeros_are_left_out(tile_unit, kept):
    """As scores behind a mask are: no bit changes, also where zeros meet infinities and NaN, and where what is there before is -0."""
    rng = np.random.default_rng(11)
    for round in range(24):
        K, M, N = [(128, 64, 96), (96, 33, 40), (40, 70, 65)][round % 3]
        s, m = (rng.standard_normal((4, K, n)).astype(np.float32) for n in (M, N))
        for x in (s, m) if round % 4 == 0 else (s,) if round % 2 else (m,):
            for block in x:
                block[rng.integers(0, K // 32 + 1) * 32:] = rng.choice([0.0, -0.0])
                block[:, rng.integers(0, block.shape[1]):] = 0
                block[: rng.integers(0, 2) * 32] = -0.0
        for odd in rng.choice([np.inf, np.nan, 1.0, 1.0], 2):
            m[rng.integers(0, 4), rng.integers(0, K), rng.integers(0, N)] = odd
        before = np.where(rng.random((M, N)) < 0.5, -0.0, rng.standard_normal((M, N))).astype(np.float32)
        s, m = (x.astype(DTYPES["bfloat16"]) for x in (s, m))
        made = []
        for wanted, dot in ((1, 0), (0, 0), (1, 1)):
            tile_unit.nki_tiles_use(wanted)
            made.append(added(tile_unit, s, m, before.copy(), round % 3, ("bfloat16", "bfloat16"), kept, dot=dot))
        same_bits(*made[:2])
        np.testing.assert_array_equal(np.isnan(made[2]), np.isnan(made[1]))


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("size", [(32, 32, 32), (128, 128, 512), (127, 40, 70), (9, 16, 33), (300, 65, 129), (64, 3, 20)])
def test_dot_instructions(native_levels, size, name):
    """Products that take them as they are, by vectors and by the tile unit: right but for the order of sums, also where the exact ones go
    without: next to infinities, NaN and what rounds to zero."""
    lib = native_levels.get("v4")
    if lib is None or not lib.nki_tiles_use(2):
        pytest.skip("this CPU has no dot instructions")
    K, M, N = size
    rng = np.random.default_rng(13)
    s, m = (rng.standard_normal((3, K, n)).astype(np.float32).astype(DTYPES[name]) for n in (M, N))
    m[1, 3, 5] = 2.0**-9 if name == "float8_e4m3" else np.nan if name == "float8_e4m3fn" else np.inf
    wide = [x.astype(np.float32).astype(float) for x in (s, m)]
    with np.errstate(invalid="ignore"):
        want = sum(a.T @ b for a, b in zip(*wide, strict=True))
        bound = 3 * (K + 1) * 2.0**-23 * sum(np.abs(a).T @ np.abs(b) for a, b in zip(*wide, strict=True)) + 1e-30
    for wanted in (2, 1):
        lib.nki_tiles_use(wanted)
        for kept in ((False, False), (True, True)):
            made = added(lib, s, m, np.ones((M, N), np.float32), 2, (name, name), kept, dot=1)
            finite = np.isfinite(want)
            np.testing.assert_array_equal(np.isfinite(made), finite)
            assert (np.abs(made - want)[finite] <= bound[finite]).all()
    lib.nki_tiles_use(1)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3"])
def test_layouts_in_the_tile_unit(tile_unit, name):
    K, M, N = 75, 39, 77
    for s in layouts(np.random.default_rng(3), (K, M), DTYPES[name]):
        for m in layouts(np.random.default_rng(4), (K, N), DTYPES[name]):
            same_bits(*both(tile_unit, s, m, name))
    for d in layouts(np.random.default_rng(5), (M, N), np.dtype(np.float32)):
        around = d.base if d.base is not None else d
        outside, before = around.copy(), d.copy()
        tile_unit.nki_tiles_use(1)
        run(tile_unit, s, m, d, dtypes=(name, name))
        same_bits(d, both(tile_unit, s, m, name)[1])
        d[...] = before
        np.testing.assert_array_equal(around, outside)
