"""Results that may take the place of an operand: instructions that work element by element, on an operand that nobody reads again.

Used where memory is short: a result in the bytes of its operand leaves an engine less to overlap.
"""
from __future__ import annotations

from opennki.ir.nodes import Access, Alloc, Instr, Kernel, statements
from opennki.ir.verify import accesses
from opennki.isa import dtypes
from opennki.isa.declare import ISA
from opennki.passes.liveness import Liveness

# each element of the result depends on the element of the operand in the same place only, and is written after that is read
ELEMENT_BY_ELEMENT = frozenset({"elementwise", "tensor_scalar", "activation"})


def in_place(kernel: Kernel, live: Liveness) -> dict[Alloc, Alloc]:
    """For results that may do so, the tensor whose bytes they can take; that may itself have taken those of another.

    Both are one whole tile of the same size that the kernel has not placed, made in the same statement list; the operand is used for the
    last time where the result is used for the first time.
    """
    out: dict[Alloc, Alloc] = {}
    taken: set[Alloc] = set()
    for stmt in statements(kernel.body):
        if not isinstance(stmt, Instr) or ISA[stmt.op].family not in ELEMENT_BY_ELEMENT or stmt.mask:
            continue
        used = list(accesses(stmt))
        written = [a for a, _, w in used if w and a.alloc.on_chip]
        if len(written) != 1 or not _fits(written[0]):
            continue
        result = written[0]
        reads = [a for a, r, w in used if r and not w]
        for operand in reads:
            if (_fits(operand) and operand.alloc not in taken and operand.alloc is not result.alloc and _alike(operand, result)
                    and sum(a.alloc is operand.alloc for a in reads) == 1
                    and live.homes[operand.alloc] == live.homes[result.alloc]
                    and live.intervals[operand.alloc].end == live.intervals[result.alloc].start):
                out[result.alloc] = operand.alloc
                taken.add(operand.alloc)
                break
    return out


def _fits(access: Access) -> bool:
    alloc = access.alloc
    return alloc.on_chip and alloc.pdim == 0 and alloc.placement is None and access.is_whole and access.dtype == alloc.dtype


def _alike(a: Access, b: Access) -> bool:
    return a.alloc.space == b.alloc.space and a.shape == b.shape and dtypes.itemsize(a.dtype) == dtypes.itemsize(b.dtype)
