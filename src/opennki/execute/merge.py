"""Merging of small tiles: a loop of calls on small tiles as calls that have the loop as one more dimension.

Where the iterations of a loop provably share nothing, its calls may run for many iterations at once, one call after the other. A loop of
tiny calls becomes a loop over blocks of iterations; a block is as large as pays, and no larger, so that what one call leaves for the
next is still in the cache, and other threads find blocks of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from opennki.execute.assemble import Walk
from opennki.execute.calls import Call, over, space, widened
from opennki.execute.nodes import Loop, Made, Node, Run, inner
from opennki.execute.parallel import independent
from opennki.ir.affine import ZERO, Affine, Var, constant

if TYPE_CHECKING:
    from opennki.execute.lower import Lowering

SMALL = 1 << 13  # elements of an iteration below which merging pays
BLOCK = 1 << 15  # elements of a block of iterations, about, where one call leaves something for the next
ALONE = 1 << 19  # and of a call that is alone, for which nothing but long rows count


def merge(lowering: Lowering, body: list[Node]) -> None:
    """Merge loops of small calls in a list of nodes, inner loops first."""
    out: list[Node] = []
    for node in body:
        if isinstance(node, Run):
            node.call = widened(node.call)
            out.append(node)
            continue
        for part in inner(node):
            merge(lowering, part)
        out += (_merged(lowering, node) if isinstance(node, Loop) else None) or [node]
    body[:] = out


def _merged(lowering: Lowering, loop: Loop) -> list[Node] | None:
    """What stands for a loop, None where it stays."""
    runs = [node for node in loop.body if isinstance(node, Run)]
    made = [node for node in loop.body if isinstance(node, Made)]
    if not runs or len(runs) + len(made) != len(loop.body) or loop.trips < 2:
        return None
    size = max(1, *(run.call.size for run in runs))
    if size >= SMALL:
        return None
    walks = [_along(run.call, loop.var) for run in runs]
    if None in walks:
        return None
    own = independent(lowering, loop.body, loop.var)
    if own is None or any(lowering.layout.allocs.get(a) in {slot for _, slot in run.call.addresses} for run in runs for a in own):
        return None
    block = _block(loop.trips, (BLOCK if len(runs) > 1 else ALONE) // size)
    full, rest = divmod(loop.trips, block)
    var = Var(f"{loop.var.name}.block", 0, full - 1)
    out: list[Node] = list(made)
    for count, start in ((block, ZERO if full == 1 else Affine(0, ((var, block),))), (rest, constant(full * block))):
        if count == 0:
            continue
        calls = [_stretched(run.call, walk, loop.var, count, start) for run, walk in zip(runs, walks, strict=True) if walk is not None]
        if None in calls:
            return None
        nodes = [Run(call, run.touches, run.ranges) for call, run in zip(calls, runs, strict=True) if call is not None]
        if start.terms:
            lowering.layout.var(var)
            out.append(Loop(var, full, nodes, own))
        else:
            out += nodes
    return out


def _block(trips: int, wanted: int) -> int:
    """Iterations of a block: about `wanted`, without a rest if there is such a number near."""
    wanted = max(2, min(trips, wanted))
    near = [n for n in range(max(2, wanted // 2), min(trips, 2 * wanted) + 1) if trips % n == 0]
    return min(near, key=lambda n: abs(n - wanted)) if near else wanted


def _along(call: Call, var: Var) -> Walk | None:
    """The iteration space of a call with the iterations of a loop as the first dimension, of extent 0 as yet. None where the call is
    opaque, or depends on the loop in another way than by addresses and index values."""
    walk = space(call)
    if walk is None or call.bounds or any(e.coefficient(var) for e, _, _ in call.clips):
        return None
    steps = [e.coefficient(var) for e, _ in call.addresses]
    if not all(steps[i] for i in walk.stores):
        return None
    return replace(
        walk,
        shape=(0, *walk.shape),
        outer=walk.outer + 1,
        tiles=[(step, *s) for step, s in zip(steps, walk.tiles, strict=True)],
        preds=[(e.coefficient(var), *s) for e, s in zip(call.preds, walk.preds, strict=True)],
        indices=[(e.coefficient(var), *s) for e, s in zip(call.indices, walk.indices, strict=True)],
    )


def _stretched(call: Call, walk: Walk, var: Var, count: int, start: Affine) -> Call | None:
    """A call for `count` iterations from `start` on."""

    def at(expr: Affine) -> Affine:
        step = expr.coefficient(var)
        return Affine(expr.const, tuple(t for t in expr.terms if t[0] is not var)).add(start.scale(step)) if step else expr

    moved = call.but(
        addresses=[(at(e), slot) for e, slot in call.addresses],
        clips=[(e, axis + 1 if axis >= 0 else axis, stride) for e, axis, stride in call.clips],
        preds=[at(e) for e in call.preds],
        indices=[at(e) for e in call.indices],
    )
    return over(moved, replace(walk, shape=(count, *walk.shape[1:])))
