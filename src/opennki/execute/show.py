"""A lowered kernel as text: what passes made of it, for people and for tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from opennki.execute import abi
from opennki.execute.calls import Call, operands
from opennki.execute.nodes import Back, Branch, Divide, Forget, Loop, Mark, Node, Repeat, Run, Zero
from opennki.ir.nodes import Alloc

if TYPE_CHECKING:
    from opennki.execute.lower import Lowering

KINDS = {value: name[2:].lower() for name, value in vars(abi).items() if name.startswith("K_")}
_CODES = {getattr(abi, n): n.lower() for n in ("SELECT", "PRED", "INDEX", "ROUND", "EXACT")}
_NAMES = {number: name for name, number in abi.FUNCTIONS.items()}


def text(lowering: Lowering) -> str:
    """The tree of a kernel, one line for a call, loop or branch. Offsets and strides are in bytes; `*` marks what is written."""
    names = {slot: alloc.name if alloc.kind == "param" and alloc.name else repr(alloc) for alloc, slot in lowering.layout.allocs.items()}
    return "\n".join(_lines(lowering, lowering.nodes, names, ""))


def _lines(lowering: Lowering, body: list[Node], names: dict[int, str], pad: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, Run):
            yield pad + _call(node.call, names)
        elif isinstance(node, Loop):
            own = _own(node.own) if node.parallel and node.own else ""
            yield f"{pad}for {node.var} in {node.trips}:{' parallel' if node.parallel else ''}{own}"
            yield from _lines(lowering, node.body, names, pad + "  ")
        elif isinstance(node, Branch):
            yield f"{pad}if {node.test} >= 0:"
            yield from _lines(lowering, node.then, names, pad + "  ")
            if node.orelse:
                yield f"{pad}else:"
                yield from _lines(lowering, node.orelse, names, pad + "  ")
        elif isinstance(node, Divide):
            yield f"{pad}{node.var} = ({node.of}) // {node.division.by}"
        elif isinstance(node, Forget):
            yield f"{pad}unwritten {node.alloc}"
        elif isinstance(node, Mark):
            places = ", ".join(str(b) for b in node.base)
            yield f"{pad}{'ask' if node.error else 'mark'} {node.alloc}@({places}) in cells of {tuple(c for c, _ in node.cells)}"
        elif isinstance(node, Zero):
            yield f"{pad}zero {names[node.slot]}"
        elif isinstance(node, Back):
            yield f"{pad}interpret {node.instr.op}: {lowering.fallbacks[node.index][2]}"
        elif isinstance(node, Repeat):
            yield f"{pad}repeat while {names[node.slot]}:"
            yield from _lines(lowering, node.body, names, pad + "  ")


def _own(own: set[Alloc]) -> str:
    return ", of each thread: " + " ".join(sorted(map(repr, own)))


def _call(call: Call, names: dict[int, str]) -> str:
    ways = {o.address: o for o in operands(call) or ()}
    parts = [f"{KINDS[call.kind]} {list(call.shape)}"]
    if call.kind == abi.K_EW:
        what = call.what.structure
        used = [what.uops[i] for i in range(what.n_uops)]
        done = [_NAMES[u.fn] if u.code == abi.FUNC else f"fold {_NAMES[u.fn]}" if u.code in (abi.FOLD, abi.TREE) else _CODES[u.code]
                for u in used if u.code in (abi.FUNC, abi.FOLD, abi.TREE, *_CODES)]  # fmt: skip
        parts.append(f"({', '.join(done)})" if done else "(convert)")
    if call.kind == abi.K_MM:
        blocks = f" of {call.what.blocks} by {[call.what.s_block, call.what.m_block]}" if call.what.blocks > 1 else ""
        parts[0] += blocks + ("", " (added)", " (added to 0)")[call.what.accumulate]
    for n, (offset, slot) in enumerate(call.addresses):
        way = ways.get(n)
        parts.append(f"{names[slot]}{'*' if way and way.written else ''}@{offset}" + (f" {list(way.strides)}" if way else ""))
    for label, items in (("check", call.bounds), ("where", call.clips), ("predicates", call.preds), ("indices", call.indices)):
        if items:
            parts.append(f"{label} " + ", ".join(str(i[0] if isinstance(i, tuple) else i) for i in items))
    return " ".join([*parts[:1], "; ".join(parts[1:])] if call.kind != abi.K_EW else [parts[0], parts[1], "; ".join(parts[2:])])
