"""Tensors as the event loop sees them: cells that carry times, scopes in which a tensor lives, and how many buffers it has.

A tensor is cut into cells along the borders of its accesses, so that two tiles share a cell only where they overlap (or where the cells
would be too many). Its scope is the innermost body of statements in which all accesses lie and in each run of which its contents are new:
block dimensions that a loop index alone selects, and scratch tensors that each iteration of an affine loop overwrites, make the loop body
the scope. In each run of the scope the tensor gets one of the buffers that tensors of its size share there; the buffer is free again
after the last use. """
from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from math import ceil, gcd, prod
from typing import Any

from opennki.ir.affine import Affine, FloorDiv, Var
from opennki.ir.nodes import Access, Alloc, DoWhile, For, If, Instr, Kernel, Stmt
from opennki.ir.verify import accesses
from opennki.isa.dtypes import itemsize
from opennki.isa.target import Target
from opennki.timing import constants
from opennki.timing.terms import Slots

MAX_GRID, MAX_CELLS = 512, 1 << 16


Use = tuple[Access, bool, bool, "Body", int]  # read, written, in which body, at which statement


class Body:
    """A list of statements and its place: `owner` is the statement that holds it, at `at` in `parent`; `loops`: loops around it."""

    __slots__ = ("at", "children", "loops", "nest", "owner", "parent", "rings", "stmts", "uses")

    def __init__(self, stmts: list[Stmt], owner: Any, parent: Body | None, at: int) -> None:
        self.stmts, self.owner, self.parent, self.at = stmts, owner, parent, at
        self.nest: int = parent.nest + 1 if parent is not None else 0
        self.loops: int = (parent.loops if parent is not None else 0) + isinstance(owner, (For, DoWhile))
        self.uses: list[Family] = []
        self.rings: dict[Any, Ring] = {}
        self.children: list[Body] = []
        if parent is not None:
            parent.children.append(self)


class Ring:
    """Buffers of one size in a scope: `times` are those at which they were released, oldest first; `fresh` were never used."""

    __slots__ = ("body", "bytes", "count", "fresh", "live", "space", "times")

    def __init__(self, body: Body, space: str, size: int) -> None:
        self.body, self.space, self.bytes = body, space, size
        self.live = self.count = self.fresh = 1
        self.times: deque[int] = deque()

    def most(self, factor: int) -> int:
        """The most buffers that are of use: what a directive of the loop says, else `factor` times those alive at once."""
        asked = _factor(self.body)
        return self.live * (asked or factor)


class Family:
    """A tensor: its cells are `base` to `base + cells` of the machine's lists. `ring` is None where its memory is its own."""

    __slots__ = ("alloc", "base", "body", "cells", "dims", "first", "last", "level", "places", "private", "ring", "table", "uses")

    def __init__(self, alloc: Alloc) -> None:
        self.alloc = alloc
        self.uses: list[Use] = []
        self.body: Any = None
        self.private: frozenset[Var] = frozenset()
        self.dims: list[tuple[int, int, int, int]] = []  # (lowest index, cell size, cells, stride in cells)
        self.base = self.cells = self.level = self.first = self.last = 0
        self.ring: Ring | None = None
        self.table: list[int] | None = None
        self.places: set[tuple[int, int]] = set()  # statements of the uses within the scope


class Ref:
    """The cells that an access touches: `const` + terms (+ each of `many`), or those of the block that `table` maps to."""

    __slots__ = ("block", "const", "divs", "ends", "family", "many", "odd", "table", "terms")

    def __init__(self, family: Family, const: int, terms: Any, divs: Any, many: tuple[int, ...] | None) -> None:
        self.family, self.const, self.terms, self.divs, self.many = family, const, terms, divs, many
        self.table: list[int] | None = None
        self.block: Any = None
        self.odd = bool(divs)
        self.ends: tuple[int, int] | None = None  # first and last cell, where an index may lead outside: a mask leaves that out


def walk(stmts: list[Stmt], owner: Any, parent: Body | None, at: int, bodies: dict[int, Body], families: dict[Alloc, Family],
         homes: dict[Alloc, Body]) -> Body:
    """Collect bodies and the accesses of each tensor."""
    body = bodies[id(stmts)] = Body(stmts, owner, parent, at)
    for index, stmt in enumerate(stmts):
        if isinstance(stmt, Alloc):
            homes.setdefault(stmt, body)
        elif isinstance(stmt, Instr):
            for access, read, written in accesses(stmt):
                if access.space != "register":
                    families.setdefault(access.alloc, Family(access.alloc)).uses.append((access, read, written, body, index))
        elif isinstance(stmt, If):
            walk(stmt.then, stmt, body, index, bodies, families, homes)
            walk(stmt.orelse, stmt, body, index, bodies, families, homes)
        else:
            walk(stmt.body, stmt, body, index, bodies, families, homes)
    return body


