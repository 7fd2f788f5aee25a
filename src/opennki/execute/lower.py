"""Lowering: a planned kernel as a native tape.

The interpreter's plan (`interpret.machine.Tape`) is the source: the same slots for tensors and indices, the same operands. Each instruction
becomes a call with affine addresses where its body, run over symbols (`execute.record`), is something that a native kernel computes;
otherwise its place on the tape asks the interpreter's step. Nothing here names an instruction.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

from opennki.execute import parallel
from opennki.execute.calls import Call
from opennki.execute.forward import forward
from opennki.execute.group import Group
from opennki.execute.instruction import Broken, Instruction
from opennki.execute.keep import keep
from opennki.execute.lines import Lines
from opennki.execute.merge import merge
from opennki.execute.nodes import Back, Branch, Divide, Loop, Made, Node, Repeat, Run, Touch, Zero, walk, work
from opennki.execute.record import Unsupported
from opennki.execute.split import split
from opennki.execute.sums import add_up
from opennki.execute.wanted import leave_out
from opennki.execute.watch import Unread, Watch
from opennki.interpret.machine import Tape
from opennki.interpret.steps import Plan, compile_step
from opennki.interpret.views import View
from opennki.ir.affine import Affine, FloorDiv, Range, Var, narrowed
from opennki.ir.nodes import Alloc, DoWhile, For, If, Instr, Stmt, statements
from opennki.ir.verify import accesses
from opennki.isa import dtypes
from opennki.isa.declare import ISA


class Lowering:
    """One kernel on its way to a tape. `nodes` and `fallbacks` are what came out. `limit`: the interpreter has the instructions
    from this one on, in program order, and nothing is fused (`tools.compare` finds the first one that differs)."""

    def __init__(self, tape: Tape, limit: int | None = None) -> None:
        self.tape, self.limit = tape, limit
        self.seen: list[Instr] = []
        self.layout = tape.layout
        self.planned = len(tape.layout.vars), len(tape.layout.allocs)
        self.nodes: list[Node] = []
        self.out = self.nodes  # where the next node goes
        self.broken: list[Broken | Unread] = []
        self.fallbacks: list[tuple[Instr, Any, str]] = []  # instruction, interpreter's step, why
        self.divisions: dict[FloorDiv, Var] = {}  # computed since the last jump
        self.views: list[View] = []  # of tile symbols, by their source
        self.offsets: dict[View, Affine] = {}  # in bytes
        self.places: dict[int, Any] = {}  # of operands, by their number (see `Instruction.place`)
        self.preds: list[tuple[Affine, tuple[int, ...]]] = []
        self.indices: list[tuple[Affine, tuple[int, ...]]] = []
        self.count, ops, self.users = _counted(tape)
        self.watch = Watch(self)
        self.group = Group(self)
        self.lines = Lines(self)
        self.loops: list[int] = list(tape.loops)
        self.seed = Var("seed", -(1 << 63), (1 << 63) - 1)  # of the run
        self.draws = any(ISA[op].random for op in ops)
        if self.draws:
            self.layout.var(self.seed)
        self.body(tape.kernel.body, dict(tape.ranges))
        self.flush()
        self.lines.done()
        self.recount()
        if limit is None:
            forward(self, self.nodes)
            add_up(self, self.nodes)
            self.recount()
            merge(self, self.nodes)
            self.recount()
        parallel.choose(self, self.nodes)
        if limit is None:
            split(self, self.nodes)
        keep(self)
        if limit is None:
            self.recount()
            leave_out(self, self.nodes)
        self.programs = self._programs()

    def recount(self) -> None:
        """The tree has changed: what is counted in it is counted again when somebody asks."""
        self._uses: dict[Alloc, int] | None = None
        self._registers: tuple[set[Alloc], set[Alloc]] | None = None

    @property
    def uses(self) -> dict[Alloc, int]:
        """How many nodes use each tensor (see `parallel.uses`)."""
        if self._uses is None:
            self._uses = parallel.uses(self.nodes, self.tape)
        return self._uses

    @property
    def registers(self) -> tuple[set[Alloc], set[Alloc]]:
        """The registers that nothing reads, and those that nothing writes."""
        if self._registers is None:
            self._registers = parallel.registers(self.nodes, self.tape)
        return self._registers

    @property
    def parallel(self) -> list[Loop]:
        """The loops that run on several threads."""
        return [node for node in walk(self.nodes) if isinstance(node, Loop) and node.parallel]

    @property
    def calls(self) -> list[Call]:
        """The native calls, in the order of the tape."""
        return [node.call for node in walk(self.nodes) if isinstance(node, Run)]

    def linear(self, expr: Affine) -> Affine:
        """The expression over variables alone; floor divisions are computed into variables of their own just before."""
        if all(isinstance(a, Var) for a, _ in expr.terms):
            return expr
        out = Affine(expr.const)
        for atom, coefficient in expr.terms:
            if isinstance(atom, FloorDiv):
                var = self.divisions.get(atom)
                if var is None:
                    inner = self.linear(atom.of)
                    var = self.divisions[atom] = Var(f"div{len(self.layout.vars)}", 0, 1 << 62)
                    self.layout.var(var)
                    self.out.append(Divide(var, inner, atom))
                out = out.add(Affine(0, ((var, coefficient),)))
            else:
                out = out.add(Affine(0, ((atom, coefficient),)))
        return out

    def divided(self, call: Call) -> None:
        """Let a call that comes next have its expressions over variables alone."""
        linear = self.linear
        call.addresses = [(linear(e), slot) for e, slot in call.addresses]
        call.bounds = [(linear(e), *rest) for e, *rest in call.bounds]  # type: ignore[misc]
        call.clips = [(linear(e), axis, stride) for e, axis, stride in call.clips]
        call.preds, call.indices = [linear(e) for e in call.preds], [linear(e) for e in call.indices]

    def _programs(self) -> list[tuple[Alloc, int]] | None:
        """The tensors that each program of the grid has for itself, where programs provably share nothing but what they only read;
        None where they are not proven to, or too small to pay."""
        tape = self.tape
        many = [v for v in tape.kernel.grid if v.hi > 0]
        if not many or self.fallbacks or prod(v.hi + 1 for v in many) * work(self.nodes) <= parallel.WORTH:
            return None
        used = self.slots()
        if any(slot in used and alloc not in self.registers[0] | self.registers[1] for alloc, slot in tape.renewed):
            return None  # each program needs it blank
        own: set[Alloc] = set()
        for var in many:  # programs that differ in one dimension of the grid, whatever they have in the others
            found = parallel.independent(self, self.nodes, var, programs=True)
            if found is None:
                return None
            own |= found
        return [(a, self.layout.alloc(a)) for a in own]

    def slots(self) -> set[int]:
        """Slots of the tensors that native code touches."""
        found: set[int] = set()
        for node in walk(self.nodes):
            if node.__class__ is Run:
                found.update([slot for _, slot in node.call.addresses])
            elif isinstance(node, (Zero, Repeat)):
                found.add(node.slot)
        return found

    # ---- control flow ----
    def body(self, body: list[Stmt], ranges: dict[Var, Range]) -> None:
        for stmt in body:
            if isinstance(stmt, Instr):
                self.instruction(stmt, ranges)
            elif isinstance(stmt, Alloc):
                self.out.append(Made(stmt))
                self.watch.made(stmt)
                if stmt in self.tape.restarted:
                    self.flush()
                    self.out.append(Zero(stmt, self.layout.alloc(stmt), stmt.size * dtypes.itemsize(stmt.dtype)))
            elif isinstance(stmt, For):
                self.loop(stmt, ranges)
            elif isinstance(stmt, If):
                self.branch(stmt, ranges)
            else:
                self.do_while(stmt, ranges)

    def inside(self, body: list[Stmt], ranges: dict[Var, Range]) -> list[Node]:
        """The nodes of a body of its own."""
        outer, self.out = self.out, []
        self.divisions = {}
        self.body(body, ranges)
        self.segment()
        made, self.out = self.out, outer
        return made

    def loop(self, loop: For, ranges: dict[Var, Range]) -> None:
        if loop.trips < 1:
            return
        self.segment()
        slot = self.layout.var(loop.var)
        self.loops.append(slot)
        inner = {**ranges, loop.var: (0, loop.trips - 1)}
        self.out.append(Loop(loop.var, loop.trips, self.inside(loop.body, inner)))
        self.loops.pop()

    def branch(self, branch: If, ranges: dict[Var, Range]) -> None:
        if self.joined(branch, ranges):
            return
        self.segment()
        test = self.linear(branch.pred.expr)
        then = self.inside(branch.then, narrowed(ranges, branch.pred) or ranges)
        orelse = self.inside(branch.orelse, narrowed(ranges, branch.pred.negated()) or ranges)
        self.out.append(Branch(test, then, orelse))

    def joined(self, branch: If, ranges: dict[Var, Range]) -> bool:
        """Put the one instruction of a branch, or of branches in each other, into the straight line before it, if it joins that: what it
        stores is then a choice between its result and what is there, which a run makes before it starts."""
        if self.limit is not None or self.group.ones or self.watch.cells:
            return False
        tests: list[Affine] = []
        stmt: Stmt = branch
        while isinstance(stmt, If):
            if stmt.orelse or len(stmt.then) != 1:
                return False
            tests.append(stmt.pred.expr)
            stmt = stmt.then[0]
        site = self.lines.site(stmt, ranges, tuple(tests)) if isinstance(stmt, Instr) else None
        if site is None or not self.lines.join(site):
            return False
        self.seen.append(site.instr)
        return True

    def do_while(self, loop: DoWhile, ranges: dict[Var, Range]) -> None:
        assert loop.cond is not None
        self.segment()
        counter = self.tape.counters[loop]
        self.loops.append(counter)
        body = self.inside(loop.body, ranges)
        self.loops.pop()
        cond = View(loop.cond, self.layout, ranges, "while condition", self.tape.kernel.loc(loop.loc))
        if cond.bounds or cond.dynamic is not None:
            raise Unsupported("the condition of a do-while loop may be outside of its tensor")
        outer, self.out = self.out, body
        tests = [(self.linear(base), n) for base, n in _runs(cond)]
        self.out, self.divisions = outer, {}
        self.out.append(Repeat(body, loop.cond, cond.slot, counter, tests))

    # ---- instructions ----
    def instruction(self, instr: Instr, ranges: dict[Var, Range]) -> None:
        tape = self.tape
        self.seen.append(instr)
        if self.limit is None and not (self.watch.cells and any(a.alloc in self.watch.cells for a, _, _ in accesses(instr))):
            site = self.lines.site(instr, ranges)
            if site is not None and not self.group.ones:
                self.lines.add(site)
                return
        self.lines.flush()
        plan = Plan(instr, self.layout, ranges, tape.kernel.loc(instr.loc), set(), self.loops, tape.seed, ())
        if self.limit is not None:
            self.flush()
            if len(self.seen) > self.limit:
                self.watch.instruction(plan)
                self.interpreted(plan, "left to the interpreter")
                return
        self.watch.instruction(plan)
        one = Instruction(self, plan, ranges)
        try:
            one.record()
        except Unsupported as why:
            self.interpreted(plan, str(why))
            return
        if not self.group.add(one):
            self.flush()
            if not (one.joins and self.group.add(one)):
                self.alone(one)

    def interpreted(self, plan: Plan, why: str) -> None:
        """Leave an instruction to the interpreter."""
        self.flush()
        self.left(plan, why)

    def left(self, plan: Plan, why: str) -> None:
        """The same where those before it are done, or share nothing with it: a line that is closed while others are open."""
        self.fallbacks.append((plan.instr, compile_step(plan), why))
        self.out.append(Back(len(self.fallbacks) - 1, plan.instr))

    def alone(self, one: Instruction) -> None:
        """Compile an instruction by itself."""
        broken = len(self.broken)
        try:
            self.run(one.calls(one.pairs), [one])
            return
        except Unsupported:
            del self.broken[broken:]
        try:
            self.run([one.steps()] if one.pairs else [], [one])
        except Unsupported as why:
            del self.broken[broken:]
            plan = one.plan
            if one.repeated:
                plan = Plan(plan.instr, self.layout, one.ranges, plan.loc, set(), self.loops, self.tape.seed, ())
            self.left(plan, str(why))

    def run(self, calls: list[Call], ones: list[Instruction]) -> None:
        """Append calls to the tape."""
        self.append(calls, [touch for one in ones for touch in one.touched], ones)

    def append(self, calls: list[Call], touches: list[Touch], ones: list[Instruction]) -> None:
        """Append calls that compute instructions, or parts of them, and touch this; index tiles are read too."""
        touches = touches + [(dim.dyn, False) for access, _ in touches for dim in access.dims if dim.dyn is not None]
        instrs = tuple([one.plan.instr for one in ones])
        for made in calls:
            made.instrs = instrs
            if any([atom.__class__ is FloorDiv for e in made.expressions() for atom, _ in e.terms]):
                self.divided(made)
            self.out.append(Run(made, touches, ones[0].ranges))

    def segment(self) -> None:
        """The end of a straight line of instructions."""
        self.flush()
        self.divisions = {}

    def flush(self) -> None:
        """Compile the instructions that were put together."""
        self.lines.flush()
        if self.group.ones:
            group, self.group = self.group, Group(self)
            self.flush_group(group)

    def flush_group(self, group: Group) -> None:
        """Compile the instructions of a group."""
        parts = group.made() if len(group.ones) > 1 else None
        if parts is not None:
            self.parts(parts, group.ones)
            return
        again = Group(self)
        for one in group.ones:  # alone, or not all of them together
            if not again.add(one, checked=True):
                self.closed(again)
                again = Group(self)
                if not again.add(one, checked=True):
                    self.alone(one)
        self.closed(again)

    def closed(self, group: Group) -> None:
        """Append a group that is known to have a native form."""
        if len(group.ones) == 1:
            self.alone(group.ones[0])
        elif group.ones:
            parts = group.made()
            assert parts is not None
            self.parts(parts, group.ones)

    def parts(self, parts: list[tuple[list[Call], list[Touch]]], ones: list[Instruction]) -> None:
        """Append what came out of a group."""
        for calls, touches in parts:
            self.append(calls, touches, ones)


def _runs(view: View) -> list[tuple[Affine, int]]:
    """Byte offset and number of elements of each contiguous part of a tile."""
    base = Affine()
    for dim, unit in zip(view.access.dims, view.steps, strict=True):
        base = base.add(dim.base.scale(unit))
    dims = [(n, s) for n, s in zip(view.shape, view.strides, strict=True) if n != 1]
    count = 1
    while dims and dims[-1][1] == count * view.itemsize:
        count *= dims.pop()[0]
    places = [sum(i * s for i, (_, s) in zip(at, dims, strict=True)) for at in product(*(range(n) for n, _ in dims))]
    return [(base.scale(view.itemsize).add(place), count) for place in places]


def _counted(tape: Tape) -> tuple[int, set[str], dict[Alloc, set[Instr]]]:
    """How many instructions there are, of which operations, and those that use each tensor; tensors that outlive the kernel count as used
    by another one."""
    users: dict[Alloc, set[Instr]] = {}
    outside = Instr("", (), ())
    count, ops = 0, set()
    for stmt in statements(tape.kernel.body):
        if stmt.__class__ is Instr:
            count += 1
            ops.add(stmt.op)
            for access, _, _ in accesses(stmt):
                found = users.get(access.alloc)
                if found is None:
                    users[access.alloc] = {stmt}
                else:
                    found.add(stmt)
        elif isinstance(stmt, DoWhile) and stmt.cond is not None:
            users.setdefault(stmt.cond.alloc, set()).add(outside)
    for access in tape.kernel.outputs:
        users.setdefault(access.alloc, set()).add(outside)
    return count, ops, users
