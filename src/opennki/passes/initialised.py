"""Which tensors are proven to be written before they are read: they need no shadow state at run time.

A tensor is proven when, in the statement list that it is allocated in, writes that are always executed cover every element before the first
read: a whole write, both sides of a branch, or a loop nest whose tiles fill each dimension without gaps.
"""
from __future__ import annotations

from opennki.ir.affine import Var
from opennki.ir.nodes import Access, Alloc, DoWhile, For, If, Instr, Kernel, Stmt, statements
from opennki.ir.verify import accesses, leaves_out
from opennki.isa import dtypes


def unproven(kernel: Kernel) -> set[Alloc]:
    """Local tensors that are read and not proven to be written before, or computed from elements that a mask may have left undefined."""
    proven: set[Alloc] = set()
    _scan(kernel.body, proven)
    found = {a for a in read_anywhere(kernel.body) if a.kind == "local" and a not in proven}
    return found | _computed_from(kernel, found)


def resized(kernel: Kernel) -> set[Alloc]:
    """Tensors that are also used as a dtype of another size: no state is kept, it is one by element of the tensor's own dtype."""
    return {a.alloc for s in statements(kernel.body) if isinstance(s, Instr) for a, _, _ in accesses(s)
            if a.dtype != a.alloc.dtype and dtypes.itemsize(a.dtype) != dtypes.itemsize(a.alloc.dtype)}


def _computed_from(kernel: Kernel, found: set[Alloc]) -> set[Alloc]:
    """The on-chip tensors into which undefined elements of masked ones can spread."""
    if not found:
        return set()
    edges: list[tuple[list[Alloc], list[Alloc]]] = []
    partial: set[Alloc] = set()
    for stmt in statements(kernel.body):
        if not isinstance(stmt, Instr):
            continue
        touched = list(accesses(stmt))
        out = [a.alloc for a, _, w in touched if w and a.alloc.kind == "local" and a.alloc.on_chip]
        if leaves_out(stmt):
            partial.update(a for a in out if a in found)
        edges.append(([a.alloc for a, r, _ in touched if r], out))
    spread = True
    while spread and partial:
        spread = False
        for source, out in edges:
            if any(a in partial for a in source) and any(a not in partial for a in out):
                partial.update(out)
                spread = True
    return partial


def read_anywhere(body: list[Stmt]) -> set[Alloc]:
    """The tensors that an instruction or a loop condition reads."""
    out: set[Alloc] = set()
    for stmt in statements(body):
        if isinstance(stmt, Instr):
            out |= {a.alloc for a, r, _ in accesses(stmt) if r}
        elif isinstance(stmt, DoWhile) and stmt.cond is not None:
            out.add(stmt.cond.alloc)
    return out


def _scan(body: list[Stmt], proven: set[Alloc]) -> None:
    """Find the tensors of this list that are proven; recurse into inner lists for theirs."""
    wanted = {s for s in body if isinstance(s, Alloc)}
    for stmt in body:
        if isinstance(stmt, Instr):
            if wanted:
                _alone(stmt, wanted, proven)
            continue
        if wanted:
            reads, now, later = _effects(stmt, (), wanted)
            proven |= (now | later) - reads
            wanted -= reads | now | later
        if isinstance(stmt, (For, DoWhile)):
            _scan(stmt.body, proven)
        elif isinstance(stmt, If):
            _scan(stmt.then, proven)
            _scan(stmt.orelse, proven)
    proven |= wanted  # no statement reads them before it has written them itself, as where all of it is under one branch


def _alone(instr: Instr, wanted: set[Alloc], proven: set[Alloc]) -> None:
    """What `_scan` does with an instruction, which has no loops around it in its list."""
    touched = [t for t in accesses(instr) if t[0].alloc in wanted]
    if not touched:
        return
    reads = {access.alloc for access, is_read, _ in touched if is_read}
    if len(reads) < len(touched) and not leaves_out(instr):
        for access, is_read, is_written in touched:
            if is_written and not is_read and covers_all(access, ()):
                wanted.discard(access.alloc)
                if access.alloc not in reads:
                    proven.add(access.alloc)
    wanted -= reads


def read_first(body: list[Stmt], wanted: set[Alloc]) -> set[Alloc]:
    """Those of some tensors of which a body may read what it has not written before."""
    found: set[Alloc] = set()
    for stmt in body:
        reads, now, later = _effects(stmt, (), wanted)
        found |= reads
        wanted = wanted - reads - now - later
    return found


