"""Independence of the iterations of affine loops and of the programs of a grid.

Different values of a loop index or program id must write different elements, and read none that another one writes. That is
proven from the accesses, or broken for certain (`Findings.problems`), or left to the interpreter, which then records which
iteration or program touched each element (`Suspect`): programs may also be ordered by meeting each other. Accumulation of
matmuls into PSUM is meant to meet in one place; accumulation by other engines is reported as `carried`.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from opennki.errors import Loc, NkiError, make
from opennki.ir.affine import Affine, Var
from opennki.ir.nodes import Access, Alloc, DoWhile, For, If, IndexTile, Instr, Kernel, PredTile, Stmt, statements
from opennki.ir.verify import accesses, describe, reads_of
from opennki.isa import dtypes
from opennki.isa.declare import ISA
from opennki.trace.merge import same

# operators whose repeated use on one place gives the same result in any order
_ANY_SIDE = frozenset({"add", "multiply", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or",
                       "logical_xor"})
_LEFT_SIDE = _ANY_SIDE | {"subtract", "divide"}


@dataclass(frozen=True, slots=True)
class Suspect:
    """An access that may meet what another iteration or program (value of `var`) touches. `mode`: a `write` meets other writes and reads,
    an `update` in place meets reads, a `read` meets writes; `kind` is the check that it belongs to. For programs, `var` is the first of
    their indices, whichever they differ in."""

    instr: Instr
    access: Access
    var: Var
    mode: str = "write"
    kind: str = "race"


@dataclass(slots=True)
class Findings:
    """What is known before a kernel runs: `problems` are (kind of check, error), `suspects` are for the interpreter."""

    problems: list[tuple[str, NkiError]] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)


@dataclass(slots=True)
class _Touch:
    instr: Instr
    access: Access
    reads: bool
    writes: bool
    update: str
    guarded: frozenset[Var]


def separates(access: Access, var: Var, counts: dict[Var, int]) -> bool:
    """True when different values of a variable certainly address different elements."""
    return disjoint([access], var, counts)


def disjoint(group: list[Access], var: Var, counts: dict[Var, int]) -> bool:
    """True when, for different values of a variable, no element is addressed by any two of the accesses.

    One dimension is enough in which all of them have the variable with one coefficient, and in which the strides of what they have in
    common are a mixed radix above the window that the rest of the index can reach.
    """
    first = group[0]
    if any(a.view_shape != first.view_shape for a in group):
        return False
    return any(_separated([a.dims[axis] for a in group], [a.shape for a in group], var, counts) for axis in range(len(first.dims)))


def _separated(dims: list[object], shapes: list[tuple[int, ...]], var: Var, counts: dict[Var, int]) -> bool:
    common: dict[Var, int] | None = None
    spans: list[list[tuple[int, int]]] = []
    for dim, shape in zip(dims, shapes, strict=True):
        base: Affine = dim.base  # type: ignore[attr-defined]
        if dim.dyn is not None or not base.coefficient(var) or any(not isinstance(a, Var) for a, _ in base.terms):  # type: ignore[attr-defined]
            return False
        terms = {a: c for a, c in base.terms if isinstance(a, Var)}
        common = terms if common is None else {a: c for a, c in common.items() if terms.get(a) == c}
        spans.append(sorted((s, n) for s, n in zip(dim.strides, shape, strict=True) if s and n > 1))  # type: ignore[attr-defined]
    assert common is not None
    if var not in common:
        return False
    strided = any(s != spans[0] for s in spans)
    low, high = [], []
    for dim, span in zip(dims, spans, strict=True):
        lo = hi = dim.base.const  # type: ignore[attr-defined]
        rest = [(c, counts.get(a, a.hi - a.lo + 1)) for a, c in dim.base.terms if a not in common]  # type: ignore[attr-defined]
        for step, count in rest + (span if strided else []):
            lo, hi = lo + min(0, step * (count - 1)), hi + max(0, step * (count - 1))
        low.append(lo)
        high.append(hi)
    parts = [(abs(c), counts.get(a, a.hi - a.lo + 1)) for a, c in common.items()]
    parts += [] if strided else [(abs(s), n) for s, n in spans[0]]
    reach = max(high) - min(low)
    for stride, count in sorted(parts):
        if count > 1 and stride <= reach:
            return False
        reach += stride * (count - 1)
    return True


def update_of(instr: Instr, access: Access) -> str:
    """How an instruction updates what it writes in place: '' (it overwrites), `sum` (the Tensor Engine or a DMA accumulates), `fold` (an
    operator that gives the same result in any order) or `step` (the result depends on the order)."""
    decl = ISA[instr.op]
    itself = []
    for param, value in zip(decl.params, instr.operands, strict=True):
        if not isinstance(value, Access):
            continue
        if value is access and getattr(param.spec, "role", "") == "inout":
            if reads_of(decl, param, instr.operands):
                return "sum" if decl.family in ("matmul", "dma", "accumulate") else "fold"
        elif getattr(param.spec, "role", "") == "in" and same(value, access):
            itself.append(param.name)
    if not itself:
        return ""
    values = {p.name: v for p, v in zip(decl.params, instr.operands, strict=True)}
    operator = values.get("op", values.get("op0"))
    if values.get("op1") is not None:
        return "step"
    first = itself[0] in ("data1", "data", "x") and not values.get("reverse0")
    return "fold" if operator in _ANY_SIDE or (first and operator in _LEFT_SIDE) else "step"


def depends(instr: Instr, var: Var) -> bool:
    """Whether a loop index or program id stands in an instruction: in its mask, an operand, or the place of one."""
    return (any(var in p.expr.variables() for p in instr.mask) or any(used_by(v, var) for v in instr.operands)
            or any(var in dim.base.variables() for a, _, _ in accesses(instr) for dim in a.dims))


def used_by(value: Any, var: Var) -> bool:
    """Whether a loop index or program id stands in an operand, apart from the places of tiles."""
    if isinstance(value, Access):
        return any(var in p.expr.variables() for p in value.mask)
    if isinstance(value, Affine):
        return var in value.variables()
    if isinstance(value, IndexTile):
        return var in value.base.variables()
    if isinstance(value, PredTile):
        return any(var in p.expr.variables() for p in value.preds)
    return isinstance(value, tuple) and any(used_by(v, var) for v in value)


def check(kernel: Kernel) -> Findings:
    """What can be said about the independence of a kernel's iterations and programs before it runs."""
    found = Findings()
    counts = {v: v.hi + 1 for v in kernel.grid}
    shared = {p for p in kernel.params} | {a for a in statements(kernel.body) if isinstance(a, Alloc) and a.space == "shared_hbm"}
    grid = [v for v in kernel.grid if v.hi > 0]
    groups: dict[tuple[Alloc, Var], list[_Touch]] = {}
    of_programs: dict[Alloc, list[_Touch]] = {}
    writes: list[tuple[_Touch, list[Var]]] = []
    for touch, variables in _touches(kernel.body, [], frozenset(), counts, shared if grid else set(), {}):
        for var in variables:
            groups.setdefault((touch.access.alloc, var), []).append(touch)
        if touch.access.alloc in shared:
            of_programs.setdefault(touch.access.alloc, []).append(touch)
        if touch.writes:
            writes.append((touch, variables + grid if touch.update and touch.access.alloc in shared else variables))
    for touch, variables in writes:
        _write(touch, [v for v in variables if not _repeats(touch, v, groups)], kernel, counts, found)
    for (alloc, var), touches in groups.items():
        _reads(alloc, var, touches, counts, found)
    if grid:
        for touches in of_programs.values():
            _programs(touches, grid, counts, found)
    return found


