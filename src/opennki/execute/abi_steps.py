"""What native/steps.h and the steps of an instruction (`execute.steps`) agree on, as ctypes."""

from __future__ import annotations

import ctypes as C
from typing import Any, ClassVar

from opennki.execute.abi import RANK, AffineTile, Tile

S_FETCH, S_TAKE, S_WIDE, S_UNIFORM, S_SEED, S_LARGEST, S_MATCH, S_SEGMENTS, S_ROUTE = range(32, 41)
SCRATCH, CONSTANTS = -1, -2  # where an operand is that has no address
I64 = 14  # the dtype of temporary tiles of 64-bit integers
WIDE = (
    "load", "store", "const", "index", "select", "add", "subtract", "multiply", "maximum", "minimum", "equal", "not_equal", "less",
    "less_equal", "greater", "greater_equal",
)  # fmt: skip
AXES = RANK


def _i32(*names: str) -> list[tuple[str, Any]]:
    return [(n, C.c_int32) for n in names]


def _i64(*names: str, count: int = 0) -> list[tuple[str, Any]]:
    return [(n, C.c_int64 * count if count else C.c_int64) for n in names]


class Operand(C.Structure):
    """Where an operand is."""

    _fields_: ClassVar[Any] = _i32("which", "pad") + _i64("offset")


class Step(C.Structure):
    """A native kernel among the steps of an instruction."""

    _fields_: ClassVar[Any] = [
        *_i32("kind", "rank"), ("what", C.c_void_p), ("extent", C.c_int64 * RANK), ("axis", C.c_int32 * RANK),
        *_i32("n_operands", "n_preds", "n_indices", "again"), ("error", C.c_int64),
        ("operands", C.POINTER(Operand)), ("preds", C.POINTER(C.c_int32)), ("indices", C.POINTER(C.c_int32)),
    ]  # fmt: skip


class Steps(C.Structure):
    """The steps of an instruction."""

    _fields_: ClassVar[Any] = [
        *_i32("n_steps", "rank"), *_i64("rows"), ("steps", C.POINTER(Step)), ("constants", C.c_void_p), *_i64("scratch"),
    ]  # fmt: skip


class Axis(C.Structure):
    """A dimension whose index is read from memory."""

    _fields_: ClassVar[Any] = [*_i64("size", "unit"), *_i64("stride", count=RANK), *_i64("step"), *_i32("dtype", "axis")]


class Fetch(C.Structure):
    """A gather or scatter of a tile."""

    _fields_: ClassVar[Any] = [
        *_i32("rank", "width", "scatter", "skip", "masked", "n_axes"), *_i64("shape", "t_stride", "o_stride", "m_stride", count=RANK),
        ("axes", Axis * AXES),
    ]  # fmt: skip


class Take(C.Structure):
    """Elements of rows by position."""

    _fields_: ClassVar[Any] = [
        *_i64("rows", "n", "size"), *_i64("x_stride", "p_stride", "d_stride", count=2), *_i32("p_dtype", "width"), ("poison", C.c_uint64),
    ]  # fmt: skip


class WideOp(C.Structure):
    """An operation on 64-bit integers."""

    _fields_: ClassVar[Any] = [*_i32("code", "d", "a", "b", "c", "pad"), *_i64("imm")]


class Wide(C.Structure):
    """An elementwise program over 64-bit integers."""

    _fields_: ClassVar[Any] = [
        *_i32("rank", "n_ops", "n_tiles", "n_registers"), *_i64("shape", count=RANK),
        ("ops", C.POINTER(WideOp)), ("tiles", C.POINTER(Tile)), ("indices", C.POINTER(AffineTile)),
    ]  # fmt: skip


class Random(C.Structure):
    """Random numbers, or the seed of them."""

    _fields_: ClassVar[Any] = [*_i64("n", "call", "state_stride"), *_i32("n_index", "dtype")]


class Search(C.Structure):
    """A search in rows."""

    _fields_: ClassVar[Any] = [
        *_i64("rows", "n", "count"), *_i64("x_stride", "v_stride", "m_stride", "d_stride", "t_stride", count=2),
        *_i32("backwards", "masked"),
    ]  # fmt: skip


class Segments(C.Structure):
    """Runs of equal elements."""

    _fields_: ClassVar[Any] = [*_i64("n", "x_stride"), *_i32("raw", "pad")]
