"""Promotion of dtypes."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opennki.isa import dtypes


# ---- promotion ----

PROMOTED = {
    ("float16", "bfloat16"): "float32",
    ("float8_e4m3", "float16"): "float16",
    ("float8_e4m3", "bfloat16"): "bfloat16",
    ("float8_e4m3", "float8_e5m2"): "bfloat16",
    ("float8_e4m3", "float8_e4m3fn"): "bfloat16",
    ("tfloat32", "float32"): "float32",
    ("tfloat32", "bfloat16"): "tfloat32",
    ("float32r", "float32"): "float32",
    ("float32r", "tfloat32"): "float32",
    ("bfloat16", "float32"): "float32",
    ("float16", "float32"): "float32",
    ("float32", "float64"): "float64",
    ("int8", "uint8"): "int16",
    ("int8", "uint16"): "int32",
    ("int8", "int32"): "int32",
    ("int16", "uint8"): "int16",
    ("int16", "uint16"): "int32",
    ("uint8", "uint16"): "uint16",
    ("uint16", "int32"): "int32",
    ("int32", "uint32"): "float32",
    ("int8", "uint32"): "float32",
    ("int64", "uint32"): "int64",
    ("int64", "uint64"): "float32",
    ("bool", "bool"): "bool",
    ("bool", "int8"): "int8",
    ("bool", "bfloat16"): "bfloat16",
    ("float16", "int32"): "float16",
    ("float8_e5m2", "uint32"): "float8_e5m2",
    ("float32", "int8"): "float32",
}


@pytest.mark.parametrize(("a", "b"), PROMOTED)
def test_promotion_table(a, b):
    assert dtypes.promote(a, b) == dtypes.promote(b, a) == PROMOTED[a, b]


@given(st.lists(st.sampled_from(dtypes.NAMES), min_size=1, max_size=4), st.randoms())
@settings(max_examples=200)
def test_promotion_laws(names, random):
    result = dtypes.promote(*names)
    shuffled = list(names)
    random.shuffle(shuffled)
    assert dtypes.promote(*shuffled) == result
    assert dtypes.promote(names[0], names[0]) == dtypes.promote(names[0]) == names[0]
    assert dtypes.is_float(result) or all(dtypes.is_integer(n) for n in names)


def test_promotion_of_many():
    assert dtypes.promote("float8_e4m3", "float8_e5m2", "float16") == "float16"
    assert dtypes.promote("int32", "uint32", "bfloat16") == "bfloat16"
    assert dtypes.promote("int8", "uint8", "uint16") == "int32"
    with pytest.raises(ValueError, match="at least one dtype"):
        dtypes.promote()


def test_weak_scalars():
    assert [dtypes.weak(v) for v in (True, 2, -1, 1.2, math.inf)] == [
        "uint8",
        "int32",
        "int32",
        "float32",
        "float32",
    ]
    assert dtypes.promote("int8", dtypes.weak(2)) == "int32"
    assert dtypes.promote("float16", dtypes.weak(1.2)) == "float32"
    assert dtypes.promote("float16", dtypes.weak(np.float16(2))) == "float16"
    assert dtypes.weak(np.sqrt(np.float64(2))) == "float32"
    assert dtypes.weak(np.int64(3)) == "int32"
    assert dtypes.weak(np.bool_(True)) == "uint8"
    assert dtypes.weak(ml_dtypes.bfloat16(1)) == "bfloat16"
    assert dtypes.weak(np.array(1, np.int8)) == "int8"
    for bad in ("1", None, 1j, np.zeros(1), [1]):
        with pytest.raises(TypeError, match="not a scalar"):
            dtypes.weak(bad)
