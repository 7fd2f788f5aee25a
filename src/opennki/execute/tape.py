"""The tree of nodes as a flat tape in memory, for C."""

from __future__ import annotations

import array as memory
import ctypes as C
import struct
from typing import TYPE_CHECKING, Any

from opennki.execute import abi
from opennki.execute.calls import Call, kept_bytes, pointer, product_scratch
from opennki.execute.nodes import Back, Branch, Divide, Forget, Loop, Mark, Node, Repeat, Run, Zero
from opennki.ir.affine import Affine, Var
from opennki.isa import dtypes

if TYPE_CHECKING:
    from opennki.execute.lower import Lowering

Op = tuple[int, int, int, int, int]  # code, a, b, c, n


class Native:
    """A tape laid out for C. Everything that the structures point to lives as long as this object."""

    def __init__(self, lowering: Lowering) -> None:
        self.layout = lowering.layout
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self.affines: list[Affine] = []
        self.tests: list[tuple[Affine, int]] = []
        self.watches: list[Mark] = []
        # after the tensors: the cells of those that are watched
        first = len(self.layout.allocs)
        self.cells = {alloc: (first + n, lowering.watch.size(alloc)) for n, alloc in enumerate(lowering.watch.cells)}
        self.body(lowering.nodes)
        self.emit(abi.OP_END)
        self.n_env = max(1, len(self.layout.vars))
        self.n_buffers = first + len(self.cells)
        self.struct, self.keep = self._structure()

    # ---- ops ----
    def emit(self, code: int, a: int = 0, b: int = 0, c: int = 0, n: int = 0) -> int:
        """Append an op; returns its place."""
        self.ops.append((code, a, b, c, n))
        return len(self.ops) - 1

    def patch(self, place: int) -> None:
        """A jump goes to what comes next."""
        code, a, _, c, n = self.ops[place]
        self.ops[place] = (code, a, len(self.ops), c, n)

    def affine(self, expr: Affine) -> int:
        """Number of an affine expression."""
        self.affines.append(expr)
        return len(self.affines) - 1

    def body(self, nodes: list[Node]) -> None:
        """The ops of a list of nodes."""
        for node in nodes:
            if isinstance(node, Run):
                self.calls.append(node.call)
                self.emit(abi.OP_RUN, len(self.calls) - 1)
            elif isinstance(node, Loop):
                slot = self.layout.var(node.var)
                start = self.emit(abi.OP_FOR, slot, c=int(node.parallel), n=node.trips)
                self.body(node.body)
                self.emit(abi.OP_NEXT, slot, start + 1, n=node.trips)
                self.patch(start)
            elif isinstance(node, Branch):
                test = self.emit(abi.OP_IF, self.affine(node.test))
                self.body(node.then)
                if node.orelse:
                    jump = self.emit(abi.OP_JUMP)
                    self.patch(test)
                    self.body(node.orelse)
                    self.patch(jump)
                else:
                    self.patch(test)
            elif isinstance(node, Divide):
                self.emit(abi.OP_DIV, self.layout.var(node.var), self.affine(node.of), n=node.division.by)
            elif isinstance(node, Zero):
                self.emit(abi.OP_ZERO, node.slot, n=node.size)
            elif isinstance(node, Forget):
                self.emit(abi.OP_ZERO, self.cells[node.alloc][0], n=node.size)
            elif isinstance(node, Mark):
                self.watches.append(node)
                self.emit(abi.OP_MARK, len(self.watches) - 1)
            elif isinstance(node, Back):
                self.emit(abi.OP_BACK, node.index)
            elif isinstance(node, Repeat):
                self.emit(abi.OP_FOR, node.counter, n=1)
                start = len(self.ops)
                self.body(node.body)
                self.emit(abi.OP_NEXT, node.counter, start, n=-1)  # counts on, and never goes back
                size = dtypes.itemsize(node.cond.dtype) + 256 * dtypes.is_float(node.cond.dtype)
                for base, count in node.tests:
                    self.tests.append((base, node.slot))
                    self.emit(abi.OP_TEST, len(self.tests) - 1, start, size, count)

    def watch(self, node: Mark, base: list[tuple[int, int, int]]) -> Any:
        """The structure of a use of a watched tensor."""
        out = abi.Watch(self.cells[node.alloc][0], node.error, len(node.shape), len(base))
        out.shape[: len(node.shape)] = node.shape
        for i, (expr, (cell, cells)) in enumerate(zip(base, node.cells, strict=True)):
            out.base[i], out.cell[i], out.cells[i] = expr, cell, cells
            if node.ends:
                out.low[i], out.high[i] = node.ends[i]
            else:
                out.moving[i][: len(node.shape)] = node.moving[i]
        return out

    # ---- memory ----
    def _structure(self) -> tuple[abi.TapeStruct, list[Any]]:
        terms: list[tuple[int, int]] = []
        slots: dict[Var, int] = self.layout.vars
        keep: list[Any] = []

        def affine(expr: Affine) -> tuple[int, int, int]:
            first = len(terms)
            terms.extend([(c, slots[a]) for a, c in expr.terms])  # type: ignore[index]
            return expr.const, first, len(terms) - first

        def array(kind: Any, items: list[Any]) -> Any:
            made = (kind * max(1, len(items)))(*items)
            keep.append(made)
            return made

        calls = bytearray(C.sizeof(abi.Call) * max(1, len(self.calls)))
        keeps: list[tuple[int, int]] = []
        # addresses of all calls in one table: a constant, the first term and (in the upper half) how many there are, a slot
        table: list[int] = []
        pointers: dict[int, int] = {}

        def kept(call: Call) -> tuple[int, int]:
            numbers = [-1, -1]
            for operand, places in enumerate(call.places):
                if places:
                    numbers[operand] = len(keeps)
                    keeps.append((places, kept_bytes(call.what, operand)))
            return numbers[0], numbers[1]

        for c in self.calls:
            for e, slot in c.addresses:
                if e.terms:
                    const, first, count = affine(e)
                    table += (const, first | count << 32, slot)
                else:
                    table += (e.const, 0, slot)
        rows = memory.array("q", table or [0])
        keep.append(rows)
        at = rows.buffer_info()[0]
        for number, c in enumerate(self.calls):
            what = pointers.get(id(c.what))
            if what is None:
                what = pointers[id(c.what)] = pointer(c.what)
                keep.append(c.what)
            others = [0, 0, 0, 0]
            if c.bounds or c.clips or c.preds or c.indices:
                made = (
                    array(abi.Bound, [(affine(e), _strides(s), *rest) for e, s, *rest in c.bounds]),
                    array(abi.Clip, [(affine(e), axis, stride) for e, axis, stride in c.clips]),
                    array(abi.AffineExpr, [affine(e) for e in c.preds]), array(abi.AffineExpr, [affine(e) for e in c.indices]),
                )  # fmt: skip
                others = [C.addressof(one) for one in made]
            rank = len(c.shape)
            _CALL.pack_into(
                calls, number * _CALL.size, c.kind, rank, what, *c.shape, *_PADS[rank], len(c.addresses), len(c.bounds), len(c.clips),
                len(c.preds), len(c.indices), c.whole, *(kept(c) if any(c.places) else (-1, -1)), at, *others,
            )  # fmt: skip
            at += len(c.addresses) * C.sizeof(abi.Address)
        ops = array(abi.OpStruct, self.ops)
        affines = array(abi.AffineExpr, [affine(e) for e in self.affines])
        tests = array(abi.Address, [(affine(e), slot) for e, slot in self.tests])
        made_calls = (abi.Call * max(1, len(self.calls))).from_buffer(calls)
        keep.append(made_calls)
        watches = array(abi.Watch, [self.watch(w, [affine(e) for e in w.base]) for w in self.watches])
        made_terms = array(abi.Term, terms)
        scratch = max([scratch_of(c) for c in self.calls], default=0)
        sizes = len(self.ops), self.n_env, self.n_buffers, scratch, len(keeps)
        struct = abi.TapeStruct(ops, made_calls, affines, made_terms, tests, watches, array(abi.Keep, keeps), *sizes)
        return struct, keep


def scratch_of(call: Call) -> int:
    """Bytes of scratch memory of a call."""
    if call.kind == abi.K_MM:
        return product_scratch(call.what)
    return int(call.what.scratch) if call.kind == abi.K_STEPS else 0


_CALL = struct.Struct("=iiQ6q8i5Q")
assert _CALL.size == C.sizeof(abi.Call) and C.sizeof(abi.Address) == 24
_PADS = [(0,) * (abi.RANK - rank) for rank in range(abi.RANK + 1)]


def _strides(values: tuple[int, ...]) -> Any:
    return (C.c_int64 * abi.RANK)(*values)
