"""Data types of the NeuronCore: names, public objects, storage, conversion, promotion.

A dtype is known inside opennki by its canonical name (a string, see `NAMES`). Three views of it exist:

* `public(name)` is what `tensor.dtype` shows to users and what the vendor's `nl.<name>` compares equal to;
* `storage(name)` is the NumPy dtype of the buffers that hold such elements;
* float32 is the carrier of arithmetic: `reader(name)` brings storage to float32, `writer(name)` rounds
  float32 once, to nearest even, back into storage.

Overflow of a float format follows `ml_dtypes`: float16, bfloat16, float8_e5m2 and the legacy float8_e4m3
(largest finite 240) give infinity, float8_e4m3fn (largest finite 448) gives NaN. Float to integer rounds to
nearest even, saturates, and turns NaN into 0. Source: the public NKI documentation of dtypes and type
promotion.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from opennki.isa.dtype_names import (
    INTEGERS,
    NAMES,
    STORAGE,
    bfloat16,
    bool_,
    canonical,
    finfo,
    float8_e4m3,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    float32r,
    float64,
    int8,
    int16,
    int32,
    int64,
    is_float,
    is_integer,
    itemsize,
    promote,
    public,
    storage,
    tfloat32,
    uint8,
    uint16,
    uint32,
    uint64,
    weak,
)

__all__ = [
    "NAMES",
    "bfloat16",
    "bool_",
    "canonical",
    "finfo",
    "float16",
    "float32",
    "float32r",
    "float64",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e5m2",
    "int16",
    "int32",
    "int64",
    "int8",
    "is_float",
    "is_integer",
    "itemsize",
    "promote",
    "public",
    "storage",
    "tfloat32",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
    "weak",
    "convert",
    "from_float32",
    "reader",
    "round_to",
    "to_float32",
    "writer",
]

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]
Reader = Callable[[Array], Float32Array]
Writer = Callable[[Array, Float32Array], None]

# ---- storage -> float32 ----------------------------------------------------------------


def _same(a: Array) -> Float32Array:
    return a


def _by_cast(a: Array) -> Float32Array:
    return a.astype(np.float32)


# As a decorator errstate costs half of what it costs as a context (0.6 µs), which small tiles feel.
_quiet = np.errstate(all="ignore")


@_quiet
def _quiet_cast(a: Array) -> Float32Array:
    return a.astype(np.float32)


_PAIRS_FROM = 1024  # elements: below, the one-element table is as fast


@cache
def _fp8_values(name: str) -> tuple[Float32Array, npt.NDArray[np.uint64]]:
    """float32 values of all codes, and of all pairs of codes (two float32 in one 8-byte entry)."""
    with np.errstate(all="ignore"):
        one = np.arange(256, dtype=np.uint8).view(STORAGE[name]).astype(np.float32)
    codes = np.arange(65536, dtype=np.uint16).view(np.uint8).reshape(65536, 2)
    return one, one[codes].view(np.uint64).reshape(65536)


def _read_fp8(name: str) -> Reader:
    def read(a: Array) -> Float32Array:
        one, two = _fp8_values(name)
        n = a.size
        if n >= _PAIRS_FROM and not n & 1 and a.flags.c_contiguous:
            pairs = two.take(a.reshape(-1).view(np.uint16), mode="wrap")
            return pairs.view(np.float32).reshape(a.shape)
        return np.asarray(one.take(a.view(np.uint8), mode="wrap"))

    return read


_READ: dict[str, Reader] = {
    **{name: _by_cast for name in INTEGERS},
    "float32": _same,
    "float32r": _same,
    "tfloat32": _same,
    "float64": _quiet_cast,
    "float16": _quiet_cast,
    "bfloat16": _by_cast,  # ml_dtypes shifts bits, and is faster than the same in NumPy
    **{name: _read_fp8(name) for name in ("float8_e4m3", "float8_e4m3fn", "float8_e5m2")},
}


def reader(name: str) -> Reader:
    """The function storage array -> float32 array for one dtype (no copy where storage is float32)."""
    return _READ[name] if name in _READ else _READ[canonical(name)]


def to_float32(array: Array, name: str) -> Float32Array:
    """float32 values of a storage array of dtype `name`, of any shape and strides; exact up to float32.

    Returns `array` itself where storage is float32; int32, uint32 and 64-bit types are rounded to nearest
    even.
    """
    return reader(name)(array)


# ---- float32 -> storage ----------------------------------------------------------------


@cache
def _fp8_codes(name: str) -> npt.NDArray[np.uint8]:
    """Code of every float32 given by its upper 16 bits."""
    upper = np.arange(65536, dtype=np.uint32) << np.uint32(16)
    with np.errstate(all="ignore"):
        return upper.view(np.float32).astype(STORAGE[name]).view(np.uint8)


_LOW16 = np.uint32(0xFFFF)
_SHIFT16 = np.uint32(16)


def _to_fp8(name: str) -> Reader:
    dtype = STORAGE[name]

    def encode(x: Float32Array) -> Array:
        # Round to odd into the upper 16 bits (any lost bit sets the last kept one), then look the code up.
        # Eight significant bits, the last one sticky, are more than two above what an 8-bit float keeps, so
        # rounding twice equals rounding once.
        bits = np.ascontiguousarray(x).reshape(-1).view(np.uint32)
        index = np.bitwise_and(bits, _LOW16)
        np.add(index, _LOW16, out=index)
        np.bitwise_or(index, bits, out=index)
        np.right_shift(index, _SHIFT16, out=index)
        return _fp8_codes(name).take(index, mode="wrap").view(dtype).reshape(x.shape)

    return encode


def _to_float(dtype: np.dtype[Any]) -> Reader:
    @_quiet
    def encode(x: Float32Array) -> Array:
        return x.astype(dtype)

    return encode


_TF32_LOST = np.uint32(0x1FFF)


def _to_tfloat32(x: Float32Array) -> Float32Array:
    bits = np.ascontiguousarray(x).reshape(-1).view(np.uint32)
    result = np.right_shift(bits, np.uint32(13))
    np.bitwise_and(result, np.uint32(1), out=result)
    np.add(result, np.uint32(0xFFF), out=result)
    np.add(result, bits, out=result)
    nan = np.isnan(x).reshape(-1)
    if nan.any():  # a carry out of the payload would turn NaN into infinity or zero
        result[nan] = bits[nan] | np.uint32(0x00400000)
    np.bitwise_and(result, ~_TF32_LOST, out=result)
    return result.view(np.float32).reshape(x.shape)


def _to_integer(dtype: np.dtype[Any]) -> Reader:
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    # The carrier must hold both ends of the range exactly; for 64 bits none does, and the upper end is put in
    # by hand.
    carrier = np.dtype(np.float32) if dtype.itemsize <= 2 else np.dtype(np.float64)
    floor = carrier.type(low)
    wide = dtype.itemsize == 8
    ceiling = np.nextafter(carrier.type(high), carrier.type(0)) if wide else carrier.type(high)

    def encode(x: Float32Array) -> Array:
        nan = np.isnan(x)
        if nan.any():
            x = np.where(nan, np.float32(0), x)
        value = np.empty(x.shape, carrier)
        np.rint(x, out=value)
        np.maximum(value, floor, out=value)
        over = value > ceiling if wide else None
        np.minimum(value, ceiling, out=value)
        result = value.astype(dtype)
        if over is not None:
            result[over] = high
        return result

    return encode


def _to_bool(x: Float32Array) -> Array:
    return np.asarray(np.not_equal(x, np.float32(0))).view(np.uint8)


_ENCODE: dict[str, Reader] = {
    "float32": _same,
    "float32r": _same,
    "tfloat32": _to_tfloat32,
    **{name: _to_float(STORAGE[name]) for name in ("float64", "float16", "bfloat16")},
    **{name: _to_fp8(name) for name in ("float8_e4m3", "float8_e4m3fn", "float8_e5m2")},
    **{name: _to_integer(STORAGE[name]) for name in INTEGERS if name != "bool"},
    "bool": _to_bool,
}


def _write_by(name: str, encode: Reader) -> Writer:
    def write(out: Array, x: Float32Array) -> None:
        out[...] = encode(x)

    return write


def _write_same(out: Array, x: Float32Array) -> None:
    out[...] = x


@_quiet
def _write_cast(out: Array, x: Float32Array) -> None:
    out[...] = x


_WRITE: dict[str, Writer] = {
    **{name: _write_by(name, encode) for name, encode in _ENCODE.items()},
    "float32": _write_same,
    "float32r": _write_same,
    **{name: _write_cast for name in ("float64", "float16", "bfloat16")},
}


def writer(name: str) -> Writer:
    """The function (storage view, float32 array) -> None: round once, store in place, broadcast."""
    return _WRITE[name] if name in _WRITE else _WRITE[canonical(name)]


def from_float32(array: Float32Array, name: str, out: Array | None = None) -> Array:
    """Storage array of dtype `name` from float32, rounded once to nearest even.

    `array`: float32, any shape and strides. `out`: storage array to fill, any strides. Without `out` the
    result may be `array` itself where storage is float32. bool: every value but zero is true, NaN included.
    Overflow: see the text of this module.
    """
    name = name if name in _ENCODE else canonical(name)
    if out is None:
        return _ENCODE[name](array)
    _WRITE[name](out, array)
    return out


def round_to(array: Float32Array, name: str) -> Float32Array:
    """Values of a float32 array rounded to dtype `name` but kept in float32 (`array` itself for float32)."""
    name = name if name in _ENCODE else canonical(name)
    return _READ[name](_ENCODE[name](array))


# ---- storage -> storage ----------------------------------------------------------------


@cache
def _integer_limits(src: str, dst: str) -> tuple[Any, Any]:
    """Bounds to clip to before a cast, as scalars of the source dtype; None where none is needed."""
    given, wanted = np.iinfo(STORAGE[src]), np.iinfo(STORAGE[dst])
    low = STORAGE[src].type(wanted.min) if given.min < wanted.min else None
    high = STORAGE[src].type(wanted.max) if given.max > wanted.max else None
    return low, high


def convert(array: Array, src: str, dst: str, out: Array | None = None) -> Array:
    """Storage array of dtype `dst` from one of dtype `src`; never an alias of `array`.

    The same dtype copies bits; integer to integer is exact and saturates; everything else goes through
    float32 (so int32 and float64 are first rounded to float32, as the engines do).
    """
    src = src if src in STORAGE else canonical(src)
    dst = dst if dst in STORAGE else canonical(dst)
    if src == dst:
        result = array
    elif src in INTEGERS and dst in INTEGERS:
        if dst == "bool":
            result = np.not_equal(array, 0)
        else:
            low, high = _integer_limits(src, dst)
            result = array if low is None else np.maximum(array, low)
            result = result if high is None else np.minimum(result, high)
    else:
        value = _READ[src](array)
        if out is None:
            result = _ENCODE[dst](value)
            return result.copy() if result is array else result
        _WRITE[dst](out, value)
        return out
    if out is None:
        return np.array(result, dtype=STORAGE[dst])
    np.copyto(out, result, casting="unsafe")
    return out
