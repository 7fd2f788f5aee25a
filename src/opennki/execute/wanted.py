"""What is wanted of a product: where a mask throws its results away, they are not computed.

Causal attention multiplies a block of queries by a block of keys and then selects, by a predicate, what is not in the future. The predicate
is affine, so the product can tell which of its blocks nobody wants. What is left there is never looked at: the product's tile has one
reader, whose every use of an element is behind the selection.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING, Any

from opennki.execute import abi
from opennki.execute.calls import redescribed, space
from opennki.execute.nodes import Divide, Node, Run, inner
from opennki.execute.parallel import used
from opennki.ir.affine import Affine

if TYPE_CHECKING:
    from opennki.execute.lower import Lowering

NEAR = 4  # nodes after a product among which its reader is looked for
PREDICATES = 3  # of the selections of a program, at most


def leave_out(lowering: Lowering, body: list[Node]) -> None:
    """Tell products what is wanted of them, in a tree of nodes."""
    for place, node in enumerate(body):
        for part in () if node.__class__ is Run else inner(node):
            leave_out(lowering, part)
        if isinstance(node, Run) and node.call.kind == abi.K_MM and node.call.overwrites:
            reader = _reader(lowering, body, place)
            if reader is not None:
                _tell(node, reader)


def _reader(lowering: Lowering, body: list[Node], place: int) -> Run | None:
    """The elementwise program that alone reads the result of a product, if it selects by predicates that can be known before."""
    target = next((access.alloc for access, written in body[place].touches if written), None)
    if target is None or not (target.on_chip and target.kind == "local"):
        return None
    computed = set()
    for node in body[place + 1 : place + 1 + NEAR]:
        if isinstance(node, Divide):
            computed.add(node.var)
        elif target in used(node):
            good = isinstance(node, Run) and node.call.kind == abi.K_EW and bool(node.call.preds)
            if not good or any(atom in computed for e in node.call.preds for atom, _ in e.terms):
                return None
            return node if lowering.uses.get(target) == 2 else None  # type: ignore[no-any-return]
    return None


def _tell(node: Run, reader: Run) -> None:
    call, (offset, slot), walk = node.call, node.call.addresses[2], space(reader.call)
    at = [(n, e) for n, (e, one) in enumerate(reader.call.addresses) if one == slot]
    if walk is None or reader.call.clips or reader.call.bounds or len(at) != 1 or not _same(at[0][1], offset):
        return
    tile = at[0][0]
    dims = [d for d, n in enumerate(walk.shape) if n > 1]
    if [(walk.shape[d], walk.tiles[tile][d]) for d in dims] != list(zip((call.what.M, call.what.N), call.what.d_stride, strict=True)):
        return
    conditions = unread(reader.call.what.structure, tile)
    if not conditions:
        return
    where = (abi.Where * abi.WHERES)()
    for made, (p, holds) in zip(where, conditions, strict=False):
        made.m, made.n, made.holds = walk.preds[p][dims[0]], walk.preds[p][dims[1]], holds
    node.call = redescribed(call, n_where=len(conditions), where=where)
    node.call.preds = [reader.call.preds[p] for p, _ in conditions]


def _same(a: Affine, b: Affine) -> bool:
    return (a.const, a.terms) == (b.const, b.terms)


def unread(program: Any, tile: int) -> list[tuple[int, bool]]:
    """Predicates, and whether they hold, of which all together say that a program needs no element of a tile; [] where nothing does.
    program: an abi.Elementwise."""
    uops = program.uops[: program.n_uops]
    chosen = _selections(uops)
    preds = sorted({p for p in chosen.values() if p is not None})
    if not preds or len(preds) > PREDICATES:
        return []
    cases = [dict(zip(preds, truth, strict=True)) for truth in product((False, True), repeat=len(preds))]
    always = (1 << len(cases)) - 1  # a set of cases, as bits
    true_in = {p: sum(1 << i for i, case in enumerate(cases) if case[p]) for p in preds}
    needed = _needed(uops, chosen, true_in, always, tile)
    for count in range(1, abi.WHERES + 1):
        for some in combinations(preds, count):
            for truth in product((False, True), repeat=count):
                inside = always
                for p, holds in zip(some, truth, strict=True):
                    inside &= true_in[p] if holds else always & ~true_in[p]
                if not inside & needed:
                    return list(zip(some, truth, strict=True))
    return []


def _selections(uops: list[Any]) -> dict[int, int | None]:
    """Of each selection, and each store with a mask, the predicate that decides; None where it is not one alone."""
    made: dict[int, int | None] = {}
    chosen: dict[int, int | None] = {}
    for n, op in enumerate(uops):
        if op.code == abi.SELECT or (op.code in (abi.STORE, abi.STORE_RAW) and op.c >= 0):
            chosen[n] = made.get(op.c)
        if op.code not in (abi.STORE, abi.STORE_RAW, abi.KEEP):
            made[op.d] = op.a if op.code == abi.PRED else None
    return chosen


def _needed(uops: list[Any], chosen: dict[int, int | None], true_in: dict[int, int], always: int, tile: int) -> int:
    """The cases in which a program needs the elements of a tile; backwards, from what it stores and folds."""
    need: dict[int, int] = {}  # register -> cases
    found = 0

    def reads(register: int, cases: int) -> None:
        if register >= 0:
            need[register] = need.get(register, 0) | cases

    for n in range(len(uops) - 1, -1, -1):
        op = uops[n]
        code = op.code
        if code in (abi.STORE, abi.STORE_RAW):
            p = chosen.get(n)
            reads(op.a, always if p is None else true_in[p])
            reads(op.c, always)
        elif code in (abi.FOLD, abi.KEEP):  # what a fold makes is there from the end of its phase on
            reads(op.a, always)
        else:
            cases = need.pop(op.d, 0)
            if code in (abi.LOAD, abi.LOAD_RAW):
                found |= cases if op.a == tile else 0
            elif code == abi.TREE:
                found |= always if op.a <= tile < op.a + op.b else 0
            elif code == abi.SELECT:
                p = chosen[n]
                yes = always if p is None else true_in[p]
                reads(op.a, cases & yes)
                reads(op.b, cases & (always if p is None else always & ~yes))
                reads(op.c, cases)
            elif code in (abi.FUNC, abi.ROUND, abi.EXACT):
                reads(op.a, cases)
                if code != abi.ROUND:
                    reads(op.b, cases)
            elif code not in (abi.CONST, abi.PRED, abi.INDEX, abi.KEPT):
                return always
    return found
