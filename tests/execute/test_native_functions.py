"""Conversions and scalar functions of the native library against `isa.dtypes` and the NumPy side of `isa.scalar`."""

from __future__ import annotations

import numpy as np
import pytest

from opennki.execute import abi
from opennki.isa import dtypes
from opennki.isa.dtype_names import STORAGE
from opennki.isa.scalar import SCALAR
from tests.execute import native

LOW_PRECISION = [name for name in abi.DTYPES if STORAGE[name].itemsize <= 2]
SPECIAL = np.array(
    [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1,
        -1,
        2,
        -2,
        3,
        -3,
        0.5,
        -0.5,
        1.5,
        2.5,
        1e-45,
        -1e-45,
        1.1754944e-38,
        3.4028235e38,
        -3.4028235e38,
        2.0**23,
        2.0**23 + 1,
        2.0**24,
        2.0**31,
        -(2.0**31),
        2.0**31 - 128,
        2.0**32,
        2.0**32 - 256,
        127.5,
        128.5,
        255.5,
        -128.5,
        32767.5,
        65535.5,
        88.72,
        88.73,
        -87.33,
        -87.34,
        -103.97,
        -103.98,
        -104,
        -105,
        240,
        248,
        256,
        448,
        464,
        480,
        57344,
        61440,
        65504,
        65520,
        3.1415927,
        1e6,
        1e22,
    ],
    np.float32,
)


@pytest.fixture(params=native.LEVELS)
def lib(request):
    return native.at_level(request.param)


@pytest.mark.parametrize("name", LOW_PRECISION)
def test_all_patterns_to_float32(lib, name):
    size = STORAGE[name].itemsize
    a = np.arange(1 << (8 * size), dtype=f"u{size}").view(STORAGE[name])
    native.assert_same(native.to_float(lib, name, a), dtypes.to_float32(a, name), name)


@pytest.mark.parametrize("name", ["float32", "tfloat32", "int32", "uint32"])
def test_wide_patterns_to_float32(lib, name):
    a = np.concatenate([native.random_bits(1 << 18, 1), SPECIAL]).view(STORAGE[name])
    native.assert_same(native.to_float(lib, name, a), dtypes.to_float32(a, name), name)


