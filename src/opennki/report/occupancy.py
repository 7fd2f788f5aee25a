"""How full SBUF and PSUM are over time: the memory map and the recorded rows together."""

from __future__ import annotations

from typing import Any

import numpy as np

from opennki.passes.memory_map import MEMORIES, MemoryMap, Placement, capacity
from opennki.timing import Timeline


def occupancy(timeline: Timeline, memory: MemoryMap) -> dict[str, Any]:
    """For each memory its capacity and the bytes in use, both of one partition, and the times in ns at which the use changes.

    A tensor takes its place, with all of its buffers, from the first recorded row that touches it to the end of the last one; bytes that
    several tensors take in turn count once.
    """
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for row in timeline.rows:
        end = max(row.visible_ns, row.start_ns + row.duration_ns)
        for number in row.tensors:
            first[number] = min(first.get(number, row.start_ns), row.start_ns)
            last[number] = max(last.get(number, 0.0), end)
    out: dict[str, Any] = {}
    for name in MEMORIES:
        size = capacity(memory.target, name)
        changes: list[tuple[float, int, Placement]] = []
        for number, place in {a.id: p for a, p in memory.placements.items() if p.buffer == name and a.id in first}.items():
            changes += [(first[number], 1, place), (last[number], -1, place)]
        changes.sort(key=lambda change: change[:2])
        spilled = max((r.address + r.size for p in memory.placements.values() if p.buffer == name for r in p.regions()), default=0)
        users = np.zeros(max(size, spilled), np.int16)  # tensors on each byte of a partition
        at: list[float] = []
        levels: list[int] = []
        level = 0
        for when, step, place in changes:
            for region in place.regions():
                part = users[region.address : region.address + region.size]
                level -= int(np.count_nonzero(part))
                part += step
                level += int(np.count_nonzero(part))
            if at and at[-1] == when:
                levels[-1] = level
            else:
                at.append(when)
                levels.append(level)
        out[name] = {"capacity": size, "at": at, "bytes": levels}
    return out
