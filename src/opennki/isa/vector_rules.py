"""Rules and helpers that the instructions of the Vector Engine share.

Sources: api_legacy, tables "ALU operators" and entries of `isa`; isa_costs.json for rates.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from opennki.errors import NkiTypeError, NkiValueError, make
from opennki.isa.declare import INTS, Array
from opennki.isa.known import certain
from opennki.isa.scalar import ALU_OPERATORS, SCALAR

ALU = frozenset(ALU_OPERATORS)
BITVEC = frozenset(name for name in ALU if SCALAR[name].group == "bitvec")
ARITHMETIC = ALU - BITVEC
BINARY = frozenset(name for name in ALU if SCALAR[name].arity == 2)
COMPARISONS = frozenset({"equal", "less", "less_equal", "greater", "greater_equal"})
ACCUMULATIONS = frozenset({"add", "subtract", "multiply", "maximum", "minimum"})
GPSIMD_ONLY = frozenset({"power", "rsqrt"})
INT32 = frozenset({"int32", "uint32"})
EXACT_INT = frozenset({"add", "subtract", "multiply"})
TWO_BYTES = frozenset({"bfloat16", "float16"})
FP32_MIN = float(np.finfo(np.float32).min)


def apply(op: str, x: Any, y: Any, reverse: bool = False) -> Array:
    """op(x, y), or op(y, x) if `reverse`, in float32; a unary operator takes x alone. True is 1."""
    function = SCALAR[op]
    if function.arity == 1:
        value = function.numpy(x)
    else:
        value = function.numpy(y, x) if reverse else function.numpy(x, y)
    value = np.asarray(value)
    return value if value.dtype == np.float32 else value.astype(np.float32)


def apply_bits(op: str, x: Array, y: Any, reverse: bool = False) -> Array:
    """The same for bit patterns: the other operand is taken in the dtype of x, and so is the result."""
    function = SCALAR[op]
    if function.arity == 1:
        return np.asarray(function.numpy(x)).astype(x.dtype, copy=False)
    other = np.asarray(y).astype(x.dtype, copy=False)
    value = function.numpy(other, x) if reverse else function.numpy(x, other)
    return np.asarray(value).astype(x.dtype, copy=False)


def apply_exact(op: str, x: Array, y: Array) -> Array:
    """add, subtract or multiply of 32-bit integers, exact, as 64-bit integers, which a writer saturates."""
    wide = np.uint64 if op == "multiply" and x.dtype.kind == y.dtype.kind == "u" else np.int64
    function = SCALAR[op].exact_int
    assert function is not None, op
    return np.asarray(function(x.astype(wide), y.astype(wide)))


def included(mask: Any, like: Array) -> Array | None:
    """Truth values of a mask in the shape of `like`, or None where everything is included."""
    if mask is None:
        return None
    chosen = np.broadcast_to(np.asarray(mask, bool), like.shape)
    return None if certain(chosen) else chosen


def rows(x: Any, partitions: int) -> Array:
    """A tile as (P, F), a number or a tile of one element per partition as (P, 1)."""
    x = np.asarray(x)
    return np.broadcast_to(x, (partitions, 1)) if x.ndim == 0 else x.reshape(x.shape[0], -1)


def space(x: Any) -> str:
    """Memory of a tile; empty for a number."""
    return str(getattr(x, "space", ""))


def dtype_of(x: Any) -> str:
    """Name of the dtype of a tile; empty for a number."""
    return str(getattr(x, "dtype", ""))


def elements(tile: Any) -> int:
    """Elements per partition."""
    return int(np.prod(tile.shape[1:], dtype=np.int64))


def result_dtype(call: Any, default: str) -> str:
    """The dtype that the user asks for, or the default."""
    return str(getattr(call, "dtype", None) or default)


def in_psum(call: Any, *names: str) -> bool:
    """True when one of the operands is a tile in PSUM."""
    return any(space(getattr(call, name, None)) == "psum" for name in names)


def not_both_in_psum(call: Any, first: str, second: str) -> None:
    """Raise when both tiles are in PSUM: the engine has one read port there."""
    if space(getattr(call, first)) == "psum" and space(getattr(call, second)) == "psum":
        raise make("err_unsupported_memory", f"{first} and {second} are both in PSUM", operand=second,
                   fix=f"copy {first} or {second} to SBUF with nl.copy")


def gpsimd_reaches(call: Any, engine: str, *names: str, because: str = "") -> None:
    """Raise when the instruction runs on GpSimd and one of the operands is in PSUM."""
    if engine != "gpsimd":
        return
    for name in names:
        if space(getattr(call, name, None)) == "psum":
            reason = f" ({because})" if because else ""
            raise make("err_unsupported_memory",
                       f"{name} is in PSUM, and the GpSimd Engine runs this{reason}",
                       operand=name,
                       fix="copy it to SBUF with nl.copy" + ("" if because else ", or drop engine="))


def only_integers(call: Any, op: str, *names: str, result: str = "") -> None:
    """Raise when a bitwise operator gets a tile or number that is no integer."""
    for name in names:
        operand = getattr(call, name, None)
        kind = dtype_of(operand)
        wrong = (kind not in INTS) if kind else operand is not None and not isinstance(operand,
                                                                                       (int, np.integer))
        if wrong:
            raise NkiTypeError(f"{op} gets {name} of {kind or repr(operand)}", operand=name,
                               rule="bitwise operators take integers",
                               why="they work on bit patterns, without conversion",
                               fix="view the tile as an integer type of the same size, or convert it first")
    kind = result_dtype(call, result)
    if kind and kind not in INTS:
        raise NkiTypeError(f"{op} makes a {kind} result", operand="dtype",
                           rule="bitwise operators make integers",
                           why="they work on bit patterns, without conversion",
                           fix="ask for an integer dtype")


def choose(call: Any, names: str, engine: str, why: str, fix: str) -> None:
    """Raise when the user has chosen an engine that cannot run the instruction."""
    if call.engine and call.engine not in engine.split():
        raise NkiValueError(f"{names} does not run on the {call.engine} engine", operand="engine",
                            rule=f"{names} runs on: {engine}", why=why, fix=fix)


def at_most_dims(call: Any, name: str, free: int) -> None:
    """Raise when a tile has more free dimensions than the instruction addresses."""
    found = len(getattr(call, name).shape) - 1
    if found > free:
        raise make("err_exceed_max_supported_dimension",
                   f"{name} has {found} free dimensions, at most {free} are addressed", operand=name)


def rate(d: Any, hw: Any, *besides: str) -> float:
    """Elements per cycle and lane: Vector and Scalar Engine have fast modes for 2-byte floats from gen3 on.

    `besides` are operands that are read once per partition, which do not count.
    """
    kinds = {kind for name, kind in d.dtypes.items() if name not in besides}
    if not kinds <= TWO_BYTES:
        return 1.0
    if d.engine == "scalar":
        return float(hw.scalar_fast_factor)
    psum = any(where == "psum" for name, where in d.spaces.items() if name not in besides)
    return float(hw.vector_mid_factor if psum else hw.vector_fast_factor)
