"""Vector Engine: the eight largest values of a partition, where they are, and their replacement.

Values are compared in float32: -0 equals +0, NaN equals nothing, and integers beyond 2^24 are rounded first.
"""
from __future__ import annotations

from typing import Annotated as T
from typing import Any

import numpy as np

from opennki.errors import NkiTypeError, NkiValueError
from opennki.isa import cost
from opennki.isa.declare import PARTITIONS, Array, Attr, DType, In, Limit, Mask, Out, Result, instruction
from opennki.isa.vector_rules import at_most_dims, elements, included, result_dtype, rows

EIGHT = 8
NOT_FOUND = np.float32(2**32 - 1)  # saturates to all ones in uint16 and uint32
_FEW = Limit("F", "max8_fmax", "the instruction walks at most 16384 elements per partition")


def _at_least_eight(c: Any, name: str, target: Any) -> None:
    at_most_dims(c, name, target.max_free_dims)
    found = elements(getattr(c, name))
    if found < target.max8_fmin:
        raise NkiValueError(f"{name} has {found} elements per partition", operand=name,
                            rule=f"{name} has at least {target.max8_fmin} elements per partition",
                            why="there are eight values to find", fix="use a larger tile, padded with -inf")


def _exactly_eight(c: Any, name: str) -> None:
    at_most_dims(c, name, 2)
    found = elements(getattr(c, name))
    if found != EIGHT:
        raise NkiValueError(f"{name} has {found} elements per partition", operand=name,
                            rule=f"{name} has {EIGHT} elements per partition",
                            why="the instruction holds eight values",
                            fix=f"pass the result of max8, or pad to {EIGHT}")


def first_matches(x: Array, values: Array, mask: Array | None, backwards: bool) -> tuple[Array, Array]:
    """Where the values (P, N) occur in the rows of x (P, F), each in an element of its own.

    The values are walked from the first to the last, or `backwards`; each takes its first match that is still there among the elements
    that the mask (P, F) includes. Returns the places (P, N) in float32, NOT_FOUND where there is none, and which elements were taken.
    """
    free = np.ones(x.shape, bool) if mask is None else mask.copy()
    taken = np.zeros(x.shape, bool)
    index = np.empty(values.shape, np.float32)
    lane = np.arange(x.shape[0])
    columns = range(values.shape[1])
    for j in reversed(columns) if backwards else columns:
        match = np.equal(x, values[:, j, None]) & free
        at = match.argmax(axis=1)
        found = match[lane, at]
        free[lane, at] &= ~found
        taken[lane, at] |= found
        index[:, j] = np.where(found, at.astype(np.float32), NOT_FOUND)
    return index, taken


def _chosen(mask: Any, data: Array, x: Array) -> Array | None:
    """Truth values of a mask in the form (P, F)."""
    chosen = included(mask, data)
    return None if chosen is None else chosen.reshape(x.shape)


# ---- max8 ------------------------------------------------------------------------------------------------


def _ordered(x: Array) -> Array:
    """Integers that sort as the floats do, -0 below +0 and every NaN above infinity."""
    bits = np.where(np.isnan(x), np.float32(np.nan), x).view(np.int32)
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


def largest(x: Array, count: int) -> Array:
    """The `count` largest values of each row of (P, F), in descending order: NaN above infinity, -0 below +0."""
    keys = _ordered(x)
    if keys.shape[1] > count:
        keys = np.partition(keys, keys.shape[1] - count, axis=1)[:, -count:]
    keys = np.sort(keys, axis=1)[:, ::-1]
    return np.asarray(keys ^ ((keys >> 31) & np.int32(0x7FFFFFFF))).view(np.float32)


@instruction(
    positional=True, engine="vector", family="topk", source="api_legacy: isa.max8", mask_on="src",
    mask_dims={"result": (0, None)},
    results=(Result(lambda c: (c.src.shape[0], EIGHT), "src"),), limits=(PARTITIONS, _FEW),
    check=lambda c, target: _at_least_eight(c, "src", target), cost=cost.streaming)
def max8(*, src: T[Array, In("P F*")], mask: T[Any, Mask] = None, dtype: T[Any, DType] = None,
         **kwargs: Any) -> Array:
    """The eight largest values of each partition, in descending order.

    src: a tile in SBUF or PSUM, at most 128 partitions, up to five dimensions, 8 to 16384 elements per
    partition. Result: (P, 8); dtype, or that of src. Repeated values count as often as they occur. NaN counts
    as larger than infinity, as it also passes through nl.max (the vendor does not say). What a mask excludes
    counts as -inf.
    """
    x = rows(src, src.shape[0])
    chosen = _chosen(mask, src, x)
    return largest(x if chosen is None else np.where(chosen, x, np.float32(-np.inf)), EIGHT)


