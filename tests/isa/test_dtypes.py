"""Data types against torch, ml_dtypes, exact arithmetic on bit fields, and plain Python integers."""

import itertools
import math
import warnings
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch

from opennki.isa import dtypes

FORMATS = {  # exponent bits, mantissa bits, largest finite, has infinity
    "float8_e4m3": (4, 3, 240.0, True),
    "float8_e4m3fn": (4, 3, 448.0, False),
    "float8_e5m2": (5, 2, 57344.0, True),
    "float16": (5, 10, 65504.0, True),
    "bfloat16": (8, 7, float(np.float32(3.3895314e38)), True),
}
FLOATS = [*FORMATS, "float32", "float64"]
INTEGERS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
ML = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


@pytest.fixture(autouse=True)
def no_floating_point_noise():
    """Nothing here may warn or depend on the caller's floating-point error state."""
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def codes(name):
    """All bit patterns of an 8- or 16-bit format as a storage array."""
    size = dtypes.itemsize(name)
    return np.arange(256**size, dtype=f"u{size}").view(dtypes.storage(name))


def decode(name, code):
    """Value of one bit pattern, from its fields."""
    exponent_bits, mantissa_bits, _, infinity = FORMATS[name]
    bias = 2 ** (exponent_bits - 1) - 1
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = code >> mantissa_bits & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    top = exponent == 2**exponent_bits - 1
    if top and infinity:
        return sign * math.inf if mantissa == 0 else math.nan
    if top and mantissa == 2**mantissa_bits - 1:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp(2**mantissa_bits + mantissa, exponent - bias - mantissa_bits)


def nextafter(x, toward):
    with np.errstate(all="ignore"):
        return np.nextafter(x, np.float32(toward))


def same_bits(a, b):
    kind = f"u{a.dtype.itemsize}"
    assert a.dtype.itemsize == b.dtype.itemsize
    np.testing.assert_array_equal(np.ascontiguousarray(a).view(kind), np.ascontiguousarray(b).view(kind))


def dense_float32():
    """float32 samples: a sweep of all bit patterns, all 16-bit-aligned patterns and their neighbours."""
    sweep = np.arange(0, 2**32, 4099, dtype=np.uint64).astype(np.uint32)
    upper = np.arange(65536, dtype=np.uint32) << np.uint32(16)
    return np.concatenate([sweep, upper, upper + np.uint32(1), upper - np.uint32(1)]).view(np.float32)


# ---- names ----


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_names_round_trip(name):
    assert dtypes.canonical(name) == name
    assert dtypes.canonical(dtypes.public(name)) == name
    assert dtypes.itemsize(name) == dtypes.public(name).itemsize == dtypes.storage(name).itemsize
    assert dtypes.is_float(name) != dtypes.is_integer(name)
    assert isinstance(dtypes.public(name), np.dtype)


def test_public_objects_are_distinct():
    assert len({dtypes.public(name) for name in dtypes.NAMES}) == len(dtypes.NAMES) == 18
    assert dtypes.tfloat32 == np.dtype("|V4")
    assert dtypes.public("bool") == np.dtype("bool")
    assert dtypes.storage("bool") == np.uint8
    assert dtypes.storage("tfloat32") == dtypes.storage("float32r") == np.float32
    assert dtypes.bfloat16 == np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (np.float32, "float32"),
        (np.dtype("int16"), "int16"),
        (np.longlong, "int64"),
        (np.bool_, "bool"),
        (bool, "bool"),
        (int, "int32"),
        (float, "float32"),
        ("bool_", "bool"),
        ("float8e4", "float8_e4m3"),
        ("fp32", "float32"),
        ("nl.bfloat16", "bfloat16"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (ml_dtypes.float8_e4m3, "float8_e4m3"),
        (ml_dtypes.float8_e4m3fn, "float8_e4m3fn"),
        (np.dtype(ml_dtypes.float8_e5m2), "float8_e5m2"),
        (np.dtype("V4"), "tfloat32"),
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (torch.bool, "bool"),
        (torch.uint8, "uint8"),
        (SimpleNamespace(name="int32"), "int32"),
        (type("float16", (), {"dtype": np.dtype("float16")}), "float16"),  # the shape of jax.numpy.float16
    ],
)
def test_canonical(given, name):
    assert dtypes.canonical(given) == name
    assert dtypes.canonical(given) == name  # from the cache too


