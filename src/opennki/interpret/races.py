"""Races between the programs of a launch grid: accesses of one place in shared memory that no meeting orders.

Programs run at the same time, in no order but that which they make by meeting each other. So each has a vector clock: for every program of
its rank, until which of that one's times it knows that everything is done. A program's own time goes on whenever it gives something to a
meeting (a barrier, a reduction, an exchange, a collective, a letter); those who get it know that time from then on, and whatever the giver
knew. What a program knows of other ranks' programs travels along, since two programs of one rank may be ordered through another rank.

For each place of a tensor that is not proven to be each program's own (`trace.independence`) the last write and the last read are kept, as
the number of an event: program, time and source line. An access is ordered after an event if the clock says so; else it is a race, whatever
the order in which this run happened to take it. A read that the next one is not ordered after is kept in a table of its program, since a
later write must be ordered after both. Memory: 8 bytes for each place, and 4 more for each further concurrent reader; time: a pass over the
places of each access.
"""
from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from opennki.errors import Loc, NkiError
from opennki.interpret.views import View, value_of

Array = np.ndarray
Clock = dict[int, Array]  # by rank: the time of each of its programs


class Places:
    """The record of one tensor: numbers of events by place, for writes and for reads."""

    def __init__(self, count: int) -> None:
        self.writes = np.zeros(count, np.int32)
        self.reads = np.zeros(count, np.int32)
        self.others: dict[int, Array] = {}  # concurrent reads, by program

    def forget_reads(self) -> None:
        """All that was done until now is ordered before all that comes."""
        self.others.clear()


