"""What the C sources and the lowering agree on, as ctypes (see native/nki.h), and the numbers of dtypes and functions."""

from __future__ import annotations

import ctypes as C
from typing import Any, ClassVar

from opennki.isa.scalar import SCALAR

ABI = 4
RANK = 8
WHERES = 2  # predicates of a product
SHORT = 64  # elements below which a row is taken together with its neighbours

DTYPES: dict[str, int] = {
    "float32": 0, "float32r": 0, "bfloat16": 1, "float16": 2, "float8_e4m3": 3, "float8_e4m3fn": 4, "float8_e5m2": 5, "tfloat32": 6,
    "int32": 7, "uint32": 8, "int16": 9, "uint16": 10, "int8": 11, "uint8": 12, "bool": 13,
}  # fmt: skip

FUNCTIONS: dict[str, int] = {name: i for i, name in enumerate(sorted(SCALAR))}
"""Numbers of the scalar functions, as functions.h has them."""

APPROXIMATE = frozenset({
    "arctan", "cos", "erf", "erf_dx", "exp", "gelu", "gelu_apprx_sigmoid", "gelu_apprx_tanh", "gelu_dx", "log", "mish", "power", "sigmoid",
    "silu", "silu_dx", "sin", "softplus", "tan", "tanh",
})  # fmt: skip
"""Functions whose last bits may differ from the interpreter's, within the bounds of docs/executor.md."""

LOAD, LOAD_RAW, STORE, STORE_RAW, CONST, FUNC, SELECT, PRED, INDEX, FOLD, ROUND, EXACT, KEEP, KEPT, TREE = range(15)


class Uop(C.Structure):
    """One vector operation."""

    _fields_: ClassVar[Any] = [(n, C.c_int32) for n in ("code", "fn", "d", "a", "b", "c")] + [("imm", C.c_float), ("pad", C.c_int32)]


class Phase(C.Structure):
    """Operations that run over a row, or once for it."""

    _fields_: ClassVar[Any] = [(n, C.c_int32) for n in ("first", "count", "row", "pad")]


class Tile(C.Structure):
    """Strides of an operand, and its dtype."""

    _fields_: ClassVar[Any] = [("stride", C.c_int64 * RANK), ("dtype", C.c_int32), ("pad", C.c_int32)]


class AffineTile(C.Structure):
    """Strides of a predicate or index expression."""

    _fields_: ClassVar[Any] = [("stride", C.c_int64 * RANK)]


class Elementwise(C.Structure):
    """An elementwise program."""

    _fields_: ClassVar[Any] = [
        ("outer", C.c_int32), ("inner", C.c_int32), ("shape", C.c_int64 * RANK),
        ("n_phases", C.c_int32), ("n_uops", C.c_int32), ("n_tiles", C.c_int32), ("n_preds", C.c_int32), ("n_indices", C.c_int32),
        ("n_registers", C.c_int32), ("n_kept", C.c_int32), ("pad", C.c_int32),
        ("phases", C.POINTER(Phase)), ("uops", C.POINTER(Uop)), ("tiles", C.POINTER(Tile)),
        ("preds", C.POINTER(AffineTile)), ("indices", C.POINTER(AffineTile)),
    ]  # fmt: skip


class Where(C.Structure):
    """A predicate of rows and columns of a product, and whether it holds."""

    _fields_: ClassVar[Any] = [("m", C.c_int64), ("n", C.c_int64), ("holds", C.c_int32), ("pad", C.c_int32)]


class Matmul(C.Structure):
    """A matrix product."""

    _fields_: ClassVar[Any] = [
        ("K", C.c_int32), ("M", C.c_int32), ("N", C.c_int32), ("s_dtype", C.c_int32), ("m_dtype", C.c_int32),
        ("s_stride", C.c_int64 * 2), ("m_stride", C.c_int64 * 2), ("d_stride", C.c_int64 * 2),
        ("accumulate", C.c_int32), ("blocks", C.c_int32), ("s_block", C.c_int64), ("m_block", C.c_int64),
        ("dot", C.c_int32), ("n_where", C.c_int32), ("where", Where * WHERES),
    ]  # fmt: skip


class Copy(C.Structure):
    """A copy of bits."""

    _fields_: ClassVar[Any] = [("rank", C.c_int32), ("width", C.c_int32)] + [
        (n, C.c_int64 * RANK) for n in ("shape", "d_stride", "s_stride")
    ]  # fmt: skip


