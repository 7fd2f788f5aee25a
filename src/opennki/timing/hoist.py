"""What the compiler moves out of loops: instructions whose operands no iteration changes. The kernel itself stays as it is."""
from __future__ import annotations

from typing import Any

from opennki.ir.affine import Affine, Var
from opennki.ir.nodes import Access, Alloc, DoWhile, For, If, IndexTile, Instr, PredTile, Stmt, statements
from opennki.ir.verify import accesses
from opennki.isa.declare import ISA


def hoisted(stmts: list[Stmt]) -> list[Stmt]:
    """A body with every instruction outside of the loops that do not change it.

    An instruction leaves a loop when it is not conditional, its tiles and mask do not depend on the loop index, nothing that it reads is written
    in the loop, and it alone writes the tensor of its result, which is made in the iteration.
    """
    out: list[Stmt] = []
    for stmt in stmts:
        if isinstance(stmt, For):
            out += _leave(stmt)
        elif isinstance(stmt, If):
            out.append(If(stmt.pred, hoisted(stmt.then), hoisted(stmt.orelse), stmt.loc))
        elif isinstance(stmt, DoWhile):
            out.append(DoWhile(hoisted(stmt.body), stmt.cond, stmt.loc))
        else:
            out.append(stmt)
    return out


def _leave(loop: For) -> list[Stmt]:
    body = hoisted(loop.body)
    writers: dict[Alloc, int] = {}
    for stmt in statements(body):
        if isinstance(stmt, Instr):
            for access, _, written in accesses(stmt):
                if written:
                    writers[access.alloc] = writers.get(access.alloc, 0) + 1
    local = {s for s in body if isinstance(s, Alloc)}
    moved: list[Stmt] = []
    if loop.trips > 1:
        for stmt in body:
            if isinstance(stmt, Instr) and _fixed(stmt, loop.var, writers, local):
                made = next(a.alloc for a, _, written in accesses(stmt) if written)
                moved += [made, stmt]
                del writers[made]
    gone = set(moved)
    return [*moved, For(loop.var, loop.trips, loop.kind, [s for s in body if s not in gone], loop.directives, loop.loc)]


def _fixed(instr: Instr, var: Var, writers: dict[Alloc, int], local: set[Any]) -> bool:
    decl = ISA[instr.op]
    if decl.random or decl.suspends or any(var in p.expr.variables() for p in instr.mask):
        return False
    made = 0
    for access, read, written in accesses(instr):
        if access.space == "register" or (read and access.alloc in writers):
            return False
        if any(var in dim.base.variables() for dim in access.dims):
            return False
        if written:
            made += 1
            if read or access.alloc not in local or writers.get(access.alloc) != 1 or not access.alloc.on_chip:
                return False
    return made == 1 and not any(_uses(value, var) for value in instr.operands)


def _uses(value: Any, var: Var) -> bool:
    if isinstance(value, Access):
        return any(var in p.expr.variables() for p in value.mask)
    if isinstance(value, Affine):
        return var in value.variables()
    if isinstance(value, IndexTile):
        return var in value.base.variables()
    if isinstance(value, PredTile):
        return any(var in p.expr.variables() for p in value.preds)
    return isinstance(value, tuple) and any(_uses(v, var) for v in value)
