"""One instruction on its way to native code: its operands as symbols, its results as values, and the calls that compute them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from opennki.execute import abi
from opennki.execute.calls import Call, is_far
from opennki.execute.forms import TRANSLATOR, select
from opennki.execute.places import Reach, reach_of
from opennki.execute.program import Program, compile_values
from opennki.execute.record import FLOAT, INT64, Part, Sym, Unsupported, const, tile
from opennki.execute.steps import Steps
from opennki.execute.values import in_order, leaves
from opennki.interpret.steps import Operand, Plan, turned
from opennki.interpret.views import View
from opennki.ir.affine import Affine, Range, Var
from opennki.ir.nodes import Access, IndexTile, PredTile
from opennki.isa.declare import Plumbing
from opennki.isa.declare import Tile as TileSpec

if TYPE_CHECKING:
    from opennki.execute.lower import Lowering

MAX_ADDRESSES = 16  # of a call that is a single kernel
SINGLE = frozenset({"tile", "const", "pred", "index", "call", "select", "fold", "round"})  # what elementwise programs are made of
WHOLE = frozenset({"matmul", "scan", "pfold"})  # kernels of their own, over tiles
_PLAIN = frozenset({type(None), bool, str, int, float, Access})  # operands that are no expressions
DIRECT = SINGLE | WHOLE | {"exact"}


@dataclass
class Broken:
    """What is reported when an index of a call is outside: the operand and the dimension; `axis` None: the index was read from memory."""

    view: View
    axis: int | None


@dataclass(frozen=True)
class Stream:
    """What random numbers depend on besides the state of the generator: the call site, and the loops and programs around."""

    call: int
    slots: tuple[int, ...]


class Instruction:
    """One instruction: its operands as symbols, its results as pairs of a tile and a value."""

    def __init__(self, lowering: Lowering, plan: Plan, ranges: dict[Var, Range]) -> None:
        self.lowering, self.plan, self.ranges = lowering, plan, ranges
        self.views, self.preds, self.indices = lowering.views, lowering.preds, lowering.indices
        self.touched: list[tuple[Access, bool]] = []
        self.pairs: list[tuple[Sym, Sym]] = []
        self.parts: list[Sym] = []  # all values in the pairs
        self.clips: list[tuple[Affine, int, int]] = []
        self.guards: list[Sym] = []
        self.joins = self.single = self.dynamic = self.unproven = self.irregular = self.whole = self.by_row = False
        self.first = len(self.views)
        self.fetched: list[Sym] = []
        self.narrow: set[int] = set()  # dimensions of the iteration space of which a part may run
        self.axes: dict[int, tuple[int, ...]] = {}  # for each operand, what narrows its dimensions
        self.repeated = False  # its plan is that of another one of its form
        self.turned: dict[int, Any] = {}  # results that have the dimensions of the mask in another order

    def record(self) -> None:
        """Run the body over symbols. Raises Unsupported."""
        plan, decl = self.plan, self.plan.decl
        if decl.family in ("print", "sync", "collective") or decl.suspends:
            raise Unsupported("it acts outside of its tensors")
        self.whole = decl.positional or decl.random  # a mask does not shift positions or the numbers drawn
        if plan.masker is not None:
            self.clips, self.guards = self.mask()
            self.narrow = {axis for _, axis, _ in self.clips if axis >= 0 and not self.whole}
        else:
            self.by_row = any([v.dynamic is not None and any([o.view is v and o.reads for o in plan.inputs]) for v, _, _ in plan.outputs])
            self.narrow = {0} if self.by_row else set()
        kw = dict(plan.static)
        for op in plan.inputs:
            kw[op.name] = self.operand(op)
        if plan.lazy:
            self.lazy(kw)
        if "mask" in decl.index and decl.mask_on:
            kw["mask"] = _product(self.guards)
        value = TRANSLATOR.body(decl.name)(**kw)
        values = [v for v in value if v is not None] if isinstance(value, tuple) else [value]
        if isinstance(value, tuple) and len(value) == len(plan.outputs):
            values = list(value)
        if len(values) != len(plan.outputs):
            raise Unsupported("results that do not match")
        for (view, _, name), v in zip(plan.outputs, values, strict=True):
            if 0 in view.shape:
                continue
            out, result = self.out(view, name), const(v)
            if view.dynamic is None and result.kind == "tile" and self.stays(result, out, view.access.dtype):
                continue  # it stays as it is
            self.pairs.append((out, result))
        self.parts = [n for _, v in self.pairs for n in nodes(v)]
        self.dynamic = self.unproven = False
        for made in self.views[self.first :]:
            if made.dynamic is not None:
                self.dynamic = True
            if made.bounds:
                self.unproven = True
        self.single = not (self.dynamic or (self.whole and plan.masker is not None))
        for n in self.parts if self.single else ():
            if n.kind not in SINGLE or (n.kind == "tile" and n.source.__class__ is not int):
                self.single = False
                break
        self.joins = self.single and not (self.clips or self.guards or self.unproven or (len(self.pairs) > 1 and self.overlap(self.pairs)))

    def under(self, tests: tuple[Affine, ...]) -> None:
        """Results that are stored where no expression is negative, else what is in their tiles. Raises Unsupported."""
        if not self.joins:
            raise Unsupported("a branch around what is not elementwise")
        for n, (out, value) in enumerate(self.pairs):
            view = self.views[out.source]
            there = tile(out.source, out.shape, out.strides, view.dtype, False)
            if not _kept(there, out, view.access.dtype) or (value.raw and value.kind != "tile"):
                raise Unsupported("a result in a branch that float32 does not hold")
            value = Sym("tile", value.shape, FLOAT, strides=value.strides, source=value.source) if value.raw else value
            if value.kind != "const" and value.shape != out.shape:
                value = value.reshape(out.shape)
            for test in tests:
                self.preds.append((test, (0,) * len(out.shape)))
                holds = Sym("pred", out.shape, np.dtype(bool), strides=(0,) * len(out.shape), source=len(self.preds) - 1)
                value = select(holds, value, there)
            self.pairs[n] = out, value
        self.parts = [n for _, v in self.pairs for n in nodes(v)]
        self.calls(self.pairs)  # the interpreter would not know of the branch

    def overlap(self, pairs: list[tuple[Sym, Sym]]) -> bool:
        """Whether results share memory: then the later one counts."""
        outs = [out.source for out, _ in pairs]
        return any(not self.disjoint(a, b) for i, a in enumerate(outs) for b in outs[i + 1 :])

    def stays(self, result: Sym, out: Sym, dtype: str) -> bool:
        """Whether a result is what its tile holds already."""
        source = result.source
        if not isinstance(source, int) or self.views[source].dynamic is not None:
            return False
        return bool(self.place(source) == self.place(out.source)) and _kept(result, out, dtype)

    def calls(self, pairs: list[tuple[Sym, Sym]], fused: bool = False) -> list[Call]:
        """The calls that store values in their tiles. Raises Unsupported."""
        plan = self.plan
        if self.irregular or (self.whole and plan.masker is not None):
            raise Unsupported("a mask on operands of several shapes")
        if len(pairs) > 1 and not fused and self.overlap(pairs):
            raise Unsupported("results that overlap")
        for out, v in () if self.single else pairs:
            if self.views[out.source].dynamic is not None:
                raise Unsupported("a runtime index")
            for n in nodes(v):
                if n.kind not in DIRECT or (n.kind == "tile" and not isinstance(n.source, int)):
                    raise Unsupported(f"{n.kind} in a single kernel")
                if n.kind in WHOLE and any(a.kind not in ("tile", "const") for a in n.args):
                    raise Unsupported("a computed operand")
        outs = {out.source for out, _ in pairs}

        all_views = self.views

        def view_of(source: Any) -> View:
            return all_views[_whole(source)]

        def same(a: Any, b: Any) -> bool:
            if a.__class__ is int and a == b:
                return True
            if _offset(a) != _offset(b):
                return False
            a, b = _whole(a), _whole(b)
            one, two = all_views[a], all_views[b]
            return one is two or (one.slot == two.slot and bool(self.place(a) == self.place(b)))

        def apart(a: Any, b: Any) -> bool:
            one, two = all_views[_whole(a)], all_views[_whole(b)]
            return one.slot != two.slot or (self.apart if _offset(a) == _offset(b) else self.disjoint)(_whole(a), _whole(b))

        program = Program(
            iteration=plan.iteration,
            dtype_of=lambda source: abi.DTYPES.get(view_of(source).access.dtype, -1),
            keeps_axes=not fused and bool(
                self.clips or self.guards or (self.unproven and any(self.views[s].bounds for s in self.sources(pairs)))
            ),
            guards=[] if fused else self.guards,
            same=same,
            apart=apart,
            meets=lambda a, b: not self.disjoint(_whole(a), _whole(b)),
            far=lambda source: is_far(view_of(source).alloc),
            parts=True,
        )
        made = []
        self.touched = []
        for kind, what, sources, shape in compile_values(program, pairs, fused):
            if len(sources) > MAX_ADDRESSES and (len({_whole(s) for s in sources}) > MAX_ADDRESSES or len(sources) > abi.MAX_ADDRESSES):
                raise Unsupported("more operands than a call takes")
            views, addresses, origins, touched = [], [], [], {}
            for s in sources:
                number, offset = (s.base, s.offset) if s.__class__ is Part else (s, 0)
                view, written = all_views[number], s in outs
                views.append(view)
                origins.append((number, offset))
                addresses.append((self.begin(view).add(offset), view.slot))
                touched[view, written] = view.access, written
            self.touched += touched.values()
            call = Call(kind, what, addresses, shape, sources=origins)
            if self.clips and not fused:
                if kind not in (abi.K_EW, abi.K_COPY) or shape != plan.iteration:
                    raise Unsupported("a mask on an instruction that is not elementwise")
                call.clips = list(self.clips)
            self.bounds(call, views, plan.iteration)
            if program.preds_used or program.indices_used:
                call.preds = [self.preds[p][0] for p in program.preds_used]
                call.indices = [self.indices[p][0] for p in program.indices_used]
            made.append(call)
        return made

    def steps(self) -> Call:
        """The call that computes it in steps. Raises Unsupported."""
        steps = Steps(self)
        call = steps.call()
        writes = {out.source for out, _ in self.pairs}
        self.touched = [(self.views[n].access, n in writes) for n in steps.numbers]
        return call

    def report(self, view: View, axis: int | None) -> int:
        """The number of the error of an index that is outside."""
        self.lowering.broken.append(Broken(view, axis))
        return len(self.lowering.broken)

    @staticmethod
    def sources(pairs: list[tuple[Sym, Sym]]) -> set[int]:
        """The tiles in values and of results."""
        return {leaf.source for out, value in pairs for leaf in (out, *leaves(value)) if leaf.kind == "tile"}

    def disjoint(self, a: int, b: int) -> bool:
        """Whether two tiles share no memory."""
        one, two = self.views[a], self.views[b]
        return one.slot != two.slot or (one is not two and self.place(a) != self.place(b) and self.apart(a, b))

    def operand(self, op: Operand) -> Sym | None:
        view, plan = op.view, self.plan
        if view.dynamic is not None and not op.reads:
            return None
        number = len(self.views)
        self.views.append(view)
        # what is stored as tfloat32 is rounded, bits or not
        raw = plan.raw and view.access.dtype != "tfloat32"
        axes = self.axes[number] = self.narrowed(op.name, op.dims, view.shape) if self.narrow else ()
        if view.dynamic is not None:
            made = Sym("fetched", view.shape, view.dtype, source=number, raw=True, axes=axes)
            self.fetched.append(made)
            made = made if raw else made.astype(np.float32)
        else:
            made = tile(number, view.shape, view.strides, view.dtype, raw, axes)
        if op.zero is not None:
            there = _product(self.predicates(view.access.mask, view.shape, ()))
            made = select(there, made, np.zeros((), view.dtype if raw else np.float32))
        return made if op.fit is None else made.reshape(op.fit)

    def narrowed(self, name: str, dims: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The dimension of the iteration space that narrows each dimension of an operand (as `interpret.mask.clip` has it)."""
        decl, iteration = self.plan.decl, self.plan.iteration
        if dims is None and decl.mask_on and name != decl.mask_on and shape != iteration:
            dims = (0,)
        out = []
        for j, n in enumerate(shape):
            k = j if dims is None else (dims[j] if j < len(dims) else None)
            fixed = k is None or k >= len(iteration) or n != iteration[k] or (n == 1 and dims is None)
            out.append(-1 if fixed or k not in self.narrow else k)
        return tuple(out)

    def lazy(self, kw: dict[str, Any]) -> None:
        """Operands that are expressions of loop indices."""
        plan = self.plan
        for param, value in zip(plan.decl.params, plan.instr.operands, strict=True):
            if value.__class__ in _PLAIN and param.spec.__class__ is not Plumbing:
                continue
            if isinstance(param.spec, Plumbing):
                if param.spec.kind == "stream":
                    kw[param.name] = Stream(plan.instr.call, tuple(self.lowering.loops))
                continue
            if isinstance(value, PredTile):
                shape = value.shape or plan.iteration
                kw[param.name] = _product(self.predicates(value.preds, shape, self.everywhere(shape)))
            elif isinstance(value, IndexTile):
                kw[param.name] = self.index(value.base, value.strides, value.shape)
            elif isinstance(value, Affine):
                made = self.index(value, (), ())
                exact = isinstance(param.spec, TileSpec) and not plan.raw
                kw[param.name] = made if exact and made.kind == "index" else made.astype(np.float32) if exact else _wide(made)
            elif isinstance(value, tuple) and any(isinstance(v, Affine) for v in value):
                kw[param.name] = tuple(_wide(self.index(v, (), ())) if isinstance(v, Affine) else v for v in value)

    def everywhere(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What narrows values over the iteration space."""
        if not self.narrow or shape != self.plan.iteration:
            return ()
        return tuple(j if j in self.narrow else -1 for j in range(len(shape)))

    def index(self, base: Affine, strides: tuple[int, ...], shape: tuple[int, ...]) -> Sym:
        """An index expression: numbers where float32 has them all, else 64-bit integers."""
        self.indices.append((base, strides))
        made = Sym("index", shape, np.dtype(np.float32), strides=tuple(strides), source=len(self.indices) - 1, axes=self.everywhere(shape))
        return _wide(made) if is_large(base, strides, shape, self.ranges) else made

    def predicates(self, preds: Iterable[Any], shape: tuple[int, ...], axes: tuple[int, ...]) -> list[Sym]:
        """Predicates as truths."""
        made = []
        for p in preds:
            self.preds.append((p.expr, p.strides))
            strides = tuple(p.strides or (0,) * len(shape))
            made.append(Sym("pred", shape, np.dtype(bool), strides=strides, source=len(self.preds) - 1, axes=axes))
        return made

    def out(self, view: View, name: str) -> Sym:
        """A result as a tile symbol."""
        number = len(self.views)
        self.views.append(view)
        dims = self.plan.mask_dims.get(name)
        axes = self.axes[number] = self.narrowed(name, dims, view.shape) if self.narrow else ()
        if dims is not None and turned(dims, self.plan.iteration, view.shape):
            self.turned[number] = dims
        return tile(number, view.shape, view.strides, view.dtype, True, axes)

    def mask(self) -> tuple[list[tuple[Affine, int, int]], list[Sym]]:
        """Clips of single axes, and predicates that are left."""
        plan = self.plan
        clips: list[tuple[Affine, int, int]] = []
        rest: list[Any] = []
        shape = plan.iteration
        for p in plan.instr.mask:
            strides = tuple(s if n > 1 else 0 for s, n in zip(p.strides or (0,) * len(shape), shape, strict=True))
            moving = [j for j, s in enumerate(strides) if s]
            if len(moving) < 2:
                clips.append((p.expr, *((moving[0], strides[moving[0]]) if moving else (-1, 0))))
            if len(moving) > 1 or (moving and self.whole):
                rest.append(p)
        self.irregular = bool(plan.mask_dims)
        for view in [op.view for op in plan.inputs] + [v for v, _, _ in plan.outputs]:
            if (view.shape != shape and not (view.shape[0] == shape[0] and prod(view.shape[1:]) == 1)) or (
                any(op.view is view and op.dims is not None for op in plan.inputs)
            ):
                self.irregular = True
        narrow = {axis for _, axis, _ in clips if axis >= 0 and not self.whole}
        axes = tuple(j if j in narrow else -1 for j in range(len(shape))) if narrow else ()
        return clips, self.predicates(rest, shape, axes)

    def place(self, number: int) -> Any:
        """What makes two operands the same elements in the same order."""
        known = self.lowering.places
        found = known.get(number)
        if found is None:
            view, found = self.views[number], number
            if view.dynamic is None:
                base = self.begin(view)
                found = view.slot, base.const, base.terms, view.shape, view.strides, view.access.dtype
            known[number] = found
        return found

    def apart(self, a: int, b: int) -> bool:
        """Whether two operands are the same elements in the same order, or share none."""
        one, two = self.views[a], self.views[b]
        if one.slot != two.slot or (one is two and one.dynamic is None) or self.place(a) == self.place(b):
            return True
        if one.dynamic is not None or two.dynamic is not None:
            return False
        difference = self.begin(one).add(self.begin(two), -1)
        return _reach(one).apart_along(_reach(two), difference)

    def begin(self, view: View) -> Affine:
        """Byte offset of a tile."""
        known = self.lowering.offsets
        found = known.get(view)
        if found is None:
            found = Affine()
            for dim, unit in zip(view.access.dims, view.steps, strict=True):
                if dim.base.terms or dim.base.const:
                    found = found.add(dim.base.scale(unit * view.itemsize))
            known[view] = found
        return found

    def bounds(self, call: Call, views: list[View], iteration: tuple[int, ...]) -> None:
        """Indices that are not proven inside their tensors."""
        for view in views:
            for _, strides, size, axis in view.bounds or ():
                if call.shape != iteration or view.shape != iteration:
                    raise Unsupported("an index that may be outside, of a tile of another shape")
                base = view.access.dims[axis].base
                call.bounds.append((base, tuple(strides), 0, 0, size, self.report(view, axis)))


def is_large(base: Affine, strides: tuple[int, ...], shape: tuple[int, ...], ranges: dict[Var, Range]) -> bool:
    """Whether float32 may not hold each value of an index expression."""
    low, high = base.range(ranges)
    ends = [s * (n - 1) for s, n in zip(strides, shape, strict=True)]
    return max(-(low + sum(min(e, 0) for e in ends)), high + sum(max(e, 0) for e in ends)) > 1 << 24


def _whole(source: Any) -> int:
    """Number of the operand that a source is, or is a part of."""
    return source.base if source.__class__ is Part else source


def _offset(source: Any) -> int:
    """Where in its operand a source begins, in bytes."""
    return source.offset if source.__class__ is Part else 0


def nodes(value: Sym) -> list[Sym]:
    """A value and all of its parts, each once."""
    if not value.args:
        return [value]
    found = {id(value)}
    stack, out = [value], []
    while stack:
        one = stack.pop()
        out.append(one)
        for a in one.args:
            if id(a) not in found:
                found.add(id(a))
                stack.append(a)
    return out


def _product(truths: list[Sym]) -> Any:
    """Whether all of the truths hold; None where there are none."""
    made: Any = None
    for t in truths:
        made = t if made is None else made & t
    return made


def _wide(index: Sym) -> Sym:
    """An index expression as 64-bit integers."""
    if index.kind != "index":
        return index
    return Sym("wide", index.shape, INT64, (index,), "index", axes=index.axes)


def _kept(result: Sym, out: Sym, dtype: str) -> bool:
    """Whether a tile that is stored where it was loaded from keeps its bits: in its own order, as bits or as floats that float32 has."""
    return in_order(out, result) and (result.raw or abi.DTYPES.get(dtype, 99) < abi.DTYPES["tfloat32"])


def _reach(view: View) -> Reach:
    """How far a tile reaches."""
    return reach_of(view.shape, view.strides, view.itemsize)
