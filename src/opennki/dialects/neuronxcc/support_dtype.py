"""`neuronxcc.starfish.support.dtype`: data types and their predicates, as host code of public tests uses
them.

Source: imports in public tests (static_cast, bfloat16, is_float_type, sizeinbytes, ...); not documented.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from opennki.dialects.neuronxcc._missing import missing
from opennki.isa import dtypes
from opennki.isa.dtypes import bfloat16, float8_e4m3, float8_e4m3fn, float8_e5m2, float32r, tfloat32

__all__ = [
    "as_native_type",
    "bfloat16",
    "dtype2str",
    "float32r",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e5m2",
    "is_float_type",
    "is_int_type",
    "sizeinbytes",
    "static_cast",
    "str2dtype",
    "tfloat32",
]


def dtype2str(dtype: Any) -> str:
    """Name of a data type, such as "bfloat16"."""
    return dtypes.canonical(dtype)


def str2dtype(name: str) -> np.dtype[Any]:
    """Data type of a name."""
    return dtypes.public(dtypes.canonical(name))


def sizeinbytes(dtype: Any) -> int:
    """Bytes of one element."""
    return dtypes.itemsize(dtypes.canonical(dtype))


def is_float_type(dtype: Any) -> bool:
    """True for floating-point types, those of 8 bits included."""
    return dtypes.is_float(dtypes.canonical(dtype))


def is_int_type(dtype: Any) -> bool:
    """True for integer types."""
    return dtypes.is_integer(dtypes.canonical(dtype))


def static_cast(array: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """The array in another data type, rounded to nearest even as on the device. Arrays of any numeric
    dtype."""
    array = np.asarray(array)
    source, target = dtypes.canonical(array.dtype), dtypes.canonical(dtype)
    if source == target:
        return array
    data = np.ascontiguousarray(array).astype(dtypes.storage(source), copy=False)
    return dtypes.convert(data, source, target).reshape(array.shape)


def as_native_type(array: Any) -> np.ndarray[Any, Any]:
    """The array in a type that NumPy itself computes with: bfloat16 and the 8-bit floats become float32."""
    array = np.asarray(array)
    return array.astype(np.float32) if array.dtype.kind == "V" else array


__getattr__ = missing("neuronxcc.starfish.support.dtype")
