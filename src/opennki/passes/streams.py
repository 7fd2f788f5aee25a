"""Engine assignment and instruction streams: each engine and DMA queue gets its own part of a kernel, ordered by semaphores.

Every instruction runs on its engine; DMA instructions are dealt to the queues in turn. Orderings between streams are those of the
accesses that may meet in memory (read after write, write after read, write after write), on placed memory, so that tensors which take
turns in the same bytes are ordered too. Two statements are ordered where they part: in the body of the innermost loop or branch around
both, one waits before it begins until the other has signalled its end, of this iteration or of an earlier one.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from opennki.errors import NkiError
from opennki.ir.nodes import Alloc, DoWhile, For, If, Instr, Kernel, Stmt, statements, whole
from opennki.ir.verify import accesses
from opennki.isa.declare import ISA
from opennki.passes.hazards import Entry, Space, entry, whole_tile
from opennki.passes.initialised import unproven
from opennki.passes.memory_map import MemoryMap
from opennki.passes.program import (
    Branch,
    Clear,
    Count,
    Issue,
    Loop,
    Node,
    Repeat,
    Semaphore,
    Signal,
    Stream,
    Streams,
    Test,
    Wait,
)
from opennki.passes.reduce import Child, Edge, Need, Reduction, reduced
from opennki.passes.sweep import swept

__all__ = ["Streams", "streams"]

ENGINES = ("tensor", "vector", "scalar", "gpsimd", "sync")
PAIRWISE = 1500  # accesses below a body up to which they are compared pair by pair


def streams(kernel: Kernel, memory: MemoryMap) -> Streams:
    """The instruction streams of one program instance of a kernel.

    memory: its placements, from `passes.allocate.allocate(kernel)`. Where that has rewritten the kernel, the streams are those of
    `memory.kernel`. Raises NkiError for a map of another kernel.
    """
    return _Build(memory.kernel, memory).run(kernel.name)


@dataclass(slots=True)
class _Part:
    """What is known of a statement: the streams in it, its accesses, and the knowledge at its end (see `passes.reduce.Child`)."""

    streams: dict[str, None] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    knows: dict[tuple[str, str], int] = field(default_factory=dict)


@dataclass(slots=True)
class _Body:
    """A statement list: its children, and its orderings."""

    children: list[Stmt | Clear | Test]
    parts: list[_Part]
    edges: list[Edge] = field(default_factory=list)
    owner: int = -1
    number: Count = field(default_factory=lambda: Count(0))
    semaphores: dict[tuple[str, str], tuple[int, list[int]]] = field(default_factory=dict)
    found: dict[Need, int] = field(default_factory=dict)
    trips: int | None = 1
    grown: bool = False

    def units(self) -> list[Child]:
        """The children as the reduction sees them."""
        return [Child(tuple(p.streams), p.knows) for p in self.parts]

    def add(self, need: Need, distance: int) -> None:
        """Add an ordering that turned out to be needed."""
        self.found[need] = min(distance, self.found.get(need, distance))
        self.grown = True

    def settle(self) -> None:
        """Leave out what follows from orderings that were added later."""
        if self.grown:
            self.edges = reduced(self.units(), self.found, self.trips).edges


@dataclass(slots=True)
class _Later:
    """An ordering of a body that is only needed as an outer loop goes on, `outer` iterations of it."""

    body: _Body
    a: Entry
    b: Entry
    need: Need
    distance: int
    outer: int


def need_of(a: Entry, b: Entry) -> Need:
    """The ordering from one access to another."""
    return Need(a.child, a.stream, b.child, b.stream, a.sources, b.sinks)


def _widen(entries: list[Entry], found: Reduction) -> None:
    """Bring the sources and sinks of accesses from the statements of a body to the body as a whole."""
    for e in entries:
        sources = frozenset().union(*(found.done.get((e.child, s), ()) for s in e.sources))
        sinks = frozenset().union(*(found.begun.get((e.child, s), ()) for s in e.sinks))
        e.sources, e.sinks = e.sources | sources, e.sinks | sinks


class _Build:
    def __init__(self, kernel: Kernel, memory: MemoryMap) -> None:
        self.kernel, self.memory = kernel, memory
        self.numbers = {id(s): n for n, s in enumerate(s for s in statements(kernel.body) if not isinstance(s, Alloc))}
        self.stream_of = _assign(kernel, memory)
        self.views = _views(kernel)
        self.first_use = self._first_uses()
        self.restarted = {a for a in unproven(kernel) if a.space == "psum"}
        self.barriers = any(ISA[s.op].suspends for s in statements(kernel.body) if isinstance(s, Instr))
        self.bodies: dict[int, _Body] = {}
        self.covered: set[tuple[int, int]] = set()
        self.later: dict[int, list[_Later]] = {}
        self.semaphores: list[Semaphore] = []

    def run(self, name: str) -> Streams:
        part = self._body(self.kernel.body, (), True, -1, Count(0), None)
        order = {s: n for n, s in enumerate(ENGINES)}
        names = sorted(part.streams, key=lambda s: (order.get(s, len(ENGINES)), len(s), s))
        self._declare(self.kernel.body)
        made = tuple(Stream(s, "dma" if s not in order else s, tuple(self._nodes(self.kernel.body, s))) for s in names)
        return Streams(name, self.kernel.target, made, tuple(self.semaphores))

    def _first_uses(self) -> dict[Alloc, str]:
        out: dict[Alloc, str] = {}
        for stmt in statements(self.kernel.body):
            if isinstance(stmt, Instr):
                for access, _, _ in accesses(stmt):
                    if access.alloc.on_chip and access.alloc not in self.memory.placements:
                        raise NkiError(f"the memory map has no place for {access.alloc.name or access.alloc!r}", loc=access.alloc.loc,
                                       rule="streams(kernel, memory) takes the map that allocate(kernel) returns")
                    out.setdefault(access.alloc, self.stream_of[id(stmt)])
        return out

    # ---- analysis, inner bodies first --------------------------------------------------------------------------------------------
    def _body(self, body: list[Stmt], loops: tuple[For, ...], exact: bool, owner: int, number: Count, trips: int | None,
              test: DoWhile | None = None) -> _Part:
        children: list[Stmt | Clear | Test] = []
        parts: list[_Part] = []
        fresh: list[Alloc] = []
        for stmt in body:
            if isinstance(stmt, Alloc):
                fresh += [stmt] if stmt in self.restarted and stmt in self.first_use else []
                continue
            if isinstance(stmt, For) and not stmt.trips:
                continue
            if fresh:  # made anew where it is first used: before that, its place may be another tensor's
                used = {a.alloc for s in statements([stmt]) if isinstance(s, Instr) for a, _, _ in accesses(s)}
                for alloc in [a for a in fresh if a in used]:
                    stream = self.first_use[alloc]
                    children.append(Clear(alloc.id))
                    parts.append(_Part({stream: None}, [whole_tile(alloc, stream, self.memory)]))
                    fresh.remove(alloc)
            children.append(stmt)
            parts.append(self._part(stmt, loops, exact, number))
        if test is not None and test.cond is not None:
            streams = {s: None for p in parts for s in p.streams}
            children.append(Test(self.numbers[id(test)]))
            parts.append(_Part(streams, [entry(test.cond, False, s, self.memory, self.views, False) for s in streams]))
        made = self.bodies[id(body)] = _Body(children, parts, owner=owner, number=number)
        out = _Part({s: None for p in parts for s in p.streams}, [e for p in parts for e in p.entries])
        if len(out.streams) > 1:
            made.found = self._edges(made, loops, exact)
            made.trips = trips
            later = [item for n, c in enumerate(children) if isinstance(c, For) for item in self.later.pop(id(c), ())]
            found = reduced(made.units(), made.found, trips, [(need_of(item.a, item.b), item.outer) for item in later])
            made.edges, out.knows = found.edges, found.knows
            # what only meets as this body goes on is ordered where the two part, unless it is ordered already
            for item, met in zip(later, found.follows, strict=True):
                if not met:
                    item.body.add(item.need, item.distance)
            _widen(out.entries, found)
        return out

    def _part(self, stmt: Stmt, loops: tuple[For, ...], exact: bool, number: Count) -> _Part:
        if isinstance(stmt, Instr):
            return self._instr(stmt)
        me = self.numbers[id(stmt)]
        if isinstance(stmt, For):
            terms = tuple((n, c * stmt.trips) for n, c in number.terms) + ((stmt.var.name, 1),)
            return self._body(stmt.body, (*loops, stmt), exact, me, Count(number.const * stmt.trips, terms), stmt.trips)
        if isinstance(stmt, DoWhile):
            return self._body(stmt.body, loops, False, me, Count(0, ((f"w{me}", 1),)), None, stmt)
        assert isinstance(stmt, If)
        sides = [self._body(b, loops, exact, me, number, 1) for b in (stmt.then, stmt.orelse)]
        for side, part in enumerate(sides):
            for e in part.entries:
                e.branch = side
        both = _Part({**sides[0].streams, **sides[1].streams}, sides[0].entries + sides[1].entries)
        both.knows = {k: min(v, sides[1].knows[k]) for k, v in sides[0].knows.items() if k in sides[1].knows}
        return both

    def _instr(self, instr: Instr) -> _Part:
        stream = self.stream_of[id(instr)]
        found = [entry(a, written, stream, self.memory, self.views, bool(instr.mask)) for a, _, written in accesses(instr)]
        if self.barriers:
            meets = ISA[instr.op].suspends
            if meets or any(not a.alloc.on_chip and a.alloc.space != "register" for a, _, _ in accesses(instr)):
                found.append(Entry(stream, meets, "meeting of programs"))
        return _Part({stream: None}, found)

    def _edges(self, body: _Body, loops: tuple[For, ...], exact: bool) -> dict[Need, int]:
        groups: dict[Any, list[Entry]] = {}
        total = 0
        for n, part in enumerate(body.parts):
            total += len(part.entries)
            for e in part.entries:
                e.child = n
                groups.setdefault(e.key, []).append(e)
        if total > PAIRWISE:
            singles = [isinstance(c, (Instr, Clear)) for c in body.children]
            return swept(groups, singles, body.owner >= 0)
        space = Space(loops, exact)
        edges: dict[Need, int] = {}
        branches = [isinstance(c, If) for c in body.children]
        for group in groups.values():
            for a, others in zip(group, space.candidates(group), strict=True):
                for number in others:
                    b = group[number]
                    if a.child == b.child and branches[a.child] and a.branch == b.branch:
                        continue
                    for x, y in ((a, b), (b, a)):
                        self._pair(x, y, space, body, edges)
        return edges

    def _pair(self, a: Entry, b: Entry, space: Space, body: _Body, edges: dict[Need, int]) -> None:
        least, repeats = 0 if a.child < b.child else 1, body.owner >= 0
        if (least and not repeats) or (id(a), id(b)) in self.covered:
            return
        if repeats:
            self.covered.add((id(a), id(b)))
        found = space.meeting(a, b, least)
        if found is None:
            return
        need = need_of(a, b)
        if found.level:
            loop = space.loops[-found.level]
            self.later.setdefault(id(loop), []).append(_Later(body, a, b, need, found.distance, found.outer))
        else:
            edges[need] = min(found.distance, edges.get(need, found.distance))

    # ---- streams --------------------------------------------------------------------------------------------------------------------
    def _declare(self, body: list[Stmt]) -> None:
        """Number the semaphores: one for each pair of streams in a body."""
        made = self.bodies[id(body)]
        made.settle()
        sources: dict[tuple[str, str], set[int]] = {}
        for a, p, _, q, _ in made.edges:
            sources.setdefault((p, q), set()).add(a)
        for pair, children in sorted(sources.items()):
            number = len(self.semaphores)
            self.semaphores.append(Semaphore(number, *pair, made.owner))
            made.semaphores[pair] = number, sorted(children)
        for child in made.children:
            for inner in _inner(child):
                self._declare(inner)

    def _nodes(self, body: list[Stmt], stream: str) -> Iterator[Node]:
        made = self.bodies[id(body)]
        waits: dict[int, list[Wait]] = {}
        for a, p, b, q, distance in made.edges:
            if q == stream:
                number, sources = made.semaphores[p, q]
                n = len(sources)
                const = n * (made.number.const - distance) + sources.index(a) + 1
                waits.setdefault(b, []).append(Wait(number, Count(const, tuple((v, n * c) for v, c in made.number.terms))))
        for n, (child, part) in enumerate(zip(made.children, made.parts, strict=True)):
            if stream not in part.streams:
                continue
            yield from sorted(waits.get(n, ()), key=lambda w: w.semaphore)
            yield from self._node(child, stream)
            for (p, _), (number, sources) in made.semaphores.items():
                if p == stream and n in sources:
                    yield Signal(number)

    def _node(self, child: Stmt | Clear | Test, stream: str) -> Iterator[Node]:
        if isinstance(child, (Clear, Test)):
            yield child
            return
        number = self.numbers[id(child)]
        if isinstance(child, Instr):
            yield Issue(number)
        elif isinstance(child, For):
            yield Loop(number, child.var.name, child.trips, tuple(self._nodes(child.body, stream)))
        elif isinstance(child, DoWhile):
            yield Repeat(number, f"w{number}", tuple(self._nodes(child.body, stream)))
        elif isinstance(child, If):
            # a side that is not taken signals what it would have: counts do not depend on the way taken
            then = (*self._nodes(child.then, stream), *self._missed(child.orelse, stream, 1))
            orelse = (*self._nodes(child.orelse, stream), *self._missed(child.then, stream, 1))
            yield Branch(number, then, orelse)

    def _missed(self, body: list[Stmt], stream: str, times: int) -> Iterator[Signal]:
        """The signals of a body that is not run. Those in do-while loops count the iterations of these alone."""
        made = self.bodies[id(body)]
        for (p, _), (number, sources) in made.semaphores.items():
            if p == stream:
                yield Signal(number, times * len(sources))
        for child in made.children:
            if isinstance(child, For):
                yield from self._missed(child.body, stream, times * child.trips)
            elif isinstance(child, If):
                # either side signals for both
                yield from self._missed(child.then, stream, times)
                yield from self._missed(child.orelse, stream, times)


def _inner(child: Any) -> list[list[Stmt]]:
    if isinstance(child, (For, DoWhile)):
        return [child.body]
    return [child.then, child.orelse] if isinstance(child, If) else []


def _assign(kernel: Kernel, memory: MemoryMap) -> dict[int, str]:
    """The stream of each instruction: its engine, or one of the DMA queues in turn."""
    out: dict[int, str] = {}
    queue = 0
    for stmt in statements(kernel.body):
        if isinstance(stmt, Instr):
            engine = stmt.engine or ISA[stmt.op].engines[0]
            if engine == "dma":
                engine = f"dma{queue % memory.target.dma_queues}"
                queue += 1
            out[id(stmt)] = engine
    return out


def _views(kernel: Kernel) -> dict[Alloc, Any]:
    """For each HBM tensor, the shape as which all accesses index it; None where they differ in it, or in the size of an element."""
    out: dict[Alloc, Any] = {}
    for stmt in statements(kernel.body):
        if isinstance(stmt, Instr):
            for access, _, _ in accesses(stmt):
                alloc = access.alloc
                if not alloc.on_chip and alloc.space != "register":
                    shape = access.view_shape if whole(alloc).dtype == access.dtype else None
                    out[alloc] = shape if out.setdefault(alloc, shape) == shape else None
    return out