@pytest.mark.parametrize(
    "given",
    [
        object, np.object_, complex, np.complex64, torch.complex64, str, np.dtype("U4"), np.dtype("M8[s]"),
        "float31", np.dtype("V1"), np.dtype("V8"), np.dtype([("a", "<f4")]), np.floating, np.number, None, 3,
        1.5, True, [], {"a": 1}, np.zeros(3, np.float32), np.float32(1), torch.zeros(2), np.longdouble, "",
        "void", ml_dtypes.float8_e4m3b11fnuz, b"float32",
    ],
)  # fmt: skip
def test_canonical_refuses(given):
    with pytest.raises(TypeError, match="is not an NKI dtype; legal dtypes are bool, uint8") as error:
        dtypes.canonical(given)
    assert repr(given)[:40] in str(error.value)


def test_unknown_name_in_every_entry():
    x = np.zeros(2, np.float32)
    for call in (
        lambda: dtypes.public("x"),
        lambda: dtypes.storage("x"),
        lambda: dtypes.itemsize("x"),
        lambda: dtypes.is_float("x"),
        lambda: dtypes.reader("x"),
        lambda: dtypes.writer("x"),
        lambda: dtypes.to_float32(x, "x"),
        lambda: dtypes.from_float32(x, "x"),
        lambda: dtypes.convert(x, "float32", "x"),
        lambda: dtypes.promote("float32", "x"),
        lambda: dtypes.round_to(x, "x"),
    ):
        with pytest.raises(TypeError, match="not an NKI dtype"):
            call()


def test_finfo():
    assert float(dtypes.finfo(np.float32).min) == -3.4028234663852886e38
    assert float(dtypes.finfo("float8_e4m3").max) == 240
    assert float(dtypes.finfo("float8_e4m3fn").max) == 448
    assert float(dtypes.finfo("bfloat16").eps) == 2.0**-7
    assert float(dtypes.finfo(torch.float16).tiny) == 2.0**-14
    tf32 = dtypes.finfo("tfloat32")
    assert float(tf32.eps) == 2.0**-10
    for value in (tf32.max, tf32.min, tf32.smallest_normal, tf32.smallest_subnormal):
        array = np.array([value], np.float32)
        same_bits(dtypes.round_to(array, "tfloat32"), array)
    assert np.isinf(dtypes.round_to(np.array([dtypes.finfo("float32").max], np.float32), "tfloat32"))[0]
    for name in ("int32", "bool"):
        with pytest.raises(ValueError, match="finfo needs a floating-point dtype"):
            dtypes.finfo(name)


# ---- storage -> float32 ----


@pytest.mark.oracle
@pytest.mark.parametrize("name", FORMATS)
def test_reading_every_pattern(name):
    stored = codes(name)
    value = dtypes.to_float32(stored, name)
    assert value.dtype == np.float32
    expected = [decode(name, code) for code in range(len(stored))]
    for got, want in zip(value.tolist(), expected):
        assert (math.isnan(got) and math.isnan(want)) or (got == want and math.copysign(1, got) == math.copysign(1, want))


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "dtype", "view"),
    [
        ("bfloat16", torch.bfloat16, torch.int16),
        ("float16", torch.float16, torch.int16),
        ("float8_e4m3fn", torch.float8_e4m3fn, torch.uint8),
        ("float8_e5m2", torch.float8_e5m2, torch.uint8),
    ],
)
def test_reading_as_torch(name, dtype, view):
    stored = codes(name)
    raw = torch.from_numpy(stored.view(np.int16 if dtypes.itemsize(name) == 2 else np.uint8).copy())
    expected = raw.view(dtype).float().numpy()
    np.testing.assert_array_equal(dtypes.to_float32(stored, name), expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7, 3), (3, 1000), (4, 512), (5, 1025)])
def test_layout_does_not_matter(name, shape):
    rng = np.random.default_rng(1)
    stored = codes(name)[rng.integers(0, 256, shape)]
    stored = np.asarray(stored, dtypes.storage(name))
    x = rng.standard_normal(shape).astype(np.float32) if shape else np.float32(1.7) * np.ones((), np.float32)
    x = np.asarray(x)
    read, written = dtypes.to_float32(stored, name), dtypes.from_float32(x, name)
    assert read.shape == written.shape == shape
    assert written.dtype == dtypes.storage(name)
    for rearrange in (np.asfortranarray, lambda a: np.repeat(a[..., None], 2, -1)[..., 0]):
        same_bits(dtypes.to_float32(rearrange(stored), name), read)
        same_bits(dtypes.from_float32(rearrange(x), name), written)


def test_float32_is_not_copied():
    x = np.ones((128, 4), np.float32)
    for name in ("float32", "float32r", "tfloat32"):
        assert dtypes.to_float32(x, name) is x
    assert dtypes.from_float32(x, "float32") is x
    assert dtypes.round_to(x, "float32") is x
    assert dtypes.convert(x, "float32", "float32") is not x


