"""The machine: a tape of steps with loops and branches as jumps, and program instances as resumable states.

An `Instance` is one program of the grid: its position on the tape, the values of its loop indices, and its memory. A step that has to
wait for other programs (`suspends` instructions) returns `Wait`; the scheduler runs the other programs and then completes it.
"""
from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np

from opennki.errors import NkiError
from opennki.interpret.steps import Plan, compile_step
from opennki.interpret.views import Layout, View, compile_affine, value_of
from opennki.ir.affine import Range, Var, narrowed
from opennki.ir.nodes import Access, Alloc, DoWhile, For, If, Instr, Kernel, Stmt, statements
from opennki.isa import dtypes
from opennki.isa.declare import ISA
from opennki.passes.initialised import partly_written, resized, unproven
from opennki.trace import independence

FREE_ABOVE = 256 << 20  # bytes of local tensors above which their memory is given back after the last use


class Wait:
    """A program waits at a step for others. `attributes`: those of the call; `contribution`: the operands that it brings, by name,
    and `dtypes` what they are in memory; `finish(value)` writes what the meeting gives it and ends the step."""

    __slots__ = ("attributes", "clock", "contribution", "dtypes", "finish", "instr", "loc")

    def __init__(self, instr: Instr, loc: Any, attributes: dict[str, Any], contribution: dict[str, np.ndarray], dtypes: dict[str, str],
                 finish: Callable[[Any], None]) -> None:
        self.instr, self.loc, self.attributes, self.finish = instr, loc, attributes, finish
        self.contribution, self.dtypes = contribution, dtypes
        self.clock: Any = None  # what the program knows (`interpret.races`)


