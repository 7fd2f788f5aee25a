"""Operations that the language composes: elementwise, select, accumulate, against NumPy on hard operands."""

from __future__ import annotations

import numpy as np
import pytest

from opennki.errors import NkiError, NkiTypeError, NkiValueError
from opennki.isa import dtypes
from opennki.isa.scalar import SCALAR

from .bodies import FLOATS, INTS, check, operand, run, same

pytestmark = pytest.mark.oracle
BINARY = {"divide": np.divide, "fmod": np.fmod, "mod": np.remainder, "add": np.add, "not_equal": np.not_equal}
BITS = {"bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor}


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS])
@pytest.mark.parametrize("name", BINARY)
def test_elementwise_of_two(name, dtype):
    x, y = operand((4, 30), dtype, 1), operand((4, 30), dtype, 2)
    a, b = x.astype(np.float32), y.astype(np.float32)
    with np.errstate(all="ignore"):
        forward, backward = BINARY[name](a, b).astype(np.float32), BINARY[name](b, a).astype(np.float32)
        number = BINARY[name](a, np.float32(0.75)).astype(np.float32)
    same(run("elementwise", "float32", op=name, data=x, operand=y), forward)
    same(run("elementwise", "float32", op=name, data=x, operand=y, reverse=True), backward)
    same(run("elementwise", "float32", op=name, data=x, operand=np.float32(0.75)), number)


@pytest.mark.parametrize(
    "name,oracle",
    [("ceil", np.ceil), ("floor", np.floor), ("trunc", np.trunc), ("negative", np.negative), ("abs", np.abs)],
)
def test_elementwise_of_one(name, oracle):
    x = operand((4, 30), "float32", 3)
    same(run("elementwise", op=name, data=x), oracle(x))


@pytest.mark.parametrize("dtype", INTS)
def test_elementwise_keeps_bits(dtype):
    x = operand((4, 30), dtype, 4)
    same(run("elementwise", op="invert", data=x), ~x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_select(dtype):
    c = operand((4, 30), dtype, 5)
    c[~(dtypes.to_float32(c, dtype) > 1)] = 0
    x, y = operand((4, 30), "float32", 6), operand((4, 30), "float32", 7)
    same(run("select", predicate=c, on_true=x, on_false=y), np.where(c.astype(np.float32) != 0, x, y))
    same(
        run("select", predicate=c, on_true=np.float32(2), on_false=y),
        np.where(c.astype(np.float32) != 0, np.float32(2), y),
    )


def test_select_of_nan_and_of_large_integers():
    c = np.array([[np.nan, 0.0, -0.0]], np.float32)
    x, y = np.array([[2**31 - 1, 1, 2]], np.int32), np.array([[7, 2**24 + 1, -(2**31)]], np.int32)
    got = np.asarray(run("select", predicate=c, on_true=x, on_false=y))
    assert got.tolist() == [[2**31 - 1, 2**24 + 1, -(2**31)]]


@pytest.mark.parametrize(
    "name,oracle",
    [
        ("add", np.add),
        ("multiply", np.multiply),
        ("maximum", np.maximum),
        ("minimum", np.minimum),
        ("subtract", np.subtract),
    ],
)
def test_accumulate(name, oracle):
    x, y = operand((4, 30), "float32", 8), operand((4, 30), "float32", 9)
    with np.errstate(all="ignore"):
        same(run("accumulate", dst=x, data=y, op=name), oracle(x, y))


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("dtype", INTS)
def test_accumulate_keeps_bits(name, dtype):
    x, y = operand((4, 30), dtype, 10), operand((4, 30), dtype, 11)
    same(run("accumulate", dst=x, data=y, op=name), BITS[name](x, y))


def test_bodies_do_not_change_their_inputs():
    x, y = operand((4, 30), "float32", 12), operand((4, 30), "float32", 13)
    before = x.tobytes(), y.tobytes()
    run("elementwise", op="divide", data=x, operand=y)
    run("select", predicate=x, on_true=x, on_false=y)
    run("accumulate", dst=x, data=y, op="add")
    assert (x.tobytes(), y.tobytes()) == before


@pytest.mark.parametrize(
    "name,given,kind",
    [
        ("elementwise", {"op": "divide", "data": ((4, 4), "float32")}, NkiTypeError),
        (
            "elementwise",
            {"op": "ceil", "data": ((4, 4), "float32"), "operand": ((4, 4), "float32")},
            NkiTypeError,
        ),
        ("elementwise", {"op": "invert", "data": ((4, 4), "float32")}, NkiTypeError),
        (
            "elementwise",
            {"op": "mod", "data": ((4, 4), "float32", "psum"), "operand": ((4, 4), "float32", "psum")},
            NkiError,
        ),
        (
            "select",
            {
                "predicate": ((4, 4), "uint8"),
                "on_true": ((4, 4), "float32", "psum"),
                "on_false": ((4, 4), "float32", "psum"),
            },
            NkiValueError,
        ),
        (
            "accumulate",
            {"dst": ((4, 4), "float32"), "data": ((4, 4), "float32"), "op": "bitwise_or"},
            NkiTypeError,
        ),
        (
            "accumulate",
            {"dst": ((4, 4), "float32", "psum"), "data": ((4, 4), "float32", "psum"), "op": "add"},
            NkiError,
        ),
    ],
)
def test_rules(name, given, kind):
    with pytest.raises(kind):
        check(name, **given)


def test_every_scalar_function_is_elementwise():
    x = np.abs(operand((2, 8), "float32", 14, special=False)) + 0.5
    n = operand((2, 8), "int32", 15)
    for name, function in SCALAR.items():
        data = n if function.group == "bitvec" else x
        given = {} if function.arity == 1 else {"operand": np.ones_like(data)}
        assert np.asarray(run("elementwise", op=name, data=data, **given)).shape == (2, 8)
