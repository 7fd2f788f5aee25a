"""Instructions of the GpSimd Engine: index tiles, selection by index, gathers and reductions over partitions.

The engine has eight cores, each of which sees its own 16 partitions of SBUF.
"""
from __future__ import annotations

from math import prod
from typing import Annotated as T
from typing import Any

import numpy as np

from opennki.errors import NkiError, NkiTypeError, NkiValueError, make
from opennki.isa import cost
from opennki.isa.declare import (
    FLOATS,
    INTS,
    NUMERIC,
    ON_CHIP,
    SBUF,
    Array,
    Attr,
    DType,
    In,
    Index,
    Mask,
    Op,
    Predicate,
    Result,
    instruction,
)
from opennki.isa.dtypes import itemsize
from opennki.isa.known import certain
from opennki.isa.reduce import reduce_partition
from opennki.isa.scalar import SCALAR

_SELECT_DTYPES = FLOATS | {"int8", "uint8", "int16", "uint16"}


@instruction(
    engine="gpsimd", family="select", source="api_legacy: isa.affine_select",
    results=(Result(shape="on_true_tile", dtype="on_true_tile"),), cost=cost.gpsimd)
def affine_select(pred: T[Array, Predicate()], on_true_tile: T[Array, In("P F*", ON_CHIP, _SELECT_DTYPES)],
                  on_false_value: T[float, Attr((float, int))], *, mask: T[Any, Mask] = None,
                  dtype: T[Any, DType] = None, **kwargs: Any) -> Array:
    """Selects by an index comparison: result = on_true_tile where pred holds, on_false_value elsewhere.

    pred: one comparison of affine expressions of nl.arange / nl.mgrid, loop indices and program ids (no &, no
    values of tiles), of the shape of on_true_tile. on_true_tile: [P, F...], P <= 128, float or 8/16-bit
    integer; PSUM is accepted, as public kernels do it (the data is moved to SBUF first). on_false_value: a
    number, float32. Result: SBUF, dtype of on_true_tile unless dtype is given. mask counts the dimensions of
    the tile. Cost: 150 + F cycles.
    """
    if certain(pred):
        return on_true_tile
    out = np.full(on_true_tile.shape, on_false_value, np.float32)
    np.copyto(out, on_true_tile, where=pred)  # three times as fast as np.where
    return out


def _check_iota(c: Any, target: Any) -> None:
    if c.expr.shape[0] > target.partitions:
        raise make("err_num_partition_exceed_arch_limit",
                   f"the index expression has {c.expr.shape[0]} partitions",
                   operand="expr")


@instruction(
    engine="gpsimd", family="iota", source="api_legacy: isa.iota", raw=True, limits=(),
    results=(Result(shape=lambda c: tuple(c.expr.shape), dtype=lambda c: c.dtype),), check=_check_iota,
    cost=cost.gpsimd)
def iota(expr: T[Array, Index()], dtype: T[Any, DType], *, mask: T[Any, Mask] = None, **kwargs: Any) -> Array:
    """Writes the values of an index expression to a tile: result = expr, computed in int32, then cast to
    dtype.

    expr: an affine combination of nl.arange / nl.mgrid, loop indices and program ids, at least 2 dimensions;
    its broadcast shape is the shape of the result, the first dimension are the partitions, <= 128. dtype: of
    the result, required; integers saturate. Result: SBUF. Cost: 150 + F cycles.
    """
    return np.asarray(expr).astype(np.int32)


_GATHER_RUNS = (1, 2, 4, 8, 16, 32)
_CORE = 16  # partitions of a GpSimd core; the check compares it with the target


def _valid(c: Any) -> int:
    return int(prod(c.index.shape[1:]) * _CORE if c.num_valid_indices is None else c.num_valid_indices)