def _common(a: Body, b: Body) -> Body:
    while a is not b:
        if a.nest >= b.nest:
            assert a.parent is not None
            a = a.parent
        else:
            assert b.parent is not None
            b = b.parent
    return a


def _position(scope: Body, body: Body, index: int) -> int:
    while body is not scope:
        index = body.at
        assert body.parent is not None
        body = body.parent
    return index


def settle(kernel: Kernel, families: dict[Alloc, Family], homes: dict[Alloc, Body], top: Body) -> list[Family]:
    """Give every tensor that orders instructions its scope and cells; returns them. Parameters that are only read, constants and results
    that are only written order nothing."""
    kept, size = [], 0
    physical: dict[Any, int] = {}
    for family in families.values():
        alloc = family.alloc
        one_way = not any(u[2] for u in family.uses) or not any(u[1] for u in family.uses)
        if not family.uses or (one_way and not alloc.on_chip):
            family.cells = 0
            continue
        home = homes.get(alloc, top)
        if alloc.on_chip and not alloc.placement:
            _scope(family, home)
        else:
            family.body = home if alloc.on_chip else top
        _grid(family)
        kept.append(family)
        if alloc.on_chip and alloc.placement:
            family.level = 0
            each = prod(d[2] for d in family.dims[alloc.pdim:])
            family.table = []
            for address in alloc.placement:
                key = (alloc.space, tuple(address), prod(alloc.shape[alloc.pdim + 1:]) * itemsize(alloc.dtype), each)
                if key not in physical:
                    physical[key] = size
                    size += each
                family.table.append(physical[key])
            continue
        family.base, size = size, size + family.cells
        family.level = family.body.loops
        if alloc.on_chip:
            family.uses = inside(family)
            family.places = {(id(b.stmts), i) for _, _, _, b, i in family.uses}
            places = [_position(family.body, b, i) for _, _, _, b, i in family.uses]
            family.first, family.last = min(places), max(places)
            family.body.uses.append(family)
    return kept


def _fills(use: Use) -> bool:
    """Whether a use only fills the tensor with a value."""
    stmt = use[3].stmts[use[4]]
    return use[2] and not use[1] and isinstance(stmt, Instr) and sum(1 for a, *_ in accesses(stmt) if a.space != "register") == 1


def inside(family: Family) -> list[Use]:
    """The uses within the scope: a tensor may be filled before the loops in which it is used."""
    found = []
    for use in family.uses:
        body = use[3]
        while body is not family.body and body.parent is not None:
            body = body.parent
        if body is family.body:
            found.append(use)
    return found


def _scope(family: Family, home: Body) -> None:
    uses = [u for u in family.uses if not _fills(u)] or family.uses
    common = uses[0][3]
    for _, _, _, body, _ in uses[1:]:
        common = _common(common, body)
    chain = [common]
    while chain[-1] is not home:
        assert chain[-1].parent is not None
        chain.append(chain[-1].parent)
    chain.reverse()
    private: set[Var] = set()
    scope = home
    for body in chain[1:]:
        owner = body.owner
        if isinstance(owner, For):
            if _selects(family, uses, owner.var, private):
                private.add(owner.var)
            elif not (owner.kind == "affine" and _overwritten(family, uses, body)):
                break
        elif not isinstance(owner, If):
            break
        scope = body
    family.body, family.private = scope, frozenset(private)


def _selects(family: Family, uses: list[Use], var: Var, private: set[Var]) -> bool:
    """Whether different values of a loop index select different blocks, in all accesses alike."""
    for d in range(family.alloc.pdim):
        steps = set()
        lo, hi = 1 << 60, -1
        for access, _, _, _, _ in uses:
            if access.view is not None:
                return False
            dim = access.dims[d]
            if dim.dyn is not None or any(isinstance(a, FloorDiv) and var in a.variables() for a, _ in dim.base.terms):
                steps.add(0)
                continue
            steps.add(dim.base.coefficient(var))
            rest = Affine(dim.base.const, tuple((a, c) for a, c in dim.base.terms if a is not var and a not in private))
            low, high = rest.range({})
            lo, hi = min(lo, low), max(hi, high + _extent(access, d) - 1)
        if len(steps) == 1 and abs(next(iter(steps))) >= max(1, hi - lo + 1):
            return True
    return False


