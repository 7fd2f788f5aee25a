"""Steady states of loops: where iterations repeat with a constant shift, the rest of the loop is added instead of run.

An iteration is described by its path (which branches were taken, what masks left) and by the start of each of its instructions relative
to the first. Where the last iterations repeat with a period, in path, relative starts and shift alike, the state of engines and queues
relative to each other repeats too, so the following iterations do the same, as long as

* conditions and masks that depend on the loop index decide the same way in them (all of them are evaluated),
* tensors from outside of the loop whose cells move with the index were ready, or become ready, no later than the repetition says.

The number of iterations that satisfies both is skipped: times move by shift times periods, counters grow by what a period counted.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from opennki.timing.costs import DMA, SYNC
from opennki.timing.terms import value

if TYPE_CHECKING:
    from opennki.timing.lower import Loop
    from opennki.timing.machine import Machine

LONGEST = 32  # iterations of the longest period that is looked for
LARGEST = 1 << 21  # values of a condition that are evaluated at once


class Watch:
    """Follows the iterations of one run of a loop."""

    __slots__ = ("bases", "begin", "candidate", "failed", "first", "machine", "node", "runs", "signs", "snapshot", "wait")

    def __init__(self, machine: Machine, node: Loop) -> None:
        self.machine, self.node = machine, node
        self.signs: list[int] = []
        self.bases: list[int] = []
        self.runs = [0] * (LONGEST + 1)
        self.candidate = 0
        self.snapshot: Any = None
        self.wait = 0
        self.failed = 0
        self.first = 0
        self.begin = {id(line): (line.count, line.free) for line in (*machine.lines, *machine.lanes)}

    def after(self, done: int, mark: int, turn: int) -> int:
        """Called after an iteration, `done` of them are; returns how many are skipped."""
        machine = self.machine
        log = machine.log
        if len(log) == mark:
            return 0
        base = log[mark]
        self.signs.append(hash((tuple([t - base for t in log[mark:]]), tuple(machine.path[turn:]))))
        self.bases.append(base)
        signs, bases, runs = self.signs, self.bases, self.runs
        k = len(signs) - 1
        sign, found = signs[k], 0
        for p in range(1, min(LONGEST, k // 2) + 1):
            if signs[k - p] == sign and bases[k] - bases[k - p] == bases[k - p] - bases[k - 2 * p]:
                runs[p] += 1
                if runs[p] >= 2 * p and not found:
                    found = p
            elif runs[p]:
                runs[p] = 0
                if p == self.candidate:
                    self._drop()
        if self.snapshot is not None:
            self.wait -= 1
            if not self.wait:
                return self._jump(done)
        elif found and k >= self.first and self.node.trips - done > 2 * found and all(not r.fresh for r in self.node.rings):
            self.candidate, self.wait = found, found
            self.snapshot = (*_counters(machine, self.node), machine.events)
            machine.events = []
        return 0

    def _drop(self) -> None:
        """Give up on a candidate."""
        if self.snapshot is not None:
            mine, outer = self.machine.events, self.snapshot[-1]
            if outer is not None and mine is not None:
                outer += mine
            self.machine.events = outer
        self.candidate, self.snapshot = 0, None

    def _jump(self, done: int) -> int:
        machine, node, p = self.machine, self.node, self.candidate
        delta = self.bases[-1] - self.bases[-1 - p]
        before = self.snapshot
        events = list(machine.events or [])
        outer = before[-1]
        periods = (node.trips - done) // p
        periods = self._agree(done, p, periods)
        advance = machine.front - before[0]
        if advance not in (0, delta) or not self._settled(before, events, delta):
            periods = 0
        moving, inside = _moving(machine, node, events, p) if periods else ([], 0)
        periods = min(periods, inside)
        periods = _ready(machine, moving, delta, periods) if periods else 0
        if outer is not None:
            outer += events
        machine.events = outer
        self.candidate, self.snapshot = 0, None
        if periods <= 0:
            self.failed += 1
            self.first = len(self.signs) + (p << min(self.failed, 12))
            return 0
        _apply(machine, node, before, events, moving, delta, periods, advance, self.begin)
        machine.path += (delta, periods)
        return periods * p

    def _settled(self, before: Any, events: list[Any], delta: int) -> bool:
        """Whether the last period used no gap from before the loop, which would end, and moved each line by the whole shift or not at
        all."""
        machine = self.machine
        for event in events:
            op, start, what = event[0], event[1], event[8]
            used = [machine.lines[op.engine]] if op.engine != DMA else [line for line, _ in machine.routes[id(what)][1]]
            if any(start < self.begin[id(line)][1] for line in used):
                return False
        lines = before[6]
        return all(line.free - lines[id(line)][2] in (0, delta) for line in (*machine.lines, *machine.lanes))

    def _agree(self, done: int, p: int, periods: int) -> int:
        """How many of the coming periods take the same path."""
        env = list(self.machine.env)
        for terms, stride, size, loops in self.node.guards:
            span = periods * p
            each = int(np.prod([n for _, n in loops], dtype=np.int64)) if loops else 1
            if each * p > LARGEST:
                return 0
            span = min(span, max(p, LARGEST // each))
            axes = 1 + len(loops)
            values = list(env)
            values[self.node.slot] = np.arange(done - p, done + span).reshape([-1] + [1] * len(loops))
            for i, (slot, n) in enumerate(loops):
                values[slot] = np.arange(n).reshape([-1 if k == i + 1 else 1 for k in range(axes)])
            out = np.broadcast_to(np.asarray(value(terms, values)), (span + p, *(n for _, n in loops)))
            if not size:
                out = out >= 0
            elif stride > 0:
                out = np.clip(-(out // stride), 0, size)
            else:
                out = np.clip(out // -stride + 1, 0, size)
            same = (out[p:] == out[:-p]).reshape(span, -1).all(axis=1)
            # every coming iteration must agree with the one a period before it
            wrong = np.flatnonzero(~same)
            periods = min(periods, (int(wrong[0]) if len(wrong) else span) // p)
            if periods <= 0:
                return 0
        return periods


def _counters(machine: Machine, node: Loop) -> tuple[Any, ...]:
    lo, hi = node.lo, node.hi
    masked = [dict(h) if h is not None else None for h in machine.masked[lo:hi]]
    return (machine.front, machine.count[lo:hi], machine.busy[lo:hi], machine.critical[lo:hi], machine.waited[lo:hi], masked,
            {id(line): (line.busy, line.count, line.free) for line in (*machine.lines, *machine.lanes)})


def _moving(machine: Machine, node: Loop, events: list[Any], p: int) -> tuple[list[Any], int]:
    """Accesses of the last period to tensors from outside of the loop: (cell, cells per period or the cells to come, event, written), and
    the number of periods in which none of them comes to the end of a tensor that it may overrun."""
    out, inside = [], 1 << 62
    slot = node.slot
    for event in events:
        op, used, made = event[0], event[6], event[7]
        for refs, cells, written in ((op.reads, used, False), ((*op.chained, *op.writes), made, True)):
            at = 0
            for ref in refs:
                many = 1 if ref.many is None else len(ref.many)
                if ref.family.level < node.level:
                    step = p * sum(k for s, k in ref.terms if s == slot)
                    odd = bool(ref.divs) or ref.table is not None
                    out += [(c, None if odd and not _same_cells(ref, slot, p) else step, event, written) for c in cells[at:at + many]]
                    if ref.ends is not None and step:
                        for c in cells[at:at + many]:
                            left = (ref.ends[1] - c) // step if step > 0 else (c - ref.ends[0]) // -step
                            inside = min(inside, left if ref.ends[0] < c < ref.ends[1] else 0)
                at += many
    return out, inside


def _same_cells(ref: Any, slot: int, p: int) -> bool:
    """Whether an access through a table or a division touches the same cells a period later, whatever the other indices are."""
    for _, inner, by in ref.divs:
        if any(s == slot and (k * p) % by for s, k in inner[1]) or inner[2]:
            return False
        if any(s == slot for s, _ in inner[1]):
            return False
    if ref.table is not None:
        step = p * sum(k for s, k in ref.block[1] if s == slot)
        if ref.block[2]:
            return False
        if step:
            table = ref.table
            return all(table[i] == table[i + step] for i in range(len(table) - step)) if step > 0 else False
    return True


def _ready(machine: Machine, moving: list[Any], delta: int, periods: int) -> int:
    """How many periods the tensors from outside allow."""
    if any(step is None for _, step, _, _ in moving):
        return 0
    written: dict[int, tuple[int, int]] = {}  # base cell written in a period -> (step, visible)
    for cell, step, event, write in moving:
        if write and step:
            written[cell] = (step, event[5])
    limit = len(machine.seen)
    for cell, step, event, write in moving:
        if not step:
            continue
        op, start, ready = event[0], event[1], event[2]
        del start
        for j in range(1, periods + 1):
            c = cell + step * j
            if not 0 <= c < limit:
                periods = min(periods, j - 1)
                break
            if write:
                when = max(machine.read[c] + machine.hop, machine.same[c] if machine.writer[c] == op.engine else machine.seen[c])
            else:
                when = machine.same[c] if machine.writer[c] == op.engine else machine.seen[c]
                if _by_loop(written, c, delta):
                    continue
            if when > ready + delta * j:
                periods = min(periods, j - 1)
                break
            if not write and _binding(machine, cell, op, ready) and when != ready + delta * j:
                periods = min(periods, j - 1)
                break
    return periods


def _by_loop(written: dict[int, tuple[int, int]], cell: int, delta: int) -> bool:
    """Whether the loop itself writes a cell on its way."""
    return len(written) < 64 and any(step and (cell - base) % step == 0 and (cell - base) // step > 0
                                     for base, (step, _) in written.items())


def _binding(machine: Machine, cell: int, op: Any, ready: int) -> bool:
    when = machine.same[cell] if machine.writer[cell] == op.engine else machine.seen[cell]
    return when == ready and ready > 0


def _apply(machine: Machine, node: Loop, before: Any, events: list[Any], moving: list[Any], delta: int, periods: int,
           advance: int, begin: dict[int, tuple[int, int]]) -> None:
    shift = delta * periods
    lo, hi = node.lo, node.hi
    ops = machine.program.ops[lo:hi]
    engines = {op.engine for op in ops}
    _, count, busy, critical, waited, masked, lines, _ = before
    # the times of the last period's accesses from outside, repeated
    for cell, step, event, written in moving:
        op, _, _, finish, visible, shown, _, _, _ = event
        for j in (range(1, periods + 1) if step else (periods,)):
            c, by = cell + (step or 0) * j, delta * j
            if not 0 <= c < len(machine.seen):
                continue
            if written:
                machine.seen[c], machine.same[c], machine.writer[c] = shown + by, visible + by, op.engine
            elif finish + by > machine.read[c]:
                machine.read[c], machine.reader[c] = finish + by, op.engine
    for family in node.inner:
        for cells in (machine.seen, machine.same, machine.read):
            part = slice(family.base, family.base + family.cells)
            cells[part] = [t + shift for t in cells[part]]
    for ring in node.rings:
        for i in range(len(ring.times)):
            ring.times[i] += shift
    used = [machine.lines[engine] for engine in engines]
    if DMA in engines:
        used += [machine.lines[SYNC], *dict.fromkeys(machine.group)]
    for line in used:
        then_busy, then_count, then_free = lines[id(line)]
        line.busy += (line.busy - then_busy) * periods
        line.repeat(delta, periods, begin[id(line)][0], line.count - then_count, line.free - then_free)
    for bit in machine.last_use:
        for engine in engines:
            if engine < len(bit):
                bit[engine] = (bit[engine][0] + shift, bit[engine][1] + shift)
    if machine.held is not None:
        half = len(machine.held) // 2
        machine.held = (*machine.held[:half], *(t + shift for t in machine.held[half:]))
    machine.front += advance * periods
    for now, then in ((machine.count, count), (machine.busy, busy), (machine.critical, critical), (machine.waited, waited)):
        for i in range(lo, hi):
            now[i] += (now[i] - then[i - lo]) * periods
    for hits, old in zip(machine.masked[lo:hi], masked, strict=True):
        if hits is not None and old is not None:
            for key, n in hits.items():
                hits[key] = n + (n - old.get(key, 0)) * periods
    if not advance:  # something else was ahead; by now the loop may have passed it
        last = max(events, key=lambda e: e[4])
        reached = last[4] + shift
        if reached > machine.front:
            machine.critical[last[0].index] += reached - machine.front
            machine.front = reached
    machine.skipped += periods
