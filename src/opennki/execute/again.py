"""Recorded instructions made again: one that is the same but for where its operands are needs no plan and no recording of its own."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from opennki.execute.instruction import Instruction
from opennki.execute.record import Part, Sym
from opennki.interpret.views import View
from opennki.ir.affine import Affine

if TYPE_CHECKING:
    from opennki.execute.lower import Lowering
    from opennki.execute.sites import Site


class Pattern:
    """A recorded instruction without what belongs to its kernel."""

    __slots__ = ("fields", "pairs", "plan", "views")

    def __init__(self, one: Instruction) -> None:
        self.views = [(v.dtype, v.itemsize, v.shape, v.strides, v.steps, v.bounds, v.what) for v in one.views[one.first :]]
        known: dict[int, Sym] = {}
        self.pairs = [(_moved(out, -one.first, known), _moved(value, -one.first, known)) for out, value in one.pairs]
        plan = self.plan = copy.copy(one.plan)
        of_kernel = ("instr", "loc", "layout", "inputs", "outputs", "lazy", "static")
        for name in of_kernel:
            plan.__dict__.pop(name, None)
        self.fields = {
            "joins": one.joins, "single": one.single, "irregular": one.irregular, "whole": one.whole, "by_row": one.by_row,
            "narrow": one.narrow, "repeated": True,
        }  # fmt: skip


def pattern(one: Instruction) -> Pattern | None:
    """What others like an instruction are made from; None where it depends on more than its operands."""
    if (
        one.clips or one.guards or one.fetched or one.narrow or one.irregular or one.plan.masker is not None or one.turned
        or any(v.dynamic is not None or v.bounds for v in one.views[one.first :])
        or any(_depends(s) for pair in one.pairs for s in pair)
    ):  # fmt: skip
        return None
    return Pattern(one)


def _depends(value: Sym) -> bool:
    return value.kind in ("pred", "index", "fetched") or any(_depends(a) for a in value.args)


def again(lowering: Lowering, like: Pattern, order: list[int], site: Site) -> Instruction:
    """An instruction of a pattern, `order` its accesses by the number of the view."""
    made = Instruction.__new__(Instruction)
    made.__dict__.update(like.fields)
    made.lowering, made.views, made.preds, made.indices = lowering, lowering.views, lowering.preds, lowering.indices
    plan = made.plan = copy.copy(like.plan)
    plan.instr = site.instr
    plan.loc = lowering.tape.kernel.loc(site.instr.loc)
    views = lowering.views
    first = made.first = len(views)
    made.ranges = site.ranges
    made.touched, made.clips, made.guards, made.fetched, made.turned = [], [], [], [], {}
    made.axes = dict.fromkeys(range(first, first + len(order)), ())
    for n, k in enumerate(order):
        view = View.__new__(View)
        view.access, view.slot, offset, terms = site.parts[k][:4]
        view.loc = plan.loc
        view.alloc, view.dims = view.access.alloc, view.access.dims
        view.dtype, view.itemsize, view.shape, view.strides, view.steps, view.bounds, view.what = like.views[n]
        view.dynamic = None
        lowering.offsets[view] = Affine(offset, terms)
        if not terms:
            lowering.places[first + n] = view.slot, offset, terms, view.shape, view.strides, view.access.dtype
        views.append(view)
    known: dict[int, Sym] = {}
    made.pairs = [(_moved(out, first, known), _moved(value, first, known)) for out, value in like.pairs]
    return made


def _moved(value: Sym, shift: int, known: dict[int, Sym]) -> Sym:
    """A value with other operands."""
    found = known.get(id(value))
    if found is None:
        made: Any = Sym.__new__(Sym)
        made.__dict__.update(value.__dict__)
        source = value.source
        if source is not None and value.kind == "tile":
            if source.__class__ is int:
                made.source = source + shift
            elif source.__class__ is Part and source.base.__class__ is int:
                made.source = Part(source.base + shift, source.offset)
        if value.args:
            made.args = tuple([_moved(a, shift, known) for a in value.args])
        found = known[id(value)] = made
    return found
