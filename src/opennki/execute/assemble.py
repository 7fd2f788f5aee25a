"""Elementwise programs put together from lists: the ctypes structure, and the arrays that it points at."""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from typing import Any

from opennki.execute import abi

Addresses = C.Array[C.c_void_p]
_WITHOUT_RESULT = (abi.STORE, abi.STORE_RAW, abi.KEEP)  # their d is a tile, or the number of a row


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


class Program:
    """An `abi.Elementwise` (`structure`) with everything that it points at. To be kept as long as it is used."""

    def __init__(self, structure: abi.Elementwise, keep: tuple[object, ...]) -> None:
        self.structure = structure
        self._keep = keep

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


def _strided(kind: Any, strides: Sequence[int], *rest: int) -> Any:
    return kind((C.c_int64 * abi.RANK)(*strides), *rest)


def elementwise(
    outer: int, inner: int, shape: Sequence[int], phases: Sequence[tuple[bool, Sequence[abi.Uop]]],
    tiles: Sequence[tuple[Sequence[int], str | int]], preds: Sequence[Sequence[int]] = (), indices: Sequence[Sequence[int]] = (),
) -> Program:  # fmt: skip
    """An elementwise program.

    outer, inner: numbers of dimensions; shape: their extents, outer ones first. phases: (once per row?, operations). tiles: (strides in
    bytes, name or number of the dtype). preds, indices: strides of their values. Raises ValueError for more than `abi.RANK` dimensions or
    a number of strides that is not the rank.
    """
    rank = outer + inner
    if rank > abi.RANK or len(shape) != rank:
        raise ValueError(f"an elementwise program has at most {abi.RANK} dimensions and a shape of that many, got {outer}+{inner}, {shape}")
    for strides in (*(s for s, _ in tiles), *preds, *indices):
        if len(strides) != rank:
            raise ValueError(f"strides {tuple(strides)} do not fit the {rank} dimensions")
    uops = [u for _, ops in phases for u in ops]
    c_uops = (abi.Uop * max(1, len(uops)))(*uops)
    spans, first = [], 0
    for row, ops in phases:
        spans.append(abi.Phase(first, len(ops), int(row), 0))
        first += len(ops)
    c_phases = (abi.Phase * max(1, len(spans)))(*spans)
    c_tiles = (abi.Tile * max(1, len(tiles)))(
        *(_strided(abi.Tile, s, abi.DTYPES[dtype] if isinstance(dtype, str) else dtype, 0) for s, dtype in tiles)
    )
    c_preds = (abi.AffineTile * max(1, len(preds)))(*(_strided(abi.AffineTile, s) for s in preds))
    c_indices = (abi.AffineTile * max(1, len(indices)))(*(_strided(abi.AffineTile, s) for s in indices))
    registers = 1 + max((u.d for u in uops if u.code not in _WITHOUT_RESULT), default=-1)
    kept = 1 + max((u.d for u in uops if u.code == abi.KEEP), default=-1)
    structure = abi.Elementwise(
        outer, inner, (C.c_int64 * abi.RANK)(*shape), len(spans), len(uops), len(tiles), len(preds), len(indices), registers, kept, 0,
        c_phases, c_uops, c_tiles, c_preds, c_indices,
    )  # fmt: skip
    return Program(structure, (c_uops, c_phases, c_tiles, c_preds, c_indices))
