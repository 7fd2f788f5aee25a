"""Liveness of tensors in program order.

Each instruction has a position, and each loop or branch two, its begin and its end. A tensor lives from its first to its last use
in the statement list that it is made in; a use inside a loop or branch counts from the begin to the end of that, because the next
iteration may need the value again. Tensors made in a loop body are made anew by each iteration.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from opennki.errors import Loc
from opennki.ir.nodes import Alloc, DoWhile, For, If, Instr, Kernel, Stmt
from opennki.ir.verify import accesses

Compound = For | If | DoWhile


@dataclass(frozen=True, slots=True)
class Interval:
    """Positions of the first and the last use of a tensor, inclusive."""

    start: int
    end: int

    def meets(self, other: Interval) -> bool:
        """True when both tensors are alive at some position."""
        return self.start <= other.end and other.start <= self.end


@dataclass(slots=True)
class Liveness:
    """What is alive where.

    `intervals`: of the on-chip tensors that are used. `spans`: begin and end of each loop and branch. `homes`: for each tensor,
    the loops and branches around its allocation, outermost first. `places`: source location of each position.
    """

    intervals: dict[Alloc, Interval] = field(default_factory=dict)
    spans: dict[int, Interval] = field(default_factory=dict)
    homes: dict[Alloc, tuple[Compound, ...]] = field(default_factory=dict)
    places: list[Loc | None] = field(default_factory=list)

    def span(self, stmt: Compound) -> Interval:
        """Begin and end of a loop or branch."""
        return self.spans[id(stmt)]

    def loops(self, alloc: Alloc) -> tuple[For | DoWhile, ...]:
        """The loops around the allocation of a tensor, outermost first."""
        return tuple(s for s in self.homes[alloc] if not isinstance(s, If))


def liveness(kernel: Kernel) -> Liveness:
    """The intervals in which the on-chip tensors of a kernel are alive."""
    found = Liveness()
    _Walk(kernel, found).body(kernel.body)
    return found


class _Walk:
    def __init__(self, kernel: Kernel, found: Liveness) -> None:
        self.kernel, self.found = kernel, found
        self.open: list[Compound] = []
        self.outer: list[set[Alloc]] = []  # for each open statement, the tensors from outside of it that it uses
        self.first: dict[Alloc, int] = {}

    def position(self, loc: int) -> int:
        self.found.places.append(self.kernel.loc(loc))
        return len(self.found.places) - 1

    def body(self, body: list[Stmt]) -> None:
        for stmt in body:
            if isinstance(stmt, Alloc):
                if stmt.on_chip:
                    self.found.homes[stmt] = tuple(self.open)
            elif isinstance(stmt, Instr):
                here = self.position(stmt.loc)
                for access, _, _ in accesses(stmt):
                    self.use(access.alloc, here)
            elif isinstance(stmt, If):
                self.enter(stmt)
                self.body(stmt.then)
                self.body(stmt.orelse)
                self.leave(stmt)
            else:
                self.enter(stmt)
                self.body(stmt.body)
                if isinstance(stmt, DoWhile) and stmt.cond is not None:
                    self.use(stmt.cond.alloc, self.position(stmt.loc))
                self.leave(stmt)

    def use(self, alloc: Alloc, here: int) -> None:
        if not alloc.on_chip:
            return
        depth = len(self.found.homes.get(alloc, ()))
        if depth < len(self.open):
            self.outer[-1].add(alloc)
        else:
            self.extend(alloc, here, here)

    def extend(self, alloc: Alloc, start: int, end: int) -> None:
        known = self.found.intervals.get(alloc)
        self.found.intervals[alloc] = Interval(start, end) if known is None else Interval(min(start, known.start), max(end, known.end))

    def enter(self, stmt: Compound) -> None:
        self.found.spans[id(stmt)] = Interval(self.position(stmt.loc), -1)
        self.open.append(stmt)
        self.outer.append(set())

    def leave(self, stmt: Compound) -> None:
        span = Interval(self.found.spans[id(stmt)].start, self.position(stmt.loc))
        self.found.spans[id(stmt)] = span
        self.open.pop()
        for alloc in self.outer.pop():
            if len(self.found.homes.get(alloc, ())) < len(self.open):
                self.outer[-1].add(alloc)
            else:
                self.extend(alloc, span.start, span.end)