def _programs(touches: list[_Touch], grid: list[Var], counts: dict[Var, int], found: Findings) -> None:
    """Accesses of a tensor that all programs share: each has places of its own, or running the kernel must tell who is where, and when."""
    if not any(t.writes for t in touches):
        return
    every = [t.access for t in touches]
    if all(disjoint(every, var, counts) for var in grid):
        return
    for t in touches:
        found.suspects.append(Suspect(t.instr, t.access, grid[0], "update" if t.update == "sum" else "write" if t.writes else "read"))


def _touches(body: list[Stmt], loops: list[For], guards: frozenset[Var], counts: dict[Var, int], shared: set[Alloc],
             depth: dict[Alloc, int]) -> Iterator[tuple[_Touch, list[Var]]]:
    for stmt in body:
        if isinstance(stmt, Alloc):
            depth[stmt] = len(loops)
        elif isinstance(stmt, Instr):
            for access, is_read, is_written in accesses(stmt):
                alloc = access.alloc
                if alloc.kind in ("register", "constant"):
                    continue
                variables = [loop.var for loop in loops[depth.get(alloc, 0):] if loop.kind == "affine" and loop.trips > 1]
                if variables or alloc in shared:
                    masked = guards.union(v for p in stmt.mask for v in p.expr.variables()) if stmt.mask else guards
                    yield _Touch(stmt, access, is_read, is_written, update_of(stmt, access) if is_written else "", masked), variables
        elif isinstance(stmt, For):
            counts[stmt.var] = stmt.trips
            yield from _touches(stmt.body, [*loops, stmt], guards, counts, shared, depth)
        elif isinstance(stmt, DoWhile):
            yield from _touches(stmt.body, loops, guards, counts, shared, depth)
        elif isinstance(stmt, If):
            inner = guards.union(stmt.pred.expr.variables())
            yield from _touches(stmt.then, loops, inner, counts, shared, depth)
            yield from _touches(stmt.orelse, loops, inner, counts, shared, depth)