class Races:
    """What the programs of one rank share. `grid`: their positions; `grains`: by slot of a watched tensor, the bytes of a place."""

    def __init__(self, grid: Sequence[tuple[int, ...]], grains: dict[int, int]) -> None:
        self.grid, self.grains = grid, grains
        self.numbers = {program: n for n, program in enumerate(grid)}
        self.tables: dict[int, Places] = {}
        self.events: dict[Any, int] = {}
        self.whats: list[Any] = [None]  # of each event: what was done
        self.programs = np.zeros(16, np.int32)  # and by which program, when
        self.times = np.zeros(16, np.int32)
        self.lock = threading.Lock()
        self.pending: list[tuple[str, NkiError]] = []  # what is an error unless a race shows that explains it
        self.found = False

    def put_off(self, kind: str, error: NkiError) -> None:
        """An error about a value that another program may be late to make."""
        self.pending.append((kind, error))

    def settle(self, report: Any) -> None:
        """Report what was put off and no race has explained."""
        pending, self.pending = self.pending, []
        for kind, error in () if self.found else pending:
            report(kind, error)

    def number(self, program: tuple[int, ...]) -> int:
        """The number of a program, from its position."""
        return self.numbers[program]

    def clock(self, me: int) -> Array:
        """The clock of a program that begins."""
        clock = np.zeros(len(self.grid), np.int32)
        clock[me] = 1
        return clock

    def event(self, me: int, time: int, what: Any) -> int:
        """The number of an event."""
        key = me, time, what
        found = self.events.get(key)
        if found is not None:
            return found
        with self.lock:
            number = len(self.whats)
            if number == len(self.times):
                for name in ("programs", "times"):
                    setattr(self, name, np.concatenate([getattr(self, name), np.zeros(number, np.int32)]))
            self.programs[number], self.times[number] = me, time
            self.whats.append(what)
            self.events[key] = number
            return number

    def late(self, events: Array, clock: Array) -> Array | None:
        """Which events a clock does not order before now; None for none of them."""
        if not events.size:
            return None
        low, high = int(events.min()), int(events.max()) + 1
        if not (self.times[low:high] > clock[self.programs[low:high]]).any():  # nothing in between either
            return None
        return self.times[events] > clock[self.programs[events]]  # type: ignore[no-any-return]

    def places(self, slot: int, size: int) -> Places:
        """The record of a tensor of so many bytes."""
        found = self.tables.get(slot)
        if found is None:
            found = self.tables[slot] = Places(max(1, -(-size // self.grains[slot])))
        return found

    def all_met(self) -> None:
        """All programs have met, so nothing before is concurrent with anything after."""
        for table in self.tables.values():
            table.forget_reads()


class What:
    """An access that is watched. `mode`: it reads, writes, or updates (accumulates, which several programs may do in one place)."""

    __slots__ = ("loc", "mode", "suspect", "view")

    def __init__(self, view: View, suspect: Any, loc: Loc | None) -> None:
        self.view, self.suspect, self.loc, self.mode = view, suspect, loc, suspect.mode


def bits(array: Array) -> Array:
    """A copy of the bytes of a part of a tile, one integer per element."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape).copy()


def _entries(table: Array, view: View, machine: Any, part: Any, grain: int) -> tuple[Array, Any]:
    """(entries of a part of a tile, their places where they are a copy)."""
    count = view.itemsize // grain
    if view.dynamic is not None:
        where = view.dynamic.flat(machine, *part)[0]
        if count > 1:
            where = where[..., None] * count + np.arange(count)
        return table[where], where
    lo, hi = part
    offset = value_of(view.base, machine.env)
    for s, a in zip(view.strides, lo, strict=True):
        offset += s * a
    shape = tuple(b - a for a, b in zip(lo, hi, strict=True))
    strides = tuple(s // grain * 4 for s in view.strides)
    if count > 1:
        shape, strides = (*shape, count), (*strides, 4)
    return np.ndarray(shape, table.dtype, table, offset // grain * 4, strides), None


def _put(table: Array, entries: Array, where: Any, keep: Array | None, value: Any) -> None:
    if where is not None:
        table[where if keep is None else where[np.broadcast_to(keep, where.shape)]] = value
    elif keep is None:
        entries[...] = value
    else:
        np.copyto(entries, value, where=keep)


def touch(machine: Any, what: What, part: Any, keep: Array | None, changed: Array | None = None) -> None:
    """Record an access, and report it where a clock does not order it after an earlier one of another program.

    part: (lo, hi) of the tile; keep: truth of the elements that a mask leaves, or None; changed: where a write has changed the value
    (programs that write what is there already only get a warning).
    """
    races: Races = machine.races
    view, writes = what.view, what.mode != "read"
    if 0 in view.shape:
        return
    me, clock = machine.me, machine.clock
    grain = races.grains[view.slot]
    record = races.places(view.slot, view.elements * view.itemsize)
    entries, where = _entries(record.writes, view, machine, part, grain)
    shape = tuple(b - a for a, b in zip(*part, strict=True))
    keep = keep if keep is not None and keep.shape == shape else None
    inside = view.dynamic.flat(machine, *part)[1] if view.dynamic is not None else None
    if inside is not None:  # rows that are left out
        keep = inside if keep is None else keep & inside
    if entries.ndim > len(shape):
        keep = None if keep is None else keep[..., None]
        changed = None if changed is None else changed[..., None]
    late = races.late(entries, clock)
    _check(machine, what, late, entries, keep, changed if writes else None, what.mode == "update")
    me_now = races.event(me, int(clock[me]), what)
    seen, seen_where = _entries(record.reads, view, machine, part, grain)
    if not writes:
        older = races.late(seen, clock)
        if older is not None:
            _spill(races, record, view, machine, part, grain, seen, older if keep is None else older & keep)
        _put(record.reads, seen, seen_where, keep, me_now)
        return
    _check(machine, what, races.late(seen, clock), seen, keep, changed, False)
    for program, table in list(record.others.items()):
        if program != me:
            also, _ = _entries(table, view, machine, part, grain)
            _check(machine, what, races.late(also, clock), also, keep, changed, False)
    _put(record.writes, entries, where, keep, me_now)


def _spill(races: Races, record: Places, view: View, machine: Any, part: Any, grain: int, seen: Array, older: Array) -> None:
    """Keep reads that the one that comes is not ordered after."""
    for program in np.unique(races.programs[seen[np.broadcast_to(older, seen.shape)]]).tolist():
        table = record.others.setdefault(program, np.zeros_like(record.reads))
        entries, where = _entries(table, view, machine, part, grain)
        theirs = older & (races.programs[seen] == program)
        _put(table, entries, where, theirs, seen if where is None else seen[np.broadcast_to(theirs, seen.shape)])


def _check(machine: Any, what: What, late: Array | None, events: Array, keep: Array | None, changed: Array | None, update: bool) -> None:
    if late is None:
        return
    races: Races = machine.races
    if keep is not None:
        late = late & keep
    if update:  # accumulations in one place are no race
        late = late & np.asarray([w is not None and w.mode != "update" for w in races.whats])[events]
    if not late.any():
        return
    event = int(events[np.unravel_index(int(np.argmax(late)), late.shape)])
    same = changed is not None and races.whats[event].mode != "read" and not (late & changed).any()
    error = _error(machine, what, races.whats[event], int(races.programs[event]))
    if same:
        error.message += ", with the same values"
    races.found = True
    machine.report("repeated" if same else "race", error)


def _error(machine: Any, what: What, other: What, program: int) -> NkiError:
    """The report of two accesses, with both lines."""
    races: Races = machine.races
    mine, theirs = races.grid[machine.me], races.grid[program]
    error: NkiError = machine.tape.race(what, other, [i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b])
    error.message += f": program {mine} {_verb(what)} at {what.loc} and program {theirs} {_verb(other)} at {other.loc}"
    error.operand = " | ".join(dict.fromkeys(f"{x}: {x.source()}" for x in (what.loc, other.loc) if x is not None))
    return error


def _verb(what: What) -> str:
    return {"read": "reads it", "write": "writes it", "update": "accumulates into it"}[what.mode]


def snapshot(machine: Any, rank: int) -> Clock | None:
    """What a program gives to a meeting: what it knows. Its own time goes on. None where no program of the run watches anything."""
    if machine.clock is None:
        return None
    given = dict(machine.known)
    if len(machine.clock) > 1:
        given[rank] = machine.clock.copy()
        machine.clock[machine.me] += 1
    return given


def learn(machine: Any, rank: int, clocks: Sequence[Clock | None]) -> None:
    """What a program gets from a meeting."""
    if machine.clock is None:
        return
    for given in clocks:
        for other, times in (given or {}).items():
            if other == rank:
                if len(times) == len(machine.clock):
                    np.maximum(machine.clock, times, out=machine.clock)
            else:
                known = machine.known.get(other)
                machine.known[other] = times if known is None or len(known) != len(times) else np.maximum(known, times)