# ---- nc_find_index8 --------------------------------------------------------------------------------------


def _find_index8_check(c: Any, target: Any) -> None:
    _at_least_eight(c, "data", target)
    _exactly_eight(c, "vals")
    kind = result_dtype(c, "uint32")
    if kind not in ("uint16", "uint32"):
        raise NkiTypeError(f"nc_find_index8 with dtype {kind}", operand="dtype",
                           rule="the indices are uint16 or uint32",
                           why="the instruction writes no other type", fix="drop dtype (uint32)")


@instruction(
    positional=True, engine="vector", family="topk",
    source="api_legacy: isa.nc_find_index8; repeated and missing values: NKI documentation "
    "of 2.32", mask_on="data", mask_dims={"vals": (0, None), "result": (0, None)},
    results=(Result(lambda c: (c.data.shape[0], EIGHT), lambda c: "uint32"),), limits=(PARTITIONS, _FEW),
    check=_find_index8_check, cost=cost.streaming)
def nc_find_index8(*, data: T[Array, In("P F*")], vals: T[Array, In("P V")], mask: T[Any, Mask] = None,
                   dtype: T[Any, DType] = None, **kwargs: Any) -> Array:
    """Where each of eight values occurs first in its partition.

    data: a tile in SBUF or PSUM, at most 128 partitions, up to five dimensions, 8 to 16384 elements per
    partition, counted from 0 over all free dimensions. vals: eight elements per partition, up to three
    dimensions. Result: (P, 8), uint32 (or uint16 by dtype). A value that vals holds k times gets its first k
    places, in ascending order (2.32 documentation). A value that is not there (or NaN) gets all ones,
    0xFFFFFFFF or 0xFFFF; 2.26 calls that undefined. What a mask excludes is not found.
    """
    x = rows(data, data.shape[0])
    return first_matches(x, rows(vals, data.shape[0]), _chosen(mask, data, x), False)[0]


# ---- nc_match_replace8 -----------------------------------------------------------------------------------


def _match_replace8_check(c: Any, target: Any) -> None:
    at_most_dims(c, "data", target.max_free_dims)
    _exactly_eight(c, "vals")
    if c.dst_idx is not None and tuple(c.dst_idx.shape) != tuple(c.vals.shape):
        raise NkiValueError(f"dst_idx has shape {tuple(c.dst_idx.shape)}, vals {tuple(c.vals.shape)}",
                            operand="dst_idx",
                            rule="dst_idx has the shape of vals", why="there is one index for each value",
                            fix="index dst_idx to the shape of vals")


@instruction(
    positional=True, engine="vector", family="topk",
    source="api_legacy: isa.nc_match_replace8; order of repeated values: bug report BR007, NKI "
    "documentation of 2.32", mask_on="data", mask_dims={"vals": (0, None), "dst_idx": (0, None),
                                                        "result": (0, 1, 2, 3, 4)},
    results=(Result("data", "data"),), limits=(PARTITIONS, _FEW), check=_match_replace8_check,
    cost=cost.streaming)
def nc_match_replace8(*, data: T[Array, In("P F*")], vals: T[Array, In("P V")],
                      imm: T[float, Attr((int, float, np.number))],
                      dst_idx: T[Any, Out("P V", dtypes="uint16 uint32 int16 int32", optional=True)] = None,
                      mask: T[Any, Mask] = None, dtype: T[Any, DType] = None,
                      **kwargs: Any) -> tuple[Array, Array | None]:
    """A copy of data in which the first match of each of eight values is replaced by imm.

    data: a tile in SBUF or PSUM, at most 128 partitions, up to five dimensions, at most 16384 elements per
    partition. vals: eight elements per partition, up to three dimensions. imm: a number. Result: the shape of
    data; dtype, or that of data. dst_idx: a tile of the shape of vals, set to the places of the matches,
    counted from 0 over all free dimensions. The eight values are walked from the last to the first, as the
    device does, and each takes its first match that is still there: of a value that vals holds k times, the
    first k matches are replaced, and the first place goes to the last of its columns in dst_idx. An element
    that was replaced matches no more, even if imm is in vals. A value that is not there (or NaN) replaces
    nothing and gets all ones in dst_idx (undefined by the vendor). What a mask excludes
    matches nothing.
    """
    x = rows(data, data.shape[0])
    index, taken = first_matches(x, rows(vals, data.shape[0]), _chosen(mask, data, x), True)
    with np.errstate(all="ignore"):
        out = np.where(taken, np.float32(imm), x)
    return out.reshape(data.shape), None if dst_idx is None else index
