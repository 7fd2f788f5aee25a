"""What the compiler moves: instructions out of loops that do not change them, and loads into the order in which they are needed. The
kernel itself stays as it is."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from opennki.ir.affine import Var
from opennki.ir.nodes import Alloc, DoWhile, For, If, Instr, Kernel, Stmt, statements
from opennki.ir.verify import accesses, call_view
from opennki.isa.declare import ISA
from opennki.trace.independence import depends, used_by


def folded(stmts: list[Stmt]) -> list[Stmt]:
    """A body in which an instruction whose result is only copied writes the copy itself, as engines convert on the way out, and one that
    can sums up its result itself."""
    uses: dict[Alloc, int] = {}
    for stmt in statements(stmts):
        if isinstance(stmt, Instr):
            for access, _, _ in accesses(stmt):
                uses[access.alloc] = uses.get(access.alloc, 0) + 1
    return _fold(stmts, uses)


def _fold(stmts: list[Stmt], uses: dict[Alloc, int]) -> list[Stmt]:
    out: list[Stmt] = []
    last = -1  # where the last instruction of this body stands, if nothing but tensors followed it
    for stmt in stmts:
        if isinstance(stmt, Instr):
            made = out[last] if last >= 0 else None
            if isinstance(made, Instr) and _only_copied(made, stmt, uses):
                out[last] = replace(made, results=stmt.results or tuple(a for a, _, written in accesses(stmt) if written))
                out.append(out.pop(last))
                last = len(out) - 1
                continue
            both = _with_its_sum(made, stmt) if isinstance(made, Instr) else None
            if both is not None:
                del out[last]
                out.append(both)
                last = len(out) - 1
                continue
            out.append(stmt)
            last = len(out) - 1
        elif isinstance(stmt, Alloc):
            out.append(stmt)
        else:
            last = -1
            if isinstance(stmt, For):
                out.append(For(stmt.var, stmt.trips, stmt.kind, _fold(stmt.body, uses), stmt.directives, stmt.loc))
            elif isinstance(stmt, If):
                out.append(If(stmt.pred, _fold(stmt.then, uses), _fold(stmt.orelse, uses), stmt.loc))
            else:
                out.append(DoWhile(_fold(stmt.body, uses), stmt.cond, stmt.loc))
    return out


def _with_its_sum(made: Instr, fold: Instr) -> Instr | None:
    """One instruction that does the work of two, of which the second makes one number of each partition of the result of the first."""
    decl, other = ISA[made.op], ISA[fold.op]
    if decl.folding is None or other.folds is None or made.mask or fold.mask or len(made.results) != 1 or len(fold.results) != 1:
        return None
    read = [a for a, reads, _ in accesses(fold) if reads]
    result = made.results[0]
    if len(read) != 1 or read[0].alloc is not result.alloc or not (read[0].is_whole and result.is_whole):
        return None
    words = decl.folding(call_view(decl, made.operands, made.engine, result.dtype), other.folds(call_view(other, fold.operands)),
                         fold.results[0])
    if not words:
        return None
    return replace(made, operands=tuple(words.get(p.name, v) for p, v in zip(decl.params, made.operands, strict=True)))


def _only_copied(made: Instr, copy: Instr, uses: dict[Alloc, int]) -> bool:
    if ISA[copy.op].family != "copy" or ISA[made.op].pe is not None or made.mask or copy.mask or len(made.results) != 1:
        return False
    read = [a for a, reads, _ in accesses(copy) if reads]
    written = [a for a, _, writes in accesses(copy) if writes]
    result = made.results[0]
    return (len(read) == 1 and len(written) == 1 and read[0].alloc is result.alloc and uses[result.alloc] == 2 and result.is_whole
            and read[0].is_whole and result.space == "sbuf" and written[0].shape == result.shape and written[0].space == "sbuf")


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
    local = {s for s in body if isinstance(s, Alloc)}
    writers: dict[Alloc, int] = dict.fromkeys(local, 0)  # what nothing writes, and an instruction reads all the same, does not leave either
    for stmt in statements(body):
        if isinstance(stmt, Instr):
            for access, _, written in accesses(stmt):
                if written:
                    writers[access.alloc] = writers.get(access.alloc, 0) + 1
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
    return made == 1 and not any(used_by(value, var) for value in instr.operands)


def repeated_axes(kernel: Kernel) -> list[int]:
    """The axes of the launch grid along which all programs do the same: nothing depends on the index, no tensor in HBM is both read and
    written, no program waits for another. On a core a grid is a loop, and what no iteration changes leaves it."""
    instrs = [s for s in statements(kernel.body) if isinstance(s, Instr)]
    read: set[Alloc] = set()
    written: set[Alloc] = set()
    for instr in instrs:
        if ISA[instr.op].suspends or ISA[instr.op].random:
            return []
        for access, reads, writes in accesses(instr):
            if not access.alloc.on_chip:
                read |= {access.alloc} if reads else set()
                written |= {access.alloc} if writes else set()
    if read & written:
        return []
    guards = [s.pred for s in statements(kernel.body) if isinstance(s, If)]
    return [axis for axis, var in enumerate(kernel.grid)
            if var.hi > 0 and not any(var in p.expr.variables() for p in guards) and not any(depends(i, var) for i in instrs)]


def in_order_of_need(stmts: list[Stmt]) -> list[Stmt]:
    """A body in which neighbouring statements that load tensors (and prepare them) stand in the order of their first use by what
    follows."""
    out: list[Stmt] = []
    run: list[tuple[Stmt, set[Alloc]]] = []
    touched: set[Alloc] = set()
    uses: dict[Alloc, list[tuple[int, int]]] | None = None
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
            uses = _uses_in_order(stmts) if uses is None else uses
            run = _sorted(run, uses)
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


def _sorted(run: list[tuple[Stmt, set[Alloc]]], uses: dict[Alloc, list[tuple[int, int]]]) -> list[tuple[Stmt, set[Alloc]]]:
    loading = {id(s) for s, _ in run}

    def first(entry: tuple[Stmt, set[Alloc]]) -> int:
        return min((next((at for at, stmt in uses[a] if stmt not in loading), 1 << 60) for a in entry[1]), default=0)
    return sorted(run, key=first)


def _uses_in_order(stmts: list[Stmt]) -> dict[Alloc, list[tuple[int, int]]]:
    """(position, id of the statement of the body) of the uses of each tensor."""
    uses: dict[Alloc, list[tuple[int, int]]] = {}
    position = 0
    for stmt in stmts:
        for inner in statements([stmt]):
            position += 1
            if isinstance(inner, Instr):
                for access, _, _ in accesses(inner):
                    uses.setdefault(access.alloc, []).append((position, id(stmt)))
    return uses
