"""Direct allocation that overwrites what is still needed.

Kernels that place tensors themselves put several into the same bytes on purpose. A value is lost when a tile is written, another tile
(of another tensor, or another block of the same one) is written to the same bytes, and then the first is read. The accesses of the kernel
are followed in program order; loops run in full where the kernel has at most `BUDGET` steps, else their first iterations and the last
one, which meets what repeats modulo a few buffers. Accesses count from their first to their last byte, in whole quadrants.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from opennki.errors import NkiError, NkiValueError
from opennki.ir.affine import Var
from opennki.ir.nodes import Access, Alloc, DoWhile, For, If, Instr, Kernel, Stmt
from opennki.ir.verify import accesses
from opennki.passes.footprint import OnChip, locate
from opennki.passes.memory_map import MemoryMap, Placement

BUDGET = 50_000
QUADRANT = 32


def clobbered(memory: MemoryMap) -> NkiError | None:
    """The first read of contents that another tile has overwritten; None where there is none, or no bytes are shared."""
    shared = {a for name in ("sbuf", "psum") for a in _shared([(a, p) for a, p in memory.placements.items() if p.buffer == name])}
    if not shared:
        return None
    return _Follow(memory, shared).run()


def _shared(placed: list[tuple[Alloc, Placement]]) -> set[Alloc]:
    """Directly placed tensors that have bytes in common with another one, or of two blocks."""
    regions = sorted(((r.address, r.address + r.size, r, a) for a, p in placed if p.direct for r in p.regions()),
                     key=lambda r: r[:2])
    found = {a for a, p in placed if p.direct and len(p.regions()) < p.blocks}
    active: list[tuple[int, int, object, Alloc]] = []
    for begin, end, region, alloc in regions:
        active = [x for x in active if x[1] > begin]
        for _, _, other, owner in active:
            if region.meets(other):  # type: ignore[arg-type]
                found |= {alloc, owner}
        active.append((begin, end, region, alloc))
    return found


@dataclass(slots=True)
class _Use:
    """An access of a shared tensor: what it reaches, and whether it reads and writes."""

    at: OnChip
    place: Placement
    reads: bool
    writes: bool


class _Follow:
    def __init__(self, memory: MemoryMap, shared: set[Alloc]) -> None:
        self.memory, self.kernel, self.shared = memory, memory.kernel, shared
        self.uses: dict[Instr, list[_Use]] = {}
        last = {n: max((r.address + r.size for a in shared if a.space == n for r in memory.placements[a].regions()), default=0)
                for n in ("sbuf", "psum")}
        quadrants = memory.target.partitions // QUADRANT
        self.owner = {n: np.zeros((quadrants, size), np.int32) for n, size in last.items()}
        self.tiles: list[tuple[Alloc, int]] = [(next(iter(shared)), 0)]  # by number: tensor and block; 0 is nobody
        self.numbers: dict[tuple[Alloc, int], int] = {}
        self.written: dict[int, int] = {}  # location of the last write of each tile since its tensor was made
        self.env: dict[Var, int] = {}
        self.most = self._cap()

    def run(self) -> NkiError | None:
        """Follow one program of the grid: programs have memory of their own, and addresses do not depend on them."""
        self.env = {v: v.lo for v in self.kernel.grid}
        return self._body(self.kernel.body)

    def _cap(self) -> int:
        def steps(body: list[Stmt], most: int) -> int:
            count = 0
            for stmt in body:
                if isinstance(stmt, Instr):
                    count += any(a.alloc in self.shared for a, _, _ in accesses(stmt))
                elif isinstance(stmt, For):
                    count += min(stmt.trips, most + 1) * steps(stmt.body, most)
                elif isinstance(stmt, DoWhile):
                    count += 2 * steps(stmt.body, most)
                elif isinstance(stmt, If):
                    count += steps(stmt.then, most) + steps(stmt.orelse, most)
            return count
        for most in (1 << 30, 64, 32, 16, 8, 4):
            if steps(self.kernel.body, most) <= BUDGET:
                return most
        return 3

    def _body(self, body: list[Stmt]) -> NkiError | None:
        for stmt in body:
            error = None
            if isinstance(stmt, Instr):
                error = self._instr(stmt)
            elif isinstance(stmt, Alloc):
                if stmt in self.shared:
                    for block in range(self.memory.placements[stmt].blocks):
                        self.written.pop(self._number(stmt, block), None)
            elif isinstance(stmt, For):
                for i in self._iterations(stmt.trips):
                    self.env[stmt.var] = i
                    error = self._body(stmt.body)
                    if error is not None:
                        break
            elif isinstance(stmt, If):
                error = self._body(stmt.then if stmt.pred.expr.evaluate(self.env) >= 0 else stmt.orelse)
            else:
                error = self._body(stmt.body) or self._body(stmt.body)
            if error is not None:
                return error
        return None

    def _iterations(self, trips: int) -> Iterator[int]:
        yield from range(min(trips, self.most))
        if trips > self.most:
            yield trips - 1

    def _instr(self, instr: Instr) -> NkiError | None:
        uses = self.uses.get(instr)
        if uses is None:
            uses = self.uses[instr] = []
            for access, reads, writes in accesses(instr):
                if access.alloc in self.shared:
                    at = locate(access)
                    if at is not None and not at.block.dynamic:
                        uses.append(_Use(at, self.memory.placements[access.alloc], reads, writes))
        for use in uses:
            if use.reads:
                for number, region in self._reached(use):
                    if number in self.written:
                        other = region[(region != number) & (region != 0)]
                        if other.size:
                            return self._error(instr, use.at.access, number, int(other[0]))
        for use in uses:
            if use.writes:
                for number, region in self._reached(use):
                    region[...] = number
                    self.written[number] = instr.loc
        return None

    def _reached(self, use: _Use) -> Iterator[tuple[int, np.ndarray]]:
        """(number of a tile, owners of the bytes of it that an access reaches) for each block."""
        at, place, shape = use.at, use.place, use.at.access.shape
        base = at.block.base.evaluate(self.env)
        moving = [range(0, s * n, s) for s, n in zip(at.block.strides, shape, strict=True) if s]
        exact = {v: (i, i) for v, i in self.env.items()}
        low, high = at.byte.range(shape, exact, place.size)
        first, last = at.partition.range(shape, exact, place.partitions)
        if low > high or first > last:
            return
        for offsets in product(*moving):
            block = base + sum(offsets)
            if not 0 <= block < place.blocks:
                continue
            start, address = place.at(block)
            owner = self.owner[place.buffer]
            rows = slice((start + first) // QUADRANT, (start + last) // QUADRANT + 1)
            yield self._number(at.access.alloc, block), owner[rows, address + low:address + high + at.itemsize]

    def _number(self, alloc: Alloc, block: int) -> int:
        number = self.numbers.get((alloc, block))
        if number is None:
            number = self.numbers[alloc, block] = len(self.tiles)
            self.tiles.append((alloc, block))
        return number

    def _error(self, instr: Instr, access: Access, mine: int, other: int) -> NkiError:
        def name(number: int) -> str:
            alloc, block = self.tiles[number]
            text = f"{alloc.name or repr(alloc)} {alloc.shape}"
            index = ", ".join(str(i) for i in np.unravel_index(block, alloc.shape[:alloc.pdim])) if alloc.pdim else ""
            return f"block [{index}] of {text}" if index else text
        kernel: Kernel = self.kernel
        lines = [kernel.loc(self.written[n]) for n in (mine, other)]
        at = self.memory.placements[access.alloc].at(self.tiles[mine][1])
        return NkiValueError(
            f"{name(other)} overwrites {name(mine)}, which is read later", loc=kernel.loc(instr.loc),
            operand=f"{name(mine)} is placed at partition {at[0]}, byte {at[1]} of {access.alloc.space.upper()} and written at {lines[0]}; "
                    f"{name(other)} has bytes in common with it and is written at {lines[1]}",
            rule="tensors that are placed in the same bytes are not needed at the same time",
            why="the device has one value for each byte; the simulator keeps each tensor apart",
            fix="give them different addresses, or more buffers (num_free_tiles, num_bank_tiles), or read before the other is written")
