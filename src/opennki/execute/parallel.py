"""Which loops run on several threads: those whose iterations provably share nothing but what they only read.

The proof is by windows: along some dimension, everything that an iteration touches of a tensor that the loop writes lies in a window that
moves with the loop index by at least its own length. Results do not depend on the number of threads: an iteration is computed by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from opennki.ir.affine import Range, Var
from opennki.ir.nodes import Access, Alloc, DoWhile, For, If, Instr, Stmt

WORTH = 1 << 17  # elements that a loop handles, from which threads pay

Use = tuple[Access, bool, dict[Var, Range]]  # access, whether it is written, the ranges of the loops around it


Touched = dict[Instr, list[tuple[Access, bool]]]


def independent(loop: For, ranges: dict[Var, Range], touched: Touched, programs: bool = False) -> set[Alloc] | None:
    """The tensors that each iteration has for itself, or None where iterations are not proven independent. `touched`: what each
    instruction reads (False) and writes (True). `programs`: the iterations are the programs of a grid, which share the tensors in
    shared HBM that they make."""
    own: set[Alloc] = set()
    uses: dict[Alloc, list[Use]] = {}
    for stmt, inner in _walk(loop.body, {**ranges, loop.var: (0, loop.trips - 1)}):
        if isinstance(stmt, Alloc):
            if not (programs and stmt.space == "shared_hbm"):
                own.add(stmt)
        elif isinstance(stmt, DoWhile):
            if stmt.cond is not None:
                uses.setdefault(stmt.cond.alloc, []).append((stmt.cond, False, inner))
        elif isinstance(stmt, Instr):
            for access, written in touched[stmt]:
                uses.setdefault(access.alloc, []).append((access, written, inner))
    for alloc, seen in uses.items():
        if alloc in own:
            if alloc.space == "shared_hbm":
                return None  # made in a loop: one memory for all iterations
            continue
        if any(written for _, written, _ in seen) and not _windows(loop.var, seen):
            return None
    return own


def _walk(body: list[Stmt], ranges: dict[Var, Range]) -> Iterator[tuple[Stmt, dict[Var, Range]]]:
    for stmt in body:
        yield stmt, ranges
        if isinstance(stmt, For):
            yield from _walk(stmt.body, {**ranges, stmt.var: (0, stmt.trips - 1)})
        elif isinstance(stmt, If):
            yield from _walk(stmt.then, ranges)
            yield from _walk(stmt.orelse, ranges)
        elif isinstance(stmt, DoWhile):
            yield from _walk(stmt.body, ranges)


def _windows(var: Var, uses: list[Use]) -> bool:
    """Whether, along one dimension, what each iteration touches is in a window of its own."""
    first = uses[0][0]
    views = {(a.view_shape, a.dtype) for a, _, _ in uses}
    if len(views) != 1 or any(d.dyn is not None for a, _, _ in uses for d in a.dims):
        return False
    for axis in range(len(first.dims)):
        steps = {a.dims[axis].base.coefficient(var) for a, _, _ in uses}
        if len(steps) != 1 or 0 in steps:
            continue
        (step,) = steps
        low: int | None = None
        high = 0
        for access, _, ranges in uses:
            dim = access.dims[axis]
            if any(var in atom.variables() and atom is not var for atom, _ in dim.base.terms):
                break  # the index is inside a division
            a, b = dim.base.range({**ranges, var: (0, 0)})
            for s, n in zip(dim.strides, access.shape, strict=True):
                a, b = a + min(0, s * (n - 1)), b + max(0, s * (n - 1))
            low, high = (a, b) if low is None else (min(low, a), max(high, b))
        else:
            if low is not None and high - low < abs(step):
                return True
    return False


def work(body: list[Stmt]) -> int:
    """Elements that one execution of a body handles, about."""
    total = 0
    for stmt in body:
        if isinstance(stmt, Instr):
            total += max([prod(a.shape) for a in stmt.operands if isinstance(a, Access)], default=0)
        elif isinstance(stmt, For):
            total += stmt.trips * work(stmt.body)
        elif isinstance(stmt, If):
            total += max(work(stmt.then), work(stmt.orelse))
        elif isinstance(stmt, DoWhile):
            total += work(stmt.body)
    return total
