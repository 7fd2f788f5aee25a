"""From the Kernel IR to the program of the event loop: instructions with their numbers and cells, loops, branches, buffers that come and
go."""
from __future__ import annotations

from typing import Any

from opennki.ir.nodes import Alloc, DoWhile, For, If, Instr, Kernel, Stmt
from opennki.ir.verify import accesses, iteration_shape
from opennki.isa.declare import ISA
from opennki.isa.target import Target
from opennki.timing import costs
from opennki.timing.hoist import folded, hoisted, in_order_of_need
from opennki.timing.links import Links
from opennki.timing.resident import with_resident_loads
from opennki.timing.tensors import Body, Family, Ref, Ring, assign_buffers, reference, renames, settle, walk
from opennki.timing.terms import Clip, Slots, Terms, slots_of

OP, LOOP, BRANCH, TAKE, FREE, RENEW = range(6)


class Op:
    """An instruction. `reads` and `writes` are its cells, `chained` those that it accumulates in; `held`: the cells of the stationary
    operand; `numbers`: what one execution takes, by what a mask leaves."""

    __slots__ = ("chained", "clip", "engine", "held", "index", "instr", "kind", "loc", "loops", "name", "numbers", "ordered", "ports",
                 "reads", "shape", "table", "writes")

    def __init__(self, index: int, instr: Instr, engine: int) -> None:
        self.kind, self.index, self.instr, self.engine = OP, index, instr, engine
        self.name, self.loc = instr.op, instr.loc
        self.reads: list[Ref] = []
        self.writes: list[Ref] = []
        self.chained: list[Ref] = []
        self.held: Ref | None = None
        self.clip: Clip | None = None
        self.shape: tuple[int, ...] = ()
        self.numbers: dict[Any, costs.Numbers] = {}
        self.table = -1
        self.ports = 0
        self.ordered = False
        self.loops: tuple[int, ...] = ()


class Loop:
    """A loop. `lo` to `hi` are the instructions inside, `guards` the conditions inside that depend on its index, with the loops around
    them; `level`: loops around its body; `inner`: tensors that live inside."""

    __slots__ = ("body", "guards", "hi", "inner", "kind", "level", "lo", "rings", "slot", "trips")

    def __init__(self, slot: int, trips: int, level: int) -> None:
        self.kind, self.slot, self.trips, self.level = LOOP, slot, trips, level
        self.body: list[Any] = []
        self.guards: list[tuple[Terms, int, int, tuple[tuple[int, int], ...]]] = []
        self.lo = self.hi = 0
        self.inner: list[Family] = []
        self.rings: list[Ring] = []


class Branch:
    """A condition: `then` where the expression is not negative."""

    __slots__ = ("kind", "orelse", "terms", "then")

    def __init__(self, terms: Terms) -> None:
        self.kind, self.terms = BRANCH, terms
        self.then: list[Any] = []
        self.orelse: list[Any] = []


class Buffer:
    """A tensor gets a buffer (TAKE), gives it back (FREE), or changes it for another (RENEW)."""

    __slots__ = ("family", "kind")

    def __init__(self, kind: int, family: Family) -> None:
        self.kind, self.family = kind, family


