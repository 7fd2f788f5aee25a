"""Recorded instructions made again: one that is the same but for where its operands are needs no plan and no recording of its own."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from opennki.execute.instruction import Instruction
from opennki.execute.record import Part, Sym
from opennki.interpret.views import View
from opennki.ir.affine import Affine

if TYPE_CHECKING:
    from opennki.execute.sites import Site


def repeatable(one: Instruction) -> bool:
    """Whether an instruction can be made again: all that it depends on are its operands."""
    return not (
        one.clips or one.guards or one.fetched or one.narrow or one.irregular or one.plan.masker is not None or one.turned
        or any(v.dynamic is not None or v.bounds for v in one.views[one.first :])
        or any(_depends(s) for pair in one.pairs for s in pair)
    )  # fmt: skip


def _depends(value: Sym) -> bool:
    return value.kind in ("pred", "index", "fetched") or any(_depends(a) for a in value.args)


def again(one: Instruction, order: list[int], site: Site) -> Instruction:
    """An instruction like `one`, `order` its accesses by the number of the view."""
    lowering = one.lowering
    made = Instruction.__new__(Instruction)
    made.__dict__.update(one.__dict__)
    plan = made.plan = copy.copy(one.plan)
    plan.instr = site.instr
    plan.loc = lowering.tape.kernel.loc(site.instr.loc)
    views = lowering.views
    first = made.first = len(views)
    made.repeated = True
    made.ranges = site.ranges
    made.touched, made.clips, made.guards, made.fetched, made.turned = [], [], [], [], {}
    made.axes = dict.fromkeys(range(first, first + len(order)), ())
    for n, k in enumerate(order):
        old = one.views[one.first + n]
        view = View.__new__(View)
        view.access, view.slot, offset, terms = site.parts[k][:4]
        view.loc = plan.loc
        view.alloc, view.dims = view.access.alloc, view.access.dims
        view.dtype, view.itemsize, view.shape, view.strides, view.steps = old.dtype, old.itemsize, old.shape, old.strides, old.steps
        view.bounds, view.dynamic, view.what = old.bounds, None, old.what
        lowering.offsets[view] = Affine(offset, terms)
        if not terms:
            lowering.places[first + n] = view.slot, offset, terms, old.shape, old.strides, view.access.dtype
        views.append(view)
    known: dict[int, Sym] = {}
    shift = first - one.first
    made.pairs = [(_moved(out, shift, known), _moved(value, shift, known)) for out, value in one.pairs]
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
