"""Vector Engine: reductions, scans, statistics, and the instructions that use its accumulator registers.

Sums follow the one defined order of `isa.reduce`; scans are sequential. Both are in float32.
"""
from __future__ import annotations

from typing import Annotated as T
from typing import Any

import numpy as np

from opennki.errors import NkiTypeError, NkiValueError
from opennki.isa import cost
from opennki.isa.declare import (
    FLOATS,
    PARTITIONS,
    Affine,
    Array,
    Attr,
    DType,
    In,
    Limit,
    Mask,
    Op,
    Out,
    Register,
    Result,
    instruction,
)
from opennki.isa.dtypes import promote
from opennki.isa.enums import reduce_cmd
from opennki.isa.reduce import reduce_free, running, scan_free
from opennki.isa.scalar import SCALAR
from opennki.isa.vector_rules import (
    ACCUMULATIONS,
    ARITHMETIC,
    BINARY,
    BITVEC,
    COMPARISONS,
    FP32_MIN,
    apply,
    dtype_of,
    elements,
    included,
    not_both_in_psum,
    only_integers,
    rows,
)

REDUCIBLE = frozenset(name for name in BINARY if SCALAR[name].reducible)
_SMALL = FLOATS | {"int16", "uint16", "int8", "uint8", "bool"}
_RESET, _REDUCE, _RESET_REDUCE, _LOAD_REDUCE = 1, 2, 3, 4
_COMMANDS = (0, _RESET, _REDUCE, _RESET_REDUCE)
# A result whose dimensions are those that the mask counts.
_SAME: dict[str, tuple[int | None, ...]] = {"result": (0, 1, 2, 3, 4)}
# What a reset sets the registers to, by the operator that accumulates.
_START = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}


def _axes(axis: Any, rank: int) -> tuple[int, ...]:
    """Sorted free axes, from the front. Raises for the partition axis, a repeated or a missing one."""
    given = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    axes = tuple(sorted(int(a) + rank if a < 0 else int(a) for a in given))
    rule = "axis names free dimensions of the tile, each once"
    if not axes or axes[0] < 0 or axes[-1] >= rank or len(set(axes)) < len(axes):
        raise NkiValueError(f"axis {axis} of a tile of {rank} dimensions", operand="axis", rule=rule,
                            why="it says which dimensions are reduced", fix=f"use axes 1..{rank - 1}")
    if axes[0] == 0:
        raise NkiValueError("axis 0 is the partition dimension", operand="axis", rule=rule,
                            why="each lane of the Vector Engine sees one partition",
                            fix="transpose first, or multiply by ones with nki.isa.nc_matmul")
    return axes


def _reduced_shape(c: Any) -> tuple[int, ...]:
    shape = tuple(c.data.shape)
    axes = _axes(c.axis, len(shape))
    if c.keepdims:
        return tuple(1 if i in axes else n for i, n in enumerate(shape))
    kept = tuple(n for i, n in enumerate(shape) if i not in axes)
    return kept if len(kept) > 1 else (*kept, 1)


def _reduce(op: str, x: Array, mask: Any, axes: tuple[int, ...] | None = None) -> Array:
    """op over free axes (by default all), which stay with size 1; what a mask excludes is no operand."""
    chosen = included(mask, x)
    if chosen is not None:
        x = np.where(chosen, x, np.asarray(SCALAR[op].identity).astype(x.dtype))
    return np.asarray(reduce_free(x, op, axes if axes is not None else tuple(range(1, x.ndim)), True))


def _kept_dims(c: Any) -> tuple[int, ...]:
    """The dimensions of data that those of a reduction's result are."""
    rank = len(c.data.shape)
    return tuple(i for i in range(rank) if c.keepdims or i not in _axes(c.axis, rank))


# ---- reductions ------------------------------------------------------------------------------------------


def _tensor_reduce_check(c: Any, _target: Any) -> None:
    _axes(c.axis, len(c.data.shape))
    if c.op in BITVEC:
        only_integers(c, c.op, "data", result=dtype_of(c.data))
        if c.negate:
            raise NkiTypeError(f"negate with {c.op}", operand="negate",
                               rule="negate goes with arithmetic operators",
                               why="a bit pattern has no sign", fix="drop negate")


