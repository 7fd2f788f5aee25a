"""Reads of what was never written, found by native code at the granularity of tiles (`checks="fast"`).

Only tensors that are not proven to be written before they are read are watched (`passes.initialised`). Each has a byte per cell, a block of
elements as large as the places in which the kernel uses it allow. A write marks all cells that it may touch, as if no mask were there; a
read asks, before it, for cells in which it certainly has elements. So there are no false alarms, and what is missed is a read of a cell of
which only other elements were written.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING

from opennki.execute import abi
from opennki.execute.nodes import Forget, Mark
from opennki.interpret.steps import accumulates
from opennki.interpret.views import View
from opennki.ir.nodes import Access, Alloc, Instr, statements
from opennki.ir.verify import accesses

if TYPE_CHECKING:
    from opennki.execute.lower import Lowering
    from opennki.interpret.steps import Plan

MOST = 64  # cells along a dimension
ASKED = 64  # cells that one read asks for, at most


@dataclass
class Unread:
    """What is reported when a read asks for a cell that nobody wrote: the operand, and how far apart the elements are that it asks for."""

    view: View
    shape: tuple[int, ...]
    step: tuple[int, ...]


class Watch:
    """The watched tensors of a kernel: `cells` has the size of a cell and the number of cells, per dimension."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering = lowering
        self.cells: dict[Alloc, list[tuple[int, int]]] = {}
        wanted = set(lowering.tape.watch)
        if not wanted:
            return
        units: dict[Alloc, list[int]] = {}
        for stmt in statements(lowering.tape.kernel.body):
            if isinstance(stmt, Instr):
                for access, _, _ in accesses(stmt):
                    if access.alloc in wanted:
                        if access.view is not None or max(len(access.shape), len(access.dims)) > abi.RANK:
                            wanted.discard(access.alloc)
                            continue
                        known = units.setdefault(access.alloc, list(access.alloc.shape))
                        units[access.alloc] = [gcd(a, b) for a, b in zip(known, _units(access), strict=True)]
        for alloc, sizes in units.items():
            if alloc in wanted and alloc.size:
                sizes = [unit * -(-n // (unit * MOST)) for unit, n in zip(sizes, alloc.shape, strict=True)]
                self.cells[alloc] = [(unit, -(-n // unit)) for unit, n in zip(sizes, alloc.shape, strict=True)]

    def size(self, alloc: Alloc) -> int:
        """Cells of a tensor."""
        return prod(n for _, n in self.cells[alloc])

    def made(self, alloc: Alloc) -> None:
        """A tensor is made: nothing of it is written."""
        if alloc in self.cells:
            self.lowering.out.append(Forget(alloc, self.size(alloc)))

    def instruction(self, plan: Plan) -> None:
        """What an instruction reads and writes, in this order."""
        if not self.cells:
            return
        for operand in plan.inputs:
            view = operand.view
            if (
                view.alloc in self.cells and operand.reads and operand.zero is None and plan.masker is None and view.dynamic is None
                and not view.bounds and 0 not in view.shape and not accumulates(plan, operand)
            ):  # fmt: skip
                self._ask(view)
        for view, _, _ in plan.outputs:
            if view.alloc in self.cells and 0 not in view.shape:
                self._mark(view)

    def _ask(self, view: View) -> None:
        access, cells = view.access, self.cells[view.alloc]
        steps = []
        for j in range(len(access.shape)):
            moves = [max(1, cell // abs(dim.strides[j])) for dim, (cell, _) in zip(access.dims, cells, strict=True) if dim.strides[j]]
            steps.append(min(moves, default=access.shape[j]))
        shape = [-(-n // s) for n, s in zip(access.shape, steps, strict=True)]
        while prod(shape) > ASKED:  # fewer of the longest dimension
            j = shape.index(max(shape))
            steps[j] *= 2
            shape[j] = -(-access.shape[j] // steps[j])
        self.lowering.broken.append(Unread(view, tuple(shape), tuple(steps)))
        base = [self.lowering.linear(d.base) for d in access.dims]
        moving = [[s * k for s, k in zip(d.strides, steps, strict=True)] for d in access.dims]
        self.lowering.out.append(Mark(view.alloc, cells, base, tuple(shape), moving, [], len(self.lowering.broken)))

    def _mark(self, view: View) -> None:
        access, cells = view.access, self.cells[view.alloc]
        base, ends = [], []
        for dim, n in zip(access.dims, access.alloc.shape, strict=True):
            if dim.dyn is not None:  # anywhere
                base.append(self.lowering.linear(dim.base.scale(0)))
                ends.append((0, n - 1))
                continue
            base.append(self.lowering.linear(dim.base))
            reach = [s * (size - 1) for s, size in zip(dim.strides, access.shape, strict=True)]
            ends.append((sum(min(0, r) for r in reach), sum(max(0, r) for r in reach)))
        self.lowering.out.append(Mark(view.alloc, cells, base, (), [], ends, 0))


def _units(access: Access) -> list[int]:
    """For each dimension the largest block of which an access has all elements or none, as far as that is easily seen."""
    out = []
    for dim in access.dims:
        unit = gcd(dim.base.const, *(c for _, c in dim.base.terms))
        run = 1
        for s, n in zip(dim.strides, access.shape, strict=True):
            if n > 1 and abs(s) == 1:
                run = max(run, n)
            elif n > 1 and s:
                unit = gcd(unit, s)
        unit = gcd(unit, run) if dim.dyn is None else 1
        out.append(unit)
    return out
