"""Lowering: a planned kernel as a native tape.

The interpreter's plan (`interpret.machine.Tape`) is the source: the same slots for tensors and indices, the same operands. Each instruction
becomes a call with affine addresses where its body, run over symbols (`execute.record`), is something that a native kernel computes;
otherwise its place on the tape asks the interpreter's step. Nothing here names an instruction.
"""

from __future__ import annotations

import ctypes as C
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from opennki.execute import abi
from opennki.execute.parallel import WORTH, Touched, independent, work
from opennki.execute.program import Program, compile_values
from opennki.execute.record import TRANSLATOR, Sym, Unsupported, const, tile
from opennki.interpret.machine import Tape
from opennki.interpret.steps import Operand, Plan
from opennki.interpret.views import View
from opennki.ir.affine import Affine, FloorDiv, Range, Var, narrowed
from opennki.ir.nodes import Access, Alloc, DoWhile, For, If, IndexTile, Instr, PredTile, Stmt, statements
from opennki.isa import dtypes
from opennki.isa.declare import ISA, Plumbing
from opennki.isa.declare import Tile as TileSpec

MAX_ADDRESSES = 16  # of a call, as in tape.c


@dataclass
class Call:
    """An instruction with a native form, before it is laid out in memory."""

    kind: int
    what: Any
    addresses: list[tuple[Affine, int]]
    shape: tuple[int, ...] = ()
    bounds: list[tuple[Affine, tuple[int, ...], int, int]] = field(default_factory=list)
    clips: list[tuple[Affine, int, int]] = field(default_factory=list)
    preds: list[Affine] = field(default_factory=list)
    indices: list[Affine] = field(default_factory=list)


@dataclass
class Broken:
    """What is reported when an index of a call is outside: the operand and the dimension."""

    view: View
    axis: int


