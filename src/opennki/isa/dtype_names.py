"""Names of the data types of the NeuronCore, their public objects, sizes, limits and promotion.

`opennki.isa.dtypes` gives all of this on, together with the conversions between storage and float32; import
from there. Source: the public NKI documentation of dtypes and type promotion.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

# ---- public dtype objects, as the vendor's `nki.language` exposes them -----------------

bool_ = np.bool_
uint8, int8, uint16, int16, uint32, int32 = np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32
uint64, int64 = np.uint64, np.int64
float16, float32, float64 = np.float16, np.float32, np.float64
bfloat16 = np.dtype(ml_dtypes.bfloat16)
float8_e4m3 = np.dtype(ml_dtypes.float8_e4m3)
float8_e4m3fn = np.dtype(ml_dtypes.float8_e4m3fn)
float8_e5m2 = np.dtype(ml_dtypes.float8_e5m2)
tfloat32 = np.dtype("V4")
# A structured dtype is the only NumPy dtype of four bytes that equals neither float32 nor the void of
# tfloat32.
float32r = np.dtype([("float32r", "<f4")])

PUBLIC: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.bool_),
    "uint8": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
    "uint16": np.dtype(np.uint16),
    "int16": np.dtype(np.int16),
    "uint32": np.dtype(np.uint32),
    "int32": np.dtype(np.int32),
    "uint64": np.dtype(np.uint64),
    "int64": np.dtype(np.int64),
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float32r": float32r,
    "tfloat32": tfloat32,
    "float16": np.dtype(np.float16),
    "bfloat16": bfloat16,
    "float8_e4m3": float8_e4m3,
    "float8_e4m3fn": float8_e4m3fn,
    "float8_e5m2": float8_e5m2,
}
NAMES: tuple[str, ...] = tuple(PUBLIC)

STORAGE: dict[str, np.dtype[Any]] = {
    **PUBLIC,
    "bool": np.dtype(np.uint8),
    "float32r": np.dtype(np.float32),
    "tfloat32": np.dtype(np.float32),
}
INTEGERS = frozenset(name for name in NAMES if STORAGE[name].kind in "iu")
FLOATS = frozenset(NAMES) - INTEGERS
_ITEMSIZE = {name: dtype.itemsize for name, dtype in STORAGE.items()}

_ALIASES: dict[object, str] = {
    **{name: name for name in NAMES},
    "bool_": "bool",
    "bool8": "bool",
    "u8": "uint8",
    "i8": "int8",
    "fp64": "float64",
    "fp32": "float32",
    "fp32r": "float32r",
    "tf32": "tfloat32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "float8e4": "float8_e4m3",
    "float8e5": "float8_e5m2",
    "float8_e4": "float8_e4m3",
    "float8_e5": "float8_e5m2",
    "float8_e4m3_fn": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3",
    "fp8_e4m3fn": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}

# ---- names -----------------------------------------------------------------------------

# Python's own types follow the promotion rule of weak scalars, except bool, which the API uses as a dtype
# itself.
_CANONICAL: dict[object, str] = {
    **_ALIASES,
    **{dtype: name for name, dtype in PUBLIC.items()},
    bool: "bool",
    int: "int32",
    float: "float32",
}
_MISSING = object()
_ABSTRACT: frozenset[type] = frozenset(
    (np.generic, np.number, np.integer, np.signedinteger, np.unsignedinteger)
    + (np.inexact, np.floating, np.complexfloating, np.flexible, np.character)
)
_CACHE_LIMIT = 4096  # dtype objects are few; a caller that makes them without end must not grow this table


def canonical(x: object) -> str:
    """Canonical name of a dtype.

    `x`: a canonical name or alias, a NumPy or ml_dtypes dtype or scalar type, Python's bool, int (int32) or
    float (float32), or a framework's dtype object, recognised by its name (torch.float32,
    jax.numpy.bfloat16). Raises TypeError, naming `x` and the legal names, for anything else.
    """
    try:
        name = _CANONICAL.get(x)
    except TypeError:  # unhashable
        return _slow_canonical(x)
    if name is None:
        name = _slow_canonical(x)
        if len(_CANONICAL) < _CACHE_LIMIT:
            _CANONICAL[x] = name
    return name


def _slow_canonical(x: object) -> str:
    if isinstance(x, np.dtype):
        # Byte order is not part of a name: buffers are always native.
        name = _ALIASES.get(x.name) if x.names is None else None
    elif isinstance(x, type):
        dtype = getattr(x, "dtype", _MISSING)  # jax.numpy.float32 is a class that carries its dtype
        if isinstance(dtype, np.dtype):
            name = _ALIASES.get(dtype.name)
        else:
            concrete = issubclass(x, np.generic) and x not in _ABSTRACT
            name = _ALIASES.get(np.dtype(x).name) if concrete else None
    elif isinstance(x, str):
        name = None
        if x.rpartition(".")[0] in ("np", "numpy", "nl", "torch", "jnp", "ml_dtypes"):
            name = _ALIASES.get(x.rpartition(".")[2])
    elif isinstance(x, np.ndarray | np.generic | bool | int | float | complex | bytes) or x is None:
        name = None
    elif getattr(x, "dtype", _MISSING) is not _MISSING and getattr(x, "shape", _MISSING) is not _MISSING:
        name = None  # a tensor is not a dtype, however it prints
    else:
        given = getattr(x, "name", _MISSING)
        name = _ALIASES.get(given) if isinstance(given, str) else _ALIASES.get(str(x).rpartition(".")[2])
    if name is None:
        raise _unknown(x)
    return name


def _unknown(x: object) -> TypeError:
    text = repr(x)
    text = text if len(text) <= 80 else text[:77] + "..."
    return TypeError(f"{text} ({type(x).__name__}) is not an NKI dtype; legal dtypes are {', '.join(NAMES)}")


def public(name: str) -> np.dtype[Any]:
    """The NumPy dtype users see for a canonical name; tfloat32 is `|V4`, float32r a structured dtype."""
    return PUBLIC[name] if name in PUBLIC else PUBLIC[canonical(name)]


def storage(name: str) -> np.dtype[Any]:
    """The NumPy dtype of buffers: bool is held as uint8, tfloat32 and float32r as float32."""
    return STORAGE[name] if name in STORAGE else STORAGE[canonical(name)]


def itemsize(name: str) -> int:
    """Bytes of one element."""
    return _ITEMSIZE[name] if name in _ITEMSIZE else _ITEMSIZE[canonical(name)]


def is_float(name: str) -> bool:
    """Whether the dtype is a floating-point format."""
    return (name if name in PUBLIC else canonical(name)) in FLOATS


def is_integer(name: str) -> bool:
    """Whether the dtype is an integer or bool."""
    return (name if name in PUBLIC else canonical(name)) in INTEGERS


@dataclass(frozen=True, slots=True)
class _TFloat32Info:
    """Limits of tfloat32 (1 sign, 8 exponent, 10 mantissa bits), named as in `numpy.finfo`."""

    bits: int
    nexp: int
    nmant: int
    minexp: int
    maxexp: int
    max: np.float32
    min: np.float32
    eps: np.float32
    epsneg: np.float32
    tiny: np.float32
    smallest_normal: np.float32
    smallest_subnormal: np.float32
    dtype: np.dtype[Any]


_TFLOAT32_INFO = _TFloat32Info(
    bits=19,
    nexp=8,
    nmant=10,
    minexp=-126,
    maxexp=128,
    max=np.float32((2 - 2.0**-10) * 2.0**127),
    min=np.float32(-(2 - 2.0**-10) * 2.0**127),
    eps=np.float32(2.0**-10),
    epsneg=np.float32(2.0**-11),
    tiny=np.float32(2.0**-126),
    smallest_normal=np.float32(2.0**-126),
    smallest_subnormal=np.float32(2.0**-136),
    dtype=tfloat32,
)


def finfo(dtype: object) -> Any:
    """Limits of a floating-point dtype: min, max, eps, tiny, smallest_normal, smallest_subnormal, bits.

    The values are scalars of that dtype (float32 for tfloat32 and float32r). Raises ValueError for integers
    and bool, TypeError for what is no dtype.
    """
    name = canonical(dtype)
    if name in INTEGERS:
        raise ValueError(f"finfo needs a floating-point dtype, got {name}; use numpy.iinfo for integers")
    return _TFLOAT32_INFO if name == "tfloat32" else ml_dtypes.finfo(STORAGE[name])


# ---- promotion -------------------------------------------------------------------------

# Wider first. Two formats of one size where neither holds the other widen as the vendor's table says.
_FLOAT_RANK = {
    "float64": 0,
    "float32": 1,
    "float32r": 2,
    "tfloat32": 3,
    "float16": 4,
    "bfloat16": 4,
    "float8_e4m3": 5,
    "float8_e4m3fn": 5,
    "float8_e5m2": 5,
}
_FLOAT_WIDENED = {3: "float32", 4: "float32", 5: "bfloat16"}
_SIGNED = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


def _promote_floats(a: str, b: str) -> str:
    if a == b:
        return a
    rank_a, rank_b = _FLOAT_RANK[a], _FLOAT_RANK[b]
    if {a, b} == {"float32r", "tfloat32"}:
        return "float32"
    if rank_a == rank_b:
        return _FLOAT_WIDENED[rank_a]
    return a if rank_a < rank_b else b


def _promote_integers(a: str, b: str) -> str:
    if a == b or b == "bool":
        return a
    if a == "bool":
        return b
    size_a, size_b = _ITEMSIZE[a], _ITEMSIZE[b]
    signed_a, signed_b = a[0] == "i", b[0] == "i"
    if signed_a == signed_b:
        return a if size_a > size_b else b
    signed, unsigned = (size_a, size_b) if signed_a else (size_b, size_a)
    size = signed if signed > unsigned else 2 * unsigned
    # No engine has 64-bit integers: what only they could hold becomes float32.
    return _SIGNED[size] if size <= 4 or signed == 8 > unsigned else "float32"


@cache
def _promote(a: str, b: str) -> str:
    if a in INTEGERS:
        return _promote_integers(a, b) if b in INTEGERS else b
    return a if b in INTEGERS else _promote_floats(a, b)


def promote(*names: str) -> str:
    """Result dtype of operands of the given dtypes, by the vendor's promotion table; order does not matter.

    float and integer: the float; two floats: the wider (float16 + bfloat16: float32, two 8-bit formats:
    bfloat16); two integers: the wider, or the next signed type that holds both (int8 + uint8: int16), or
    float32 where that would be int64 (int32 + uint32). bool tiles yield to any other dtype. Raises ValueError
    without operands.
    """
    if not names:
        raise ValueError("promote needs at least one dtype")
    known = [name if name in STORAGE else canonical(name) for name in names]
    if len(known) == 2:
        return _promote(known[0], known[1])
    if not INTEGERS.issuperset(known):
        known = [name for name in known if name in FLOATS]
    # Pairwise promotion is not associative; folding from the widest makes the result independent of the
    # order.
    known.sort(key=lambda name: (-_ITEMSIZE[name], _FLOAT_RANK.get(name, 9), name))
    result = known[0]
    for name in known[1:]:
        result = _promote(result, name)
    return result


_WEAK_64 = {"float64": "float32", "int64": "int32", "uint64": "uint32", "bool": "uint8"}


def weak(value: object) -> str:
    """dtype a scalar takes part in promotion with: bool is uint8, int is int32, float is float32.

    A typed scalar (np.float16(2), 0-d arrays too) keeps its dtype; 64-bit ones, which NumPy makes of plain
    Python arithmetic, count as 32-bit. Raises TypeError for what is no real number.
    """
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        name = canonical(value.dtype)
        return _WEAK_64.get(name, name)
    if isinstance(value, bool):
        return "uint8"
    if isinstance(value, int):
        return "int32"
    if isinstance(value, float):
        return "float32"
    raise TypeError(f"{value!r} ({type(value).__name__}) is not a scalar that can meet a tile in arithmetic")
