"""Large calls that no parallel loop is around: their rows in blocks, as a loop that runs on several threads.

Kernels that work on one large tile have no loop to share among threads. Rows of an elementwise program, a copy or a scan depend on nothing
of each other where what they store does not meet, so blocks of them are the iterations of a loop. Each row is computed as before: no bit
depends on the blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from opennki.execute import abi
from opennki.execute.calls import Call, Operand, operands, over, space
from opennki.execute.nodes import Loop, Node, Run, inner
from opennki.execute.parallel import WORTH
from opennki.ir.affine import Affine, Var

if TYPE_CHECKING:
    from opennki.execute.lower import Lowering

BLOCKS = (8, 7, 6, 5, 4, 3, 2)  # numbers of blocks, the best first


def split(lowering: Lowering, body: list[Node]) -> None:
    """Put large calls into loops of their own, in a tree whose parallel loops are chosen."""
    for place, node in enumerate(body):
        if isinstance(node, Run):
            if node.call.size > WORTH:
                body[place] = _split(lowering, node) or node
        elif not (isinstance(node, Loop) and node.parallel):
            for part in inner(node):
                split(lowering, part)


def _split(lowering: Lowering, run: Run) -> Loop | None:
    call = run.call
    if call.clips or call.bounds or call.kind not in (abi.K_EW, abi.K_COPY, abi.K_SCAN):
        return None
    found = operands(call)
    walk = space(call)
    if found is None or (walk is not None and not (walk.free or walk.outer)) or not _apart(call, found):
        return None
    rows = found[0].shape[0]
    blocks = next((n for n in BLOCKS if rows % n == 0), None)
    if blocks is None:
        return None
    var = Var(f"rows{len(lowering.layout.vars)}", 0, blocks - 1)
    count = rows // blocks

    def at(expr: Affine, step: int) -> Affine:
        return expr.add(Affine(0, ((var, step * count),))) if step else expr

    steps = {o.address: o.strides[0] for o in found}
    moved: Call | None = call.but(addresses=[(at(e, steps[i]), slot) for i, (e, slot) in enumerate(call.addresses)])
    assert moved is not None
    if walk is not None:
        moved.preds = [at(e, s[0]) for e, s in zip(call.preds, walk.preds, strict=True)]
        moved.indices = [at(e, s[0]) for e, s in zip(call.indices, walk.indices, strict=True)]
        moved = over(moved, replace(walk, shape=(count, *walk.shape[1:])), tidy=False)
    else:
        what: Any = type(call.what).from_buffer_copy(call.what)
        what.rows = count
        moved = moved.but(what=what, shape=(count, *call.shape[1:]))
    if moved is None:
        return None
    lowering.layout.var(var)
    return Loop(var, blocks, [Run(moved, run.touches, {**run.ranges, var: (0, blocks - 1)})], set(), parallel=True)


def _apart(call: Call, found: list[Operand]) -> bool:
    """Whether rows store into places of their own, and read nothing that another row stores."""
    for out in found:
        if not out.written:
            continue
        if not out.strides[0]:
            return False
        reach = out.width
        dims = [(n, abs(stride)) for n, stride in zip(out.shape, out.strides, strict=True) if n > 1 and stride]
        for n, stride in sorted(dims, key=lambda d: d[1]):
            if stride < reach:
                return False  # elements that meet; with stride 0 they are of one row, or of one block
            reach = n * stride
        where = call.addresses[out.address]
        for other in found:
            at = call.addresses[other.address]
            if other is not out and at[1] == where[1] and (at[0] != where[0] or other.strides != out.strides or other.width != out.width):
                return False
    return True
