"""Capacity of SBUF and PSUM: the largest sum of tensors that are alive at one point of the program, against what a partition holds.

A tensor lives from its first to its last use in the statement list that it is made in; inner lists add to what is alive around them.
Tensors are counted after contraction (`interpret.contract`), as the compiler would shrink them too, and in full columns: a tile of fewer
partitions leaves the rest of its bytes unusable. An estimate: the compiler may reorder. Source of the sizes: `isa.target`.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import prod

from opennki.errors import Loc, NkiValueError
from opennki.ir.nodes import Alloc, DoWhile, For, If, Instr, Kernel, Stmt
from opennki.ir.verify import accesses
from opennki.isa import dtypes
from opennki.isa.target import Target

SHOWN = 6


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes per partition at the fullest point of a memory, and the tensors alive there."""

    size: int
    live: tuple[Alloc, ...]


def bytes_per_partition(alloc: Alloc) -> int:
    """Bytes that a tensor takes of each partition."""
    shape = alloc.shape
    return prod(shape[:alloc.pdim]) * prod(shape[alloc.pdim + 1:]) * dtypes.itemsize(alloc.dtype)


def peaks(kernel: Kernel) -> dict[str, Peak]:
    """The fullest point of SBUF and of PSUM."""
    return {space: _peak(kernel.body, space) for space in ("sbuf", "psum")}


def _used(stmt: Stmt) -> set[Alloc]:
    if isinstance(stmt, Instr):
        return {a.alloc for a, _, _ in accesses(stmt)}
    if isinstance(stmt, (For, DoWhile)):
        found = set().union(*map(_used, stmt.body)) if stmt.body else set()
        return found | ({stmt.cond.alloc} if isinstance(stmt, DoWhile) and stmt.cond is not None else set())
    if isinstance(stmt, If):
        return set().union(*map(_used, [*stmt.then, *stmt.orelse]))
    return set()


def _peak(body: list[Stmt], space: str) -> Peak:
    own = {s for s in body if isinstance(s, Alloc) and s.space == space}
    first: dict[Alloc, int] = {}
    last: dict[Alloc, int] = {}
    for position, stmt in enumerate(body):
        for alloc in _used(stmt) & own:
            first.setdefault(alloc, position)
            last[alloc] = position
    starts: dict[int, list[Alloc]] = {}
    ends: dict[int, list[Alloc]] = {}
    for alloc in first:
        starts.setdefault(first[alloc], []).append(alloc)
        ends.setdefault(last[alloc], []).append(alloc)
    live: dict[Alloc, int] = {}
    size, best = 0, Peak(0, ())
    for position, stmt in enumerate(body):
        for alloc in starts.get(position, ()):
            live[alloc] = bytes_per_partition(alloc)
            size += live[alloc]
        inner = _inner(stmt, space)
        if size + inner.size > best.size:
            best = Peak(size + inner.size, (*live, *inner.live))
        for alloc in ends.get(position, ()):
            size -= live.pop(alloc)
    return best


def _inner(stmt: Stmt, space: str) -> Peak:
    if isinstance(stmt, (For, DoWhile)):
        return _peak(stmt.body, space)
    if isinstance(stmt, If):
        return max(_peak(stmt.then, space), _peak(stmt.orelse, space), key=lambda p: p.size)
    return Peak(0, ())


def over_capacity(kernel: Kernel, target: Target) -> list[NkiValueError]:
    """One error for each memory that is too small."""
    out = []
    for space, peak in peaks(kernel).items():
        room = target.sbuf_usable_bytes if space == "sbuf" else target.psum_partition_bytes
        if peak.size <= room:
            continue
        largest = sorted(peak.live, key=bytes_per_partition, reverse=True)
        names = "; ".join(f"{a.name or repr(a)} {a.shape} {a.dtype}: {bytes_per_partition(a):,} at line {a.loc.line if a.loc else '?'}"
                          for a in largest[:SHOWN])
        more = f"; and {len(largest) - SHOWN} more" if len(largest) > SHOWN else ""
        loc: Loc | None = largest[0].loc
        out.append(NkiValueError(
            f"{peak.size:,} bytes per partition of {space.upper()} are alive at once, {room:,} are there", loc=loc,
            operand=f"alive, in bytes per partition: {names}{more}", rule=f"the tensors that are alive together fit {space.upper()}",
            why="what does not fit is spilled to HBM by the compiler, or refused",
            fix="use smaller tiles, make tensors inside the loop that uses them, or store results earlier"))
    return out
