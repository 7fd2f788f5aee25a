"""The tree that lowering makes and passes rewrite, before it is laid out as a flat tape: runs of native calls under loops and branches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opennki.execute.calls import Call
from opennki.ir.affine import Affine, FloorDiv, Range, Var
from opennki.ir.nodes import Access, Alloc, Instr

Touch = tuple[Access, bool]  # an access, and whether it is written


@dataclass(eq=False, slots=True)
class Run:
    """A native call, and what it touches of each tensor (at least that)."""

    call: Call
    touches: list[Touch]
    ranges: dict[Var, Range]


@dataclass(eq=False, slots=True)
class Back:
    """The interpreter's step of an instruction: number `index` of the fallbacks."""

    index: int
    instr: Instr


@dataclass(eq=False, slots=True)
class Zero:
    """A tensor that starts from zero."""

    alloc: Alloc
    slot: int
    size: int


@dataclass(eq=False, slots=True)
class Made:
    """Where a tensor is made: each iteration of the loops around has one of its own."""

    alloc: Alloc


@dataclass(eq=False, slots=True)
class Forget:
    """Nothing of a watched tensor is written (see `execute.watch`)."""

    alloc: Alloc
    size: int


@dataclass(eq=False, slots=True)
class Mark:
    """A use of a watched tensor, at `base` per dimension: a write of the cells from base + ends[0] to base + ends[1], or, where `error` is
    the number of what is reported, a read that asks for the cells at base + moving * index for each index of `shape`."""

    alloc: Alloc
    cells: list[tuple[int, int]]
    base: list[Affine]
    shape: tuple[int, ...]
    moving: list[list[int]]
    ends: list[tuple[int, int]]
    error: int


@dataclass(eq=False, slots=True)
class Divide:
    """var = floor(division.of / division.by), over variables alone."""

    var: Var
    of: Affine
    division: FloorDiv


@dataclass(eq=False, slots=True)
class Loop:
    """var = 0 .. trips-1. `own`: the tensors that an iteration has for itself, where iterations are proven independent; `parallel`: they
    run on several threads."""

    var: Var
    trips: int
    body: list[Node]
    own: set[Alloc] | None = None
    parallel: bool = False


@dataclass(eq=False, slots=True)
class Branch:
    """`then` where the expression is >= 0, else `orelse`."""

    test: Affine
    then: list[Node]
    orelse: list[Node]


@dataclass(eq=False, slots=True)
class Repeat:
    """A body that runs again while the tile `cond` is not zero. counter: the slot that counts the rounds; tests: byte offset and number of
    elements of each contiguous part of the tile."""

    body: list[Node]
    cond: Access
    slot: int
    counter: int
    tests: list[tuple[Affine, int]]


Node = Any  # Run | Back | Zero | Made | Divide | Loop | Branch | Repeat (and what passes of other modules add)


def inner(node: Node) -> tuple[list[Node], ...]:
    """The lists of nodes inside a node."""
    kind = node.__class__
    if kind is Run:
        return ()
    if kind is Loop or kind is Repeat:
        return (node.body,)
    return (node.then, node.orelse) if kind is Branch else ()


def walk(body: list[Node]) -> list[Node]:
    """All nodes, outer before inner, in program order."""
    out: list[Node] = []
    _walk(body, out)
    return out


def _walk(body: list[Node], out: list[Node]) -> None:
    for node in body:
        out.append(node)
        kind = node.__class__
        if kind is Run:
            continue
        if kind is Loop or kind is Repeat:
            _walk(node.body, out)
        elif kind is Branch:
            _walk(node.then, out)
            _walk(node.orelse, out)


def work(body: list[Node]) -> int:
    """Elements that one execution of a body handles, about."""
    total = 0
    for node in body:
        kind = node.__class__
        if kind is Run:
            total += node.call.size
        elif kind is Loop:
            total += node.trips * work(node.body)
        elif kind is Branch:
            total += max(work(node.then), work(node.orelse))
        elif kind is Repeat:
            total += work(node.body)
    return total
