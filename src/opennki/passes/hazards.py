"""Hazards: which accesses of different queues may touch the same bytes, and how many iterations apart.

An `Entry` is an access of an instruction as a box: partitions and byte addresses of placed memory on chip (so that tensors which share
bytes meet), index ranges of the tensor in HBM. Two entries in the body of a loop meet at distance d when iteration n of one and
iteration n + d of the other have a place in common. Where the loops around have few iterations the distances are exact for the boxes;
else they are 0 or 1, which orders at least as much.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opennki.ir.affine import Affine, FloorDiv, Var
from opennki.ir.nodes import Access, Alloc, For
from opennki.isa import dtypes
from opennki.passes.footprint import Axis, locate
from opennki.passes.memory_map import MemoryMap, Placement

MOST_ITERATIONS = 4096  # of the loops around a body, up to which they are enumerated
FARTHEST = 32  # iterations; what meets only farther apart is ordered as if it met at this distance
Array = np.ndarray
Bounds = tuple[Array, Array]


@dataclass(slots=True, eq=False)
class Entry:
    """An access of an instruction on a stream. `key`: entries of different keys never meet. `axes`: base and window of each coordinate;
    `block` of a placed tensor, whose address `place` gives. `child` is the statement of the body that is looked at,
    `sources` and `sinks` are those of an ordering from it and to it (see `passes.reduce.Need`)."""

    stream: str
    writes: bool
    key: Any
    axes: tuple[tuple[Affine, int, int], ...] = ()
    block: tuple[Affine, int, int] | None = None
    place: Placement | None = None
    home: tuple[For, ...] = ()
    dense: bool = False
    child: int = 0
    branch: int = 0
    sources: frozenset[str] = frozenset()
    sinks: frozenset[str] = frozenset()
    pids: tuple[Any, ...] = field(default=())

    def __post_init__(self) -> None:
        self.sources = self.sinks = frozenset((self.stream,))
        bases = [b for b, _, _ in self.axes] + ([self.block[0]] if self.block else [])
        self.pids = tuple(tuple((a.key, c) for a, c in base.terms if any(v.kind == "pid" for v in a.variables())) for base in bases)


def entry(access: Access, writes: bool, stream: str, memory: MemoryMap, views: dict[Alloc, Any], masked: bool) -> Entry:
    """The entry of an access. `views`: for HBM tensors, the shape as which all accesses index them, or None."""
    alloc = access.alloc
    if alloc.on_chip:
        place = memory.placements[alloc]
        home = tuple(loop for loop in memory.live.loops(alloc) if isinstance(loop, For))
        at = locate(access)
        blocks = (Affine(), 0, place.blocks - 1)
        whole = (Affine(), 0, place.partitions - 1), (Affine(), 0, place.size - 1)
        if at is None:
            return Entry(stream, writes, alloc.space, whole, blocks, place, home)
        partition = _window(at.partition, access.shape, place.partitions)
        base, lo, hi = _window(at.byte, access.shape, place.size)
        size = 1
        for n in access.shape:
            size *= n
        block = _window(at.block, access.shape, place.blocks)
        dense = (not masked and not any(a.dynamic for a in (at.partition, at.byte, at.block))
                 and size * at.itemsize == (partition[2] - partition[1] + 1) * (hi + at.itemsize - lo) and block[1] == block[2])
        return Entry(stream, writes, alloc.space, (partition, (base, lo, hi + at.itemsize - 1 if not at.byte.dynamic else hi)), block,
                     place, home, dense)
    key = (alloc.space if alloc.space == "register" else "hbm", alloc.id)
    if alloc.space == "register":
        return Entry(stream, writes, key)
    shape = views.get(alloc)
    if shape is not None:
        axes = tuple(_window(Axis(d.base, d.strides, d.dyn is not None), access.shape, n) for d, n in zip(access.dims, shape, strict=True))
        return Entry(stream, writes, key, axes)
    linear, lo, hi, unit = Affine(), 0, 0, dtypes.itemsize(access.dtype)
    total = alloc.size * dtypes.itemsize(alloc.dtype)
    if any(d.dyn is not None for d in access.dims):
        return Entry(stream, writes, key, ((Affine(), 0, total - 1),))
    step = unit
    for dim, n in zip(reversed(access.dims), reversed(access.view_shape), strict=True):
        linear = linear.add(dim.base.scale(step))
        for s, count in zip(dim.strides, access.shape, strict=True):
            lo, hi = lo + min(0, s * step * (count - 1)), hi + max(0, s * step * (count - 1))
        step *= n
    return Entry(stream, writes, key, ((linear, lo, hi + unit - 1),))


def whole_tile(alloc: Alloc, stream: str, memory: MemoryMap) -> Entry:
    """The entry of a write of all blocks of a placed tensor."""
    place = memory.placements[alloc]
    home = tuple(loop for loop in memory.live.loops(alloc) if isinstance(loop, For))
    return Entry(stream, True, alloc.space, ((Affine(), 0, place.partitions - 1), (Affine(), 0, place.size - 1)),
                 (Affine(), 0, place.blocks - 1), place, home)


def _window(axis: Axis, shape: tuple[int, ...], size: int) -> tuple[Affine, int, int]:
    if axis.dynamic:
        return Affine(), 0, size - 1
    lo = hi = 0
    for s, n in zip(axis.strides, shape, strict=True):
        lo, hi = lo + min(0, s * (n - 1)), hi + max(0, s * (n - 1))
    return axis.base, lo, hi


@dataclass(frozen=True, slots=True)
class Meeting:
    """How two entries meet: `distance` iterations apart, counted over all loops around. `level`: how many of the loops, from the inside,
    may have ended in between at least; then `outer` is how many iterations of the next loop lie between."""

    distance: int
    level: int
    outer: int


class Space:
    """The iterations of the loops around a body, enumerated in order; or, where there are too many, none of them."""

    def __init__(self, loops: Sequence[For], exact: bool) -> None:
        self.loops = tuple(loops)
        self.count = 1
        for loop in loops:
            self.count *= loop.trips
        self.exact = exact and self.count <= MOST_ITERATIONS
        self.outer: list[Array] = []  # number of the iteration of the loops without the innermost one, two, ...
        self.env: dict[Var, Array] = {}
        if self.exact:
            rest = np.arange(self.count)
            for loop in reversed(loops):
                self.env[loop.var] = rest % loop.trips
                rest = rest // loop.trips
                self.outer.append(rest)
            self.outer = self.outer or [rest]
        self.size = self.count if self.exact else 1
        self._boxes: dict[tuple[int, bool], list[Bounds]] = {}
        self._hulls: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        self._kept: list[Entry] = []

    def bounds(self, base: Affine, pid: bool) -> Bounds:
        """Least and greatest value of an expression in each iteration. `pid`: program ids are taken as their least value."""
        lo = hi = np.full(self.size, base.const)
        for atom, c in base.terms:
            a, b = self._atom(atom, pid)
            lo, hi = (lo + c * a, hi + c * b) if c > 0 else (lo + c * b, hi + c * a)
        return lo, hi

    def _atom(self, atom: Var | FloorDiv, pid: bool) -> tuple[Any, Any]:
        if isinstance(atom, FloorDiv):
            a, b = self.bounds(atom.of, pid)
            return a // atom.by, b // atom.by
        if atom in self.env:
            return self.env[atom], self.env[atom]
        if pid and atom.kind == "pid":
            return atom.lo, atom.lo
        return atom.lo, atom.hi

    def box(self, e: Entry, pid: bool) -> list[Bounds]:
        """Bounds of the coordinates of an entry in each iteration."""
        key = (id(e), pid)
        found = self._boxes.get(key)
        if found is None:
            found = self._boxes[key] = [self._axis(a, pid) for a in e.axes]
            self._kept.append(e)
            if e.place is not None:
                start, address = self._address(e, pid)
                found[0] = found[0][0] + start[0], found[0][1] + start[1]
                found[1] = found[1][0] + address[0], found[1][1] + address[1]
        return found

    def _axis(self, axis: tuple[Affine, int, int], pid: bool) -> Bounds:
        lo, hi = self.bounds(axis[0], pid)
        return lo + axis[1], hi + axis[2]

    def _address(self, e: Entry, pid: bool) -> tuple[Bounds, Bounds]:
        assert e.place is not None and e.block is not None
        place = e.place
        zero = np.zeros(self.size, np.int64)
        lo, hi = self._axis(e.block, pid)
        lo, hi = np.clip(lo, 0, place.blocks - 1), np.clip(hi, 0, place.blocks - 1)
        if place.table:
            table = np.array(place.table)
            if (lo == hi).all():
                start, address = table[lo, 0], table[lo, 1]
                return (start, start), (address, address)
            (s0, a0), (s1, a1) = table.min(0), table.max(0)
            return (zero + s0, zero + s1), (zero + a0, zero + a1)
        first, last = place.address + place.stride * lo, place.address + place.stride * hi
        if place.copies > 1:
            buffer = place.stride * place.blocks
            if e.home and all(loop.var in self.env for loop in e.home):
                number: Any = 0
                for loop in e.home:
                    number = number * loop.trips + self.env[loop.var]
                first, last = first + number % place.copies * buffer, last + number % place.copies * buffer
            else:
                last = last + (place.copies - 1) * buffer
        start = zero + place.start_partition
        return (start, start), (first, last)

    def hull(self, e: Entry, pid: bool) -> list[tuple[int, int]]:
        """Bounds over all iterations."""
        key = (id(e), pid)
        found = self._hulls.get(key)
        if found is None:
            found = self._hulls[key] = [(int(lo.min()), int(hi.max())) for lo, hi in self.box(e, pid)]
        return found

    def candidates(self, group: Sequence[Entry]) -> list[Array]:
        """For each entry of a group, the numbers of those after it, on other streams, that may meet it in some iterations."""
        size = len(group)
        streams = {s: n for n, s in enumerate(dict.fromkeys(e.stream for e in group))}
        stream = np.array([streams[e.stream] for e in group])
        writes = np.array([e.writes for e in group])
        hulls = np.array([self.hull(e, False) for e in group], np.int64).reshape(size, -1, 2)
        out = []
        for i in range(size):
            rest = hulls[i:]
            meet = (stream[i:] != stream[i]) & (writes[i:] | writes[i])
            meet &= (rest[:, :, 0] <= hulls[i, :, 1]).all(1) & (rest[:, :, 1] >= hulls[i, :, 0]).all(1)
            out.append(np.flatnonzero(meet) + i)
        return out

    def meeting(self, a: Entry, b: Entry, least: int) -> Meeting | None:
        """The least number of iterations, from `least` on, after which b meets a; None where they never meet."""
        if a.key != b.key:
            return None
        pid = a.pids == b.pids
        if any(x[1] < y[0] or y[1] < x[0] for x, y in zip(self.hull(a, pid), self.hull(b, pid), strict=True)):
            return None
        if not self.exact:
            return Meeting(least, 0, 0)
        boxes = list(zip(self.box(a, pid), self.box(b, pid), strict=True))
        found: int | None = None
        level = outer = 1 << 30
        for d in range(least, min(self.count, FARTHEST + 1)):
            n = self.count - d
            meet = np.ones(n, bool)
            for (alo, ahi), (blo, bhi) in boxes:
                meet &= (alo[:n] <= bhi[d:]) & (blo[d:] <= ahi[:n])
            if meet.any():
                found = d if found is None else found
                if d == found and (self.outer[0][:n] == self.outer[0][d:])[meet].any():
                    return Meeting(d, 0, 0)
                for k, count in enumerate(self.outer):
                    apart = (count[d:] - count[:n])[meet]
                    if not apart.all():
                        if k < level:
                            level, outer = k, 1 << 30
                        if k:
                            inner = self.outer[k - 1]
                            outer = min(outer, int((inner[d:] - inner[:n])[meet][apart == 0].min())) if k == level else outer
                        break
                if level == 0:
                    return Meeting(found, 0, 0)
        if found is None and self.count <= FARTHEST + 1:
            return None
        if found is None or (self.loops and self.loops[-1].trips > FARTHEST + 1):  # what lies farther apart was not looked at
            return Meeting(FARTHEST if found is None else found, 0, 0)
        return Meeting(found, level, outer)