class Instance:
    """One program of the grid. Its memory serves one program after the other: `begin` makes it ready for the next."""

    __slots__ = ("buffers", "clock", "done", "env", "inside", "known", "me", "origins", "out", "owners", "pc", "program", "progress",
                 "races", "report", "seed", "shadows", "tape", "used", "views")

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.env = [0] * max(1, len(tape.layout.vars))
        self.buffers: list[Any] = [None] * len(tape.layout.allocs)
        self.shadows: list[Any] = [None] * len(tape.layout.allocs)
        self.views: list[Any] = [None] * tape.layout.views
        for alloc, slot in tape.own:
            self.new_buffer(alloc, slot)
        self.used = False
        self.pc = 0
        self.done = False
        self.inside: Any = None
        self.program: tuple[int, ...] = ()
        self.seed = 0
        self.out: Any = None
        self.report: Callable[[str, NkiError], None] = _raise
        self.origins: dict[int, Any] = {}
        self.owners: dict[Any, Any] = {}
        self.races: Any = None  # where accesses of other programs are watched (`interpret.races`): the record,
        self.clock: Any = None  # what this program knows of the others of its rank,
        self.known: dict[int, Any] = {}  # and of those of other ranks
        self.me = 0
        self.progress: Callable[[int, int], None] | None = None

    def begin(self, program: tuple[int, ...], shared: list[tuple[int, Any, Any]], seed: int,
              report: Callable[[str, NkiError], None], out: Any, owners: dict[Any, Any], races: Any = None) -> None:
        """Make ready to run a program. `shared`: (slot, bytes, state of the elements or None) of the tensors outside of the program;
        `races`: what all programs of the rank share of `interpret.races`, or None."""
        tape = self.tape
        self.program, self.seed, self.report, self.out, self.owners = program, seed, report, out, owners
        for slot, value in zip(tape.program_slots, program, strict=True):
            self.env[slot] = value
        buffers, shadows = self.buffers, self.shadows
        for slot, data, state in shared:
            buffers[slot], shadows[slot] = data, state
        if self.used:
            # nothing of an earlier run is left where a program may read before it writes
            for alloc, slot in tape.renewed:
                blank(buffers[slot], alloc)
                if shadows[slot] is not None:
                    shadows[slot].fill(0)
            if self.origins:
                self.origins = {}
        self.used = True
        self.pc, self.done, self.inside = 0, False, None
        if races is not None:
            self.races, self.me, self.known = races, races.number(program), {}
            self.clock = races.clock(self.me)

    def end(self) -> None:
        """Let go of everything that belongs to a run."""
        buffers, shadows, views = self.buffers, self.shadows, self.views
        self.report, self.out, self.owners, self.progress = _raise, None, _NONE, None
        self.races = self.clock = None
        for slot in self.tape.released:
            buffers[slot] = shadows[slot] = None
        for key in self.tape.outer_views:
            if key < len(views):
                views[key] = None

    def new_buffer(self, alloc: Alloc, slot: int) -> None:
        """Memory of a tensor: registers start at zero, everything else with no value (NaN where there is one)."""
        # what is proven to be written first needs no fill
        self.buffers[slot] = fresh(alloc) if alloc in self.tape.unset or alloc.kind == "register" else room(alloc)
        self.shadows[slot] = np.zeros(alloc.size, np.uint8) if alloc in self.tape.tracked else None

    def owners_of(self, view: View, slot: int, var: Var) -> np.ndarray:
        """Which iteration of a loop of this program last wrote (row 0) and read (row 1) each element.

        Counted from 1; 0 for none, -1 for several readers.
        """
        key = (view.slot, slot, self.program)
        if key not in self.owners:
            self.owners[key] = np.zeros((2, max(1, view.alloc.size)), np.int32)
        return self.owners[key]  # type: ignore[no-any-return]

    def check_defined(self, view: View) -> None:
        """Raise when an index tile has elements that were never written."""
        if self.shadows[view.slot] is not None and (view.shadow(self) != 1).any():
            from opennki.interpret import shadow
            state = view.shadow(self)
            error = shadow.read_error(view, state, view.loc) if (state == 0).any() else shadow.masked_error(view, None, view.loc)
            self.report("read", error)

    def print(self, plan: Plan, values: dict[str, Any], lo: tuple[int, ...], hi: tuple[int, ...]) -> None:
        """device_print: the prefix and the values of a tile."""
        view = plan.inputs[0].view
        data = dtypes.to_float32(values["x"], view.access.dtype) if view.access.dtype.startswith(("bf", "float8")) else values["x"]
        print(f"{values.get('prefix', '')} {np.array2string(np.asarray(data), threshold=sys.maxsize if data.size <= 4096 else 1000)}",
              file=self.out or sys.stdout)

    def run(self) -> Wait | None:
        """Run until the end (None) or until a step waits for other programs."""
        steps, layout = self.tape.steps, self.tape.layout
        if len(self.views) < layout.views or len(self.env) < len(layout.vars):  # planned since this memory was made
            self.views += [None] * (layout.views - len(self.views))
            self.env += [0] * (len(layout.vars) - len(self.env))
        pc, end = self.pc, len(steps)
        while pc < end:
            result = steps[pc](self)
            if result is None:
                pc += 1
            elif result.__class__ is int:
                pc = result
            else:
                self.pc = pc + 1
                return result  # type: ignore[no-any-return]
        self.pc = pc
        self.done = True
        return None


_NONE: dict[Any, Any] = {}


def _raise(kind: str, error: NkiError) -> None:
    raise error


LINE = 64  # bytes of a line of the caches


def room(alloc: Alloc) -> np.ndarray:
    """Memory of a tensor, with any bytes in it. It starts with a line of the caches: native code works on whole lines, and takes twice
    as long where each of its vectors lies on two of them."""
    size = max(1, alloc.size) * dtypes.itemsize(alloc.dtype)
    data = np.empty(size + LINE, np.uint8)
    start = -data.__array_interface__["data"][0] % LINE
    return data[start : start + size]


def fresh(alloc: Alloc) -> np.ndarray:
    """Memory without a value (see `blank`)."""
    out = room(alloc)
    blank(out, alloc)
    return out


def blank(data: np.ndarray, alloc: Alloc) -> None:
    """Take the values out of memory: NaN bytes for floats, 0xA5 for integers; zero for registers, and for PSUM, where the first
    accumulation starts from zero."""
    if alloc.kind == "register" or alloc.space == "psum":
        data.fill(0)
    elif dtypes.is_float(alloc.dtype):
        data.view(dtypes.storage(alloc.dtype))[...] = np.nan
    else:
        data.fill(0xA5 if alloc.dtype != "bool" else 1)


