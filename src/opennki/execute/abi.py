"""What the C sources and the lowering agree on, as ctypes (see native/nki.h), and the numbers of dtypes and functions."""

from __future__ import annotations

import ctypes as C

from opennki.isa.scalar import SCALAR

ABI = 1
RANK = 6
CHUNK = 256

DTYPES: dict[str, int] = {
    "float32": 0, "float32r": 0, "bfloat16": 1, "float16": 2, "float8_e4m3": 3, "float8_e4m3fn": 4, "float8_e5m2": 5, "tfloat32": 6,
    "int32": 7, "uint32": 8, "int16": 9, "uint16": 10, "int8": 11, "uint8": 12, "bool": 13,
}  # fmt: skip

FUNCTIONS: dict[str, int] = {name: i for i, name in enumerate(sorted(SCALAR))}
"""Numbers of the scalar functions, as functions.h has them."""

LOAD, LOAD_RAW, STORE, STORE_RAW, CONST, FUNC, SELECT, PRED, INDEX, FOLD, ROUND, EXACT = range(12)


class Uop(C.Structure):
    """One vector operation."""

    _fields_ = [(n, C.c_int32) for n in ("code", "fn", "d", "a", "b", "c")] + [("imm", C.c_float), ("pad", C.c_int32)]  # type: ignore[assignment]


class Phase(C.Structure):
    """Operations that run over a row, or once for it."""

    _fields_ = [(n, C.c_int32) for n in ("first", "count", "row", "pad")]


class Tile(C.Structure):
    """Strides of an operand, and its dtype."""

    _fields_ = [("stride", C.c_int64 * RANK), ("dtype", C.c_int32), ("pad", C.c_int32)]


class AffineTile(C.Structure):
    """Strides of a predicate or index expression."""

    _fields_ = [("stride", C.c_int64 * RANK)]


class Elementwise(C.Structure):
    """An elementwise program."""

    _fields_ = [
        ("outer", C.c_int32), ("inner", C.c_int32), ("shape", C.c_int64 * RANK),
        ("n_phases", C.c_int32), ("n_uops", C.c_int32), ("n_tiles", C.c_int32), ("n_preds", C.c_int32), ("n_indices", C.c_int32),
        ("n_registers", C.c_int32),
        ("phases", C.POINTER(Phase)), ("uops", C.POINTER(Uop)), ("tiles", C.POINTER(Tile)),
        ("preds", C.POINTER(AffineTile)), ("indices", C.POINTER(AffineTile)),
    ]  # fmt: skip


class Matmul(C.Structure):
    """A matrix product."""

    _fields_ = [
        ("K", C.c_int32), ("M", C.c_int32), ("N", C.c_int32), ("s_dtype", C.c_int32), ("m_dtype", C.c_int32),
        ("s_stride", C.c_int64 * 2), ("m_stride", C.c_int64 * 2), ("d_stride", C.c_int64 * 2),
        ("accumulate", C.c_int32), ("pad", C.c_int32),
    ]  # fmt: skip


class Copy(C.Structure):
    """A copy of bits."""

    _fields_ = [("rank", C.c_int32), ("width", C.c_int32)] + [
        (n, C.c_int64 * RANK) for n in ("shape", "d_stride", "s_stride")
    ]  # fmt: skip


class Scan(C.Structure):
    """A scan along rows."""

    _fields_ = (
        [("rows", C.c_int64), ("n", C.c_int64)]  # type: ignore[assignment]
        + [(n, C.c_int64 * 2) for n in ("x_stride", "y_stride", "d_stride")]
        + [("i_stride", C.c_int64)]
        + [(n, C.c_int32) for n in ("x_dtype", "y_dtype", "d_dtype", "i_dtype", "op0", "op1", "reverse0", "reverse1")]
        + [("has_initial_tile", C.c_int32), ("pad", C.c_int32), ("initial", C.c_float), ("pad2", C.c_int32)]
    )


class PartitionFold(C.Structure):
    """A fold over the partitions."""

    _fields_ = [("p", C.c_int64), ("f", C.c_int64), ("x_stride", C.c_int64 * 2), ("d_stride", C.c_int64)] + [  # type: ignore[assignment]
        (n, C.c_int32) for n in ("x_dtype", "d_dtype", "fn", "pad")
    ]