class Lowering:
    """One kernel on its way to a tape. `calls`, `ops` and `fallbacks` are what came out."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.layout = tape.layout
        self.ops: list[tuple[int, int, int, int, int]] = []
        self.calls: list[Call] = []
        self.affines: list[Affine] = []
        self.tests: list[tuple[Affine, int]] = []
        self.broken: list[Broken] = []
        self.fallbacks: list[tuple[Instr, Any, str]] = []  # instruction, interpreter's step, why
        self.touched: Touched = {}  # of native instructions
        self.parallel: dict[int, tuple[int, list[tuple[Alloc, int]]]] = {}  # place of a FOR -> its end, tensors of an iteration
        self.loops: list[int] = list(tape.loops)
        self.body(tape.kernel.body, dict(tape.ranges))
        self.emit(abi.OP_END)

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
                inner = self.affine(atom.of)
                var = Var(f"div{len(self.layout.vars)}", 0, 1 << 62)
                self.emit(abi.OP_DIV, self.layout.var(var), inner, 0, atom.by)
                out = out.add(Affine(0, ((var, coefficient),)))
            else:
                out = out.add(Affine(0, ((atom, coefficient),)))
        return out

    # ---- control flow ----
    def body(self, body: list[Stmt], ranges: dict[Var, Range]) -> None:
        for stmt in body:
            if isinstance(stmt, Alloc):
                if stmt in self.tape.restarted:
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
        outermost, interpreted = len(self.loops) == len(self.tape.loops), len(self.fallbacks)
        start = self.emit(abi.OP_FOR, slot, n=loop.trips)
        self.loops.append(slot)
        self.body(loop.body, {**ranges, loop.var: (0, loop.trips - 1)})
        self.loops.pop()
        self.emit(abi.OP_NEXT, slot, start + 1, n=loop.trips)
        self.patch(start, len(self.ops))
        if outermost and loop.trips > 1 and interpreted == len(self.fallbacks) and loop.trips * work(loop.body) > WORTH:
            own = independent(loop, ranges, self.touched)
            if own is not None:
                self.parallel[start] = len(self.ops), [(a, self.layout.alloc(a)) for a in own]

    def branch(self, branch: If, ranges: dict[Var, Range]) -> None:
        number = self.affine(branch.pred.expr)
        test = self.emit(abi.OP_IF, number)
        self.body(branch.then, narrowed(ranges, branch.pred) or ranges)
        if branch.orelse:
            jump = self.emit(abi.OP_JUMP)
            self.patch(test, len(self.ops))
            self.body(branch.orelse, narrowed(ranges, branch.pred.negated()) or ranges)
            self.patch(jump, len(self.ops))
        else:
            self.patch(test, len(self.ops))

    def do_while(self, loop: DoWhile, ranges: dict[Var, Range]) -> None:
        if loop.cond is None or not loop.cond.is_whole:
            raise Unsupported("the condition of a do-while loop is a part of a tensor")
        start = len(self.ops)
        if any(isinstance(s, Instr) and ISA[s.op].random for s in statements(loop.body)):
            raise Unsupported("random numbers in a do-while loop")  # their stream counts its rounds
        self.body(loop.body, ranges)
        alloc = loop.cond.alloc
        self.tests.append((Affine(), self.layout.alloc(alloc)))
        self.emit(abi.OP_TEST, len(self.tests) - 1, start, dtypes.itemsize(alloc.dtype), alloc.size)

    # ---- instructions ----
    def instruction(self, instr: Instr, ranges: dict[Var, Range]) -> None:
        tape = self.tape
        plan = Plan(instr, self.layout, ranges, tape.kernel.loc(instr.loc), set(), self.loops, tape.seed, ())
        mark, broken, ops = len(self.calls), len(self.broken), len(self.ops)
        try:
            one = Instruction(self, plan)
            for made in one.calls():
                self.calls.append(made)
                self.emit(abi.OP_RUN, len(self.calls) - 1)
            self.touched[instr] = one.touched
        except Unsupported as why:
            del self.calls[mark:], self.broken[broken:], self.ops[ops:]
            self.fallbacks.append((instr, tape.by_instr[instr], str(why)))
            self.emit(abi.OP_BACK, len(self.fallbacks) - 1)


class Instruction:
    """One instruction: its operands as symbols, its results as calls."""

    def __init__(self, lowering: Lowering, plan: Plan) -> None:
        self.lowering, self.plan = lowering, plan
        self.views: list[View] = []  # of tile symbols, by their source
        self.touched: list[tuple[Access, bool]] = []
        self.preds: list[tuple[Affine, tuple[int, ...]]] = []
        self.indices: list[tuple[Affine, tuple[int, ...]]] = []

    def calls(self) -> list[Call]:
        """The calls that compute the instruction. Raises Unsupported."""
        plan = self.plan
        if plan.decl.family in ("print", "sync", "collective") or plan.decl.suspends:
            raise Unsupported("it acts outside of its tensors")
        if plan.decl.positional and plan.masker is not None:
            raise Unsupported("a mask on positions")
        for view, _, _ in plan.outputs:
            if view.dynamic is not None:
                raise Unsupported("a runtime index")
            if 0 in view.shape:
                return []
        kw = dict(plan.static)
        for op in plan.inputs:
            kw[op.name] = self.operand(op)
        self.lazy(kw)
        if "mask" in plan.decl.index and plan.decl.mask_on:
            kw["mask"] = None
        value = TRANSLATOR.body(plan.decl.name)(**kw)
        values = [v for v in value if v is not None] if isinstance(value, tuple) else [value]
        if isinstance(value, tuple) and len(value) == len(plan.outputs):
            values = list(value)
        if len(values) != len(plan.outputs):
            raise Unsupported("results that do not match")
        pairs, outs = [], set()
        for (view, _, _), v in zip(plan.outputs, values, strict=True):
            out, result = self.out(view), const(v)
            if result.kind == "tile" and self.place(result.source) == self.place(out.source):
                continue  # it stays as it is
            pairs.append((out, result))
            outs.add(out.source)
        clips, rest = self.mask()
        program = Program(
            iteration=plan.iteration,
            dtype_of=lambda source: abi.DTYPES.get(self.views[source].access.dtype, -1),
            keeps_axes=bool(clips or rest) or any(v.bounds for v in self.views),
            guards=rest,
            same=lambda a, b: self.views[a] is self.views[b] or self.place(a) == self.place(b),
            apart=self.apart,
        )
        made = []
        for kind, what, sources, shape in compile_values(program, pairs):
            views = [self.views[s] for s in sources]
            self.touched += [(v.access, any(v is out for out, _, _ in plan.outputs) or s in outs) for s, v in zip(sources, views, strict=True)]
            if len(views) > MAX_ADDRESSES:
                raise Unsupported("more operands than a call takes")
            call = Call(kind, what, [(self.offset(v), v.slot) for v in views], shape)
            if clips:
                if kind not in (abi.K_EW, abi.K_COPY) or shape != plan.iteration:
                    raise Unsupported("a mask on an instruction that is not elementwise")
                call.clips = [(self.lowering.linear(e), axis, stride) for e, axis, stride in clips]
            self.bounds(call, views, plan.iteration)
            call.preds = [self.lowering.linear(self.preds[p][0]) for p in program.preds_used]
            call.indices = [self.lowering.linear(self.indices[p][0]) for p in program.indices_used]
            made.append(call)
        return made

    def operand(self, op: Operand) -> Sym | None:
        view = op.view
        if view.dynamic is not None:
            raise Unsupported("a runtime index")
        if op.zero is not None:
            raise Unsupported("a mask on an operand")
        self.views.append(view)
        made = tile(len(self.views) - 1, view.shape, view.strides, view.dtype, self.plan.decl.raw(self.info()))
        return made if op.fit is None else made.reshape(op.fit)

    def info(self) -> Any:
        from opennki.ir.verify import call_view

        instr = self.plan.instr
        return call_view(self.plan.decl, instr.operands, instr.engine, instr.results[0].dtype if instr.results else None)

    def lazy(self, kw: dict[str, Any]) -> None:
        """Operands that are expressions of loop indices."""
        plan = self.plan
        for param, value in zip(plan.decl.params, plan.instr.operands, strict=True):
            if isinstance(param.spec, Plumbing):
                if param.spec.kind == "stream":
                    raise Unsupported("random numbers")
                continue
            if isinstance(value, PredTile):
                shape = value.shape or plan.iteration
                made: Any = None
                for p in value.preds:
                    self.preds.append((p.expr, p.strides))
                    one = Sym("pred", shape, np.dtype(bool), strides=tuple(p.strides), source=len(self.preds) - 1)
                    made = one if made is None else made * one
                kw[param.name] = made
            elif isinstance(value, IndexTile):
                self.indices.append((value.base, value.strides))
                kw[param.name] = Sym("index", value.shape, np.dtype(np.int64), strides=tuple(value.strides), source=len(self.indices) - 1)
            elif isinstance(value, Affine):
                if not (isinstance(param.spec, TileSpec) and not plan.decl.raw(self.info())):
                    raise Unsupported("an attribute that is an expression of loop indices")
                self.indices.append((value, ()))
                kw[param.name] = Sym("index", (), np.dtype(np.float32), source=len(self.indices) - 1)
            elif isinstance(value, tuple) and any(isinstance(v, Affine) for v in value):
                raise Unsupported("an attribute that is an expression of loop indices")

    def out(self, view: View) -> Sym:
        """A result as a tile symbol."""
        self.views.append(view)
        return tile(len(self.views) - 1, view.shape, view.strides, view.dtype, True)

    def mask(self) -> tuple[list[tuple[Affine, int, int]], list[Sym]]:
        """Clips of single axes, and predicates that are left."""
        plan = self.plan
        clips: list[tuple[Affine, int, int]] = []
        rest: list[Sym] = []
        shape = plan.iteration
        for p in plan.instr.mask:
            strides = tuple(s if n > 1 else 0 for s, n in zip(p.strides or (0,) * len(shape), shape, strict=True))
            moving = [j for j, s in enumerate(strides) if s]
            if not moving:
                clips.append((p.expr, -1, 0))
            elif len(moving) == 1:
                clips.append((p.expr, moving[0], strides[moving[0]]))
            else:
                self.preds.append((p.expr, strides))
                rest.append(Sym("pred", shape, np.dtype(bool), strides=strides, source=len(self.preds) - 1))
        if plan.masker is not None:
            for view in self.views:
                if view.shape != shape and not (view.shape[0] == shape[0] and prod(view.shape[1:]) == 1) or (
                    any(op.view is view and op.dims is not None for op in plan.inputs)
                ):
                    raise Unsupported("a mask on operands of several shapes")
        return clips, rest

    def place(self, number: int) -> Any:
        """What makes two operands the same elements in the same order."""
        view = self.views[number]
        base = self.offset(view)
        return view.slot, base.const, base.terms, view.shape, view.strides, view.access.dtype

    def apart(self, a: int, b: int) -> bool:
        """Whether two operands are the same elements in the same order, or share none."""
        one, two = self.views[a], self.views[b]
        if one.slot != two.slot or one is two or self.place(a) == self.place(b):
            return True
        difference = self.offset(one).add(self.offset(two), -1)
        if difference.terms:
            return False
        (low1, high1), (low2, high2) = (_extent(v, d) for v, d in ((one, difference.const), (two, 0)))
        return high1 <= low2 or high2 <= low1

    def offset(self, view: View) -> Affine:
        """Byte offset of a tile."""
        base = Affine()
        for dim, unit in zip(view.access.dims, view.steps, strict=True):
            base = base.add(dim.base.scale(unit))
        return self.lowering.linear(base.scale(view.itemsize))

    def bounds(self, call: Call, views: list[View], iteration: tuple[int, ...]) -> None:
        """Indices that are not proven inside their tensors."""
        for view in views:
            for _, strides, size, axis in view.bounds:
                if call.shape != iteration or view.shape != iteration:
                    raise Unsupported("an index that may be outside, of a tile of another shape")
                self.lowering.broken.append(Broken(view, axis))
                base = self.lowering.linear(view.access.dims[axis].base)
                call.bounds.append((base, tuple(strides), size, len(self.lowering.broken)))


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


def _extent(view: View, base: int) -> tuple[int, int]:
    """First byte of a tile, and the one after its last."""
    low = high = base
    for n, s in zip(view.shape, view.strides, strict=True):
        if s > 0:
            high += s * (n - 1)
        else:
            low += s * (n - 1)
    return low, high + view.itemsize


def prod_scratch(call: Call) -> int:
    """Bytes of scratch memory of a matrix product."""
    from opennki.execute.build import library

    lib = library().lib
    assert lib is not None
    return int(lib.nki_mm_scratch(C.byref(call.what)))


def _strides(values: tuple[int, ...]) -> Any:
    return (C.c_int64 * abi.RANK)(*values)