class Program:
    """A lowered kernel."""

    def __init__(self, kernel: Kernel, target: Target, links: Links | None = None) -> None:
        self.kernel, self.target, self.links = kernel, target, links or Links(kernel, target)
        self.slots = Slots()
        self.grid = [self.slots.slot(v) for v in kernel.grid]
        self.ops: list[Op] = []
        self.warnings: list[str] = []
        stmts = in_order_of_need(hoisted(folded(kernel.body)))
        self._analyse(stmts)
        resident = with_resident_loads(stmts, target.sbuf_usable_bytes - self.least["sbuf"])
        if resident is not stmts:
            stmts = resident
            self._analyse(stmts)
        self.engines = _place(stmts, target, self.started)
        self.cells = max((f.base + f.cells for f in self.tracked if f.table is None), default=0)
        self.cells = max([self.cells, *(t + f.cells for f in self.tracked if f.table is not None for t in f.table)])
        self._loops: list[Loop] = []
        self._env: list[tuple[int, int]] = []
        self.body = self._body(stmts, ordered=False)
        for space, capacity in (("sbuf", target.sbuf_usable_bytes), ("psum", target.psum_partition_bytes)):
            if self.used[space] > capacity:
                self.warnings.append(f"tensors alive at once need {self.used[space]} bytes of {space.upper()} per partition, {capacity} "
                                     "are there: what the compiler would spill is not in the estimate")

    def _analyse(self, stmts: list[Stmt]) -> None:
        self.bodies: dict[int, Body] = {}
        self.families: dict[Alloc, Family] = {}
        homes: dict[Alloc, Body] = {}
        top = walk(stmts, None, None, 0, self.bodies, self.families, homes)
        self.started = _started(self.families)
        self.tracked = settle(self.kernel, self.families, homes, top)
        self.rings, self.used, self.least = assign_buffers(list(self.bodies.values()), self.target)

    def _body(self, stmts: list[Stmt], ordered: bool) -> list[Any]:
        body = self.bodies[id(stmts)]
        take: dict[int, list[Family]] = {}
        free: dict[int, list[Family]] = {}
        for family in body.uses:
            take.setdefault(family.first, []).append(family)
            free.setdefault(family.last, []).append(family)
        out: list[Any] = []
        for index, stmt in enumerate(stmts):
            out += [Buffer(TAKE, f) for f in take.get(index, ())]
            if isinstance(stmt, Instr):
                op = self._op(stmt, ordered, body, index)
                if op is not None:
                    out += [Buffer(RENEW, f) for f in self._renewed(op, stmt, body, index)]
                    out.append(op)
            elif isinstance(stmt, For):
                out.append(self._for(stmt, ordered))
            elif isinstance(stmt, If):
                branch = Branch(self.slots.compile(stmt.pred.expr))
                self._guard(branch.terms, 0, 0)
                branch.then, branch.orelse = self._body(stmt.then, ordered), self._body(stmt.orelse, ordered)
                out.append(branch)
            elif isinstance(stmt, DoWhile):
                self.warnings.append("a loop until a condition is counted once: how often it runs depends on data")
                out += self._body(stmt.body, ordered)
            out += [Buffer(FREE, f) for f in free.get(index, ())]
        return out

    def _for(self, stmt: For, ordered: bool) -> Loop:
        loop = Loop(self.slots.slot(stmt.var), stmt.trips, len(self._loops) + 1)
        loop.lo = len(self.ops)
        self._loops.append(loop)
        body = self.bodies[id(stmt.body)]
        loop.body = self._body(stmt.body, ordered or "no_reorder()" in stmt.directives)
        self._loops.pop()
        loop.hi = len(self.ops)
        loop.level = body.loops
        inside = _within(body)
        loop.inner = [f for f in self.tracked if f.table is None and f.alloc.on_chip and id(f.body) in inside]
        loop.rings = [r for r in self.rings if id(r.body) in inside]
        return loop

    def _guard(self, terms: Terms, stride: int, size: int) -> None:
        """Tell every open loop whose index an expression depends on about it."""
        used = slots_of(terms)
        for i, loop in enumerate(self._loops):
            if loop.slot in used:
                loop.guards.append((terms, stride, size, tuple((x.slot, x.trips) for x in self._loops[i + 1:] if x.slot in used)))

    def _renewed(self, op: Op, instr: Instr, body: Body, index: int) -> list[Family]:
        if op.clip is not None or op.chained:
            return []
        refs = {r.family: r for r in op.writes}
        return [self.families[a.alloc] for a, _, written in accesses(instr)
                if written and a.space != "register" and self.families[a.alloc] in refs
                and renames(self.families[a.alloc], a, refs[self.families[a.alloc]], body, index)
                and not any(r.family is self.families[a.alloc] for r in op.reads)]

    def _op(self, instr: Instr, ordered: bool, body: Body, index: int) -> Op | None:
        if instr in self.started:
            return None
        decl = ISA[instr.op]
        engine = self.engines[instr]
        op = Op(len(self.ops), instr, engine)
        op.ordered = ordered
        op.loops = tuple(x.slot for x in self._loops)
        op.shape = iteration_shape(decl, instr)
        if instr.mask and len(op.shape) and all(len(p.strides) in (0, len(op.shape)) for p in instr.mask):
            clip = Clip(instr.mask, op.shape, self.slots)
            if clip.narrows:
                op.clip = clip
                for terms, stride, size in clip.expressions():
                    self._guard(terms, stride, size)
        op.table = costs.table_of(instr, engine)
        pe = decl.pe is not None and engine == costs.TENSOR
        spaces = set()
        for access, read, written in accesses(instr):
            if access.space == "register":
                continue
            spaces.add(access.space)
            family = self.families[access.alloc]
            if family.ring is not None and (id(body.stmts), index) not in family.places:
                continue
            ref = reference(family, access, self.slots)
            if ref is None:
                continue
            if read and written and pe:
                op.chained.append(ref)
            elif written:
                op.writes.append(ref)
                if read:
                    op.reads.append(ref)
            else:
                op.reads.append(ref)
        if pe:
            from opennki.ir.cost import cost_view
            view = cost_view(instr, self.target)
            assert decl.pe is not None
            stationary = instr.operands[decl.index[decl.pe(view, self.target).stationary]]
            op.held = reference(self.families[stationary.alloc], stationary, self.slots)
        op.ports = self._ports(engine, spaces)
        if op.clip is None:
            op.numbers[None] = costs.numbers(instr, engine, self.target, None, op.shape, self.links)
        self.ops.append(op)
        return op

    def _ports(self, engine: int, spaces: set[str]) -> int:
        """Bits of the memory ports that exclude another engine on NeuronCore-v2: 1 SBUF of Vector and GpSimd, 2 PSUM of Vector and
        Scalar."""
        if self.target.generation >= 3:
            return 0
        bits = 0
        if engine in (costs.VECTOR, costs.GPSIMD) and "sbuf" in spaces:
            bits |= 1
        if engine in (costs.VECTOR, costs.SCALAR) and "psum" in spaces:
            bits |= 2
        return bits


