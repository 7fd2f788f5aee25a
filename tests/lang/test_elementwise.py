"""Elementwise functions against NumPy in float64, rounded once."""

from __future__ import annotations

import math

import numpy as np
import pytest

import opennki.dialects.neuronxcc as nki
from opennki.dialects.neuronxcc import language as nl

from .harness import BF16, FLOATS, FP16, FP32, INTS, close, fails, ops, run, sample, tiles

pytestmark = pytest.mark.oracle
_erf = np.vectorize(math.erf)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.log1p(np.exp(x))


def phi(x):
    return 0.5 * (1 + _erf(x / math.sqrt(2)))


ORACLES = {
    "abs": np.abs,
    "arctan": np.arctan,
    "ceil": np.ceil,
    "cos": np.cos,
    "erf": _erf,
    "erf_dx": lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x),
    "exp": np.exp,
    "floor": np.floor,
    "gelu": lambda x: x * phi(x),
    "gelu_apprx_sigmoid": lambda x: x * sigmoid(1.702 * x),
    "gelu_apprx_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_dx": lambda x: phi(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi),
    "mish": lambda x: x * np.tanh(softplus(x)),
    "negative": np.negative,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": sigmoid,
    "sign": np.sign,
    "silu": lambda x: x * sigmoid(x),
    "silu_dx": lambda x: sigmoid(x) * (1 + x * (1 - sigmoid(x))),
    "sin": np.sin,
    "softplus": softplus,
    "square": np.square,
    "tan": np.tan,
    "tanh": np.tanh,
    "trunc": np.trunc,
}
POSITIVE = {"log": np.log, "reciprocal": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [*ORACLES, *POSITIVE])
def test_unary(name, dtype):
    positive = name in POSITIVE
    x = sample((32, 40), dtype, 1, 0.1 if positive else -1.5, 8.0 if positive else 1.5)
    got = tiles(getattr(nl, name), x)
    assert got.dtype == dtype
    want = (POSITIVE if positive else ORACLES)[name](x.astype(np.float64))
    close(got, want, steps=16 if dtype == FP32 else 2)


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_unary_of_integers(dtype):
    x = sample((4, 6), dtype, 2)
    close(tiles(nl.square, x, out_dtype=FP32), tiles(lambda t: nl.square(t), x).astype(np.float32))
    close(tiles(lambda t: nl.negative(t, dtype=nl.int32), x), -x.astype(np.int32))
    close(tiles(nl.invert, x), ~x)
    close(tiles(nl.logical_not, x), x == 0)
    close(tiles(lambda t: nl.sqrt(nl.abs(t), dtype=nl.float32), x), np.sqrt(np.abs(x.astype(np.float32))))


BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "fmod": np.fmod,
    "mod": np.mod,
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_binary(name, dtype):
    x, y = sample((16, 24), dtype, 3), sample((16, 24), dtype, 4, 0.5, 3.0)
    got = tiles(getattr(nl, name), x, y)
    assert got.dtype == dtype
    close(got, BINARY[name](x.astype(np.float32), y.astype(np.float32)), steps=1.01)


@pytest.mark.parametrize("name", BINARY)
def test_binary_with_a_number(name):
    x = sample((16, 24), FP32, 5, 0.5, 3.0)
    fn = getattr(nl, name)
    close(tiles(lambda t: fn(t, 1.5), x), BINARY[name](x, np.float32(1.5)))
    close(tiles(lambda t: fn(1.5, t), x), BINARY[name](np.float32(1.5), x))


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("shape", [(16, 1), (1, 24), (1, 1)])
def test_binary_broadcasts(name, shape):
    x, y = sample((16, 24), FP32, 6, 0.5, 3.0), sample(shape, FP32, 7, 0.5, 3.0)
    fn = getattr(nl, name)
    close(tiles(fn, x, y), BINARY[name](x, y))
    close(tiles(fn, y, x), BINARY[name](y, x))


