"""Which part of a tensor an access reaches: blocks, partitions and bytes of a partition on chip, a box of elements in HBM."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opennki.ir.affine import ZERO, Affine, Range, Var
from opennki.ir.nodes import Access
from opennki.isa import dtypes
from opennki.passes.memory_map import tile


@dataclass(frozen=True, slots=True)
class Axis:
    """An index: base + sum(strides[j] * iota_j) over the tile; `dynamic`: plus a number that is known at run time only."""

    base: Affine
    strides: tuple[int, ...]
    dynamic: bool = False

    def range(self, shape: tuple[int, ...], ranges: Mapping[Var, Range], size: int) -> Range:
        """Least and greatest value over a tile, within 0 .. size - 1."""
        if self.dynamic:
            return 0, size - 1
        lo, hi = self.base.range(ranges)
        for s, n in zip(self.strides, shape, strict=True):
            lo, hi = lo + min(0, s * (n - 1)), hi + max(0, s * (n - 1))
        return max(lo, 0), min(hi, size - 1)


@dataclass(frozen=True, slots=True)
class OnChip:
    """An access of an on-chip tensor by memory coordinates; `byte` counts bytes within a block's row of a partition."""

    access: Access
    block: Axis
    partition: Axis
    byte: Axis
    itemsize: int


def locate(access: Access) -> OnChip | None:
    """The memory coordinates of an access of an on-chip tensor; None where an index carries from one of them to another."""
    alloc = access.alloc
    _, partitions, size = tile(alloc)
    item = dtypes.itemsize(access.dtype)
    if size % item:
        return None
    row = size // item
    steps = []
    step = 1
    for n in reversed(access.view_shape):
        steps.append(step)
        step *= n
    steps.reverse()
    rank = len(access.shape)
    parts = [_Sum(rank), _Sum(rank), _Sum(rank)]
    for k, (dim, unit) in enumerate(zip(access.dims, steps, strict=True)):
        if access.view is None:
            level = 0 if k < alloc.pdim else 1 if k == alloc.pdim else 2
            parts[level].add_dim(dim.base, dim.strides, unit // (partitions * row, row, 1)[level], dim.dyn is not None)
        elif not _split(parts, dim.base, dim.strides, unit, dim.dyn is not None, partitions, row):
            return None
    block, partition, element = (p.axis() for p in parts)
    if access.view is not None:
        for axis, limit in ((partition, partitions), (element, row)):
            lo, hi = axis.base.range({})
            for s, n in zip(axis.strides, access.shape, strict=True):
                lo, hi = lo + min(0, s * (n - 1)), hi + max(0, s * (n - 1))
            if lo < 0 or hi >= limit:
                return None
    byte = Axis(element.base.scale(item), tuple(s * item for s in element.strides), element.dynamic)
    return OnChip(access, block, partition, byte, item)


class _Sum:
    def __init__(self, rank: int) -> None:
        self.base, self.strides, self.dynamic = ZERO, [0] * rank, False

    def add_dim(self, base: Affine, strides: tuple[int, ...], unit: int, dynamic: bool) -> None:
        self.base = self.base.add(base.scale(unit))
        for j, s in enumerate(strides):
            self.strides[j] += s * unit
        self.dynamic |= dynamic

    def axis(self) -> Axis:
        return Axis(self.base, tuple(self.strides), self.dynamic)


def _split(parts: list[_Sum], base: Affine, strides: tuple[int, ...], unit: int, dynamic: bool, partitions: int, row: int) -> bool:
    """Add an index of a reshaped tensor, in units of `unit` elements, to the coordinates that its terms count."""
    units = (partitions * row, row, 1)

    def level(step: int) -> int:
        return 0 if step % units[0] == 0 else 1 if step % row == 0 else 2
    rest = base.const * unit
    for k, size in enumerate(units):
        parts[k].base = parts[k].base.add(rest // size)
        rest %= size
    for atom, c in base.terms:
        k = level(c * unit)
        if k == 2 and abs(c * unit) >= row:
            return False
        parts[k].base = parts[k].base.add(Affine(0, ((atom, c * unit // units[k]),)))
    for j, s in enumerate(strides):
        k = level(s * unit)
        if k == 2 and abs(s * unit) >= row:
            return False
        parts[k].strides[j] += s * unit // units[k]
    if dynamic:
        parts[level(unit)].dynamic = True
    return True
