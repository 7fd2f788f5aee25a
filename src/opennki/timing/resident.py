"""Loads that a loop repeats: the compiler keeps their tiles in SBUF where they fit. The kernel itself stays as it is.

A load of a read-only tensor whose address does not depend on the index of some loop around it reads the same tiles in every iteration of
that loop. They become one tensor with a block for each of them, made before the loop and filled in its first iteration.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod

from opennki.ir.affine import Affine, Pred, variable
from opennki.ir.nodes import Access, Alloc, Dim, DoWhile, For, If, Instr, Stmt, statements
from opennki.ir.verify import accesses
from opennki.isa.declare import ISA
from opennki.isa.dtypes import itemsize
from opennki.timing import constants


def executed(stmts: list[Stmt]) -> int:
    """Instructions that a body executes, conditions taken as true."""
    total = 0
    for stmt in stmts:
        if isinstance(stmt, Instr):
            total += 1
        elif isinstance(stmt, For):
            total += stmt.trips * executed(stmt.body)
        elif isinstance(stmt, If):
            total += executed(stmt.then) + executed(stmt.orelse)
        elif isinstance(stmt, DoWhile):
            total += executed(stmt.body)
    return total


def with_resident_loads(stmts: list[Stmt], room: int) -> list[Stmt]:
    """The body with repeated loads kept in SBUF, the smallest first, as far as `room` bytes per partition go."""
    if executed(stmts) > constants.RESIDENT_LIMIT.value:
        return stmts
    uses: dict[Alloc, list[tuple[Instr, Access, bool]]] = {}
    written: set[Alloc] = set()
    for stmt in statements(stmts):
        if isinstance(stmt, Instr):
            for access, _, writes in accesses(stmt):
                uses.setdefault(access.alloc, []).append((stmt, access, writes))
                if writes:
                    written.add(access.alloc)
    found: list[tuple[int, Instr, Alloc, For, list[For]]] = []
    stack: list[tuple[list[Stmt], list[For]]] = [(stmts, [])]
    while stack:
        body, loops = stack.pop()
        for stmt in body:
            if isinstance(stmt, For):
                stack.append((stmt.body, [*loops, stmt]))
            elif isinstance(stmt, Instr) and ISA[stmt.op].dma_share is not None and loops:
                candidate = _repeated(stmt, loops, uses, written)
                if candidate is not None:
                    found.append(candidate)
    chosen: dict[Alloc, tuple[Alloc, For, list[For]]] = {}
    for size, _, alloc, loop, inner in sorted(found, key=lambda f: f[0]):
        if size <= room:
            room -= size
            blocks = tuple(x.trips for x in inner)
            shape = (*blocks, *alloc.shape[alloc.pdim:])
            made = Alloc(alloc.id, alloc.name, shape, alloc.dtype, alloc.space, alloc.kind, len(blocks), None, alloc.loc)
            chosen[alloc] = (made, loop, inner)
    return _rewritten(stmts, chosen) if chosen else stmts


def _repeated(instr: Instr, loops: list[For], uses: dict[Alloc, list[tuple[Instr, Access, bool]]],
              written: set[Alloc]) -> tuple[int, Instr, Alloc, For, list[For]] | None:
    sources = [a for a, read, _ in accesses(instr) if read]
    targets = [a for a, _, writes in accesses(instr) if writes]
    if len(sources) != 1 or len(targets) != 1 or instr.mask or sources[0].space != "hbm" or not targets[0].alloc.on_chip:
        return None
    source, target = sources[0], targets[0]
    alloc = target.alloc
    if source.alloc in written or alloc.placement or any(d.dyn is not None for d in source.dims):
        return None
    if target.view is not None or target.shape != alloc.shape[alloc.pdim:]:
        return None
    blocks = [target.dims[d].base.key() for d in range(alloc.pdim)]
    for user, access, writes in uses[alloc]:
        if (writes and user is not instr) or access.view is not None or [access.dims[d].base.key() for d in range(alloc.pdim)] != blocks:
            return None
    needed = {v for d in source.dims for v in d.base.variables()}
    outer = next((i for i, x in enumerate(loops) if x.var not in needed and x.trips > 1), None)
    if outer is None:
        return None
    inner = [x for x in loops[outer + 1:] if x.var in needed]
    if not all(_inside(user, loops[-1]) for user, _, _ in uses[alloc]):
        return None
    size = prod(alloc.shape[alloc.pdim + 1:]) * itemsize(alloc.dtype) * prod(x.trips for x in inner)
    return size, instr, alloc, loops[outer], inner


def _inside(instr: Instr, loop: For) -> bool:
    return any(stmt is instr for stmt in statements(loop.body))


def _rewritten(stmts: list[Stmt], chosen: dict[Alloc, tuple[Alloc, For, list[For]]]) -> list[Stmt]:
    out: list[Stmt] = []
    for stmt in stmts:
        if isinstance(stmt, Alloc):
            if stmt not in chosen:
                out.append(stmt)
        elif isinstance(stmt, Instr):
            made = next((chosen[a.alloc] for a, _, writes in accesses(stmt) if writes and a.alloc in chosen), None)
            moved = _moved(stmt, chosen)
            out.append(moved if made is None else If(Pred(Affine(0, ((made[1].var, -1),))), [moved], [], stmt.loc))
        elif isinstance(stmt, For):
            out += [new for new, loop, _ in chosen.values() if loop is stmt]
            out.append(For(stmt.var, stmt.trips, stmt.kind, _rewritten(stmt.body, chosen), stmt.directives, stmt.loc))
        elif isinstance(stmt, If):
            out.append(If(stmt.pred, _rewritten(stmt.then, chosen), _rewritten(stmt.orelse, chosen), stmt.loc))
        else:
            out.append(DoWhile(_rewritten(stmt.body, chosen), stmt.cond, stmt.loc))
    return out


def _moved(instr: Instr, chosen: dict[Alloc, tuple[Alloc, For, list[For]]]) -> Instr:
    if not any(a.alloc in chosen for a, _, _ in accesses(instr)):
        return instr
    operands = tuple(_access(v, chosen) if isinstance(v, Access) else v for v in instr.operands)
    return replace(instr, operands=operands, results=tuple(_access(r, chosen) for r in instr.results))


def _access(access: Access, chosen: dict[Alloc, tuple[Alloc, For, list[For]]]) -> Access:
    if access.alloc not in chosen:
        return access
    made, _, inner = chosen[access.alloc]
    none = (0,) * len(access.shape)
    blocks = tuple(Dim(variable(x.var), none) for x in inner)
    return replace(access, alloc=made, dims=(*blocks, *access.dims[access.alloc.pdim:]))
