"""Runs instruction streams as concurrent queues, and finds what their semaphores do not order.

Each stream goes on whenever its next node may: which one is next is drawn from a seed, in several manners that favour or starve streams.
The instructions work on placed memory. Every stream has a vector clock that signals and waits pass on; for each place of memory, who last
wrote and read it, and when, is kept. A touch that the clock does not order after an earlier one is a race, whatever order this run took:
an error with both lines. Streams that all wait are a deadlock, an error with the place of each.
"""
from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from opennki.errors import Loc, NkiError, NkiValueError
from opennki.interpret.machine import fresh
from opennki.interpret.placed import PlacedLayout
from opennki.interpret.simulate import dtypes_public, to_memory
from opennki.interpret.steps import Plan, compile_step
from opennki.interpret.touching import Memory, Touch, touches_of
from opennki.interpret.views import View, compile_affine, value_of
from opennki.ir.affine import Affine, Range, Var, narrowed
from opennki.ir.nodes import Access, Alloc, Dim, DoWhile, For, If, Instr, Kernel, Stmt
from opennki.isa.declare import ISA
from opennki.passes.memory_map import MemoryMap
from opennki.passes.program import Branch, Clear, Issue, Loop, Node, Repeat, Signal, Stream, Streams, Test, Wait, numbered

Array = np.ndarray

# Nodes that a stream may run in a row while others are ready. Without an end to it, a do-while loop whose condition is wrong for want of
# a semaphore would keep the other streams from ever showing the race.
PATIENCE = 2000


def run_streams(kernel: Kernel, memory: MemoryMap, streams: Streams, arrays: list[Array], *, order: int = 0, seed: int = 0) -> list[Array]:
    """Run a kernel's streams on arrays, stream against stream; returns the outputs.

    `order` seeds the order in which streams go on, `seed` is that of random numbers. Programs of a grid run one after the other. Raises
    NkiError for a race (with both lines) and for a deadlock (with the line of each stream that waits), NkiValueError for streams of
    another kernel and for kernels whose programs wait for each other.
    """
    return _Queues(memory, streams, order, seed).run(kernel, arrays)


class Lane:
    """The state of one stream: what the steps of the interpreter expect of a machine."""

    def __init__(self, stream: Stream, number: int, buffers: list[Any], size: int, clocks: int) -> None:
        self.stream, self.number, self.buffers = stream, number, buffers
        self.env = [0] * size
        self.names: dict[str, int] = {}
        self.again: dict[int, bool] = {}  # what the test of each do-while loop has found last
        self.shadows: list[Any] = [None] * len(buffers)
        self.views: list[Any] = []
        self.inside: Any = None
        self.seed, self.out = 0, None
        self.origins: dict[int, Any] = {}
        self.report = _raise
        self.clock = np.zeros(clocks, np.int64)
        self.blocked: Wait | None = None
        self.place: Loc | None = None

    def check_defined(self, view: View) -> None:
        """Streams are run for their order: what is defined is checked by simulation."""

    def print(self, plan: Plan, values: dict[str, Any], lo: tuple[int, ...], hi: tuple[int, ...]) -> None:
        """device_print says nothing here."""


def _raise(kind: str, error: NkiError) -> None:
    raise error