def _gather_shape(c: Any) -> tuple[int, ...]:
    count = _valid(c)
    # The indices of a core lie [free, partition], so 16 of them make one free element of the index tile.
    groups = (count // _CORE, _CORE) if count % _CORE == 0 else (count,)
    return (c.src_buffer.shape[0], *groups, c.num_elem_per_idx)


def _check_gather(c: Any, target: Any) -> None:
    core = target.gather_core_partitions
    if c.index.shape[0] % core:
        raise NkiValueError(
            f"src_buffer and index have {c.index.shape[0]} partitions", operand="index",
            rule=f"the number of partitions is a multiple of {core}",
            why=f"each GpSimd core gathers within its own {core} partitions",
            fix=f"pad the tiles to a multiple of {core}")
    count, given = _valid(c), prod(c.index.shape[1:]) * core
    if not 0 < count <= given:
        raise NkiValueError(
            f"num_valid_indices is {count}, index holds {given} for each core", operand="num_valid_indices",
            rule="1 <= num_valid_indices <= indices of a core", why="the indices come from the index tile",
            fix="lower num_valid_indices or enlarge index")
    if count > target.gather_indices_max:
        raise make("err_size_of_dimension_exceed_arch_limit",
                   f"{count} indices for each core, the limit is {target.gather_indices_max}",
                   operand="index",
                   fix="gather in several instructions")


def _gather_cost(d: Any, hw: Any) -> float:
    run = cost.attr(d, "num_elem_per_idx") or 1
    count = cost.attr(d, "num_valid_indices") or d.I * hw.gather_core_partitions
    per_cycle = (28 + 4 * run) / (4 * run) / min(4 / itemsize(d.dtypes["src_buffer"]), run)
    return float(hw.gpsimd_start + count * run / per_cycle)


def poison(dtype: np.dtype[Any]) -> Any:
    """What a gather gives for an index outside: undefined on the device, here NaN or the largest integer,
    so that it shows."""
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.nan


def take_rows(rows: Array, positions: Array) -> Array:
    """rows[p, positions[p, i]]; `poison` where the position is outside."""
    inside = (positions >= 0) & (positions < rows.shape[1])
    taken = np.take_along_axis(rows, np.where(inside, positions, 0), axis=1)
    return taken if certain(inside) else np.where(inside, taken, np.asarray(poison(rows.dtype), rows.dtype))


@instruction(
    positional=True, engine="gpsimd", family="gather", source="api_legacy: isa.local_gather", raw=True,
    results=(Result(shape=_gather_shape, dtype="src_buffer"),),
    check=_check_gather, cost=_gather_cost)
def local_gather(src_buffer: T[Array, In("P S*", SBUF)], index: T[Array, In("P I*", SBUF, "uint16")],
                 num_elem_per_idx: T[int, Attr((int,), _GATHER_RUNS)] = 1,
                 num_valid_indices: T[int | None, Attr((int,), optional=True)] = None, *,
                 mask: T[Any, Mask] = None) -> Array:
    """Gathers runs of elements by index within each group of 16 partitions.

    The indices of a group are those of its 16 rows of index, taken down the partitions first: i-th index =
    index[16 g + i % 16, i // 16]; result[p, i, :] = flattened src_buffer[p][index : index +
    num_elem_per_idx]. src_buffer: [P, ...], index: [P, ...] uint16, both in SBUF, P a multiple of 16. An
    index is an offset in elements. num_elem_per_idx: 1, 2, 4, 8, 16 or 32. num_valid_indices: how many
    indices of a group are used, all by default, at most 4096. Result: [P, n / 16, 16, num_elem_per_idx], or
    [P, n, num_elem_per_idx] where 16 does not divide n; dtype of src_buffer. An index outside is undefined on
    the device; here it gives NaN or the largest integer. Cost: 150 + n * num_elem_per_idx / C cycles, C = (28
    + 4 E) / (4 E) / min(4 / bytes per element, E), E = num_elem_per_idx.
    """
    partitions = src_buffer.shape[0]
    rows = src_buffer.reshape(partitions, -1)
    groups = index.reshape(partitions // _CORE, _CORE, -1).transpose(0, 2, 1).reshape(partitions // _CORE, -1)
    count = groups.shape[1] if num_valid_indices is None else int(num_valid_indices)
    starts = groups[:, :count].astype(np.int64)
    positions = (starts[:, :, None] + np.arange(num_elem_per_idx)).reshape(len(groups), -1)
    taken = take_rows(rows, np.repeat(positions, _CORE, axis=0))
    shape = (count // _CORE, _CORE) if count % _CORE == 0 else (count,)
    return taken.reshape(partitions, *shape, num_elem_per_idx)


_PARTITION_OPS = frozenset({"add", "maximum", "bitwise_or", "bitwise_and"})
_BITWISE = frozenset({"bitwise_or", "bitwise_and"})


def _check_partition_reduce(c: Any, target: Any) -> None:
    if c.op in _BITWISE and c.data.dtype not in INTS:
        raise NkiTypeError(
            f"{c.op} of {c.data.dtype} data", operand="data", rule="a bitwise reduction takes integers",
            why="a float has no meaning as a bit pattern here",
            fix="view the data as an integer type of the same size")


@instruction(
    engine="gpsimd", family="reduce", source="api_legacy: isa.tensor_partition_reduce",
    results=(Result(shape=lambda c: (1, *c.data.shape[1:]), dtype="data"),), raw=lambda c: c.op in _BITWISE,
    mask_on="data", mask_dims={"result": (None, 1, 2, 3, 4)}, check=_check_partition_reduce,
    # No documented formula: every partition is read once.
    cost=lambda d, hw: hw.gpsimd_start + 2 * d.F)
def tensor_partition_reduce(op: T[str, Op(_PARTITION_OPS)], data: T[Array, In("P F*", ON_CHIP, NUMERIC)], *,
                            mask: T[Any, Mask] = None, dtype: T[Any, DType] = None, **kwargs: Any) -> Array:
    """Reduces over the partitions: result[0, ...] = op over p of data[p, ...].

    op: add, maximum (in float32), bitwise_or or bitwise_and (of integers, on bits). data: [P, F...], P <=
    128. Result: [1, F...] in SBUF, dtype of data unless dtype is given. mask counts the dimensions of data;
    elements outside are left out. Cost: not documented; 150 + 2 F cycles is assumed.
    """
    if mask is not None:
        # bitwise_and: all ones, the identity at every width
        neutral = -1 if op == "bitwise_and" else SCALAR[op].identity
        data = np.where(mask, data, np.asarray(neutral).astype(data.dtype))
    if op in _BITWISE:
        fold = np.bitwise_or if op == "bitwise_or" else np.bitwise_and
        return fold.reduce(data, axis=0, keepdims=True)
    return reduce_partition(data, op).reshape(1, *data.shape[1:])


def segment_bounds(ids: Array) -> tuple[Array, Array]:
    """First element of the segment of each element of (n,), and one past its last; n and -1 for padding."""
    n = ids.size
    position = np.arange(n)
    change = ids[1:] != ids[:-1]
    first = np.where(np.concatenate(([True], change)), position, 0)
    last = np.where(np.concatenate((change, [True])), position + 1, n)
    start = np.maximum.accumulate(first)
    end = np.minimum.accumulate(last[::-1])[::-1]
    padding = ids == 0
    return np.where(padding, n, start), np.where(padding, -1, end)


def _check_bounds(c: Any, target: Any) -> None:
    if getattr(c, "dtype", None) not in (None, "float32", "int32"):
        raise NkiTypeError(f"dtype is {c.dtype}", operand="dtype",
                           rule="sequence_bounds gives float32 or int32",
                           why="these are the formats that the GpSimd routine writes",
                           fix="leave dtype out and cast afterwards")


@instruction(
    engine="gpsimd", family="scan", source="api_legacy: isa.sequence_bounds", raw=True,
    results=(Result(shape=lambda c: (1, 2, prod(c.segment_ids.shape[1:])), dtype="segment_ids"),),
    check=_check_bounds, limits=(),
    # No documented formula: one pass each way.
    cost=lambda d, hw: hw.gpsimd_start + 2 * d.F)
def sequence_bounds(*, segment_ids: T[Array, In("1 F*", ON_CHIP, "float32 int32")],
                    dtype: T[Any, DType] = None) -> Array:
    """Start and end of the segment that each element belongs to.

    segment_ids: [1, n] float32 or int32; equal neighbours form a segment, 0 is padding. Result: [1, 2, n] in
    SBUF, dtype of segment_ids unless dtype (float32 or int32) is given; result[0, 0, i] is the first element
    of the segment of i, result[0, 1, i] one past its last; for padding they are n and -1. Cost: not
    documented; 150 + 2 n cycles is assumed.
    """
    return np.stack(segment_bounds(segment_ids.reshape(-1)))[None]


def _no_library(function_name: Any = "", lib_file_name: Any = "") -> NkiError:
    return NkiError(
        f"builtin_custom_op {function_name!r} of {lib_file_name!r} cannot run here", operand="lib_file_name",
        rule="builtin_custom_op calls a function of a prebuilt GpSimd library",
        why="such a library is machine code of the GpSimd cores, and what it computes is not public",
        fix="write the operation with documented instructions")


def _check_custom(c: Any, target: Any) -> None:
    raise _no_library(c.function_name, c.lib_file_name)


@instruction(
    engine="gpsimd", family="custom", source="api_legacy: isa.builtin_custom_op", limits=(),
    check=_check_custom,
    cost=lambda d, hw: float(hw.gpsimd_start))
def builtin_custom_op(function_name: T[str, Attr((str,))], lib_file_name: T[str, Attr((str,))],
                      ulib_to_ucode_version: T[Any, Attr((object,))],
                      ulib_to_isa_version: T[Any, Attr((object,))],
                      srcs: T[Any, Attr((list, tuple))], dsts: T[Any, Attr((list, tuple))],
                      **kwargs: Any) -> Any:
    """Calls a function of a prebuilt library of the GpSimd Engine; always an error here.

    The vendor's signature: function and library name, two versions, source and destination tiles. The
    libraries are machine code of the GpSimd cores and their meaning is not public, so the call is refused
    with an explanation when it is traced.
    """
    raise _no_library(function_name, lib_file_name)
