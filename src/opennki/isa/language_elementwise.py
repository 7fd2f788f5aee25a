"""Elementwise operations of the language that no documented instruction computes: division, remainders,
rounding, selection.

The vendor's compiler composes them; here each is one instruction of the Vector Engine, whose cost is that of
the documented instruction of the same form.
"""

from __future__ import annotations

from typing import Annotated as T
from typing import Any

import numpy as np

from opennki.errors import NkiTypeError, NkiValueError
from opennki.isa.declare import (
    NUMERIC,
    ON_CHIP,
    Array,
    Attr,
    DType,
    In,
    InOut,
    Mask,
    Op,
    Result,
    instruction,
)
from opennki.isa.dtypes import is_integer, promote
from opennki.isa.scalar import SCALAR
from opennki.isa.vector_rules import apply, apply_bits, not_both_in_psum, only_integers

FUNCTIONS = frozenset(SCALAR)


def _bits(c: Any) -> bool:
    return SCALAR[c.op].group == "bitvec"


def _check_elementwise(c: Any, target: Any) -> None:
    arity = SCALAR[c.op].arity
    if (c.operand is None) != (arity == 1):
        raise NkiTypeError(
            f"{c.op} takes {arity} operand{'s' if arity > 1 else ''}",
            operand="operand",
            rule="a function of two operands has an operand, a function of one has none",
            why="it says what is computed",
            fix="give operand, or leave it out",
        )
    if getattr(c.operand, "space", ""):
        not_both_in_psum(c, "data", "operand")
    if _bits(c):
        only_integers(c, c.op, "data", result=c.data.dtype)


def _result_dtype(c: Any) -> str:
    other = getattr(c.operand, "dtype", None) if getattr(c.operand, "space", "") else None
    return promote(c.data.dtype, other) if other else str(c.data.dtype)


def _two_tiles(d: Any) -> int:
    return sum(1 for name in d.dtypes if name in ("operand", "on_true", "on_false"))


def _cost(d: Any, hw: Any) -> float:
    return float(max(hw.min_ii, 2 * d.F if _two_tiles(d) else d.F))


@instruction(
    engine="vector",
    family="elementwise",
    source="api_legacy: elementwise functions of language",
    surface="internal",
    results=(Result("data", _result_dtype),),
    raw=_bits,
    check=_check_elementwise,
    cost=_cost,
)
def elementwise(
    op: T[str, Op(FUNCTIONS)],
    data: T[Array, In("P F*", ON_CHIP)],
    operand: T[Any, In("P F*", ON_CHIP, NUMERIC, scalar=True, optional=True)] = None,
    reverse: T[bool, Attr((bool,))] = False,
    *,
    mask: T[Any, Mask] = None,
    dtype: T[Any, DType] = None,
) -> Array:
    """op(data), or data op operand, element by element.

    op: any scalar function. data: [P, F...] in SBUF or PSUM, P <= 128. operand: for functions of two
    operands, a number or a tile of the shape of data, not both in PSUM; reverse: it is the left side. Float32
    arithmetic, rounded once to dtype, by default that of data (promoted with that of operand); bitwise
    functions take and make integers and keep the bits. The language makes it for functions that no other
    instruction has. Cost: max(64, F) cycles, 2 F with two tiles, assumed.
    """
    if SCALAR[op].group == "bitvec":
        return apply_bits(op, data, operand, reverse)
    return apply(op, data, operand, reverse)


def _check_select(c: Any, target: Any) -> None:
    tiles = [v for v in (c.on_true, c.on_false) if getattr(v, "space", "")]
    if sum(v.space == "psum" for v in (c.predicate, *tiles)) > 1:
        raise NkiValueError(
            "more than one operand of a selection is in PSUM",
            operand="on_false",
            rule="an instruction of the Vector Engine reads one operand from PSUM",
            why="it has one read port there",
            fix="copy the others to SBUF with nl.copy",
        )


def _select_dtype(c: Any) -> str:
    kinds = [v.dtype for v in (c.on_true, c.on_false) if getattr(v, "space", "")]
    if not kinds:
        return "int32" if all(isinstance(v, int) for v in (c.on_true, c.on_false)) else "float32"
    return promote(*kinds) if len(kinds) == 2 else str(kinds[0])


def _select_integers(c: Any) -> bool:
    return all(
        is_integer(v.dtype) if getattr(v, "space", "") else isinstance(v, int)
        for v in (c.on_true, c.on_false)
    )


@instruction(
    engine="vector",
    family="select",
    source="api_legacy: language.where",
    surface="internal",
    results=(Result("predicate", _select_dtype),),
    raw=_select_integers,
    check=_check_select,
    cost=_cost,
)
def select(
    predicate: T[Array, In("P F*", ON_CHIP)],
    on_true: T[Any, In("P F*", ON_CHIP, NUMERIC, scalar=True)],
    on_false: T[Any, In("P F*", ON_CHIP, NUMERIC, scalar=True)],
    *,
    mask: T[Any, Mask] = None,
    dtype: T[Any, DType] = None,
) -> Array:
    """Selects by a tile: result = on_true where predicate is not zero, on_false elsewhere.

    predicate: [P, F...] of any dtype, NaN counts as not zero. on_true, on_false: tiles of its shape, or
    numbers; at most one operand in PSUM. Result: dtype, or the promoted dtype of the tiles; integers stay
    exact. Cost: 2 F cycles, assumed.
    """
    chosen = predicate != 0
    values = [
        np.asarray(v, np.int64) if isinstance(v, (int, np.integer)) else np.asarray(v)
        for v in (on_true, on_false)
    ]
    return np.where(chosen, *values)


REDUCIBLE = frozenset(name for name, f in SCALAR.items() if f.reducible)


def _check_accumulate(c: Any, target: Any) -> None:
    not_both_in_psum(c, "dst", "data")
    if _bits(c):
        only_integers(c, c.op, "dst", "data")


@instruction(
    engine="vector",
    family="accumulate",
    source="api_legacy: language.loop_reduce",
    surface="internal",
    raw=_bits,
    check=_check_accumulate,
    cost=lambda d, hw: float(max(hw.min_ii, 2 * d.F)),
)
def accumulate(
    *,
    dst: T[Array, InOut("P F*", ON_CHIP)],
    data: T[Array, In("P F*", ON_CHIP)],
    op: T[str, Op(REDUCIBLE)],
    mask: T[Any, Mask] = None,
) -> Array:
    """dst = dst op data: one step of a reduction over loops, whose iterations may meet in dst.

    dst, data: [P, F...] in SBUF or PSUM, not both in PSUM, P <= 128. op: an operator that reduces. Float32
    arithmetic, rounded to the dtype of dst in each step; bitwise operators keep bits. The language makes it
    for nl.loop_reduce, which states that the order of the iterations does not matter. Cost: max(64, 2 F)
    cycles, as tensor_tensor.
    """
    if SCALAR[op].group == "bitvec":
        return apply_bits(op, dst, data)
    return apply(op, dst, data)
