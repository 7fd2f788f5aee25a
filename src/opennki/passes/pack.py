"""Packing: byte addresses for rectangles of (bytes, partitions) that are alive in intervals, none of which may meet in all three.

Deciding whether it is possible is NP-hard; a few well-known orders are tried, and the first that fits is taken. Each is deterministic.
"""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from opennki.passes.liveness import Interval


@dataclass(slots=True)
class Item:
    """A rectangle to place: `width` bytes, addresses that are multiples of `align`, starting at one of `starts` (partitions).

    `window`: where not 0 the rectangle lies within one such window of bytes. `address` and `start` are the answer, and are given for
    what is placed already (`fixed`).
    """

    key: object
    interval: Interval
    width: int
    partitions: int
    align: int = 1
    starts: tuple[int, ...] = (0,)
    window: int = 0
    address: int = -1
    start: int = 0
    fixed: bool = False


def pack(items: Sequence[Item], room: int) -> bool:
    """Place all items below `room`; True when they fit. Items that are fixed stay."""
    free = [i for i in items if not i.fixed]
    fixed = [i for i in items if i.fixed]
    if not fixed and _apart(free, room):
        return True
    by_time = sorted(free, key=lambda i: (i.interval.start, -i.width))
    if _scan(by_time, fixed, room, rotate=True) or _scan(by_time, fixed, room, rotate=False):
        return True
    orders: list[Callable[[Item], tuple[int, ...]]] = [
        lambda i: (-i.width, i.interval.start),
        lambda i: (-(i.interval.end - i.interval.start + 1), -i.width),
        lambda i: (-i.width * (i.interval.end - i.interval.start + 1), i.interval.start)]
    return any(_greedy(sorted(free, key=order), fixed, room) for order in orders)


def stack(items: Sequence[Item], room: int) -> bool:
    """Place each item above everything that is alive when it is made, as a stack does."""
    active: list[Item] = [i for i in items if i.fixed]
    for item in sorted((i for i in items if not i.fixed), key=lambda i: (i.interval.start, str(i.key))):
        active = [i for i in active if i.interval.end >= item.interval.start]
        top = max((i.address + i.width for i in active if i.interval.meets(item.interval)), default=0)
        item.start, item.address = item.starts[0], _aligned(top, item)
        if item.address + item.width > room:
            return False
        active.append(item)
    return True


def _apart(free: Sequence[Item], room: int) -> bool:
    """Each item in bytes of its own, if there is room: then no order is imposed by reuse."""
    if sum(i.width for i in free) > room:
        return False
    top = 0
    for item in sorted(free, key=lambda i: (-i.align, i.interval.start, str(i.key))):
        item.start, item.address = item.starts[0], _aligned(top, item)
        top = item.address + item.width
        if top > room:
            return False
    return True


def _aligned(address: int, item: Item) -> int:
    """The first address from `address` on at which an item may start."""
    address = -(-address // item.align) * item.align
    if item.window and address // item.window != (address + item.width - 1) // item.window:
        address = -(-address // item.window) * item.window
        address = -(-address // item.align) * item.align
    return address


def _gap(taken: Sequence[tuple[int, int]], item: Item, room: int, origin: int) -> int:
    """The first free address from `origin` on, then from 0 on; -1 if there is none. `taken`: (begin, end) sorted by begin."""
    for first, last in ((origin, room), (0, room)) if origin else ((0, room),):
        at = _aligned(first, item)
        for begin, end in taken:
            if begin >= at + item.width:
                break
            if end > at:
                at = _aligned(end, item)
        if at + item.width <= last:
            return at
    return -1


def _scan(order: Sequence[Item], fixed: Sequence[Item], room: int, rotate: bool) -> bool:
    """Linear scan in program order: each item into the first gap, or into the next one after what was placed before (so that memory that
    was given back rests before it is used again)."""
    active: list[tuple[int, int, Item]] = []  # by address
    origin = 0
    for item in order:
        now = item.interval.start
        active = [a for a in active if a[2].interval.end >= now]
        others = [(i.address, i.address + i.width, i) for i in fixed if i.interval.meets(item.interval)]
        pool = sorted(active + others, key=lambda a: a[:2]) if others else active
        for start in item.starts:
            taken = [(b, e) for b, e, i in pool if start < i.start + i.partitions and i.start < start + item.partitions]
            at = _gap(taken, item, room, origin if rotate else 0)
            if at >= 0:
                break
        else:
            return False
        item.start, item.address = start, at
        origin = at + item.width
        active.insert(bisect_left(active, (at, at + item.width), key=lambda a: a[:2]), (at, at + item.width, item))
    return True


MOST = 20000  # items up to which the orders other than program order are tried: they compare each with each


def _greedy(order: Sequence[Item], fixed: Sequence[Item], room: int) -> bool:
    """Each item, in the given order, into the lowest gap between those that are alive with it."""
    if len(order) > MOST:
        return False
    count = len(order) + len(fixed)
    table = np.zeros((count, 6), np.int64)  # interval, bytes, partitions
    for n, item in enumerate(fixed):
        table[n] = _row(item)
    n = len(fixed)
    for item in order:
        done = table[:n]
        meets = done[(done[:, 0] <= item.interval.end) & (done[:, 1] >= item.interval.start)]
        for start in item.starts:
            here = meets[(meets[:, 4] < start + item.partitions) & (meets[:, 5] > start)]
            here = here[np.argsort(here[:, 2], kind="stable")]
            at = _gap([(int(b), int(e)) for b, e in here[:, 2:4]], item, room, 0)
            if at >= 0:
                break
        else:
            return False
        item.start, item.address = start, at
        table[n] = _row(item)
        n += 1
    return True


def _row(item: Item) -> tuple[int, ...]:
    return (item.interval.start, item.interval.end, item.address, item.address + item.width, item.start, item.start + item.partitions)
