"""Elementwise programs put together from lists: the ctypes structure, and the arrays that it points at."""

from __future__ import annotations

import ctypes as C
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from opennki.execute import abi

Addresses = C.Array[C.c_void_p]


def uop(
    code: int, d: int, a: int = -1, b: int = -1, c: int = -1, *, fn: str | int = 0, imm: float = 0.0, bits: int | None = None, pad: int = 0
) -> abi.Uop:
    """One operation; `fn`: a name in `SCALAR`, or its number. See nki.h for the fields of each code.

    `imm` is the immediate float32; `bits` gives it as an integer instead (any 32 bits, signed or not), for raw lanes.
    """
    op = abi.Uop(code, abi.FUNCTIONS[fn] if isinstance(fn, str) else fn, d, a, b, c, imm, pad)
    if bits is not None:  # not by way of a Python float, which changes the bits of signalling NaNs
        C.c_uint32.from_buffer(op, abi.Uop.imm.offset).value = bits & 0xFFFFFFFF
    return op


@dataclass(slots=True)
class Walk:
    """How a program or a copy goes over memory: the extent of each dimension, and the strides of each operand, predicate and index
    expression. The first `outer` dimensions make rows, the others are within one; `free`: their order does not matter, as all rows are
    alike, and so are their elements. `stores`: the operands that are written; `dtypes`: of a program, numbers of the operands' dtypes."""

    shape: tuple[int, ...]
    outer: int
    free: bool
    tiles: list[tuple[int, ...]]
    preds: list[tuple[int, ...]]
    indices: list[tuple[int, ...]]
    stores: frozenset[int]
    dtypes: list[int] = field(default_factory=list)


class Program:
    """An `abi.Elementwise` (`structure`) with everything that it points at. To be kept as long as it is used. walk: what the structure
    says of it, where that is known already."""

    def __init__(self, structure: abi.Elementwise, keep: tuple[object, ...], walk: Walk | None = None) -> None:
        self.structure = structure
        self._keep = keep
        self._walk = walk

    @property
    def walk(self) -> Walk:
        """How it goes over memory."""
        if self._walk is None:
            what = self.structure
            rank, ops = what.outer + what.inner, what.uops[: what.n_uops]
            free = not any(op.code == abi.FOLD for op in ops) and not any(phase.row for phase in what.phases[: what.n_phases])
            tables = ((what.tiles, what.n_tiles), (what.preds, what.n_preds), (what.indices, what.n_indices))
            tiles, preds, indices = ([tuple(table[i].stride[:rank]) for i in range(n)] for table, n in tables)
            numbers = [tile.dtype for tile in what.tiles[: what.n_tiles]]
            self._walk = Walk(tuple(what.shape[:rank]), what.outer, free, tiles, preds, indices, _stores(ops), numbers)
        return self._walk

    def run(
        self, lib: C.CDLL, at: Sequence[int], preds: Sequence[int] = (), indices: Sequence[int] = (),
        lo: Sequence[int] | None = None, hi: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Run on the tiles whose first elements have the addresses `at`, over all or the part lo..hi of the iteration space."""
        lib.nki_ew_run(
            C.byref(self.structure), (C.c_void_p * max(1, len(at)))(*at), _longs(preds), _longs(indices),
            None if lo is None else _longs(lo), None if hi is None else _longs(hi),
        )  # fmt: skip


def _longs(values: Sequence[int]) -> C.Array[C.c_int64]:
    return (C.c_int64 * max(1, len(values)))(*values)


def _stores(ops: Sequence[abi.Uop]) -> frozenset[int]:
    return frozenset([op.d for op in ops if op.code in (abi.STORE, abi.STORE_RAW)])


_HEAD, _TILE, _STRIDES = struct.Struct(f"=2i{abi.RANK}q8i5Q"), struct.Struct(f"={abi.RANK}q2i"), struct.Struct(f"={abi.RANK}q")
assert (_HEAD.size, _TILE.size, _STRIDES.size) == (C.sizeof(abi.Elementwise), C.sizeof(abi.Tile), C.sizeof(abi.AffineTile))


def tile_array(strides: Sequence[Sequence[int]], dtypes: Sequence[int]) -> Any:
    """An array of `abi.Tile`."""
    rows = [_TILE.pack(*s, *PADS[len(s)], dtype, 0) for s, dtype in zip(strides, dtypes, strict=True)]
    return (abi.Tile * len(rows)).from_buffer_copy(b"".join(rows)) if rows else (abi.Tile * 1)()


def affine_array(strides: Sequence[Sequence[int]]) -> Any:
    """An array of `abi.AffineTile`."""
    rows = [_STRIDES.pack(*s, *PADS[len(s)]) for s in strides]
    return (abi.AffineTile * len(rows)).from_buffer_copy(b"".join(rows)) if rows else (abi.AffineTile * 1)()


PADS = [(0,) * (abi.RANK - rank) for rank in range(abi.RANK + 1)]


def elementwise(
    outer: int, inner: int, shape: Sequence[int], phases: Sequence[tuple[bool, Sequence[abi.Uop]]],
    tiles: Sequence[tuple[Sequence[int], str | int]], preds: Sequence[Sequence[int]] = (), indices: Sequence[Sequence[int]] = (),
) -> Program:  # fmt: skip
    """An elementwise program.

    outer, inner: numbers of dimensions; shape: their extents, outer ones first. phases: (once per row?, operations), an operation's `d` the
    register of its result, but for stores the number of a tile, and for KEEP that of a row. tiles: (strides in bytes, name or number of the
    dtype). preds, indices: strides of their values. Raises ValueError for more than `abi.RANK` dimensions or
    a number of strides that is not the rank.
    """
    rank = outer + inner
    if rank > abi.RANK or len(shape) != rank:
        raise ValueError(f"an elementwise program has at most {abi.RANK} dimensions and a shape of that many, got {outer}+{inner}, {shape}")
    walks, numbers = [tuple(s) for s, _ in tiles], [abi.DTYPES[dtype] if isinstance(dtype, str) else dtype for _, dtype in tiles]
    for strides in (*walks, *preds, *indices):
        if len(strides) != rank:
            raise ValueError(f"strides {tuple(strides)} do not fit the {rank} dimensions")
    uops: list[abi.Uop] = []
    c_phases = (abi.Phase * max(1, len(phases)))()
    free = True
    for span, (row, ops) in zip(c_phases, phases, strict=False):
        span.first, span.count, span.row = len(uops), len(ops), int(row)
        free = free and not row
        uops += ops
    c_uops = (abi.Uop * max(1, len(uops)))(*uops)
    registers, kept, stores = 0, 0, []
    for op in uops:
        code, d = op.code, op.d
        if code == abi.STORE or code == abi.STORE_RAW:
            stores.append(d)
        elif code == abi.KEEP:
            kept = max(kept, d + 1)
        else:
            registers = max(registers, d + 1)
            free = free and code != abi.FOLD
    keep = c_phases, c_uops, tile_array(walks, numbers), affine_array(preds), affine_array(indices)
    structure = abi.Elementwise.from_buffer_copy(_HEAD.pack(
        outer, inner, *shape, *PADS[rank], len(phases), len(uops), len(tiles), len(preds), len(indices), registers, kept, 0,
        *map(C.addressof, keep),
    ))  # fmt: skip
    walk = Walk(tuple(shape), outer, free, walks, [*map(tuple, preds)], [*map(tuple, indices)], frozenset(stores), numbers)
    return Program(structure, keep, walk)
