"""Lowering: a planned kernel as a native tape.

The interpreter's plan (`interpret.machine.Tape`) is the source: the same slots for tensors and indices, the same operands. Each instruction
becomes a call with affine addresses where its body, run over symbols (`execute.record`), is something that a native kernel computes;
otherwise its place on the tape asks the interpreter's step. Nothing here names an instruction.
"""

from __future__ import annotations

import ctypes as C
from typing import Any

from opennki.execute import abi
from opennki.execute.group import Group
from opennki.execute.instruction import Broken, Call, Instruction
from opennki.execute.parallel import WORTH, Touched, independent, work
from opennki.execute.record import Unsupported
from opennki.interpret.machine import Tape
from opennki.interpret.steps import Plan
from opennki.interpret.views import View
from opennki.ir.affine import Affine, FloorDiv, Range, Var, narrowed
from opennki.ir.nodes import Alloc, DoWhile, For, If, Instr, Stmt, statements
from opennki.ir.verify import accesses
from opennki.isa import dtypes
from opennki.isa.declare import ISA


class Lowering:
    """One kernel on its way to a tape. `calls`, `ops` and `fallbacks` are what came out. `limit`: the interpreter has the instructions
    from this one on, in program order, and nothing is fused (`tools.compare` finds the first one that differs)."""

    def __init__(self, tape: Tape, limit: int | None = None) -> None:
        self.tape, self.limit = tape, limit
        self.seen: list[Instr] = []
        self.layout = tape.layout
        self.ops: list[tuple[int, int, int, int, int]] = []
        self.calls: list[Call] = []
        self.affines: list[Affine] = []
        self.tests: list[tuple[Affine, int]] = []
        self.broken: list[Broken] = []
        self.fallbacks: list[tuple[Instr, Any, str]] = []  # instruction, interpreter's step, why
        self.divisions: dict[FloorDiv, Var] = {}  # computed since the last jump
        self.touched: Touched = {}  # of native instructions
        self.views: list[View] = []  # of tile symbols, by their source
        self.preds: list[tuple[Affine, tuple[int, ...]]] = []
        self.indices: list[tuple[Affine, tuple[int, ...]]] = []
        self.users: dict[Alloc, set[Instr]] = _users(tape)
        self.group = Group(self)
        self.parallel: dict[int, tuple[int, list[tuple[Alloc, int]]]] = {}  # place of a FOR -> its end, tensors of an iteration
        self.loops: list[int] = list(tape.loops)
        self.body(tape.kernel.body, dict(tape.ranges))
        self.flush()
        self.emit(abi.OP_END)
        self.programs = self._programs()

    def emit(self, code: int, a: int = 0, b: int = 0, c: int = 0, n: int = 0) -> int:
        """Append an op; returns its place."""
        self.ops.append((code, a, b, c, n))
        return len(self.ops) - 1

    def patch(self, place: int, b: int) -> None:
        """Set the target of a jump."""
        code, a, _, c, n = self.ops[place]
        self.ops[place] = (code, a, b, c, n)

    def affine(self, expr: Affine) -> int:
        """Number of an affine expression."""
        self.affines.append(self.linear(expr))
        return len(self.affines) - 1

    def linear(self, expr: Affine) -> Affine:
        """The expression over variables alone; floor divisions are computed into variables of their own just before."""
        if all(isinstance(a, Var) for a, _ in expr.terms):
            return expr
        out = Affine(expr.const)
        for atom, coefficient in expr.terms:
            if isinstance(atom, FloorDiv):
                var = self.divisions.get(atom)
                if var is None:
                    inner = self.affine(atom.of)
                    var = self.divisions[atom] = Var(f"div{len(self.layout.vars)}", 0, 1 << 62)
                    self.emit(abi.OP_DIV, self.layout.var(var), inner, 0, atom.by)
                out = out.add(Affine(0, ((var, coefficient),)))
            else:
                out = out.add(Affine(0, ((atom, coefficient),)))
        return out

    def _programs(self) -> list[tuple[Alloc, int]] | None:
        """The tensors that each program of the grid has for itself, where programs provably share nothing but what they only read;
        None where they are not proven to, or too small to pay."""
        kernel, tape = self.tape.kernel, self.tape
        many = [v for v in kernel.grid if v.hi > 0]
        if len(many) != 1 or self.fallbacks or (many[0].hi + 1) * work(kernel.body) <= WORTH:
            return None
        used = self.slots()
        if any(slot in used for _, slot in tape.renewed):
            return None  # each program needs it blank
        own = independent(For(many[0], many[0].hi + 1, "affine", kernel.body), dict(tape.ranges), self.touched, programs=True)
        return None if own is None else [(a, self.layout.alloc(a)) for a in own]

    def slots(self) -> set[int]:
        """Slots of the tensors that native code touches."""
        return {slot for call in self.calls for _, slot in call.addresses} | {slot for _, slot in self.tests} | {
            op[1] for op in self.ops if op[0] == abi.OP_ZERO
        }

    # ---- control flow ----
    def body(self, body: list[Stmt], ranges: dict[Var, Range]) -> None:
        for stmt in body:
            if isinstance(stmt, Alloc):
                if stmt in self.tape.restarted:
                    self.flush()
                    self.emit(abi.OP_ZERO, self.layout.alloc(stmt), n=stmt.size * dtypes.itemsize(stmt.dtype))
            elif isinstance(stmt, Instr):
                self.instruction(stmt, ranges)
            elif isinstance(stmt, For):
                self.loop(stmt, ranges)
            elif isinstance(stmt, If):
                self.branch(stmt, ranges)
            else:
                self.do_while(stmt, ranges)

    def loop(self, loop: For, ranges: dict[Var, Range]) -> None:
        slot = self.layout.var(loop.var)
        self.segment()
        outermost, interpreted = len(self.loops) == len(self.tape.loops), len(self.fallbacks)
        start = self.emit(abi.OP_FOR, slot, n=loop.trips)
        self.loops.append(slot)
        self.body(loop.body, {**ranges, loop.var: (0, loop.trips - 1)})
        self.segment()
        self.loops.pop()
        self.emit(abi.OP_NEXT, slot, start + 1, n=loop.trips)
        self.patch(start, len(self.ops))
        self.divisions = {}
        if outermost and loop.trips > 1 and interpreted == len(self.fallbacks) and loop.trips * work(loop.body) > WORTH:
            own = independent(loop, ranges, self.touched)
            if own is not None:
                self.parallel[start] = len(self.ops), [(a, self.layout.alloc(a)) for a in own]

    def branch(self, branch: If, ranges: dict[Var, Range]) -> None:
        self.segment()
        number = self.affine(branch.pred.expr)
        test = self.emit(abi.OP_IF, number)
        self.divisions = {}
        self.body(branch.then, narrowed(ranges, branch.pred) or ranges)
        self.segment()
        if branch.orelse:
            jump = self.emit(abi.OP_JUMP)
            self.patch(test, len(self.ops))
            self.body(branch.orelse, narrowed(ranges, branch.pred.negated()) or ranges)
            self.segment()
            self.patch(jump, len(self.ops))
        else:
            self.patch(test, len(self.ops))

    def do_while(self, loop: DoWhile, ranges: dict[Var, Range]) -> None:
        if loop.cond is None or not loop.cond.is_whole:
            raise Unsupported("the condition of a do-while loop is a part of a tensor")
        self.segment()
        start = len(self.ops)
        if any(isinstance(s, Instr) and ISA[s.op].random for s in statements(loop.body)):
            raise Unsupported("random numbers in a do-while loop")  # their stream counts its rounds
        self.body(loop.body, ranges)
        self.segment()
        alloc = loop.cond.alloc
        self.tests.append((Affine(), self.layout.alloc(alloc)))
        self.emit(abi.OP_TEST, len(self.tests) - 1, start, dtypes.itemsize(alloc.dtype), alloc.size)

    # ---- instructions ----
    def instruction(self, instr: Instr, ranges: dict[Var, Range]) -> None:
        tape = self.tape
        self.seen.append(instr)
        if self.limit is not None:
            self.flush()
            if len(self.seen) > self.limit:
                self.interpreted(instr, "left to the interpreter")
                return
        plan = Plan(instr, self.layout, ranges, tape.kernel.loc(instr.loc), set(), self.loops, tape.seed, ())
        one = Instruction(self, plan, ranges)
        try:
            one.record()
        except Unsupported as why:
            self.interpreted(instr, str(why))
            return
        if not self.group.add(one):
            self.flush()
            if not (one.joins and self.group.add(one)):
                self.alone(one)

    def interpreted(self, instr: Instr, why: str) -> None:
        """Leave an instruction to the interpreter."""
        self.flush()
        self.fallbacks.append((instr, self.tape.by_instr[instr], why))
        self.emit(abi.OP_BACK, len(self.fallbacks) - 1)

    def alone(self, one: Instruction) -> None:
        """Compile an instruction by itself."""
        mark, broken, ops = len(self.calls), len(self.broken), len(self.ops)
        try:
            self.run(one.calls(one.pairs), [one])
        except Unsupported as why:
            del self.calls[mark:], self.broken[broken:], self.ops[ops:]
            self.divisions = {}
            self.interpreted(one.plan.instr, str(why))

    def run(self, calls: list[Call], ones: list[Instruction]) -> None:
        """Append calls to the tape."""
        for made in calls:
            self.calls.append(made)
            self.emit(abi.OP_RUN, len(self.calls) - 1)
        for one in ones:
            self.touched[one.plan.instr] = one.touched

    def segment(self) -> None:
        """The end of a straight line of instructions."""
        self.flush()
        self.divisions = {}

    def flush(self) -> None:
        """Compile the instructions that were put together."""
        group, self.group = self.group, Group(self)
        if len(group.ones) == 1:
            self.alone(group.ones[0])
        elif group.ones:
            self.run(group.calls, group.ones)


