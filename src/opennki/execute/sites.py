"""Instructions as those of a form: what they are but for where their operands are, and where those are; and lines of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opennki.execute import record
from opennki.execute.again import pattern
from opennki.execute.instruction import Instruction, is_large
from opennki.execute.places import Reach, reach_of
from opennki.ir.affine import Affine, Pred, Range, Var
from opennki.ir.nodes import Access, IndexTile, Instr, PredTile
from opennki.isa import dtypes

if TYPE_CHECKING:
    from opennki.execute.group import Group
    from opennki.execute.templates import Node

Part = tuple[Access, int, int, Any, "Tile", Any]


class Tile:
    """The form of an operand. `dims`: for each dimension of the tensor the bytes from one index to the next, and the least and the
    greatest index that its tile may begin at; `place`: what has to be equal, besides where it begins, for two operands to be the same
    elements in the same order; `shared`: it is on chip, and large enough for those who read it to be one; `dtype`, `steps`, `strides`: as a
    view of it has them."""

    __slots__ = ("dims", "dtype", "empty", "number", "place", "reach", "shared", "steps", "strides")

    def __init__(self, number: int, access: Access, places: dict[Any, int]) -> None:
        self.dtype = dtypes.storage(access.dtype)
        unit = item = self.dtype.itemsize
        self.number, shape = number, access.shape
        strides = [0] * len(shape)
        dims, steps = [], []
        for dim, size in zip(reversed(access.dims), reversed(access.view_shape), strict=True):
            low, high = 0, size - 1
            for j, s in enumerate(dim.strides):
                if s:
                    strides[j] += s * unit
                    if s > 0:
                        high -= s * (shape[j] - 1)
                    else:
                        low -= s * (shape[j] - 1)
            dims.append((unit, low, high))
            steps.append(unit // item)
            unit *= size
        self.dims, self.steps, self.strides = dims[::-1], tuple(steps[::-1]), tuple(strides)
        self.empty = 0 in shape
        self.shared = access.alloc.on_chip and access.size > shape[0]
        self.reach: Reach = reach_of(shape, self.strides, item)
        self.place = places.setdefault((shape, self.strides, access.dtype), len(places))


class Form:
    """What an instruction is but for where its operands are: `joins`: see `Instruction`; `order`: for each of its views the number of the
    access; `outs`: the accesses that it stores to; `uses`: those that it reads or stores to, and which; `pattern`: what others are made
    from (see `execute.again`); `template`: of the instruction by itself, where it joins no others, and the lowering that made it."""

    __slots__ = ("joins", "number", "order", "outs", "pattern", "template", "uses")

    def __init__(self, number: int, one: Instruction, accesses: list[Access]) -> None:
        self.number = number
        self.pattern = pattern(one)
        self.template: tuple[Any, int] | None = None
        self.joins, first = one.joins, one.first
        numbers: dict[int, int] = {}
        for n, access in enumerate(accesses):
            numbers.setdefault(id(access), n)
        self.order = order = [numbers[id(v.access)] for v in one.views[first:]]
        self.outs = outs = [order[out.source - first] for out, _ in one.pairs]
        used = set(outs)
        for leaf in one.parts:
            if leaf.kind in ("tile", "fetched"):
                base = leaf.source.base if leaf.source.__class__ is record.Part else leaf.source
                if base.__class__ is int:
                    used.add(order[base - first])
        self.uses = [(n, n in outs) for n in sorted(used)]


class Site:
    """One instruction of a line. `parts`: for each of its accesses the access, the slot of its tensor, where in it it begins (bytes, and
    terms), its form, and a name that is equal for equal places. `exprs`: the expressions of its masks, and those that are operands;
    `tests`: those of the branches that it is in, if it shall not stay there (the last ones of `exprs`). `unproven`: the dimensions whose
    index is not proven to be inside, as number of the part and axis; `starts`: of parts with runtime indices, where they begin
    without them."""

    __slots__ = ("exprs", "form", "instr", "order", "parts", "ranges", "real", "starts", "tests", "unproven")

    def __init__(self, instr: Instr, ranges: dict[Var, Range], tests: tuple[Affine, ...] = ()) -> None:
        self.instr, self.ranges, self.tests = instr, ranges, tests
        self.parts: list[Part] = []
        self.exprs: list[Affine] = []
        self.unproven: list[tuple[int, int]] = []
        self.starts: dict[int, Affine] = {}
        self.form: Any = None
        self.real: Instruction | None = None
        self.order = 0


def constant(value: Any, exprs: list[Affine], ranges: dict[Var, Range]) -> Any:
    """What has to be equal for two operands that are no tiles to be the same but for their expressions, which are collected."""
    kind = value.__class__
    if value is None or kind is str:
        return value
    if kind is float:
        return kind, value.hex()  # -0.0 is not 0.0, and NaN is NaN
    if kind is tuple:
        return kind, *[constant(v, exprs, ranges) for v in value]
    if kind is PredTile:
        return kind, value.shape, predicates(value.preds, exprs)
    if kind is Affine:
        exprs.append(value)
        return kind, is_large(value, (), (), ranges)
    if kind is IndexTile:
        exprs.append(value.base)
        return kind, value.strides, value.shape, is_large(value.base, value.strides, value.shape, ranges)
    return kind, value


def predicates(preds: tuple[Pred, ...], exprs: list[Affine]) -> Any:
    exprs += [p.expr for p in preds]
    return "where", *[p.strides for p in preds]


def relation(part: Part, offset: int, terms: Any, tile: Tile) -> Any:
    """How an operand relates to another one of its tensor: the same, apart, or how far from it."""
    _, _, begin, here, own, _ = part
    delta = begin - offset
    if terms == here:
        if delta == 0 and own.place == tile.place:
            return "same"
        return "apart" if own.reach.apart(tile.reach, delta) else delta
    difference = Affine(delta, here).add(Affine(0, terms), -1)
    return "apart" if own.reach.apart_along(tile.reach, difference) else "unknown"


class Place:
    """A place that a line uses; `name` is equal for equal places."""

    __slots__ = ("line", "name", "number", "offset", "terms", "tile", "written")

    def __init__(self, line: Line, part: Part) -> None:
        _, _, self.offset, self.terms, self.tile, self.name = part
        self.line, self.number, self.written = line, len(line.places), False


class Line:
    """Instructions that belong together: each of them meets one before it in memory. `order`: the number of the first one."""

    __slots__ = ("group", "node", "order", "places", "sites")

    def __init__(self, node: Node, order: int) -> None:
        self.node, self.order = node, order
        self.group: Group | None = None  # where instructions had to be recorded
        self.sites: list[Site] = []
        self.places: dict[Any, Place] = {}