@pytest.mark.parametrize(
    "name,oracle",
    [
        ("equal", np.equal),
        ("not_equal", np.not_equal),
        ("greater", np.greater),
        ("greater_equal", np.greater_equal),
        ("less", np.less),
        ("less_equal", np.less_equal),
        ("logical_and", np.logical_and),
        ("logical_or", np.logical_or),
        ("logical_xor", np.logical_xor),
    ],
)
@pytest.mark.parametrize("dtype", [FP32, BF16, np.dtype(np.int32)], ids=str)
def test_comparisons_are_bool(name, oracle, dtype):
    x = np.array([[0, 1, 2, 3, 0]], dtype)
    y = np.array([[0, 2, 1, 3, 5]], dtype)
    got = tiles(getattr(nl, name), x, y)
    assert got.dtype in (np.bool_, np.uint8)
    close(got, oracle(x.astype(np.float32), y.astype(np.float32)))
    assert tiles(lambda a, b: getattr(nl, name)(a, b, dtype=nl.float32), x, y).dtype == np.float32


@pytest.mark.parametrize(
    "name,oracle",
    [("bitwise_and", np.bitwise_and), ("bitwise_or", np.bitwise_or), ("bitwise_xor", np.bitwise_xor)],
)
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_bitwise(name, oracle, dtype):
    x, y = sample((4, 9), dtype, 8), sample((4, 9), dtype, 9)
    got = tiles(getattr(nl, name), x, y)
    assert got.dtype == dtype
    close(got, oracle(x, y))


def test_shifts():
    x = np.array([[1, 2, 3, 250]], np.uint8)
    close(tiles(lambda t: nl.left_shift(t, 1, dtype=nl.uint8), x), np.left_shift(x, 1))
    close(tiles(lambda t: nl.right_shift(t, 1, dtype=nl.uint8), x), np.right_shift(x, 1))


def test_power():
    x = sample((8, 8), FP32, 10, 0.5, 2.0)
    close(tiles(lambda t: nl.power(t, 3), x), x.astype(np.float64) ** 3, steps=8)
    close(tiles(nl.power, x, x), x.astype(np.float64) ** x, steps=8)
    close(tiles(lambda t: t**2.0, x), x.astype(np.float64) ** 2, steps=8)


@pytest.mark.parametrize(
    "a,b,want",
    [
        (BF16, FP32, FP32),
        (FP16, BF16, FP32),
        (np.dtype(np.int8), FP16, FP16),
        (np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int16)),
    ],
)
def test_promotion(a, b, want):
    x, y = sample((4, 4), a, 11), sample((4, 4), b, 12)
    got = tiles(nl.add, x, y)
    assert got.dtype == want
    close(got, x.astype(np.float32) + y.astype(np.float32))


def test_weak_numbers():
    x = sample((4, 4), np.int8, 13)
    assert tiles(lambda t: t + 2, x).dtype == np.int32
    assert tiles(lambda t: t + 1.5, sample((4, 4), FP16, 14)).dtype == np.float32
    assert tiles(lambda t: t * np.float16(1.5), sample((4, 4), FP16, 14)).dtype == np.float16


def test_operators():
    x, y = sample((8, 5), FP32, 15), sample((8, 5), FP32, 16, 1.0, 2.0)
    close(
        tiles(lambda a, b: (a + b) * a - b / 2.0 + -a + abs(b) - 1 / b, x, y),
        (x + y) * x - y / 2 - x + np.abs(y) - 1 / y,
        steps=16,
    )
    close(tiles(lambda a, b: (a > b) & (b >= 1.0), x, y), (x > y) & (y >= 1))
    close(tiles(lambda a, b: a % b, x, y), x % y)


def test_in_place_operators():
    x = sample((8, 5), FP32, 17)

    def body(a):
        b = nl.zeros(a.shape, a.dtype)
        b += a
        b *= 2.0
        b -= a
        b /= 4.0
        return b

    close(tiles(body, x), x / 4)


