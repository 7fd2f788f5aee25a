"""Rolling: a sequence of equal statements on places that step by a constant becomes a loop.

A Python `range` loop is unrolled when a kernel is traced, to thousands of equal instructions on adjacent tiles. Consecutive blocks of
statements that are the same but for tensors that each of them makes for itself, and for numbers in their indices that grow by the same step
from block to block, are the iterations of a loop again (a sequential one: nothing is claimed about their independence). Plans, passes and
tapes then have the size of the loop. Values are the same; a block is rolled only if the same source lines made all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from opennki.ir.affine import Affine, Pred, Var
from opennki.ir.nodes import Access, Alloc, Dim, DoWhile, For, If, IndexTile, Instr, Kernel, PredTile, Stmt, statements
from opennki.ir.verify import accesses
from opennki.isa.declare import ISA

LEAST = 4  # iterations
MANY = 24  # and instructions that they execute
LONGEST = 256  # statements of a block
TRIED = 6  # lengths of blocks that are tried at a place


def rolled(kernel: Kernel) -> Kernel:
    """The kernel with its sequences rolled; the same object where there are none."""
    if _statements(kernel.body) < LEAST:
        return kernel
    roller = _Roller(kernel)
    body = roller.body(kernel.body)
    return replace(kernel, body=body) if roller.found else kernel


def _statements(body: list[Stmt]) -> int:
    """The most statements that one list has."""
    most = len(body)
    for stmt in body:
        if isinstance(stmt, (For, DoWhile)):
            most = max(most, _statements(stmt.body))
        elif isinstance(stmt, If):
            most = max(most, _statements(stmt.then), _statements(stmt.orelse))
    return most


class _Roller:
    def __init__(self, kernel: Kernel) -> None:
        self.kept = {o.alloc for o in kernel.outputs}
        self.names = {v.name for v in kernel.grid} | {s.var.name for s in statements(kernel.body) if isinstance(s, For)}
        self.fresh = (name for n in count(1) if (name := f"r{n}") not in self.names)
        self.found = False

    def body(self, body: list[Stmt]) -> list[Stmt]:
        """A list of statements, and what is inside of them, rolled."""
        out: list[Stmt] = []
        for stmt in body:
            if isinstance(stmt, (For, DoWhile)):
                inner = self.body(stmt.body)
                stmt = stmt if inner is stmt.body else replace(stmt, body=inner)
            elif isinstance(stmt, If):
                then, orelse = self.body(stmt.then), self.body(stmt.orelse)
                stmt = stmt if then is stmt.then and orelse is stmt.orelse else replace(stmt, then=then, orelse=orelse)
            out.append(stmt)
        if all(a is b for a, b in zip(out, body, strict=True)):
            out = body
        while len(out) >= LEAST:  # loops that were found may be statements of an outer sequence
            once = self.once(out)
            if once is None:
                break
            out = once
        return out

    def once(self, body: list[Stmt]) -> list[Stmt] | None:
        """One round over a list; None where nothing was rolled."""
        made = [stmt for stmt in body if isinstance(stmt, Alloc)]
        body = [stmt for stmt in body if not isinstance(stmt, Alloc)]
        if len(body) < MANY and all(stmt.__class__ is Instr for stmt in body):
            return None
        forms = [_form(stmt) for stmt in body]
        numbers: dict[Any, int] = {}
        ids = [_number(form, numbers, -1 - i) for i, form in enumerate(forms)]
        if len(ids) - len(set(ids)) < LEAST - 1:
            return None
        following = _next(ids)
        life = _lives(body, forms, made, self.kept)
        out: list[Stmt] = []
        gone: set[Alloc] = set()
        at = 0
        while at < len(body):
            length, times = self.best(at, ids, following, forms, life)
            if times:
                end = at + length
                inside = [a for a in life.kind if at <= life.first.get(a, -1) and life.last[a] < at + length * times]
                inside = [a for a in inside if (life.first[a] - at) // length == (life.last[a] - at) // length]  # of one iteration
                own = [a for a in inside if life.last[a] < end]
                gone.update(inside)
                out.append(self.loop([*own, *body[at:end]], forms[at:end], forms[end : end + length], times))
                at += length * times
            else:
                out.append(body[at])
                at += 1
        if len(out) == len(body):
            return None
        self.found = True
        return [*(a for a in made if a not in gone), *out]

    def best(self, at: int, ids: list[int], following: list[int], forms: list[_Form], life: _Lives) -> tuple[int, int]:
        """(length of a block, number of blocks) of the sequence at a place that covers most; (0, 0) if there is none."""
        found = (0, 0)
        place = at
        alike = [ids[at]] * (LEAST - 2)
        for _ in range(TRIED):
            place = following[place]
            length = place - at
            if place < 0 or length > LONGEST or at + LEAST * length > len(ids):
                break
            if ids[at + 2 * length] != ids[at] or ids[at + 2 * length : at + LEAST * length : length] != alike:
                continue  # seen without comparing all of the blocks
            times = 1
            while ids[at : at + length] == ids[at + times * length : at + (times + 1) * length]:
                times += 1
            if times < LEAST:
                continue
            weight = sum([f.weight for f in forms[at : at + length]])
            if times >= LEAST and times * weight >= MANY and times * length > found[0] * found[1]:
                times = _stepping(forms, at, length, times, life)
                if times >= LEAST and times * weight >= MANY and times * length > found[0] * found[1]:
                    found = length, times
                    if at + times * length == len(ids):
                        break
        return found

    def loop(self, block: list[Stmt], first: list[_Form], second: list[_Form], times: int) -> For:
        """The loop whose first iteration is a block; the forms of it and of the next one give the steps."""
        var = Var(next(self.fresh), 0, times - 1)
        steps = iter([b - a for f, g in zip(first, second, strict=True) for a, b in zip(f.numbers, g.numbers, strict=True)])

        def moved(expr: Affine) -> Affine:
            step = next(steps)
            return expr.add(Affine(0, ((var, step),))) if step else expr

        return For(var, times, "sequential", [_mapped(stmt, moved) for stmt in block], (), first[0].loc)


def _next(ids: list[int]) -> list[int]:
    """For each place the next one with the same number, -1 for none."""
    seen: dict[int, int] = {}
    out = [-1] * len(ids)
    for place in range(len(ids) - 1, -1, -1):
        out[place] = seen.get(ids[place], -1)
        seen[ids[place]] = place
    return out


class _Lives:
    """The first and last statement of a list that uses each tensor; `kind`: what those are, but for their identity, that are made in the
    list, do not outlive it, and may be one per iteration."""

    def __init__(self) -> None:
        self.first: dict[Alloc, int] = {}
        self.last: dict[Alloc, int] = {}
        self.kind: dict[Alloc, Any] = {}


def _lives(body: list[Stmt], forms: list[_Form], made: list[Alloc], kept: set[Alloc]) -> _Lives:
    life = _Lives()
    for place, form in enumerate(forms):
        used: list[Alloc] = form.allocs
        if not form.rolls:
            used = [a.alloc for s in statements([body[place]]) if isinstance(s, Instr) for a, _, _ in accesses(s)]
            used += [s.cond.alloc for s in statements([body[place]]) if isinstance(s, DoWhile) and s.cond is not None]
        for alloc in used:
            life.first.setdefault(alloc, place)
            life.last[alloc] = place
    for alloc in made:
        if alloc.placement is None and alloc.space != "shared_hbm" and alloc not in kept:
            life.kind[alloc] = alloc.shape, alloc.dtype, alloc.space, alloc.kind, alloc.pdim, alloc.loc
    return life


def _stepping(forms: list[_Form], at: int, length: int, times: int, life: _Lives) -> int:
    """How many of `times` blocks of equal form are iterations of one loop."""
    blocks = [forms[at + n * length : at + (n + 1) * length] for n in range(times)]
    inner = {a for f in blocks[0] for a in f.made}
    first = [a for f in blocks[0] for a in f.allocs]
    kind, begin, last = life.kind, life.first, life.last
    # of one block: what its statements make, and what is made in this list and used there only
    own = {a for a in first if a in inner or (a in kind and begin[a] >= at and last[a] < at + length)}
    for n in range(1, times):
        names: dict[Alloc, Alloc] = {}
        start, end = at + n * length, at + (n + 1) * length
        for a, b in zip(first, (a for f in blocks[n] for a in f.allocs), strict=True):
            if a not in own:
                good = a is b
            else:
                good = names.setdefault(a, b) is b and (
                    a in inner or (b in kind and kind[a] == kind[b] and begin[b] >= start and last[b] < end)
                )
            if not good:
                times = n
                break
        else:
            if len(set(names.values())) == len(names):
                continue
            times = n
        break
    if times < LEAST:
        return 0
    table = np.array([[x for f in block for x in f.numbers] for block in blocks[:times]], np.int64).reshape(times, -1)
    straight = (table == table[0] + np.arange(times)[:, None] * (table[1] - table[0])).all(axis=1)
    return times if straight.all() else int(np.argmin(straight))


class _Form:
    """What a statement is but for its tensors and numbers: `key`; the tensors and numbers in the order in which they come; those that it
    makes. `rolls`: it may be part of a sequence."""

    __slots__ = ("allocs", "key", "loc", "made", "numbers", "rolls", "vars", "weight")

    def __init__(self) -> None:
        self.key: Any = None
        self.allocs: list[Alloc] = []
        self.made: list[Alloc] = []
        self.numbers: list[int] = []
        self.vars: dict[Var, int] = {}
        self.rolls = True
        self.loc = -1
        self.weight = 0  # instructions that it executes

    def statement(self, stmt: Stmt) -> Any:
        if isinstance(stmt, Alloc):
            self.allocs.append(stmt)
            self.made.append(stmt)
            self.rolls &= stmt.space != "shared_hbm" and stmt.placement is None
            return (stmt.shape, stmt.dtype, stmt.space, stmt.kind, stmt.pdim, stmt.loc)
        if isinstance(stmt, Instr):
            decl = ISA[stmt.op]
            self.weight += 1
            if decl.random or decl.suspends:
                self.rolls = False
            key: list[Any] = [stmt.op, stmt.engine, stmt.loc, len(stmt.results)]
            for value in (*stmt.results, *stmt.operands):
                kind = value.__class__
                key.append(self.access(value) if kind is Access else value if value is None or kind is str else self.one(value))
            key.append(self.each(stmt.mask) if stmt.mask else ())
            return tuple(key)
        if isinstance(stmt, For):
            self.vars[stmt.var] = len(self.vars)
            before = self.weight
            body = tuple([self.statement(s) for s in stmt.body])
            self.weight = before + stmt.trips * (self.weight - before)
            return (stmt.trips, stmt.kind, stmt.directives, stmt.loc, body)
        if isinstance(stmt, If):
            return (self.one(stmt.pred), stmt.loc, tuple([self.statement(s) for s in stmt.then]),
                    tuple([self.statement(s) for s in stmt.orelse]))  # fmt: skip
        self.rolls = False
        return None

    def each(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([self.one(v) for v in values])

    def one(self, value: Any) -> Any:
        kind = value.__class__
        if kind is Access:
            return self.access(value)
        if kind is Affine:
            self.numbers.append(value.const)
            return (Affine, self.terms(value))
        if kind is Pred:
            self.numbers.append(value.expr.const)
            return (Pred, self.terms(value.expr), value.strides)
        if kind is IndexTile:
            self.numbers.append(value.base.const)
            return (IndexTile, self.terms(value.base), value.strides, value.shape)
        if kind is PredTile:
            return (PredTile, value.shape, self.each(value.preds))
        if kind is tuple:
            return self.each(value)
        if kind is float:
            return (float, value.hex())  # -0.0 is not 0.0, and NaN is NaN
        return (kind, value)

    def access(self, value: Access) -> Any:
        self.allocs.append(value.alloc)
        dims = value.dims
        if len(dims) == 2 and not value.mask:  # most of them
            one, two = dims
            if not (one.base.terms or two.base.terms or one.dyn is not None or two.dyn is not None):
                self.numbers += (one.base.const, two.base.const)
                return value.dtype, value.shape, value.view, one.strides, two.strides
        out: list[Any] = [value.dtype, value.shape, value.view]
        for d in dims:
            base = d.base
            self.numbers.append(base.const)
            out.append(d.strides)
            if base.terms or d.dyn is not None:
                out.append((self.terms(base), None if d.dyn is None else self.one(d.dyn)))
        if value.mask:
            out.append(self.each(value.mask))
        return tuple(out)

    def terms(self, expr: Affine) -> Any:
        if not expr.terms:
            return ()
        out: list[tuple[int, Any]] = []
        for atom, coefficient in expr.terms:
            if isinstance(atom, Var):
                out.append((coefficient, self.vars.get(atom, atom)))
            else:
                self.rolls &= not any(v in self.vars for v in atom.variables())
                out.append((coefficient, atom))
        return tuple(sorted(out, key=repr))


def _form(stmt: Stmt) -> _Form:
    form = _Form()
    if not isinstance(stmt, Alloc):
        form.loc = stmt.loc
    form.key = (stmt.__class__, form.statement(stmt))
    return form


def _number(form: _Form, numbers: dict[Any, int], other: int) -> int:
    """The number of a form, which equal ones have too; `other` where it is part of no sequence."""
    if form.rolls:
        try:
            return numbers.setdefault(form.key, len(numbers))
        except TypeError:  # an array comes with it
            form.rolls = False
    return other


def _mapped(node: Any, moved: Callable[[Affine], Affine]) -> Any:
    """A statement or operand with other numbers, taken in the order of `_Form`."""
    kind = node.__class__
    if kind is Instr:
        results, operands, mask = (tuple([_mapped(v, moved) for v in t]) for t in (node.results, node.operands, node.mask))
        return replace(node, results=results, operands=operands, mask=mask)
    if kind is For:
        return replace(node, body=[_mapped(s, moved) for s in node.body])
    if kind is If:
        pred = _mapped(node.pred, moved)
        return replace(node, pred=pred, then=[_mapped(s, moved) for s in node.then], orelse=[_mapped(s, moved) for s in node.orelse])
    if kind is Access:
        dims = []
        for d in node.dims:
            base = moved(d.base)
            dims.append(Dim(base, d.strides, None if d.dyn is None else _mapped(d.dyn, moved)))
        return replace(node, dims=tuple(dims), mask=tuple([_mapped(p, moved) for p in node.mask]))
    if kind is Affine:
        return moved(node)
    if kind is Pred:
        return Pred(moved(node.expr), node.strides)
    if kind is IndexTile:
        return replace(node, base=moved(node.base))
    if kind is PredTile:
        return replace(node, preds=tuple([_mapped(p, moved) for p in node.preds]))
    if kind is tuple:
        return tuple([_mapped(v, moved) for v in node])
    return node