@pytest.mark.parametrize("name", sorted(abi.DTYPES))
def test_float32_to_every_dtype(lib, name):
    size = STORAGE[name].itemsize
    parts = [native.random_bits(1 << 20, 2), SPECIAL, np.random.default_rng(3).uniform(-300, 300, 1 << 16).astype(np.float32)]
    parts += [np.float32(scale) * np.random.default_rng(4).standard_normal(1 << 16).astype(np.float32) for scale in (1e-2, 1e3, 1e9, 1e-7)]
    if size <= 2:
        # Every value of the dtype, the middles between neighbours, and what is just above and below the middles.
        codes = np.arange(1 << (8 * size), dtype=f"u{size}").view(STORAGE[name])
        value = np.unique(dtypes.to_float32(codes, name))
        value = value[np.isfinite(value)]
        middle = (value[1:].astype(np.float64) + value[:-1]) / 2
        near = middle.astype(np.float32)
        parts += [value, near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    x = np.concatenate(parts).astype(np.float32)
    native.assert_same(native.from_float(lib, name, x), dtypes.from_float32(x, name), name)


# ---- functions ---------------------------------------------------------------------------------------------------------

# Largest error in units in the last place against float64, over the whole range of float32.
ULP = {"exp": 1.0, "log": 0.8, "tanh": 1.4, "sin": 0.51, "cos": 0.51, "tan": 0.51, "arctan": 0.51, "power": 0.51, "softplus": 1.6}
TRUTH = {
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "arctan": np.arctan,
    "power": np.power,
    "softplus": lambda x: np.logaddexp(0.0, x),
}
# Compositions: (relative, absolute as a part of max(1, |x|)) against the NumPy side, which has the same formula with errors of its own in
# exp and tanh. Where the formula cancels (1 + tanh for far negative operands), only the absolute bound says something.
CLOSE = {
    "sigmoid": (5e-7, 1e-38),
    "silu": (5e-7, 1e-37),
    "silu_dx": (2e-6, 3e-7),
    "mish": (1e-6, 1e-37),
    "erf": (1.2e-7, 0),
    "erf_dx": (5e-7, 1e-44),
    "gelu": (1.2e-7, 1e-44),
    "gelu_dx": (1.2e-7, 3e-8),
    "gelu_apprx_tanh": (5e-7, 1.2e-7),
    "gelu_apprx_sigmoid": (5e-7, 1e-37),
}
EXACT = sorted(n for n, e in SCALAR.items() if n not in ULP and n not in CLOSE and e.group != "bitvec")


@np.errstate(all="ignore")
def operands(arity: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """More than a million of each kind: random bits, usual magnitudes, integers, and all pairs of special values."""
    rng = np.random.default_rng(seed)
    n = 1 << 20
    usual = (rng.standard_normal(n // 2) * 10).astype(np.float32)
    line = np.linspace(-110, 100, n // 2).astype(np.float32)
    a = np.concatenate([native.random_bits(n, seed), usual, line, np.rint(usual), 1 + usual / 1000])
    b = np.concatenate([native.random_bits(n, seed + 1), usual[::-1], np.full_like(line, 2.5), np.rint(usual[::-1] / 2), usual / 7])
    # Neighbours and multiples: quotients near integers.
    b[: n // 8] = a[: n // 8] / rng.integers(1, 1000, n // 8).astype(np.float32)
    x, y = np.meshgrid(SPECIAL, SPECIAL)
    a, b = np.concatenate([a, x.ravel()]), np.concatenate([b, y.ravel()])
    return (a.astype(np.float32), b.astype(np.float32))[:arity]


@pytest.mark.parametrize("name", EXACT)
@np.errstate(all="ignore")
def test_exact_functions(lib, name):
    given = operands(SCALAR[name].arity)
    native.assert_same(native.call(lib, name, *given), SCALAR[name].numpy(*given), name)


@pytest.mark.parametrize("name", sorted(ULP))
@np.errstate(all="ignore")
def test_errors_in_the_last_place(name):
    given = operands(SCALAR[name].arity)
    got = native.call(native.best(), name, *given)
    truth = TRUTH[name](*(g.astype(np.float64) for g in given))
    if name == "power":
        # np.power of float64 overflows nowhere that float32 does not.
        assert not np.isinf(truth[np.isfinite(truth.astype(np.float32))]).any()
    want = truth.astype(np.float32)
    assert (np.isnan(got) == np.isnan(want)).all()
    number = ~np.isnan(want)
    assert (np.signbit(got) == np.signbit(want))[number].all()
    finite = np.isfinite(want) & np.isfinite(got)
    largest = np.float64(np.finfo(np.float32).max)
    edge = number & ~finite  # infinite in one and not in the other: only within the bound of the largest number
    assert (got[edge] == want[edge]).all() or (np.abs(truth[edge & (got != want)]) < largest * (1 + 2.0**-23)).all()
    error = np.abs(got[finite].astype(np.float64) - truth[finite]) / np.spacing(np.abs(want[finite])).astype(np.float64)
    assert error.max() <= ULP[name], (name, error.max(), [g[finite][error.argmax()] for g in given])


@pytest.mark.parametrize("name", sorted(CLOSE))
@np.errstate(all="ignore")
def test_compositions(name):
    (x,) = operands(1)
    got, want = native.call(native.best(), name, x), SCALAR[name].numpy(x)
    assert (np.isnan(got) == np.isnan(want)).all()
    number = ~np.isnan(want)
    assert (np.isinf(got) == np.isinf(want)).all() and (np.signbit(got) == np.signbit(want))[number].all()
    finite = np.isfinite(want)
    relative, absolute = CLOSE[name]
    g, w = got[finite].astype(np.float64), want[finite].astype(np.float64)
    bound = relative * np.abs(w) + absolute * np.clip(np.abs(x[finite]), 1, 1e30) + 1.5e-45
    assert (np.abs(g - w) <= bound).all(), (
        name,
        x[finite][np.abs(g - w) > bound][:5],
        g[np.abs(g - w) > bound][:5],
        w[np.abs(g - w) > bound][:5],
    )


@pytest.mark.parametrize("name", sorted(n for n, e in SCALAR.items() if e.group != "bitvec"))
def test_levels_give_the_same_bits(name):
    given = operands(SCALAR[name].arity, 7)
    first, *others = [native.call(native.at_level(level), name, *given) for level in native.LEVELS]
    for other in others:
        native.assert_same(other, first, name)