class Native:
    """A tape laid out for C. Everything that the structures point to lives as long as this object."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering = lowering
        layout = lowering.layout
        self.n_env = max(1, len(layout.vars))
        terms: list[tuple[int, int]] = []

        def affine(expr: Affine) -> abi.AffineExpr:
            first = len(terms)
            terms.extend((c, layout.var(a)) for a, c in expr.terms)  # type: ignore[arg-type]
            return abi.AffineExpr(expr.const, first, len(terms) - first)

        keep: list[Any] = []

        def array(kind: Any, items: list[Any]) -> Any:
            made = (kind * max(1, len(items)))(*items)
            keep.append(made)
            return made

        calls = []
        for c in lowering.calls:
            rank = len(c.shape)
            addresses = array(abi.Address, [abi.Address(affine(e), slot) for e, slot in c.addresses])
            bounds = array(abi.Bound, [abi.Bound(affine(e), _strides(s), size, error) for e, s, size, error in c.bounds])
            clips = array(abi.Clip, [abi.Clip(affine(e), axis, stride) for e, axis, stride in c.clips])
            preds = array(abi.AffineExpr, [affine(e) for e in c.preds])
            indices = array(abi.AffineExpr, [affine(e) for e in c.indices])
            keep.append(c.what)
            what = getattr(c.what, "structure", c.what)
            calls.append(
                abi.Call(
                    c.kind, rank, C.cast(C.pointer(what), C.c_void_p), _strides(c.shape), len(c.addresses), len(c.bounds), len(c.clips),
                    len(c.preds), len(c.indices), 0, addresses, bounds, clips, preds, indices,
                )
            )  # fmt: skip
        ops = array(abi.OpStruct, [abi.OpStruct(*op) for op in lowering.ops])
        affines = array(abi.AffineExpr, [affine(e) for e in lowering.affines])
        tests = array(abi.Address, [abi.Address(affine(e), slot) for e, slot in lowering.tests])
        made_calls = array(abi.Call, calls)
        made_terms = array(abi.Term, [abi.Term(c, v) for c, v in terms])
        scratch = max([prod_scratch(c) for c in lowering.calls if c.kind == abi.K_MM], default=0)
        self.keep = keep
        self.n_buffers = len(layout.allocs)
        self.struct = abi.TapeStruct(ops, made_calls, affines, made_terms, tests, len(lowering.ops), self.n_env, self.n_buffers, scratch)


def prod_scratch(call: Call) -> int:
    """Bytes of scratch memory of a matrix product."""
    from opennki.execute.build import library

    lib = library().lib
    assert lib is not None
    return int(lib.nki_mm_scratch(C.byref(call.what)))


def _strides(values: tuple[int, ...]) -> Any:
    return (C.c_int64 * abi.RANK)(*values)


def _users(tape: Tape) -> dict[Alloc, set[Instr]]:
    """The instructions that use each tensor; tensors that outlive the kernel count as used by another one."""
    users: dict[Alloc, set[Instr]] = {}
    outside = Instr("", (), ())
    for stmt in statements(tape.kernel.body):
        if isinstance(stmt, Instr):
            for access, _, _ in accesses(stmt):
                users.setdefault(access.alloc, set()).add(stmt)
        elif isinstance(stmt, DoWhile) and stmt.cond is not None:
            users.setdefault(stmt.cond.alloc, set()).add(outside)
    for access in tape.kernel.outputs:
        users.setdefault(access.alloc, set()).add(outside)
    return users
