"""Which orderings need a semaphore: those that do not follow from others.

The streams of a body run their own statements in order. Iterations are simulated one after the other with a clock for each stream (how
far it knows each other stream to be); an ordering is kept when the clocks do not imply it. Nearer orderings, and among them those of later
statements, come first, so that what is kept is the transitive reduction.

Statements with statements inside order their streams themselves: what a stream does inside may have been preceded by a wait for another
stream's part of the same statement, and may be known to others before the statement is complete. An ordering says which streams those are
(`sources`, `sinks`), so that one inside a loop does not get a second semaphore outside of it.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# (child, stream) must be complete `distance` iterations before (child, stream) begins
Edge = tuple[int, str, int, str, int]
Clock = dict[str, int]
Names = frozenset[str]
ENTERED, COMPLETE = 1, 2


@dataclass(frozen=True, slots=True)
class Need:
    """An ordering from an access in (child a, stream p) to one in (child b, stream q). `sources`: streams of which it is known, once they
    have completed child a, that the first access is done. `sinks`: streams that have begun child b before the second access."""

    a: int
    p: str
    b: int
    q: str
    sources: Names
    sinks: Names


@dataclass(slots=True)
class Child:
    """A statement of a body: the streams that have a part in it, and, for one with statements inside, what each of them knows at its end
    of the parts of others: that they have begun, or are complete."""

    streams: tuple[str, ...]
    knows: Mapping[tuple[str, str], int] = field(default_factory=dict)


@dataclass(slots=True)
class Reduction:
    """The orderings that are kept, and what the streams know of each other through them.

    `knows`: at the end of the body (see `Child`). `follows`: for each need that was asked about, whether it is met. `begun[child, q]`: the
    streams that have begun the body when q begins a child. `done[child, p]`: the streams that know at the end of the body that p has
    completed its last run of a child.
    """

    edges: list[Edge] = field(default_factory=list)
    knows: dict[tuple[str, str], int] = field(default_factory=dict)
    follows: list[bool] = field(default_factory=list)
    begun: dict[tuple[int, str], Names] = field(default_factory=dict)
    done: dict[tuple[int, str], Names] = field(default_factory=dict)


def reduced(children: Sequence[Child], needs: Mapping[Need, int], trips: int | None, asked: Sequence[tuple[Need, int]] = ()) -> Reduction:
    """Keep what is needed of the orderings of a body, given by their least distance in iterations.

    trips: iterations of the body, None where only the first is certain. `asked`: orderings to look at without keeping them.
    """
    out = Reduction(follows=[False] * len(asked))
    by_consumer: dict[tuple[int, str], list[tuple[Need, int]]] = {}
    for need, d in needs.items():
        by_consumer.setdefault((need.b, need.q), []).append((need, d))
    for wanted in by_consumer.values():
        wanted.sort(key=lambda n: (-n[0].a, n[0].p, sorted(n[0].sources), sorted(n[0].sinks)))
    farthest = max([*needs.values(), *(d for _, d in asked)], default=0)
    chosen: dict[tuple[int, str], list[tuple[int, str, int]]] = {}
    simulation = _Simulation(children, farthest)
    certain = 1 if trips is None else min(trips, farthest + 1)
    for m in range(farthest + 1):
        for j, child in enumerate(children):
            for q in child.streams:
                for a, p, d in chosen.get((j, q), ()):
                    if d <= m:
                        simulation.wait(q, a, p, m - d)
            for q in child.streams:
                mine = chosen.setdefault((j, q), [])
                for need, d in by_consumer.get((j, q), ()):
                    if d == m and not simulation.met(need, 0):
                        mine.append((need.a, need.p, d))
                        out.edges.append((need.a, need.p, j, q, d))
                        simulation.wait(q, need.a, need.p, 0)
            for n, (need, d) in enumerate(asked):
                if need.b == j and d == m:
                    out.follows[n] = simulation.met(need, 0)
            if m == 0:
                for q in child.streams:
                    out.begun[j, q] = simulation.begun(q)
            simulation.run(j, m)
        if m + 1 == certain:
            out.knows = simulation.summary(m)
            for j, child in enumerate(children):
                for p in child.streams:
                    out.done[j, p] = simulation.knowing(p, j, m)
    return out


class _Simulation:
    """Clocks of the streams; positions are those of the body's statements, iteration after iteration, from 1 on."""

    def __init__(self, children: Sequence[Child], farthest: int) -> None:
        self.children, self.width, self.keep = children, len(children) + 1, farthest
        self.clocks: dict[str, Clock] = {s: {} for c in children for s in c.streams}
        self.after: dict[tuple[int, int, str], Clock] = {}
        self.last = {s: j for j, c in enumerate(children) for s in c.streams}

    def place(self, child: int, iteration: int) -> int:
        return iteration * self.width + child + 1

    def met(self, need: Need, iteration: int) -> bool:
        """Whether the access of child a in an iteration is done before that of child b, whose streams are about to begin."""
        at = self.place(need.a, iteration)
        return any(self.clocks[r].get(s, 0) >= at for r in need.sinks for s in need.sources)

    def wait(self, q: str, child: int, p: str, iteration: int) -> None:
        _join(self.clocks[q], self.after[iteration, child, p])

    def run(self, j: int, iteration: int) -> None:
        child = self.children[j]
        before = {p: dict(self.clocks[p]) for p in child.streams} if child.knows else {}
        for p in child.streams:
            self.clocks[p][p] = self.place(j, iteration)
        if child.knows:
            complete = {p: dict(self.clocks[p]) for p in child.streams}
            for (p, q), how in child.knows.items():
                _join(self.clocks[p], complete[q] if how == COMPLETE else before[q])
        for p in child.streams:
            self.after[iteration, j, p] = dict(self.clocks[p])
            if iteration > self.keep:
                self.after.pop((iteration - self.keep - 1, j, p), None)

    def begun(self, q: str) -> Names:
        return frozenset(s for s, at in self.clocks[q].items() if at)

    def knowing(self, p: str, child: int, iteration: int) -> Names:
        at = self.place(child, iteration)
        return frozenset(q for q, clock in self.clocks.items() if clock.get(p, 0) >= at)

    def summary(self, iteration: int) -> dict[tuple[str, str], int]:
        out = {}
        for p, clock in self.clocks.items():
            for q, at in clock.items():
                if p != q and at:
                    out[p, q] = COMPLETE if at >= self.place(self.last[q], iteration) else ENTERED
        return out


def _join(clock: Clock, other: Clock) -> None:
    for stream, at in other.items():
        if clock.get(stream, 0) < at:
            clock[stream] = at