def _started(families: dict[Alloc, Family]) -> set[Instr]:
    """Instructions that only clear a PSUM tensor which the Tensor Engine then writes: its first product of a group overwrites, so that
    the compiler leaves them out. They take no time and do not count as uses."""
    found: set[Instr] = set()
    for alloc, family in families.items():
        if alloc.space != "psum":
            continue
        clears, products = [], 0
        for use in family.uses:
            stmt = use[3].stmts[use[4]]
            if use[2] and isinstance(stmt, Instr):
                if ISA[stmt.op].pe is not None and stmt.engine == "tensor":
                    products += 1
                elif sum(1 for _ in accesses(stmt)) == 1:
                    clears.append((use, stmt))
                else:
                    clears.clear()
                    break
        if products:
            for use, stmt in clears:
                found.add(stmt)
                family.uses.remove(use)
    return found


def _place(body: list[Stmt], target: Target, started: set[Instr]) -> dict[Instr, int]:
    """The engine of each instruction. One that the compiler may move goes there where that is sooner, as long as that engine does not
    become the busiest of all; then it goes to the one with less to do (active fractions of published rows 4, 6, 8 and 12)."""
    load = [0.0] * len(costs.ENGINE_NAMES)
    placed: dict[Instr, int] = {}
    free: list[tuple[Instr, int, list[tuple[int, float]]]] = []
    stack: list[tuple[list[Stmt], int]] = [(body, 1)]
    while stack:
        stmts, times = stack.pop()
        for stmt in stmts:
            if isinstance(stmt, Instr):
                if stmt in started:
                    continue
                options = costs.choices(stmt, target)
                if len(options) == 1:
                    placed[stmt] = options[0][0]
                    load[options[0][0]] += options[0][1] * times
                else:
                    free.append((stmt, times, options))
            elif isinstance(stmt, For):
                stack.append((stmt.body, times * stmt.trips))
            elif isinstance(stmt, If):
                stack += [(stmt.then, times), (stmt.orelse, times)]
            elif isinstance(stmt, DoWhile):
                stack.append((stmt.body, times))
    for stmt, times, options in free:
        first = min(options, key=lambda o: o[1])
        if load[first[0]] + first[1] * times > max(x for i, x in enumerate(load) if i != first[0]):
            first = min(options, key=lambda o: load[o[0]] + o[1] * times)
        placed[stmt] = first[0]
        load[first[0]] += first[1] * times
    return placed


def _within(body: Body) -> set[int]:
    inside, stack = set(), [body]
    while stack:
        b = stack.pop()
        inside.add(id(b))
        stack += b.children
    return inside
