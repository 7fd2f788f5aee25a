"""Fusion: consecutive elementwise instructions as one native program."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from opennki.execute import abi
from opennki.execute.calls import Call
from opennki.execute.instruction import Instruction
from opennki.execute.record import Sym, Unsupported, strides_of
from opennki.execute.values import leaves
from opennki.ir.nodes import Access, Alloc, Instr

if TYPE_CHECKING:
    from opennki.execute.lower import Lowering

MAX_GROUP = 12  # instructions that become one program


class Group:
    """Consecutive elementwise instructions as one program: what one of them stores is at hand for the next, and a tile that nobody else
    reads is not stored at all."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering = lowering
        self.ones: list[Instruction] = []
        self.values: dict[Any, tuple[Sym, Sym]] = {}  # place -> tile, value that it holds

    def add(self, one: Instruction, checked: bool = False) -> bool:
        """Put an instruction into the group, if it can be. `checked`: only if what comes out has a native form; else `made` tells."""
        if not one.joins or len(self.ones) >= MAX_GROUP:
            return False
        try:
            pairs = one.pairs if not self.values else [(out, self.substituted(one, value, {})) for out, value in one.pairs]
            values = dict(self.values)
            for out, value in pairs:
                place = one.place(out.source)
                for other in values:
                    if other != place and not one.disjoint(out.source, values[other][0].source):
                        return False
                values.pop(place, None)
                values[place] = (out, value)
        except Unsupported:
            return False
        before = self.ones, self.values
        self.ones, self.values = [*self.ones, one], values
        if checked and before[0] and self.made() is None:
            self.ones, self.values = before
            return False
        return True

    def kept(self) -> list[tuple[Sym, Sym]]:
        """The results that somebody else uses."""
        inside, views = {o.plan.instr for o in self.ones}, self.lowering.views
        return [pair for pair in self.values.values() if not self.dead(views[pair[0].source].alloc, inside)]

    def made(self) -> list[tuple[list[Call], list[tuple[Access, bool]]]] | None:
        """The calls of the group and what they touch, in parts; None where they have no native form."""
        found = self.parts()
        if found is not None:
            return found
        last = self.ones[-1]
        try:
            return [(last.calls(self.kept(), fused=True), list(last.touched))]
        except Unsupported:
            return None

    def parts(self) -> list[tuple[list[Call], list[tuple[Access, bool]]]] | None:
        """The copies among the results, each for itself, and then the rest (calls, and what they touch): passes can forward a copy that
        is alone. None where it is all one."""
        last, kept = self.ones[-1], self.kept()
        copies = [pair for pair in kept if pair[1].kind == "tile"]
        if not copies or len(kept) == 1:
            return None
        for out, _ in copies:
            if any(not last.disjoint(out.source, leaf.source) for other, value in kept if other is not out
                   for leaf in leaves(value) if leaf.kind == "tile"):  # fmt: skip
                return None  # it would be overwritten before it is read
        rest = [pair for pair in kept if pair[1].kind != "tile"]
        try:
            sets = [*([pair] for pair in copies), *([rest] if rest else [])]
            return [(last.calls(pairs, fused=pairs is rest), list(last.touched)) for pairs in sets]
        except Unsupported:
            return None

    def dead(self, alloc: Alloc, inside: set[Instr]) -> bool:
        """Whether nothing outside of the group uses a tensor."""
        return alloc.kind == "local" and alloc.on_chip and self.lowering.users.get(alloc, set()) <= inside

    def substituted(self, one: Instruction, value: Sym, done: dict[int, Sym]) -> Sym:
        """A value with what the group has computed in the place of the tiles that hold it. Raises Unsupported where a tile holds a part
        of it only."""
        found = done.get(id(value))
        if found is not None:
            return found
        if value.kind == "tile":
            made = self.held(one, value)
        elif value.args:
            made = value.but(args=tuple([self.substituted(one, a, done) for a in value.args]))
        else:
            made = value
        done[id(value)] = made
        return made

    def spread(self, one: Instruction, leaf: Sym) -> tuple[tuple[Sym, Sym], Sym] | None:
        """A value that a tile shows again and again along dimensions of stride 0, and the tile without the repetitions."""
        if 0 not in leaf.strides or not any([n > 1 and s == 0 for n, s in zip(leaf.shape, leaf.strides, strict=True)]):
            return None
        wanted = _without_repetitions(one.place(leaf.source))
        shape = tuple(n if s else 1 for n, s in zip(leaf.shape, leaf.strides, strict=True))
        for place, pair in self.values.items():
            if _without_repetitions(place) == wanted and prod(shape) == pair[0].size:
                return pair, leaf.but(shape=shape)
        return None

    def held(self, one: Instruction, leaf: Sym) -> Sym:
        """The value of a tile."""
        found = self.values.get(one.place(leaf.source))
        spread = None if found is not None else self.spread(one, leaf)
        if spread is not None:
            found, leaf = spread
        if found is None:
            for out, _ in self.values.values():
                if not one.disjoint(leaf.source, out.source):
                    raise Unsupported("a part of what the group has computed")
            return leaf
        out, value = found
        view = one.views[leaf.source if spread is None else out.source]
        walk = strides_of(view.shape, view.strides, leaf.shape) if leaf.size == prod(view.shape) else None
        if walk is None or any(n > 1 and a != b for n, a, b in zip(leaf.shape, leaf.strides, walk, strict=True)):
            raise Unsupported("a tile in another order than it was computed in")
        number = abi.DTYPES.get(one.views[out.source].access.dtype, -1)
        if value.raw:
            if value.kind != "tile" or abi.DTYPES.get(one.views[value.source].access.dtype, -1) != number:
                raise Unsupported("bits inside a group")
            if not leaf.raw:
                value = Sym("tile", value.shape, np.dtype(np.float32), strides=value.strides, source=value.source)
        else:
            if leaf.raw and number > 6:
                raise Unsupported("numbers as bits inside a group")
            if number > 6 or number < 0:
                raise Unsupported("integers inside a group")
            if number:
                value = Sym("round", value.shape, value.dtype, (value,), value=float(number))
        if value.size == 1 and leaf.size > 1:
            return value
        return value if value.shape == leaf.shape else value.reshape(leaf.shape)


def _without_repetitions(place: Any) -> Any:
    """A place, with only the dimensions that lead to other elements."""
    slot, base, terms, shape, strides, dtype = place
    return slot, base, terms, tuple((n, s) for n, s in zip(shape, strides, strict=True) if n > 1 and s), dtype
