"""The memory map: where each on-chip tensor lives, and what is alive when."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from opennki.ir.nodes import Alloc, Kernel
from opennki.isa import dtypes
from opennki.isa.target import Target
from opennki.passes.liveness import Interval, Liveness

MEMORIES = ("sbuf", "psum")


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a memory: partitions from `start_partition`, bytes of a partition from `address`."""

    start_partition: int
    partitions: int
    address: int
    size: int

    def meets(self, other: Region) -> bool:
        """True when the rectangles have a byte in common."""
        return (self.address < other.address + other.size and other.address < self.address + self.size
                and self.start_partition < other.start_partition + other.partitions
                and other.start_partition < self.start_partition + self.partitions)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a tensor lives.

    A tensor is one tile of `partitions` x `size` bytes for each of its `blocks` (the elements of its block dimensions, row-major), and all
    of that in `copies` buffers, which the iterations of the loop that it is made in use in turn: iteration n (counted over all loops
    around it) uses buffer n % copies. Block b of buffer k is `stride` * (k * blocks + b) bytes after `address`, unless a `table` gives
    (start_partition, address) for each block, as direct allocation does. `bank` is the first PSUM bank, None in SBUF. `direct`: the
    kernel chose the place.
    """

    buffer: str
    start_partition: int
    partitions: int
    address: int
    size: int
    copies: int = 1
    bank: int | None = None
    blocks: int = 1
    stride: int = 0
    table: tuple[tuple[int, int], ...] = ()

    @property
    def direct(self) -> bool:
        """True when the kernel chose the place."""
        return bool(self.table)

    def at(self, block: int = 0, copy: int = 0) -> tuple[int, int]:
        """(start partition, byte address in a partition) of a block in a buffer."""
        if self.table:
            return self.table[block]
        return self.start_partition, self.address + self.stride * (copy * self.blocks + block)

    @property
    def extent(self) -> int:
        """Bytes of a partition from the first to the last byte of all blocks and buffers."""
        if self.table:
            return max(a for _, a in self.table) + self.size - min(a for _, a in self.table)
        return self.stride * (self.copies * self.blocks - 1) + self.size

    def regions(self) -> tuple[Region, ...]:
        """The rectangles that the tensor takes, of all its blocks and buffers; one where they are contiguous."""
        if self.table:
            return tuple(Region(p, self.partitions, a, self.size) for p, a in dict.fromkeys(self.table))
        return (Region(self.start_partition, self.partitions, self.address, self.extent),)

    def to_json(self) -> dict[str, Any]:
        """A record of numbers and texts."""
        out: dict[str, Any] = {"buffer": self.buffer, "start_partition": self.start_partition, "partitions": self.partitions,
                               "address": self.address, "size": self.size, "copies": self.copies, "blocks": self.blocks,
                               "stride": self.stride}
        if self.bank is not None:
            out["bank"] = self.bank
        if self.table:
            out["table"] = [list(t) for t in self.table]
        return out


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest point of a memory: `position` in program order, `size` bytes per partition alive there (in full columns, one buffer for
    each tensor), the tensors alive, and `high`, the bytes of a partition up to the last one that any tensor takes."""

    size: int
    live: tuple[Alloc, ...]
    position: int = 0
    high: int = 0


@dataclass(slots=True)
class MemoryMap:
    """The placements of a kernel's on-chip tensors.

    `kernel` is the kernel as it was allocated, after the middle end; `placements` has its tensors, and those of the kernel that
    `allocate` was given. `intervals`: first and last position of each tensor in program order. `peaks` by memory: the fullest point.
    `notes`: what the allocator could not grant, as text.
    """

    kernel: Kernel
    target: Target
    placements: dict[Alloc, Placement] = field(default_factory=dict)
    live: Liveness = field(default_factory=Liveness)
    peaks: dict[str, Peak] = field(default_factory=dict)
    allocator: str = "auto"
    notes: tuple[str, ...] = ()

    @property
    def intervals(self) -> dict[Alloc, Interval]:
        """First and last position of each tensor."""
        return self.live.intervals

    def of(self, memory: str) -> Iterator[tuple[Alloc, Placement, Interval]]:
        """The tensors of a memory, in program order."""
        for alloc in sorted(self.live.intervals, key=lambda a: (self.live.intervals[a].start, a.id)):
            if alloc.space == memory:
                yield alloc, self.placements[alloc], self.live.intervals[alloc]

    def to_json(self) -> dict[str, Any]:
        """The map as numbers and texts: target, sizes, peaks, and each tensor with its place and interval."""
        memories = {}
        for memory in MEMORIES:
            peak = self.peaks[memory]
            memories[memory] = {
                "bytes_per_partition": capacity(self.target, memory), "peak_bytes": peak.size, "peak_position": peak.position,
                "high_bytes": peak.high,
                "tensors": [{"id": a.id, "name": a.name, "shape": list(a.shape), "dtype": a.dtype, "first": i.start, "last": i.end,
                             **({"file": a.loc.file, "line": a.loc.line} if a.loc else {}), **p.to_json()}
                            for a, p, i in self.of(memory)]}
        return {"kernel": self.kernel.name, "target": self.target.name, "allocator": self.allocator, "positions": len(self.live.places),
                "memories": memories, "notes": list(self.notes)}


def capacity(target: Target, memory: str) -> int:
    """Bytes of a partition that a kernel can use."""
    return target.sbuf_usable_bytes if memory == "sbuf" else target.psum_partition_bytes


def tile(alloc: Alloc) -> tuple[int, int, int]:
    """(blocks, partitions, bytes per partition) of an on-chip tensor."""
    shape = alloc.shape
    return prod(shape[:alloc.pdim]), shape[alloc.pdim], prod(shape[alloc.pdim + 1:]) * dtypes.itemsize(alloc.dtype)


def bytes_per_partition(alloc: Alloc) -> int:
    """Bytes that a tensor takes of each partition, in one buffer."""
    blocks, _, size = tile(alloc)
    return blocks * size