def test_integers_to_float32():
    assert dtypes.to_float32(np.array([-128, 127], np.int8), "int8").tolist() == [-128.0, 127.0]
    # 2**24 + 1 is a tie, and goes to the even neighbour.
    assert dtypes.to_float32(np.array([2**24 + 1, 2**24 + 3], np.int32), "int32").tolist() == [
        2.0**24,
        2.0**24 + 4,
    ]
    assert dtypes.to_float32(np.array([2**32 - 1], np.uint32), "uint32").tolist() == [2.0**32]
    assert dtypes.to_float32(np.array([0, 1], np.uint8), "bool").tolist() == [0.0, 1.0]
    assert dtypes.to_float32(np.array([1e300, 0.1]), "float64").tolist() == [math.inf, float(np.float32(0.1))]


# ---- float32 -> storage ----


@pytest.mark.oracle
@pytest.mark.parametrize("name", FORMATS)
def test_writing_as_ml_dtypes(name):
    x = dense_float32()
    with np.errstate(all="ignore"):
        expected = x.astype(ML[name])
    same_bits(dtypes.from_float32(x, name), expected)


@pytest.mark.oracle
@pytest.mark.parametrize("name", FORMATS)
def test_writing_rounds_once_to_nearest_even(name):
    """Between each two neighbours: just below the middle, the middle, just above."""
    _, mantissa_bits, largest, infinity = FORMATS[name]
    values = [decode(name, code) for code in range(2 ** (8 * dtypes.itemsize(name) - 1))]
    finite = [v for v in values if math.isfinite(v)]
    assert finite == sorted(finite)
    assert finite[-1] == largest
    step = 1 if len(finite) < 300 else 37
    for sign in (1.0, -1.0):
        for i in range(0, len(finite) - 1, step):
            low, high = finite[i], finite[i + 1]
            middle = np.float32((low + high) / 2)
            if float(middle) != (low + high) / 2:
                continue  # below the smallest float32: the first step of bfloat16
            below, above = nextafter(middle, 0), nextafter(middle, np.inf)
            even = i if i % 2 == 0 else i + 1
            got = dtypes.from_float32(np.array([below, middle, above], np.float32) * np.float32(sign), name)
            back = [abs(v) for v in got.astype(np.float64).tolist()]
            assert back == [low, finite[even], high]
    # The tie above the largest finite value overflows, except in e4m3fn, where the largest code is even.
    half_step = 2.0 ** (math.frexp(largest)[1] - 1 - mantissa_bits) / 2
    with np.errstate(over="ignore"):
        tie = np.float32(largest) + np.float32(half_step)
        over = np.array([nextafter(tie, np.inf), np.inf], np.float32)
    got = dtypes.to_float32(dtypes.from_float32(np.array([tie], np.float32), name), name)[0]
    assert got == (math.inf if infinity else largest)
    got = dtypes.to_float32(dtypes.from_float32(over, name), name)
    assert all(math.isinf(v) if infinity else math.isnan(v) for v in got.tolist())


@pytest.mark.parametrize("name", FORMATS)
def test_round_trip_of_every_pattern(name):
    stored = codes(name)
    back = dtypes.from_float32(dtypes.to_float32(stored, name), name)
    numbers = ~np.isnan(dtypes.to_float32(stored, name))
    same_bits(back[numbers], stored[numbers])
    assert np.isnan(dtypes.to_float32(back[~numbers], name)).all()


def integer_of(x, name):
    info = np.iinfo(name)
    if math.isnan(x):
        return 0
    if math.isinf(x):
        return info.max if x > 0 else info.min
    return min(max(round(x), info.min), info.max)  # Python rounds to even, exactly


@pytest.mark.oracle
@pytest.mark.parametrize("name", INTEGERS)
def test_float_to_integer(name):
    info = np.iinfo(name)
    edges = [s * (2.0**k + d) for s in (1, -1) for k in range(66) for d in (-1, -0.5, 0, 0.5, 1, 1.5)]
    edges += [0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 1e-45, 3e38, -3e38, math.inf, -math.inf, math.nan]
    edges += [float(info.max), float(info.min)]
    x = np.array(edges, np.float32)
    x = np.concatenate([x, nextafter(x, 0), dense_float32()[::97]])
    got = dtypes.from_float32(x, name)
    assert got.dtype == np.dtype(name)
    assert got.tolist() == [integer_of(v, name) for v in x.tolist()]