class _Queues:
    def __init__(self, memory: MemoryMap, streams: Streams, order: int, seed: int) -> None:
        self.memory, self.streams, self.seed = memory, streams, seed
        self.kernel = memory.kernel
        self.random = random.Random(order)
        self.failed: Exception | None = None
        self.layout = PlacedLayout(memory)
        self.steps: dict[int, tuple[Any, list[Touch], Loc | None]] = {}
        self.tests: dict[int, tuple[View, Touch, Loc | None]] = {}
        self.preds: dict[int, Any] = {}
        self.clears: dict[int, list[tuple[View, Touch]]] = {}
        self.vars: dict[int, Var] = {}
        self.counters: dict[int, int] = {}
        self.numbers = {id(s): n for n, s in numbered(self.kernel).items()}
        for v in self.kernel.grid:
            self.layout.var(v)
        for a in (*self.kernel.params, *self.kernel.constant_allocs):
            self.layout.alloc(a)
        self._plan(self.kernel.body, {v: (v.lo, v.hi) for v in self.kernel.grid}, [self.layout.var(v) for v in self.kernel.grid])
        self.outputs = [View(o, self.layout, {}, "output", o.alloc.loc) for o in self.kernel.outputs]
        self._match()

    # ---- planning: what each number stands for --------------------------------------------------------------------------------------
    def _plan(self, body: list[Stmt], ranges: dict[Var, Range], loops: list[int]) -> None:
        for stmt in body:
            if isinstance(stmt, Alloc):
                if stmt.on_chip and stmt in self.memory.placements:
                    self._clear(stmt)
                elif not stmt.on_chip:
                    self.layout.alloc(stmt)
                continue
            number = self.numbers[id(stmt)]
            if isinstance(stmt, Instr):
                if ISA[stmt.op].suspends:
                    raise NkiValueError(f"{stmt.op} waits for other programs", loc=self.kernel.loc(stmt.loc),
                                        rule="streams are run for one program at a time",
                                        fix="run the kernel with nki.simulate_kernel")
                loc = self.kernel.loc(stmt.loc)
                plan = Plan(stmt, self.layout, ranges, loc, set(), loops, self.seed)
                self.steps[number] = compile_step(plan), touches_of(plan), loc
            elif isinstance(stmt, For):
                if not stmt.trips:
                    continue  # streams leave it out
                self.vars[number] = stmt.var
                self._plan(stmt.body, {**ranges, stmt.var: (0, stmt.trips - 1)}, [*loops, self.layout.var(stmt.var)])
            elif isinstance(stmt, If):
                self.preds[number] = compile_affine(stmt.pred.expr, self.layout)
                self._plan(stmt.then, narrowed(ranges, stmt.pred) or ranges, loops)
                self._plan(stmt.orelse, narrowed(ranges, stmt.pred.negated()) or ranges, loops)
            else:
                self._repeat(stmt, number, ranges, loops)

    def _repeat(self, stmt: DoWhile, number: int, ranges: dict[Var, Range], loops: list[int]) -> None:
        slot = self.counters[number] = self.layout.var(Var(f"while{number}", 0, 1 << 31))
        self._plan(stmt.body, ranges, [*loops, slot])
        assert stmt.cond is not None
        loc = self.kernel.loc(stmt.loc)
        view = View(stmt.cond, self.layout, ranges, "while condition", loc)
        self.tests[number] = view, Touch(view, False), loc

    def _clear(self, alloc: Alloc) -> None:
        place = self.memory.placements[alloc]
        inner = alloc.shape[alloc.pdim:]
        rank = len(inner)
        out = []
        for index in product(*(range(n) for n in alloc.shape[:alloc.pdim])) if place.blocks else ():
            dims = [Dim(Affine(i), (0,) * rank) for i in index]
            dims += [Dim(Affine(), tuple(int(k == j) for j in range(rank))) for k in range(rank)]
            view = View(Access(alloc, alloc.dtype, tuple(dims), inner), self.layout, {}, "new tensor", alloc.loc)
            out.append((view, Touch(view, True)))
        self.clears[alloc.id] = out

    def _match(self) -> None:
        """Every instruction is in just one stream, and the streams name nothing else."""
        issued = [n.number for s in self.streams.streams for n in s.nodes() if isinstance(n, Issue)]
        wrong = sorted(set(issued) ^ set(self.steps)) or sorted({n for n in issued if issued.count(n) > 1} if len(issued) < 2000 else ())
        known: dict[type, Any] = {Loop: self.vars, Branch: self.preds, Repeat: self.counters, Test: self.tests}
        for stream in self.streams.streams:
            for node in stream.nodes():
                if isinstance(node, Clear):
                    wrong += [node.tensor] if node.tensor not in self.clears else []
                elif isinstance(node, (Loop, Branch, Repeat, Test)) and node.number not in known[type(node)]:
                    wrong.append(node.number)
        if wrong or len(issued) != len(self.steps):
            raise NkiValueError(f"the streams are not those of this kernel: number {wrong[0] if wrong else len(issued)} does not fit",
                                rule="every instruction of the kernel is issued by one stream")

    # ---- running ---------------------------------------------------------------------------------------------------------------------
    def run(self, kernel: Kernel, arrays: list[Array]) -> list[Array]:
        slots = self.layout.allocs
        buffers: list[Any] = [None] * len(slots)
        for alloc, slot in slots.items():
            if alloc.id >= 0:
                buffers[slot] = fresh(alloc)
        for old, alloc, array in zip(kernel.params, self.kernel.params, arrays, strict=True):
            buffers[slots[alloc]] = to_memory(array, old.dtype, True)
        for alloc in self.kernel.constant_allocs:
            buffers[slots[alloc]] = to_memory(self.kernel.constants[alloc.id], alloc.dtype, True)
        for program in product(*(range(v.hi + 1) for v in self.kernel.grid)):
            for slot, data in self.layout.room().items():
                buffers[slot] = data
            for alloc, slot in slots.items():
                if alloc.kind == "register" or alloc.space == "private_hbm":  # a program's own
                    buffers[slot] = fresh(alloc)
            lanes = self._program(buffers, program)
        out = []
        for access, view in zip(kernel.outputs, self.outputs, strict=True):
            out.append(dtypes_public(np.array(view.get(lanes[0])).reshape(access.shape), access.dtype))
        return out

    def _program(self, buffers: list[Any], program: tuple[int, ...]) -> list[Lane]:
        count = len(self.streams.streams)
        lanes = [Lane(s, n, buffers, max(1, len(self.layout.vars)), count) for n, s in enumerate(self.streams.streams)]
        lanes = lanes or [Lane(Stream("none", "sync", ()), 0, buffers, max(1, len(self.layout.vars)), 1)]
        for lane in lanes:
            lane.views, lane.seed = [None] * self.layout.views, self.seed
            for v, value in zip(self.kernel.grid, program, strict=True):
                lane.env[self.layout.var(v)] = value
        self.touched = Memory(buffers, [t for _, ts, _ in self.steps.values() for t in ts], count)
        self.signals: dict[int, tuple[list[int], list[Array]]] = {s.number: ([], []) for s in self.streams.semaphores}
        running = {lane.number: self._go(lane, lane.stream.body) for lane in lanes}
        manner = self.random.randrange(3)
        rank = [self.random.random() for _ in lanes]
        last, turns = -1, 0
        while running:
            ready = [n for n in running if self._ready(lanes[n])]
            if not ready:
                raise self._deadlock([lanes[n] for n in running])
            if manner == 0:
                pick = self.random.choice(ready)
            elif manner == 1:  # one stream as far as it gets
                pick = last if last in ready else self.random.choice(ready)
            else:  # streams that are always first, and others that starve
                pick = min(ready, key=rank.__getitem__)
            turns = turns + 1 if pick == last else 0
            if turns >= PATIENCE and len(ready) > 1:
                pick = self.random.choice([n for n in ready if n != pick])
            last = pick
            try:
                next(running[pick])
            except StopIteration:
                del running[pick]
        if self.failed is not None:
            raise self.failed
        return lanes

    def _ready(self, lane: Lane) -> bool:
        wait = lane.blocked
        if wait is None:
            return True
        counts, _ = self.signals[wait.semaphore]
        return wait.count.value(lane.names) <= (counts[-1] if counts else 0)

    def _go(self, lane: Lane, body: tuple[Node, ...]) -> Iterator[None]:
        """Run nodes; stops after each, and before a wait."""
        for node in body:
            if isinstance(node, Issue):
                step, touches, loc = self.steps[node.number]
                self._touch(lane, touches, loc)
                try:
                    step(lane)
                except (IndexError, ValueError, NkiError) as error:
                    # wrong values may come of a race that only shows later
                    self.failed = self.failed or error
                yield
            elif isinstance(node, Wait):
                lane.blocked = node
                yield
                lane.blocked = None
                self._acquire(lane, node)
            elif isinstance(node, Signal):
                counts, clocks = self.signals[node.semaphore]
                counts.append((counts[-1] if counts else 0) + node.amount)
                clocks.append(lane.clock.copy())
                yield
            elif isinstance(node, Clear):
                for view, touch in self.clears[node.tensor]:
                    self._touch(lane, [touch], view.loc)
                    view.get(lane)[...] = 0
                yield
            elif isinstance(node, Loop):
                slot = self.layout.var(self.vars[node.number])
                for i in range(node.trips):
                    lane.env[slot] = lane.names[node.index] = i
                    yield from self._go(lane, node.body)
            elif isinstance(node, Branch):
                yield from self._go(lane, node.then if value_of(self.preds[node.number], lane.env) >= 0 else node.orelse)
            elif isinstance(node, Repeat):
                yield from self._repeated(lane, node)
            elif isinstance(node, Test):
                view, touch, loc = self.tests[node.number]
                self._touch(lane, [touch], loc)
                lane.again[node.number] = bool(view.get(lane).any())
                yield

    def _repeated(self, lane: Lane, node: Repeat) -> Iterator[None]:
        slot = self.counters[node.number]
        lane.env[slot] = 0
        again = True
        while again:
            lane.names[node.index] = lane.names.get(node.index, -1) + 1
            yield from self._go(lane, node.body)
            lane.env[slot] += 1
            again = lane.again[node.number]

    def _acquire(self, lane: Lane, wait: Wait) -> None:
        count = wait.count.value(lane.names)
        if count > 0:
            counts, clocks = self.signals[wait.semaphore]
            np.maximum(lane.clock, clocks[bisect_left(counts, count)], out=lane.clock)

    def _touch(self, lane: Lane, touches: list[Touch], loc: Loc | None) -> None:
        lane.clock[lane.number] += 1
        lane.place = loc
        for touch in touches:
            other = self.touched.touch(lane, touch, loc)
            if other is not None:
                raise self._race(lane, touch, loc, other)

    # ---- errors -----------------------------------------------------------------------------------------------------------------------
    def _race(self, lane: Lane, touch: Touch, loc: Loc | None, other: tuple[int, Any, Loc | None, bool]) -> NkiError:
        number, theirs, their_loc, wrote = other
        mine, name = touch.view.alloc, self.streams.streams[number].name
        verb = "writes" if touch.writes else "reads"
        return NkiError(
            f"a race: stream {lane.stream.name} {verb} {mine.name or mine!r} at {loc} while nothing orders it after stream {name}, which "
            f"{'writes' if wrote else 'reads'} {theirs.name or repr(theirs)} in the same bytes at {their_loc}", loc=loc,
            operand=" | ".join(_line(x) for x in (loc, their_loc) if x is not None and x.source()),
            rule="accesses of the same bytes are ordered by semaphores", why="engines and DMA queues run at the same time")

    def _deadlock(self, lanes: list[Lane]) -> NkiError:
        def describe(lane: Lane) -> str:
            assert lane.blocked is not None
            s = lane.blocked.semaphore
            counts, _ = self.signals[s]
            producer = next(x.producer for x in self.streams.semaphores if x.number == s)
            return (f"stream {lane.stream.name}, after {lane.place}, waits until s{s} of {producer} is "
                    f"{lane.blocked.count.value(lane.names)}, it is {counts[-1] if counts else 0}")
        return NkiError("a deadlock: " + "; ".join(map(describe, lanes[:8])), loc=lanes[0].place,
                        rule="every wait is met by signals of another stream")


def _line(loc: Loc | None) -> str:
    return "" if loc is None else f"{loc}: {loc.source()}"