def _overwritten(family: Family, uses: list[Use], body: Body) -> bool:
    """Whether each run of a body starts by writing the whole tensor."""
    access, read, written, where, index = min(uses, key=lambda u: (_position(body, u[3], u[4]), u[1] and not u[2]))
    same = [u for u in uses if u[3] is where and u[4] == index]
    return written and not read and access.is_whole and where is body and not any(u[1] for u in same)


def _extent(access: Access, d: int) -> int:
    return 1 + sum(abs(s) * (n - 1) for s, n in zip(access.dims[d].strides, access.shape, strict=True))


def _grid(family: Family) -> None:
    alloc = family.alloc
    odd = any(a.view is not None for a, *_ in family.uses)
    spans: list[tuple[int, int, int]] = []
    for d, size in enumerate(alloc.shape):
        if odd:
            spans.append((0, max(1, size), 1) if d >= alloc.pdim else (0, 1, size))
            continue
        if d < alloc.pdim:
            lo, hi = size, 0
            for access, *_ in inside(family):
                if access.dims[d].dyn is not None:
                    lo, hi = 0, size - 1
                    break
                low, high = _rest(family, access.dims[d].base).range({})
                lo, hi = min(lo, low), max(hi, high + _extent(access, d) - 1)
            lo, hi = max(0, lo) if not family.private else lo, max(lo, hi)
            spans.append((lo, 1, hi - lo + 1))
            continue
        step = 0
        for access, *_ in family.uses:
            dim = access.dims[d]
            if dim.dyn is not None:
                continue
            extent = _extent(access, d)
            if extent < size:
                step = gcd(step, extent)
            step = gcd(step, dim.base.const, *(c for _, c in dim.base.terms))
        step = step or max(1, size)
        spans.append((0, step, ceil(size / step)))
    while prod(n for _, _, n in spans[alloc.pdim:]) > MAX_GRID:
        worst = max(range(alloc.pdim, len(spans)), key=lambda d: spans[d][2])
        spans[worst] = (0, max(1, alloc.shape[worst]), 1)
    while prod(n for _, _, n in spans) > MAX_CELLS:
        worst = max(range(len(spans)), key=lambda d: spans[d][2])
        spans[worst] = (0, 1 << 40, 1)
    stride, dims = 1, []
    for lo, step, count in reversed(spans):
        dims.append((lo, step, count, stride))
        stride *= count
    family.dims, family.cells = dims[::-1], stride


def _rest(family: Family, base: Affine) -> Affine:
    """The part of a block index that tells blocks of one run of the scope apart."""
    return Affine(base.const, tuple((a, c) for a, c in base.terms if a not in family.private))