def test_float_to_bool():
    x = np.array([0.0, -0.0, 1e-45, -3.0, math.nan, math.inf], np.float32)
    got = dtypes.from_float32(x, "bool")
    assert got.dtype == np.uint8
    assert got.tolist() == [0, 0, 1, 1, 1, 1]


@pytest.mark.oracle
def test_tfloat32_keeps_ten_mantissa_bits():
    x = dense_float32()
    finite = x[np.isfinite(x) & (np.abs(x) < 1e38)]
    _, exponent = np.frexp(finite.astype(np.float64))
    exponent = np.maximum(exponent, -125)  # subnormals share the spacing of the smallest normal
    spacing = np.ldexp(1.0, exponent - 11)
    expected = (np.rint(finite.astype(np.float64) / spacing) * spacing).astype(np.float32)
    got = dtypes.round_to(finite, "tfloat32")
    same_bits(got, expected)
    same_bits(dtypes.from_float32(finite, "tfloat32"), expected)
    special = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000], np.uint32).view(np.float32)
    got = dtypes.round_to(special, "tfloat32")
    assert np.isnan(got[:3]).all() and got[3] == np.inf and got[4] == -np.inf


@pytest.mark.parametrize("name", [n for n in dtypes.NAMES])
def test_writer_fills_strided_views_and_broadcasts(name):
    x = np.array([[0.0, 1.0, 2.5], [3.0, 100.0, 7.0]], np.float32)
    plain = dtypes.from_float32(x, name)
    for order in "CF":
        buffer = np.zeros((4, 6), dtypes.storage(name), order=order)
        view = buffer[1:3, ::2]
        dtypes.writer(name)(view, x)
        same_bits(view, plain)
        assert dtypes.from_float32(x, name, out=view) is view
        assert not buffer[0].astype(np.float32).any() and not buffer[:, 1::2].astype(np.float32).any()
        dtypes.writer(name)(view, x[:, 1:2])
        same_bits(view, np.broadcast_to(plain[:, 1:2], (2, 3)))
    same_bits(dtypes.round_to(x, name), dtypes.to_float32(plain, name))


# ---- storage -> storage ----


@pytest.mark.parametrize(("src", "dst"), list(itertools.product(INTEGERS + ["bool"], repeat=2)))
def test_integer_to_integer_is_exact_and_saturates(src, dst):
    given = dtypes.storage(src)
    low, high = (0, 1) if src == "bool" else (np.iinfo(given).min, np.iinfo(given).max)
    values = {
        low,
        high,
        0,
        1,
        high // 2 + 1,
        max(low, -1),
        min(high, 255),
        min(high, 256),
        min(high, 2**24 + 1),
    }
    array = np.array(sorted(values), given)
    if dst == "bool":
        expected = [int(v != 0) for v in array.tolist()]
    else:
        info = np.iinfo(dst)
        expected = [min(max(v, info.min), info.max) for v in array.tolist()]
    got = dtypes.convert(array, src, dst)
    assert got.dtype == dtypes.storage(dst) and got.tolist() == expected
    assert not np.shares_memory(got, array)
    out = np.zeros((len(array), 2), dtypes.storage(dst))[:, 0]
    assert dtypes.convert(array, src, dst, out=out) is out and out.tolist() == expected


@pytest.mark.parametrize("name", FORMATS)
def test_same_dtype_copies_bits(name):
    stored = codes(name)
    got = dtypes.convert(stored, name, name)
    same_bits(got, stored)
    assert not np.shares_memory(got, stored)
    nan = np.array([0x7F800001], np.uint32).view(np.float32)
    same_bits(dtypes.convert(nan, "float32", "float32"), nan)


def test_convert_through_float32():
    i32 = np.array([2**24 + 1, -7, 2**31 - 1], np.int32)
    assert dtypes.convert(i32, "int32", "float32").tolist() == [2.0**24, -7.0, 2.0**31]
    bf = np.array([1.5, 2.5, -1e30, math.nan], ml_dtypes.bfloat16)
    assert dtypes.convert(bf, "bfloat16", "int8").tolist() == [2, 2, -128, 0]
    f8 = np.array([1.5, 240.0], ml_dtypes.float8_e4m3)
    out = np.zeros(4, np.float16)[::2]
    assert dtypes.convert(f8, "float8_e4m3", "float16", out=out) is out and out.tolist() == [1.5, 240.0]
    x = np.array([1.0 + 2.0**-12], np.float32)
    got = dtypes.convert(x, "float32", "tfloat32")
    assert got.tolist() == [1.0]
    same = dtypes.convert(x, "float32r", "float32")
    assert same.tolist() == x.tolist() and not np.shares_memory(same, x)
