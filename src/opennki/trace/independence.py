"""Independence of the iterations of affine loops and of the programs of a grid.

A write is independent along a variable when different values write different elements. That is proven from the access (`separates`), or broken
for certain (the access does not depend on the variable: err_unexpected_output_dependencies), or left to the interpreter, which then records
which iteration wrote each element (`Suspect`). Accumulation in place is allowed: it is associative.
"""
from __future__ import annotations

from dataclasses import dataclass

from opennki.errors import Loc, NkiError, NkiValueError, make
from opennki.ir.affine import Var
from opennki.ir.nodes import Access, Alloc, DoWhile, For, If, Instr, Kernel, Stmt
from opennki.ir.verify import accesses, describe
from opennki.isa.declare import ISA
from opennki.trace.merge import same


@dataclass(frozen=True, slots=True)
class Suspect:
    """A write that may hit what another iteration (of `var`) writes."""

    instr: Instr
    access: Access
    var: Var


def separates(access: Access, var: Var, counts: dict[Var, int]) -> bool:
    """True when different values of a variable certainly address different elements."""
    for dim in access.dims:
        if dim.dyn is not None:
            continue
        if not dim.base.coefficient(var) or any(not isinstance(a, Var) for a, _ in dim.base.terms):
            continue
        parts = [(abs(c), counts.get(a, a.hi - a.lo + 1), a) for a, c in dim.base.terms if isinstance(a, Var)]
        parts += [(abs(s), n, None) for s, n in zip(dim.strides, access.shape, strict=True) if s and n > 1]
        if _injective(parts):
            return True
    return False


def _injective(parts: list[tuple[int, int, Var | None]]) -> bool:
    """Mixed radix: each stride is larger than everything that the smaller ones can reach."""
    reach = 0
    for stride, count, _ in sorted(parts, key=lambda p: (p[0], p[1])):
        if count == 1:
            continue
        if stride <= reach:
            return False
        reach += stride * (count - 1)
    return True


def accumulates(instr: Instr, access: Access) -> bool:
    """True when the instruction updates the tile in place: it also reads exactly what it writes."""
    for param, value in zip(ISA[instr.op].params, instr.operands, strict=True):
        role = getattr(param.spec, "role", "")
        if isinstance(value, Access) and (value is access and role == "inout" or role == "in" and same(value, access)):
            return True
    return False


def check(kernel: Kernel) -> list[Suspect]:
    """Raise for writes that are dependent for certain; return those that only running the kernel can tell."""
    suspects: list[Suspect] = []
    counts = {v: v.hi + 1 for v in kernel.grid}
    shared = {p for p in kernel.params} | {a for a in _tops(kernel.body) if a.space == "shared_hbm"}
    grid = [v for v in kernel.grid if v.hi > 0]
    _walk(kernel.body, kernel, [], [], counts, suspects, shared, grid, {})
    return suspects


def _tops(body: list[Stmt]) -> list[Alloc]:
    return [s for s in body if isinstance(s, Alloc)]


def _walk(body: list[Stmt], kernel: Kernel, loops: list[For], guards: list[Var], counts: dict[Var, int], suspects: list[Suspect],
          shared: set[Alloc], grid: list[Var], depth: dict[Alloc, int]) -> None:
    for stmt in body:
        if isinstance(stmt, Alloc):
            depth[stmt] = len(loops)
        elif isinstance(stmt, Instr):
            for access, is_read, is_written in accesses(stmt):
                if not is_written or access.alloc.kind == "register":
                    continue
                _write(stmt, access, is_read, kernel, loops, guards, counts, suspects, shared, grid, depth)
        elif isinstance(stmt, For):
            _walk(stmt.body, kernel, [*loops, stmt], guards, {**counts, stmt.var: stmt.trips}, suspects, shared, grid, depth)
        elif isinstance(stmt, DoWhile):
            _walk(stmt.body, kernel, loops, guards, counts, suspects, shared, grid, depth)
        elif isinstance(stmt, If):
            inner = [*guards, *stmt.pred.expr.variables()]
            _walk(stmt.then, kernel, loops, inner, counts, suspects, shared, grid, depth)
            _walk(stmt.orelse, kernel, loops, inner, counts, suspects, shared, grid, depth)


def _write(instr: Instr, access: Access, is_read: bool, kernel: Kernel, loops: list[For], guards: list[Var], counts: dict[Var, int],
           suspects: list[Suspect], shared: set[Alloc], grid: list[Var], depth: dict[Alloc, int]) -> None:
    outside = depth.get(access.alloc, 0)
    variables = [loop.var for loop in loops[outside:] if loop.kind == "affine" and loop.trips > 1]
    if access.alloc in shared:
        variables += grid
    if not variables or is_read or accumulates(instr, access):
        return
    masked = {v for p in instr.mask for v in p.expr.variables()}
    for var in variables:
        if separates(access, var, counts):
            continue
        depends = any(var in d.base.variables() or d.dyn is not None for d in access.dims)
        if depends or var in guards or var in masked:
            suspects.append(Suspect(instr, access, var))
            continue
        raise dependency(access, [v for v in variables if not any(v in d.base.variables() for d in access.dims)], kernel.loc(instr.loc),
                         kernel)


def dependency(access: Access, variables: list[Var], loc: Loc | None, kernel: Kernel) -> NkiError:
    """The error of iterations or programs that write one place."""
    loops = [v for v in variables if v.kind == "loop"]
    names = ", ".join(_name(v, kernel) for v in variables)
    if loops:
        text = f"different iterations of the affine loop{'s' if len(loops) > 1 else ''} {names} write the same elements of {describe(access)}"
    else:
        text = f"different programs of the grid (axes {', '.join(v.name[3:] for v in variables)}) write the same elements of {describe(access)}"
    error = make("err_unexpected_output_dependencies", text, loc=loc)
    assert isinstance(error, NkiValueError)
    return error


def _name(var: Var, kernel: Kernel) -> str:
    site = var.site
    if isinstance(site, tuple) and hasattr(site[0], "co_filename"):
        line = next((ln for start, end, ln in site[0].co_lines() if start <= site[1] < end and ln), 0)
        from opennki.errors import Loc as _Loc
        source = _Loc(site[0].co_filename, line).source()
        if source.startswith("for ") and " in " in source:
            return f"{source[4:source.index(' in ')]} (line {line})"
        return f"{var.name} (line {line})"
    return var.name