def test_masked_result_leaves_the_rest():
    x = sample((8, 16), FP32, 18)

    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        t = nl.load(x)
        r = nl.zeros(x.shape, x.dtype)
        _i, j = nl.mgrid[0:8, 0:16]
        r[...] = nl.multiply(t, 2.0, mask=j < 10)
        nl.store(out, r)
        return out

    want = np.where(np.arange(16)[None] < 10, x * 2, 0)
    close(run(kernel, x), want)


def test_unary_functions_choose_the_activation():
    x = sample((4, 4))
    assert ops(lambda x: _store(nl.exp(nl.load(x))), x) == ["dma_copy", "activation", "dma_copy"]
    assert ops(lambda x: _store(nl.ceil(nl.load(x))), x) == ["dma_copy", "elementwise", "dma_copy"]


def _store(tile):
    out = nl.ndarray(tile.shape, tile.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


def test_errors():
    x = sample((4, 4))
    assert "HBM" in str(fails("err_unsupported_memory", lambda x: _store(nl.exp(x)), x))
    assert "no argument" in str(fails("", lambda x: _store(nl.exp(nl.load(x), scale=2)), x))
    assert "two numbers" in str(fails("", lambda x: _store(nl.add(1, 2)), x))
    y = sample((4, 5))
    assert "broadcast" in str(fails("", lambda x, y: _store(nl.add(nl.load(x), nl.load(y))), x, y))
    fails(
        "err_num_partition_mismatch", lambda x, y: _store(nl.add(nl.load(x), nl.load(y))), x, sample((3, 4))
    )
    assert "NumPy" in str(fails("", lambda x: _store(nl.add(nl.load(x), np.ones((4, 4), np.float32))), x))


def test_in_place_update_of_an_index_is_one_instruction():
    x = sample((8, 6), FP32, 19)

    def kernel(x):
        t = nl.zeros((8, 6), nl.float32)
        t[:, 0:3] += nl.load(x)[:, 0:3]
        t[nl.arange(8)[:, None], 3 + nl.arange(3)[None, :]] -= 1.0
        return _store(t)
    close(run(kernel, x), np.concatenate([x[:, :3], np.full((8, 3), -1, np.float32)], 1))
    assert ops(kernel, x) == ["memset", "dma_copy", "tensor_tensor", "tensor_scalar", "dma_copy"]


def test_numpy_numbers_on_either_side_of_an_operator():
    def kernel(a):
        t = nl.load(a)
        results = [np.float32(2) * t, np.float64(2) - t, np.int32(2) / t, np.array(2.0) + t, np.float32(2) ** t, t * np.float32(3)]
        results.append(nl.copy(np.float32(1.5) < t, dtype=a.dtype))
        out = nl.ndarray((len(results), *a.shape), dtype=a.dtype, buffer=nl.shared_hbm)
        for i, value in enumerate(results):
            nl.store(out[i], value)
        return out

    a = np.array([[1, 2], [3, 4]], np.float32)
    expected = np.stack([2 * a, 2 - a, 2 / a, 2 + a, 2**a, a * 3, (a > 1.5).astype(np.float32)])
    np.testing.assert_allclose(nki.simulate_kernel(nki.jit(kernel), a), expected, rtol=1e-6)


def test_the_quotient_of_integers_is_a_real_number():
    """Rounding it to an integer would turn the floor of 2.9 into 3."""
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=nl.int32, buffer=nl.shared_hbm)
        t = nl.load(x)
        assert (t / 10).dtype == np.float32 and (t / t).dtype == np.float32
        nl.store(out, nl.floor(t / 10, dtype=nl.int32))
        return out
    x = np.arange(-60, 68, dtype=np.int32).reshape(128, 1)
    np.testing.assert_array_equal(nki.simulate_kernel(nki.jit(kernel, platform_target="trn1"), x), x // 10)
