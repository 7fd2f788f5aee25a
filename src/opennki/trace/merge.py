"""Merging the passes over a body: shared prefixes and suffixes once, the rest in nested `If`s."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opennki.ir.affine import Affine, Pred
from opennki.ir.build import flatten
from opennki.ir.nodes import Access, Alloc, DoWhile, For, If, IndexTile, Instr, PredTile, Stmt

__all__ = ["Decision", "Pass", "alternatives", "flatten", "merged", "same"]


@dataclass(frozen=True, slots=True)
class Decision:
    """A side taken: after how many statements of the pass, on what, which side."""

    position: int
    pred: Pred
    choice: bool
    loc: int


@dataclass(frozen=True, slots=True)
class Pass:
    """One run over a body."""

    taken: list[Decision]
    nodes: list[Any]


def alternatives(taken: list[Decision], replayed: int) -> list[list[bool]]:
    """The decision lists of the passes that are still to be made: each new decision flipped."""
    choices = [d.choice for d in taken]
    return [[*choices[:k], not choices[k]] for k in range(replayed, len(choices))]


def merged(passes: list[Pass]) -> list[Stmt]:
    """The statements of all passes over a body."""
    return _merge(passes, 0, 0)


def _merge(passes: list[Pass], depth: int, start: int) -> list[Stmt]:
    first = passes[0]
    if len(first.taken) <= depth:
        return flatten(first.nodes[start:])
    decision = first.taken[depth]
    out = flatten(first.nodes[start:decision.position])
    sides: list[list[Stmt]] = []
    for side in (True, False):
        group = [p for p in passes if p.taken[depth].choice is side]
        sides.append(_merge(group, depth + 1, decision.position) if group else [])
    then, orelse = sides
    tail: list[Stmt] = []
    while then and orelse and same(then[-1], orelse[-1]):
        tail.append(then.pop())
        orelse.pop()
    if then or orelse:
        out.append(If(decision.pred, then, orelse, decision.loc))
    return out + tail[::-1]


def same(a: Any, b: Any) -> bool:
    """Structural equality of statements and operands (tensors and variables by identity; source places do not count)."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Instr):
        return (a.op == b.op and a.engine == b.engine and a.call == b.call and same(a.results, b.results)
                and same(a.operands, b.operands) and same(a.mask, b.mask))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Access):
        return (a.alloc is b.alloc and a.dtype == b.dtype and a.shape == b.shape and a.view == b.view and same(a.mask, b.mask)
                and all(x.strides == y.strides and x.base.key() == y.base.key() and same(x.dyn, y.dyn)
                        for x, y in zip(a.dims, b.dims, strict=True)))
    if isinstance(a, (Pred, Affine)):
        return a.key() == b.key()
    if isinstance(a, IndexTile):
        return a.base.key() == b.base.key() and a.strides == b.strides and a.shape == b.shape
    if isinstance(a, PredTile):
        return same(a.preds, b.preds) and a.shape == b.shape
    if isinstance(a, For):
        return a.var is b.var and a.trips == b.trips and a.kind == b.kind and _bodies(a.body, b.body)
    if isinstance(a, If):
        return same(a.pred, b.pred) and _bodies(a.then, b.then) and _bodies(a.orelse, b.orelse)
    if isinstance(a, DoWhile):
        return same(a.cond, b.cond) and _bodies(a.body, b.body)
    if isinstance(a, Alloc):
        return False
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    return bool(a == b)


def _bodies(a: list[Stmt], b: list[Stmt]) -> bool:
    return len(a) == len(b) and all(map(same, a, b))
