"""Folds over few elements, without folding: the elements of a window as operands of their own, joined by the tree of the fold.

A row is what native code handles at a time, and a window of 3 x 3 makes a row of nine elements: going over such rows costs far more than
the arithmetic. A fold over at most 32 elements has one element for each lane, so that its order (isa/reduce.py) is a plain tree of the
function. Written out, the whole is elementwise over the results: each of the nine elements is a tile that begins elsewhere.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING

from opennki.execute.record import Part, Sym, Unsupported
from opennki.execute.values import folds_of

if TYPE_CHECKING:
    from opennki.execute.program import Elementwise

LANES = 32  # elements of a row up to which each has a lane for itself
ROWS = 32  # rows from which on it pays
FUNCTIONS = frozenset({"add", "multiply", "maximum", "minimum"})

Index = tuple[int, ...]


def unfolded(made: Elementwise) -> list[tuple[Sym, Sym]] | None:
    """The results of a program whose folds are over few elements, over the rows alone; None where it stays as it is."""
    counts = [made.shape[i] for i in made.axes]
    if not made.axes or not 2 <= prod(counts) <= LANES or made.rows < ROWS:
        return None
    if any(f.name not in FUNCTIONS or f.raw for _, value in made.pairs for f in folds_of(value)):
        return None
    if any(value.size != made.rows or out.size != made.rows for out, value in made.pairs):
        return None  # it is also about the elements themselves
    try:
        unfold = _Unfold(made, list(product(*map(range, counts))))
        return [(unfold.leaf(out, None), unfold.value(value, None)) for out, value in made.pairs]
    except Unsupported:
        return None


class _Unfold:
    def __init__(self, made: Elementwise, window: list[Index]) -> None:
        self.made, self.window = made, window
        self.shape = tuple(made.shape[i] for i in made.outer)
        self.memo: dict[tuple[int, Index | None], Sym] = {}

    def value(self, sym: Sym, at: Index | None) -> Sym:
        """A value at one element of the window; None: a value of the row."""
        found = self.memo.get((id(sym), at))
        if found is None:
            found = self.memo[id(sym), at] = self._value(sym, at)
        return found

    def _value(self, sym: Sym, at: Index | None) -> Sym:
        if sym.kind == "tile":
            return self.leaf(sym, at)
        if sym.kind == "const":
            return sym.but(shape=(1,) * len(self.shape), strides=())
        if sym.kind == "fold":
            return self.tree(sym)
        if sym.kind in ("call", "select", "round"):
            inside = None if self.made.is_row(sym) else at
            if inside is None and at is None and sym.size not in (1, self.made.rows):
                raise Unsupported("a value of elements outside of a fold")
            return sym.but(shape=self.shape, args=tuple([self.value(a, inside) for a in sym.args]))
        raise Unsupported(f"{sym.kind} in a window")

    def tree(self, fold: Sym) -> Sym:
        """A fold as its function, element by element."""
        values = [self.value(fold.args[0], at) for at in self.window]
        if fold.args[0].kind == "tile":
            return Sym("tree", self.shape, fold.dtype, tuple(values), fold.name)
        half = LANES // 2
        while half:
            joined = [Sym("call", self.shape, fold.dtype, (a, b), fold.name) for a, b in zip(values, values[half:], strict=False)]
            values = joined + values[len(joined) : half]
            half //= 2
        return values[0]

    def leaf(self, sym: Sym, at: Index | None) -> Sym:
        """A tile as it is walked from row to row."""
        strides = self.made.spread(sym, at is None)
        offset = sum(i * strides[axis] for i, axis in zip(at, self.made.axes, strict=True)) if at is not None else 0
        source = sym.source
        if offset:
            source = Part(source.base, source.offset + offset) if isinstance(source, Part) else Part(source, offset)
        return sym.but(shape=self.shape, strides=tuple([strides[i] for i in self.made.outer]), source=source, axes=())