def _tensor_reduce_cost(d: Any, hw: Any) -> float:
    fast = set(d.dtypes.values()) == {"bfloat16"} and cost.attr(d, "op") in ("add", "maximum")
    return float(max(hw.min_ii, d.F / 2 if fast else d.F))


@instruction(
    engine="vector", family="reduce", source="api_legacy: isa.tensor_reduce",
    results=(Result(_reduced_shape, "data"),), raw=lambda c: c.op in BITVEC, mask_on="data", mask_dims={"result": _kept_dims},
    check=_tensor_reduce_check, cost=_tensor_reduce_cost,
    folds=lambda c: "" if c.negate or len(_axes(c.axis, len(c.data.shape))) < len(c.data.shape) - 1 else c.op)
def tensor_reduce(op: T[str, Op(REDUCIBLE)], data: T[Array, In("P F*")],
                  axis: T[Any, Attr((int, tuple, list))], *,
                  mask: T[Any, Mask] = None, dtype: T[Any, DType] = None,
                  negate: T[bool, Attr((bool,))] = False,
                  keepdims: T[bool, Attr((bool,))] = False, **kwargs: Any) -> Array:
    """Reduce free dimensions of a tile with an associative operator.

    op: an ALU operator that reduces (add, multiply, maximum, minimum, subtract, logical or bitwise and, or,
    xor). data: a tile in SBUF or PSUM, at most 128 partitions. axis: an integer, tuple or list of free
    dimensions as they are in data; negative ones count from the end. (The vendor documents the trailing ones;
    other ones are reached through the access pattern.) Result: data without these dimensions, (P, 1) at
    least, or with size 1 there if keepdims; dtype, or that of data. Arithmetic in float32, rounded once;
    negate changes the sign of the result. Bitwise operators take and make integers. A mask counts the
    dimensions of data: what it excludes is no operand.
    """
    axes = _axes(axis, data.ndim)
    value = _reduce(op, data, mask, axes)
    if negate:
        value = np.negative(value)
    if not keepdims:
        value = value.reshape(_without(data.shape, axes))
    return value


