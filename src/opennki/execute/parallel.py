"""Which loops run on several threads: those whose iterations provably share nothing but what they only read.

The proof is by windows: along some dimension, everything that an iteration touches of a tensor that the loop writes lies in a window that
moves with the loop index by at least its own length (or in places that interleave without meeting). Tensors that are made in the loop, or
that every iteration writes before it reads them and nobody needs afterwards, are of one iteration. Results do not depend on the number of
threads: an iteration is computed by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opennki.execute.nodes import Back, Loop, Made, Node, Repeat, Run, Zero, inner, walk, work
from opennki.ir.affine import Range, Var
from opennki.ir.nodes import Access, Alloc
from opennki.ir.verify import accesses
from opennki.trace.independence import disjoint

if TYPE_CHECKING:
    from opennki.execute.lower import Lowering
    from opennki.interpret.machine import Tape

WORTH = 1 << 17  # elements that a loop handles, from which threads pay
FEW = 8  # iterations below which a loop inside may share the work better

Use = tuple[Access, bool, dict[Var, Range]]  # access, whether it is written, the ranges of the loops around it


def independent(lowering: Lowering, body: list[Node], var: Var, programs: bool = False) -> set[Alloc] | None:
    """The tensors that each iteration has for itself, or None where iterations are not proven independent. `programs`: the iterations are
    the programs of a grid, which share the tensors in shared HBM that they make."""
    own: set[Alloc] = set()
    uses: dict[Alloc, list[Use]] = {}
    for node in walk(body):
        if isinstance(node, Back):
            return None
        if isinstance(node, Made):
            if not (programs and node.alloc.space == "shared_hbm"):
                own.add(node.alloc)
        elif isinstance(node, Repeat):
            uses.setdefault(node.cond.alloc, []).append((node.cond, False, {}))
        elif isinstance(node, Run):
            for access, written in node.touches:
                uses.setdefault(access.alloc, []).append((access, written, node.ranges))
    fresh = None if programs else restarted(lowering, body)
    for alloc, seen in uses.items():
        if alloc in own:
            if alloc.space == "shared_hbm":
                return None  # made in a loop: one memory for all iterations
            continue
        if not any(written for _, written, _ in seen) or windows(var, seen):
            continue
        if alloc in lowering.registers[0]:
            own.add(alloc)
            continue
        if fresh is None or alloc not in fresh:
            return None
        own.add(alloc)
    zeroed = {node.alloc for node in walk(body) if isinstance(node, Zero)}
    return own & (uses.keys() | zeroed) if zeroed <= own else None


def registers(body: list[Node], tape: Tape) -> tuple[set[Alloc], set[Alloc]]:
    """The registers that nothing reads, and those that nothing writes: what is left in them from before does not matter."""
    read = {access.alloc for access in tape.kernel.outputs}
    written: set[Alloc] = set()
    for node in walk(body):
        if isinstance(node, Back):
            read |= used(node)
            written |= used(node)
        elif isinstance(node, Run):
            for access, writes in node.touches:
                (written if writes else read).add(access.alloc)
    found = {a for a in read | written if a.kind == "register"}
    return found - read, found - written


def uses(body: list[Node], tape: Tape) -> dict[Alloc, int]:
    """How many nodes use each tensor; tensors that outlive the kernel count once more."""
    count: dict[Alloc, int] = {}
    for node in walk(body):
        for alloc in {a.alloc for a, _ in node.touches} if node.__class__ is Run else used(node):
            count[alloc] = count.get(alloc, 0) + 1
    for access in tape.kernel.outputs:
        count[access.alloc] = count.get(access.alloc, 0) + 1
    return count


def used(node: Node) -> set[Alloc]:
    """The tensors that a node itself uses."""
    kind = node.__class__
    if kind is Run:
        return {a.alloc for a, _ in node.touches}
    if kind is Back:
        return {a.alloc for a, _, _ in accesses(node.instr)}
    return {node.cond.alloc} if kind is Repeat else set()


def restarted(lowering: Lowering, body: list[Node]) -> set[Alloc]:
    """The tensors on chip that every execution of a body writes completely before it reads them, and that nobody else uses."""
    count: dict[Alloc, int] = {}
    for node in walk(body):
        for alloc in used(node):
            count[alloc] = count.get(alloc, 0) + 1
    out: set[Alloc] = set()
    met: set[Alloc] = set()
    for node in body:
        if isinstance(node, Run) and node.call.overwrites:
            read = {a.alloc for a, written in node.touches if not written}
            out.update(
                [a.alloc for a, written in node.touches if written and a.is_whole and a.alloc.on_chip and a.alloc.kind == "local"
                 and a.alloc not in met | read and count[a.alloc] == lowering.uses[a.alloc]]
            )  # fmt: skip
        for one in walk([node]):
            met |= used(one)
    return out


def windows(var: Var, uses: list[Use]) -> bool:
    """Whether what each iteration touches is apart from what all others touch."""
    first = uses[0][0]
    views = {(a.view_shape, a.dtype) for a, _, _ in uses}
    if len(views) != 1 or any(d.dyn is not None for a, _, _ in uses for d in a.dims):
        return False
    for axis in range(len(first.dims)):
        steps = {a.dims[axis].base.coefficient(var) for a, _, _ in uses}
        if len(steps) != 1 or 0 in steps:
            continue
        (step,) = steps
        low: int | None = None
        high = 0
        for access, _, ranges in uses:
            dim = access.dims[axis]
            if any(atom is not var and var in atom.variables() for atom, _ in dim.base.terms):
                break  # the index is inside a division
            a, b = dim.base.range({**ranges, var: (0, 0)})
            for s, n in zip(dim.strides, access.shape, strict=True):
                a, b = a + min(0, s * (n - 1)), b + max(0, s * (n - 1))
            low, high = (a, b) if low is None else (min(low, a), max(high, b))
        else:
            if low is not None and high - low < abs(step):
                return True
    counts: dict[Var, int] = {}
    last: Any = None
    for _, _, ranges in uses:
        if ranges is not last:
            last = ranges
            counts.update([(v, high - low + 1) for v, (low, high) in ranges.items()])
    return disjoint([a for a, _, _ in uses], var, counts)


def choose(lowering: Lowering, body: list[Node]) -> None:
    """Mark the loops that run on several threads: of each nest one loop, the outermost that is worth it, unless it has few iterations and
    the loops inside share all of its work better."""
    for node in body:
        if node.__class__ is Run or (node.__class__ is Loop and _marked(lowering, node)):
            continue
        for part in inner(node):
            choose(lowering, part)


def _marked(lowering: Lowering, loop: Loop) -> bool:
    if loop.trips < 2 or loop.trips * work(loop.body) <= WORTH:
        return False
    own = loop.own if loop.own is not None else independent(lowering, loop.body, loop.var)
    if own is None:
        return False
    if loop.trips < FEW and _shared_inside(lowering, loop):
        return False
    loop.own, loop.parallel = own, True
    return True


def _shared_inside(lowering: Lowering, loop: Loop) -> bool:
    """Whether loops inside have more iterations, and nearly all of the work."""
    inside = 0
    for node in loop.body:
        if isinstance(node, Loop) and node.trips >= FEW and node.trips * work(node.body) > 4 * WORTH:
            if node.own is None:
                node.own = independent(lowering, node.body, node.var)
            if node.own is not None:
                inside += node.trips * work(node.body)
    return inside >= 0.95 * work(loop.body)