class Tape:
    """The steps of a kernel, planned once and run by every program."""

    def __init__(self, kernel: Kernel, track: bool = True, seed: int = 0, races: bool = True, certain: bool = True,
                 partial: bool = False, lazy: bool = False, free_above: int = FREE_ABOVE) -> None:
        """`track`: keep shadow state; `partial`: count what is stored to outputs; `races`: record who touched each element where
        independence is not proven; `certain`: find the dependences that are known without running the kernel (`problems`); `lazy`: the
        steps are made when they are first needed, which native code does not; `free_above`: bytes of local tensors above which their memory
        is given back after the last use, which native code does not do."""
        self.kernel = kernel
        self.suspects: dict[Instr, tuple[Any, ...]] = {}
        found = independence.check(kernel) if races or certain else independence.Findings()
        self.problems = found.problems
        for suspect in found.suspects if races else ():
            self.suspects[suspect.instr] = (*self.suspects.get(suspect.instr, ()), suspect)
        self.watched = {s.var for group in self.suspects.values() for s in group}
        self.watches = races
        # tensors that programs may meet in, with the bytes of a place: the smallest dtype that one of them is seen as
        self.meeting: dict[Alloc, int] = {}
        for s in (s for group in self.suspects.values() for s in group if s.var.kind == "pid"):
            item = dtypes.itemsize(s.access.dtype)
            self.meeting[s.access.alloc] = min(item, self.meeting.get(s.access.alloc, item))
        self.layout = Layout()
        self._steps: list[Any] = []
        self.watch: set[Alloc] = set()  # for native code: where to look for reads of what was never written, by tiles
        # native code for statements that wait for nobody, where the whole does: `part(body, ranges)` gives a step, or None
        self.part: Callable[[list[Stmt], dict[Var, Range]], Callable[[Instance], None] | None] | None = None
        self._planned = False
        self._outer_views: tuple[int, tuple[int, ...]] = (-1, ())
        self._lock = threading.Lock()
        unset = unproven(kernel)
        self.unset_reads = unset
        self.unset = unset | {o.alloc for o in kernel.outputs}
        # returned tensors whose elements are counted at the end
        self.partial = partly_written(kernel) if partial else set()
        self.tracked: set[Alloc] = (unset - resized(kernel) if track else set()) | self.partial
        self.restarted = {a for a in unset if a.space == "psum"}
        self.seed = seed
        self.ranges: dict[Var, Range] = {v: (v.lo, v.hi) for v in kernel.grid}
        for v in kernel.grid:
            self.layout.var(v)
        local = [s for s in _allocs(kernel.body)]
        total = sum(a.size * dtypes.itemsize(a.dtype) for a in local if a.on_chip or a.space == "private_hbm")
        self.frees = total > free_above
        if self.frees:
            self.layout.moving = {self.layout.alloc(a) for a in local if a.space != "shared_hbm"}
        for a in (*kernel.params, *kernel.constant_allocs, *local):
            self.layout.alloc(a)
        self.loops: list[int] = [self.layout.var(v) for v in kernel.grid]
        self.program_slots = tuple(self.loops)
        self.counters: dict[DoWhile, int] = {}  # slots that count the rounds
        known = self.layout.allocs
        for stmt in statements(kernel.body):
            if isinstance(stmt, For):
                self.layout.var(stmt.var)
            elif isinstance(stmt, DoWhile):
                self.counters[stmt] = self.layout.var(Var(f"while{len(self.counters)}", 0, 1 << 31))
            elif isinstance(stmt, Instr):
                for value in (*stmt.results, *stmt.operands):
                    if value.__class__ is Access and value.alloc not in known:
                        self.layout.alloc(value.alloc)  # registers are not declared
        if not lazy:
            self._plan()
        self.outputs = [View(o, self.layout, {}, "output", o.alloc.loc) for o in kernel.outputs]
        self._memory(kernel)

    @property
    def steps(self) -> list[Any]:
        """The steps of the interpreter."""
        if not self._planned:
            self._plan()
        return self._steps

    def _plan(self) -> None:
        with self._lock:
            if not self._planned:
                self._body(self.kernel.body, self.ranges)
                self._planned = True

    @property
    def outer_views(self) -> tuple[int, ...]:
        """The cached views of tensors outside of a program, which a run leaves behind."""
        count, found = self._outer_views
        if count != self.layout.views:  # steps were planned since
            count = self.layout.views
            found = tuple([key for slot in self._outer for key in self.layout.fixed.get(slot, ())])
            self._outer_views = count, found
        return found

    def _memory(self, kernel: Kernel) -> None:
        """Which tensors belong to a program and which are outside of it, and what is to be done between two programs."""
        slots, moving = self.layout.allocs, self.layout.moving
        outer = {*kernel.params, *kernel.constant_allocs, *(a for a in slots if a.space == "shared_hbm")}
        self.own = [(a, slot) for a, slot in slots.items() if a not in outer and slot not in moving]
        self.renewed = [(a, slot) for a, slot in self.own if a in self.unset or a in self.tracked or a.kind == "register"]
        self.released = tuple([slots[a] for a in outer] + sorted(moving))
        self._outer = [slots[a] for a in outer]
        self.own_bytes = sum(a.size * dtypes.itemsize(a.dtype) for a, _ in self.own)
        # outputs and intermediate tensors in shared memory of which a part may be read or returned without having been written
        partly = partly_written(kernel)
        self.holes = {a for a in outer if a.kind == "local" and (a in self.unset_reads or a in partly)}
        called = [ISA[op] for op in {s.op for s in statements(kernel.body) if isinstance(s, Instr)}]
        self.suspends = any(decl.suspends for decl in called)
        self.multiplies = any(decl.family == "matmul" for decl in called)

    def _body(self, body: list[Stmt], ranges: dict[Var, Range]) -> None:
        if self.part is None:
            self._statements(body, ranges)
            return
        for waits, group in groupby(body, _waits):
            stmts = list(group)
            step = self.part(stmts, ranges) if not waits else None
            if step is not None:
                self._steps.append(step)
            else:
                self._statements(stmts, ranges)

    def _statements(self, body: list[Stmt], ranges: dict[Var, Range]) -> None:
        last = _last_uses(body, self) if self.frees else {}
        for position, stmt in enumerate(body):
            if isinstance(stmt, Alloc):
                self._alloc(stmt)
            elif isinstance(stmt, Instr):
                self._instr(stmt, ranges)
            elif isinstance(stmt, For):
                self._for(stmt, ranges)
            elif isinstance(stmt, If):
                self._if(stmt, ranges)
            else:
                self._do_while(stmt, ranges)
            for slot in last.get(position, ()):
                self._steps.append(_free(slot))

    def _alloc(self, alloc: Alloc) -> None:
        slot = self.layout.alloc(alloc)
        if slot in self.layout.moving:
            self._steps.append(_make(alloc, slot))
            return
        if alloc in self.tracked and alloc.space != "shared_hbm":
            self._steps.append(_forget(slot))
        if alloc in self.restarted:
            self._steps.append(_clear(slot))

    def _instr(self, instr: Instr, ranges: dict[Var, Range]) -> None:
        plan = Plan(instr, self.layout, ranges, self.kernel.loc(instr.loc), self.tracked, self.loops, self.seed,
                    self.suspects.get(instr, ()))
        if ISA[instr.op].suspends:
            from opennki.interpret.programs import waiting_step
            self._steps.append(waiting_step(plan))
        else:
            self._steps.append(compile_step(plan))

    def _for(self, loop: For, ranges: dict[Var, Range]) -> None:
        slot, trips = self.layout.var(loop.var), loop.trips

        if trips < 1:
            return
        if loop.var in self.watched:
            def begin(machine: Instance) -> None:
                machine.env[slot] = 0
                for key, table in machine.owners.items():
                    if key[1] == slot and key[2] == machine.program:
                        table.fill(0)
        else:
            def begin(machine: Instance) -> None:
                machine.env[slot] = 0
        self._steps.append(begin)
        start = len(self._steps)
        self.loops.append(slot)
        self._body(loop.body, {**ranges, loop.var: (0, trips - 1)})
        self.loops.pop()

        outermost = len(self.loops) == len(self.kernel.grid)

        def end(machine: Instance) -> int | None:
            value = machine.env[slot] + 1
            if outermost and machine.progress is not None:
                machine.progress(value, trips)
            if value < trips:
                machine.env[slot] = value
                return start
            return None
        self._steps.append(end)

    def _if(self, branch: If, ranges: dict[Var, Range]) -> None:
        expr = compile_affine(branch.pred.expr, self.layout)
        place = len(self._steps)
        self._steps.append(None)
        self._body(branch.then, narrowed(ranges, branch.pred) or ranges)
        if branch.orelse:
            jump = len(self._steps)
            self._steps.append(None)
        orelse = len(self._steps)
        if branch.orelse:
            self._body(branch.orelse, narrowed(ranges, branch.pred.negated()) or ranges)
            after = len(self._steps)
            self._steps[jump] = lambda machine: after

        def test(machine: Instance) -> int | None:
            return None if value_of(expr, machine.env) >= 0 else orelse
        self._steps[place] = test

    def race(self, what: Any, other: Any, axes: list[int]) -> NkiError:
        """The error of two accesses (`interpret.races.What`) of programs that differ along axes of the grid."""
        reads = "read" in (what.mode, other.mode)
        return independence.dependency(what.view.access, [self.kernel.grid[i] for i in axes], what.loc, self.kernel, read=reads)

    def dependency(self, suspect: Any) -> NkiError:
        """The error of a suspect that came true."""
        return independence.dependency(suspect.access, [suspect.var], self.kernel.loc(suspect.instr.loc), self.kernel,
                                       read=suspect.mode != "write")

    def _do_while(self, loop: DoWhile, ranges: dict[Var, Range]) -> None:
        counter = self.counters[loop]

        def begin(machine: Instance) -> None:
            machine.env[counter] = 0
        self._steps.append(begin)
        start = len(self._steps)
        self.loops.append(counter)
        self._body(loop.body, ranges)
        self.loops.pop()
        assert loop.cond is not None
        cond = View(loop.cond, self.layout, ranges, "while condition", self.kernel.loc(loop.loc))

        def test(machine: Instance) -> int | None:
            machine.check_defined(cond)
            machine.env[counter] += 1
            return start if cond.get(machine).any() else None
        self._steps.append(test)


