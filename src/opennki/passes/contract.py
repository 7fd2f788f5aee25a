"""Contraction: tensors of which an iteration uses only its own part are kept for one iteration.

Kernels declare block tensors such as `(16, 4, par_dim(128), 512)` and address them as `t[i, j, ...]` with the indices of the loops
around. Where every access has the same loop index in a dimension, an iteration of that loop meets only its own slice: the dimension shrinks
to one and the tensor moves into the loop. Memory falls from the logical size to what is alive, and stays in the cache. Values and checks
are the same. A loop around it, inside of which the tensor lives on, comes back to a slice: that has to be written anew each time before it
is read.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from opennki.ir.affine import Affine, Var
from opennki.ir.nodes import Access, Alloc, Dim, DoWhile, For, If, Instr, Kernel, Stmt, statements, whole
from opennki.ir.verify import accesses
from opennki.isa.declare import ISA
from opennki.passes.initialised import covers_all, read_first

SMALLEST = 1 << 18  # elements below which it is not worth while
_ZERO = Affine()


def contracted(kernel: Kernel, smallest: int = SMALLEST, direct: bool = True) -> Kernel:
    """The kernel with such tensors of at least `smallest` elements contracted; the same object where there are none. `direct`: also those
    that the kernel has placed itself, whose places count their blocks."""
    if not any(isinstance(stmt, (For, If, DoWhile)) for stmt in kernel.body):
        return kernel  # no loops
    if not any(isinstance(stmt, Alloc) and stmt.space != "shared_hbm" and prod(stmt.shape) >= smallest for stmt in statements(kernel.body)):
        return kernel
    kept = {o.alloc for o in kernel.outputs}
    uses: dict[Alloc, dict[int, Var | None]] = {}
    depth: dict[Var, int] = {}
    fills = _fills(kernel.body)
    _collect(kernel.body, uses, depth, 0, {f for f in fills.values() if f is not None})
    nests = _Nests(kernel.body)
    plans: dict[Alloc, Contraction] = {}
    for alloc, dims in uses.items():
        own = {k: v for k, v in dims.items() if v is not None and alloc.shape[k] > 1}
        if alloc.placement is not None and not direct:
            continue
        if not own or alloc in kept or alloc.kind != "local" or alloc.space == "shared_hbm" or prod(alloc.shape) < smallest:
            continue
        shape = tuple(1 if k in own else n for k, n in enumerate(alloc.shape))
        home = max(own.values(), key=lambda v: depth[v])
        new = replace(alloc, shape=shape)
        fill = fills.get(alloc)
        plan = Contraction(new, own, home, fill, None if fill is None else _refill(fill, new))
        if not nests.carries(alloc, plan):
            plans[alloc] = plan
    if not plans:
        return kernel
    dropped = {p.fill for p in plans.values() if p.fill is not None}
    return replace(kernel, body=_rewrite(kernel.body, plans, dropped))


@dataclass(frozen=True, slots=True)
class Contraction:
    """A tensor that shrinks: the new tensor, the loop index of each dimension that goes, the loop that it moves into, and the instruction
    that fills all of it with a constant, before and after."""

    new: Alloc
    own: dict[int, Var]
    home: Var
    fill: Instr | None
    refill: Instr | None


class _Nests:
    """Which loops are around what."""

    def __init__(self, body: list[Stmt]) -> None:
        self.around: dict[Alloc | Var, tuple[For | DoWhile, ...]] = {}
        self._walk(body, ())

    def _walk(self, body: list[Stmt], loops: tuple[For | DoWhile, ...]) -> None:
        for stmt in body:
            if isinstance(stmt, Alloc):
                self.around[stmt] = loops
            elif isinstance(stmt, For):
                self.around[stmt.var] = (*loops, stmt)
                self._walk(stmt.body, (*loops, stmt))
            elif isinstance(stmt, DoWhile):
                self._walk(stmt.body, (*loops, stmt))
            elif isinstance(stmt, If):
                self._walk(stmt.then, loops)
                self._walk(stmt.orelse, loops)

    def carries(self, alloc: Alloc, plan: Contraction) -> bool:
        """Whether an iteration of the loop that the tensor moves into may read what an earlier one left in the same slice."""
        loops, own = self.around[plan.home], set(plan.own.values())
        if all(isinstance(loop, For) and (loop.var in own or loop.trips < 2) for loop in loops[len(self.around[alloc]):]):
            return False
        return plan.new in read_first(_rewrite(loops[-1].body, {alloc: plan}, set()), {plan.new})


def _fills(body: list[Stmt]) -> dict[Alloc, Instr | None]:
    """For tensors made in a statement list: the instruction right after it that gives the whole of it a constant value."""
    out: dict[Alloc, Instr | None] = {}
    for stmt in body:
        if isinstance(stmt, Alloc):
            out[stmt] = None
        elif isinstance(stmt, Instr):
            for access, _, _ in accesses(stmt):
                if access.alloc in out:
                    if out[access.alloc] is None and _is_constant_fill(stmt, access):
                        out[access.alloc] = stmt
                    else:
                        # read or written again at this level: nothing to move
                        out[access.alloc] = out[access.alloc] if out[access.alloc] is None else None
        else:
            inner = {a for s in statements([stmt]) if isinstance(s, Instr) for a in (x.alloc for x, _, _ in accesses(s))}
            for alloc in inner & set(out):
                found = out.pop(alloc)
                if found is not None:
                    out[alloc] = found
    return out


def _is_constant_fill(instr: Instr, access: Access) -> bool:
    decl = ISA[instr.op]
    return (len(instr.results) == 1 and instr.results[0] is access and not instr.mask and not decl.random and "shape" in decl.index
            and not any(isinstance(v, Access) for v in instr.operands) and access.size == access.alloc.size and covers_all(access, ()))


def _refill(fill: Instr, new: Alloc) -> Instr:
    operands = list(fill.operands)
    operands[ISA[fill.op].index["shape"]] = new.shape
    return replace(fill, results=(whole(new),), operands=tuple(operands))


def _collect(body: list[Stmt], uses: dict[Alloc, dict[int, Var | None]], depth: dict[Var, int], level: int, fills: set[Instr]) -> None:
    for stmt in body:
        if isinstance(stmt, Instr):
            if stmt in fills:
                continue
            for access, _, _ in accesses(stmt):
                _use(access, uses, depth)
        elif isinstance(stmt, For):
            depth[stmt.var] = level
            _collect(stmt.body, uses, depth, level + 1, fills)
        elif isinstance(stmt, DoWhile):
            _collect(stmt.body, uses, depth, level + 1, fills)
            if stmt.cond is not None:
                _use(stmt.cond, uses, depth)
        elif isinstance(stmt, If):
            _collect(stmt.then, uses, depth, level, fills)
            _collect(stmt.orelse, uses, depth, level, fills)


def _use(access: Access, uses: dict[Alloc, dict[int, Var | None]], depth: dict[Var, int]) -> None:
    alloc = access.alloc
    known = uses.get(alloc)
    if access.view is not None or access.dtype != alloc.dtype:
        uses[alloc] = {}
        return
    found = {k: _index_of(d, depth) for k, d in enumerate(access.dims)}
    if known is None:
        uses[alloc] = found
    else:
        uses[alloc] = {k: v for k, v in known.items() if found.get(k) is v}


def _index_of(dim: Dim, depth: dict[Var, int]) -> Var | None:
    """The loop index that a dimension is addressed with, if it is just that."""
    if dim.dyn is not None or any(dim.strides) or dim.base.const or len(dim.base.terms) != 1:
        return None
    atom, coefficient = dim.base.terms[0]
    return atom if coefficient == 1 and isinstance(atom, Var) and atom in depth else None


def _rewrite(body: list[Stmt], plans: dict[Alloc, Contraction], dropped: set[Instr]) -> list[Stmt]:
    out: list[Stmt] = []
    for stmt in body:
        if isinstance(stmt, Alloc):
            if stmt not in plans:
                out.append(stmt)
        elif isinstance(stmt, Instr):
            if stmt not in dropped:
                out.append(replace(stmt, results=_operand(stmt.results, plans), operands=_operand(stmt.operands, plans)))
        elif isinstance(stmt, For):
            moved = [p for p in plans.values() if p.home is stmt.var]
            here: list[Stmt] = [*(p.new for p in moved), *(p.refill for p in moved if p.refill is not None)]
            out.append(replace(stmt, body=here + _rewrite(stmt.body, plans, dropped)))
        elif isinstance(stmt, If):
            out.append(replace(stmt, then=_rewrite(stmt.then, plans, dropped), orelse=_rewrite(stmt.orelse, plans, dropped)))
        else:
            out.append(replace(stmt, body=_rewrite(stmt.body, plans, dropped), cond=_operand(stmt.cond, plans)))
    return out


def _operand(value: Any, plans: dict[Alloc, Contraction]) -> Any:
    if isinstance(value, tuple):
        return tuple(_operand(v, plans) for v in value)
    if not isinstance(value, Access):
        return value
    dims = tuple(d if d.dyn is None else replace(d, dyn=_operand(d.dyn, plans)) for d in value.dims)
    plan = plans.get(value.alloc)
    if plan is None:
        return value if all(d.dyn is None for d in value.dims) else replace(value, dims=dims)
    return replace(value, alloc=plan.new, dims=tuple(replace(d, base=_ZERO) if k in plan.own else d for k, d in enumerate(dims)))