Effects = tuple[set[Alloc], set[Alloc], set[Alloc]]


def _effects(stmt: Stmt, loops: tuple[For, ...], wanted: set[Alloc]) -> Effects:
    """(tensors read before what is read was written, tensors written completely, tensors complete when all loops have ended)."""
    if isinstance(stmt, Instr):
        return _sequence([stmt], loops, wanted)
    if isinstance(stmt, If):
        r1, n1, l1 = _sequence(stmt.then, loops, wanted)
        r2, n2, l2 = _sequence(stmt.orelse, loops, wanted)
        return r1 | r2, n1 & n2, (n1 | l1) & (n2 | l2)
    if isinstance(stmt, For):
        return _sequence(stmt.body, (*loops, stmt), wanted) if stmt.trips > 0 else (set(), set(), set())
    if isinstance(stmt, DoWhile):
        reads, now, later = _sequence(stmt.body, loops, wanted)
        if stmt.cond is not None and stmt.cond.alloc in wanted and stmt.cond.alloc not in now:
            reads.add(stmt.cond.alloc)
        return reads, now, later
    return set(), set(), set()


def _sequence(body: list[Stmt], loops: tuple[For, ...], wanted: set[Alloc]) -> Effects:
    reads: set[Alloc] = set()
    now: set[Alloc] = set()
    later: set[Alloc] = set()
    written: dict[Alloc, set[object]] = {}
    for stmt in body:
        if not isinstance(stmt, Instr):
            r, n, l = _effects(stmt, loops, wanted)
            reads |= r - now
            now |= n
            later |= l
            continue
        # an instruction reads before it writes, whatever the order of its operands
        for access, is_read, is_written in sorted(accesses(stmt), key=lambda a: not a[1]):
            alloc = access.alloc
            if alloc not in wanted or alloc in now:
                continue
            if is_read:
                # in a loop, a read of just the part that this iteration has written is fine
                if _key(access) not in written.get(alloc, ()):
                    reads.add(alloc)
            elif is_written and not leaves_out(stmt):
                if all(d.dyn is None for d in access.dims):
                    written.setdefault(alloc, set()).add(_key(access))
                if access.is_whole:
                    now.add(alloc)
                elif covers_all(access, loops):
                    later.add(alloc)
    return reads, now, later


def _key(access: Access) -> tuple[object, ...]:
    return (access.view, access.dtype, access.shape, *((d.base.key(), d.strides, d.dyn is None) for d in access.dims))


def partly_written(kernel: Kernel) -> set[Alloc]:
    """The returned HBM tensors that are not proven to be written completely."""
    outputs = {o.alloc for o in kernel.outputs if o.alloc.kind == "local" and not o.alloc.on_chip}
    trips = {v: v.hi + 1 for v in kernel.grid}
    complete: set[Alloc] = set()

    def walk(body: list[Stmt], loops: tuple[For, ...]) -> None:
        for stmt in body:
            if isinstance(stmt, Instr) and not leaves_out(stmt):
                complete.update([a.alloc for a, _, w in accesses(stmt) if w and a.alloc in outputs and covers_all(a, loops, trips)])
            elif isinstance(stmt, For) and stmt.trips > 0:
                walk(stmt.body, (*loops, stmt))
    walk(kernel.body, ())
    return outputs - complete


def covers_all(access: Access, loops: tuple[For, ...], grid: dict[Var, int] | None = None) -> bool:
    """True when the tiles of an access over loops (and the programs of a grid) fill the tensor: each dimension without gaps from 0 to its
    end."""
    if access.mask or any(d.dyn is not None for d in access.dims):
        return False
    if access.is_whole:
        return True
    trips = {**(grid or {}), **{loop.var: loop.trips for loop in loops}}
    used: set[object] = set()
    for dim, size in zip(access.dims, access.view_shape, strict=True):
        if dim.base.const != 0:
            return False
        parts: list[tuple[int, int]] = []
        for atom, coefficient in dim.base.terms:
            if not isinstance(atom, Var) or atom not in trips or atom in used:
                return False
            used.add(atom)
            parts.append((coefficient, trips[atom]))
        for j, (s, n) in enumerate(zip(dim.strides, access.shape, strict=True)):
            if s and n > 1:
                if j in used:
                    return False
                used.add(j)
                parts.append((s, n))
        reach = 1
        for stride, count in sorted(parts):
            if stride != reach:
                return False
            reach *= count
        if reach != size:
            return False
    return True
