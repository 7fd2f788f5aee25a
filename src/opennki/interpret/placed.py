"""Views on placed memory: tensors are at their addresses in one SBUF and one PSUM, so that those which take turns in the same bytes do so.

The memory of each is one array of rows, a row for each partition, as wide as the kernel needs.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from opennki.errors import NkiError
from opennki.interpret.views import Env, Layout, compile_affine, value_of
from opennki.ir.affine import Affine
from opennki.ir.nodes import Access, Alloc, For
from opennki.isa import dtypes
from opennki.passes.footprint import locate
from opennki.passes.memory_map import MEMORIES, MemoryMap, Placement

ROW_ALIGN = 64


class PlacedLayout(Layout):
    """Slots of variables and tensors, with the on-chip tensors in two slots: SBUF and PSUM."""

    def __init__(self, memory: MemoryMap) -> None:
        super().__init__()
        self.memory = memory
        self.rows: dict[str, int] = {}
        self.slots: dict[str, int] = {}
        for name in MEMORIES:
            high = max((r.address + r.size for _, p, _ in memory.of(name) for r in p.regions()), default=0)
            self.rows[name] = -(-max(high, 1) // ROW_ALIGN) * ROW_ALIGN
            owner = Alloc(-1, name, (memory.target.partitions, self.rows[name]), "uint8", name)
            self.slots[name] = super().alloc(owner)
            self.moving.add(self.slots[name])  # its views are not kept: the same place means different tensors

    def alloc(self, alloc: Alloc) -> int:
        """Slot of the memory of a tensor."""
        return self.slots[alloc.space] if alloc.on_chip else super().alloc(alloc)

    def elements(self, access: Access) -> int:
        """Elements of the whole memory."""
        if not access.alloc.on_chip:
            return super().elements(access)
        return self.memory.target.partitions * self.rows[access.alloc.space] // dtypes.itemsize(access.dtype)

    def origin(self, access: Access) -> int | Callable[[Env], int]:
        """Byte offset of the first block of a tensor in its memory."""
        alloc = access.alloc
        if not alloc.on_chip:
            return 0
        place, row = self.memory.placements[alloc], self.rows[alloc.space]
        return self._base(Affine(), Affine(), place, alloc, row, _block_step(place))

    def address(self, access: Access) -> tuple[tuple[int, ...], int | Callable[[Env], int], tuple[int, ...]]:
        """As for any layout, in bytes of placed memory."""
        alloc = access.alloc
        if not alloc.on_chip:
            return super().address(access)
        place, row, item = self.memory.placements[alloc], self.rows[alloc.space], dtypes.itemsize(access.dtype)
        at = locate(access)
        if at is None:
            raise _unplaced(access, "its indices run from one partition into the next")
        step = _block_step(place)
        rank = range(len(access.shape))
        if any(at.block.strides[j] for j in rank) and step is None:
            raise _unplaced(access, "its blocks have addresses without a fixed step")
        strides = tuple(at.block.strides[j] * (step or 0) + at.partition.strides[j] * row + at.byte.strides[j] for j in rank)
        base = at.partition.base.scale(row).add(at.byte.base)
        if any(d.dyn is not None for d in access.dims):
            # where it is follows from the indices and the origin
            return self._steps(access, place, row, step or 0, item), 0, strides
        steps = (0,) * len(access.dims)
        return steps, self._base(base, at.block.base, place, alloc, row, step), strides

    def _steps(self, access: Access, place: Placement, row: int, step: int, item: int) -> tuple[int, ...]:
        """Elements from one index of each dimension to the next, for indices that are read at run time."""
        if access.view is not None or row % item or place.address % item or step % item or place.direct:
            raise _unplaced(access, "it has runtime indices on memory that is viewed in another form")
        alloc = access.alloc
        out, unit = [], 1
        for n in reversed(alloc.shape[alloc.pdim + 1:]):
            out.append(unit)
            unit *= n
        out.append(row // item)
        unit = step // item
        for n in reversed(alloc.shape[:alloc.pdim]):
            out.append(unit)
            unit *= n
        return tuple(reversed(out))

    def _base(self, base: Affine, block: Affine, place: Placement, alloc: Alloc, row: int, step: int | None) -> int | Callable[[Env], int]:
        """Byte offset of the first element."""
        if place.table and step is None:
            table = [p * row + a for p, a in place.table]
            inside, index = compile_affine(base, self), compile_affine(block, self)
            return lambda env: value_of(inside, env) + table[value_of(index, env)]
        start, address = place.at()
        first = compile_affine(base.add(block.scale(step or 0)).add(start * row + address), self)
        if place.copies == 1:
            return first
        home = [(self.var(loop.var), loop.trips) for loop in self.memory.live.loops(alloc) if isinstance(loop, For)]
        copies, size = place.copies, place.stride * place.blocks

        def buffered(env: Env) -> int:
            number = 0
            for slot, trips in home:
                number = number * trips + env[slot]
            return value_of(first, env) + number % copies * size
        return buffered

    def room(self) -> dict[int, np.ndarray]:
        """New memory by slot, without a value: NaN where it is read as a float."""
        return {slot: np.full(self.memory.target.partitions * self.rows[name], 0xFF, np.uint8) for name, slot in self.slots.items()}


def _block_step(place: Placement) -> int | None:
    """Bytes from one block to the next; None where there is no one number."""
    if not place.table:
        return place.stride
    starts = {p for p, _ in place.table}
    steps = {b - a for (_, a), (_, b) in zip(place.table, place.table[1:], strict=False)}
    return steps.pop() if len(starts) == 1 and len(steps) == 1 else 0 if len(place.table) == 1 else None


def _unplaced(access: Access, why: str) -> NkiError:
    alloc: Any = access.alloc
    return NkiError(f"an access of {alloc.name or alloc!r} {alloc.shape} cannot be followed on placed memory: {why}", loc=alloc.loc,
                    rule="the streams are checked on the bytes that tensors are placed in")
