"""Operands of matrix products that are packed once: what products read from a tensor that nobody writes.

Native code packs the operands of a product, into the tiles of the CPU's tile unit or into panels of float32. In attention each block of
keys and values meets every block of queries; packed anew each time, that costs more than the products. Which places a product meets again
is known from the loops around it, so the tape says how many there are, and native code packs each when it first comes there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opennki import settings
from opennki.execute import abi
from opennki.execute.calls import kept_bytes, redescribed
from opennki.execute.forward import changed
from opennki.execute.nodes import Loop, Node, Repeat, Run, inner, walk
from opennki.ir.affine import Affine, Var
from opennki.ir.nodes import Alloc

if TYPE_CHECKING:
    from opennki.execute.lower import Lowering

MOST = 64 << 20  # bytes of packed operands of one product
AGAIN = 2  # runs for each place from which on an operand is kept


def keep(lowering: Lowering) -> None:
    """Mark the operands of products that are worth keeping, and products that take dot instructions as they are."""
    slots = {slot: alloc for alloc, slot in lowering.layout.allocs.items()}
    fixed = set(lowering.tape.kernel.grid)  # a program keeps for itself
    known: list[set[Alloc]] = []
    dots = settings.current().bf16_dot

    def written() -> set[Alloc]:
        """The tensors that the kernel writes anywhere."""
        if not known:
            known.append({alloc for node in walk(lowering.nodes) for alloc in changed(node)})
        return known[0]

    def visit(body: list[Node], loops: dict[Var, int], times: int) -> None:
        for node in body:
            if isinstance(node, Run):
                if node.call.kind != abi.K_MM:
                    continue
                if dots:
                    node.call = redescribed(node.call, dot=1)
                if times < AGAIN:
                    continue  # it runs once
                found = [0, 0]
                for operand in (0, 1):
                    offset, slot = node.call.addresses[operand]
                    count = places(offset, loops, fixed) if slots[slot] not in written() else None
                    if count is not None and times >= AGAIN * count:
                        size = kept_bytes(node.call.what, operand)
                        found[operand] = count if 0 < size * count <= MOST else 0
                node.call.places = found[0], found[1]
            elif isinstance(node, Loop):
                visit(node.body, {**loops, node.var: node.trips}, times * node.trips)
            else:
                for part in inner(node):
                    visit(part, loops, times * (AGAIN if isinstance(node, Repeat) else 1))

    visit(lowering.nodes, {}, 1)


def places(offset: Affine, loops: dict[Var, int], fixed: set[Var]) -> int | None:
    """How many values an offset has in the loops around it, at most; None where it depends on something else."""
    count = 1
    for atom, _ in offset.terms:
        if not isinstance(atom, Var) or (atom not in loops and atom not in fixed):
            return None
        count *= loops.get(atom, 1)
    return count