class Scan(C.Structure):
    """A scan along rows."""

    _fields_: ClassVar[Any] = (
        [("rows", C.c_int64), ("n", C.c_int64)]
        + [(n, C.c_int64 * 2) for n in ("x_stride", "y_stride", "d_stride")]
        + [("i_stride", C.c_int64)]
        + [(n, C.c_int32) for n in ("x_dtype", "y_dtype", "d_dtype", "i_dtype", "op0", "op1", "reverse0", "reverse1")]
        + [("has_initial_tile", C.c_int32), ("pad", C.c_int32), ("initial", C.c_float), ("pad2", C.c_int32)]
    )


class PartitionFold(C.Structure):
    """A fold over the partitions."""

    _fields_: ClassVar[Any] = [("p", C.c_int64), ("f", C.c_int64), ("x_stride", C.c_int64 * 2), ("d_stride", C.c_int64)] + [
        (n, C.c_int32) for n in ("x_dtype", "d_dtype", "fn", "pad")
    ]


class AffineExpr(C.Structure):
    """const + terms."""

    _fields_: ClassVar[Any] = [("c", C.c_int64), ("first", C.c_int32), ("count", C.c_int32)]


class Term(C.Structure):
    """coefficient * variable."""

    _fields_: ClassVar[Any] = [("coef", C.c_int64), ("var", C.c_int64)]


class Address(C.Structure):
    """Buffer and byte offset."""

    _fields_: ClassVar[Any] = [("offset", AffineExpr), ("slot", C.c_int64)]


class Bound(C.Structure):
    """An index that has to be checked."""

    _fields_: ClassVar[Any] = [("base", AffineExpr), ("stride", C.c_int64 * RANK)] + [
        (n, C.c_int64) for n in ("low", "high", "size", "error")
    ]


class Clip(C.Structure):
    """A mask of one axis."""

    _fields_: ClassVar[Any] = [("base", AffineExpr), ("axis", C.c_int64), ("stride", C.c_int64)]


class Call(C.Structure):
    """An instruction on the tape."""

    _fields_: ClassVar[Any] = [
        ("kind", C.c_int32), ("rank", C.c_int32), ("what", C.c_void_p), ("shape", C.c_int64 * RANK),
        ("n_addresses", C.c_int32), ("n_bounds", C.c_int32), ("n_clips", C.c_int32), ("n_preds", C.c_int32), ("n_indices", C.c_int32),
        ("whole", C.c_int32), ("keep", C.c_int32 * 2),
        ("addresses", C.POINTER(Address)), ("bounds", C.POINTER(Bound)), ("clips", C.POINTER(Clip)),
        ("preds", C.POINTER(AffineExpr)), ("indices", C.POINTER(AffineExpr)),
    ]  # fmt: skip


class OpStruct(C.Structure):
    """An op of the tape."""

    _fields_: ClassVar[Any] = [("code", C.c_int32), ("a", C.c_int32), ("b", C.c_int32), ("c", C.c_int32), ("n", C.c_int64)]


class Watch(C.Structure):
    """A use of a watched tensor."""

    _fields_: ClassVar[Any] = [
        ("slot", C.c_int64), ("error", C.c_int64), ("rank", C.c_int32), ("axes", C.c_int32), ("shape", C.c_int64 * RANK),
        ("base", AffineExpr * RANK), ("moving", (C.c_int64 * RANK) * RANK),
        *((n, C.c_int64 * RANK) for n in ("low", "high", "cell", "cells")),
    ]  # fmt: skip


class Keep(C.Structure):
    """An operand of a product that is packed once for each place, and kept."""

    _fields_: ClassVar[Any] = [("places", C.c_int64), ("bytes", C.c_int64)]


class TapeStruct(C.Structure):
    """The tape."""

    _fields_: ClassVar[Any] = [
        ("ops", C.POINTER(OpStruct)), ("calls", C.POINTER(Call)), ("affines", C.POINTER(AffineExpr)), ("terms", C.POINTER(Term)),
        ("addresses", C.POINTER(Address)), ("watches", C.POINTER(Watch)), ("keeps", C.POINTER(Keep)),
        *((n, C.c_int64) for n in ("n_ops", "n_env", "n_buffers", "scratch", "n_keeps")),
    ]  # fmt: skip


OP_END, OP_FOR, OP_NEXT, OP_IF, OP_JUMP, OP_DIV, OP_RUN, OP_ZERO, OP_BACK, OP_TEST, OP_MARK = range(11)
ADDS_NOTHING, ADDS_TO_RESULT, ADDS_TO_ZERO = range(3)  # what a product is added to
K_EW, K_MM, K_COPY, K_SCAN, K_PFOLD, K_STEPS = range(6)
MAX_EXPRESSIONS = 32  # predicates, and index expressions, of a call
MAX_ADDRESSES = 64
CALLBACK = C.CFUNCTYPE(C.c_int32, C.c_int32)
