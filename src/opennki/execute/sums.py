"""Products that are added up, as one call: a loop over blocks of the contraction, and the zeros that it starts from.

A kernel contracts over more rows than there are partitions by a loop whose products are added to one tile in PSUM, which is cleared before.
Native code adds up the blocks of one call where results are made, rather than in a tile that each of them has to read and write. The
order of the additions stays, so no bit changes.
"""

from __future__ import annotations

import ctypes as C
from typing import TYPE_CHECKING

from opennki.execute import abi
from opennki.execute.calls import Call, redescribed, space
from opennki.execute.nodes import Loop, Made, Node, Run, inner
from opennki.execute.parallel import used
from opennki.execute.shapes import joined
from opennki.ir.affine import Affine, Var

if TYPE_CHECKING:
    from opennki.execute.lower import Lowering

MOST = 4096  # blocks of a call
BACK = 8  # nodes that are looked at for zeros


def add_up(lowering: Lowering, body: list[Node]) -> None:
    """Put together what adds up products, in a tree of nodes."""
    for place, node in enumerate(body):
        for part in () if node.__class__ is Run else inner(node):
            add_up(lowering, part)
        if isinstance(node, Loop):
            body[place] = _one_call(node) or node
    gone: set[int] = set()
    for place, node in enumerate(body):
        if isinstance(node, Run) and node.call.kind == abi.K_MM and node.call.what.accumulate == abi.ADDS_TO_RESULT:
            zeros = _zeros(body, place, gone)
            if zeros is not None:
                gone.add(zeros)
                node.call = redescribed(node.call, accumulate=abi.ADDS_TO_ZERO)
    if gone:
        body[:] = [node for place, node in enumerate(body) if place not in gone]


def _one_call(loop: Loop) -> Run | None:
    """The products of a loop as one call, where it does nothing else."""
    run = loop.body[-1] if loop.body else None
    if not isinstance(run, Run) or not all(isinstance(node, Made) for node in loop.body[:-1]):
        return None
    call = run.call
    if call.kind != abi.K_MM or call.what.accumulate != abi.ADDS_TO_RESULT or call.bounds or call.clips:
        return None
    blocks, (stationary, moving, (result, slot)) = max(1, call.what.blocks), call.addresses
    if result.coefficient(loop.var) or slot in (stationary[1], moving[1]) or not 1 <= loop.trips * blocks <= MOST:
        return None
    steps = [e.coefficient(loop.var) for e, _ in (stationary, moving)]
    if blocks > 1 and steps != [blocks * call.what.s_block, blocks * call.what.m_block]:
        return None
    if blocks == 1:
        call = redescribed(call, s_block=steps[0], m_block=steps[1])
    call = redescribed(call, blocks=loop.trips * blocks)
    call.addresses = [(_at_first(e, loop.var), of) for e, of in call.addresses]
    run.call = call
    return run


def _at_first(expr: Affine, var: Var) -> Affine:
    return Affine(expr.const, tuple(term for term in expr.terms if term[0] is not var))


def _zeros(body: list[Node], place: int, gone: set[int]) -> int | None:
    """The place of a call that clears just what the call at `place` adds to, with nothing in between that uses it."""
    run = body[place]
    call = run.call
    address, extents = call.addresses[2], (call.what.M, call.what.N)
    alloc = next((access.alloc for access, written in run.touches if written), None)
    for before in range(place - 1, max(-1, place - 1 - BACK), -1):
        node = body[before]
        if before in gone:
            continue
        if isinstance(node, Run) and len(node.call.addresses) == 1 and _same(node.call.addresses[0], address):
            clears = _cleared(node.call)
            return before if clears is not None and clears == _dims(extents, tuple(call.what.d_stride)) else None
        if isinstance(node, Run) and address[1] in {slot for _, slot in node.call.addresses}:
            return None
        if not isinstance(node, (Run, Made)) or (isinstance(node, Made) and node.alloc is alloc):
            return None
        if alloc is None or alloc in used(node):
            return None
    return None


def _same(a: tuple[Affine, int], b: tuple[Affine, int]) -> bool:
    return a[1] == b[1] and (a[0].const, a[0].terms) == (b[0].const, b[0].terms)


def _cleared(call: Call) -> list[tuple[int, int]] | None:
    """How a call that does nothing but store the float32 0 goes over memory."""
    if call.kind != abi.K_EW or call.bounds or call.clips or call.preds or call.indices:
        return None
    what = call.what.structure
    if what.n_uops != 2 or what.n_tiles != 1 or what.tiles[0].dtype != 0:
        return None
    number, store, walk = what.uops[0], what.uops[1], space(call)
    if number.code != abi.CONST or store.code != abi.STORE or store.a != number.d or store.c >= 0 or walk is None:
        return None
    return _dims(walk.shape, walk.tiles[0]) if bytes(C.c_float(number.imm)) == bytes(4) else None


def _dims(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Extents and strides of a walk, whatever its order and however its dimensions are joined."""
    dims = sorted(((n, s) for n, s in zip(shape, strides, strict=True) if n > 1), key=lambda d: -abs(d[1]))
    made, (joint,) = joined(tuple(n for n, _ in dims), [tuple(s for _, s in dims)])
    return [(n, s) for n, s in zip(made, joint, strict=True) if n > 1]