def reference(family: Family, access: Access, slots: Slots) -> Ref | None:
    """The cells of an access; None where the tensor orders nothing."""
    if not family.cells:
        return None
    alloc, table = family.alloc, family.table
    expr, block = Affine(family.base if table is None else 0), Affine()
    offsets = [0]
    for d, (lo, step, count, stride) in enumerate(family.dims):
        if access.view is not None or access.dims[d].dyn is not None or step >= 1 << 40:
            start, wide = Affine(), count
        else:
            base = _rest(family, access.dims[d].base).add(-lo)
            start = Affine(base.const // step, tuple((a, c // step) for a, c in base.terms)) if count > 1 else Affine()
            wide = min(count, ceil(_extent(access, d) / step)) if count > 1 else 1
        if table is not None and d < alloc.pdim:
            block = block.add(start.scale(prod(alloc.shape[d + 1:alloc.pdim])))
            continue
        expr = expr.add(start.scale(stride))
        if wide > 1:
            offsets = [o + k * stride for o in offsets for k in range(wide)]
    const, terms, divs = slots.compile(expr)
    ref = Ref(family, const, terms, divs, tuple(offsets) if len(offsets) > 1 else None)
    if table is not None:
        ref.table, ref.block, ref.odd = table, slots.compile(block), True
    else:
        low, high = expr.range({})
        if low < family.base or high + offsets[-1] >= family.base + family.cells:
            ref.ends, ref.odd = (family.base, family.base + family.cells - 1), True
    return ref


def renames(family: Family, access: Access, ref: Ref, body: Body, index: int) -> bool:
    """Whether a write begins a new version of a tensor, which the compiler gives another buffer: it overwrites the whole tensor, after
    the first use, in the body that is the scope (or in a loop of one trip in it)."""
    if family.ring is None or access.view is not None or any(d.dyn is not None for d in access.dims):
        return False
    if family.cells != (1 if ref.many is None else len(ref.many)):
        return False
    while body is not family.body:
        if not (isinstance(body.owner, For) and body.owner.trips == 1) or body.parent is None:
            return False
        body, index = body.parent, body.at
    return index > family.first


def assign_buffers(bodies: list[Body], target: Target) -> tuple[list[Ring], dict[str, int], dict[str, int]]:
    """Share out SBUF and PSUM: rings of equal buffers in each scope, as many as the tensors alive at once, and then up to
    `constants.BUFFERS` times as many, innermost scopes first, while they fit. Returns the rings, and the bytes per
    partition that are in use and that are needed at least."""
    rings: list[Ring] = []
    for body in bodies:
        groups: dict[Any, list[Family]] = {}
        for family in body.uses:
            alloc = family.alloc
            size = prod(alloc.shape[alloc.pdim + 1:]) * itemsize(alloc.dtype) * prod(d[2] for d in family.dims[:alloc.pdim])
            if alloc.space == "psum":
                size = ceil(size / target.psum_bank_bytes) * target.psum_bank_bytes
            groups.setdefault((alloc.space, size), []).append(family)
        for (space, size), members in groups.items():
            ring = Ring(body, space, size)
            ring.live = _most_alive(members)
            ring.count = ring.fresh = ring.live
            body.rings[space, size] = ring
            rings.append(ring)
            for family in members:
                family.ring = ring
    used, least, spilled = {}, {}, {}
    for space, capacity in (("sbuf", target.sbuf_usable_bytes), ("psum", target.psum_partition_bytes)):
        mine = [r for r in rings if r.space == space]
        by_body: dict[int, list[Ring]] = {}
        for r in mine:
            by_body.setdefault(id(r.body), []).append(r)
        used[space] = least[space] = _demand(bodies, by_body)
        spilled[space] = 0
        while _demand(bodies, by_body) > capacity:  # what does not fit would be spilled, and takes no part in sharing out
            biggest = max((r for group in by_body.values() for r in group), key=lambda r: r.bytes * r.count)
            by_body[id(biggest.body)].remove(biggest)
            spilled[space] += 1
        order = sorted((b for b in bodies if id(b) in by_body), key=lambda b: -b.nest)
        most = round(constants.BUFFERS.value)
        for factor in range(2, most + 1):
            for body in order:
                _grow(bodies, by_body, body, capacity, partial(_times, most, factor))
        for body in order:
            for ring in by_body[id(body)]:
                _grow(bodies, by_body, body, capacity, partial(_one_more, most, ring))
        if not spilled[space]:
            used[space] = _demand(bodies, by_body)
    for r in rings:
        r.fresh = r.count
    return rings, used, least


def _times(most: int, factor: int, ring: Ring) -> int:
    return min(ring.most(most), ring.live * factor)


def _one_more(most: int, only: Ring, ring: Ring) -> int:
    return min(ring.most(most), ring.count + (ring is only))


def _grow(bodies: list[Body], by_body: dict[int, list[Ring]], body: Body, capacity: int, wanted: Callable[[Ring], int]) -> None:
    """Give the rings of a body more buffers, if they fit."""
    group = by_body[id(body)]
    before = [r.count for r in group]
    for ring in group:
        ring.count = max(ring.count, wanted(ring))
    if _demand(bodies, by_body) > capacity:
        for ring, count in zip(group, before, strict=True):
            ring.count = count


def _factor(body: Body) -> int:
    """The number of buffers that a directive of the loop asks for, 0 without one."""
    owner = body.owner
    if isinstance(owner, For):
        for text in owner.directives:
            if text.startswith("multi_buffer("):
                return int(text[len("multi_buffer("):-1])
    return 0


def _most_alive(members: list[Family]) -> int:
    ends = sorted([(f.first, 0) for f in members] + [(f.last, 1) for f in members])
    alive = most = 0
    for _, kind in ends:
        alive += 1 if kind == 0 else -1
        most = max(most, alive)
    return most


def _demand(bodies: list[Body], by_body: dict[int, list[Ring]]) -> int:
    need: dict[int, int] = {}
    for body in sorted(bodies, key=lambda b: -b.nest):
        total = need.pop(id(body), 0) + sum(r.bytes * r.count for r in by_body.get(id(body), ()))
        if body.parent is None:
            return total
        need[id(body.parent)] = max(need.get(id(body.parent), 0), total)
    return 0
