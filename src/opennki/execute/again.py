"""Recorded instructions made again: one that is the same but for where its operands are needs no plan and no recording of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opennki.errors import Loc
from opennki.execute import record
from opennki.execute.instruction import Instruction
from opennki.execute.record import Sym
from opennki.interpret.views import View
from opennki.ir.affine import Affine

if TYPE_CHECKING:
    from opennki.execute.lower import Lowering
    from opennki.execute.sites import Part, Site


_OF_LOOPS = frozenset({"pred", "index", "fetched"})  # values of expressions


class _Plan:
    """What is asked of the plan of an instruction that is made again (see `interpret.steps.Plan`)."""

    __slots__ = ("decl", "instr", "iteration", "loc", "mask_dims", "masker", "raw")


class Pattern:
    """A recorded instruction without what belongs to its kernel. `first`: the number of its first view; `what`: what the views are."""

    __slots__ = ("fields", "first", "pairs", "plan", "what")

    def __init__(self, one: Instruction) -> None:
        self.first, self.pairs = one.first, one.pairs
        self.what = [v.what for v in one.views[one.first :]]
        plan = one.plan
        self.plan = plan.decl, plan.iteration, plan.mask_dims, plan.raw
        self.fields = {
            "joins": one.joins, "single": one.single, "irregular": one.irregular, "whole": one.whole, "by_row": one.by_row,
            "narrow": one.narrow, "dynamic": False, "unproven": False, "repeated": True,
        }  # fmt: skip


def pattern(one: Instruction) -> Pattern | None:
    """What others like an instruction are made from; None where it depends on more than its operands."""
    if (
        one.clips or one.guards or one.fetched or one.narrow or one.irregular or one.plan.masker is not None or one.turned
        or one.dynamic or one.unproven or any([n.kind in _OF_LOOPS for n in one.parts])
    ):  # fmt: skip
        return None
    return Pattern(one)


def again(lowering: Lowering, like: Pattern, order: list[int], site: Site) -> Instruction:
    """An instruction of a pattern, `order` its accesses by the number of the view."""
    made = Instruction.__new__(Instruction)
    made.__dict__.update(like.fields)
    made.lowering, made.views, made.preds, made.indices = lowering, lowering.views, lowering.preds, lowering.indices
    plan: Any = _Plan()
    plan.decl, plan.iteration, plan.mask_dims, plan.raw = like.plan
    plan.instr, plan.loc, plan.masker = site.instr, lowering.tape.kernel.loc(site.instr.loc), None
    made.plan = plan
    views = lowering.views
    first = made.first = len(views)
    made.ranges = site.ranges
    made.touched, made.clips, made.guards, made.fetched, made.turned = [], [], [], [], {}
    made.axes = dict.fromkeys(range(first, first + len(order)), ())
    for what, k in zip(like.what, order, strict=True):
        views.append(placed(lowering, site.parts[k], what, plan.loc))
    known: dict[int, Sym] = {}
    shift = first - like.first
    made.pairs = [(_moved(out, shift, known), _moved(value, shift, known)) for out, value in like.pairs]
    return made


def placed(lowering: Lowering, part: Part, what: str, loc: Loc | None, unproven: list[int] | None = None) -> View:
    """The view of an operand whose place is known: enough for lowering, not for the interpreter. unproven: the axes whose index may be
    outside of the tensor."""
    view = View.__new__(View)
    access, slot, offset, terms, tile, _ = part
    view.access, view.alloc, view.dims, view.shape = access, access.alloc, access.dims, access.shape
    view.slot, view.what, view.loc, view.bounds, view.dynamic = slot, what, loc, [], None
    if unproven:
        view.bounds = [(None, access.dims[axis].strides, access.view_shape[axis], axis) for axis in unproven]
    view.dtype, view.itemsize, view.strides, view.steps = tile.dtype, tile.dtype.itemsize, tile.strides, tile.steps
    lowering.offsets[view] = Affine(offset, terms)
    return view


def _moved(value: Sym, shift: int, known: dict[int, Sym]) -> Sym:
    """A value with other operands."""
    found = known.get(id(value))
    if found is None:
        made: Any = value.but()
        source = value.source
        if source is not None and value.kind == "tile":
            if source.__class__ is int:
                made.source = source + shift
            elif source.__class__ is record.Part and source.base.__class__ is int:
                made.source = record.Part(source.base + shift, source.offset)
        if value.args:
            made.args = tuple([_moved(a, shift, known) for a in value.args])
        found = known[id(value)] = made
    return found