def _repeats(touch: _Touch, var: Var, groups: dict[tuple[Alloc, Var], list[_Touch]]) -> bool:
    """Whether every value of a loop index writes the same data to the same place, which is as good as writing it once: nothing that the
    instruction says depends on the index, no iteration writes what it reads, and no other instruction writes there."""
    instr, decl = touch.instr, ISA[touch.instr.op]
    if touch.update or var.kind != "loop" or decl.random or decl.suspends or var in touch.guarded or depends(instr, var):
        return False
    if any(other.writes and other.instr is not instr for other in groups[touch.access.alloc, var]):
        return False
    for access, is_read, _ in accesses(instr):
        if is_read and access.alloc.kind != "constant":
            there = groups.get((access.alloc, var))  # None for registers too, which any instruction may change
            if there is None or any(other.writes for other in there):  # made in the loop, or written there
                return False
    return True


def _write(touch: _Touch, variables: list[Var], kernel: Kernel, counts: dict[Var, int], found: Findings) -> None:
    """Two values of a variable that write one place."""
    if touch.update == "sum":
        return
    access, loc = touch.access, kernel.loc(touch.instr.loc)
    fixed = [v for v in variables if v not in touch.guarded
             and not any(v in d.base.variables() or d.dyn is not None for d in access.dims)]
    if fixed:
        kind = "carried" if touch.update == "fold" else "race"
        found.problems.append((kind, dependency(access, fixed, loc, kernel, touch.update)))
        return
    if not touch.update and dtypes.itemsize(access.dtype) == dtypes.itemsize(access.alloc.dtype):
        found.suspects += [Suspect(touch.instr, access, v) for v in variables if not separates(access, v, counts)]


def _reads(alloc: Alloc, var: Var, touches: list[_Touch], counts: dict[Var, int], found: Findings) -> None:
    """Reads of what another value of a variable writes."""
    updated = {id(t.instr) for t in touches if t.update}
    reads = [t for t in touches if t.reads and not t.writes and id(t.instr) not in updated]
    writes = [t for t in touches if t.writes]
    if not reads or not writes or disjoint([t.access for t in reads + writes], var, counts):
        return
    if any(dtypes.itemsize(t.access.dtype) != dtypes.itemsize(alloc.dtype) for t in reads + writes):
        return
    kind = "carried"
    found.suspects += [Suspect(t.instr, t.access, var, "read", kind) for t in reads]
    known = {(s.access, s.var) for s in found.suspects if s.mode == "write"}
    found.suspects += [Suspect(t.instr, t.access, var, "update", kind) for t in writes if (t.access, var) not in known]


_CARRIED_WHY = ("on the device the iterations overlap, and only the Tensor Engine accumulates in PSUM; an update by another "
                "engine carries a value from one iteration to the next")
_CARRIED_FIX = ("use nl.sequential_range for the loop, or accumulate matmuls into a PSUM tensor, or index the target with the "
                "loop index and combine the parts after the loop")


def dependency(access: Access, variables: list[Var], loc: Loc | None, kernel: Kernel, update: str = "", read: bool = False) -> NkiError:
    """The error of iterations or programs that meet in one place."""
    loops = [v for v in variables if v.kind == "loop"]
    names = ", ".join(_name(v, kernel) for v in loops or variables)
    where = describe(access)
    if loops:
        who = f"different iterations of the affine loop{'s' if len(loops) > 1 else ''} {names}"
    else:
        who = f"different programs of the grid (axes {', '.join(v.name[3:] for v in variables)})"
    if read:
        text = f"{who} meet: one reads elements of {where} that another one writes"
    elif update == "fold":
        text = f"{who} accumulate into the same elements of {where}"
    elif update == "step":
        text = f"{who} update the same elements of {where}, and the result depends on their order"
    else:
        text = f"{who} write the same elements of {where}"
    error = make("err_unexpected_output_dependencies", text, loc=loc)
    if loops and (update or read):
        error.why, error.fix = _CARRIED_WHY, _CARRIED_FIX
    elif read:
        error.fix = "let each program read only what it wrote itself, or meet at a barrier between the write and the read"
    return error


def _name(var: Var, kernel: Kernel) -> str:
    site = var.site
    if isinstance(site, tuple) and hasattr(site[0], "co_filename"):
        line = next((ln for start, end, ln in site[0].co_lines() if start <= site[1] < end and ln), 0)
        source = Loc(site[0].co_filename, line).source()
        if source.startswith("for ") and " in " in source:
            return f"{source[4:source.index(' in ')]} (line {line})"
        return f"{var.name} (line {line})"
    return var.name
