"""What the compiler moves: instructions out of loops that do not change them, and loads into the order in which they are needed. The
kernel itself stays as it is."""
from __future__ import annotations

from typing import Any

from opennki.ir.affine import Affine, Var
from opennki.ir.nodes import Access, Alloc, DoWhile, For, If, IndexTile, Instr, PredTile, Stmt, statements
from opennki.ir.verify import accesses
from opennki.isa.declare import ISA


def hoisted(stmts: list[Stmt]) -> list[Stmt]:
    """A body with every instruction outside of the loops that do not change it.

    An instruction leaves a loop when it is not conditional, its tiles and mask do not depend on the loop index, nothing that it reads is
    written in the loop, and it alone writes the tensor of its result, which is made in the iteration.
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


def in_order_of_need(stmts: list[Stmt]) -> list[Stmt]:
    """A body in which neighbouring statements that load tensors (and prepare them) stand in the order of their first use by what
    follows."""
    out: list[Stmt] = []
    run: list[tuple[Stmt, set[Alloc]]] = []
    touched: set[Alloc] = set()
    for stmt in [*stmts, None]:
        loaded = None if stmt is None or isinstance(stmt, Alloc) else _loads(stmt)
        if isinstance(stmt, Alloc):
            out.append(stmt)
            continue
        if loaded is not None and not loaded & touched:
            assert stmt is not None
            run.append((stmt, loaded))
            touched |= loaded
            continue
        if len(run) > 1:
            first = _first_uses(stmts, {id(s) for s, _ in run})
            run.sort(key=lambda entry: min((first.get(a, 1 << 60) for a in entry[1]), default=0))
        out += [s for s, _ in run]
        run, touched = [], set()
        if loaded is not None:
            assert stmt is not None
            run.append((stmt, loaded))
            touched = set(loaded)
        elif stmt is not None:
            out.append(stmt)
    return out


def _loads(stmt: Stmt) -> set[Alloc] | None:
    """The tensors that a statement touches on chip, where it does nothing but load them and change them in place; None otherwise."""
    touched: set[Alloc] = set()
    loaded: set[Alloc] = set()
    for inner in statements([stmt]):
        if isinstance(inner, (If, DoWhile)):
            return None
        if isinstance(inner, Instr):
            for access, _, written in accesses(inner):
                if access.alloc.on_chip:
                    touched.add(access.alloc)
                    if written and ISA[inner.op].dma_share is not None:
                        loaded.add(access.alloc)
                elif written or access.space == "register":
                    return None
    return touched if touched and touched == loaded else None


def _first_uses(stmts: list[Stmt], loading: set[int]) -> dict[Alloc, int]:
    """Position of the first use of each tensor, besides its load."""
    first: dict[Alloc, int] = {}
    position = 0
    for stmt in stmts:
        if id(stmt) in loading:
            continue
        for inner in statements([stmt]):
            position += 1
            if isinstance(inner, Instr):
                for access, _, _ in accesses(inner):
                    first.setdefault(access.alloc, position)
    return first