def _waits(stmt: Stmt) -> bool:
    """Whether a program may wait for others in a statement."""
    return any(isinstance(s, Instr) and ISA[s.op].suspends for s in statements([stmt]))


def _allocs(body: list[Stmt]) -> list[Alloc]:
    seen: dict[Alloc, None] = {}
    for stmt in statements(body):
        if isinstance(stmt, Alloc):
            seen[stmt] = None
    return list(seen)


def _last_uses(body: list[Stmt], tape: Tape) -> dict[int, list[int]]:
    """For each statement, the slots of this body's tensors that no later statement uses."""
    from opennki.ir.verify import accesses
    own = {s for s in body if isinstance(s, Alloc) and tape.layout.alloc(s) in tape.layout.moving}
    kept = {o.alloc for o in tape.kernel.outputs}
    last: dict[Alloc, int] = {}
    for position, stmt in enumerate(body):
        if isinstance(stmt, Alloc):
            last.setdefault(stmt, position) if stmt in own else None
            continue
        for inner in statements([stmt]):
            if isinstance(inner, Instr):
                for access, _, _ in accesses(inner):
                    if access.alloc in own:
                        last[access.alloc] = position
            elif isinstance(inner, DoWhile) and inner.cond is not None and inner.cond.alloc in own:
                last[inner.cond.alloc] = position
    out: dict[int, list[int]] = {}
    for alloc, position in last.items():
        if alloc not in kept:
            out.setdefault(position, []).append(tape.layout.alloc(alloc))
    return out


def _free(slot: int) -> Callable[[Instance], None]:
    def step(machine: Instance) -> None:
        machine.buffers[slot] = None
    return step


def _make(alloc: Alloc, slot: int) -> Callable[[Instance], None]:
    def step(machine: Instance) -> None:
        machine.new_buffer(alloc, slot)
    return step


def _forget(slot: int) -> Callable[[Instance], None]:
    def step(machine: Instance) -> None:
        machine.shadows[slot].fill(0)
    return step


def _clear(slot: int) -> Callable[[Instance], None]:
    def step(machine: Instance) -> None:
        machine.buffers[slot].fill(0)
    return step