def _without(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    kept = tuple(n for i, n in enumerate(shape) if i not in axes)
    return kept if len(kept) > 1 else (*kept, 1)


def _tensor_scalar_reduce_check(c: Any, _target: Any) -> None:
    if c.reverse0:
        raise NkiValueError("tensor_scalar_reduce with reverse0", operand="reverse0",
                            rule="reverse0 is False",
                            why="the vendor documents reverse0 of this instruction as not supported",
                            fix="use nki.isa.tensor_scalar and nki.isa.tensor_reduce")


@instruction(
    engine="vector", family="reduce", source="api_legacy: isa.tensor_scalar_reduce",
    results=(Result("data", "data"),),
    mask_on="data", mask_dims={**_SAME, "operand0": (0, None), "reduce_res": (0, None)},
    check=_tensor_scalar_reduce_check,
    cost=lambda d, hw: cost.streaming(d, hw) + hw.min_ii)
def tensor_scalar_reduce(*, data: T[Array, In("P F*")], op0: T[str, Op(ARITHMETIC)],
                         operand0: T[Any, In("P 1", scalar=True)], reduce_op: T[str, Op(ACCUMULATIONS)],
                         reduce_res: T[Array, Out("P 1")], reverse0: T[bool, Attr((bool,))] = False,
                         dtype: T[Any, DType] = None, mask: T[Any, Mask] = None,
                         **kwargs: Any) -> tuple[Array, Array]:
    """data op0 operand0, and its reduction over all free dimensions.

    data: a tile in SBUF or PSUM, at most 128 partitions. op0: an arithmetic operator; a unary one ignores
    operand0. operand0: a number, or a tile with one element per partition. reduce_op: add, subtract,
    multiply, maximum or minimum. reduce_res: a tile with one element per partition, written in place.
    reverse0 is not supported. Result: the shape of data; dtype, or that of data. float32 arithmetic; the
    reduction sees values before they are rounded to the result dtype.
    """
    value = apply(op0, data, operand0, reverse0)
    return value, _reduce(reduce_op, value, mask)


# ---- scans -----------------------------------------------------------------------------------------------


def _masked_scan(first: str, second: str, d0: Array, d1: Array, state: Array, swap: tuple[bool, bool],
                 chosen: Array) -> Array:
    """The scan over the chosen elements only: at the others the state stays."""
    def step(state: Array, a: Array, b: Array, inside: Array) -> Array:
        value = apply(second, apply(first, a, state, swap[0]), b, swap[1])
        return np.where(inside, value, state)
    return running(step, np.array(np.broadcast_to(state[:, 0], d0.shape[:1]), np.float32), d0, d1, chosen)[0]


@instruction(
    engine="vector", family="scan", source="api_legacy: isa.tensor_tensor_scan",
    results=(Result("data0", lambda c: promote(dtype_of(c.data0), dtype_of(c.data1))),), mask_on="data0",
    mask_dims={**_SAME, "initial": (0, None)}, check=lambda c, _target: not_both_in_psum(c, "data0", "data1"),
    cost=lambda d, hw: float(max(hw.min_ii, 2 * d.F)))
def tensor_tensor_scan(data0: T[Array, In("P F*")], data1: T[Array, In("P F*")],
                       initial: T[Any, In("P 1", scalar=True)], op0: T[str, Op(ARITHMETIC & BINARY)],
                       op1: T[str, Op(ARITHMETIC & BINARY)], reverse0: T[bool, Attr((bool,))] = False,
                       reverse1: T[bool, Attr((bool,))] = False, *, dtype: T[Any, DType] = None,
                       mask: T[Any, Mask] = None, **kwargs: Any) -> Array:
    """Scan along the free dimensions: r[i] = (data0[i] op0 r[i-1]) op1 data1[i], with r[-1] = initial.

    data0, data1: tiles with the same partitions (at most 128) and elements, SBUF or PSUM, not both in PSUM;
    several free dimensions are one sequence. initial: a number, or a tile with one element per partition.
    op0, op1: binary arithmetic operators. reverse0: data0 is the right side of op0; reverse1: data1 is the
    left side of op1. float32 arithmetic, the state is not rounded in between. Result: the shape of data0;
    dtype, or the promoted dtype of both. A mask counts the dimensions of data0: the scan passes over what it
    excludes.
    """
    partitions = data0.shape[0]
    d0, d1, state = rows(data0, partitions), rows(data1, partitions), rows(initial, partitions)
    chosen = included(mask, data0)
    if chosen is None:
        value = scan_free(d0, d1, np.asarray(state, np.float32), op0, op1, reverse0, reverse1)
    else:
        value = _masked_scan(op0, op1, d0, d1, state, (reverse0, reverse1), chosen.reshape(d0.shape))
    return np.asarray(value).reshape(data0.shape)


def _cumulative_check(c: Any, _target: Any) -> None:
    if elements(c.src) != elements(c.dst):
        raise NkiValueError(f"src has {elements(c.src)} elements per partition, dst {elements(c.dst)}",
                            operand="dst",
                            rule="src and dst have the same elements",
                            why="each step of the scan writes one element",
                            fix="index both to the same free size")
    if int(c.reduce_cmd) not in (_REDUCE, _RESET_REDUCE, _LOAD_REDUCE):
        raise NkiValueError("tensor_scalar_cumulative without accumulation", operand="reduce_cmd",
                            rule="reduce_cmd is reset_reduce, load_reduce or reduce",
                            why="the accumulator registers carry the scan",
                            fix="use nki.isa.reduce_cmd.reset_reduce")
    if int(c.reduce_cmd) == _LOAD_REDUCE and c.imm1 is None:
        raise NkiTypeError("reduce_cmd.load_reduce without imm1", operand="imm1",
                           rule="imm1 is given with reduce_cmd.load_reduce",
                           why="it is what load_reduce loads into the accumulator registers",
                           fix="give imm1, or use reset_reduce")


@instruction(
    engine="vector", family="scan", results=(), mask_on="src", check=_cumulative_check, cost=cost.streaming,
    source="public test test_nki_isa_tensor_scalar_cumulative.py and its oracle; NKI documentation of 2.27 "
           "(operator limits, registers). Keyword order and cost: assumed",
    mask_dims={"imm0": (0, None), "imm1": (0, None)})
def tensor_scalar_cumulative(*, src: T[Array, In("P F*", dtypes=_SMALL)],
                             dst: T[Array, Out("P F*", dtypes=_SMALL)],
                             op0: T[str, Op(ARITHMETIC)], op1: T[str, Op(ACCUMULATIONS)],
                             imm0: T[Any, In("P 1", dtypes="float32", scalar=True)],
                             imm1: T[Any, In("P 1", dtypes="float32", scalar=True, optional=True)] = None,
                             reduce_cmd: T[int,
                                           Attr((int,),
                                                (*_COMMANDS, _LOAD_REDUCE))] = reduce_cmd.reset_reduce,
                             mask: T[Any, Mask] = None, dtype: T[Any, DType] = None,
                             registers: T[Any, Register("vector")] = None,
                             **kwargs: Any) -> tuple[Array, Array]:
    """dst = running op1 of (src op0 imm0) along the free dimensions: r[i] = (src[i] op0 imm0) op1 r[i-1].

    src: a tile in SBUF or PSUM, at most 128 partitions, any dtype of at most 16 bits or float32. dst: written
    in place, the elements of src. op0: an arithmetic operator. op1: add, subtract, multiply, maximum or
    minimum. imm0, imm1: a number, or a float32 tile with one element per partition. float32 arithmetic, the
    state is not rounded in between. r[-1] is in the accumulator registers of the Vector Engine, one per
    partition, where the last value stays. reduce_cmd: reset_reduce starts at the neutral value of op1 (0, 1,
    -inf or inf), load_reduce at imm1 (which the other commands
    do not use), reduce where they are.
    """
    partitions = src.shape[0]
    values = rows(apply(op0, src, imm0), partitions)
    command = int(reduce_cmd)
    if command == _RESET_REDUCE:
        state = np.full(partitions, _START[op1], np.float32)
    else:
        start = imm1 if command == _LOAD_REDUCE else (np.float32(0) if registers is None else registers)
        state = np.array(rows(start, partitions)[:, 0], np.float32)
    chosen = included(mask, src)
    if chosen is None:
        out, last = running(lambda state, x: apply(op1, x, state), state, values)
    else:
        out, last = running(lambda state, x, inside: np.where(inside, apply(op1, x, state), state), state, values,
                            chosen.reshape(values.shape))
    return out.reshape(src.shape), last.reshape((partitions,) + (1,) * (src.ndim - 1))


# ---- statistics ------------------------------------------------------------------------------------------


def _moments(x: Array, chosen: Array | None) -> tuple[Array, Array, Array]:
    """Count, mean and sum of squared deviations of (P, N), each (P, 1); 0 where there is no element."""
    if not x.shape[1]:
        nothing = np.zeros((x.shape[0], 1), np.float32)
        return nothing, nothing, nothing
    kept = np.ones(x.shape, bool) if chosen is None else chosen
    count = kept.sum(axis=1, keepdims=True).astype(np.float32)
    some = np.maximum(count, np.float32(1))
    mean = _reduce("add", x, chosen) / some
    deviation = x - mean
    spread = _reduce("add", deviation * deviation, chosen)
    # The sum of nothing is -0 (the neutral value of add); an empty half reports plain zeros.
    empty = count == 0
    return count, np.where(empty, np.float32(0), mean), np.where(empty, np.float32(0), spread)


@instruction(
    positional=True, engine="vector", family="stats", source="api_legacy: isa.bn_stats", mask_on="data",
    mask_dims={"result": (0, None)},
    results=(Result(lambda c: (c.data.shape[0], 6), "data"),),
    limits=(PARTITIONS,
            Limit("F", "bn_stats_fmax", "the statistics of a partition are gathered over 512 elements")),
    cost=cost.streaming)
def bn_stats(data: T[Array, In("P F*")], *, mask: T[Any, Mask] = None, dtype: T[Any, DType] = None,
             **kwargs: Any) -> Array:
    """Mean and variance statistics of each partition, in the form that bn_aggr combines.

    data: a tile in SBUF or PSUM, at most 128 partitions and 512 elements per partition
    (nl.tile_size.bn_stats_fmax). Result: (P, 6): count, mean, variance * count of the elements at even
    positions, then of those at odd positions; dtype, or that of data. float32 arithmetic; the variance is
    around the mean, divided by the count. What a mask excludes is not counted.
    """
    x = rows(data, data.shape[0])
    chosen = included(mask, data)
    chosen = None if chosen is None else chosen.reshape(x.shape)
    with np.errstate(all="ignore"):
        halves = [_moments(x[:, i::2], None if chosen is None else chosen[:, i::2]) for i in (0, 1)]
    return np.concatenate([part for half in halves for part in half], axis=1)


def _bn_aggr_check(c: Any, _target: Any) -> None:
    if elements(c.data) % 3:
        raise NkiValueError(f"bn_aggr gets {elements(c.data)} elements per partition", operand="data",
                            rule="the number of elements per partition is a multiple of three",
                            why="they are triples of count, mean and variance * count",
                            fix="pass results of bn_stats")


@instruction(
    positional=True, engine="vector", family="stats", source="api_legacy: isa.bn_aggr", mask_on="data",
    mask_dims={"result": (0, None)},
    results=(Result(lambda c: (c.data.shape[0], 2), "data"),), check=_bn_aggr_check,
    cost=lambda d, hw: float(max(hw.min_ii, 13 * (d.F / 3))))
def bn_aggr(data: T[Array, In("P F*")], *, mask: T[Any, Mask] = None, dtype: T[Any, DType] = None,
            **kwargs: Any) -> Array:
    """Mean and variance of each partition from the results of one or more bn_stats.

    data: a tile in SBUF or PSUM, at most 128 partitions; triples (count, mean, variance * count), so the
    number of elements per partition is a multiple of three. Result: (P, 2): mean and variance (divided by the
    count); dtype, or that of data. float32 arithmetic. Where all counts are 0 the result is NaN. A mask
    counts the dimensions of data and excludes triples.
    """
    x = rows(data, data.shape[0])
    count, mean, spread = x[:, 0::3], x[:, 1::3], x[:, 2::3]
    chosen = included(mask, data)
    chosen = None if chosen is None else chosen.reshape(x.shape)[:, 0::3]
    with np.errstate(all="ignore"):
        total = _reduce("add", count, chosen)
        center = _reduce("add", count * mean, chosen) / total
        between = mean - center
        variance = _reduce("add", spread + count * (between * between), chosen) / total
    return np.concatenate([center, variance], axis=1)


# ---- selection with reduction ----------------------------------------------------------------------------


def _accumulate(value: Array, mask: Any, command: int, registers: Any) -> Array:
    """New accumulator registers, (P, 1, ...): the running maximum; idle keeps them, reset leaves -inf."""
    shape = (value.shape[0],) + (1,) * (value.ndim - 1)
    held = np.zeros(shape, np.float32) if registers is None else np.asarray(registers,
                                                                            np.float32).reshape(shape)
    if command in (_RESET, _RESET_REDUCE):
        held = np.full(shape, -np.inf, np.float32)
    return apply("maximum", held, _reduce("maximum", value, mask)) if command in (_REDUCE,
                                                                                  _RESET_REDUCE) else held


def _accumulator_check(c: Any) -> None:
    if c.reduce_res is not None and int(c.reduce_cmd) == 0:
        raise NkiTypeError("reduce_res without reduce_cmd", operand="reduce_res",
                           rule="reduce_res is set to the accumulator registers: reduce_cmd is not idle",
                           why="idle accumulates nothing: they hold what an earlier instruction left",
                           fix="pass nki.isa.reduce_cmd.reset_reduce, or reduce to continue a chain")


def _select_reduce_check(c: Any, _target: Any) -> None:
    not_both_in_psum(c, "on_true", "predicate")
    _accumulator_check(c)


@instruction(
    engine="vector", family="select", source="api_legacy: isa.select_reduce", mask_on="on_true",
    cost=cost.streaming,
    mask_dims={"on_false": (0, None), "reduce_res": (0, None)}, check=_select_reduce_check)
def select_reduce(*, dst: T[Array, Out("P F*")],
                  predicate: T[Array, In("P F*", dtypes="bool int8 uint8 int16 uint16")],
                  on_true: T[Array, In("P F*", dtypes=_SMALL - {"tfloat32"})],
                  on_false: T[Any, In("P 1", scalar=True)],
                  reduce_res: T[Any, Out("P 1", dtypes=FLOATS, optional=True)] = None,
                  reduce_cmd: T[int, Attr((int,), _COMMANDS)] = reduce_cmd.idle,
                  reduce_op: T[Any, Op(frozenset({"maximum"}))] = np.amax,
                  reverse_pred: T[bool, Attr((bool,))] = False,
                  mask: T[Any, Mask] = None, dtype: T[Any, DType] = None,
                  registers: T[Any, Register("vector")] = None,
                  **kwargs: Any) -> tuple[Array, Array | None, Array]:
    """dst = on_true where predicate is not zero, on_false elsewhere, with an optional maximum per partition.

    dst: written in place. predicate: bool or an integer of at most 16 bits. on_true: any dtype but tfloat32,
    int32 and uint32. All have the same partitions (at most 128) and elements, SBUF or PSUM, on_true and
    predicate not both in PSUM. on_false: a number, or a tile with one element per partition. reverse_pred:
    select on_true where predicate is zero. reduce_res: a float tile with one element per partition, set to
    the accumulator registers of the Vector Engine after the instruction. reduce_cmd: reset_reduce takes the
    maximum of this selection, reduce that with what the registers held, reset sets them to -inf, idle leaves
    them (on the device they may change). Values are reduced before they are rounded to dst.
    """
    chosen = (predicate == 0) if reverse_pred else (predicate != 0)
    value = np.where(chosen, on_true, np.asarray(on_false, np.float32)).astype(np.float32, copy=False)
    held = _accumulate(value, mask, int(reduce_cmd), registers)
    return value, None if reduce_res is None else held, held


def _range_select_check(c: Any, _target: Any) -> None:
    _accumulator_check(c)
    if float(np.float32(c.on_false_value)) != FP32_MIN:
        raise NkiValueError(f"on_false_value is {c.on_false_value}", operand="on_false_value",
                            rule="on_false_value is nl.fp32.min",
                            why="the hardware fills with that one bit pattern",
                            fix="drop on_false_value; nki.isa.affine_select and nl.where take any")


@instruction(
    positional=True, engine="vector", family="select", source="api_legacy: isa.range_select",
    results=(Result("on_true_tile", "on_true_tile"),),
    mask_on="on_true_tile", mask_dims={**_SAME, "bound0": (0, None), "bound1": (0, None),
                                       "reduce_res": (0, None)},
    min_generation=3, check=_range_select_check, cost=cost.streaming)
def range_select(*, on_true_tile: T[Array, In("P F*", dtypes=FLOATS)], comp_op0: T[str, Op(COMPARISONS)],
                 comp_op1: T[str, Op(COMPARISONS)], bound0: T[Array, In("P 1", dtypes="float32")],
                 bound1: T[Array, In("P 1", dtypes="float32")],
                 reduce_cmd: T[int, Attr((int,), _COMMANDS)] = reduce_cmd.idle,
                 reduce_res: T[Any, Out("P 1", dtypes=FLOATS, optional=True)] = None,
                 reduce_op: T[Any, Op(frozenset({"maximum"}))] = np.amax, range_start: T[int, Affine()] = 0,
                 on_false_value: T[float, Attr((int, float, np.floating))] = FP32_MIN,
                 mask: T[Any, Mask] = None,
                 dtype: T[Any, DType] = None, registers: T[Any, Register("vector")] = None,
                 **kwargs: Any) -> tuple[Array, Array | None, Array]:
    """on_true_tile where its position is in a range of each partition, fp32.min elsewhere (trn2 and later).

    With i = range_start + free position: selected where (i comp_op0 bound0) and (i comp_op1 bound1).
    on_true_tile: a float tile in SBUF or PSUM, at most 128 partitions. comp_op0, comp_op1: equal, less,
    less_equal, greater, greater_equal. bound0, bound1: float32 tiles with one element per partition.
    Positions are compared in float32: exact below 2^24. range_start: an integer. on_false_value: fp32.min
    only. Result: the shape of on_true_tile; dtype, or its dtype (fp32.min becomes -inf in narrower floats).
    reduce_res, reduce_cmd, reduce_op: as in select_reduce; the registers are the same.
    """
    shape = on_true_tile.shape
    position = (range_start + np.arange(int(np.prod(shape[1:])), dtype=np.int64)).astype(np.float32)
    position = np.broadcast_to(position.reshape(1, *shape[1:]), shape)
    inside = (apply(comp_op0, position, bound0) != 0) & (apply(comp_op1, position, bound1) != 0)
    value = np.where(inside, on_true_tile, np.float32(FP32_MIN))
    held = _accumulate(value, mask, int(reduce_cmd), registers)
    return value, None if reduce_res is None else held, held
