"""Hazards of long statement lists, such as unrolled kernels: one pass in program order over what was touched last.

Accesses count as boxes over all iterations of the loops around them. What a write covers completely is ordered before it and need not be
looked at again; so the work grows with the number of statements, not of pairs.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opennki.passes.hazards import Entry, Space
from opennki.passes.reduce import Need

BUCKET = 2048  # bytes of a partition, or elements of the first dimension of a tensor, that are looked at together
WIDE = 32  # buckets above which an access is kept in a list of its own

Box = tuple[tuple[int, int], ...]


def swept(groups: Mapping[Any, Sequence[Entry]], singles: Sequence[bool], repeats: bool) -> dict[Need, int]:
    """The orderings with their distances: 0, or 1 for the next iteration where the list `repeats`. `singles`: which children
    are single instructions."""
    edges: dict[Need, int] = {}
    space = Space((), False)
    for group in groups.values():
        boxes = [tuple(space.hull(e, False)) for e in group]
        touched = _Touched(128 if group[0].place is None else BUCKET, 0 if group[0].place is None else 1)
        for iteration in range(2 if repeats else 1):
            for e, box in sorted(zip(group, boxes, strict=True), key=lambda x: (x[0].child, x[0].writes)):
                for other, theirs, theirs_iteration in touched.meeting(box):
                    if other.stream != e.stream and (other.writes or e.writes) and all(
                            x[0] <= y[1] and y[0] <= x[1] for x, y in zip(box, theirs, strict=True)):
                        distance = iteration - theirs_iteration
                        if other.child == e.child and not distance:
                            continue
                        key = Need(other.child, other.stream, e.child, e.stream, other.sources, e.sinks)
                        edges[key] = min(distance, edges.get(key, distance))
                touched.add(e, box, iteration, e.writes and e.dense and singles[e.child])
    return edges


class _Touched:
    """Accesses so far, by buckets of one coordinate."""

    def __init__(self, size: int, axis: int) -> None:
        self.size, self.axis = size, axis
        self.buckets: dict[int, dict[int, tuple[Entry, Box, int]]] = {}
        self.wide: dict[int, tuple[Entry, Box, int]] = {}
        self.next = 0

    def _range(self, box: Box) -> range:
        if not box:
            return range(0, 1)
        lo, hi = box[self.axis]
        return range(lo // self.size, hi // self.size + 1)

    def meeting(self, box: Box) -> Iterator[tuple[Entry, Box, int]]:
        seen: set[int] = set()
        where = self._range(box)
        for bucket in where if len(where) <= WIDE else list(self.buckets):
            for number, item in self.buckets.get(bucket, {}).items():
                if number not in seen:
                    seen.add(number)
                    yield item
        yield from self.wide.values()

    def add(self, e: Entry, box: Box, iteration: int, covers: bool) -> None:
        where = self._range(box)
        item = (e, box, iteration)
        number, self.next = self.next, self.next + 1
        places = [self.buckets.setdefault(b, {}) for b in where] if len(where) <= WIDE else [self.wide]
        if covers:
            inside = {n for place in places for n, (_, old, _) in place.items()
                      if all(x[0] <= y[0] and y[1] <= x[1] for x, y in zip(box, old, strict=True))}
            for place in places:
                for n in inside:
                    place.pop(n, None)
        for place in places:
            place[number] = item
