"""One instruction on its way to native code: its operands as symbols, its results as values, and the calls that compute them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from opennki.execute import abi
from opennki.execute.calls import Call
from opennki.execute.program import Program, compile_values, in_order, is_special, leaves
from opennki.execute.record import TRANSLATOR, Sym, Unsupported, const, tile
from opennki.interpret.steps import Operand, Plan
from opennki.interpret.views import View
from opennki.ir.affine import Affine, Range, Var
from opennki.ir.nodes import Access, IndexTile, PredTile
from opennki.ir.verify import call_view
from opennki.isa.declare import Plumbing
from opennki.isa.declare import Tile as TileSpec

if TYPE_CHECKING:
    from opennki.execute.lower import Lowering

MAX_ADDRESSES = 16  # of a call, as in tape.c


@dataclass
class Broken:
    """What is reported when an index of a call is outside: the operand and the dimension."""

    view: View
    axis: int


class Instruction:
    """One instruction: its operands as symbols, its results as pairs of a tile and a value."""

    def __init__(self, lowering: Lowering, plan: Plan, ranges: dict[Var, Range]) -> None:
        self.lowering, self.plan, self.ranges = lowering, plan, ranges
        self.views, self.preds, self.indices = lowering.views, lowering.preds, lowering.indices
        self.touched: list[tuple[Access, bool]] = []
        self.pairs: list[tuple[Sym, Sym]] = []
        self.clips: list[tuple[Affine, int, int]] = []
        self.guards: list[Sym] = []
        self.joins = False
        self.first = len(self.views)

    def record(self) -> None:
        """Run the body over symbols. Raises Unsupported."""
        plan = self.plan
        if plan.decl.family in ("print", "sync", "collective") or plan.decl.suspends:
            raise Unsupported("it acts outside of its tensors")
        if plan.decl.positional and plan.masker is not None:
            raise Unsupported("a mask on positions")
        if plan.decl.mask_dims and plan.masker is not None:
            raise Unsupported("a mask that counts the dimensions of another operand")
        if any(view.dynamic is not None for view, _, _ in plan.outputs):
            raise Unsupported("a runtime index")
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
        for (view, _, _), v in zip(plan.outputs, values, strict=True):
            if 0 in view.shape:
                continue
            out, result = self.out(view), const(v)
            if result.kind == "tile" and self.place(result.source) == self.place(out.source) and _kept(result, out, view.access.dtype):
                continue  # it stays as it is
            self.pairs.append((out, result))
        for i, (one, _) in enumerate(self.pairs):
            if any(not self.disjoint(one.source, other.source) for other, _ in self.pairs[i + 1 :]):
                raise Unsupported("results that overlap")  # the later one counts
        self.clips, self.guards = self.mask()
        self.joins = not (
            self.clips
            or self.guards
            or any(v.bounds for v in self.views[self.first :])
            or any(is_special(v) or v.kind == "exact" for _, v in self.pairs)
        )

    def calls(self, pairs: list[tuple[Sym, Sym]], fused: bool = False) -> list[Call]:
        """The calls that store values in their tiles. Raises Unsupported."""
        plan = self.plan
        outs = {out.source for out, _ in pairs}
        program = Program(
            iteration=plan.iteration,
            dtype_of=lambda source: abi.DTYPES.get(self.views[source].access.dtype, -1),
            keeps_axes=not fused and bool(self.clips or self.guards or any(self.views[s].bounds for s in self.sources(pairs))),
            guards=[] if fused else self.guards,
            same=lambda a, b: self.views[a] is self.views[b] or self.place(a) == self.place(b),
            apart=self.apart,
            meets=lambda a, b: not self.disjoint(a, b),
        )
        made = []
        self.touched = []
        for kind, what, sources, shape in compile_values(program, pairs, fused):
            views = [self.views[s] for s in sources]
            self.touched += [(v.access, s in outs) for s, v in zip(sources, views, strict=True)]
            if len(views) > MAX_ADDRESSES:
                raise Unsupported("more operands than a call takes")
            call = Call(kind, what, [(self.offset(v), v.slot) for v in views], shape)
            if self.clips and not fused:
                if kind not in (abi.K_EW, abi.K_COPY) or shape != plan.iteration:
                    raise Unsupported("a mask on an instruction that is not elementwise")
                call.clips = [(self.lowering.linear(e), axis, stride) for e, axis, stride in self.clips]
            self.bounds(call, views, plan.iteration)
            call.preds = [self.lowering.linear(self.preds[p][0]) for p in program.preds_used]
            call.indices = [self.lowering.linear(self.indices[p][0]) for p in program.indices_used]
            made.append(call)
        return made

    @staticmethod
    def sources(pairs: list[tuple[Sym, Sym]]) -> set[int]:
        """The tiles in values and of results."""
        return {leaf.source for out, value in pairs for leaf in (out, *leaves(value)) if leaf.kind == "tile"}

    def disjoint(self, a: int, b: int) -> bool:
        """Whether two tiles share no memory."""
        one, two = self.views[a], self.views[b]
        return one.slot != two.slot or (one is not two and self.place(a) != self.place(b) and self.apart(a, b))

    def operand(self, op: Operand) -> Sym | None:
        view = op.view
        if view.dynamic is not None:
            raise Unsupported("a runtime index")
        if op.zero is not None:
            raise Unsupported("a mask on an operand")
        self.views.append(view)
        # what is stored as tfloat32 is rounded, bits or not
        raw = self.plan.decl.raw(self.info()) and view.access.dtype != "tfloat32"
        made = tile(len(self.views) - 1, view.shape, view.strides, view.dtype, raw)
        return made if op.fit is None else made.reshape(op.fit)

    def info(self) -> Any:

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
                low, high = value.base.range(self.ranges)
                ends = [s * (n - 1) for s, n in zip(value.strides, value.shape, strict=True)]
                if max(-(low + sum(min(e, 0) for e in ends)), high + sum(max(e, 0) for e in ends)) > 1 << 24:
                    raise Unsupported("index values that float32 does not have")
                self.indices.append((value.base, value.strides))
                kw[param.name] = Sym("index", value.shape, np.dtype(np.float32), strides=tuple(value.strides), source=len(self.indices) - 1)
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
            for view in self.views[self.first :]:
                if (view.shape != shape and not (view.shape[0] == shape[0] and prod(view.shape[1:]) == 1)) or (
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


def _kept(result: Sym, out: Sym, dtype: str) -> bool:
    """Whether a tile that is stored where it was loaded from keeps its bits: in its own order, as bits or as floats that float32 has."""
    return in_order(out, result) and (result.raw or abi.DTYPES.get(dtype, 99) < abi.DTYPES["tfloat32"])


def _extent(view: View, base: int) -> tuple[int, int]:
    """First byte of a tile, and the one after its last."""
    low = high = base
    for n, s in zip(view.shape, view.strides, strict=True):
        if s > 0:
            high += s * (n - 1)
        else:
            low += s * (n - 1)
    return low, high + view.itemsize
